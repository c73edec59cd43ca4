"""Answers shared by all open pages: each asks every two seconds, and an answer may need every node of a job."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

V = TypeVar("V")


@dataclass(slots=True)
class _CacheEntry(Generic[V]):
    lock: threading.Lock = field(default_factory=threading.Lock)
    at: float = float("-inf")
    values: list[V] = field(default_factory=list)
    error: Exception | None = None


class ResponseCache(Generic[V]):
    """Thread-safe, bounded. Errors are cached, too."""

    def __init__(self, max_age_s: float, max_entries: int = 64, clock: Callable[[], float] = time.monotonic) -> None:
        self._max_age_s = max_age_s
        self._max_entries = max_entries
        self._clock = clock
        self._lock = threading.Lock()
        self._entries: OrderedDict[Hashable, _CacheEntry[V]] = OrderedDict()

    def get(self, key: Hashable, make: Callable[[], V]) -> V:
        """Concurrent callers wait for one `make`. Raises what `make` raised."""
        with self._lock:
            entry = self._entries.setdefault(key, _CacheEntry())
            self._entries.move_to_end(key)
            while len(self._entries) > self._max_entries:
                self._entries.popitem(last=False)
        with entry.lock:
            if self._clock() - entry.at >= self._max_age_s:
                entry.values, entry.error = [], None
                try:
                    entry.values = [make()]
                except Exception as error:  # noqa: BLE001 raised below, to every caller
                    entry.error = error
                entry.at = self._clock()
            if entry.error is not None:
                raise entry.error.with_traceback(None)
            return entry.values[0]
