"""Records that a reader takes for whole are whole, also where stores become visible in another order."""

from __future__ import annotations

import itertools
import os
import struct
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from elasticd import memory_order
from elasticd.heartbeat import record
from tests.library.weak_memory import Store, WeakCore

SEQ, STEP, PROGRESS, AT_STEP = 64, 72, 80, 232
GROUPS_SEQ = record.FILE_BYTES - 208


def steps() -> Iterator[Store]:
    """The stores of HeartbeatWriter.step and write_groups, the same number in every word."""
    for number in itertools.count(1):
        odd, even, word = (struct.pack("<Q", n) for n in (2 * number - 1, 2 * number, number))
        yield from ((SEQ, odd), (STEP, word), (PROGRESS, word), (AT_STEP, word), (SEQ, even))
        later = struct.pack("<Q", number + 1)
        yield from ((GROUPS_SEQ, odd), (GROUPS_SEQ + 8, later), (GROUPS_SEQ + 16, word), (GROUPS_SEQ + 24, word))
        yield from ((GROUPS_SEQ + 32, word), (GROUPS_SEQ, even))


def torn(path: Path, monkeypatch: pytest.MonkeyPatch, barrier: Callable[[WeakCore], Callable[[], None]]) -> int:
    """How many of the readings that count mix two writings."""
    found = whole = 0
    for seed in range(400):
        name = path / f"{seed}"
        record.create(name)
        with record.HeartbeatReader(name) as reader, name.open("r+b", 0) as file, monkeypatch.context() as patched:
            core = WeakCore(file.fileno(), steps(), seed)
            patched.setattr(os, "pread", core.pread)
            patched.setattr(record, "order_stores", barrier(core))
            patched.setattr(record, "_READS", 1000)
            beat = reader.read()
        whole += bool(beat.step)
        found += len({beat.step, beat.progress_ns, max(beat.collectives_at_step, 0)}) > 1
        found += any(len(set(group)) > 1 for group in beat.groups)
    assert whole > 200
    return found


def test_no_reading_mixes_two_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert torn(tmp_path, monkeypatch, lambda core: core.barrier) == 0


def test_without_a_barrier_of_the_writer_readings_would(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the barrier is for, or the test above shows nothing."""
    assert torn(tmp_path, monkeypatch, lambda core: lambda: None) > 0


def test_the_call_is_made_where_stores_are_reordered(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []

    def membarrier(command: int) -> bool:
        asked.append(command)
        return False

    slept: list[float] = []
    monkeypatch.setattr(memory_order, "_membarrier_number", 283)
    monkeypatch.setattr(memory_order, "_membarrier", membarrier)
    monkeypatch.setattr(memory_order.time, "sleep", slept.append)
    memory_order.register_writer()
    memory_order.order_stores()
    assert asked == [4, 2]
    assert slept == [0.001], "the call is forbidden"


@pytest.mark.skipif(
    os.uname().machine not in memory_order._MEMBARRIER_NUMBERS, reason="this processor needs no barrier"
)
def test_the_kernel_knows_the_call(monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []
    monkeypatch.setattr(memory_order, "_membarrier_number", memory_order._MEMBARRIER_NUMBERS[os.uname().machine])
    monkeypatch.setattr(memory_order.time, "sleep", slept.append)
    memory_order.register_writer()
    memory_order.order_stores()
    assert slept == []
