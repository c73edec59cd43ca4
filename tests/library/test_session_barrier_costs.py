"""What a barrier costs the store, which keys it leaves, and what is known of a status's age."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from elasticd.checkpointing.storage.lineage import lineage
from elasticd.coordination.barrier import Barriers
from elasticd.coordination.rank_status import RankStatus, StatusPublisher, StatusReader, new_connection
from elasticd.coordination.store_channel import StoreChannel
from elasticd.errors import BarrierTimeout
from elasticd.heartbeat.record import NullHeartbeat

RANKS = 16


class Counting:
    """A store in this process's memory, for ranks that are threads; counts what it is asked."""

    def __init__(self) -> None:
        from torch.distributed import HashStore

        self.inner: Any = HashStore()
        self.asked = 0

    def __getattr__(self, name: str) -> Callable[..., Any]:
        self.asked += 1
        found: Callable[..., Any] = getattr(self.inner, name)
        return found

    def clone(self) -> Counting:
        return self


@contextmanager
def ranks(store: Counting, count: int = RANKS, timeout_s: float = 20) -> Iterator[list[Barriers]]:
    rolls, found = [], []
    for rank in range(count):
        channel = StoreChannel(rank, count, store, "a", timeout_s)
        roll = StatusPublisher(channel.new_connection, channel.prefix, rank, count, lambda: RankStatus(7, "eval"))
        roll.start(store)
        rolls.append(roll)
        found.append(Barriers(channel, roll, NullHeartbeat()))
    try:
        yield found
    finally:
        for roll in rolls:
            roll.close()


def meet(barriers: list[Barriers], name: str, timeout: float | timedelta | None = None) -> list[BaseException | None]:
    """All of them at once, as ranks do; what each raised."""
    raised: list[BaseException | None] = [None] * len(barriers)

    def wait(number: int) -> None:
        try:
            barriers[number].wait(name, timeout)
        except BarrierTimeout as error:
            raised[number] = error

    threads = [threading.Thread(target=wait, args=(number,)) for number in range(len(barriers))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    return raised


def test_barrier_costs_few_messages_and_keys() -> None:
    """A barrier costs a few messages a rank, and leaves as many keys as there are ranks."""
    store = Counting()
    with ranks(store) as barriers:
        before = store.asked
        for number in range(10):
            assert meet(barriers, f"number {number}") == [None] * RANKS
        assert store.asked - before <= 10 * (5 * RANKS + 5)
    # The sessions are closed. Each rank's number, last word and last barrier; and the last barrier itself.
    assert store.inner.num_keys() <= 3 * RANKS + 3


def test_timed_out_barrier_costs_few_messages() -> None:
    store = Counting()
    with ranks(store) as barriers:
        before = store.asked
        raised = meet(barriers[:-2], "epoch", timedelta(seconds=3))
        assert store.asked - before <= 15 * RANKS
    (said,) = {str(error) for error in raised}
    last = r"\(step 7, phase eval, reported [^)]*\)"
    assert re.fullmatch(rf"barrier 'epoch': 2 of 16 ranks are missing after 3 s: rank 14 {last}, rank 15 {last}", said)


def test_two_threads_of_a_rank_cannot_wait_at_once() -> None:
    from elasticd.errors import UsageError

    with ranks(Counting(), 2) as barriers:
        thread = threading.Thread(target=lambda: barriers[0].wait("first"))
        thread.start()
        while not barriers[0].waiting_at:
            time.sleep(0.001)
        with pytest.raises(UsageError, match="another thread waits at 'first'"):
            barriers[0].wait("second")
        barriers[1].wait("first")
        thread.join(20)


def test_age_of_status_by_reads_of_observer() -> None:
    store = Counting()
    with ranks(store, 2):
        looks = StatusReader("a/1/")
        assert looks.describe(0) == "status not read"
        looks.read(store, [0, 5])
        assert looks.describe(0) == "step 7, phase eval, reported at an unknown time"
        assert looks.describe(5) == "no status since the round began"
        assert not looks.has_status(5)
        time.sleep(0.2)
        looks.read(store, [0])
        assert looks.describe(0).startswith("step 7, phase eval, reported more than ")
    looks.read(store, [0])  # it has closed meanwhile, which it said
    assert re.fullmatch(r"step 7, phase exit, reported in the last \d\.\d s", looks.describe(0))
    time.sleep(0.2)
    assert re.fullmatch(r"step 7, phase exit, reported \d\.\d to \d\.\d s ago", looks.describe(0))


def test_only_first_missing_ranks_are_listed() -> None:
    """Of many missing ranks only the first are listed, and an invalid status counts as none."""
    store = Counting()
    store.set("a/1/status/0", "no json")
    store.set("a/1/status/1", '{"n": 1}')
    looks = StatusReader("a/1/")
    before = store.asked
    looks.read(store, range(100))
    assert store.asked - before <= 2 * 16
    told = looks.describe_all(range(100))
    assert told.count("no status") == 16
    assert told.endswith("rank 15 (no status since the round began) and 84 more")


def test_status_has_barrier_and_duration() -> None:
    assert str(RankStatus(3, "eval", "", 1.9)) == "step 3, phase eval"
    assert str(RankStatus(3, "eval", "", 41.4)) == "step 3, phase eval for 41 s"
    assert str(RankStatus(3, "barrier", "epoch", 5)) == "step 3, waits at barrier 'epoch' for 5 s"


def test_new_connection_without_clone() -> None:
    from torch.distributed import HashStore, PrefixStore, TCPStore

    class Old:
        """As torch 2.6's PrefixStore."""

        def __init__(self, inner: Any) -> None:
            self.underlying_store = inner

    server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, use_libuv=False)
    found = new_connection(Old(PrefixStore("a", server)))
    found.set("key", "value")
    assert server.get("key") == b"value"
    memory = Old(HashStore())
    assert new_connection(memory) is memory


def test_missing_rank_is_named_before_checkpoint(start: Any, tmp_path: Path) -> None:
    first, second = start("saves.py", str(tmp_path), "6").results()
    assert "barrier 'checkpoint at step 6': 1 of 2 ranks is missing after 6 s: rank 1 (step 5, " in first["error"]
    assert second["error"] == "rank 1 came too late to " + first["error"]
    assert [entry.manifest.step for entry in lineage(tmp_path)[0]] == [3]
