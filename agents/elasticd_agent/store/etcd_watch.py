"""A watch on etcd that survives whatever happens to etcd.

Each subscription begins with a look at the keys that are there, and follows from the revision of that look on, so
nothing is missed in between. When it breaks (restart, partition, no leader, compaction, a store that came back empty)
it begins anew, and then says every key that it knew or finds: each may have changed. One thread per watch, so that a
slow etcd keeps nobody waiting. Nothing is read for the caller: a call is a hint.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from typing import Any

import tenacity

from elasticd.errors import StoreRefused, StoreUnavailable
from elasticd_agent.store.etcd_link import PAUSE_MAX_S, PAUSE_MIN_S, Stream
from elasticd_agent.store.etcd_requests import Requests, text

# When an etcd restarts, all agents come at once; this spreads them.
_SPREAD_S = 0.1


class EtcdWatch:
    """`gone` is told when it is closed. Never raises, but for a refusal before the first subscription."""

    def __init__(
        self, etcd: Requests, prefix: str, callback: Callable[[str], None], gone: Callable[[EtcdWatch], None]
    ) -> None:
        self._etcd = etcd
        self._prefix = prefix
        self._callback = callback
        self._gone = gone
        self._known: set[str] = set()
        self._stream: Stream | None = None
        self._closing = threading.Event()
        # Held during a call, so that none is begun after close() has returned; a callback may close its own watch.
        self._calling = threading.RLock()
        # In the caller's thread: what changes from now on is heard.
        try:
            revision: int | None = self._look(tell=False)
        except StoreUnavailable:
            revision = None
        self._thread = threading.Thread(target=self._run, args=(revision,), name=f"etcd watch {prefix}", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._closing.set()
        with self._calling:
            stream = self._stream
        if stream is not None:
            stream.cancel()
        if self._thread is not threading.current_thread():
            # It may be in the middle of a look.
            self._thread.join(self._etcd.link.timeout_s + 1.0)
        self._gone(self)

    def _run(self, revision: int | None) -> None:
        # A subscription that etcd has confirmed counts as a success: the next one begins without a long pause.
        again = tenacity.Retrying(
            retry=tenacity.retry_if_exception_type((StoreUnavailable, StoreRefused)),
            wait=tenacity.wait_random_exponential(multiplier=PAUSE_MIN_S, max=PAUSE_MAX_S),
            stop=tenacity.stop_when_event_set(self._closing),
            sleep=tenacity.sleep_using_event(self._closing),
            reraise=True,
        )
        first = revision
        while not self._closing.is_set():
            try:
                if first is not None:
                    self._follow(first)
                else:
                    again(self._subscribe)
            except (StoreUnavailable, StoreRefused):
                pass  # closing, or the first subscription failed; what it was has been said
            first = None
            self._closing.wait(random.uniform(0, _SPREAD_S))

    def _subscribe(self) -> None:
        try:
            self._follow(self._look(tell=True))
        except StoreRefused as error:
            self._etcd.link.outage.goes_on(str(error))
            raise

    def _look(self, *, tell: bool) -> int:
        """The revision at which these keys were there."""
        present, revision = self._etcd.keys(self._prefix)
        known, self._known = self._known, present
        if tell:
            for name in sorted(known | present):
                self._tell(name)
        return revision

    def _follow(self, revision: int) -> None:
        """Returns when a confirmed subscription has ended. Raises StoreUnavailable if it was never confirmed."""
        stream = self._etcd.follow(self._prefix, revision)
        with self._calling:
            self._stream = stream
        if self._closing.is_set():
            stream.cancel()
        confirmed = False
        for response in stream:
            if response.canceled:  # compacted, or not allowed
                stream.cancel()
                break
            confirmed = confirmed or response.created
            self._hear(response.events)
        if not confirmed:
            raise StoreUnavailable(f"etcd ended the watch on {self._prefix!r} at once")

    def _hear(self, events: Any) -> None:
        for event in events:
            name = text(event.kv.key)
            if event.type == event.DELETE:
                self._known.discard(name)
            else:
                self._known.add(name)
            self._tell(name)

    def _tell(self, key: str) -> None:
        with self._calling:
            if not self._closing.is_set():
                self._callback(key)
