"""Answers that several people ask for at the same time, made once.

It exists because every open page asks every two seconds, and an answer may mean asking each node of a job. It keeps a
bounded number of answers for a moment; that there is none is an answer, too.
"""

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
    """Thread-safe. `for_s` is how old an answer may be, `most` how many are kept."""

    def __init__(self, for_s: float, most: int = 64, clock: Callable[[], float] = time.monotonic) -> None:
        self._max_age_s, self._max_entries, self._clock = for_s, most, clock
        self._lock = threading.Lock()
        self._entries: OrderedDict[Hashable, _CacheEntry[V]] = OrderedDict()

    def get(self, key: Hashable, make: Callable[[], V]) -> V:
        """Who comes while it is being made waits for that. Raises what `make` raised."""
        with self._lock:
            kept = self._entries.setdefault(key, _CacheEntry())
            self._entries.move_to_end(key)
            while len(self._entries) > self._max_entries:
                self._entries.popitem(last=False)
        with kept.lock:
            if self._clock() - kept.at >= self._max_age_s:
                kept.values, kept.error = [], None
                try:
                    kept.values = [make()]
                except Exception as error:  # noqa: BLE001 raised below, for whoever asks
                    kept.error = error
                kept.at = self._clock()
            if kept.error is not None:
                raise kept.error.with_traceback(None)
            return kept.values[0]
