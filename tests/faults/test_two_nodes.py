"""Nodes of one job that were not asked alike: what each of them may choose for itself, and what is refused."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.etcd import etcd_servers
from tests.faults.job import Job, until
from tests.faults.nodes import Nodes, StartJob

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


@pytest.mark.system
def test_joiner_whose_preload_takes_long_is_not_waited_for(nodes: StartNodes, tmp_path: Path) -> None:
    """It is left out of the round after a crash, and taken into the first one after its launcher is ready."""
    (tmp_path / "slow.py").write_text(
        f"import pathlib, time\nwhile not pathlib.Path({str(tmp_path / 'go')!r}).exists():\n    time.sleep(0.01)\n"
    )
    both = nodes("1:2")
    trains = both.agent("a", "train.py", "100000", warm=True)
    trains.event("first_step", round=1)
    joins = both.agent("b", "train.py", "100000", flags=["--preload", "slow"], path=tmp_path, warm=True)
    until(lambda: both.registered("b", seen_round=1), "the joiner's record")
    trains.kill(0, 1)
    second = trains.event("round_published", round=2)
    assert second["nodes"] == ["a"]
    trains.event("first_step", round=2)
    assert not joins.events("group_started")
    (tmp_path / "go").touch()
    until(lambda: both.registered("b", warm=1), "the joiner is warm")
    trains.kill(0, 2)
    assert trains.event("round_published", round=3)["nodes"] == ["a", "b"]
    trains.event("first_step", round=3)


@pytest.mark.system
def test_store_restored_from_a_backup_costs_no_round(job: StartJob) -> None:
    """The nodes' records of the first round are in it; they write those of the second one again."""
    with etcd_servers() as etcd:
        both = Nodes(job, etcd, "2")
        agents = {name: both.agent(name, "tells.py") for name in "ab"}
        both.wait_for_start("ab", 1)
        etcd.back_up()
        first = agents[agents["a"].event("round_published")["nodes"][0]]
        first.kill(0, 1)
        both.wait_for_start("ab", 2)
        etcd.restart(restored=True)
        both.wait_for_start("ab", 2)
        first.kill(0, 2)
        assert first.event("round_published", round=3)["reason"].startswith("rank 0 was killed")


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


@pytest.mark.system
def test_stopped_job_says_where_the_next_run_resumes(nodes: StartNodes, tmp_path: Path) -> None:
    """The node without rank 0 says nothing: it knows only the checkpoint from which the second run began."""
    flags = ["--checkpoint-dir", str(tmp_path / "checkpoints")]
    for _ in range(2):
        both = nodes("2")
        agents = [both.agent(name, "resume.py", "--steps", "100000", flags=flags, warm=True) for name in "ab"]
        first = until(lambda agents=agents: [a for a in agents if len(a.steps()) > 5], "some steps of rank 0")[0]
        for agent in agents:
            agent.process.send_signal(signal.SIGTERM)
        assert [agent.wait() for agent in agents] == [128 + signal.SIGTERM] * 2
        said = {agent: agent.event("job_ended", outcome="stopped")["reason"].split("; ")[-1] for agent in agents}
        last = first.steps()[-1][1]
        assert said.pop(first) == f"the next run resumes from step {last}"
        assert not any("the next run" in other for other in said.values())


@pytest.mark.system
@pytest.mark.parametrize("rank", [0, 1])
def test_node_that_leaves_too_few_others_costs_no_step(nodes: StartNodes, tmp_path: Path, rank: int) -> None:
    """No rank can save at a fault: rank 0 saves before the time of the leaving node is over, and all wait."""
    both, train = nodes("2"), ("resume.py", "--steps", "100000", "--every", "1000000", "--ballast", "1")
    flags = ["--checkpoint-dir", str(tmp_path / "checkpoints"), "--shutdown-timeout", "20"]
    agents = {name: both.agent(name, *train, flags=flags, warm=True) for name in "ab"}
    order = agents["a"].event("round_published")["nodes"]
    leaves, stays = agents[order[rank]], agents[order[1 - rank]]
    leaves.step(5, rank=rank)
    leaves.process.send_signal(signal.SIGTERM)
    assert leaves.wait() == 128 + signal.SIGTERM
    last = leaves.steps(rank)[-1][1] + 1  # its line follows session.step(), in which it waited
    replaces = both.agent("c", *train, flags=flags, warm=True)
    found = until(lambda: [*stays.events("resumed", round=2), *replaces.events("resumed", round=2)], "the next round")
    assert [event["step"] for event in found] == [last]
    if rank == 1:  # the leader stays, and has read why the other node leaves
        assert f"{order[1]} leaves: SIGTERM; c joined" in stays.event("round_published", round=2)["reason"]
