"""How the ranks load a state together: rank 0 chooses, all load the same one, all succeed or all raise.

The newest state wins: one in the memory of the nodes, or a checkpoint in the directory. Rank 0 walks the lineage from
the newest checkpoint, checks each while reading it and reports which it skipped and why. Every rank maps the state that
its node has, and copies it into the model in place; ranks without one get it over the process group. Of a sharded state
in memory each rank reads what it needs. The chosen state then becomes this round's own.
"""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import os
import socket
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from elasticd.checkpointing.at_fault import committed_state, step_files, step_record
from elasticd.checkpointing.context import SaveContext
from elasticd.checkpointing.memory import held_states, transfer
from elasticd.checkpointing.memory.buffers import Snapshot, donor_of
from elasticd.checkpointing.memory.held_states import HeldState, ShardsInMemory
from elasticd.checkpointing.memory.shard_server import Server
from elasticd.checkpointing.memory.writer_client import SnapshotRefused
from elasticd.checkpointing.saver import Saver
from elasticd.checkpointing.state import checkpoint_files as checkpoint
from elasticd.checkpointing.state import in_place, shard_plan, sharded, training_state
from elasticd.checkpointing.state.layout import write_at
from elasticd.checkpointing.storage import retention
from elasticd.checkpointing.storage.lineage import Entry, SkippedCheckpoint, find_damage, open_verified, walk
from elasticd.checkpointing.storage.manifest import STATE, Manifest, parse
from elasticd.checkpointing.storage.object_store import BRIEF_PATIENCE_S, RESTORE_PATIENCE_S, store_of
from elasticd.checkpointing.storage.object_url import shown
from elasticd.coordination.store_channel import StoreChannel
from elasticd.errors import CheckpointCorrupt, CheckpointError, ObjectStoreError, UsageError
from elasticd.heartbeat.worker_events import WorkerEventWriter
from elasticd.process_group import DefaultGroup

logger = logging.getLogger("elasticd")

LOST_PART_S = 2.0
"""How long a node's part of an earlier round's checkpoint is waited for once all nodes of this round have theirs."""
_ALL = 1 << 30
"""Checkpoints to keep."""
SUSPECT_AFTER = 2
"""After so many restarts without progress the state itself may be broken (NaN in it), and an older one is tried."""


@dataclass(frozen=True, slots=True)
class Resumed:
    """The checkpoint that `restore()` loaded."""

    round: int
    step: int
    world_size: int
    notes: tuple[str, ...] = ()
    """What could not be used of it, and on which rank; the same on every rank."""


def restore(
    attached: Mapping[str, Any],
    optional: Collection[str],
    step: int | None,
    saver: Saver,
) -> Resumed | None:
    """Load the newest valid checkpoint, or that of `step`, into `attached` on every rank, or raise on every rank; None
    without a checkpoint.
    """
    context = saver.context
    assert context.directory is not None
    shared = (context, context.group, context.channel, context.events)
    return _Restore(context.directory, attached, optional, step, saver, *shared).run()


def check_unneeded(context: SaveContext) -> None:
    """To be called at the first step of a script that has not called `restore()`.

    Raises UsageError, on every rank, where a restart has left a checkpoint of its own run unused; a checkpoint of
    another run may be unused on purpose.
    """
    own, directory = context.environment, context.directory
    assert directory is not None

    def find() -> dict[str, Any]:
        found: list[Manifest] = []
        with contextlib.suppress(OSError):  # a disk or store that cannot be read now; saves will say so
            found += [entry.manifest for entry in checkpoint.lineage(directory)[0][:1]]
        with contextlib.suppress(OSError, SnapshotRefused):
            found += [each.draft for each in context.writer.find_all()] if context.writer is not None else []
        newest = max(found, key=lambda each: (each.round, each.step), default=None)
        if newest is None:
            return {"step": 0}
        is_ours = (newest.job, newest.run) == (own.job, own.run)
        if is_ours and (own.restarts > 0 or 0 < newest.round < own.round):
            raise UsageError(
                f"{where} of step {newest.step} from before the restart, and session.restore() was not called: "
                "training would begin anew. Call it after session.attach()"
            )
        return {"step": newest.step}

    where = f"{shown(directory)} has a checkpoint"
    step = context.channel.on_rank0("unrestored", "whether there is a checkpoint", find)["step"]
    if step:
        what = f"{where} of step {step}, and session.restore() was not called: training begins anew, at step 0"
        context.warn("message", what)


