"""What a worker tells its agent now and then, one JSON object a line: a checkpoint saved, failed or skipped, a resume.

Beats say where a worker is; notes say what happened, with the sentence a person shall read. A line is one `write` to a
file opened for appending, so notes never interleave; the file is opened anew for each, so the script holds no
descriptor. Writing a note never raises and never stops training: a full disk loses the note, and the next one says how
many were lost.

    {"v": 1, "kind": "checkpoint_saved", "round": 3, "rank": 0, "step": 120, "mono": 812.4, "wall": 1790000000.0,
     "reason": "...", ...}

    kind                also carries
    checkpoint_saved    path, bytes, seconds
    checkpoint_failed   path
    checkpoint_skipped  path
    resumed             path, from_round, from_step
    attached            every_seconds, if that is how checkpoints were asked for (this rank has something to save and a
                        place for it; once a process, on every rank)
    can_hold            (holds are possible from now on; once a process)
    cannot_hold         (what was asked for will not be: why)
    holding             (all ranks wait at this step, whose checkpoint is on the disk)
    hold_over           seconds
    said                (something worth a line)

`mono` is CLOCK_MONOTONIC seconds, `wall` is for people only. Unknown kinds and fields are kept: a newer worker may say
more.
"""

from __future__ import annotations

import json
import os
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from elasticd.errors import WireError

if TYPE_CHECKING:
    from collections.abc import Callable

VERSION = 1
KINDS = (
    *("checkpoint_saved", "checkpoint_failed", "checkpoint_skipped", "resumed", "said"),
    *("attached", "can_hold", "cannot_hold", "holding", "hold_over"),
)
_KNOWN = ("v", "kind", "round", "rank", "step", "mono", "wall", "reason")
# A line longer than this is no note of ours; a reader does not buffer without a bound.
_LONGEST_LINE = 1 << 20
_LARGEST = 1 << 62


@dataclass(frozen=True, slots=True)
class WorkerEvent:
    """One line. `more` holds the fields that belong to its kind, and those of a newer version."""

    kind: str
    round: int
    rank: int
    step: int | None
    mono: float
    wall: float
    reason: str
    extra: dict[str, Any] = field(default_factory=dict)

    def to_line(self) -> bytes:
        """The line as it stands in the file, with its newline. Raises TypeError for what JSON does not know."""
        known = {"v": VERSION, **{name: getattr(self, name) for name in _KNOWN[1:]}}
        return json.dumps({**self.extra, **known}, allow_nan=False).encode() + b"\n"

    @classmethod
    def from_line(cls, line: bytes) -> WorkerEvent:
        """Read one line. Raises WireError for anything that is not a note of version 1."""
        try:
            found = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise WireError(f"note {line[:80]!r} is no JSON: {error}") from error
        if not isinstance(found, dict) or found.get("v") != VERSION:
            raise WireError(
                f"note {line[:80]!r} is not of version {VERSION}; run the same elasticd in the agent and the worker"
            )
        checks: dict[str, Callable[[Any], bool]] = {
            "kind": _is_text,
            "round": _is_integer,
            "rank": _is_integer,
            "step": lambda value: value is None or _is_integer(value),
            "mono": _is_number,
            "wall": _is_number,
            "reason": _is_text,
        }
        for name, right in checks.items():
            if name not in found or not right(found[name]):
                raise WireError(f"note {line[:80]!r}: {name} is missing or of the wrong type")
        more = {name: value for name, value in found.items() if name not in _KNOWN}
        for name in more.keys() & _MORE.keys():
            if not _MORE[name](more[name]):
                raise WireError(f"note {line[:80]!r}: {name} is of the wrong type")
        return cls(**{name: found[name] for name in checks}, extra=more)


class WorkerEventWriter:
    """The worker's side; `path` None makes it write nowhere, which is what a script without an agent wants."""

    def __init__(self, path: str | os.PathLike[str] | None, round: int = 0, rank: int = 0) -> None:
        self._path, self._round, self._rank = path, round, rank
        self._lost = 0
        self._torn = False

    def write(self, kind: str, reason: str, step: int | None = None, **more: Any) -> None:
        """Append one note; see the table above for what a kind carries."""
        if self._path is None:
            return
        if self._lost:
            more["lost"] = self._lost
        note = WorkerEvent(kind, self._round, self._rank, step, time.monotonic(), time.time(), reason, more)
        line = note.to_line()
        if self._torn:
            line = b"\n" + line
        try:
            written = self._append(line)
        except OSError:
            self._lost += 1
            return
        self._torn = written < len(line)
        self._lost = self._lost + 1 if self._torn else 0

    def _append(self, line: bytes) -> int:
        assert self._path is not None
        fd = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        try:
            return os.write(fd, line)
        finally:
            os.close(fd)


class WorkerEventReader:
    """The agent's side: hands out each line once. The file need not exist yet. Keeps no descriptor."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._path = path
        self._offset = 0
        self._partial = b""

    def read(self) -> tuple[list[WorkerEvent], list[str]]:
        """The notes since the last call, and what was wrong with the lines that are none.

        Raises OSError, but not for a missing file.
        """
        try:
            fd = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            return [], []
        try:
            data = os.pread(fd, _LONGEST_LINE, self._offset)
        finally:
            os.close(fd)
        self._offset += len(data)
        *lines, self._partial = (self._partial + data).split(b"\n")
        notes: list[WorkerEvent] = []
        wrong: list[str] = []
        for line in lines:
            if line:
                try:
                    notes.append(WorkerEvent.from_line(line))
                except WireError as error:
                    wrong.append(str(error))
        if len(self._partial) > _LONGEST_LINE:
            wrong.append(f"note file {os.fspath(self._path)}: a line of more than {_LONGEST_LINE} bytes was dropped")
            self._partial = b""
        return notes, wrong


def from_environment(round: int, rank: int) -> WorkerEventWriter:
    """Notes into ELASTICD_NOTES, or nowhere."""
    return WorkerEventWriter(os.environ.get("ELASTICD_NOTES") or None, round, rank)


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _is_integer(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < _LARGEST


def _is_number(value: Any) -> bool:
    """Of seconds; NaN is none."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value < _LARGEST


_MORE = {
    "path": _is_text,
    "bytes": _is_integer,
    "seconds": _is_number,
    "from_round": _is_integer,
    "from_step": _is_integer,
    "every_seconds": _is_number,
}
"""What the kinds carry: whoever reads it relies on that, and anything may be written into a file."""
