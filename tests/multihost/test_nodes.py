"""Nodes and the store die under a job of three nodes, and it goes on with what is left."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.multihost.cluster import Cluster
from tests.multihost.conftest import StartNetwork


@pytest.fixture
def cluster(network: StartNetwork, tmp_path: Path) -> Cluster:
    """Three nodes that train and may become two, and an etcd."""
    cluster = Cluster(network(hosts=3, others=("store",)), tmp_path / "job", nnodes="2:3")
    cluster.start()
    assert set(cluster.round(1)["nodes"]) == {"node0", "node1", "node2"}
    for rank in range(3):
        cluster.step(3, rank=rank)
    return cluster


def test_the_node_of_rank_0_is_killed_and_the_others_go_on_and_finish(cluster: Cluster) -> None:
    """With it go the workers' store and, as often as not, the planner."""
    the_others_go_on_without(cluster, cluster.round(1)["nodes"][0])
    cluster.finish()


def test_the_store_is_restarted_and_training_does_not_notice(cluster: Cluster) -> None:
    assert cluster.store is not None
    cluster.store.kill()
    assert cluster.more_steps() == 1
    cluster.store.start()
    assert cluster.more_steps() == 1
    # Whether they have found each other again shows when they must agree.
    the_others_go_on_without(cluster, cluster.round(1)["nodes"][-1])
    cluster.finish()


def the_others_go_on_without(cluster: Cluster, lost: str) -> None:
    left = [node for node in cluster.round(1)["nodes"] if node != lost]
    cluster.kill_node(lost)
    after = cluster.round_of(*left, after=1)
    assert (after["nodes"], after["world_size"]) == (left, 2)
    assert lost in after["reason"]
    for rank in range(2):
        cluster.step(3, round=after["round"], rank=rank)
    assert cluster.last_round() == after["round"]
