"""Nodes without IPv4."""

from __future__ import annotations

from typing import Literal

import pytest

from tests.multihost.conftest import StartTraining

pytestmark = pytest.mark.system


@pytest.mark.parametrize("backend", ["etcd", "c10d"])
def test_job_over_ipv6_loses_a_node_and_ends(training: StartTraining, backend: Literal["etcd", "c10d"]) -> None:
    cluster = training(backend=backend, ipv6=True)
    for node in cluster.net.hosts:
        assert "10.77." not in node.run(["ip", "addr"])
    lost = next(node for node in cluster.round(1)["nodes"] if node != "node0")
    cluster.kill_node(lost)
    left = [node for node in cluster.round(1)["nodes"] if node != lost]
    cluster.trains(cluster.round_of(*left, after=1)["round"])
    cluster.finish()
