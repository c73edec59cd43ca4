"""A file descriptor that may block, behind a queue that may not: what the agent says never holds the agent up.

A terminal under Ctrl-S, a pipe into a stopped pager or a reader that went away must cost nothing but the lines it does
not take. Making the inherited descriptor non-blocking would do it, but that flag is shared with the workers and the
shell. So one thread a descriptor writes, and everybody else only leaves bytes here. It never drops what it accepted
while its descriptor works, and never splits one accepted piece to put another's bytes in between. A disk that is full
costs what it does not take, and no line after that.
"""

from __future__ import annotations

import errno
import os
import select
import threading
import time
from collections import deque
from collections.abc import Callable

CAPACITY = 1 << 20
# Pieces are joined up to this size, so that many short lines cost few writes.
_BATCH = 64 * 1024
_FULL = (errno.ENOSPC, errno.EDQUOT)


class NonBlockingWriter:
    """Writes what `put` is given to a duplicate of `fd`, in order."""

    def __init__(self, fd: int, capacity: int = CAPACITY, name: str = "elasticd-outlet") -> None:
        """A closed `fd` makes an outlet that is broken from the start; it swallows everything."""
        self._capacity = capacity
        self._pieces: deque[bytes] = deque()
        self._pending_bytes = self._lost_bytes = 0
        self._broken = self._closing = False
        self._changed = threading.Condition()
        self._listeners: list[Callable[[], None]] = []
        try:
            self._fd = os.dup(fd)
        except OSError:
            self._fd, self._broken = -1, True
            return
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    @property
    def broken(self) -> bool:
        """Nobody reads the other end any more, or there never was one."""
        return self._broken

    def room(self) -> int:
        """How many bytes `put` would accept now; a broken outlet accepts, and swallows, anything."""
        return self._capacity if self._broken else self._capacity - self._pending_bytes

    def empty(self) -> bool:
        """Everything accepted so far has been written."""
        return self._pending_bytes == 0

    def put(self, piece: bytes) -> bool:
        """Leave bytes to be written. False, and nothing is written of them, when there is no room. Never blocks."""
        with self._changed:
            if self._broken or self._closing or not piece:
                return True
            # An outlet with nothing to do takes any piece, or one larger than its capacity could never be written.
            if self._pending_bytes and self._pending_bytes + len(piece) > self._capacity:
                return False
            self._pieces.append(piece)
            self._pending_bytes += len(piece)
            self._changed.notify_all()
            return True

    def when_drained(self, listener: Callable[[], None]) -> None:
        """`listener` is called, on the outlet's thread, whenever there is room again; it must not block."""
        self._listeners.append(listener)

    def flush(self, within: float) -> bool:
        """Wait at most `within` seconds until everything accepted so far has been written; True when it was."""
        with self._changed:
            return self._changed.wait_for(self.empty, within)

    def close(self, within: float = 1.0) -> bool:
        """Write what is left for at most `within` seconds; True when all of it was written."""
        until = time.monotonic() + within
        with self._changed:
            already, self._closing = self._closing, True
            self._changed.notify_all()
        if self._fd < 0 or already:
            return self.empty()
        self._thread.join(max(0.0, until - time.monotonic()))
        return self.empty()

    def _run(self) -> None:
        while batch := self._next():
            self._write(batch)
            with self._changed:
                self._pending_bytes = 0 if self._broken else self._pending_bytes - len(batch)
                self._changed.notify_all()
            for listener in self._listeners:
                listener()
        # Not in `close`: a thread still stuck in write(2) would find the number given to somebody else's file.
        os.close(self._fd)

    def _next(self) -> bytes:
        with self._changed:
            while not self._pieces and not self._closing:
                self._changed.wait()
            taken: list[bytes] = []
            size = 0
            while self._pieces and (not taken or size + len(self._pieces[0]) <= _BATCH):
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
        while left and not self._broken:
            try:
                left = left[os.write(self._fd, left) :]
            except BlockingIOError:
                # Whoever shares the descriptor made it non-blocking.
                poll = select.poll()
                poll.register(self._fd, select.POLLOUT)
                poll.poll(1000)
            except OSError as error:
                if error.errno in _FULL:
                    self._lost_bytes += min(len(left), len(data))
                    return
                with self._changed:
                    self._broken = True
                    self._pieces.clear()
        self._lost_bytes = 0


def open_std_writers() -> tuple[NonBlockingWriter, NonBlockingWriter]:
    """For standard output and error; one for both when they go to the same place, so that lines keep their order."""
    out = NonBlockingWriter(1, name="elasticd-stdout")
    return (out, out) if _same_file(1, 2) else (out, NonBlockingWriter(2, name="elasticd-stderr"))


def _same_file(a: int, b: int) -> bool:
    try:
        return os.path.sameopenfile(a, b)
    except OSError:
        return False
