"""Nodes with a c10d store that one of their agents hosts."""

from __future__ import annotations

import pytest

from tests.multihost.conftest import StartTraining

pytestmark = pytest.mark.system


def test_killed_node_is_left_out(training: StartTraining) -> None:
    cluster = training(backend="c10d")
    lost = next(node for node in cluster.round(1)["nodes"] if node != "node0")
    cluster.kill_node(lost)
    left = [node for node in cluster.round(1)["nodes"] if node != lost]
    without = cluster.round_of(*left, after=1)
    assert lost in without["reason"]
    cluster.trains(without["round"])
    cluster.finish()


def test_killed_store_host_comes_back(training: StartTraining) -> None:
    """Its store is empty then; the others have not forgotten which round it was."""
    cluster = training(backend="c10d", resumes=True)
    nodes = cluster.round(1)["nodes"]
    cluster.kill_node("node0")
    for node in nodes:
        if node != "node0":
            cluster.agent(node).event("store_unavailable")
    cluster.start(cluster.net.hosts[0])
    back = cluster.round_of(*nodes, after=1)
    cluster.trains(back["round"])
    cluster.finish()


def test_lost_store_host_ends_the_others_with_requeue(training: StartTraining) -> None:
    """They exit with 75 once store_away has passed."""
    cluster = training(backend="c10d", conf="store_away=5")
    cluster.kill_node("node0")
    for agent in cluster.agents:
        if agent.node != "node0":
            assert agent.wait() == 75, agent.told()
            assert "the store has been unavailable for" in agent.event("job_ended")["reason"]
    cluster.assert_over()
