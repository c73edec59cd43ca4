"""The agent's end of torch's file timer: workers set timers through a named pipe, and expired ones are reported.

The protocol is that of torch.distributed.elastic.timer.file_based_local_timer (2.13): a client opens the pipe, writes
one line of JSON, at most PIPE_BUF bytes, and closes it. A line sets the timer (`pid`, `scope_id`) to `expiration_time`,
in seconds of time.time(); a negative time releases it. `signal` is what the process gets when the timer expires, none
if it is 0 or negative. torch is not imported here.

A timer counts on this process's monotonic clock from the moment its line is read, so that a clock that jumps expires
nothing; and all lines are read before a timer is judged, so that an agent that stood still finds the releases first.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import select
import stat
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from elasticd.errors import UsageError
from elasticd_agent.system.processes import procfs
from elasticd_agent.system.waker import Waker

ENABLE_VARIABLE = "TORCHELASTIC_ENABLE_FILE_TIMER"
FILE_VARIABLE = "TORCHELASTIC_TIMER_FILE"
_READ_BYTES = 1 << 16
_MAX_SIGNAL = 64


@dataclass(frozen=True, slots=True)
class FileTimerExpired:
    """A process of the job did not release its timer in time. `signum` is what it asked to get; 0: nothing."""

    pid: int
    scope: str
    signum: int
    late_s: float


@dataclass(frozen=True, slots=True)
class _Timer:
    expires_at: float  #: monotonic
    signum: int
    process_start_ticks: int  #: of its process, in ticks since boot: a process id may be used again


class FileTimerServer:
    """Reads the pipe at `path`, in a thread of its own, until closed; passes expired timers to `post`."""

    def __init__(self, path: Path, post: Callable[[FileTimerExpired], None], log: Callable[[str], None]) -> None:
        """Raises UsageError if no pipe can be made there."""
        self._path = path
        self._post = post
        self._log = log
        self._timers: dict[tuple[int, str], _Timer] = {}
        self._rest = b""
        try:
            if path.exists() and not stat.S_ISFIFO(path.stat().st_mode):
                raise UsageError(f"{FILE_VARIABLE} {str(path)!r} is not a named pipe; leave it out for a new one")
            path.unlink(missing_ok=True)
            os.mkfifo(path, 0o600)
            # Opened for writing as well: the pipe never ends, and a client never fails for want of a reader.
            self._fd = os.open(path, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError as error:
            raise UsageError(f"{FILE_VARIABLE} {str(path)!r}: {error.strerror or error}") from None
        self._closing = False
        self._waker = Waker()
        self._thread = threading.Thread(target=self._run, name="elasticd-timer", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._closing = True
        self._waker.wake()
        self._thread.join()
        self._waker.close()
        with contextlib.suppress(OSError):
            if os.path.samestat(os.stat(self._path), os.fstat(self._fd)):  # not another agent's that was given it, too
                self._path.unlink()
        os.close(self._fd)

    def _run(self) -> None:
        poll = select.poll()
        poll.register(self._fd, select.POLLIN)
        poll.register(self._waker, select.POLLIN)
        while not self._closing:
            at = min((timer.expires_at for timer in self._timers.values()), default=None)
            poll.poll(None if at is None else math.ceil(max(0.0, min(at - time.monotonic(), 3600.0)) * 1000))
            for line in self._read_lines():
                self._apply_line(line)
            self._report_expired(time.monotonic())

    def _read_lines(self) -> list[bytes]:
        """Every whole line that is in the pipe."""
        with contextlib.suppress(BlockingIOError):
            while chunk := os.read(self._fd, _READ_BYTES):
                self._rest += chunk
        *lines, self._rest = self._rest.split(b"\n")
        self._rest = self._rest[-_READ_BYTES:]
        return lines

    def _apply_line(self, line: bytes) -> None:
        try:
            fields = json.loads(line)
            pid, scope = int(fields["pid"]), str(fields["scope_id"])
            expires, signum = float(fields["expiration_time"]), int(fields["signal"])
        except (ValueError, TypeError, KeyError, OverflowError, RecursionError):
            self._log(f"a line in the pipe of file timers cannot be decoded and is ignored: {line[:80]!r}")
            return
        self._timers.pop((pid, scope), None)
        process = procfs.stat(pid) if expires >= 0 and pid > 1 else None  # a negative time has just released it
        if process is not None and math.isfinite(expires):
            at = time.monotonic() + expires - time.time()
            self._timers[pid, scope] = _Timer(at, signum if 0 < signum <= _MAX_SIGNAL else 0, process.start_ticks)

    def _report_expired(self, now: float) -> None:
        """Report one expired timer of each process, the first with a signal, and forget its others, as torch does."""
        expired = [(timer, *key) for key, timer in self._timers.items() if timer.expires_at <= now]
        by_pid: dict[int, FileTimerExpired | None] = {}
        for timer, pid, scope in sorted(expired, key=lambda item: (item[0].signum == 0, item[0].expires_at)):
            process = procfs.stat(pid)
            same = process is not None and process.start_ticks == timer.process_start_ticks
            by_pid.setdefault(pid, FileTimerExpired(pid, scope, timer.signum, now - timer.expires_at) if same else None)
        self._timers = {key: timer for key, timer in self._timers.items() if key[0] not in by_pid}
        for report in filter(None, by_pid.values()):
            self._post(report)
