"""docs/http.md and docs/cli.md name every route, field, verb and option that there is."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from elasticd_agent.cli.main import AGENT_COMMANDS
from elasticd_agent.telemetry.metrics_server import HealthProbeResult, MonitoringPages
from elasticd_daemon.api.routes import ApiRoutes
from elasticd_daemon.api.schema import JobProgress, JobStatus, NodeSummary, RankProgress, RoundStatus
from elasticd_daemon.api.service import JobService
from elasticd_daemon.cli import job_commands as verbs

DOCS = Path(__file__).parents[2] / "docs"


def test_http_page_has_every_route() -> None:
    text = (DOCS / "http.md").read_text()
    pages = MonitoringPages(bytes, dict, lambda: HealthProbeResult(True, ""), lambda: HealthProbeResult(True, ""))
    routes = ApiRoutes(cast(JobService, SimpleNamespace()), pages).table.routes
    public = [route for route in routes if "/v1/local" not in route]
    shown = [route.replace("jobs/*", "jobs/JOB").replace("nodes/*", "nodes/NODE") for route in public]
    assert not [route for route in shown if f"`{route}`" not in text]


def test_http_page_has_every_field() -> None:
    text = (DOCS / "http.md").read_text()
    answers = (JobStatus, JobProgress, NodeSummary, RoundStatus, RankProgress)
    names = {field.name for answer in answers for field in fields(answer)} - {"unknown"}
    assert not {name for name in names if f"`{name}`" not in text}


@pytest.mark.parametrize("name", [*AGENT_COMMANDS, "dump", "explain"])
def test_cli_page_has_every_verb_and_option(name: str) -> None:
    text = (DOCS / "cli.md").read_text()
    assert f"elasticd {name}" in text
    options = set(re.findall(r"(?<!\S)--[a-z][a-z-]*", verbs.build_parser(name).format_help()))
    assert "--help" in options
    assert not {option for option in options - {"--help", "--follow"} if option not in text}
