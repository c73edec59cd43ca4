"""A watch on etcd that survives whatever happens to etcd.

Each subscription follows from the moment at which etcd confirms it, so there is no revision that could have been
compacted, and nothing to look at first. When it breaks (restart, partition, no leader, a store that came back empty)
anything may have happened until the next one is confirmed, which then names the whole prefix. One thread per watch, so
that a slow etcd keeps nobody waiting. Nothing is read for the caller: a call is a hint.
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
        self._stream: Stream | None = None
        self._closing = threading.Event()
        # Held during a call, so that none is begun after close() has returned; a callback may close its own watch.
        self._calling = threading.RLock()
        self._begun = threading.Event()
        # The caller reads when we return: what was there before the first subscription needs no call, if that is soon.
        self._awaited = True
        self._refused: StoreRefused | None = None
        self._thread = threading.Thread(target=self._run, name=f"etcd watch {prefix}", daemon=True)
        self._thread.start()
        self._begun.wait(etcd.link.timeout_s)
        with self._calling:
            self._awaited = False
        if self._refused is not None:
            raise self._refused

    def close(self) -> None:
        self._closing.set()
        with self._calling:
            stream = self._stream
        if stream is not None:
            stream.cancel()
        if self._thread is not threading.current_thread():
            # It may be in the middle of a request.
            self._thread.join(self._etcd.link.timeout_s + 1.0)
        self._gone(self)

    def _run(self) -> None:
        # A subscription that etcd has confirmed counts as a success: the next one begins without a long pause.
        again = tenacity.Retrying(
            retry=tenacity.retry_if_exception_type((StoreUnavailable, StoreRefused)),
            wait=tenacity.wait_random_exponential(multiplier=PAUSE_MIN_S, max=PAUSE_MAX_S),
            stop=tenacity.stop_when_event_set(self._closing),
            sleep=tenacity.sleep_using_event(self._closing),
            reraise=True,
        )
        first = True
        while not self._closing.is_set():
            try:
                if first:
                    self._follow()
                else:
                    again(self._subscribe)
            except (StoreUnavailable, StoreRefused):
                pass  # closing, or the first subscription failed; what it was has been said
            if self._begun.is_set():
                self._closing.wait(random.uniform(0, _SPREAD_S))
            first = False

    def _subscribe(self) -> None:
        """After a failure: a request first, which finds a member that answers, and a new token if ours has ended."""
        try:
            self._etcd.count(self._prefix)
            self._follow()
        except StoreRefused as error:
            with self._calling:
                if self._awaited and not self._begun.is_set():
                    self._refused = error
                    self._begun.set()
                    self._closing.set()
            self._etcd.link.outage.goes_on(str(error))
            raise

    def _follow(self) -> None:
        """Returns when a confirmed subscription has ended. Raises StoreUnavailable if it was never confirmed."""
        stream = self._etcd.follow(self._prefix)
        with self._calling:
            self._stream = stream
        if self._closing.is_set():
            stream.cancel()
        confirmed = False
        for response in stream:
            if response.canceled:  # not allowed, or the token has ended
                stream.cancel()
                break
            if response.created and not confirmed:
                confirmed = True
                self._confirmed()
            self._hear(response.events)
        if not confirmed:
            raise StoreUnavailable(f"etcd ended the watch on {self._prefix!r} at once")

    def _confirmed(self) -> None:
        with self._calling:
            first_and_in_time = self._awaited and not self._begun.is_set()
            self._begun.set()
            if not first_and_in_time:
                self._tell(self._prefix)

    def _hear(self, events: Any) -> None:
        for event in events:
            self._tell(text(event.kv.key))

    def _tell(self, key: str) -> None:
        with self._calling:
            if not self._closing.is_set():
                self._callback(key)
