"""A watchdog's side of sd_notify: an address to say "I still decide" to, and for how long nobody has said so.

It exists so that a container has what WatchdogSec= is to a unit: an agent that hangs is started again while its jobs go
on; the kubelet's answer would be to end the container, jobs and all. Nothing here waits, and nothing is ended here.
"""

from __future__ import annotations

import os
import secrets
import socket
from collections.abc import Mapping

MAX_DATAGRAM_BYTES = 4096
MAX_DATAGRAMS = 1000
"""Datagrams read in one look: somebody who floods the address must not keep us."""


class WatchdogMonitor:
    """`within_s` is what who feeds is told. Times are the watcher's own, see `look`."""

    def __init__(self, timeout_s: float) -> None:
        self.timeout_s = timeout_s
        self._last_feed_at: float | None = None
        self._stopping = False
        # In the abstract namespace: whoever watches has no directory, and leaves no file behind.
        self._address = f"elasticd-super-{os.getpid()}-{secrets.token_hex(8)}"
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK)
        self._socket.bind(f"\0{self._address}")

    @property
    def environment(self) -> Mapping[str, str]:
        """What the one who is to feed finds in its environment."""
        return {"NOTIFY_SOCKET": f"@{self._address}", "WATCHDOG_USEC": str(round(self.timeout_s * 1e6))}

    def reset(self) -> None:
        """Another one is started: it counts from its first word on."""
        self._receive()
        self._last_feed_at, self._stopping = None, False

    def expired(self, now: float) -> bool:
        """True if it has said nothing for too long. Who is not ready yet, or is leaving, is not waited for."""
        said = self._receive()
        self._stopping = self._stopping or "STOPPING=1" in said
        if self._stopping:
            return False
        if {"WATCHDOG=1", "READY=1"} & said:
            self._last_feed_at = now
        return self._last_feed_at is not None and now - self._last_feed_at > self.timeout_s

    def _receive(self) -> set[str]:
        said: set[str] = set()
        for _ in range(MAX_DATAGRAMS):
            try:
                said.update(self._socket.recv(MAX_DATAGRAM_BYTES).decode(errors="replace").splitlines())
            except OSError:
                break
        return said

    def close(self) -> None:
        self._socket.close()
