"""A watchdog's side of sd_notify: an address to say "I still decide" to, and for how long nobody has said so.

It exists so that a container has what WatchdogSec= is to a unit: an agent that hangs is started again while its jobs go
on; the kubelet's answer would be to end the container, jobs and all. Nothing here waits, and nothing is ended here.
"""

from __future__ import annotations

import os
import secrets
import socket
from collections.abc import Mapping

LONGEST = 4096
AT_ONCE = 1000
"""Datagrams read in one look: somebody who floods the address must not keep us."""


class Feeding:
    """`within_s` is what who feeds is told. Times are the watcher's own, see `look`."""

    def __init__(self, within_s: float) -> None:
        self.within_s = within_s
        self._fed_at: float | None = None
        self._leaving = False
        # In the abstract namespace: whoever watches has no directory, and leaves no file behind.
        self._address = f"elasticd-super-{os.getpid()}-{secrets.token_hex(8)}"
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK)
        self._socket.bind(f"\0{self._address}")

    @property
    def variables(self) -> Mapping[str, str]:
        """What the one who is to feed finds in its environment."""
        return {"NOTIFY_SOCKET": f"@{self._address}", "WATCHDOG_USEC": str(round(self.within_s * 1e6))}

    def begin(self) -> None:
        """Another one is started: it counts from its first word on."""
        self._hear()
        self._fed_at, self._leaving = None, False

    def look(self, now: float) -> bool:
        """True if it has said nothing for too long. Who is not ready yet, or is leaving, is not waited for."""
        said = self._hear()
        self._leaving = self._leaving or "STOPPING=1" in said
        if self._leaving:
            return False
        if {"WATCHDOG=1", "READY=1"} & said:
            self._fed_at = now
        return self._fed_at is not None and now - self._fed_at > self.within_s

    def _hear(self) -> set[str]:
        said: set[str] = set()
        for _ in range(AT_ONCE):
            try:
                said.update(self._socket.recv(LONGEST).decode(errors="replace").splitlines())
            except OSError:
                break
        return said

    def close(self) -> None:
        self._socket.close()
