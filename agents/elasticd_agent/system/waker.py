"""Wakes a thread that waits in select or poll."""

from __future__ import annotations

import socket
from contextlib import suppress


class Waker:
    """Register it for reading in the waiting thread; `wake` is safe from any thread and from signal handlers."""

    def __init__(self) -> None:
        self._reader, self._writer = socket.socketpair()
        self._reader.setblocking(False)
        self._writer.setblocking(False)

    def fileno(self) -> int:
        return self._reader.fileno()

    def wake(self) -> None:
        with suppress(OSError):  # full: the thread is about to wake in any case; closed: it has ended
            self._writer.send(b"!")

    def drain(self) -> None:
        """Take back what was sent so far: the next wait waits again."""
        with suppress(BlockingIOError):
            self._reader.recv(4096)

    def close(self) -> None:
        self._reader.close()
        self._writer.close()
