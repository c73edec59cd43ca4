"""Nodes with a c10d store that one of their agents hosts."""

from __future__ import annotations

import pytest

from benchmarks.history import breaches, from_logs
from tests.multihost.conftest import StartTraining

pytestmark = pytest.mark.system


def test_killed_store_host_comes_back(training: StartTraining) -> None:
    """The others go on with another host; the former one hosts an empty store, and is shown the way from there."""
    cluster = training(backend="c10d", resumes=True)
    cluster.kill_node("node0")
    without = cluster.round_of("node1", "node2", after=1)
    assert "node0 is lost" in without["reason"]
    cluster.trains(without["round"])
    cluster.start(cluster.net.hosts[0])
    back = cluster.round_of("node0", "node1", "node2", after=without["round"])
    cluster.trains(back["round"])
    assert "the job's store is at" in cluster.agent("node0").err
    cluster.finish()


def test_store_host_that_is_cut_off(training: StartTraining) -> None:
    """The others go on; it waits, ends its worker and exits with 75; nobody trains beside them."""
    cluster = training(backend="c10d", resumes=True, conf="store_away=8")
    host = cluster.net.hosts[0]
    host.link(up=False)
    without = cluster.round_of("node1", "node2", after=1)
    cluster.trains(without["round"])
    alone = cluster.agent("node0")
    assert alone.wait() == 75, alone.told()
    reason = alone.event("job_ended")["reason"]  # it may see one of them go first, and publish a round with the other
    assert "1 of 3 nodes of round 1 are here" in reason or "too few of the last round's nodes have read" in reason
    assert [event["round"] for event in alone.events("first_step")] == [1]
    host.link(up=True)
    cluster.start(host)
    back = cluster.round_of("node0", "node1", "node2", after=without["round"])
    cluster.trains(back["round"])
    logs = [(agent.directory.name, agent.node, agent.events()) for agent in cluster.agents]
    assert breaches(from_logs(logs, [])) == []
    cluster.finish()


def test_lost_store_host_ends_the_other_one_of_two_with_requeue(training: StartTraining) -> None:
    """It exits with 75 once store_away has passed."""
    cluster = training(hosts=2, backend="c10d", conf="store_away=5")
    cluster.kill_node("node0")
    left = cluster.agent("node1")
    assert left.wait() == 75, left.told()
    assert "the store has been unavailable for" in left.event("job_ended")["reason"]
    cluster.assert_over()
