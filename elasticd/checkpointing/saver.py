"""The interval of saves, as the script gives it; when a checkpoint is due; how the ranks save one together.

A save, in this order:

1. Rank 0's decision that one is due reaches all ranks at the same step (`session.step()`), so all have the same state.
2. Every rank sends rank 0 a few kilobytes: its random state, its `per_rank` objects, and digests of what should be
   equal on all ranks. No rank waits for rank 0 here, and none but rank 0 reads what was sent.
3. The first save is the exception: all ranks wait for rank 0, which tries whether the state could be loaded again and
   compares the digests. A state that is refused is refused on every rank, before a step has been built on it.
4. The state goes into the memory of the nodes, as files. A state of which each rank has all is one file
   (`whole_saver`); a sharded one has a file of each rank and a small one (`sharded_saver`), and needs three
   agreements, since it is worth nothing unless all nodes take their parts.
5. The writer of rank 0's node writes the files to a staging directory, adds the manifest with their checksums, and
   renames the directory. Only then is the checkpoint there, and only then may an older one be deleted.

What this order prevents:

- A checkpoint that is half of one step and half of another: a node's buffer is whole only when all shares of the same
  (round, save) with the same digest are in it; until then the state before stays, in the other buffer.
- A state that cannot be loaded, found out at the restart: step 3, and `check_loadable` at each save.
- Training that waits for a disk: after step 4 no rank waits, except for a save that the script or a stop asks for. A
  full or read-only disk is reported, training continues, and the save is tried again when the next one is due.
- A copy that other ranks' nodes cannot use: what only rank 0 has is sent to the nodes that keep copies, in step 4.

Where no launcher runs a writer, or the writer takes no copy, step 5 happens here and now, while training waits.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import re
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

from elasticd.channel import Message
from elasticd.checkpointing.at_fault import step_files
from elasticd.checkpointing.context import SaveContext, SaveInterval, cursor_of
from elasticd.checkpointing.directory_writes import DirectoryWrites
from elasticd.checkpointing.memory.writer_client import SnapshotRefused
from elasticd.checkpointing.sharded_saver import ShardedSaver
from elasticd.checkpointing.state import rank_differences, sharded, training_state
from elasticd.checkpointing.state.rank_differences import ComparedState
from elasticd.checkpointing.state.safe_types import check_loadable
from elasticd.checkpointing.state.training_state import RandomState, StateDict
from elasticd.checkpointing.storage.lineage import highest_round, lineage
from elasticd.checkpointing.storage.object_url import missing_package_reason, path_or_url, resolve
from elasticd.checkpointing.whole_saver import MAX_SENT_BYTES, WholeSaver
from elasticd.errors import CheckpointRefused, Reason, StateDiffers, UsageError
from elasticd.heartbeat.record import Phase

logger = logging.getLogger("elasticd")

_UNABLE_PREFIX = "unable: "
"""The beginning of a message of a rank whose own state cannot be saved; the reason follows."""
_UNIT_SECONDS = {"ms": 0.001, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0}
_directories_in_memory: dict[int, Path] = {}
"""The directory of this process's first session in each round: the states in memory are of that one."""


def parse_interval(every: int | str | timedelta) -> SaveInterval:
    """An interval from 50 (steps), "30s", "5m", "1h" or a timedelta. Raises UsageError for anything else."""
    if isinstance(every, timedelta) and every > timedelta(0):
        return SaveInterval(None, every.total_seconds())
    if isinstance(every, int) and not isinstance(every, bool) and every > 0:
        return SaveInterval(every, None)
    if isinstance(every, str):
        match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*(ms|s|m|min|h)\s*", every)
        if match and float(match[1]) > 0:
            return SaveInterval(None, float(match[1]) * _UNIT_SECONDS[match[2]])
    raise UsageError(
        f'checkpoint(every={every!r}): give a number of steps (50), a time ("30s", "5m", "1h") or a timedelta'
    )


