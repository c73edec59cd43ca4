"""The process that has connected a local socket. Its end may be unknown: its children may hold the connection open."""

from __future__ import annotations

import socket
import struct
from pathlib import Path


def has_ended(connection: socket.socket) -> bool:
    return _state(connection) in ("Z", "X")


def runs(connection: socket.socket) -> bool:
    """It is neither stopped nor dead."""
    return _state(connection) not in ("T", "t", "Z", "X")


def _state(connection: socket.socket) -> str:
    """As /proc names it; X for a process that is not there any more."""
    pid, _, _ = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    try:
        return Path("/proc", str(pid), "stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return "X"
