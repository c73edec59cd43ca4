"""Whether etcd is away: one outage is two sentences, however many calls fail in it. It never retries anything."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable


class OutageLog:
    """Says the first sentence of an outage, and when it is over."""

    def __init__(self, log: Callable[[str], None], where: str) -> None:
        self._say = log
        self._where = where
        self._lock = threading.Lock()
        self._since: float | None = None

    def failed(self, why: str) -> None:
        with self._lock:
            begun, self._since = self._since, self._since or time.monotonic()
        if begun is None:
            self._say(f"the store is away: {why}; asking on")

    def succeeded(self) -> None:
        if self._since is None:
            return
        with self._lock:
            begun, self._since = self._since, None
        if begun is not None:
            self._say(f"the store is back: etcd at {self._where} answers after {time.monotonic() - begun:.1f} s")
