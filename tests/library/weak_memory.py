"""A core whose stores another core may see in any order, as ARM's: stores in a file, and the reader's view of it."""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterator

Store = tuple[int, bytes]
"""An aligned word, which is seen whole, and its place."""


class WeakCore:
    """Executes a program's stores; each reading of the file sees some of them."""

    def __init__(self, fd: int, program: Iterator[Store], seed: int) -> None:
        self._fd, self._program, self._random = fd, program, random.Random(seed)
        self._pread: Callable[[int, int, int], bytes] = os.pread
        self._pending: list[Store] = []

    def pread(self, fd: int, size: int, offset: int) -> bytes:
        """Before it the core executes a few stores, and some of those that are pending become visible."""
        for _ in range(self._random.randrange(4)):
            self._pending.append(next(self._program))
        self._show(lambda: self._random.random() < 0.4)
        return self._pread(fd, size, offset)

    def barrier(self) -> None:
        """What it has executed is visible."""
        self._show(lambda: True)

    def _show(self, is_shown: Callable[[], bool]) -> None:
        waiting: list[Store] = []
        for place, word in self._pending:
            # Stores to one place are seen in their order.
            if is_shown() and place not in (other for other, _ in waiting):
                os.pwrite(self._fd, word, place)
            else:
                waiting.append((place, word))
        self._pending = waiting
