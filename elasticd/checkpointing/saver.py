"""When a checkpoint is due and how the ranks write one together: all send their random state, rank 0 writes.

No other rank waits for the disk: each sends a few kilobytes and trains on. The first save is the exception, because
every rank must learn that it is refused (a state that could not be loaded again). A full or read-only disk is reported,
training continues, and the save is tried again when the next one is due.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import json
import logging
import os
import re
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

from elasticd.checkpointing.memory import writer_client
from elasticd.checkpointing.memory.buffers import KILLED, WriteTask
from elasticd.checkpointing.memory.writer_client import SnapshotRefused, WriterClient
from elasticd.checkpointing.sharded_saver import ShardedSaver
from elasticd.checkpointing.state import checkpoint_files as checkpoint
from elasticd.checkpointing.state import rank_differences, sharded, training_state
from elasticd.checkpointing.state.layout import Layout, write_packed
from elasticd.checkpointing.state.rank_differences import RankState
from elasticd.checkpointing.state.safe_types import check_loadable
from elasticd.checkpointing.storage.directory_lock import DirectoryLock
from elasticd.checkpointing.storage.lineage import Entry
from elasticd.checkpointing.storage.manifest import NO_CHECKSUM, Manifest, parse
from elasticd.checkpointing.storage.object_store import store_of
from elasticd.checkpointing.storage.object_url import missing_package, resolve, shown
from elasticd.coordination.store_channel import StoreChannel
from elasticd.errors import CheckpointRefused, StateDiffers, UsageError
from elasticd.heartbeat.record import HeartbeatWriter, Phase
from elasticd.heartbeat.worker_events import WorkerEventWriter
from elasticd.process_group import DefaultGroup, WorkerEnvironment
from elasticd.sampler import ElasticBatchSampler

logger = logging.getLogger("elasticd")

DEFAULT_KEEP = 3
"""Checkpoints that stay, unless the script says otherwise."""
MOST_SENT_BYTES = 8 << 20
"""The most that rank 0 sends to every node at a save: buffers, random states, numbers. A larger part that is not equal
on all ranks, such as averaged weights, is kept on rank 0's node only. Also the most that rank 0 gets from each rank."""
_TOO_LARGE = "too large: "
"""Begins a message that stands for a larger one."""
_NOT_SAVED = b"not saved"
"""What rank 0 sends instead of its part where it cannot save this time."""
_UNITS = {"ms": 0.001, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0}


@dataclass(frozen=True, slots=True)
class SaveInterval:
    """How often: a number of steps, or seconds by rank 0's clock. The other one is None."""

    steps: int | None
    seconds: float | None

    def __str__(self) -> str:
        return f"every {self.steps} steps" if self.steps else f"every {self.seconds:g} s"

    @classmethod
    def parse(cls, every: int | str | timedelta) -> SaveInterval:
        """From 50 (steps), "30s", "5m", "1h" or a timedelta. Raises UsageError for anything else."""
        if isinstance(every, timedelta) and every > timedelta(0):
            return cls(None, every.total_seconds())
        if isinstance(every, int) and not isinstance(every, bool) and every > 0:
            return cls(every, None)
        if isinstance(every, str):
            found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*(ms|s|m|min|h)\s*", every)
            if found and float(found[1]) > 0:
                return cls(None, float(found[1]) * _UNITS[found[2]])
        raise UsageError(
            f'checkpoint(every={every!r}): give a number of steps (50), a time ("30s", "5m", "1h") or a timedelta'
        )