@dataclass
class _Restore:
    directory: Path
    attached: Mapping[str, Any]
    optional: Collection[str]
    """Names of which the checkpoint may hold nothing."""
    step: int | None
    """The step to go back to, once in a directory; None: the newest one."""
    saver: Saver
    context: SaveContext
    group: DefaultGroup
    channel: StoreChannel
    events: WorkerEventWriter
    _entry: Entry | None = None
    """Rank 0: the chosen checkpoint; None for a state in memory."""
    _held: list[Snapshot] = field(default_factory=list)
    """On the first rank of each node: what is in the node's memory."""
    _states: list[HeldState] = field(default_factory=list)
    """Rank 0: what all nodes have in memory, newest first."""
    _servers: dict[int, Server] = field(default_factory=dict)
    """Rank 0: where parts of a sharded state in memory are read, by node."""
    _shards: ShardsInMemory | None = None
    """The chosen state, if it is a sharded one in memory."""
    _candidates: list[Entry] = field(default_factory=list)
    """Rank 0: the checkpoints that may be loaded and have not been tried yet."""
    _skipped: int = 0
    """Rank 0: those that cannot be used."""
    _fd: int = -1
    """The chosen state."""
    _checksum: str = ""
    """Of the chosen state, if it is in a file that this rank has verified."""
    _donor: int | None = None
    """The rank that saved the state at a fault."""
    _content: dict[str, Any] | None = None
    """What is in it, on the rank that has tried whether it can be loaded."""

    def run(self) -> Resumed | None:
        try:
            with training_state.no_garbage_collection():
                return self._run()
        finally:
            if self._fd >= 0:
                os.close(self._fd)
            if self._shards is not None:
                self._shards.close()

    def _run(self) -> Resumed | None:
        is_sharded = self.saver.shards(self.attached) is not None
        held = self.channel.collect("held", self._find_held(), "what its node has in memory")
        self._states, self._servers = held_states.parse(held)
        return self._restore(self._choose_together(0, may_wait=is_sharded), 0)

    def _restore(self, chosen: dict[str, Any], attempt: int) -> Resumed | None:
        while chosen["step"] is not None and (other := self._verify_shards(chosen, attempt)) is not None:
            chosen, attempt = other, attempt + 1
        if chosen["step"] is None:
            if self.group.rank == 0 and (repeated := self._find_repeated(0)):
                self._report(f"there is no checkpoint yet: {repeated[0]}", None)
            return None
        if self._shards is None:
            self._open_everywhere(chosen)
            if (other := self._refuse_lost_draws(chosen, attempt)) is not None:
                return self._restore(other, attempt + 1)
        notes: list[str] = []
        error: Exception | None = None
        try:
            if self._shards is not None:
                self._fd = self._shards.copy(STATE)
                self._content = None
            content = self._content or checkpoint.load_mapped(self._fd)
            notes += self._load(chosen, content)
            if (saved_by := donor_of(chosen.get("key", (0, None))[1])) is not None:
                self._donor = content[training_state.RESERVED].get(committed_state.DONOR, saved_by)
            of_ranks = content[training_state.RESERVED].get("per_rank", {})
            rank, world_size = self.group.rank, self.group.world_size
            notes += training_state.scatter_per_rank(self.context.per_rank, of_ranks, rank, world_size, self.optional)
            notes += self._restore_random_state(chosen, content[training_state.RESERVED])
        except Exception as raised:  # noqa: BLE001 - all ranks must learn of any error of a load_state_dict
            error = raised
        resumed = self._agree(chosen, error, notes)
        draft = parse(chosen["draft"].encode())
        assert isinstance(draft, Manifest)
        self.context.parent = draft.trained
        self._take_over(chosen, resumed)
        return resumed

    def _choose_together(self, attempt: int, may_wait: bool) -> dict[str, Any]:
        """Rank 0's choice, on every rank. `may_wait`: a sharded state that is being written may be the newest one."""
        key, what = f"restore/{attempt}", "which state it restores"
        chosen = self.channel.on_rank0(key, what, lambda: self._choose(may_wait))
        if "wait" in chosen:
            self._settle()
            chosen = self.channel.on_rank0(f"{key}/settled", what, lambda: self._choose(may_wait=False))
        return chosen

    def _settle(self) -> None:
        """Wait for the sharded states that earlier rounds have copied to be written: they are the newest ones."""

        def settle() -> None:
            writer = self.context.writer
            if writer is not None and writer.share == 0:
                with contextlib.suppress(OSError, SnapshotRefused):
                    writer.settle(True, self.channel.timeout_s, LOST_PART_S)

        if self.group.rank != 0:
            settle()
        self.channel.collect("settled", b"", "whether its node has written what it has in memory")
        if self.group.rank == 0:
            settle()

    def _verify_shards(self, chosen: Mapping[str, Any], attempt: int) -> dict[str, Any] | None:
        """Each rank reads some files of a sharded checkpoint; if one is damaged, the next checkpoint, on all ranks."""
        if "files" in chosen:
            return self._verify_memory(chosen, attempt)
        manifest = parse(chosen["draft"].encode())
        if not isinstance(manifest, Manifest) or not manifest.files:
            return None
        entry = self._placed(chosen)
        found = {"shared": entry.path.is_dir(), "why": ""}
        share, shares = self.group.rank, self.group.world_size
        if store_of(self.directory) is not None:  # each node reads all files, which copies them to it
            share, shares = self.context.environment.local_rank, int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        for name in sorted(manifest.files)[share::shares]:
            try:
                os.close(open_verified(entry, name))
            except (CheckpointCorrupt, FileNotFoundError) as error:
                found["why"] = str(error)
            except OSError as error:  # a store that cannot be read now has lost nothing
                found["why" if store_of(self.directory) is None else "error"] = str(error)
        key, what = f"verified/{attempt}", f"whether its part of {chosen['name']} is whole"
        every = [json.loads(each) for each in self.channel.collect(key, json.dumps(found).encode(), what)]

        def decide() -> dict[str, Any]:
            if not all(each["shared"] for each in every):
                blind = ", ".join(str(rank) for rank, each in enumerate(every) if not each["shared"])
                raise CheckpointError(
                    f"rank {blind} cannot see {entry.path}: a sharded checkpoint needs a directory that all nodes share"
                )
            if failed := [(rank, each["error"]) for rank, each in enumerate(every) if "error" in each]:
                raise CheckpointError(f"rank {failed[0][0]} cannot read {entry.path}: {failed[0][1]}")
            why = next((each["why"] for each in every if each["why"]), "")
            if not why:
                return {"other": None}
            self._skip(entry.path, why)
            os.close(self._fd)
            self._fd, self._content = -1, None
            return {"other": self._describe_first()}

        other: dict[str, Any] | None = self.channel.on_rank0(key, "whether all parts are whole", decide)["other"]
        return other

    def _verify_memory(self, chosen: Mapping[str, Any], attempt: int) -> dict[str, Any] | None:
        """Whether each node can read the parts that other nodes have; if not, the newest checkpoint, on all ranks."""
        self._shards = ShardsInMemory(chosen, self.context.writer, self.context.environment)
        own = self._shards.check() if self.context.environment.local_rank == 0 else ""
        key, what = f"verified/{attempt}", f"whether it can read {chosen['name']} in memory"
        every = self.channel.collect(key, own.encode(errors="backslashreplace"), what)

        def decide() -> dict[str, Any]:
            why = next((each.decode() for each in every if each), "")
            if why:
                self._states = []
                self._report(f"the state of step {chosen['step']} in memory cannot be used: {why}", chosen["step"])
            return {"why": why}

        if not self.channel.on_rank0(key, what, decide)["why"]:
            return None
        self._shards.close()
        self._shards = None
        return self._choose_together(attempt + 1, may_wait=True)

    def _refuse_lost_draws(self, chosen: Mapping[str, Any], attempt: int) -> dict[str, Any] | None:
        """Another choice, on all ranks, where a rank on another node than the donor has died in the step after it had
        drawn what nobody knows: with other numbers the ranks of a script that draws alike would diverge.
        """
        rank, world_size = self.group.rank, self.group.world_size
        if chosen["number"] is None or int(os.environ.get("LOCAL_WORLD_SIZE", "1")) == world_size:
            return None
        why = ""
        with contextlib.suppress(Exception):  # loading says what is wrong
            self._content = self._content or checkpoint.load_mapped(self._fd)
            saved = self._content[training_state.RESERVED]
            if rank < len(saved["rng"]) and saved["rng"][rank] is None:
                try:
                    self._recorded_random_state(chosen, saved)
                except CheckpointError as error:
                    why = str(error)
        key, what = f"draws/{attempt}", "whether its random state is known"
        every = self.channel.collect(key, why.encode(errors="backslashreplace"), what)

        def decide() -> dict[str, Any]:
            found = next((each.decode() for each in every if each), "")
            if found:
                self._states = [each for each in self._states if each.snapshot.draft.step < chosen["step"]]
                self._report(f"the state of step {chosen['step']} in memory cannot be used: {found}", chosen["step"])
            return {"why": found}

        if not self.channel.on_rank0(key, what, decide)["why"]:
            return None
        if self._fd >= 0:
            os.close(self._fd)
        self._fd, self._content = -1, None
        return self._choose_together(attempt + 1, may_wait=False)

    def _load(self, chosen: Mapping[str, Any], content: dict[str, Any]) -> list[str]:
        """Load what is attached; returns sentences about what was not used."""
        names = content[training_state.RESERVED].get(sharded.NAMES, [])
        large = {name: obj for name, obj in self.attached.items() if name in names}
        whole = {name: obj for name, obj in self.attached.items() if name in sharded.names(self.attached) - {*names}}
        whole = {name: obj for name, obj in whole.items() if name in content}
        small = {name: obj for name, obj in self.attached.items() if name not in names and name not in whole}
        if whole:
            sharded.scatter(whole, sharded.divide(whole, content))
        if large:
            open_file = self._shards.open if self._shards else shard_plan.on_disk(self._placed(chosen).path)
            sharded.scatter(large, shard_plan.read(open_file, lambda metadata: sharded.targets(large, metadata)))
        unused = [name for name in names if name not in large]
        read = functools.partial(in_place.read, self._fd, content, small, self._checksum)
        notes = training_state.scatter(small, content, self.optional, read)
        return notes + [f"nothing is attached as {name}: that part of the checkpoint was not used" for name in unused]

    def _find_held(self) -> bytes:
        """What this node has in memory, from its first rank."""
        writer, who = self.context.writer, self.context.environment
        if writer is None or writer.share != 0:
            return b""
        try:
            found = writer.find_all()
        except (OSError, SnapshotRefused):
            return b""
        self._held = [each for each in found if (each.draft.job, each.draft.run) == (who.job, who.run)]
        return held_states.report(self._held, writer, who)

    def _choose(self, may_wait: bool) -> dict[str, Any]:
        """The newest state: in the memory of the nodes, unless the directory has one of a newer round, or a later step.

        A round that has left anything in the directory has superseded what older rounds have in memory.
        """
        whole = [each for each in self._states if not each.missing]
        torn = next((each for each in self._states[:1] if each.missing), None)
        if may_wait and (torn is not None or not whole or self.step is not None):
            return {"wait": True}
        on_disk, skipped = self._lineage(bool(whole))
        newest, on_disk = self._allowed(whole, on_disk)
        if newest is not None and self._is_newest(newest.snapshot, on_disk):
            draft, number = newest.snapshot.draft, newest.snapshot.number
            described = self._describe(draft, number, f"r{draft.round}-s{draft.step}")
            described["on_disk"] = on_disk[0].manifest.step if on_disk else 0
            return {**described, **newest.describe(self._states, self._servers)}
        for each in skipped:
            self._skip(each.path, each.why)
        self._candidates = on_disk
        found = self._describe_first()
        if torn is not None and (found["step"] or 0) < (step := torn.snapshot.draft.step):
            self._report(f"step {step} was in memory, but {', '.join(torn.missing)} is lost with its node", step)
        return found

    def _allowed(self, whole: list[HeldState], on_disk: list[Entry]) -> tuple[HeldState | None, list[Entry]]:
        """The newest state in memory and the checkpoints, without those that the script goes back behind, or from which
        restarts have made no progress.
        """
        newest = whole[0] if whole else None
        in_memory = [each.snapshot for each in whole]
        if self.step is not None:
            known = [*(each.draft.step for each in in_memory), *(entry.manifest.step for entry in on_disk)]
            if retention.went_back(self.directory, self.step).exists() and max(known, default=-1) >= self.step:
                self._stay(self.step)
            else:
                newest, on_disk = None, self._go_back(self.step, on_disk)
        if older := self._suspected(in_memory[0] if newest else None, in_memory, on_disk):
            newest, on_disk = None, older
        return newest, on_disk

    def _is_newest(self, held: Snapshot, on_disk: list[Entry]) -> bool:
        first = on_disk[0].manifest if on_disk else None
        superseded = held.key[0] < checkpoint.highest_round(self.directory)
        return not superseded and (first is None or (first.round, first.step) <= (held.key[0], held.draft.step))

    def _report(self, reason: str, step: int | None) -> None:
        logger.warning(reason)
        self.events.write("message", reason, step, path=str(self.directory))

    def _lineage(self, has_other: bool) -> tuple[list[Entry], list[SkippedCheckpoint]]:
        """As `lineage`; if the object store does not answer and there is a state in memory, what this node knows."""
        store = store_of(self.directory)
        if store is None:
            return checkpoint.lineage(self.directory)
        usual_s, store.patience_s = store.patience_s, BRIEF_PATIENCE_S if has_other else RESTORE_PATIENCE_S
        try:
            return checkpoint.lineage(self.directory)
        except ObjectStoreError as error:
            if not has_other:
                raise
            self.context.warn("message", f"the state in memory is used: {error}", self.directory)
            found = walk(self.directory)
            return found.entries, found.skipped
        finally:
            store.patience_s = usual_s

    def _suspected(self, newest: Snapshot | None, in_memory: list[Snapshot], on_disk: list[Entry]) -> list[Entry]:
        """The older checkpoints to use where restarts in a row made no progress from the newest state; else none."""
        if self.context.environment.failed_restarts < SUSPECT_AFTER or self._has_progressed(newest):
            return []
        step = max([each.draft.step for each in in_memory] + [entry.manifest.step for entry in on_disk[:1]], default=0)
        older = [entry for entry in on_disk if entry.manifest.step < step]
        if older:
            self._skip_newest(step)
        return older

    def _describe_first(self) -> dict[str, Any]:
        entry = self._open_first(self._candidates)
        if entry is None and self._skipped:
            where = shown(self.directory)
            self._report(f"no checkpoint in {where} can be used, {self._skipped} skipped: training begins anew", None)
        return {"step": None} if entry is None else self._describe(entry.manifest, None, entry.path.name)

    def _open_first(self, on_disk: list[Entry]) -> Entry | None:
        """Keep the first checkpoint that can be read open; skip those before it."""
        while on_disk:
            entry = on_disk.pop(0)
            try:
                fd = open_verified(entry)
                try:
                    self._content = checkpoint.load_mapped(fd)
                except BaseException:
                    os.close(fd)
                    raise
            except ObjectStoreError:
                raise  # an older one is no better
            except (CheckpointCorrupt, OSError) as error:
                self._skip(entry.path, str(error))
                continue
            self._entry, self._fd, self._checksum = entry, fd, entry.manifest.checksum
            return entry
        return None

    def _stay(self, step: int) -> None:
        mark = retention.went_back(self.directory, step)
        where, what = shown(self.directory), shown(mark)
        self._report(f"restore(step={step}) has no effect: {where} went back to it before; rm {what} to go again", step)

    def _go_back(self, step: int, on_disk: list[Entry]) -> list[Entry]:
        """Set newer checkpoints aside; returns those that are left."""
        steps = sorted({entry.manifest.step for entry in on_disk})
        if step not in steps:
            there = f"there are steps {', '.join(map(str, steps))}" if steps else "there is none"
            raise CheckpointError(f"restore(step={step}): {self.directory} has no checkpoint of that step; {there}")
        whys = [find_damage(entry) for entry in on_disk if entry.manifest.step == step]
        if None not in whys:
            raise CheckpointError(f"restore(step={step}): the checkpoint of that step cannot be used: {whys[0]}")
        aside = retention.set_aside(self.directory, step)
        if aside:
            names = ", ".join(path.name for path in aside)
            self._report(f"went back to step {step}: newer checkpoints were set aside as {names}", step)
        return [entry for entry in on_disk if entry.manifest.step <= step]

    def _has_progressed(self, newest: Snapshot | None) -> bool:
        """The last round has trained past the state that it resumed from."""
        if newest is None or newest.key[0] < checkpoint.highest_round(self.directory):
            return False
        if newest.adopted or newest.draft.relinked:
            return False
        return newest.draft.parent is None or newest.draft.step > newest.draft.parent[1]

    def _skip_newest(self, step: int) -> None:
        count = self.context.environment.failed_restarts
        self._report(f"the state of step {step} skipped: {count} restarts in a row have made no progress from it", step)

    def _describe(self, found: Manifest, number: int | None, name: str) -> dict[str, Any]:
        described = {"round": found.round, "step": found.step, "world_size": found.world_size, "bytes": found.bytes}
        content = {"checksum": found.checksum, "wall": found.wall, "draft": found.to_json().decode()}
        return {**described, **content, "number": number, "name": name}

    def _skip(self, path: Path, why: str) -> None:
        self._skipped += 1
        reason = f"checkpoint {path.name} skipped: {why}"
        logger.warning(reason)
        self.events.write("checkpoint_skipped", reason, None, path=str(path))

    def _open_everywhere(self, chosen: Mapping[str, Any]) -> None:
        """Open the chosen state on every rank: its own node's, else a copy that the first rank with the state sends."""
        if self.group.world_size == 1 and self._fd >= 0:
            return
        error = "" if self._fd >= 0 else self._open_here(chosen)
        first = self.context.writer is None or self.context.writer.share == 0
        pieces = held_states.checksums(chosen, self._held, self.context.writer)
        own = {"host": socket.gethostname(), "error": error, "first": first, "pieces": pieces}
        collected = self.channel.collect("read", json.dumps(own).encode(), "whether it can read the state")
        answers = [json.loads(each) for each in collected]
        plan = self.channel.on_rank0("send", "which ranks need the state", lambda: self._plan_sending(chosen, answers))
        lacking = plan["receivers"]
        if lacking and chosen["number"] is not None:
            lacking = self._send_into_memory(chosen, plan)
        if lacking:
            if self.group.rank in lacking:
                self._fd = os.memfd_create("elasticd-received", os.MFD_CLOEXEC)
            write = functools.partial(write_at, self._fd) if self.group.rank in lacking else None
            transfer.broadcast(self._fd, plan["sender"], [(0, chosen["bytes"])], self.group, write)

    def _send_into_memory(self, chosen: Mapping[str, Any], plan: Mapping[str, Any]) -> list[int]:
        """One rank of each node receives into the node's memory, the others open it there; returns who could not."""
        writer, receives = self.context.writer, self.group.rank in plan["receivers"]
        fills = receives and writer is not None and writer.share == 0
        draft = parse(chosen["draft"].encode())
        assert isinstance(draft, Manifest)
        patches: list[tuple[int, bytes]] = []
        buffer = -1

        def begin() -> int:
            assert writer is not None
            with contextlib.suppress(OSError, SnapshotRefused):
                held = held_states.find_alike(self._held, draft) if plan["patched"] else None
                return writer.begin(draft, chosen["number"], 0, 1, "", like=held.key if held else None)[0]
            return -1

        def write(offset: int, data: memoryview) -> None:
            if plan["patched"]:  # the state that it has stays whole until all of them have arrived
                patches.append((offset, bytes(data)))
            elif buffer >= 0:
                write_at(buffer, offset, data)

        if fills and not plan["patched"]:
            buffer = begin()
        transfer.broadcast(self._fd, plan["sender"], plan["spans"], self.group, write if fills else None)
        if fills and plan["patched"]:
            buffer = begin()
        if buffer >= 0 and writer is not None:
            for offset, data in patches:
                write_at(buffer, offset, memoryview(data))
            os.close(buffer)
            with contextlib.suppress(OSError, SnapshotRefused):
                writer.copied(draft, chosen["number"], 0)
                self._held = writer.find_all()
        self.channel.collect("sent", b"", "whether it has received the state")
        self.channel.on_rank0("sent", "whether all nodes have received the state", dict)
        error = self._open_here(chosen) if receives else ""
        answers = self.channel.collect("opened", error.encode(errors="backslashreplace"), "whether it has the state")

        def lacking() -> dict[str, Any]:
            return {"ranks": [rank for rank, answer in enumerate(answers) if answer]}

        ranks: list[int] = self.channel.on_rank0("opened", "which ranks lack the state", lacking)["ranks"]
        return ranks

    def _plan_sending(self, chosen: Mapping[str, Any], answers: list[Mapping[str, Any]]) -> dict[str, Any]:
        """Rank 0: who sends the state, and to whom: all ranks of a host where one cannot read it."""
        plan = transfer.plan_sending(chosen["name"], answers, chosen["bytes"])
        if plan["receivers"] and chosen["number"] is None:
            ranks, why = plan["receivers"], answers[plan["receivers"][0]]["error"]
            reason = (
                f"rank {', '.join(map(str, ranks))} cannot read {self.directory / chosen['name']} ({why}); rank 0 "
                "sends it. Is the checkpoint directory shared by all nodes?"
            )
            self._report(reason, chosen["step"])
        return plan

    def _open_here(self, chosen: Mapping[str, Any]) -> str:
        """Open the chosen state; returns the error, "" for none. Of a directory one rank a node compares checksums."""
        try:
            if chosen["number"] is not None:
                if self.context.writer is None:
                    return "no copy in memory"
                self._fd, _, _ = self.context.writer.open(tuple(chosen["key"]))
                return ""
            if store_of(self.directory) is not None:
                entry = self._placed(chosen)
                self._fd = open_verified(entry)  # each: a damaged copy is made again while others read
                self._checksum = entry.manifest.checksum
                return ""
            for entry in checkpoint.lineage(self.directory)[0]:
                found = entry.manifest
                if (found.round, found.step, found.checksum) == (chosen["round"], chosen["step"], chosen["checksum"]):
                    if self.context.environment.local_rank == 0:
                        self._fd, self._checksum = open_verified(entry), found.checksum
                    else:
                        self._fd = os.open(entry.path / STATE, os.O_RDONLY | os.O_CLOEXEC)
                    return ""
        except (CheckpointCorrupt, SnapshotRefused, OSError) as error:
            return str(error)
        return f"there is no {chosen['name']} with rank 0's checksum"

    def _placed(self, chosen: Mapping[str, Any]) -> Entry:
        """The checkpoint that rank 0 has chosen; in an object store, this node need not have listed it."""
        manifest = parse(chosen["draft"].encode())
        assert isinstance(manifest, Manifest)
        entry = Entry(self.directory / chosen["name"], manifest)
        if (store := store_of(self.directory)) is not None:
            store.place(entry.path.name, manifest)
        return entry

    def _restore_random_state(self, chosen: Mapping[str, Any], saved: Mapping[str, Any]) -> list[str]:
        """Last, so that no load_state_dict moves the streams again."""
        every_rank = saved["rng"]
        rank, ranks, world_size = self.group.rank, len(every_rank), self.group.world_size
        counts = f"saved by {ranks} rank{'s' if ranks > 1 else ''}, now {world_size}"
        notes: list[str] = []
        if rank == 0 and ranks > world_size:
            unused = ", ".join(map(str, range(world_size, ranks)))
            notes.append(f"{counts}: the random state of rank {unused} was not used")
        if rank >= ranks:
            return [f"{counts}: there is no random state for rank {rank}, which keeps its own"]
        if (own := every_rank[rank]) is not None:
            return notes + training_state.set_random_state(own, self.group.device)
        step = chosen["step"]
        if (own := self._recorded_random_state(chosen, saved)) is None:
            lost = f"the random state of rank {rank} at step {step} is lost: it draws other numbers from here on"
            return [*notes, lost]
        notes += training_state.set_random_state(own, self.group.device)
        with contextlib.suppress(OSError):
            step_files.keep_random_state(rank, step, self.group.device)
        return notes

    def _recorded_random_state(self, chosen: Mapping[str, Any], saved: Mapping[str, Any]) -> dict[str, Any] | None:
        """This rank's, if its process of that round was on this node; None if nothing is known. A donor on another node
        has not had it. Raises CheckpointError if the process had died in the step, and may have drawn more.
        """
        if "ELASTICD_HEARTBEAT" not in os.environ:
            return None
        rank, step, round = self.group.rank, chosen["step"], chosen["round"]
        buffers = [holder[key] for _, (holder, key) in step_files.buffers(self.attached)]
        own = list(filter(step_files.on_host, buffers))
        record = committed_state.RankRecord(rank, step, own, round)
        if record.committed is None and committed_state.DRAWN not in saved:  # by a donor of an older version
            if record.expected is not None and saved.get(committed_state.EXPECTED, False):
                return record.expected.random_state
            return step_files.kept_random_state(rank, step, round)
        found = record.random_state(committed_state.Drawn.of(saved))
        return found or step_files.kept_random_state(rank, step, round)

    def _agree(self, chosen: Mapping[str, Any], error: Exception | None, notes: list[str]) -> Resumed:
        own = {"error": f"{type(error).__name__}: {error}" if error else "", "notes": notes}
        answers = [json.loads(each) for each in self.channel.collect("loaded", json.dumps(own).encode(), "its loading")]
        every = self.channel.on_rank0("restored", "whether all ranks restored", lambda: {"answers": answers})["answers"]
        if any(answer["error"] for answer in every):
            self.channel.leave("restored/received")  # rank 0 may serve the store itself, and is about to leave
        if error is not None:
            raise error
        failed = [f"rank {rank}: {answer['error']}" for rank, answer in enumerate(every) if answer["error"]]
        if failed:
            raise CheckpointError(f"{chosen['name']} could not be restored by every rank: {'; '.join(failed)}")
        merged = tuple(dict.fromkeys(note for answer in every for note in answer["notes"]))
        return Resumed(chosen["round"], chosen["step"], chosen["world_size"], merged)

    def _take_over(self, chosen: Mapping[str, Any], resumed: Resumed) -> None:
        """The chosen state becomes this round's first, so that what older rounds write later is not loaded."""
        where = f"resumed from step {resumed.step} of round {resumed.round}"
        if self._donor is not None:
            where += f", saved by rank {self._donor} after the fault"
        if self.group.rank == 0:
            where += ", in memory" if chosen["number"] is not None else ""
            reason = "; ".join([where, *self._find_repeated(resumed.step), *resumed.notes])
            origin = {"from_round": resumed.round, "from_step": resumed.step, "saved_at": chosen["wall"]}
            if self._donor is not None:
                origin |= {"donor": self._donor, "steps_saved": max(resumed.step - chosen["on_disk"], 0)}
            self.events.write("resumed", reason, resumed.step, path=str(self.directory / chosen["name"]), **origin)
            for note in resumed.notes:
                logger.warning("%s: %s", where, note)
        try:
            if self._entry is not None:
                checkpoint.relink(self.directory, self._entry, self.context.round)
            elif chosen["number"] is not None:
                self._adopt(chosen)
        except (OSError, SnapshotRefused) as error:
            reason = f"{chosen['name']} could not become round {self.context.round}'s first checkpoint: {error}"
            logger.warning(reason)
            self.events.write("checkpoint_failed", reason, resumed.step, path=str(self.directory / chosen["name"]))

    def _find_repeated(self, step: int) -> list[str]:
        """Of rank 0: a sentence about what the round before has trained, as far as this node knows, and is lost."""
        round = self.context.environment.round - 1
        if self.step is not None or round < 1 or "ELASTICD_HEARTBEAT" not in os.environ:
            return []
        # The round before may have had more ranks: those of this node are beside rank 0's.
        last = max(map(step_record.last_step, step_files.paths_of("commit", round)), default=0)
        if last <= step:
            return []
        steps = f"step {last} is" if last == step + 1 else f"steps {step + 1} to {last} are"
        return [f"{steps} trained again"]

    def _adopt(self, chosen: Mapping[str, Any]) -> None:
        """The state in memory is this round's from now on, and rank 0's writer makes it a checkpoint of this round.

        A sharded one that was whole on its nodes is being written by them, or has been; others are saved again soon.
        """
        writer, key = self.context.writer, tuple(chosen["key"])
        copied = chosen.get("copied")
        if copied:
            self.context.owed = f"resumed from copies of {', '.join(copied)}"
        if writer is None or writer.share != 0:
            return
        if copied:
            writer.settle(False, parts_s=0.0)
        held = next((each for each in self._held if each.key == key), None)
        if held is not None and key[0] != self.context.round:
            # How many are kept the script says after `restore()`.
            task = replace(self.context.task("resumed from memory", 0.0), keep=_ALL) if self.group.rank == 0 else None
            writer.adopt(key, held.draft.relinked_to(self.context.round), task)
