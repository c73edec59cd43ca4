"""Nodes of one job that were not asked alike: what each of them may choose for itself, and what is refused."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable
from typing import Any

from tests.faults.job import Job
from tests.faults.nodes import Nodes

StartNodes = Callable[[str], Nodes]


def told(agent: Job, rank: int) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(agent.file(f"told-{rank}"))
    return found


def test_roles_and_arguments_are_each_nodes_own(nodes: StartNodes) -> None:
    both = nodes("2")
    trains = both.agent("a", "tells.py", "--lr", "0.1", flags=["--role", "trainer"], workers="2")
    evaluates = both.agent("b", "tells.py", "--every", "5", flags=["--role", "eval"])
    first = 1 if evaluates.event("round_published")["nodes"][0] == "b" else 0  # whose record was there first
    assert [told(trains, first + rank) for rank in (0, 1)] == [
        {
            "GROUP_RANK": str(first),
            "LOCAL_RANK": str(local),
            "WORLD_SIZE": "3",
            "ROLE_NAME": "trainer",
            "ROLE_RANK": str(local),
            "ROLE_WORLD_SIZE": "2",
            "args": [str(local), "--lr", "0.1"],
        }
        for local in (0, 1)
    ]
    there = told(evaluates, 0 if first else 2)
    assert {name: there[name] for name in ("ROLE_NAME", "ROLE_RANK", "ROLE_WORLD_SIZE", "args")} == {
        "ROLE_NAME": "eval",
        "ROLE_RANK": "0",
        "ROLE_WORLD_SIZE": "1",
        "args": ["0", "--every", "5"],
    }
    assert both.enough() == [0, 0]


def test_all_are_interrupted_and_the_job_ends_as_by_that_signal(nodes: StartNodes) -> None:
    both = nodes("2")
    agents = [both.agent(name, "tells.py") for name in "ab"]
    for agent in agents:
        agent.event("group_started")
    for agent in agents:
        agent.process.send_signal(signal.SIGINT)
    assert [agent.wait() for agent in agents] == [130, 130]
    ends = [agent.event("job_ended") for agent in agents]
    assert {(end["outcome"], end["exit_code"]) for end in ends} == {("stopped", 130)}