class Saver:
    """The saves of one session. All ranks call the same methods at the same steps."""

    def __init__(self, context: SaveContext) -> None:
        self.context = context
        self.saved_step: int | None = None
        """The newest step that every rank knows to be on the disk: that of the last save which was waited for."""
        self.compared_state = ComparedState()
        self._writes = DirectoryWrites(context)
        self._whole = WholeSaver(context, self._writes)
        self._shards: ShardedSaver | None = None
        self._last_at = time.monotonic()
        self._opens = 0
        self.is_later_session = False
        """An earlier session of this process has another directory. The steps that the round before has recorded may be
        of that session.
        """
        self._given_directory: Path | None = None
        """The directory as this rank's script gives it; rank 0's counts."""
        self._accepted = False
        """The state can be saved, and is not refused; all ranks know that."""
        self._reported: set[str] = set()

    def open_directory(self, directory: str | os.PathLike[str] | None, caller: str) -> Path:
        """Choose the directory (the argument, else ELASTICD_CHECKPOINT_DIR) and lock it; a second call only checks."""
        context = self.context
        if context.directory is not None and (
            directory is None or resolve(directory) in (context.directory, self._given_directory)
        ):
            return context.directory
        if context.directory is not None:
            raise UsageError(f"{caller}(directory={directory!r}): this session already uses {context.directory}")
        chosen = directory or os.environ.get("ELASTICD_CHECKPOINT_DIR")
        if not chosen:
            raise UsageError(
                f"{caller}(): there is no checkpoint directory. Give one with --checkpoint-dir DIR (`elasticd run`, "
                f"`elasticd submit`), in the script with {caller}(directory=...), or by ELASTICD_CHECKPOINT_DIR"
            )
        path = resolve(chosen)
        if why := missing_package_reason(path):
            raise UsageError(f"{caller}(): {why}")
        what = f"the lock of the checkpoint directory {path}"
        self._opens += 1
        opened = context.channel.on_rank0(
            f"directory/{self._opens}", what, lambda: {"round": self._lock_and_find_round(path), "path": str(path)}
        )
        context.round, context.directory, self._given_directory = opened["round"], path, path
        if opened["path"] != str(path) and context.environment.node == 0:
            context.directory, path = Path(opened["path"]), Path(opened["path"])
            given = path_or_url(self._given_directory)
            context.report(
                f"rank {context.group.rank} gave {caller}() the directory {given}, and rank 0 {path_or_url(path)}, "
                "which counts: give the same one on all ranks",
                None,
            )
        if (first := _directories_in_memory.setdefault(context.environment.round, path)) != path:
            self._leave_memory(first)
        if context.writer is not None:
            context.writer.make_task_at_end = context.write_task_at_end
            context.writer.before_successor = self._writes.report_if_save_lost
        return path

    def _leave_memory(self, first: Path) -> None:
        """Keep no states in memory: those that are there are of an earlier session of this process, and neither of this
        one nor of a session that opens this directory first in the next round.
        """
        context, writer = self.context, self.context.writer
        self.is_later_session = True
        if writer is None:
            return
        if writer.share == 0:
            with contextlib.suppress(OSError, SnapshotRefused):
                step_files.refuse_states(snapshot.original_key for snapshot in writer.find_all())
        if context.group.rank == 0:
            own, others = path_or_url(context.chosen_directory), path_or_url(first)
            context.report(
                f"this process has had a session with the directory {others} before: no state of {own} is kept in "
                "memory, and its checkpoints are written while training waits",
                None,
            )
        writer.close()
        context.writer = None

    def _lock_and_find_round(self, path: Path) -> int:
        """Lock the directory, on rank 0; returns the round under which this session saves."""
        try:
            self._writes.take_lock(path)
        except OSError as error:
            if path.is_file():  # such as the snapshot that the script has saved before it had a session
                raise UsageError(f"the checkpoint directory {path} is a file; give a directory") from None
            reason = f"checkpoint directory {path}: {error}; training continues, saves will be tried"
            self.context.warn("message", reason, path)
        if round := self.context.environment.round:
            self._check_round(path, round)
            self._compare_with_last_round(path, round)
            return round
        # Without an agent each start is a round of its own, so that its checkpoints come after all others.
        lineage(path)
        return highest_round(path) + 1

    def _check_round(self, path: Path, round: int) -> None:
        """A launcher that knows the directory begins with a round above all that are in it. Raises UsageError."""
        known = os.environ.get("ELASTICD_CHECKPOINT_DIR")
        if known and resolve(known) == path:
            return
        with contextlib.suppress(OSError):
            if (highest := highest_round(path)) > round:
                raise UsageError(
                    f"{path_or_url(path)} has checkpoints of round {highest}, and this is round {round} of a launcher "
                    "that does not know the directory: what is saved now would not be loaded. Give the directory with "
                    "--checkpoint-dir, or checkpoint_dir in the job file"
                )

    def _compare_with_last_round(self, path: Path, round: int) -> None:
        """Report a directory that is another one at each start of the script, such as one with the time in its name."""
        before = step_files.opened_directories(round - 1)
        if before and str(path) not in before and not step_files.opened_directories():
            own, other = path_or_url(path), path_or_url(Path(before[-1]))
            self.context.report(
                f"the checkpoint directory is {own}, and was {other} before the restart: without a state in memory all "
                "steps would be lost. Give the same directory at each start, without a time in its name",
                None,
            )
        step_files.note_directory(path)

    def due_by_steps(self, step: int) -> bool:
        """The same on every rank."""
        every = self.context.every
        return every is not None and every.steps is not None and step % every.steps == 0

    def due_by_time(self) -> Reason:
        """The reason why a save is due by rank 0's clock, "" if none is; for a decision point."""
        if self.context.owed_reason and self._shards is not None and not self._shards.is_busy(wait=False):
            return self.context.owed_reason
        every = self.context.every
        seconds = every.seconds if every else None
        return str(every) if seconds is not None and time.monotonic() - self._last_at >= seconds else ""

    def save(
        self,
        step: int,
        attached: Mapping[str, Any],
        why: str,
        wait: bool = False,
        random_state: RandomState | None = None,
    ) -> bool:
        """Save the attached objects and all ranks' random states; this rank's is `random_state`, or the present one.

        With `wait`, True on every rank if the checkpoint is on the disk. Without it, where the launcher runs a writer,
        training is blocked only by a copy into memory; the writer reports what became of it, and the result is True on
        rank 0 once the copy is made.
        """
        if not attached:
            raise UsageError("nothing is attached: call session.attach(model=..., optimizer=...) before saving")
        context = self.context
        context.save_count += 1
        context.owed_reason = ""
        self._last_at = time.monotonic()
        shards = self.sharded_saver(attached)
        in_shards = shards.objects if shards else {}
        attached = {name: obj for name, obj in attached.items() if name not in in_shards}
        every_rank, unable = self._gather_rank_states(step, attached, in_shards, random_state)
        content = functools.partial(self._make_content, step, attached, every_rank)
        self._check_differences(step, every_rank, unable, content)
        before = context.heartbeat.current_phase
        context.heartbeat.set_phase(Phase.CHECKPOINT)
        try:
            saver = shards or self._whole
            draft = context.draft(step, 0, cursor_of(attached))
            saved = saver.save(draft, attached, content, unable, why, wait)
            if wait:
                what = f"whether the checkpoint of step {step} is on the disk"
                saved = bool(
                    context.channel.on_rank0(f"saved/{context.save_count}", what, lambda: {"saved": saved})["saved"]
                )
                self.saved_step = step if saved else self.saved_step
            return saved
        finally:
            context.heartbeat.set_phase(before)
            self._last_at = time.monotonic()

    def _gather_rank_states(
        self,
        step: int,
        attached: Mapping[str, Any],
        in_shards: Mapping[str, Any],
        random_state: RandomState | None,
    ) -> tuple[list[Any], str]:
        """Every rank's random state, `per_rank` states and digests, on rank 0; why ranks' own cannot be saved."""
        context, rank = self.context, self.context.group.rank
        own = {name: obj.state_dict() for name, obj in context.per_rank.items()}
        size, is_first = context.group.world_size, not self._accepted
        try:
            digests = self.compared_state.describe(attached, in_shards, size, step, is_first)
            check_loadable(own)
            mine = training_state.to_bytes(
                [random_state or training_state.random_state(context.group.device), own, digests]
            )
            if len(mine) > MAX_SENT_BYTES:
                raise CheckpointRefused(
                    f"rank {rank}'s state of {', '.join(own)} has {len(mine) >> 20} MB; at most {MAX_SENT_BYTES >> 20} "
                    "MB of each rank are sent to rank 0"
                )
        except CheckpointRefused as error:
            mine = f"{_UNABLE_PREFIX}{error}".encode()
        what = f"random states for the save at step {step}"
        received = context.channel.gather_on_rank0(f"random/{context.save_count}", mine, what)
        refused = [sent.decode() for sent in received if sent.startswith(_UNABLE_PREFIX.encode())]
        if refused:
            return [], "; ".join(reason.removeprefix(_UNABLE_PREFIX) for reason in refused)
        return list(map(training_state.from_bytes, received)), ""

    def _check_differences(
        self, step: int, every_rank: Sequence[Sequence[Any]], unable: str, content: Callable[[], StateDict]
    ) -> None:
        """Report what differs between ranks; at the first save, on every rank, raise for a state that is refused.

        StateDiffers is raised in the first round of a job only: a later one resumes from a state that this job could
        live with.
        """
        context = self.context

        def differences() -> list[rank_differences.Difference]:
            return list(rank_differences.find_differences([digests for _, _, digests in every_rank]))

        def check_first() -> Message:
            if unable:
                raise CheckpointRefused(unable)
            names = [sorted(states) for _, states, _ in every_rank]
            if other := next((rank for rank, each in enumerate(names) if each != names[0]), None):
                own, others = (", ".join(each) or "nothing" for each in (names[0], names[other]))
                raise CheckpointRefused(
                    f"attach(per_rank=...): rank 0 has {own}, and rank {other} has {others}; give the same names on "
                    "all ranks. Nothing was saved"
                )
            check_loadable(content())
            different = differences()
            if context.parent is None and (
                errors := [difference.sentence for difference in different if difference.is_error]
            ):
                raise StateDiffers(errors[0])
            return {difference.name: difference.sentence for difference in different}

        if self._accepted:
            self._report_differences(
                {difference.name: difference.sentence for difference in differences()} if every_rank else {}, step
            )
            return
        what = f"whether the state of step {step} can be loaded again"
        self._report_differences(context.channel.on_rank0(f"first save/{context.save_count}", what, check_first), step)
        self._accepted = True

    def _report_differences(self, differences: Mapping[str, str], step: int) -> None:
        """Report the difference of each name once: on this rank's stderr, and by rank 0 in the job's log."""
        for name, what in differences.items():
            if name not in self._reported:
                self._reported.add(name)
                logger.warning(what)
                if self.context.group.rank == 0:
                    self.context.events.write("message", what, step)

    def _make_content(self, step: int, attached: Mapping[str, Any], every_rank: Sequence[Sequence[Any]]) -> StateDict:
        own = self.context.reserved_part(step)
        own["rng"] = [random_state for random_state, _, _ in every_rank]
        if names := list(self.context.per_rank):
            own["per_rank"] = {name: [states[name] for _, states, _ in every_rank] for name in names}
        return {**training_state.collect_states(attached), training_state.RESERVED_NAME: own}

    def sharded_saver(self, attached: Mapping[str, Any]) -> ShardedSaver | None:
        """The saver of the sharded objects, None without any; all ranks call it at the same place.

        Raises UsageError on every rank where these objects differ between ranks.
        """
        if self._shards is None and (names := sharded.names_saved_in_shards(attached)):
            objects = {name: obj for name, obj in attached.items() if name in names}
            self._shards = ShardedSaver(self.context, self._writes, objects)
            self.context.is_sharded = True
        return self._shards

    def close(self, wait: bool = True) -> None:
        """Wait for the last checkpoint, unless the others wait for this rank's end, and release the lock."""
        if wait:
            self._writes.wait_until_saved()
        self._writes.close()
