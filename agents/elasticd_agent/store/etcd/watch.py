"""Watches on etcd, all of a store's on one stream, that survive restarts, partitions and a store that lost its data.

Each watch follows from the moment at which etcd confirms it, so no revision that may be compacted is ever needed. When
the stream breaks, changes may be missed until a watch is confirmed again; it then names its whole prefix. One stream
for all, because a stream has a connection of its own, and an agent has six watches.

A watch is a hint and never a source of values: its callback names a key, and the reader reads the key. So events may be
repeated, merged or reordered without harm, and after a broken stream one call for the whole prefix makes up for all
that was missed. What must not happen is silence: a watch that etcd has cancelled, refused or lost is begun again until
it is closed.
"""

from __future__ import annotations

import random
import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import tenacity

from elasticd.errors import StoreRefused, StoreUnavailable
from elasticd_agent.store.etcd.connection import PAUSE_MAX_S, PAUSE_MIN_S, EtcdConnection
from elasticd_agent.store.etcd.keys import key_range, to_text
from elasticd_agent.store.etcd.proto import rpc
from elasticd_agent.store.etcd.stream import WatchStream

_RECONNECT_SPREAD_S = 0.1
"""When an etcd restarts, all agents reconnect at once; this spreads them."""


class EtcdWatch:
    """One watch: its prefixes, its callback, and whether etcd has confirmed it for all of them."""

    def __init__(
        self, prefixes: Sequence[str], callback: Callable[[str], None], on_close: Callable[[EtcdWatch], None]
    ) -> None:
        self.prefixes = prefixes
        self._callback = callback
        self._on_close = on_close
        # Held during a call, so that none begins after close() has returned; a callback may close its own watch.
        self._calling = threading.RLock()
        self._confirmed = threading.Event()
        self._unconfirmed = set(prefixes)  # those that etcd has never confirmed
        # The caller reads after `wait`: what was there before the first confirmation needs no call, if that is soon.
        self._caller_waits = True
        self._refused: StoreRefused | None = None
        self._closed = False

    def close(self) -> None:
        with self._calling:
            self._closed = True
        self._on_close(self)

    def wait_until_confirmed(self, timeout_s: float) -> None:
        """Until etcd has confirmed it, if that is soon. Raises StoreRefused if etcd refuses it."""
        self._confirmed.wait(timeout_s)
        with self._calling:
            self._caller_waits = False
        if self._refused is not None:
            raise self._refused

    def refuse(self, error: StoreRefused) -> bool:
        """False: the caller does not wait for it any more."""
        with self._calling:
            if not self._caller_waits or self._confirmed.is_set():
                return False
            self._refused = error
            self._confirmed.set()
            return True

    def on_confirmed(self, prefix: str) -> None:
        """Note that etcd follows the prefix from now on. Unless the caller is about to read it anyway, name the whole
        prefix.
        """
        with self._calling:
            first_and_in_time = self._caller_waits and prefix in self._unconfirmed
            self._unconfirmed.discard(prefix)
            if not self._unconfirmed:
                self._confirmed.set()
            if not first_and_in_time:
                self.notify(prefix)

    def notify(self, key: str) -> None:
        """Call back, unless the watch is closed."""
        with self._calling:
            if not self._closed:
                self._callback(key)


