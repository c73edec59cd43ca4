"""The event log: what happened to a job, one JSON object a line, for programs that read it later.

The dataclasses below are the one table of kinds and fields; docs/events.md is generated from them and a test keeps the
two in step. The format is stable: kinds and fields are added, never renamed or given another meaning, while `v` is 1.

A line is one write to a file opened for appending, so several writers never mix within a line, and a line is in the
kernel's hands before the agent goes on: it survives the agent's own SIGKILL. Nothing here ever raises once the file is
open, blocks on a pipe nobody reads, or grows without bound; a line that cannot be written is counted, and said once.
"""

from __future__ import annotations

import json
import logging
import math
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, ClassVar, Protocol

from elasticd.errors import UsageError

FORMAT = 1
MAX_LINE = 64 * 1024
# Long enough for any path and a sentence about it; a Python traceback in a reason is cut.
MAX_TEXT = 4096
_CUTS = ((MAX_TEXT, 4096), (256, 256), (64, 8))

_log = logging.getLogger("elasticd.eventlog")


def _is(meaning: str, **default: Any) -> Any:
    """A dataclass field with its sentence for docs/events.md."""
    return field(metadata={"meaning": meaning}, **default)


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """What every line carries besides `v`, `kind`, `job`, `node` and `wall`, which the log adds."""

    kind: ClassVar[str]
    round: int = _is("the round's number; 0 before the first one")
    mono: float = _is("CLOCK_MONOTONIC of this node when it happened, in seconds; for one boot of one node only")
    reason: str = _is("one sentence for a person: what happened and why")


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundPublished(Record):
    """A round was agreed on: who takes part from now on."""

    kind: ClassVar[str] = "round_published"
    world_size: int = _is("workers in the round")
    nodes: tuple[str, ...] = _is("ids of the nodes, in rank order")
    restarts: int = _is("restarts of the job so far, this round included")
    cause: str = _is("why there is a new round; the `cause` label of `elasticd_restarts_total`, or start")


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupStarted(Record):
    """This node's workers of a round are running."""

    kind: ClassVar[str] = "group_started"
    ranks: tuple[int, ...] = _is("global ranks of this node's workers, by local rank")
    pids: tuple[int, ...] = _is("their process ids, in the same order")
    warm: bool = _is("true when they were forked by the warm launcher")


