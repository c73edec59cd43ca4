"""Standing connections to other agents: the connection of a killed process is reset at once.

The kernel closes a dead process's connections within a millisecond; its workers' peers may need a second to fail, and
its lease expires after three. A broken connection proves nothing (the network may have broken it), so it leads to a
probe; a standing one proves nothing either. No data is sent. Each is a file descriptor: above an eighth of the limit
the other nodes have none, and their death is noticed later.
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
"""A broken or failed connection is tried again after this: probes have decided by then."""
ORPHAN_S = 1.0


class PeerLinks:
    """One thread keeps them all. `broken(node)` is called from it, must return at once and must not call back."""

    def __init__(self, broken: Callable[[str], None]) -> None:
        self._broken = broken
        soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        self._most = sys.maxsize if soft == resource.RLIM_INFINITY else soft // 8  # the rest is for other uses
        self._nodes: dict[str, Address] = {}
        self._lock = threading.Lock()
        self._waker = Waker()
        self._closing = False
        self._thread: threading.Thread | None = None

    def keep(self, nodes: Mapping[str, Address]) -> None:
        """Keep a connection to each of these nodes (literal address, port) and to no other. Safe from any thread."""
        with self._lock:
            if self._closing or dict(nodes) == self._nodes:
                return
            self._nodes = dict(nodes)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="elasticd-links", daemon=False)
                self._thread.start()
        self._waker.wake()

    def close(self) -> None:
        """Close all connections. May be called again."""
        with self._lock:
            self._closing = True
        self._waker.wake()
        if self._thread is not None:
            self._thread.join()
        self._waker.close()

    def _run(self) -> None:
        links: dict[str, tuple[Address, socket.socket]] = {}
        tried: dict[str, float] = {}
        with selectors.DefaultSelector() as selector:
            selector.register(self._waker, selectors.EVENT_READ, None)
            while not self._closing and threading.main_thread().is_alive():
                with self._lock:
                    nodes = dict(self._nodes)
                for node in [node for node, (address, _) in links.items() if nodes.get(node) != address]:
                    _disconnect(selector, links.pop(node)[1])
                now = time.monotonic()
                for node, address in nodes.items():
                    if (
                        node not in links
                        and now >= tried.get(node, 0.0) + RECONNECT_AFTER_S
                        and len(links) < self._most
                    ):
                        tried[node] = now
                        sock = _connect(address)
                        if sock is not None:
                            links[node] = address, sock
                            selector.register(sock, selectors.EVENT_READ, node)
                for key, _ in selector.select(ORPHAN_S):
                    if key.data is None:
                        self._waker.drain()
                    elif _has_ended(links[key.data][1]):
                        _disconnect(selector, links.pop(key.data)[1])
                        if key.data in nodes:
                            self._broken(key.data)
            for _, sock in links.values():
                _disconnect(selector, sock)


def _connect(address: Address) -> socket.socket | None:
    """A connection being made; a failure shows as its end."""
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
    try:
        return not sock.recv(4096)
    except BlockingIOError:
        return False
    except OSError:
        return True


def _disconnect(selector: selectors.BaseSelector, sock: socket.socket) -> None:
    selector.unregister(sock)
    sock.close()
