"""A broken connection is a reason to probe, and nothing more."""

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


def die_silently(cluster: Cluster, name: str) -> None:
    """As with NCCL: its workers' peers wait, and get no error."""
    node = cluster.nodes[name]
    node.dead = node.partition.store = True


def test_killed_member_is_replaced_at_once() -> None:
    """A broken connection leads to a probe, although no node reported a failure."""
    cluster = three()
    die_silently(cluster, "b")
    cluster.nodes["a"].member.peer_disconnected("b")
    cluster.wait(0.2)
    assert [m.node for m in cluster.rounds[2].members] == ["a", "c"]
    assert "b is lost: the port of its agent is closed" in cluster.rounds[2].reason


def test_killed_leader_is_succeeded_at_once() -> None:
    """Its members probe it when its connection breaks, although no node reported a failure."""
    cluster = three()
    die_silently(cluster, "a")
    for name in ("b", "c"):
        cluster.nodes[name].member.peer_disconnected("a")
    cluster.wait(0.3)
    assert [m.node for m in cluster.rounds[2].members] == ["b", "c"]


def test_answered_probe_keeps_the_member() -> None:
    cluster = three()
    cluster.nodes["a"].member.peer_disconnected("b")
    cluster.nodes["b"].member.peer_disconnected("a")
    cluster.wait(5.0)
    assert max(cluster.rounds) == 1
    assert cluster.nodes["a"].member.leads


def test_silent_member_stays_until_its_lease_expires() -> None:
    cluster = three()
    cluster.nodes["b"].frozen = True
    cluster.nodes["a"].member.peer_disconnected("b")
    cluster.wait(1.0)
    assert max(cluster.rounds) == 1
    cluster.wait(4.0)
    assert [m.node for m in cluster.rounds[2].members] == ["a", "c"]
