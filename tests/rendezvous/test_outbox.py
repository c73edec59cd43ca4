"""A node's reports of its Round are sent again now and then, and do not pile up during an outage."""

from __future__ import annotations

import pytest

from elasticd.errors import StoreUnavailable
from elasticd_agent.model.keys import Keys
from elasticd_agent.rendezvous.membership_client import Outbox
from elasticd_agent.store import Versioned
from elasticd_agent.store.memory import MemoryStore


class CountingStore(MemoryStore):
    """One that can be away, and counts what it is asked to write."""

    away, written = False, 0

    def compare_and_swap(
        self, key: str, expected: int | None, value: bytes, guard: tuple[str, int] | None = None
    ) -> bool:
        if self.away:
            raise StoreUnavailable("away")
        self.written += 1
        return super().compare_and_swap(key, expected, value, guard)


def test_long_outage_does_not_grow_the_outbox() -> None:
    """An outage of a day leaves as little to send as one of a minute."""
    store = CountingStore()
    keys = Keys("job")
    reports = Outbox(store, keys, "a")
    reports.add_done(3)
    reports.send()
    store.away = True
    for _ in range(8640):  # every 10 s
        reports.queue_again(3, without_master_of=0)
        with pytest.raises(StoreUnavailable):
            reports.send()
    store.away = False
    store.delete(keys.done(3) + "a")  # it came back empty
    store.written = 0
    reports.send()
    assert store.written == 1
    assert isinstance(store.read(keys.done(3) + "a"), Versioned)
