"""Faults of single nodes, frozen and replaced; the leader's during another loss; and one end that all agents tell."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.faults.job import until
from tests.multihost.cluster import Agent, Cluster
from tests.multihost.conftest import StartTraining

pytestmark = pytest.mark.system


def test_frozen_node_is_left_out_and_joins_again(training: StartTraining) -> None:
    cluster = training(resumes=True)
    nodes = cluster.round(1)["nodes"]
    frozen = cluster.agent(nodes[0])
    before = cluster.worker(0, round=1)[1]
    frozen.host.freeze()
    assert state_of(before) == "T"
    without = cluster.round_of(*nodes[1:], after=1)
    assert nodes[0] in without["reason"]
    cluster.trains(without["round"])
    assert state_of(before) == "T"
    frozen.host.thaw()
    back = cluster.round_of(*nodes, after=without["round"])
    cluster.trains(back["round"])
    # it has seen what it missed, and nothing of its old round is left
    gone = frozen.event("group_ended", round=1)
    assert gone["mono"] < frozen.event("group_started", round=back["round"])["mono"]
    assert frozen.running
    cluster.finish()


@pytest.mark.parametrize("which", [0, -1])
def test_killed_agent_is_back_under_its_id(training: StartTraining, which: int) -> None:
    cluster = training(resumes=True)
    nodes = cluster.round(1)["nodes"]
    again = cluster.replace_agent(nodes[which])
    back = cluster.round_of(*nodes, after=1)
    cluster.trains(back["round"])
    assert again.event("group_started", round=back["round"])["ranks"]
    cluster.finish()


def test_leader_is_killed_during_another_loss(training: StartTraining) -> None:
    """Its successor finds both losses."""
    cluster = training(hosts=4)
    planner = who_plans(cluster)
    lost = next(node for node in cluster.round(1)["nodes"] if node != planner)
    cluster.kill_node(lost)
    cluster.kill_node(planner)
    left = [node for node in cluster.round(1)["nodes"] if node not in (planner, lost)]
    cluster.trains(cluster.round_of(*left, after=1)["round"])
    cluster.finish()


def test_agents_report_the_same_success(training: StartTraining) -> None:
    cluster = training()
    cluster.finish()
    words = {agent.node: agent.event("job_ended")["reason"] for agent in cluster.agents}
    assert set(words.values()) == {"3 workers ended with code 0 in round 1"}, words
    assert len({last_line(agent) for agent in cluster.agents}) == 1
    assert {event["outcome"] for event in cluster.events("job_ended")} == {"succeeded"}


def who_plans(cluster: Cluster) -> str:
    found = until(lambda: cluster.stored("planner"), "a planner")
    return str(found["id"])


def last_line(agent: Agent) -> str:
    """What it told its user last, without the time."""
    said = [line for line in agent.err.splitlines() if "elasticd[" in line]
    return said[-1].partition("elasticd[")[2]


def state_of(pid: int) -> str:
    return Path("/proc", str(pid), "stat").read_text().rpartition(")")[2].split()[0]
