"""Accepts HTTP connections, bounded in number and time, with a thread for each.

A slow reader, a flood, or a client that trickles bytes costs the agent a few threads for a few seconds. Host names are
never resolved.
"""

from __future__ import annotations

import contextlib
import logging
import math
import selectors
import socket
import socketserver
import threading
import time
from collections import Counter
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from elasticd_agent.system.waker import Waker

_log = logging.getLogger("elasticd.http")


@dataclass(slots=True)
class _Connection:
    """`until`: when it is cut, infinite afterwards. `host`: the client's."""

    deadline: float
    thread: threading.Thread
    host: str
    is_request_read: bool = False


class HttpListener(ThreadingHTTPServer):
    """At most `max_connections` at once, each cut after `connection_s` seconds.

    One too many replaces the oldest connection, of the host that has most, whose request is not complete; if there is
    none, it is closed. So a client that holds connections open shuts itself out, and not the prober that would kill a
    container.
    """

    daemon_threads = True
    block_on_close = False
    request_queue_size = 32
    allow_reuse_port = False  # some Pythons' HTTPServer would share the port with another server
    timeout = 0.0  # handle_request is called when a connection waits

    def __init__(
        self, address: Any, handler: type[BaseHTTPRequestHandler], *, connection_s: float, most: int, name: str
    ) -> None:
        self.connection_s, self.max_connections, self.name = connection_s, most, name
        self._lock = threading.Lock()
        self._connections: dict[socket.socket, _Connection] = {}
        self._closing = False
        self._waker = Waker()
        try:
            super().__init__(address, handler)
        except BaseException:
            self._waker.close()
            raise
        self._serving = threading.Thread(target=self._serve, name="elasticd-http", daemon=True)

    def start(self) -> None:
        self._serving.start()

    def _serve(self) -> None:
        """Accept connections, and cut expired ones. Waiting costs nothing."""
        with selectors.PollSelector() as selector:  # it needs no descriptor: there may be none left
            selector.register(self.socket, selectors.EVENT_READ)
            selector.register(self._waker, selectors.EVENT_READ)
            while not self._closing:
                ready = selector.select(self._until_next_cut())
                if any(key.fileobj is self.socket for key, _ in ready):
                    try:
                        self.handle_request()
                    except Exception:  # noqa: BLE001 an error of one connection must not close the port for the others
                        _log.warning("%s could not accept a connection", self.name, exc_info=True)
                        time.sleep(0.1)
                # A socket's own timeout starts anew with every byte: a trickling client would stay for ever.
                self.cut_expired(time.monotonic())

    def _until_next_cut(self) -> float | None:
        with self._lock:
            first = min((one.deadline for one in self._connections.values()), default=math.inf)
        return None if first == math.inf else max(0.0, first - time.monotonic())

    def server_bind(self) -> None:
        # HTTPServer's own resolves its name, which may take half a minute.
        socketserver.TCPServer.server_bind(self)
        self.server_name, self.server_port = "elasticd", 0

    def get_request(self) -> tuple[Any, Any]:
        try:
            return super().get_request()
        except OSError:
            # Out of file descriptors: the connection stays pending, and without a pause the loop would spin on it.
            time.sleep(0.1)
            raise

    def process_request(self, request: Any, client_address: Any) -> None:
        serve, name = self.process_request_thread, "elasticd-http-client"
        thread = threading.Thread(target=serve, args=(request, client_address), name=name, daemon=True)
        host = str(client_address[0]) if client_address else ""  # a unix socket's clients have no address
        with self._lock:
            room = self._make_room()
            if room:
                self._connections[request] = _Connection(time.monotonic() + self.connection_s, thread, host)
        if room:
            thread.start()
        else:
            self.shutdown_request(request)

    def _make_room(self) -> bool:
        """Call with the lock. Threads that were cut need a moment to end: there are never more than `max_connections`
        of them."""
        counted = [(request, one) for request, one in self._connections.items() if one.deadline != math.inf]
        if len(counted) < self.max_connections:
            return len(self._connections) < 2 * self.max_connections
        asking = [(request, one) for request, one in counted if not one.is_request_read]  # the oldest first
        if not asking or len(self._connections) >= 2 * self.max_connections:
            return False
        ((host, _),) = Counter(one.host for _, one in asking).most_common(1)
        self._cut(*next(pair for pair in asking if pair[1].host == host))
        return True

    def shutdown_request(self, request: Any) -> None:
        try:
            super().shutdown_request(request)
        finally:  # `close` waits for the connections that are still in here
            with self._lock:
                self._connections.pop(request, None)

    def extend(self, request: socket.socket, seconds: float) -> None:
        """Give this connection `seconds` from now on: its request is complete, and the answer takes longer."""
        with self._lock:
            one = self._connections.get(request)
            if one is not None and one.deadline != math.inf:
                one.deadline, one.is_request_read = time.monotonic() + seconds, True

    def cut_expired(self, now: float) -> None:
        with self._lock:
            for request, one in self._connections.items():
                if now >= one.deadline:
                    self._cut(request, one)

    @staticmethod
    def _cut(request: socket.socket, one: _Connection) -> None:
        one.deadline = math.inf
        # Not SSLSocket.shutdown, which would drop the encryption first.
        with contextlib.suppress(OSError):
            socket.socket.shutdown(request, socket.SHUT_RDWR)

    def close(self, within: float) -> bool:
        """Stop listening, cut every connection; True when every thread has ended within `within` seconds."""
        until = time.monotonic() + within
        self._closing = True
        self._waker.wake()
        if self._serving.is_alive():
            self._serving.join(max(0.0, until - time.monotonic()))
        self.server_close()
        self.cut_expired(math.inf)
        threads = [self._serving, *self.threads()]
        if not self._serving.is_alive():
            self._waker.close()
        for thread in (thread for thread in threads if thread.ident is not None):
            thread.join(max(0.0, until - time.monotonic()))
        stuck = [thread.name for thread in threads if thread.is_alive()]
        if stuck:
            _log.warning("%s is closed, but %d of its threads did not end", self.name, len(stuck))
        return not stuck

    def threads(self) -> list[threading.Thread]:
        with self._lock:
            return [one.thread for one in self._connections.values()]

    def handle_error(self, request: Any, client_address: Any) -> None:
        _log.debug("a connection of %s ended early", self.name, exc_info=True)
