"""The stores that the contract is tested with: memory, file, and real etcd and c10d servers."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from elasticd_agent.store import Store
from elasticd_agent.store.c10d.store import C10dStore
from elasticd_agent.store.etcd.store import EtcdStore
from elasticd_agent.store.file import FileStore
from elasticd_agent.store.memory import MemoryStore
from tests.daemon.stores import Clock
from tests.etcd import etcd_servers


@dataclass(frozen=True, slots=True)
class Backend:
    """One store, and two clients of it. `pass_time` lets seconds pass on the clock of its leases."""

    store: Store
    other: Store
    client: Callable[[], Store]
    pass_time: Callable[[float], None] = time.sleep
    now: Callable[[], float] = time.monotonic


def memory(_: ExitStack) -> Backend:
    clock = Clock()
    store = MemoryStore(clock)
    return Backend(store, store, lambda: MemoryStore(clock), clock.pass_time, clock)


def file(cleanup: ExitStack) -> Backend:
    clock = Clock()
    folder = Path(cleanup.enter_context(TemporaryDirectory()))

    def client(path: Path) -> FileStore:
        store = FileStore(path, clock)
        cleanup.callback(store.close)
        return store

    store = client(folder / "store")
    return Backend(store, store, lambda: client(folder / "another"), clock.pass_time, clock)


def etcd(cleanup: ExitStack) -> Backend:
    endpoints = cleanup.enter_context(etcd_servers()).endpoints

    def client() -> Store:
        store = EtcdStore(endpoints, timeout_s=10.0)
        cleanup.callback(store.close)
        return store

    return Backend(client(), client(), client)


def c10d(cleanup: ExitStack) -> Backend:
    def client(port: int, *, serve: bool) -> C10dStore:
        store = C10dStore("127.0.0.1", port, serve=serve, timeout_s=10.0)
        cleanup.callback(store.close)
        return store

    host = client(0, serve=True)
    return Backend(host, client(host.port, serve=False), lambda: client(host.port, serve=False))


BACKENDS = {"memory": memory, "file": file, "etcd": etcd, "c10d": c10d}


@pytest.fixture(scope="module", params=BACKENDS)
def open_backend(request: pytest.FixtureRequest) -> Iterator[Backend]:
    with ExitStack() as cleanup:
        made = BACKENDS[request.param](cleanup)
        # Connect before the first test begins.
        made.store.read("k")
        made.other.read("k")
        yield made


@pytest.fixture
def backend(open_backend: Backend) -> Backend:
    for key in open_backend.store.list(""):
        open_backend.store.delete(key)
    return open_backend


@pytest.fixture
def store(backend: Backend) -> Store:
    return backend.store
