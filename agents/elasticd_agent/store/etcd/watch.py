"""Watches on etcd that survive whatever happens to etcd, all of a store's on one stream.

Each follows from the moment at which etcd confirms it, so there is no revision that could have been compacted, and
nothing to look at first. When the stream breaks (restart, partition, no leader, a store that came back empty) anything
may have happened until a watch is confirmed again, which then names its whole prefix. One stream, because gRPC wakes
whoever reads one ten times a second, and an agent has five watches. Nothing is read for the caller: a call is a hint.
"""

from __future__ import annotations

import random
import threading
from collections import deque
from collections.abc import Callable
from typing import Any

import tenacity

from elasticd.errors import StoreRefused, StoreUnavailable
from elasticd_agent.store.etcd.connection import PAUSE_MAX_S, PAUSE_MIN_S
from elasticd_agent.store.etcd.requests import EtcdRequests, text
from elasticd_agent.store.etcd.watch_stream import WatchStream

# When an etcd restarts, all agents come at once; this spreads them.
_SPREAD_S = 0.1


class EtcdWatch:
    """One of them."""

    def __init__(self, prefix: str, callback: Callable[[str], None], gone: Callable[[EtcdWatch], None]) -> None:
        self.prefix = prefix
        self._callback = callback
        self._on_close = gone
        # Held during a call, so that none is begun after close() has returned; a callback may close its own watch.
        self._calling = threading.RLock()
        self._confirmed = threading.Event()
        # The caller reads when we return: what was there before the first confirmation needs no call, if that is soon.
        self._caller_waits = True
        self._refused: StoreRefused | None = None
        self._closed = False

    def close(self) -> None:
        with self._calling:
            self._closed = True
        self._on_close(self)

    def wait(self, timeout_s: float) -> None:
        """Until etcd has confirmed it, if that is soon. Raises StoreRefused if it will not have it."""
        self._confirmed.wait(timeout_s)
        with self._calling:
            self._caller_waits = False
        if self._refused is not None:
            raise self._refused

    def refuse(self, error: StoreRefused) -> bool:
        """False: nobody waits for it any more."""
        with self._calling:
            if not self._caller_waits or self._confirmed.is_set():
                return False
            self._refused = error
            self._confirmed.set()
            return True

    def confirmed(self) -> None:
        with self._calling:
            first_and_in_time = self._caller_waits and not self._confirmed.is_set()
            self._confirmed.set()
            if not first_and_in_time:
                self.notify(self.prefix)

    def notify(self, key: str) -> None:
        with self._calling:
            if not self._closed:
                self._callback(key)


class EtcdWatches:
    """All of one store's. A thread follows the stream while there is any."""

    def __init__(self, etcd: EtcdRequests) -> None:
        self._etcd = etcd
        self._lock = threading.Lock()  # guards what follows, never held during a call
        self._watches: list[EtcdWatch] = []
        self._thread: threading.Thread | None = None
        self._stream: WatchStream | None = None
        self._unconfirmed: deque[EtcdWatch] = deque()  # etcd confirms them in the order in which they were asked for
        self._by_id: dict[int, EtcdWatch] = {}
        self._refused_watch: EtcdWatch | None = None
        self._closing = threading.Event()

    def begin(self, prefix: str, callback: Callable[[str], None]) -> EtcdWatch:
        """Raises nothing but StoreRefused, before it was ever confirmed."""
        watch = EtcdWatch(prefix, callback, self._remove)
        with self._lock:
            self._watches.append(watch)
            if self._stream is not None:
                self._request_watch(watch, self._stream)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="etcd watches", daemon=True)
                self._thread.start()
        watch.wait(self._etcd.connection.timeout_s)
        return watch

    def close(self) -> None:
        self._closing.set()
        with self._lock:
            watches, stream, thread = list(self._watches), self._stream, self._thread
        if stream is not None:
            stream.cancel()
        for watch in watches:
            watch.close()
        if thread is not None and thread is not threading.current_thread():
            # It may be in the middle of a request.
            thread.join(self._etcd.connection.timeout_s + 1.0)

    def _remove(self, watch: EtcdWatch) -> None:
        with self._lock:
            if watch in self._watches:
                self._watches.remove(watch)
            stream = self._stream
            if stream is None:
                return
            if not self._watches:
                stream.cancel()
            for number in [n for n, known in self._by_id.items() if known is watch]:
                del self._by_id[number]
                self._etcd.end_watch(stream, number)

    def _request_watch(self, watch: EtcdWatch, stream: WatchStream) -> None:
        self._unconfirmed.append(watch)
        self._etcd.begin_watch(stream, watch.prefix)

    def _run(self) -> None:
        # A stream on which etcd has confirmed a watch counts as a success: the next one begins without a long pause.
        again = tenacity.Retrying(
            retry=tenacity.retry_if_exception_type((StoreUnavailable, StoreRefused)),
            wait=tenacity.wait_random_exponential(multiplier=PAUSE_MIN_S, max=PAUSE_MAX_S),
            stop=tenacity.stop_when_event_set(self._closing),
            sleep=tenacity.sleep_using_event(self._closing),
            reraise=True,
        )
        try:
            self._follow()
        except (StoreUnavailable, StoreRefused):
            pass  # what it was has been said
        while self._has_watches():
            try:
                again(self._subscribe)
            except (StoreUnavailable, StoreRefused):
                pass  # closing
            self._closing.wait(random.uniform(0, _SPREAD_S))

    def _has_watches(self) -> bool:
        """False: this thread ends; the next watch begins another one."""
        with self._lock:
            wanted = bool(self._watches) and not self._closing.is_set()
            if not wanted:
                self._thread = None
            return wanted

    def _subscribe(self) -> None:
        """After a failure: a request first, which finds a member that answers, and a new token if ours has ended."""
        with self._lock:
            doubtful = self._refused_watch if self._refused_watch in self._watches else next(iter(self._watches), None)
        if doubtful is None:
            return
        try:
            self._etcd.count(doubtful.prefix)
            self._refused_watch = None
            self._follow()
        except StoreRefused as error:
            if doubtful.refuse(error):
                doubtful.close()
            self._etcd.connection.outage.failed(str(error))
            raise

    def _follow(self) -> None:
        """Returns when a stream has ended on which a watch was confirmed. Raises StoreUnavailable if none was."""
        stream = self._etcd.follow()
        with self._lock:
            self._stream, self._unconfirmed, self._by_id = stream, deque(), {}
            for watch in self._watches:
                self._request_watch(watch, stream)
        if self._closing.is_set():
            stream.cancel()
        confirmed = False
        try:
            for response in stream:
                if response.created:
                    if not self._on_created(response, stream):
                        break
                    confirmed = True
                elif not self._on_events(response):
                    break
        finally:
            with self._lock:
                self._stream = None
            stream.cancel()
        if not confirmed:
            raise StoreUnavailable("etcd ended the watches at once")

    def _on_created(self, response: Any, stream: WatchStream) -> bool:
        """False: etcd will not have it: it is not allowed, or the token has ended."""
        with self._lock:
            watch = self._unconfirmed.popleft()
            if response.canceled:
                self._refused_watch = watch
                return False
            if watch not in self._watches:
                self._etcd.end_watch(stream, response.watch_id)
                return True
            self._by_id[response.watch_id] = watch
        watch.confirmed()
        return True

    def _on_events(self, response: Any) -> bool:
        """False: etcd has ended a watch that we have not."""
        with self._lock:
            watch = self._by_id.get(response.watch_id)
        if watch is None:
            return True
        for event in response.events:
            watch.notify(text(event.kv.key))
        return not response.canceled