@dataclass
class Saver:
    """The checkpoint directory as one session uses it. All ranks call the same methods at the same steps."""

    environment: WorkerEnvironment
    group: DefaultGroup
    channel: StoreChannel
    events: WorkerEventWriter
    heartbeat: HeartbeatWriter
    directory: Path | None = None
    round: int = 0
    """The number under which this session saves: the agent's, else one more than the highest in the directory."""
    parent: tuple[int, int] | None = None
    """The (round, step) that trained what this round resumed from."""
    per_rank: dict[str, Any] = field(default_factory=dict)
    """Objects of which every rank's state is saved, by name."""
    every: SaveInterval | None = None
    keep: int = DEFAULT_KEEP
    keep_every: int = 0
    """Checkpoints of these steps stay for ever; 0: none."""
    partner_copies: bool = True
    """Each node keeps a copy of another node's part of a sharded state."""
    owed: str = ""
    """Why a save is due as soon as no earlier one is being written, "" if none is."""
    saved_step: int | None = None
    """The newest step that every rank knows to be on the disk: that of the last save which was waited for."""
    _shards: ShardedSaver | None = None
    _lock: DirectoryLock | None = None
    _last_at: float = field(default_factory=time.monotonic)
    writer: WriterClient | None = field(default_factory=writer_client.from_environment)
    """None: there is no writer on this node, and rank 0 writes checkpoints itself."""
    _keeps_copies: bool = True
    """This rank copies its share at each save; if not, it still saves its state at a fault."""
    _opens: int = 0
    """Tries to open the directory."""
    saves: int = 0
    _accepted: bool = False
    """The state can be saved, and is not refused; all ranks know that."""
    rank_state: RankState = field(default_factory=RankState)
    _differing: set[str] = field(default_factory=set)
    """Names that have been reported."""
    _copied: int = 0
    """The last save of which the writer has a copy."""
    _copied_step: int = 0
    _pending: bool = False
    """The writer has a checkpoint of this process to write, or has written it."""
    _refused: bool = False
    """The writer took no copy, and a message said so."""
    _pid: int = field(default_factory=os.getpid)
    """A forked child has the same connection to the writer, whose answers are not for it."""

    def open(self, directory: str | os.PathLike[str] | None, caller: str) -> Path:
        """Choose the directory (the argument, else ELASTICD_CHECKPOINT_DIR) and lock it; a second call only checks."""
        chosen = directory or os.environ.get("ELASTICD_CHECKPOINT_DIR")
        if self.directory is not None and (directory is None or resolve(directory) == self.directory):
            return self.directory
        if self.directory is not None:
            raise UsageError(f"{caller}(directory={directory!r}): this session already uses {self.directory}")
        if not chosen:
            raise UsageError(
                f"{caller}(): there is no checkpoint directory. Give one with --checkpoint-dir DIR (`elasticd run`, "
                f"`elasticd submit`), in the script with {caller}(directory=...), or by ELASTICD_CHECKPOINT_DIR"
            )
        path = resolve(chosen)
        if why := missing_package(path):
            raise UsageError(f"{caller}(): {why}")
        what = f"the lock of the checkpoint directory {path}"
        self._opens += 1
        self.round = self.channel.on_rank0(f"directory/{self._opens}", what, lambda: self._open_first(path))["round"]
        self.directory = path
        if self.writer is not None:
            self.writer.at_end, self.writer.on_successor = self._at_end, self._report_lost
        return path

    def _open_first(self, path: Path) -> dict[str, Any]:
        try:
            self._take_lock(path)
        except OSError as error:
            self.warn("message", f"checkpoint directory {path}: {error}; training continues, saves will be tried", path)
        if self.environment.round:
            self._check_round(path)
            return {"round": self.environment.round}
        # Without an agent each start is a round of its own, so that its checkpoints come after all others.
        checkpoint.lineage(path)
        return {"round": checkpoint.highest_round(path) + 1}

    def _check_round(self, path: Path) -> None:
        """A launcher that knows the directory begins with a round above all that are in it. Raises UsageError."""
        round, known = self.environment.round, os.environ.get("ELASTICD_CHECKPOINT_DIR")
        if known and resolve(known) == path:
            return
        with contextlib.suppress(OSError):
            if (highest := checkpoint.highest_round(path)) > round:
                raise UsageError(
                    f"{shown(path)} has checkpoints of round {highest}, and this is round {round} of a launcher that "
                    "does not know the directory: what is saved now would not be loaded. Give the directory with "
                    "--checkpoint-dir, or checkpoint_dir in the job file"
                )

    def _take_lock(self, path: Path) -> None:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        job, run = self.environment.job, self.environment.run
        launched = self.environment.round > 0
        lock = DirectoryLock(path, job, run, claims=not launched)
        lock.acquire()
        if launched and (store := store_of(path)) is not None:
            store.assume_claimed(job, run)
        self._lock = lock
        if lock.unlocked:
            self.events.write("message", lock.unlocked, None, path=str(path))

    def due_by_steps(self, step: int) -> bool:
        """The same on every rank."""
        return self.every is not None and self.every.steps is not None and step % self.every.steps == 0

    def due_by_time(self) -> str:
        """Why a save is due by rank 0's clock, "" if none is; for a decision point."""
        if self.owed and self._shards is not None and not self._shards.is_busy(wait=False):
            return self.owed
        seconds = self.every.seconds if self.every else None
        return str(self.every) if seconds is not None and time.monotonic() - self._last_at >= seconds else ""

    def save(
        self,
        step: int,
        attached: Mapping[str, Any],
        why: str,
        wait: bool = False,
        random_state: dict[str, Any] | None = None,
    ) -> bool:
        """Save the attached objects and all ranks' random states; this rank's is `random_state`, or the present one.

        With `wait`, True on every rank if the checkpoint is on the disk. Without it, where the launcher runs a writer,
        training is blocked only by a copy into memory; the writer reports what became of it, and the result is True on
        rank 0 once the copy is made.
        """
        if not attached:
            raise UsageError("nothing is attached: call session.attach(model=..., optimizer=...) before saving")
        self.saves += 1
        self.owed = ""
        self._last_at = time.monotonic()
        shards = self.shards(attached)
        attached = {name: obj for name, obj in attached.items() if shards is None or name not in shards.objects}
        own: dict[str, Any] = {name: obj.state_dict() for name, obj in self.per_rank.items()}
        check_loadable(own)
        in_shards = shards.objects if shards else {}
        is_first, world_size = not self._accepted, self.group.world_size
        compared = self.rank_state.describe(attached, in_shards, world_size, step, is_first)
        mine = training_state.to_bytes([random_state or training_state.random_state(self.group.device), own, compared])
        if len(mine) > MOST_SENT_BYTES:
            mine = f"{_TOO_LARGE}rank {self.group.rank}'s state of {', '.join(own)} has {len(mine) >> 20} MB".encode()
        received = self.channel.collect(f"random/{self.saves}", mine, f"random states for the save at step {step}")
        larger = _larger(received)
        every_rank = [] if larger else list(map(training_state.from_bytes, received))
        if is_first:
            what = f"whether the state of step {step} can be loaded again"
            check = functools.partial(self._check, step, attached, every_rank, larger)
            self._report(self.channel.on_rank0(f"first save/{self.saves}", what, check), step)
            self._accepted = True
        elif every_rank:
            found = rank_differences.find([compared for _, _, compared in every_rank])
            self._report({each.name: each.what for each in found}, step)
        before = self.heartbeat.current_phase
        self.heartbeat.set_phase(Phase.CHECKPOINT)
        try:
            if shards is not None:
                content = functools.partial(self._content, step, attached, every_rank)
                saved = shards.save(self._draft(step, 0, attached), content, larger, why, wait)
            else:
                saved = self._save(step, attached, every_rank, larger, why, wait)
            if wait:
                what = f"whether the checkpoint of step {step} is on the disk"
                saved = bool(self.channel.on_rank0(f"saved/{self.saves}", what, lambda: {"saved": saved})["saved"])
                self.saved_step = step if saved else self.saved_step
            return saved
        finally:
            self.heartbeat.set_phase(before)
            self._last_at = time.monotonic()

    def _check(
        self, step: int, attached: Mapping[str, Any], every_rank: Sequence[Sequence[Any]], larger: str
    ) -> dict[str, Any]:
        """At the first save. Returns what differs between ranks, by name. Raises StateDiffers for that in the first
        round of a job: a later one resumes from a state that this job could live with.
        """
        if larger:
            raise CheckpointRefused(larger)
        check_loadable(self._content(step, attached, every_rank))
        found = list(rank_differences.find([compared for _, _, compared in every_rank]))
        if self.parent is None and (errors := [each.what for each in found if each.is_error]):
            raise StateDiffers(errors[0])
        return {each.name: each.what for each in found}

    def _report(self, differences: Mapping[str, str], step: int) -> None:
        """Of each name once: on this rank's stderr, and by rank 0 in the job's log."""
        for name, what in differences.items():
            if name not in self._differing:
                self._differing.add(name)
                logger.warning(what)
                if self.group.rank == 0:
                    self.events.write("message", what, step)

    def _content(self, step: int, attached: Mapping[str, Any], every_rank: Sequence[Sequence[Any]]) -> dict[str, Any]:
        own = {"step": step, "round": self.round, "world_size": self.group.world_size}
        streams = [random_state for random_state, _, _ in every_rank]
        per_rank = {name: [states[name] for _, states, _ in every_rank] for name in self.per_rank}
        kept = {"rng": streams, **({"per_rank": per_rank} if per_rank else {})}
        return {**training_state.gather(attached), training_state.RESERVED: {**own, **kept}}

    def _save(
        self,
        step: int,
        attached: Mapping[str, Any],
        every_rank: Sequence[Sequence[Any]],
        larger: str,
        why: str,
        wait: bool,
    ) -> bool:
        start = time.monotonic()
        if self.group.rank != 0 and not (self.writer and self._keeps_copies):
            return False
        if larger:
            assert self.directory is not None
            self._send_own(lambda: _NOT_SAVED)
            reason = f"checkpoint of step {step} failed ({larger}); {self.next_try}"
            self.warn("checkpoint_failed", reason, self.directory / f"r{self.round}-s{step}", step)
            return False
        content = self._content(step, attached, every_rank)
        if self.group.rank == 0:
            check_loadable(content)
        layout = Layout(content, training_state.replicated(attached, self.group.world_size), save=self.saves)
        draft = self._draft(step, layout.bytes, attached)
        if self.group.rank == 0:
            checkpoint.check_cursor(draft)
        if (exchanged := self._exchange_own(draft, layout)) is None:
            return False
        draft, copy_own = exchanged
        copied = self._copy(draft, layout, copy_own, why, start)
        if self.group.rank != 0:
            return False
        if not copied:
            return self.write(draft, lambda path: checkpoint.write(path, draft, layout.fill), why, start)
        return self.wait() if wait else True

    @property
    def is_sharded(self) -> bool:
        """`shards` has been called with a sharded object."""
        return self._shards is not None

    def shards(self, attached: Mapping[str, Any]) -> ShardedSaver | None:
        """What saves the sharded objects, None without any; all ranks call it at the same place.

        Raises UsageError on every rank where these objects differ between ranks.
        """
        if self._shards is None and (names := sharded.names(attached)):
            self._shards = ShardedSaver(self, {name: attached[name] for name in attached if name in names})
        return self._shards

    def _draft(self, step: int, size: int, attached: Mapping[str, Any]) -> Manifest:
        whose = (self.group.world_size, size, NO_CHECKSUM, self.environment.job, self.environment.run)
        # Another start of the same round, with a directory that the agent does not know, continues that round.
        parent = self.parent if self.parent is not None and self.parent[0] < self.round else None
        return Manifest(self.round, step, parent, *whose, cursor_of(attached), time.time())

    def _send_own(self, make: Callable[[], bytes]) -> None:
        """Rank 0's part of the state, to every node that keeps a copy: all of them have read the one before."""
        if self.environment.nodes > 1 and self.environment.round:
            self.channel.put(f"own/{self.saves}", make())
            if self.saves > 1:
                self.channel.delete(f"own/{self.saves - 1}")

    def _exchange_own(self, draft: Manifest, layout: Layout) -> tuple[Manifest, Callable[[int], None]] | None:
        """What only rank 0 has, on every node that keeps a copy: equal copies, so that any of them may be resumed from.

        Returns rank 0's draft, and what writes rank 0's part of the state into a file; None if rank 0 does not save.
        """
        writer = self.writer

        def own() -> bytes:
            header = json.dumps({"draft": draft.to_json().decode(), "digest": layout.shared_digest})
            packed = layout.pack_own(MOST_SENT_BYTES)
            return header.encode() + b"\n" + packed if packed else b""

        if self.group.rank == 0:
            self._send_own(own)
        elif writer is not None and not writer.first_node and layout.own_bytes > MOST_SENT_BYTES:
            self._keeps_copies = False
            self._report_no_copy(f"more than {MOST_SENT_BYTES >> 20} MB of it are not equal on all ranks", draft.step)
        elif writer is not None and not writer.first_node and writer.share == 0:
            sent = self.channel.read(f"own/{self.saves}", f"rank 0's part of the state of step {draft.step}")
            if sent == _NOT_SAVED:
                return None
            described, _, packed = sent.partition(b"\n")
            of_rank0 = json.loads(described) if packed else {}
            found = parse(of_rank0.get("draft", "").encode())
            if isinstance(found, Manifest) and of_rank0["digest"] == layout.shared_digest:
                return found, lambda fd: write_packed(fd, packed)
            self._report_no_copy("its shape differs from rank 0's", draft.step)
            self.writer = None
        return draft, layout.copy_own

    def _report_no_copy(self, why: str, step: int) -> None:
        if self.writer is not None and self.writer.share == 0:
            reason = f"this node keeps no copy of the state in memory: {why}"
            logger.warning(reason)
            self.events.write("message", reason, step)

    def _copy(self, draft: Manifest, layout: Layout, copy_own: Callable[[int], None], why: str, start: float) -> bool:
        """Copy this rank's share into the writer's memory; False where rank 0 has to write the checkpoint itself."""
        if self.writer is None or not self._keeps_copies:
            return False

        def task() -> WriteTask:
            return self.task(why, time.monotonic() - start)

        try:
            self.writer.copy(draft, self.saves, layout, copy_own, task if self.group.rank == 0 else None)
        except (OSError, SnapshotRefused) as error:
            why = str(error) if isinstance(error, SnapshotRefused) else f"the writer has ended ({error})"
            self.report_refusal(why, draft.step)
            if isinstance(error, OSError):
                self._report_lost()
            return False
        self.expect_write(draft.step)
        return True

    def _report_lost(self) -> None:
        """On rank 0: the writer has ended before it had every rank's share of the last copy. No other process knows."""
        if not self._pending or self.writer is None:
            return
        assert self.directory is not None
        with contextlib.suppress(OSError, SnapshotRefused):
            if all(each.saved != (self.round, self._copied) for each in self.writer.find_all()):
                self._pending = False
                step = self._copied_step
                reason = f"checkpoint of step {step} failed ({KILLED}); {self.next_try}"
                self.warn("checkpoint_failed", reason, self.directory / f"r{self.round}-s{step}", step)

    def report_refusal(self, why: str, step: int) -> None:
        """Once, on rank 0: there is no copy in memory."""
        if self.group.rank == 0 and not self._refused:
            self._refused = True
            reason = f"checkpoints are written while training waits: {why}"
            logger.warning(reason)
            self.events.write("message", reason, step)

    def expect_write(self, step: int) -> None:
        """The writer has a copy of the state."""
        self._refused, self._copied, self._copied_step = False, self.saves, step
        if self.group.rank == 0:
            if not self._pending:
                atexit.register(self._wait_at_exit)
            self._pending = True

    def task(self, why: str, blocked_s: float) -> WriteTask:
        """What the writer does with a state of this session."""
        assert self.directory is not None
        events = str(self.events.path or "")
        rank = self.group.rank
        return WriteTask(str(self.directory), self.keep, why, self.next_try, events, rank, blocked_s, self.keep_every)

    def _at_end(self) -> WriteTask:
        task = self.task("at the end of the job", 0.0)
        node, nodes = self.environment.node, self.environment.nodes
        return replace(task, again="the job has ended", node=node, nodes=nodes)

    def wait(self) -> bool:
        """On rank 0: wait until the writer has finished with the last save; True if it is on the disk."""
        if self.writer is None or not self._pending or os.getpid() != self._pid:
            return False
        atexit.unregister(self._wait_at_exit)
        before = self.heartbeat.current_phase
        self.heartbeat.set_phase(Phase.CHECKPOINT)
        try:
            result = self.writer.wait(self.round, self._copied, self.channel.timeout_s)
        except (OSError, SnapshotRefused) as error:
            result = {"saved": False, "why": f"the writer does not answer: {error}"}
        finally:
            self.heartbeat.set_phase(before)
        if not result["saved"]:
            logger.warning("a checkpoint failed: %s", result["why"])
            if result["why"] == KILLED:
                self._report_lost()
        self._pending = False
        return bool(result["saved"])

    def _wait_at_exit(self) -> None:
        """A script that ends without `close()` has its last checkpoint; one that fails is not held up."""
        if not hasattr(sys, "last_value"):
            self.wait()

    @property
    def next_try(self) -> str:
        return f"it is tried again {self.every}" if self.every else "it is not tried again"

    def write(self, draft: Manifest, write: Callable[[Path], Entry], why: str, start: float) -> bool:
        """Write the checkpoint here and now; False if that fails."""
        assert self.directory is not None
        path = self.path(draft)
        try:
            if self._lock is None:
                self._take_lock(self.directory)
            entry = write(self.directory)
            fields = {"path": str(path), "bytes": entry.manifest.total_bytes, "seconds": time.monotonic() - start}
            self.events.write(
                "checkpoint_saved", f"checkpoint of step {draft.step} saved ({why})", draft.step, **fields
            )
            checkpoint.retain(self.directory, self.round, self.keep, self.keep_every)
        except OSError as error:
            reason = f"checkpoint of step {draft.step} failed ({error}); {self.next_try}"
            self.warn("checkpoint_failed", reason, path, draft.step)
            return False
        return True

    def path(self, draft: Manifest) -> Path:
        """The checkpoint's, once it is written."""
        assert self.directory is not None
        return self.directory / f"r{draft.round}-s{draft.step}"

    def warn(self, kind: str, reason: str, path: Path, step: int | None = None) -> None:
        logger.warning(reason)
        self.events.write(kind, reason, step, path=str(path))

    def close(self, wait: bool = True) -> None:
        """Wait for the last checkpoint, unless the others wait for this rank's end, and release the lock."""
        if wait:
            self.wait()
        if self.writer is not None:
            self.writer.close()
        if self._lock is not None:
            if self.environment.round == 0:
                self._lock.release_store()
            self._lock.release()
            self._lock = None


def _larger(every_rank: list[bytes]) -> str:
    """Which ranks have more than can be sent, "" for none."""
    found = [each.decode().removeprefix(_TOO_LARGE) for each in every_rank if each.startswith(_TOO_LARGE.encode())]
    return f"{'; '.join(found)}; at most {MOST_SENT_BYTES >> 20} MB of each rank are sent to rank 0" if found else ""


def cursor_of(attached: Mapping[str, Any], states: Mapping[str, Any] | None = None) -> dict[str, Any] | None:
    """The position of the first attached sampler: now, or the one in `states`."""
    samplers = [(name, obj) for name, obj in attached.items() if isinstance(obj, ElasticBatchSampler)]
    return dict(states[samplers[0][0]] if states else samplers[0][1].state_dict()) if samplers else None
