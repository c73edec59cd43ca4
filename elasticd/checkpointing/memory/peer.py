"""The process that has connected a local socket. Its end may be unknown: its children may hold the connection open."""

from __future__ import annotations

import socket
import struct
from pathlib import Path


def process_has_ended(connection: socket.socket) -> bool:
    """True if the process has ended with all of its threads: the main thread may be gone while another one still
    writes.
    """
    fields = _stat_fields(connection)
    return not fields or (fields[0] in "ZX" and int(fields[_THREADS_FIELD]) <= 1)


def is_running(connection: socket.socket) -> bool:
    """It is neither stopped nor dead."""
    fields = _stat_fields(connection)
    return bool(fields) and fields[0] not in "TtZX"


def pid(connection: socket.socket) -> int:
    """The process that connected the other end."""
    number: int = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))[0]
    return number


_THREADS_FIELD = 17
"""num_threads of proc_pid_stat(5), counted from the state."""


def _stat_fields(connection: socket.socket) -> list[str]:
    """The fields of /proc from the state on; none for a process that is not there any more."""
    try:
        return Path("/proc", str(pid(connection)), "stat").read_text(errors="replace").rpartition(")")[2].split()
    except OSError:
        return []
