"""`node("a", ...)` makes an AgentNode, of which nothing outlives the test; with store={...} it is one of several."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from elasticd_agent.system.network import http_server
from elasticd_daemon.api import local, node_files
from elasticd_daemon.dashboard import routes
from tests.daemon.node import AgentNode
from tests.etcd import EtcdServers, etcd_servers

MakeNode = Callable[..., AgentNode]


@pytest.fixture(autouse=True)
def _patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Agents' servers within this process: a machine that stands still for seconds must cost no answer."""
    for module, name in (
        (http_server, "_LINGER_S"),
        (local, "STATUS_TIMEOUT_S"),
        (node_files, "PEER_TIMEOUT_S"),
        (node_files, "PEER_RANKS_TIMEOUT_S"),
        (routes, "PAGE_TIMEOUT_S"),
    ):
        monkeypatch.setattr(module, name, 30.0)


@pytest.fixture
def node(tmp_path: Path) -> Iterator[MakeNode]:
    made: list[AgentNode] = []

    def make(name: str = "n1", root: Path | None = None, **settings: Any) -> AgentNode:
        mark = f"DAEMON_TEST={uuid.uuid4()}"
        made.append(AgentNode(root or tmp_path / f"{name}-{len(made)}", name, mark, **settings))
        return made[-1]

    yield make
    for one in made:
        one.end()


@pytest.fixture
def etcd() -> Iterator[EtcdServers]:
    """One of its own for each test: what daemons say is not below a job's name."""
    with etcd_servers() as servers:
        yield servers


@pytest.fixture
def nodes(node: MakeNode, etcd: EtcdServers) -> MakeNode:
    """Makes a node whose store is etcd."""

    def make(name: str, **settings: Any) -> AgentNode:
        store = {"backend": "etcd", "endpoints": [f"127.0.0.1:{etcd.port}"]}
        return node(name, store=store, local_addr="127.0.0.1", **settings)

    return make
