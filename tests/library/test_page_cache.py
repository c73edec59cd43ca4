"""What a reader leaves in the page cache: the windows that it has just read, and what was there before."""

from __future__ import annotations

import os
from types import SimpleNamespace

import pytest

from elasticd.checkpointing.storage import page_cache
from elasticd.checkpointing.storage.page_cache import (
    AVERAGED_WINDOWS,
    CACHED_WINDOWS,
    MAX_WAIT_S_PER_BYTE,
    MIN_WAIT_S_PER_BYTE,
    WINDOW_BYTES,
)

FD = 12345


class Disk:
    """A reader's clocks, and the windows that it drops."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.time_s, self.computed_s = 1000.0, 10.0
        self.dropped: list[int] = []
        clocks = SimpleNamespace(perf_counter=lambda: self.time_s, thread_time=lambda: self.computed_s)
        monkeypatch.setattr(page_cache, "time", clocks)
        monkeypatch.setattr(os, "posix_fadvise", self._advise)
        self._cache = page_cache.CacheWindows(FD)
        self._end = 0

    def _advise(self, fd: int, start: int, size: int, advice: int) -> None:
        assert (fd, size, advice) == (FD, WINDOW_BYTES, os.POSIX_FADV_DONTNEED)
        self.dropped.append(start // WINDOW_BYTES)

    def read(self, size: int, wait_s: float, computed_s: float = 0.5) -> None:
        """`wait_s`: for a byte."""
        self.time_s += wait_s * size + computed_s
        self.computed_s += computed_s
        self._end += size
        self._cache.mark_read_until(self._end)


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Disk:
    return Disk(monkeypatch)


def test_windows_are_dropped_once_others_have_been_read(disk: Disk) -> None:
    for count in range(1, 12):
        disk.read(WINDOW_BYTES, 1e-9)
        assert disk.dropped == [*range(count - CACHED_WINDOWS)]


def test_pieces_of_a_window_count_together(disk: Disk) -> None:
    for count in range(1, 40):
        disk.read(WINDOW_BYTES // 4, 1e-9)
        assert disk.dropped == [*range(count // 4 - CACHED_WINDOWS)]


@pytest.mark.parametrize(
    "wait_s", [0.0, MIN_WAIT_S_PER_BYTE * 0.9, MAX_WAIT_S_PER_BYTE * 1.1], ids=["none", "short", "long"]
)
def test_what_was_there_or_takes_too_long_stays(disk: Disk, wait_s: float) -> None:
    for _ in range(3 * AVERAGED_WINDOWS):
        disk.read(WINDOW_BYTES, wait_s)
    assert disk.dropped == []


def test_waits_are_averaged(disk: Disk) -> None:
    """The kernel reads ahead: every other window is there already."""
    for number in range(2 * AVERAGED_WINDOWS):
        disk.read(WINDOW_BYTES, 0.0 if number % 2 else 1e-9)
    assert disk.dropped == [*range(2 * AVERAGED_WINDOWS - CACHED_WINDOWS)]
