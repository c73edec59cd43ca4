"""A broken line is a reason to knock, and nothing more."""

from __future__ import annotations

from elasticd_agent.model.job import Policy
from elasticd_agent.rendezvous.view import Requirements
from tests.scenarios.cluster import Cluster


def three() -> Cluster:
    cluster = Cluster(Requirements(1, 1, 2, 3, 5.0), Policy())
    for name in ("a", "b", "c"):
        cluster.start(name)
        cluster.wait(0.01)
    cluster.wait(3.0)
    assert max(cluster.rounds) == 1
    return cluster


def die_without_a_word(cluster: Cluster, name: str) -> None:
    """As with NCCL: its workers' peers wait, and nothing tells them."""
    node = cluster.nodes[name]
    node.dead = node.partition.store = True


def test_a_killed_member_is_replaced_at_once_though_nobody_failed() -> None:
    cluster = three()
    die_without_a_word(cluster, "b")
    cluster.nodes["a"].member.peer_disconnected("b")
    cluster.wait(0.2)
    assert [m.node for m in cluster.rounds[2].members] == ["a", "c"]
    assert "b is lost: the port of its agent is closed" in cluster.rounds[2].reason


def test_a_killed_planner_is_succeeded_at_once_though_nobody_failed() -> None:
    cluster = three()
    die_without_a_word(cluster, "a")
    for name in ("b", "c"):
        cluster.nodes[name].member.peer_disconnected("a")
    cluster.wait(0.3)
    assert [m.node for m in cluster.rounds[2].members] == ["b", "c"]


def test_who_answers_the_knock_stays() -> None:
    cluster = three()
    cluster.nodes["a"].member.peer_disconnected("b")
    cluster.nodes["b"].member.peer_disconnected("a")
    cluster.wait(5.0)
    assert max(cluster.rounds) == 1
    assert cluster.nodes["a"].member.leads


def test_a_member_that_hung_up_and_is_silent_has_its_lease() -> None:
    cluster = three()
    cluster.nodes["b"].frozen = True
    cluster.nodes["a"].member.peer_disconnected("b")
    cluster.wait(1.0)
    assert max(cluster.rounds) == 1
    cluster.wait(4.0)
    assert [m.node for m in cluster.rounds[2].members] == ["a", "c"]