class EtcdWatches:
    """All watches of one store. A thread follows the stream while there are any."""

    def __init__(self, etcd: EtcdConnection) -> None:
        self._etcd = etcd
        self._lock = threading.Lock()  # guards what follows, never held during a call
        self._watches: list[EtcdWatch] = []
        self._thread: threading.Thread | None = None
        self._stream: WatchStream | None = None
        self._unconfirmed: deque[tuple[EtcdWatch, str]] = deque()  # etcd confirms them in the order of their requests
        self._by_id: dict[int, EtcdWatch] = {}
        self._refused: tuple[EtcdWatch, str] | None = None
        self.ended_streams = 0
        self._closing = threading.Event()

    def begin(self, callback: Callable[[str], None], prefixes: Sequence[str]) -> EtcdWatch:
        """Begin a watch and wait a moment for its confirmation. Raises StoreRefused if etcd refuses it.

        One wait for all prefixes: every agent of a large job begins its watches at the same moment.
        """
        watch = EtcdWatch(prefixes, callback, self._remove)
        with self._lock:
            self._watches.append(watch)
            if self._stream is not None:
                self._request_watch(watch, self._stream)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="etcd watches", daemon=True)
                self._thread.start()
        watch.wait_until_confirmed(self._etcd.timeout_s)
        return watch

    def close(self) -> None:
        """End the stream and its thread. No callback begins after this."""
        self._closing.set()
        with self._lock:
            watches, stream, thread = list(self._watches), self._stream, self._thread
        if stream is not None:
            stream.cancel()
        for watch in watches:
            watch.close()
        if thread is not None and thread is not threading.current_thread():
            thread.join(self._etcd.timeout_s + 1.0)  # it may be in the middle of a request

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
                _cancel_watch(stream, number)

    def _request_watch(self, watch: EtcdWatch, stream: WatchStream) -> None:
        for prefix in watch.prefixes:
            self._unconfirmed.append((watch, prefix))
            request = rpc.WatchCreateRequest(**key_range(prefix))
            stream.send(rpc.WatchRequest(create_request=request))

    def _run(self) -> None:
        """Keep one stream for all watches, until none is left.

        A stream ends when its member dies, its token expires or its network breaks. The next one subscribes all watches
        again and reports every prefix as changed, since changes in between had no watch. `_RECONNECT_SPREAD_S` keeps
        the agents of a job from coming back in step.
        """
        # A stream on which etcd has confirmed a watch is a success: the next one begins without a long pause.
        again = tenacity.Retrying(
            retry=tenacity.retry_if_exception_type((StoreUnavailable, StoreRefused)),
            wait=tenacity.wait_random_exponential(multiplier=PAUSE_MIN_S, max=PAUSE_MAX_S),
            stop=tenacity.stop_when_event_set(self._closing),
            sleep=tenacity.sleep_using_event(self._closing),
            reraise=True,
        )
        try:
            self._follow_stream()
        except (StoreUnavailable, StoreRefused):
            pass  # it was reported
        while self._has_watches():
            try:
                again(self._subscribe)
            except (StoreUnavailable, StoreRefused):
                pass  # closing
            self._closing.wait(random.uniform(0, _RECONNECT_SPREAD_S))

    def _has_watches(self) -> bool:
        """False: this thread ends; the next watch starts another one."""
        with self._lock:
            has = bool(self._watches) and not self._closing.is_set()
            if not has:
                self._thread = None
            return has

    def _subscribe(self) -> None:
        """After a failure: first a request, which finds a member that answers, and renews an expired token."""
        with self._lock:
            watches = self._watches
            if not watches:
                return
            refused = self._refused
            watch, prefix = refused if refused and refused[0] in watches else (watches[0], watches[0].prefixes[0])
        try:
            self._etcd.range(prefix, count_only=True)
            self._refused = None
            self._follow_stream()
        except StoreRefused as error:
            if watch.refuse(error):
                watch.close()
            self._etcd.report_failure(str(error))
            raise

    def _follow_stream(self) -> None:
        """Returns when a stream has ended on which a watch was confirmed. Raises StoreUnavailable if none was."""
        stream = self._etcd.open_watch_stream()
        with self._lock:
            self._stream = stream
            self._unconfirmed = deque()
            self._by_id = {}
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
                self.ended_streams += 1
            stream.cancel()
        if not confirmed:
            raise StoreUnavailable("etcd ended the watches at once")

    def _on_created(self, response: Any, stream: WatchStream) -> bool:
        """False: etcd refuses the watch: it is not permitted, or the token has expired."""
        with self._lock:
            watch, prefix = self._unconfirmed.popleft()
            if response.canceled:
                self._refused = watch, prefix
                return False
            if watch not in self._watches:
                _cancel_watch(stream, response.watch_id)
                return True
            self._by_id[response.watch_id] = watch
        watch.on_confirmed(prefix)
        return True

    def _on_events(self, response: Any) -> bool:
        """False: etcd has ended a watch that is still in use."""
        with self._lock:
            watch = self._by_id.get(response.watch_id)
        if watch is None:
            return True
        for event in response.events:
            watch.notify(to_text(event.kv.key))
        return not response.canceled


def _cancel_watch(stream: WatchStream, number: int) -> None:
    stream.send(rpc.WatchRequest(cancel_request=rpc.WatchCancelRequest(watch_id=number)))
