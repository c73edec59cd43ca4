"""Events of a worker, one JSON object a line: a checkpoint saved, failed or skipped, a resume, a pause.

The heartbeat says where a worker is; worker events say what happened, with a sentence for a person. A line is one
`write` to a file opened for appending, so events never interleave; the file is opened for each event, so the script
holds no descriptor. Writing an event never raises and never stops training: a full disk loses it, and the next event
counts the lost ones.

    {"v": 1, "kind": "checkpoint_saved", "round": 3, "rank": 0, "step": 120, "mono": 812.4, "wall": 1790000000.0,
     "reason": "...", ...}

    kind                also carries
    checkpoint_saved    path, bytes, seconds (training was blocked), written_seconds (until it was on the disk, where a
                        process of its own writes)
    checkpoint_failed   path
    checkpoint_dropped  path (a newer state took its place in memory before it was on the disk; of sharded states: an
                        older one was still being written)
    snapshot            (the state is whole in the memory of rank 0's node)
    checkpoint_skipped  path
    resumed             path, from_round, from_step, saved_at (unix seconds, 0 if unknown); donor (the rank that saved
                        the state after the fault) and steps_saved (against the newest checkpoint on the disk), if there
                        was one; in_processes: true if ranks that stay have the state, and no checkpoint has it
    attached            every_seconds, if checkpoints are saved by time (this rank has attached objects and a
                        checkpoint directory; once a process, on every rank); saves_at_faults: it is a donor
                        for other ranks
    can_pause           (pauses are possible from now on; once a process)
    cannot_pause        (a requested pause is refused: why)
    paused              (all ranks wait at this step, whose checkpoint is on the disk)
    pause_ended         seconds
    scalars             values: the script's own numbers by name, null for one that is not finite
    message             (something worth a line in the log); saves_at_faults: false if the rank is no donor any more;
                        once: the key of a sentence about the script, which each round would repeat

`mono` is CLOCK_MONOTONIC seconds, `wall` is for people only. Unknown kinds and fields are kept: a newer worker may
write more.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from elasticd.errors import WireError

MAX_SCALARS = 16
"""Names of a job's own numbers."""
VERSION = 1
KINDS = (
    *("checkpoint_saved", "checkpoint_failed", "checkpoint_skipped", "checkpoint_dropped", "snapshot"),
    *("resumed", "message", "scalars"),
    *("attached", "can_pause", "cannot_pause", "paused", "pause_ended"),
)
_COMMON_FIELDS = ("v", "kind", "round", "rank", "step", "mono", "wall", "reason")
# A longer line is no worker event; a reader does not buffer without a bound.
_MAX_LINE_BYTES = 1 << 20
MAX_FILE_BYTES = 1 << 20
"""The reader begins a new file then. They lie in memory, and a tiny model saves several times a second."""
_MAX_NUMBER = 1 << 62


@dataclass(frozen=True, slots=True)
class WorkerEvent:
    """One line of the file."""

    kind: str
    round: int
    rank: int
    step: int | None
    mono: float
    wall: float
    reason: str
    extra: dict[str, Any] = field(default_factory=dict)  #: the fields of its kind, and those of a newer version

    def to_line(self) -> bytes:
        """The line in the file, with its newline. Raises TypeError for a value that is not JSON."""
        known = {"v": VERSION, **{name: getattr(self, name) for name in _COMMON_FIELDS[1:]}}
        return json.dumps({**self.extra, **known}, allow_nan=False).encode() + b"\n"

    @classmethod
    def from_line(cls, line: bytes) -> WorkerEvent:
        """Read one line. Raises WireError for anything that is not a worker event of version 1."""
        try:
            fields = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise WireError(f"worker event {line[:80]!r} is not JSON: {error}") from error
        if not isinstance(fields, dict) or fields.get("v") != VERSION:
            raise WireError(
                f"worker event {line[:80]!r} is not of version {VERSION}; run the same elasticd in agent and worker"
            )
        for name, check in _FIELD_CHECKS.items():
            if (name in _COMMON_FIELDS or name in fields) and not (name in fields and check(fields[name])):
                raise WireError(f"worker event {line[:80]!r}: {name} is missing or of the wrong type")
        extra = {name: value for name, value in fields.items() if name not in _COMMON_FIELDS}
        return cls(**{name: fields[name] for name in _COMMON_FIELDS[1:]}, extra=extra)


