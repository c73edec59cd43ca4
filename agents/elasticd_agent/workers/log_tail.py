"""Follows the workers' log files in one thread: shows them on the console, and bounds the size of each.

Workers write into the files themselves, so the console, this thread and the agent's death never block them. The files
are also the buffer: output that the console does not take yet is read later. A file above its limit is copied to
`<name>.1` and truncated, as by logrotate's copytruncate; output between the last copy and the truncation, microseconds,
is lost. Bytes pass unchanged, whatever their encoding.

One thread serves all files of a job. It polls, as torchrun does: ten looks a second are as quick as a reader. Each look
is bounded: a file gives at most one piece a turn, so a worker that prints without end delays the others by a moment.

Order matters more than speed. A round's last lines, which hold the traceback that explains the restart, come before the
next round's first. While a finished round still has something to show, later rounds wait, for `FINISH_TIMEOUT_S` at
most, so that a console that nobody reads does not hold up the sight of a running job for ever.

A line belongs to one worker. Pieces end with a line, and with a prefix each line has its own, so lines of two workers
never mix. A line longer than a piece is shown in parts.

A file without a limit would fill the disk and end the job. Above its limit it is copied and truncated where it is,
since the worker holds its descriptor open and appends. If the copy fails, the output is dropped: the job is worth more
than its log.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from elasticd_agent.system.nonblocking_writer import NonBlockingWriter

MAX_LOG_BYTES = 64 << 20
# As torchrun's: short for a reader, and a dozen system calls a second for each file.
POLL_INTERVAL_S = 0.1
# How long a slow console delays the next round's output, after a round's workers have ended.
FINISH_TIMEOUT_S = 5.0
_PIECE_BYTES = 64 * 1024
_COPY_BYTES = 1 << 20

_log = logging.getLogger("elasticd.logs")


@dataclass(frozen=True, slots=True)
class MatchingLinesFile:
    """Lines that contain one of `patterns` are also appended to `path`, with their prefix."""

    path: Path
    patterns: tuple[bytes, ...]


class TailedFile:
    """One file of one worker, read by the tailer's thread."""

    def __init__(
        self,
        path: Path,
        number: int,
        name: str,
        outlet: NonBlockingWriter | None = None,
        prefix: bytes = b"",
        filter: MatchingLinesFile | None = None,
        limit: int = MAX_LOG_BYTES,
    ) -> None:
        """Opens or creates `path` (0600). Without an `outlet` the file is bounded, not shown. Raises OSError."""
        self.number = number
        self.path = path
        self._name = name
        self._limit = limit
        self._outlet = outlet
        self._prefix = prefix
        self._filter = filter
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        self._position = os.fstat(self._fd).st_size
        self._unsent = b""
        self._partial = b""

    def poll(self, show: bool) -> bool:
        """Show the next piece if `show`, and bound the file. True when more can be shown at once."""
        size = os.fstat(self._fd).st_size
        if size < self._position:  # another program truncated it
            self._position = 0
        behind = False
        if self._outlet is not None and show:
            behind = self._send_unsent() and self._read_piece(self._outlet, size)
        if size > self._limit and (self._is_shown_to(size) or size > 2 * self._limit):
            self._rotate()
        return behind

    def is_shown(self) -> bool:
        """Everything written has been shown, except a last line without an end."""
        return self._is_shown_to(os.fstat(self._fd).st_size)

    def close(self) -> None:
        """Show a last line without an end, and report how much was not shown."""
        if self._partial:
            self._emit(self._prefixed_lines(b"\n"))
        with suppress(OSError):
            left = os.fstat(self._fd).st_size - self._position + (0 if self._send_unsent() else len(self._unsent))
            if self._outlet is not None and left > 0:
                self._outlet.put(self._not_shown_notice(left, self.path))
        os.close(self._fd)

    def _is_shown_to(self, size: int) -> bool:
        return self._outlet is None or (self._position >= size and not self._unsent)

    def _send_unsent(self) -> bool:
        if self._unsent and self._outlet is not None and self._outlet.put(self._unsent):
            self._unsent = b""
        return not self._unsent

    def _emit(self, data: bytes) -> None:
        self._unsent += data
        self._send_unsent()

    def _read_piece(self, outlet: NonBlockingWriter, size: int) -> bool:
        """Read the next piece and pass it on. True if there is more to read at once."""
        if outlet.broken and self._filter is None:
            self._position = size
        if self._position >= size or outlet.room_bytes() < _PIECE_BYTES:
            return False
        data = os.pread(self._fd, _PIECE_BYTES, self._position)
        whole = len(data) == _PIECE_BYTES
        if not self._prefix:
            # Another worker's output may follow a piece, so a piece ends with a line if it contains one.
            data = data[: data.rfind(b"\n") + 1] or data
        self._position += len(data)
        self._emit(self._prefixed_lines(data) if self._prefix else data)
        return whole

    def _prefixed_lines(self, data: bytes) -> bytes:
        """The complete lines, each after the prefix. As with torchrun, a carriage return ends a line, too."""
        data = self._partial + data
        if b"\r" in data:
            tail = b"\r" if data.endswith(b"\r") else b""
            data = data[: len(data) - len(tail)].replace(b"\r\n", b"\n").replace(b"\r", b"\n") + tail
        end = data.rfind(b"\n") + 1
        complete, self._partial = data[:end], data[end:]
        if len(self._partial) > _PIECE_BYTES:
            complete, self._partial = data + b"\n", b""
        if not complete:
            return b""
        if self._filter is not None:
            self._write_filtered(complete, self._filter)
        return self._prefix + complete[:-1].replace(b"\n", b"\n" + self._prefix) + b"\n"

    def _write_filtered(self, complete: bytes, filter: MatchingLinesFile) -> None:
        picked = [line for line in complete[:-1].split(b"\n") if any(needle in line for needle in filter.patterns)]
        if not picked:
            return
        with suppress(OSError):
            fd = os.open(filter.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
            try:
                if os.fstat(fd).st_size > self._limit:
                    os.replace(filter.path, _rotated_path(filter.path))
                os.write(fd, b"".join(self._prefix + line + b"\n" for line in picked))
            finally:
                os.close(fd)

    def _rotate(self) -> None:
        """Copy the file to its backup and truncate it. What was not shown yet is mentioned with its size and place."""
        size = os.fstat(self._fd).st_size
        backup = _rotated_path(self.path)
        try:
            copied = self._copy(backup, max(0, size - self._limit))
        except OSError as error:
            # Most likely the disk is full. Logs must not fill it, so the old output is dropped.
            _log.warning("%s: its first %d MiB could not be kept: %s", self.path, size >> 20, error.strerror or error)
            with suppress(OSError):
                backup.unlink()
            copied = size
        os.ftruncate(self._fd, 0)
        if not self._is_shown_to(copied) and self._outlet is not None:
            self._unsent += self._not_shown_notice(copied - self._position, backup)
        self._position = 0

    def _copy(self, backup: Path, start: int) -> int:
        """Copy from `start` to the end, wherever that is by then; returns its position."""
        fd = os.open(backup, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        try:
            # A worker may write faster than this copies: the copy has a limit.
            end = start + 2 * self._limit
            while start < end and (data := os.pread(self._fd, _COPY_BYTES, start)):
                left = memoryview(data)
                while left:
                    left = left[os.write(fd, left) :]
                start += len(data)
        finally:
            os.close(fd)
        return start

    def _not_shown_notice(self, count: int, where: Path) -> bytes:
        return f"[elasticd: {count} bytes of {self._name} are not shown here; see {where}]\n".encode(
            "utf-8", "surrogateescape"
        )


def _rotated_path(path: Path) -> Path:
    return path.with_name(path.name + ".1")


class LogTailer:
    """The thread that follows files, from `follow` until they are read to their end after `finish_round` or `close`."""

    def __init__(self, outlets: Iterable[NonBlockingWriter] = (), interval_s: float = POLL_INTERVAL_S) -> None:
        self._interval_s = interval_s
        self._wake = threading.Event()
        self._lock = threading.Lock()
        self._files: list[TailedFile] = []
        self._finish_deadlines: dict[int, float] = {}
        self._tasks: list[Callable[[], object]] = []
        self._closing = False
        for outlet in outlets:
            outlet.add_room_listener(self._wake.set)
        self._thread = threading.Thread(target=self._run, name="elasticd-logs", daemon=True)
        self._thread.start()

    def follow(self, file: TailedFile) -> None:
        """Follow a file from the next turn on."""
        with self._lock:
            self._files.append(file)

    def follows(self, path: Path) -> bool:
        """True if the file at `path` is followed already."""
        with self._lock:
            return any(file.path == path for file in self._files)

    def finish_round(self, number: int, within: float = FINISH_TIMEOUT_S) -> None:
        """The round's workers have ended: read to the end, for at most `within` seconds, then close the files."""
        with self._lock:
            self._finish_deadlines.setdefault(number, time.monotonic() + within)
        self._wake.set()

    def run_later(self, task: Callable[[], object]) -> None:
        """Run a slow task once, in the thread."""
        with self._lock:
            self._tasks.append(task)

    def close(self, within: float = 2.0) -> bool:
        """Show the rest for at most `within` seconds; True when the thread has ended."""
        with self._lock:
            self._closing = True
            numbers = {file.number for file in self._files}
            for number in numbers:
                self._finish_deadlines[number] = time.monotonic() + within
        self._wake.set()
        self._thread.join(within + 1.0)
        return not self._thread.is_alive()

    def _run(self) -> None:
        """Take turns until the end. Without anything to show, a turn follows after `interval_s`, or when a reader has
        room.
        """
        while True:
            self._wake.clear()
            with self._lock:
                files, ending = list(self._files), dict(self._finish_deadlines)
                chores, self._tasks = self._tasks, []
                if self._closing and not files and not chores:
                    return
            for chore in chores:
                try:
                    chore()
                except OSError as error:
                    _log.warning("worker logs: %s", error)
            if not self._turn(files, ending):
                self._wake.wait(self._interval_s)

    def _turn(self, files: list[TailedFile], ending: dict[int, float]) -> bool:
        """Look at every file once. True if there may be more to show at once."""
        more, gone, oldest_behind = False, [], None
        for file in files:
            try:
                # A round's last lines precede the next round's first.
                show = oldest_behind is None or file.number == oldest_behind
                more |= file.poll(show)
                done = file.is_shown()
                if not done and file.number in ending:
                    oldest_behind = file.number
                if file.number in ending and (done or time.monotonic() > ending[file.number]):
                    gone.append(file)
                    file.close()
            except OSError as error:
                _log.warning("a worker's log can no longer be followed: %s", error)
                gone.append(file)
                with suppress(OSError):
                    file.close()
        if gone:
            with self._lock:
                self._files = [file for file in self._files if file not in gone]
                left = {file.number for file in self._files}
                self._finish_deadlines = {
                    number: until for number, until in self._finish_deadlines.items() if number in left
                }
        return more or bool(gone)
