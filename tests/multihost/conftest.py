"""`network(hosts=3)` makes a Network that ends with the test, `training()` a job that trains on one.

Where no network can be made, these tests skip, saying why.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

import pytest

from tests.multihost.cluster import LINEAGE, TRAIN, Cluster
from tests.multihost.net import Network, missing

StartNetwork = Callable[..., Network]
StartTraining = Callable[..., Cluster]


def pytest_runtest_setup() -> None:
    # one place for all of them: the summary folds what skips in one place, for one reason, into one line
    if reason := missing():
        pytest.skip(reason)


@pytest.fixture
def network() -> Iterator[StartNetwork]:
    with contextlib.ExitStack() as ending:

        def start(hosts: int, **how: Any) -> Network:
            return ending.enter_context(Network(hosts, **how))

        yield start


@pytest.fixture
def training(network: StartNetwork, tmp_path: Path) -> StartTraining:
    """A job of some nodes, all of which train; it goes on with as few as two. `resumes`: the script has a Session.

    `spare` hosts have no agent yet. `ipv6`: it is all the network has.
    """

    def start(
        hosts: int = 3,
        spare: int = 0,
        resumes: bool = False,
        backend: Literal["etcd", "c10d"] = "etcd",
        conf: str = "",
        ipv6: bool = False,
    ) -> Cluster:
        others = ("store",) if backend == "etcd" else ()
        net = network(hosts=hosts + spare, others=others)
        for host in (*net.hosts, *(net[name] for name in others)) if ipv6 else ():
            host.only_ipv6()
        # All of them shall be in the first round, however long a busy machine takes to start the last one.
        flags = ["--rdzv-conf", ",".join(filter(None, ["last_call_timeout=60", conf])), "--max-restarts", "100"]
        if resumes:
            flags += ["--checkpoint-dir", str(tmp_path / "checkpoints")]
        script = LINEAGE if resumes else TRAIN
        cluster = Cluster(net, tmp_path / "job", f"2:{hosts}", script, backend=backend, flags=flags)
        cluster.start(*net.hosts[:hosts])
        assert len(cluster.round(1)["nodes"]) == hosts
        cluster.trains(1)
        return cluster

    return start
