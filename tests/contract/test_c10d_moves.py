"""A c10d store that another agent hosts from now on: both ends move there, and take no other one for it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from elasticd.errors import StoreUnavailable
from elasticd_agent.store.c10d.store import C10dStore
from tests.faults.job import until

FIRST, SECOND, OTHER = 1, (1 << 32) + 1, 3

pytestmark = pytest.mark.system


@pytest.fixture
def opened() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def start(opened: ExitStack, port: int = 0, term: int = 0, timeout_s: float = 20.0) -> C10dStore:
    """It hosts the store if it has a term."""
    store = C10dStore("127.0.0.1", port, serve=bool(term), term=term, timeout_s=timeout_s, start_timeout_s=60.0)
    opened.callback(store.close)
    return store


def test_another_agent_hosts_the_store(opened: ExitStack) -> None:
    host = start(opened, term=FIRST)
    other = start(opened, host.port)
    assert other.compare_and_swap("/job/key", None, b"1")
    assert (other.term, other.hosts) == (FIRST, False)
    changes: list[str] = []
    host.watch(changes.append, "/job/")
    first_port = host.port
    other.host(SECOND)
    assert (other.term, other.hosts) == (SECOND, True)
    assert other.port != first_port, "that one is taken"
    assert other.read("/job/key") is None, "it is empty"
    host.move(("127.0.0.1", other.port), SECOND, keep_own_server=True)
    assert host.read("/job/key") is None
    assert (host.term, host.hosts) == (SECOND, False)
    changes.clear()
    assert other.compare_and_swap("/job/key", None, b"2")
    until(lambda: "/job/key" in changes, "the watch has moved, too")
    late = start(opened, first_port)
    found = late.read("/job/key")
    assert found is not None and found.value == b"1", "the first store serves on"


def test_store_of_another_agent_at_the_same_address(opened: ExitStack) -> None:
    host = start(opened, term=FIRST)
    client = start(opened, host.port, timeout_s=2.0)
    assert client.read("/job/key") is None
    client.pin(FIRST)
    host.close()
    start(opened, host.port, term=OTHER)

    def is_refused() -> bool:
        with pytest.raises(StoreUnavailable) as error:
            client.read("/job/key")
        return "another agent has begun to host a store there" in str(error.value)

    until(is_refused, "it says why")
