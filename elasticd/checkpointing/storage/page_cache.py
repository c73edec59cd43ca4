"""Reading a large file through a small part of the page cache.

A page that the cache has just lost is taken for the next one, so a file of any size costs the first touch of a few
pages. On a virtual machine that gives free memory back to its host, the first touch of a gigabyte takes 1.4 to 2.7
seconds of CPU time, and reading it through pages that have been touched 0.1. Other processes that read the same file
at about the same time find the pages in the cache, and no file system refuses this, as some do with O_DIRECT.
"""

from __future__ import annotations

import os
import time
from collections import deque

WINDOW_BYTES = 8 << 20
CACHED_WINDOWS = 4
"""The number of windows that stay, for processes that read the same file a little later."""
MIN_WAIT_S_PER_BYTE, MAX_WAIT_S_PER_BYTE = 0.05e-9, 2.5e-9
"""The wait for a byte. What was waited for less was in the cache already, and what was waited for longer stays there:
reading it again would take longer than the first touch of its memory."""
AVERAGED_WINDOWS = 8
"""Windows over which a wait is averaged: the kernel reads ahead of what is asked for."""


class CacheWindows:
    """The windows of one descriptor, which one thread reads from its beginning to its end."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._start = 0
        self._waits_s: deque[float] = deque(maxlen=AVERAGED_WINDOWS)
        self._brought: deque[int] = deque()
        """Windows that reading has brought into the cache."""
        self._began = self._wait_clock_s()

    def mark_read_until(self, end: int) -> None:
        """Everything before `end` has been read."""
        while self._start + WINDOW_BYTES <= end:
            self._waits_s.append(self._wait_clock_s() - self._began)
            wait_s = sum(self._waits_s) / len(self._waits_s) / WINDOW_BYTES
            if MIN_WAIT_S_PER_BYTE <= wait_s <= MAX_WAIT_S_PER_BYTE:
                self._brought.append(self._start)
            self._start += WINDOW_BYTES
            while self._brought and self._brought[0] < self._start - CACHED_WINDOWS * WINDOW_BYTES:
                os.posix_fadvise(self._fd, self._brought.popleft(), WINDOW_BYTES, os.POSIX_FADV_DONTNEED)
            self._began = self._wait_clock_s()

    def _wait_clock_s(self) -> float:
        """The time at which this thread waits; it stands still while the thread computes."""
        return time.perf_counter() - time.thread_time()
