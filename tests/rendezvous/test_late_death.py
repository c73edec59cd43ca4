"""Nodes that die while a round is being planned, or with the leader, cost one round instead of two."""

from __future__ import annotations

from elasticd_agent.model.job import Policy
from elasticd_agent.rendezvous.view import Requirements
from tests.scenarios.cluster import Cluster


def running(*names: str) -> Cluster:
    cluster = Cluster(Requirements(1, 1, 2, len(names), 5.0), Policy())
    for name in names:
        cluster.start(name)
        cluster.wait(0.01)
    cluster.wait(10.0)
    assert max(cluster.rounds) == 1
    assert cluster.nodes[names[0]].member.leads
    return cluster


def members(cluster: Cluster, number: int) -> list[str]:
    return [m.node for m in cluster.rounds[number].members]


def test_agent_that_dies_after_its_workers_is_left_out() -> None:
    """It answered the first probe, and is probed once more before the next round is published."""
    cluster = running("a", "b", "c")
    doomed = cluster.nodes["c"]
    doomed.member.report_failure = lambda failure, now: None  # type: ignore[method-assign]  # has no time for it
    cluster.kill("c")
    doomed.dead, doomed.partition.store = False, True
    cluster.wait(0.1)  # the others have lost their peers, and c's agent has answered the planner's knock
    assert max(cluster.rounds) == 1
    doomed.dead = True
    cluster.wait(0.3)
    assert members(cluster, 2) == ["a", "b"]
    cluster.wait(10.0)
    assert max(cluster.rounds) == 2


def test_member_that_dies_with_the_leader_is_left_out() -> None:
    cluster = running("a", "b", "c", "d")
    cluster.kill("a")
    cluster.kill("c")
    cluster.wait(0.6)
    assert members(cluster, 2) == ["b", "d"]
    cluster.wait(10.0)
    assert max(cluster.rounds) == 2
