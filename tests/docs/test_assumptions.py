"""docs/assumptions.md quotes the log, and names metrics, events and options: all of them exist."""

from __future__ import annotations

import re
from pathlib import Path

from elasticd_agent.config.run_model import POLICY_FIELDS
from elasticd_agent.model.job import Policy

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "assumptions.md").read_text()
FOLDERS = ("agents/elasticd_agent", "agents/elasticd_daemon", "elasticd")
CODE = "\n".join(path.read_text() for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py")))
NOT_OURS = {"quotes", "Exactly once", "out of memory", "No space left on device"}


def test_quotes_of_assumptions_are_in_the_code() -> None:
    said = re.sub(r'"\s*\n\s*f?"', "", CODE)  # sentences are often two literals
    quotes = set(re.findall(r"“([^”]+)”", PAGE)) - NOT_OURS
    assert len(quotes) > 15
    assert {quote for quote in quotes if quote not in said} == set()


def test_metrics_of_assumptions_exist() -> None:
    told = (ROOT / "docs" / "metrics.md").read_text() + (ROOT / "docs" / "node-metrics.md").read_text()
    named = set(re.findall(r"`(elasticd_\w+)", PAGE))
    assert len(named) > 10
    assert {name for name in named if f"`{name}`" not in told} == set()


def test_events_of_assumptions_exist() -> None:
    named = set(re.findall(r"the event `(\w+)`", PAGE))
    assert len(named) > 3
    assert {name for name in named if f"\n### {name}\n" not in (ROOT / "docs" / "events.md").read_text()} == set()


def test_times_of_assumptions_are_the_defaults() -> None:
    policy, usual = Policy(), {"lease": 3, "store_timeout": 0.9, "store_away": 300, "adopt_timeout": 60}
    assert {name: getattr(policy, POLICY_FIELDS[name]) for name in usual} == usual
    for words in ("`lease` (3 s)", "`store_timeout` (0.9 s)", "`store_away` (5 min)", "`adopt_timeout` (60 s)"):
        assert words in PAGE
    keys = (ROOT / "docs" / "agent.md").read_text()
    assert all(f"\n| `{key}` |" in keys for key in ("keep_ended", "adopt_timeout", "local_addr", "lease", "renewal"))
