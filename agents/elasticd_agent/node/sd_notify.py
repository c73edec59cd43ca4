"""What the daemon tells systemd: it is ready, what it does, that it still decides, that it stops or reloads.

The protocol is sd_notify(3): one datagram of KEY=VALUE lines to the socket that NOTIFY_SOCKET names. Only the deciding
loop may call `feed`: fed by any other thread the watchdog would watch nothing. Nothing here blocks for long or raises:
a service manager that does not listen is no reason to stop.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Mapping, MutableMapping
from dataclasses import dataclass, field
from typing import Protocol

_VARIABLES = ("NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID")
_FEEDS_PER_WATCHDOG = 4
"""sd_watchdog_enabled(3) asks for two; with four a late one does no harm."""
_SEND_TIMEOUT_S = 1.0
"""For what is said once. A feed does not wait: there will be another."""


class Notifier(Protocol):
    @property
    def watchdog_s(self) -> float | None:
        """systemd ends who does not feed for so long; None: nobody watches."""

    @property
    def inherited(self) -> Mapping[str, str]:
        """What was taken out of the environment: a process that replaces itself by exec gives it to its successor."""

    def ready(self, status: str = "") -> bool:
        """Start or reload is done. False: it could not be said."""

    def feed(self) -> bool:
        """The deciding loop turns. Cheap enough for every turn. True when something was sent."""

    def reloading(self) -> bool:
        """The configuration is being read again; `ready` ends it."""

    def stopping(self, within_s: float, status: str = "") -> bool:
        """It leaves, and systemd shall wait so long for it, whatever TimeoutStopSec= says."""


@dataclass(frozen=True, slots=True)
class NullNotifier:
    """Nobody asked to be told."""

    watchdog_s: float | None = None
    inherited: Mapping[str, str] = field(default_factory=dict)

    def ready(self, status: str = "") -> bool:
        return False

    def feed(self) -> bool:
        return False

    def reloading(self) -> bool:
        return False

    def stopping(self, within_s: float, status: str = "") -> bool:
        return False


class SystemdNotifier:
    """Sends to one address, from a socket made anew each time: systemd may have been replaced in between."""

    def __init__(
        self,
        address: str,
        *,
        watchdog_s: float | None = None,
        inherited: Mapping[str, str] | None = None,
        clock_ns: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        # An abstract address is written with @ for its leading zero byte.
        self._address = "\0" + address[1:] if address.startswith("@") else address
        self._watchdog_s = watchdog_s
        self._inherited = dict(inherited or {})
        self._clock_ns = clock_ns
        self._last_feed_ns: int | None = None

    @property
    def watchdog_s(self) -> float | None:
        return self._watchdog_s

    @property
    def inherited(self) -> Mapping[str, str]:
        return self._inherited

    def ready(self, status: str = "") -> bool:
        return self._send(["READY=1", *_status(status)])

    def feed(self) -> bool:
        if self._watchdog_s is None:
            return False
        now = self._clock_ns()
        if self._last_feed_ns is not None and now - self._last_feed_ns < self._watchdog_s * 1e9 / _FEEDS_PER_WATCHDOG:
            return False
        sent = self._send(["WATCHDOG=1"], wait_s=0.0)
        if sent:
            self._last_feed_ns = now
        return sent

    def reloading(self) -> bool:
        # systemd tells an answer to this reload from an older one by the time.
        return self._send(["RELOADING=1", f"MONOTONIC_USEC={self._clock_ns() // 1000}"])

    def stopping(self, within_s: float, status: str = "") -> bool:
        return self._send(["STOPPING=1", f"EXTEND_TIMEOUT_USEC={max(0, int(within_s * 1e6))}", *_status(status)])

    def _send(self, lines: list[str], wait_s: float = _SEND_TIMEOUT_S) -> bool:
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as out:
                out.settimeout(wait_s)
                out.sendto("\n".join(lines).encode(errors="replace"), self._address)
        except OSError:
            return False
        return True


def open_notifier(environ: MutableMapping[str, str], pid: int | None = None) -> Notifier:
    """The notifier that the environment asks for. It takes the variables out: no child may speak for the daemon."""
    taken = {name: environ.pop(name) for name in _VARIABLES if name in environ}
    address = taken.get("NOTIFY_SOCKET", "")
    # Besides these there is vsock:, for the manager of a virtual machine outside of it.
    if len(address) < 2 or address[0] not in "/@":
        return NullNotifier()
    return SystemdNotifier(address, watchdog_s=_watchdog_s(taken, os.getpid() if pid is None else pid), inherited=taken)


def _watchdog_s(variables: Mapping[str, str], pid: int) -> float | None:
    # WATCHDOG_PID is somebody else's when the variables came down from a parent that did not remove them.
    if variables.get("WATCHDOG_PID", str(pid)) != str(pid):
        return None
    usec = variables.get("WATCHDOG_USEC", "")
    return int(usec) / 1e6 if usec.isascii() and usec.isdigit() and int(usec) > 0 else None


def _status(text: str) -> list[str]:
    return [f"STATUS={_one_line(text)}"] if text else []


def _one_line(text: str) -> str:
    """One line of it: a newline in a job's name must not become another message."""
    return " ".join(text.split())
