"""Writes to a file descriptor that may block, from a queue that does not: our output never blocks the agent.

A terminal under Ctrl-S, a stopped pager or a closed pipe costs only the lines that it does not take. The descriptor
itself cannot be made non-blocking, since that flag is shared with the workers and the shell, so one thread a descriptor
writes. Accepted pieces are never dropped while the descriptor works, and never interleaved. A full disk loses what it
does not take, and no later line.
"""

from __future__ import annotations

import errno
import os
import select
import threading
import time
from collections import deque
from collections.abc import Callable

CAPACITY_BYTES = 1 << 20
# Pieces are joined up to this size, so that many short lines cost few writes.
_BATCH_BYTES = 64 * 1024
_DISK_FULL_ERRNOS = (errno.ENOSPC, errno.EDQUOT)


class NonBlockingWriter:
    """Writes the pieces given to `put` to a duplicate of `fd`, in order."""

    def __init__(self, fd: int, capacity: int = CAPACITY_BYTES, name: str = "elasticd-writer") -> None:
        """A closed `fd` makes a writer that is broken from the start and discards everything."""
        self._capacity = capacity
        self._pieces: deque[bytes] = deque()
        self._pending_bytes = self._lost_bytes = 0
        self._closing = False
        self.broken = False
        """The other end is closed, or never existed."""
        self._changed = threading.Condition()
        self._listeners: list[Callable[[], None]] = []
        try:
            self._fd = os.dup(fd)
        except OSError:
            self._fd = -1
            self.broken = True
            return
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def is_reader_gone(self) -> bool:
        """Also if nothing has been written since."""
        if self.broken or not self._thread.is_alive():
            return True
        poll = select.poll()
        poll.register(self._fd, 0)
        return bool(poll.poll(0))  # POLLERR, POLLHUP

    def room_bytes(self) -> int:
        """Bytes that `put` would accept now; a broken writer accepts and discards any number."""
        return self._capacity if self.broken else self._capacity - self._pending_bytes

    def is_empty(self) -> bool:
        """Everything accepted so far has been written."""
        return self._pending_bytes == 0

    def put(self, piece: bytes) -> bool:
        """Queue bytes. False, with nothing queued, when there is no room. Never blocks."""
        with self._changed:
            if self.broken or self._closing or not piece:
                return True
            # An empty queue takes any piece: one larger than the capacity could never be written otherwise.
            if self._pending_bytes and self._pending_bytes + len(piece) > self._capacity:
                return False
            self._pieces.append(piece)
            self._pending_bytes += len(piece)
            self._changed.notify_all()
            return True

    def add_room_listener(self, listener: Callable[[], None]) -> None:
        """`listener` is called on the writer's thread whenever there is room again; it must not block."""
        self._listeners.append(listener)

    def flush(self, within_s: float) -> bool:
        """True when everything accepted so far has been written within `within_s` seconds."""
        with self._changed:
            return self._changed.wait_for(self.is_empty, within_s)

    def close(self, within_s: float = 1.0) -> bool:
        """Flush, then end the thread. True as from `flush`."""
        until = time.monotonic() + within_s
        with self._changed:
            already, self._closing = self._closing, True
            self._changed.notify_all()
        if self._fd < 0 or already:
            return self.is_empty()
        self._thread.join(max(0.0, until - time.monotonic()))
        return self.is_empty()

    def _run(self) -> None:
        while batch := self._next_batch():
            self._write(batch)
            with self._changed:
                self._pending_bytes = 0 if self.broken else self._pending_bytes - len(batch)
                self._changed.notify_all()
            for listener in self._listeners:
                listener()
        # Not in `close`: for a thread stuck in write(2) the number could then mean another file.
        os.close(self._fd)

    def _next_batch(self) -> bytes:
        with self._changed:
            while not self._pieces and not self._closing:
                self._changed.wait()
            taken: list[bytes] = []
            size = 0
            while self._pieces and (not taken or size + len(self._pieces[0]) <= _BATCH_BYTES):
                taken.append(self._pieces.popleft())
                size += len(taken[-1])
            return b"".join(taken)

    def _write(self, data: bytes) -> None:
        missing = (
            b"\n[elasticd: %d bytes are missing here: the disk was full]\n" % self._lost_bytes
            if self._lost_bytes
            else b""
        )
        left = memoryview(missing + data)
        while left and not self.broken:
            try:
                left = left[os.write(self._fd, left) :]
            except BlockingIOError:
                # Another process that shares the descriptor made it non-blocking.
                poll = select.poll()
                poll.register(self._fd, select.POLLOUT)
                poll.poll(1000)
            except OSError as error:
                if error.errno in _DISK_FULL_ERRNOS:
                    self._lost_bytes += min(len(left), len(data))
                    return
                with self._changed:
                    self.broken = True
                    self._pieces.clear()
        self._lost_bytes = 0


def open_std_writers() -> tuple[NonBlockingWriter, NonBlockingWriter]:
    """Writers for standard output and error: one for both if they go to the same file, to keep the order of lines."""
    out = NonBlockingWriter(1, name="elasticd-stdout")
    return (out, out) if _same_file(1, 2) else (out, NonBlockingWriter(2, name="elasticd-stderr"))


def _same_file(a: int, b: int) -> bool:
    try:
        return os.path.sameopenfile(a, b)
    except OSError:
        return False
