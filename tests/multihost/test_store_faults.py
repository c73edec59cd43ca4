"""Faults of the store, or of a node's connection to it: training continues."""

from __future__ import annotations

import time

import pytest

from tests.faults.job import until
from tests.multihost.cluster import Cluster
from tests.multihost.conftest import StartTraining

pytestmark = pytest.mark.system

LEASE_S = 3.0  # Policy.lease_s


def test_store_unavailable_for_longer_than_every_lease(training: StartTraining) -> None:
    """Nothing restarts."""
    cluster = training()
    cluster.store.kill()
    away_since = max(agent.event("store_unavailable")["mono"] for agent in cluster.agents)
    cluster.until(lambda: time.monotonic() > away_since + 2 * LEASE_S, "an outage longer than the lease")
    cluster.store.start()
    the_store_is_back(cluster)


def test_store_frozen_for_longer_than_every_lease(training: StartTraining) -> None:
    """Nothing restarts."""
    cluster = training()
    cluster.store.host.freeze()
    away_since = max(agent.event("store_unavailable")["mono"] for agent in cluster.agents)
    cluster.until(lambda: time.monotonic() > away_since + 2 * LEASE_S, "an outage longer than the lease")
    cluster.store.host.thaw()
    the_store_is_back(cluster)


def test_store_comes_back_empty(training: StartTraining) -> None:
    """Nothing restarts: the members restore the round."""
    cluster = training()
    cluster.store.kill()
    for agent in cluster.agents:
        agent.event("store_unavailable")
    cluster.store.start(empty=True)
    the_store_is_back(cluster)


def test_node_cut_from_the_store_continues_training(training: StartTraining) -> None:
    cluster = training()
    host = cluster.agent(cluster.round(1)["nodes"][-1]).host
    cluster.net.cut(host, cluster.net["store"])
    agent = cluster.agent(host.name)
    agent.event("store_unavailable")
    until(lambda: not cluster.stored(f"nodes/{host.name}"), "the end of its lease")
    # Longer than the planner waits for anything but a node that trains.
    ended_at = time.monotonic()
    cluster.until(lambda: time.monotonic() > ended_at + 2 * LEASE_S, "an absence longer than the lease")
    assert cluster.more_steps() == 1
    cluster.net.heal(host, cluster.net["store"])
    agent.event("store_available")
    until(lambda: cluster.stored(f"nodes/{host.name}"), "its new lease")
    assert cluster.more_steps() == 1
    they_can_agree(cluster)


def the_store_is_back(cluster: Cluster) -> None:
    """All agents have noticed, and no worker has."""
    assert cluster.more_steps() == 1
    for agent in cluster.agents:
        agent.event("store_available")
    back_at = time.monotonic()
    # Whoever thinks that a node is lost by now says so within this time.
    cluster.until(lambda: time.monotonic() > back_at + 2 * LEASE_S, "a lease after the outage")
    assert cluster.more_steps() == 1
    they_can_agree(cluster)


def they_can_agree(cluster: Cluster) -> None:
    """Whether the agents have found each other again shows when they must."""
    assert cluster.last_round() == 1
    nodes = cluster.round(1)["nodes"]
    cluster.kill_node(nodes[-1])
    after = cluster.round_of(*nodes[:-1], after=1)
    cluster.trains(after["round"])
    cluster.finish()
