"""Standing connections to other agents: a process that is killed hangs up at once, long before anybody misses it.

The kernel closes a dead process's connections within a millisecond of its death, while its workers' peers may need a
second to fail over it, and its lease needs three. A line that breaks proves nothing (the network may have broken it):
whoever hears of it knocks. A line that stays proves nothing either. Nothing is sent over one. Where this process may
have too few file descriptors for all of them, some nodes have none, and are missed later.
"""

from __future__ import annotations

import resource
import selectors
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping

from elasticd_agent.system.waker import Waker

Address = tuple[str, int]

RECONNECT_AFTER_S = 5.0
"""A line that broke, or could not be had, is tried again no sooner: knocking has decided by then."""
ORPHAN_S = 1.0


class PeerLinks:
    """One thread holds them all. `broken(node)` is called from it, must return at once and must not call back."""

    def __init__(self, broken: Callable[[str], None]) -> None:
        self._broken = broken
        soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        self._most = sys.maxsize if soft == resource.RLIM_INFINITY else soft // 8  # the rest of them is for others
        self._wanted: dict[str, Address] = {}
        self._lock = threading.Lock()
        self._waker = Waker()
        self._closing = False
        self._thread: threading.Thread | None = None

    def keep(self, nodes: Mapping[str, Address]) -> None:
        """Hold a line to each of these nodes (literal address, port) and to nobody else. Safe from any thread."""
        with self._lock:
            if self._closing or dict(nodes) == self._wanted:
                return
            self._wanted = dict(nodes)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="elasticd-lines", daemon=False)
                self._thread.start()
        self._waker.wake()

    def close(self) -> None:
        """Hang up everywhere. May be called again."""
        with self._lock:
            self._closing = True
        self._waker.wake()
        if self._thread is not None:
            self._thread.join()
        self._waker.close()

    def _run(self) -> None:
        held: dict[str, tuple[Address, socket.socket]] = {}
        tried: dict[str, float] = {}
        with selectors.DefaultSelector() as selector:
            selector.register(self._waker, selectors.EVENT_READ, None)
            while not self._closing and threading.main_thread().is_alive():
                with self._lock:
                    wanted = dict(self._wanted)
                for node in [node for node, (address, _) in held.items() if wanted.get(node) != address]:
                    _disconnect(selector, held.pop(node)[1])
                now = time.monotonic()
                for node, address in wanted.items():
                    if node not in held and now >= tried.get(node, 0.0) + RECONNECT_AFTER_S and len(held) < self._most:
                        tried[node] = now
                        sock = _connect(address)
                        if sock is not None:
                            held[node] = address, sock
                            selector.register(sock, selectors.EVENT_READ, node)
                for key, _ in selector.select(ORPHAN_S):
                    if key.data is None:
                        self._waker.drain()
                    elif _has_ended(held[key.data][1]):
                        _disconnect(selector, held.pop(key.data)[1])
                        if key.data in wanted:
                            self._broken(key.data)
            for _, sock in held.values():
                _disconnect(selector, sock)


def _connect(address: Address) -> socket.socket | None:
    """A connection on its way; that it fails shows as its end."""
    family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
    try:
        sock = socket.socket(family, socket.SOCK_STREAM)
    except OSError:
        return None
    sock.setblocking(False)
    try:
        sock.connect_ex(address)
    except OSError:
        sock.close()
        return None
    return sock


def _has_ended(sock: socket.socket) -> bool:
    """Reads what the other side says when it is called; True once it has hung up."""
    try:
        return not sock.recv(4096)
    except BlockingIOError:
        return False
    except OSError:
        return True


def _disconnect(selector: selectors.BaseSelector, sock: socket.socket) -> None:
    selector.unregister(sock)
    sock.close()