@dataclass(frozen=True, slots=True, kw_only=True)
class FirstStep(Record):
    """A worker of the round finished its first optimizer step: the job trains (again)."""

    kind: ClassVar[str] = "first_step"
    step: int = _is("the step that was finished")
    rank: int = _is("the rank seen first")
    start_seconds: float = _is("from the start of the round's workers, in seconds")
    recovery_seconds: float | None = _is("from the fault before it, in seconds; null when there was none", default=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerExited(Record):
    """A worker process of this node ended."""

    kind: ClassVar[str] = "worker_exited"
    rank: int = _is("its global rank")
    local_rank: int = _is("its local rank")
    pid: int = _is("its process id")
    exit_code: int | None = _is("what it exited with; null when a signal ended it", default=None)
    signal: int | None = _is("the signal that ended it; null when it exited", default=None)
    asked: bool = _is("true when the agent had told it to stop, or killed it")
    step: int | None = _is("the last step it had finished; null when none is known", default=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointSaved(Record):
    """Rank 0 finished writing a checkpoint: it is on disk under its final name."""

    kind: ClassVar[str] = "checkpoint_saved"
    step: int = _is("the step it holds")
    path: str = _is("its directory")
    bytes: int = _is("its size")
    seconds: float = _is("how long training stood still for it, in seconds")


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointSkipped(Record):
    """A checkpoint could not be trusted and was passed over on the way to an older one."""

    kind: ClassVar[str] = "checkpoint_skipped"
    step: int | None = _is("the step its name or manifest claims; null when neither can be read", default=None)
    path: str = _is("its directory")


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointFailed(Record):
    """A checkpoint could not be written; training goes on and it is tried again."""

    kind: ClassVar[str] = "checkpoint_failed"
    step: int | None = _is("the step it would have held", default=None)
    path: str = _is("where it was to go")


@dataclass(frozen=True, slots=True, kw_only=True)
class Resumed(Record):
    """The round's workers loaded a checkpoint and go on from it."""

    kind: ClassVar[str] = "resumed"
    step: int = _is("the step training goes on from")
    from_round: int = _is("the round that wrote the checkpoint")
    path: str = _is("its directory")


@dataclass(frozen=True, slots=True, kw_only=True)
class Holding(Record):
    """All workers wait right after a checkpoint, for a round that is expected soon."""

    kind: ClassVar[str] = "holding"
    step: int = _is("the step they wait at; its checkpoint is on disk")


@dataclass(frozen=True, slots=True, kw_only=True)
class HoldOver(Record):
    """The workers stopped waiting by themselves; when the next round ends the wait there is no such line."""

    kind: ClassVar[str] = "hold_over"
    step: int = _is("the step they waited at")
    seconds: float = _is("how long they waited, in seconds")


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreAway(Record):
    """The store in which agents meet does not answer; training goes on, and what there is to say to others waits."""

    kind: ClassVar[str] = "store_away"


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreBack(Record):
    """The store answers again."""

    kind: ClassVar[str] = "store_back"
    seconds: float = _is("how long it was away, in seconds")


@dataclass(frozen=True, slots=True, kw_only=True)
class Launcher(Record):
    """How this node starts its workers from now on, and why when that is not the warm launcher."""

    kind: ClassVar[str] = "launcher"
    mode: str = _is("warm: forked from a process that has torch imported; cold: each worker imports by itself")
    seconds: float | None = _is("how long the launcher took to get ready, in seconds; null when cold", default=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreExited(Record):
    """The process that hosts a round's store ended while the round still needed it."""

    kind: ClassVar[str] = "store_exited"
    pid: int = _is("its process id")
    exit_code: int | None = _is("what it exited with; null when a signal ended it", default=None)
    signal: int | None = _is("the signal that ended it; null when it exited", default=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupGone(Record):
    """Nothing is left of this node's workers of a round; the next group may start."""

    kind: ClassVar[str] = "group_gone"
    seconds: float = _is("from the decision to stop the group, or the last exit, to its end, in seconds")
    survivors: tuple[int, ...] = _is("process ids that would not die in time; empty as a rule", default=())


@dataclass(frozen=True, slots=True, kw_only=True)
class StopRequested(Record):
    """Somebody asked the job to stop."""

    kind: ClassVar[str] = "stop_requested"
    by: str = _is("who asked: SIGTERM, SIGINT, drain, ...")
    grace_seconds: float = _is("how long workers are given before SIGKILL, in seconds")


@dataclass(frozen=True, slots=True, kw_only=True)
class JobEnded(Record):
    """The last line of a job."""

    kind: ClassVar[str] = "job_ended"
    outcome: str = _is("succeeded, failed or stopped")
    exit_code: int = _is("what elasticd exits with")
    restarts: int = _is("restarts in all")
    step: int | None = _is("the last step finished; null when none is known", default=None)


RECORDS: tuple[type[Record], ...] = (
    RoundPublished, GroupStarted, FirstStep, WorkerExited, CheckpointSaved, CheckpointSkipped, CheckpointFailed,
    Resumed, Holding, HoldOver, StoreAway, StoreBack, Launcher, StoreExited, GroupGone, StopRequested, JobEnded,
)  # fmt: skip


class Events(Protocol):
    """Where records go."""

    lost: int

    def write(self, record: Record) -> None: ...

    def close(self) -> None: ...


class NullEventLog:
    """The event log of a job that was not asked to keep one."""

    lost = 0

    def write(self, record: Record) -> None:
        pass

    def close(self) -> None:
        pass


class EventLog:
    """Appends records to a file. Never raises once made; `lost` counts the lines that could not be written whole."""

    def __init__(self, path: Path, job: str, node: str) -> None:
        """Raises UsageError when `path` cannot be opened for appending."""
        self.lost = 0
        self._path, self._job, self._node = path, job, node
        self._torn = False
        # O_NONBLOCK: a named pipe without a reader is refused here, and one whose reader stalls costs lines, not time.
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NONBLOCK
        try:
            self._fd = os.open(path, flags, 0o600)
        except (OSError, ValueError) as error:
            why = error.strerror if isinstance(error, OSError) else str(error)
            raise UsageError(f"--event-log {path}: cannot be opened for appending: {why}") from error

    def write(self, record: Record) -> None:
        line = encode(record, self._job, self._node)
        if self._torn:
            line = b"\n" + line
        try:
            written = os.write(self._fd, line)
        except OSError as error:
            self._lose(error.strerror or str(error))
            return
        # A full disk may take the head of a line; the next one starts with a newline, so that only this one is lost.
        self._torn = written < len(line)
        if self._torn:
            self._lose("only a part of a line could be written")

    def _lose(self, why: str) -> None:
        self.lost += 1
        if self.lost == 1:
            _log.warning("event log %s: %s; the job goes on, lines that cannot be written are counted", self._path, why)

    def close(self) -> None:
        if self._fd < 0:
            return
        os.close(self._fd)
        self._fd = -1
        if self.lost:
            _log.warning("event log %s: %d lines were lost", self._path, self.lost)


def open_event_log(path: Path | None, job: str, node: str) -> Events:
    """The log at `path`, or one that does nothing. Raises UsageError when the file cannot be opened."""
    return NullEventLog() if path is None else EventLog(path, job, node)


def encode(record: Record, job: str, node: str) -> bytes:
    """One line with its newline, at most MAX_LINE bytes; what does not fit is cut and the line says `"cut": true`."""
    # Reckoned from `mono`, so that wall says when it happened too, however late it is written.
    wall = time.time() - (time.monotonic() - record.mono)
    head = {"v": FORMAT, "kind": record.kind, "job": job, "node": node, "round": record.round, "wall": round(wall, 6)}
    body = {f.name: getattr(record, f.name) for f in fields(record) if f.name != "round"}
    line = b""
    for text, items in _CUTS:
        line = _dump({**head, **body}, text, items)
        if len(line) <= MAX_LINE:
            break
    return line


def _dump(values: Mapping[str, Any], text: int, items: int) -> bytes:
    kept = {name: _cut(value, text, items) for name, value in values.items()}
    if any(kept[name] != value for name, value in values.items() if not isinstance(value, float)):
        kept["cut"] = True
    # Names that are not UTF-8 reach us as lone surrogates; backslashreplace turns these into JSON's own escapes.
    return (json.dumps(kept, ensure_ascii=False, allow_nan=False) + "\n").encode("utf-8", "backslashreplace")


def _cut(value: Any, text: int, items: int) -> Any:
    if isinstance(value, str):
        return value if len(value) <= text else value[:text] + "…"
    if isinstance(value, (tuple, list)):
        return type(value)(_cut(item, text, items) for item in value[:items])
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def document() -> str:
    """docs/events.md, whole."""
    rows = [
        "| field | type | meaning |", "|---|---|---|",
        f"| `v` | int | version of the format: {FORMAT} |",
        "| `kind` | str | what happened: one of the kinds below |",
        "| `job` | str | the job's id |",
        "| `node` | str | the id of the node whose agent wrote the line |",
        "| `wall` | float | unix time when it happened, in seconds, by this node's clock |",
        *(_row(f) for f in fields(Record)),
        f"| `cut` | bool | only there, and true, when something was shortened to stay below {MAX_LINE // 1024} KiB |",
    ]  # fmt: skip
    parts = [_INTRODUCTION, "## Every line", "\n".join(rows), "## Kinds"]
    common = {f.name for f in fields(Record)}
    for kind in RECORDS:
        own = [_row(f) for f in fields(kind) if f.name not in common]
        parts += [f"### {kind.kind}", (kind.__doc__ or "").strip()]
        parts += ["\n".join(["| field | type | meaning |", "|---|---|---|", *own])]
    return "\n\n".join(parts) + "\n"


def _row(f: Any) -> str:
    kind = str(f.type).replace("tuple[", "list[").replace(", ...]", "]").replace(" | None", " or null")
    return f"| `{f.name}` | {kind} | {f.metadata['meaning']} |"


_INTRODUCTION = """# The event log

<!-- Written by `python -m elasticd_agent.eventlog > docs/events.md`: change agents/elasticd_agent/eventlog.py. -->

`elasticd run --event-log FILE ...` appends one JSON object a line to FILE (UTF-8, mode 0600 when elasticd creates it).
Each line is written when the thing happens, by one write to a file opened for appending, so a reader may follow the
file while the job runs.

- The format follows semantic versioning: kinds and fields may be added, so ignore those you do not know. `v` changes
  when the meaning of an existing one does.
- Measure durations with `mono`, between lines of one node; `wall` may jump when the machine's clock is set.
- A full disk never stops the job: lines that cannot be written are counted (`elasticd_event_log_lines_lost_total`), one
  warning goes to stderr, and a line cut short by the full disk is followed by a newline, so skip lines that are not
  JSON.
- FILE may be a named pipe with a reader; a reader that stalls loses lines, not the job's time."""


if __name__ == "__main__":
    print(document(), end="")
