"""Partial partitions: one lineage continues, and a node that was left out joins again once the network is healed.

The bounds are three times the seconds of docs/many-nodes.md: these tests run on busy machines.
"""

from __future__ import annotations

import time

import pytest

from benchmarks.checker import breaches, read
from tests.multihost.cluster import Cluster
from tests.multihost.conftest import StartTraining

pytestmark = pytest.mark.system

SAMPLES = 1000  # lineage.py's
CUT_FROM_PEERS_S, VANISHED_S, CUT_PAIR_S = 3 * 4.0, 3 * 3.5, 3 * 7.0


@pytest.mark.parametrize("one_way", [False, True], ids=["both ways", "one way"])
def test_node_reaches_the_store_and_not_its_peers(training: StartTraining, one_way: bool) -> None:
    cluster = training(resumes=True)
    nodes = cluster.round(1)["nodes"]
    cut_off = cluster.agent(nodes[0]).host
    peers = [cluster.agent(node).host for node in nodes[1:]]
    began = time.monotonic()
    for peer in peers:
        cluster.net.cut(cut_off, peer, one_way=one_way)
    without = cluster.round_of(*nodes[1:], after=1)
    assert without["mono"] - began < CUT_FROM_PEERS_S
    cluster.trains(without["round"])
    for peer in peers:
        cluster.net.heal(cut_off, peer)
    one_lineage_ends(cluster, without["round"])


def test_node_reaches_neither_store_nor_peers(training: StartTraining) -> None:
    cluster = training(resumes=True)
    nodes = cluster.round(1)["nodes"]
    cut_off = cluster.agent(nodes[0])
    others = [cluster.net["store"], *(cluster.agent(node).host for node in nodes[1:])]
    began = time.monotonic()
    for other in others:
        cluster.net.cut(cut_off.host, other)
    without = cluster.round_of(*nodes[1:], after=1)
    assert without["mono"] - began < VANISHED_S
    cluster.trains(without["round"])
    cut_off.event("store_unavailable")
    for other in others:
        cluster.net.heal(cut_off.host, other)
    one_lineage_ends(cluster, without["round"])


@pytest.mark.parametrize("two", [(0, 1), (1, 2)], ids=["rank 0's and another", "neither is rank 0's"])
def test_two_of_three_nodes_cannot_reach_each_other(training: StartTraining, two: tuple[int, int]) -> None:
    cluster = training(resumes=True)
    nodes = cluster.round(1)["nodes"]
    a, b = (cluster.agent(nodes[place]).host for place in two)
    cluster.more_steps(60)  # silence counts after an answer, and members ask each other once they train
    began = time.monotonic()
    cluster.net.cut(a, b)
    # The largest set that reaches itself, and of two such sets the one with rank 0.
    without = cluster.round_of(*(node for node in nodes if node != b.name), after=1)
    assert without["mono"] - began < CUT_PAIR_S
    cluster.trains(without["round"])
    assert cluster.last_round() == without["round"], "whoever is left out is not taken before it is healed"
    cluster.net.heal(a, b)
    one_lineage_ends(cluster, without["round"])


def one_lineage_ends(cluster: Cluster, number: int) -> None:
    """All are back, train to the end, and what was trained is one lineage."""
    cluster.trains(cluster.round_of("node0", "node1", "node2", after=number)["round"])
    assert all(agent.running for agent in cluster.agents)
    cluster.finish()
    assert breaches(read(cluster.work, SAMPLES)) == []
