"""The event log: one JSON object a line, for programs that read it later; the kinds are in `events`.

A line is one write to a file opened for appending, so writers never mix within a line, and it survives the agent's own
SIGKILL. Once the file is open, logging never raises, blocks on a pipe without a reader, or grows without bound. Lines
that cannot be written, as on a full disk, are kept and written with the next one, in order; of more than
MAX_UNWRITTEN_BYTES the oldest are lost, and counted.

The log is the record of last resort. `explain`, `status`, the dashboard and reports read it after everything else is
gone, so a line must be complete by itself: it names its job, its node and its time, and its reason is the sentence that
people saw. Times of day are derived from the monotonic time of the event, so a line that was written late still has the
time at which it happened.

A reader meets lines of other versions, half lines and lines of other jobs; it takes those that it knows. A line that
would be too long is cut in its longest texts and lists, and says so.
"""

from __future__ import annotations

import json
import logging
import math
import os
import threading
import time
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from elasticd.errors import UsageError
from elasticd_agent.model.log_events import FORMAT_VERSION, MAX_LINE_BYTES, LogEvent

# Long enough for any path and a sentence about it; a Python traceback in a reason is cut.
MAX_TEXT_CHARS = 4096
_CUT_LIMITS = ((MAX_TEXT_CHARS, 4096), (256, 256), (64, 8))

MAX_UNWRITTEN_BYTES = 256 << 10
"""The size of the lines that wait until they can be written; about 500 lines."""

_log = logging.getLogger("elasticd.eventlog")


class EventSink(Protocol):
    """A destination of events."""

    @property
    def lines_lost(self) -> int:
        """Lines that could not be written."""

    def write(self, record: LogEvent) -> None: ...

    def close(self) -> None: ...


class NullEventLog:
    """Without --event-log."""

    lines_lost = 0

    def write(self, record: LogEvent) -> None:
        pass

    def close(self) -> None:
        pass


class EventLog:
    """Appends events to a file; `lines_lost` counts those that were given up."""

    def __init__(self, path: Path, job: str, node: str, most_bytes: int | None = None, must_open: bool = True) -> None:
        """Raises UsageError when `path` cannot be opened for appending. Makes its directory if only that is missing.

        `must_open` False: a file that cannot be opened now is opened by a later write. `most_bytes`: a file of this
        size is renamed to `path`.1 and a new one begun, as after a move or removal by a person. Several threads may
        write.
        """
        self.lines_lost = 0
        self._path = path
        self._job = job
        self._node = node
        self._unwritten: deque[bytes] = deque()
        self._partial_line = False
        self._warned = False
        self._most_bytes = most_bytes
        self._lock = threading.Lock()
        self._fd, self._closed = -1, False
        try:
            self._fd = self._open()
        except (OSError, ValueError) as error:
            why = error.strerror if isinstance(error, OSError) else str(error)
            if must_open or isinstance(error, ValueError):
                raise UsageError(f"--event-log {path}: cannot be opened for appending: {why}") from error

    def _open(self) -> int:
        # O_NONBLOCK: a named pipe without a reader is refused here, and one whose reader stalls costs lines, not time.
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NONBLOCK
        self._path.parent.mkdir(mode=0o700, exist_ok=True)
        return os.open(self._path, flags, 0o600)

    def write(self, record: LogEvent) -> None:
        """Append the event. Never raises, and never waits for a reader or a disk that is full."""
        line = encode(record, self._job, self._node)
        with self._lock:
            if self._most_bytes is not None:
                self._rotate(self._most_bytes)
            self._unwritten.append(line)
            self._write_all()
            while sum(map(len, self._unwritten)) > MAX_UNWRITTEN_BYTES:
                self._unwritten.popleft()
                self.lines_lost += 1

    def _rotate(self, most_bytes: int) -> None:
        """Begin a new file if this one is large, or if a person has moved it."""
        try:
            mine = os.fstat(self._fd)
            try:
                there = os.path.samestat(mine, os.stat(self._path))
            except FileNotFoundError:
                there = False
            if there and mine.st_size < most_bytes:
                return
            if there:
                os.rename(self._path, f"{self._path}.1")
            fd = self._open()
        except OSError:
            return  # continue in the old file
        os.close(self._fd)
        self._fd = fd
        self._partial_line = False

    def _write_all(self) -> None:
        """Write the lines that wait, in order, until one cannot be written."""
        while self._unwritten:
            # A full disk may take the head of a line, which is then written again as a line of its own.
            line = b"\n" + self._unwritten[0] if self._partial_line else self._unwritten[0]
            try:
                if self._fd < 0 and not self._closed:
                    self._fd = self._open()
                written = os.write(self._fd, line)
            except OSError as error:
                self._warn_once(error.strerror or str(error))
                return
            self._partial_line = written < len(line)
            if self._partial_line:
                self._warn_once("only a part of a line could be written")
                return
            self._unwritten.popleft()

    def _warn_once(self, why: str) -> None:
        if not self._warned:
            self._warned = True
            _log.warning("event log %s: %s; its lines are written later", self._path, why)

    def close(self) -> None:
        with self._lock:
            if self._closed:
                return
            self._write_all()
            self._closed = True
            if self._fd >= 0:
                os.close(self._fd)
            self._fd = -1
            self.lines_lost += len(self._unwritten)
            self._unwritten.clear()
        if self.lines_lost:
            _log.warning("event log %s: %d lines were lost", self._path, self.lines_lost)


def open_event_log(path: Path | None, job: str, node: str) -> EventSink:
    """The log at `path`, or a null log. Raises UsageError when the file cannot be opened."""
    return NullEventLog() if path is None else EventLog(path, job, node)


def encode(record: LogEvent, job: str, node: str) -> bytes:
    """One line with its newline, at most MAX_LINE_BYTES; what does not fit is cut and the line says `"cut": true`."""
    # Derived from `mono`: the time of the event, however late it is written.
    wall = time.time() - (time.monotonic() - record.mono)
    head = {
        "v": FORMAT_VERSION,
        "kind": record.kind,
        "job": job,
        "node": node,
        "wall": round(wall, 6),
    }
    body = record.to_dict()
    if record.spent is None:
        del body["spent"]
    line = b""
    for text, items in _CUT_LIMITS:
        line = _dump({**head, **body}, text, items)
        if len(line) <= MAX_LINE_BYTES:
            break
    return line


def _dump(values: Mapping[str, Any], max_chars: int, max_items: int) -> bytes:
    shortened = {name: _cut(value, max_chars, max_items) for name, value in values.items()}
    if any(shortened[name] != value for name, value in values.items() if not isinstance(value, float)):
        shortened["cut"] = True
    # Names that are not UTF-8 reach us as lone surrogates; backslashreplace turns these into JSON's own escapes.
    return (json.dumps(shortened, ensure_ascii=False, allow_nan=False) + "\n").encode("utf-8", "backslashreplace")


def _cut(value: Any, max_chars: int, max_items: int) -> Any:
    if isinstance(value, str):
        return value if len(value) <= max_chars else value[:max_chars] + "…"
    if isinstance(value, (tuple, list)):
        return type(value)(_cut(item, max_chars, max_items) for item in value[:max_items])
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
