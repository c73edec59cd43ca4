"""Hangs of a group that spans two machines: blamed on the right one, or on the network between them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from elasticd_agent.hangs.collector.record import NodeEvidence
from tests.faults.job import Fault
from tests.hangs.conftest import TUNED
from tests.hangs.situations import SCRIPTS
from tests.multihost.cluster import Cluster
from tests.multihost.conftest import StartNetwork

FLOOR_S = 5.0
"""The default with an attached checkpoint."""


def two_nodes(network: StartNetwork, work: Path, faults: list[Fault], policy: Sequence[str] = TUNED) -> Cluster:
    flags = ["--rdzv-conf", "last_call_timeout=60", "--max-restarts", "100", *policy]
    flags += ["--checkpoint-dir", str(work / "checkpoints"), "--log-dir", str(work / "log")]
    cluster = Cluster(
        network(2, others=("store",)), work / "job", "2:2", SCRIPTS / "session.py", flags=flags, faults=faults
    )
    cluster.start()
    return cluster


@pytest.mark.system
def test_default_policy_waits_longer_for_weaker_evidence(network: StartNetwork, tmp_path: Path) -> None:
    cluster = two_nodes(network, tmp_path, [Fault(1, 30, "gil")], policy=())
    hung = cluster.event("hang_detected", round=1)
    assert (hung["cause"], hung["ranks"]) == ("gil", [1]), hung
    assert 3 * FLOOR_S <= hung["seconds"] < 6 * FLOOR_S
    cluster.trains(2)
    cluster.finish()


@pytest.mark.system
@pytest.mark.parametrize(("what", "cause"), [("stop", "stopped"), ("sleep", "blocked"), ("gil", "gil")])
@pytest.mark.parametrize("rank", [0, 1])
def test_hang_on_one_node(network: StartNetwork, tmp_path: Path, what: str, cause: str, rank: int) -> None:
    cluster = two_nodes(network, tmp_path, [Fault(rank, 30, what)])
    hung = cluster.event("hang_detected", round=1)
    assert (hung["cause"], hung["ranks"]) == (cause, [rank]), hung
    assert hung["nodes"] == [cluster.round(1)["nodes"][rank]]
    assert_gathered(cluster, tmp_path / "log")
    cluster.trains(2)
    cluster.finish()
    assert len(cluster.events("hang_detected")) == 1


@pytest.mark.system
def test_dropped_packets_between_two_nodes(network: StartNetwork, tmp_path: Path) -> None:
    cluster = two_nodes(network, tmp_path, [])
    cluster.trains(1, steps=30)
    a, b = cluster.net.hosts
    cluster.net.cut(a, b)
    hung = cluster.event("hang_detected", round=1)
    assert (hung["cause"], hung["ranks"]) == ("network", []), hung
    cluster.net.heal(a, b)  # a job of 2:2 nodes ends its group once both can begin another one, on a busy machine
    assert_gathered(cluster, tmp_path / "log")
    cluster.trains(2)
    cluster.finish()


def assert_gathered(cluster: Cluster, log: Path) -> None:
    """Every rank's stack was on disk before the first of them was killed."""
    for agent in cluster.agents:
        agent.event("group_ended", round=1)
    killed = min(event["wall"] for event in cluster.events("worker_exited", round=1))
    records = list((log / "round-1" / "evidence").glob("evidence-*.json"))
    assert len(records) == 2
    for path in records:
        assert path.stat().st_mtime <= killed, path
        assert all(rank.source for rank in NodeEvidence.from_json(path.read_bytes()).ranks)
