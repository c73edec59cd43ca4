"""Nodes and the store die under a job of three nodes, which continues with the rest."""

from __future__ import annotations

import time

import pytest

from tests.multihost.cluster import Cluster
from tests.multihost.conftest import StartTraining


def test_killed_rank_0_node_is_replaced(training: StartTraining) -> None:
    """With it go the workers' store and, as often as not, the planner."""
    cluster = training()
    lost = cluster.round(1)["nodes"][0]
    cluster.kill_node(lost)
    the_others_go_on_without(cluster, lost)
    cluster.finish()


@pytest.mark.system
def test_link_down_and_up_again(training: StartTraining) -> None:
    """Nothing resets the connections: the node is left out, and joins again once its link is up."""
    cluster = training(resumes=True)
    nodes = cluster.round(1)["nodes"]
    cut_off = cluster.agent(nodes[0])
    cut_off.host.link(up=False)
    number = the_others_go_on_without(cluster, nodes[0])
    cut_off.event("store_unavailable")  # that was its only link
    cut_off.host.link(up=True)
    cluster.trains(cluster.round_of(*nodes, after=number)["round"])
    assert cut_off.running
    cluster.finish()


@pytest.mark.system
def test_all_nodes_are_killed_and_replaced(training: StartTraining) -> None:
    """A lease and a renewal from the new agents' start, since every old port is closed: not `adopt_timeout`, 60 s."""
    cluster = training(hosts=2, spare=2)
    old = cluster.round(1)["nodes"]
    for node in old:
        cluster.kill_node(node)
    began = time.monotonic()
    new = [agent.node for agent in cluster.start(*cluster.net.hosts[2:])]
    after = cluster.round_of(*new, after=1)
    assert after["mono"] - began < 20
    assert "the port of its agent is closed" in after["reason"]
    cluster.trains(after["round"])
    cluster.finish()


def the_others_go_on_without(cluster: Cluster, lost: str) -> int:
    """Returns the round in which they do."""
    left = [node for node in cluster.round(1)["nodes"] if node != lost]
    after = cluster.round_of(*left, after=1)
    assert (after["nodes"], after["world_size"]) == (left, 2)
    assert lost in after["reason"]
    cluster.trains(after["round"])
    return int(after["round"])
