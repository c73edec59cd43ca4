"""docs/http.md and docs/cli.md name every route, field, verb and option that there is."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

import pytest

from elasticd_agent.cli import job_commands as verbs
from elasticd_agent.node.api.routes import _ROUTES
from elasticd_agent.node.api.schema import JobProgress, JobStatus, NodeSummary, RankProgress, RoundStatus

DOCS = Path(__file__).parents[2] / "docs"


def test_every_route_is_described() -> None:
    text = (DOCS / "http.md").read_text()
    for route, methods in _ROUTES.items():
        path = "/" + "/".join(route).replace("jobs/*", "jobs/JOB").replace("nodes/*", "nodes/NODE")
        if "local" not in route:
            assert all(f"`{method} {path}`" in text for method in methods), path


def test_every_field_is_described() -> None:
    text = (DOCS / "http.md").read_text()
    answers = (JobStatus, JobProgress, NodeSummary, RoundStatus, RankProgress)
    names = {field.name for answer in answers for field in fields(answer)} - {"unknown"}
    assert not {name for name in names if f"`{name}`" not in text}


@pytest.mark.parametrize("name", [*verbs.AGENT_COMMANDS, "dump", "explain"])
def test_every_verb_and_its_options_are_described(name: str) -> None:
    text = (DOCS / "cli.md").read_text()
    assert f"elasticd {name}" in text
    options = {
        option for action in verbs._parser(name)._actions for option in action.option_strings if option[:2] == "--"
    }
    assert not {option for option in options - {"--help", "--follow"} if option not in text}
