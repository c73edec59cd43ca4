"""docs/operations.md: a runbook with a command in each section, and files that exist."""

from __future__ import annotations

import re
from pathlib import Path

from docs.generate.metrics import max_series
from elasticd_agent.cli.main import AGENT_COMMANDS
from tests.docs.test_commands import typed

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "operations.md").read_text()


def test_page_names_every_command() -> None:
    names = {*AGENT_COMMANDS, "dump", "explain", "doctor", "config"}
    assert names - set(re.findall(r"elasticd ([a-z]+)\b", PAGE)) == set()


def test_number_of_series_is_that_of_the_metrics() -> None:
    assert f"at most {max_series(8)} series for a job with 8 ranks" in PAGE


def test_files_to_install_exist() -> None:
    for line in typed(PAGE):
        for word in re.findall(r"(?<![\w./])(?:deploy|examples|tests)/[\w./*-]+", line):
            assert list(ROOT.glob(word)), word


def test_runbook_sections_are_complete() -> None:
    _, _, runbook = PAGE.partition("\n# Runbook\n")
    sections = re.split(r"^## ", runbook, flags=re.MULTILINE)[1:]
    assert len(sections) > 13
    for section in sections:
        name, _, body = section.partition("\n")
        said = [word for word in ("**Means**", "**elasticd has**", "**Do", "**Escalate**") if word not in body]
        assert not said, f"{name}: {said}"
        assert "elasticd " in "".join(re.findall(r"```(.*?)```", body, re.DOTALL)), f"{name}: no command to type"
