"""docs/protocol.md names every key, and cites tests that exist."""

from __future__ import annotations

import re
from pathlib import Path

from elasticd_agent.model.keys import Keys
from elasticd_daemon import keys as service

REPOSITORY = Path(__file__).parents[2]
PAGE = (REPOSITORY / "docs" / "protocol.md").read_text()


def test_every_key_is_listed() -> None:
    keys = Keys("JOB")
    job = [keys.spec, keys.planner, keys.round, keys.ended, keys.pause, keys.hang_report_request, keys.node("NODE")]
    job += [keys.master(7), keys.failures(7) + "NODE", keys.done(7) + "NODE", keys.hang_reports(7) + "NODE"]
    names = [key.removeprefix("/elasticd/v1/jobs/JOB/").replace("/7", "/N") for key in job]
    values = [
        v for n, v in vars(service).items() if n.isupper() and isinstance(v, str) and v.startswith("/elasticd/v1/")
    ]
    names += [value.removeprefix("/elasticd/v1/").rstrip("/") for value in values]
    assert [name for name in names if not re.search(rf"`{name}(/\w+)?`", PAGE)] == []


def test_cited_tests_exist() -> None:
    cited = re.findall(r"`(tests/[\w/.]+)(?:::(\w+))?`", PAGE)
    assert len(cited) >= 10
    for path, name in cited:
        assert (REPOSITORY / path).exists(), path
        text = (REPOSITORY / path).read_text()
        assert not name or re.search(rf"^(def {name}\(|{name} = )", text, re.M), f"{path}::{name}"
