"""Notifications to systemd: ready, status, watchdog keep-alive, stopping, reloading.

The protocol is sd_notify(3): one datagram of KEY=VALUE lines to the socket in NOTIFY_SOCKET. Only the main loop may
call `feed`: from any other thread the watchdog would monitor nothing. No call blocks for long or raises: a service
manager that does not read is no reason to stop.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Mapping, MutableMapping

_NOTIFY_VARIABLES = ("NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID")
_FEEDS_PER_WATCHDOG = 4
"""sd_watchdog_enabled(3) recommends two; with four a late keep-alive does no harm."""
_SEND_TIMEOUT_S = 1.0
"""The time for single notifications. A keep-alive does not wait: another one follows."""


class Notifier:
    """Sends from a new socket each time: systemd may have been replaced in between. Methods return whether it did."""

    def __init__(
        self,
        address: str = "",
        *,
        watchdog_s: float | None = None,
        inherited: Mapping[str, str] | None = None,
        clock_ns: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        """`address` "": there is no service manager, and nothing is sent."""
        # An abstract address is written with @ for its leading zero byte.
        self._address = "\0" + address[1:] if address.startswith("@") else address
        self._clock_ns = clock_ns
        self._last_feed_ns: int | None = None
        self.watchdog_s = watchdog_s
        """systemd ends the process after this time without `feed`; None: no watchdog."""
        self.inherited: Mapping[str, str] = dict(inherited or {})
        """The variables taken out of the environment: a process passes them on when it replaces itself by exec."""

    def ready(self, status: str = "") -> bool:
        """Start or reload is done."""
        return self._send(["READY=1", *_status_lines(status)])

    def feed(self) -> bool:
        """The main loop runs. Cheap enough for every turn."""
        if self.watchdog_s is None:
            return False
        now = self._clock_ns()
        if self._last_feed_ns is not None and now - self._last_feed_ns < self.watchdog_s * 1e9 / _FEEDS_PER_WATCHDOG:
            return False
        sent = self._send(["WATCHDOG=1"], wait_s=0.0)
        if sent:
            self._last_feed_ns = now
        return sent

    def reloading(self) -> bool:
        """The configuration is being reloaded; `ready` ends it."""
        # systemd recognises the reply to this reload by the time.
        return self._send(["RELOADING=1", f"MONOTONIC_USEC={self._clock_ns() // 1000}"])

    def stopping(self, within_s: float, status: str = "") -> bool:
        """The process stops; systemd waits this long for it, independently of TimeoutStopSec=."""
        return self._send(["STOPPING=1", f"EXTEND_TIMEOUT_USEC={max(0, int(within_s * 1e6))}", *_status_lines(status)])

    def _send(self, lines: list[str], wait_s: float = _SEND_TIMEOUT_S) -> bool:
        if not self._address:
            return False
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as out:
                out.settimeout(wait_s)
                out.sendto("\n".join(lines).encode(errors="replace"), self._address)
        except OSError:
            return False
        return True


def take_notifier(environ: MutableMapping[str, str], pid: int | None = None) -> Notifier:
    """The notifier for this environment. It removes the variables: no child may notify for the agent."""
    variables = {name: environ.pop(name) for name in _NOTIFY_VARIABLES if name in environ}
    address = variables.get("NOTIFY_SOCKET", "")
    # The third kind, vsock:, is for a manager outside of a virtual machine.
    if len(address) < 2 or address[0] not in "/@":
        return Notifier()
    watchdog_s = _watchdog_s(variables, os.getpid() if pid is None else pid)
    return Notifier(address, watchdog_s=watchdog_s, inherited=variables)


def _watchdog_s(variables: Mapping[str, str], pid: int) -> float | None:
    # Another WATCHDOG_PID: the variables are inherited from a parent that did not remove them.
    if variables.get("WATCHDOG_PID", str(pid)) != str(pid):
        return None
    usec = variables.get("WATCHDOG_USEC", "")
    return int(usec) / 1e6 if usec.isascii() and usec.isdigit() and int(usec) > 0 else None


def _status_lines(text: str) -> list[str]:
    """A newline in a job's name must not start another message."""
    return [f"STATUS={' '.join(text.split())}"] if text else []