@dataclass(slots=True)
class WorkerEventWriter:
    """The worker's side; without a path (a script without an agent) it writes nothing."""

    path: str | os.PathLike[str] | None
    round: int = 0
    rank: int = 0
    _lost_events: int = 0
    _is_line_torn: bool = False

    def write(self, kind: str, reason: str, step: int | None = None, **extra: Any) -> None:
        """Append one event; the table above lists the fields of each kind."""
        if self.path is None:
            return
        if self._lost_events:
            extra["lost"] = self._lost_events
        event = WorkerEvent(kind, self.round, self.rank, step, time.monotonic(), time.time(), reason, extra)
        line = event.to_line()
        if self._is_line_torn:
            line = b"\n" + line
        try:
            written = self._append(line)
        except OSError:
            self._lost_events += 1
            return
        self._is_line_torn = written < len(line)
        self._lost_events = self._lost_events + 1 if self._is_line_torn else 0

    def _append(self, line: bytes) -> int:
        assert self.path is not None
        fd = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        try:
            return os.write(fd, line)
        finally:
            os.close(fd)


class WorkerEventReader:
    """The agent's side: returns each line once. The file need not exist yet. Keeps no descriptor.

    A large file is set aside: writers, which open it for each event, begin another one. At the next read all of them
    have done so, and what is left in the old one comes first.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._path = os.fspath(path)
        self._aside: str | None = None  #: the file that was set aside and is not read to its end
        self._offset = 0
        self._partial = b""

    def read(self) -> tuple[list[WorkerEvent], list[str]]:
        """The events since the last call, and an error for each line that is not one; none without a file."""
        data = self._read_file()
        if self._aside is not None and len(data) < _MAX_LINE_BYTES:
            with suppress(OSError):
                os.unlink(self._aside)
            self._aside, self._offset = None, 0
            with suppress(OSError):  # no file descriptor is left, for example: the next call reads it
                data += self._read_file()
        if self._aside is None and self._offset >= MAX_FILE_BYTES:
            with suppress(OSError):
                os.rename(self._path, aside := f"{self._path}.read")
                self._aside = aside
        *lines, self._partial = (self._partial + data).split(b"\n")
        events: list[WorkerEvent] = []
        errors: list[str] = []
        for line in lines:
            if line:
                try:
                    events.append(WorkerEvent.from_line(line))
                except WireError as error:
                    errors.append(str(error))
        if len(self._partial) > _MAX_LINE_BYTES:
            errors.append(f"{self._path}: a line of more than {_MAX_LINE_BYTES} bytes was dropped")
            self._partial = b""
        return events, errors

    def _read_file(self) -> bytes:
        """The next piece of the file that is read. Raises OSError."""
        try:
            fd = os.open(self._aside or self._path, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            return b""
        try:
            data = os.pread(fd, _MAX_LINE_BYTES, self._offset)
        finally:
            os.close(fd)
        self._offset += len(data)
        return data


def from_environment(round: int, rank: int) -> WorkerEventWriter:
    """A writer of the file ELASTICD_WORKER_EVENTS, or of nothing."""
    return WorkerEventWriter(os.environ.get("ELASTICD_WORKER_EVENTS") or None, round, rank)


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _is_integer(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < _MAX_NUMBER


def _is_number(value: Any) -> bool:
    """Seconds; NaN is refused."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value < _MAX_NUMBER


_FIELD_CHECKS: dict[str, Callable[[Any], bool]] = {
    "kind": _is_text,
    "round": _is_integer,
    "rank": _is_integer,
    "step": lambda value: value is None or _is_integer(value),
    "mono": _is_number,
    "wall": _is_number,
    "reason": _is_text,
    "path": _is_text,
    "bytes": _is_integer,
    "seconds": _is_number,
    "written_seconds": _is_number,
    "from_round": _is_integer,
    "from_step": _is_integer,
    "donor": _is_integer,
    "steps_saved": _is_integer,
    "saved_at": _is_number,
    "in_processes": lambda value: isinstance(value, bool),
    "every_seconds": _is_number,
    "values": lambda value: isinstance(value, dict),
}
"""Readers rely on the types, and a file may hold anything. The fields of a kind may be absent."""
