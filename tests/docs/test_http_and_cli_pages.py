"""docs/http.md and docs/cli.md name every route, field, verb and option that there is."""

from __future__ import annotations

from pathlib import Path

import pytest

from elasticd_agent.cli import job_commands as verbs
from elasticd_agent.node.api import views as showing
from elasticd_agent.node.api.progress import JobTimeline
from elasticd_agent.node.api.routes import _ROUTES
from elasticd_agent.node.records import NodeStatus, Submission
from elasticd_agent.node.scheduler.policy import ClusterView

DOCS = Path(__file__).parents[2] / "docs"


def test_every_route_is_described() -> None:
    text = (DOCS / "http.md").read_text()
    for route, methods in _ROUTES.items():
        path = "/" + "/".join(route).replace("jobs/*", "jobs/JOB").replace("nodes/*", "nodes/NODE")
        if "here" not in route:
            assert all(f"`{method} {path}`" in text for method in methods), path


def test_every_field_is_described() -> None:
    text = (DOCS / "http.md").read_text()
    wants = Submission("j", 1, "{}", 1, 1, 1, 1)
    card = NodeStatus("a", "i", 1)
    rows = [showing.job(ClusterView(), wants, 0.0), showing.node("a", card, None, ClusterView()), vars_of_progress()]
    assert not {name for row in rows for name in row if f"`{name}`" not in text}


def vars_of_progress() -> dict[str, object]:
    from elasticd_agent.node.api.local import _history_row

    return _history_row(JobTimeline(), 0.0)


@pytest.mark.parametrize("name", [*verbs.AGENT_COMMANDS, "dump", "explain"])
def test_every_verb_and_its_options_are_described(name: str) -> None:
    text = (DOCS / "cli.md").read_text()
    assert f"elasticd {name}" in text
    options = {
        option for action in verbs._parser(name)._actions for option in action.option_strings if option[:2] == "--"
    }
    assert not {option for option in options - {"--help", "--follow"} if option not in text}
