"""The state that the ranks of a round restore, and how rank 0 chooses it.

The newest state wins: one that ranks hold in their processes, one in the memory of the nodes, or a checkpoint in the
directory. A round that has left anything in the directory has superseded what older rounds have elsewhere. Rank 0 walks
the lineage from the newest checkpoint, checks each while reading it, and reports which it skipped and why.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path

from elasticd.channel import Message
from elasticd.checkpointing.at_fault import step_files
from elasticd.checkpointing.context import SaveContext
from elasticd.checkpointing.memory.buffers import SaveKey, Snapshot
from elasticd.checkpointing.memory.held_states import HeldState, ShardsInMemory, find_alike
from elasticd.checkpointing.memory.shard_server import ServerAddress
from elasticd.checkpointing.state.layout import load_mapped
from elasticd.checkpointing.state.training_state import StateDict
from elasticd.checkpointing.storage import retention
from elasticd.checkpointing.storage.lineage import (
    Entry,
    SkippedCheckpoint,
    find_damage,
    highest_round,
    lineage,
    open_verified,
    walk_lineage,
)
from elasticd.checkpointing.storage.manifest import STATE, Manifest, parse
from elasticd.checkpointing.storage.object_store import BRIEF_PATIENCE_S, RESTORE_PATIENCE_S, store_of
from elasticd.checkpointing.storage.object_url import path_or_url
from elasticd.errors import CheckpointCorrupt, CheckpointError, ObjectStoreError

SUSPECT_AFTER_RESTARTS = 2
"""After so many restarts without progress the state itself may be broken (NaN in it), and an older one is tried."""


class StateSource(Enum):
    """The place that a state is read from; whether a node has it here, or gets it from another one, each node finds."""

    PROCESS = "process"
    MEMORY = "memory"
    DISK = "disk"


@dataclass(frozen=True, slots=True)
class Choice:
    """One state, as rank 0 has chosen it and all ranks learn of it."""

    source: StateSource
    manifest: Manifest  #: the description of the state. In memory it has no checksum.
    name: str
    save_number: int = 0  #: the number of a save in its round, for a state that is not on the disk
    key: SaveKey = (0, 0)  #: the round that owns such a state, and the number of the save in it
    holder_ranks: list[int] = field(default_factory=list)  #: those that hold it in their process
    file_holders: dict[str, list[int]] = field(default_factory=dict)
    """The nodes that hold each file of a sharded state in memory."""
    servers: dict[int, ServerAddress] = field(default_factory=dict)
    """The address at which each node is read, for a sharded state in memory."""
    copy_only_files: list[str] = field(default_factory=list)
    """The files of a sharded state in memory of which there is only a copy, since their node is lost."""
    has_alike: bool = False  #: several nodes hold a state of this step in memory; they differ in little
    step_on_disk: int = 0  #: the step of the newest checkpoint in the directory, 0 for none

    @property
    def step(self) -> int:
        return self.manifest.step

    @property
    def in_memory(self) -> bool:
        return self.source is StateSource.MEMORY

    @property
    def in_processes(self) -> bool:
        return self.source is StateSource.PROCESS

    def place_entry(self, directory: Path) -> Entry:
        """The chosen checkpoint; in an object store, this node need not have listed it."""
        if (store := store_of(directory)) is not None:
            store.place_manifest(self.name, self.manifest)
        return Entry(directory / self.name, self.manifest)

    def to_message(self) -> Message:
        """The choice as JSON. A rank of the version before reads the numbers of the manifest beside it."""
        manifest = self.manifest
        message: Message = {
            **{name: getattr(manifest, name) for name in ("round", "step", "world_size", "bytes", "checksum", "wall")},
            "draft": manifest.to_json().decode(),
            "name": self.name,
            "number": None,
        }
        if self.source is not StateSource.DISK:
            message |= {
                "number": self.save_number,
                "key": self.key,
                "alike": self.has_alike,
                "on_disk": self.step_on_disk,
            }
            message |= {"ranks": self.holder_ranks}
        if self.file_holders:
            message |= {"files": self.file_holders, "servers": self.servers, "copied": self.copy_only_files}
        return message

    @classmethod
    def from_message(cls, message: Message) -> Choice:
        manifest = parse(message["draft"].encode())
        assert isinstance(manifest, Manifest)
        if message["number"] is None:
            return cls(StateSource.DISK, manifest, message["name"])
        return cls(
            source=StateSource.PROCESS if message.get("ranks") else StateSource.MEMORY,
            manifest=manifest,
            name=message["name"],
            save_number=message["number"],
            key=tuple(message["key"]),
            holder_ranks=message.get("ranks", []),
            file_holders=message.get("files", {}),
            servers={int(node): server for node, server in message.get("servers", {}).items()},
            copy_only_files=message.get("copied", []),
            has_alike=message["alike"],
            step_on_disk=message["on_disk"],
        )


@dataclass
class OpenState:
    """The files of the chosen state that this rank has open."""

    fd: int = -1
    checksum: str = ""  #: the checksum of state.pt, if it is in a file that this rank has verified
    content: StateDict | None = None  #: the content of state.pt, where this rank has tried whether it can be loaded
    shards: ShardsInMemory | None = None  #: the files of a sharded state in memory

    def load(self) -> StateDict:
        """The content of state.pt. Raises CheckpointCorrupt, CheckpointError, OSError."""
        if self.shards is not None and self.fd < 0:
            self.fd = self.shards.copy_to_file(STATE)
        if self.content is None:
            self.content = load_mapped(self.fd)
        return self.content

    def close(self) -> None:
        """Close all files: another state may be opened."""
        if self.fd >= 0:
            os.close(self.fd)
        if self.shards is not None:
            self.shards.close()
        self.fd, self.checksum, self.content, self.shards = -1, "", None, None


class Chooser:
    """Rank 0's part of a restore: the states that there are, and which have been found to be of no use."""

    def __init__(self, context: SaveContext, directory: Path, step: int | None, opened: OpenState) -> None:
        """`step`: that to go back to, once in a directory; None: the newest one. A chosen checkpoint is `opened`."""
        self._context, self._directory, self._step, self._opened = context, directory, step, opened
        self.states: list[HeldState] = []
        """The states in processes and in the memory of all nodes, newest first."""
        self.servers: dict[int, ServerAddress] = {}
        self._candidates: list[Entry] = []
        """Checkpoints that may be loaded and have not been tried yet."""
        self._skipped = 0
        self._undamaged = ""
        """The first of those skipped that another start may read, with the reason why this one cannot."""
        self.entry: Entry | None = None
        self.is_on_trial = False
        """A newer state is passed over, as restarts have made no progress from it. That may have another cause: until
        the older one has been trained from and saved, the newer one stays what others resume from.
        """

    def choose(self) -> Choice | None:
        """The newest state that has not been rejected; None if there is none. Raises CheckpointError, OSError."""
        if self.entry is not None:  # a checkpoint has been rejected: an older one is next
            return self._next_on_disk()
        whole, torn = self._usable_states(), self.torn_state
        on_disk, skipped = self._walk_lineage(bool(whole))
        newest, on_disk = self._newest_allowed(whole, on_disk)
        if newest is not None and self._is_newest(newest.snapshot, on_disk):
            choice: Choice | None = self._choose_held(newest, on_disk[0].manifest.step if on_disk else 0)
        else:
            for checkpoint in skipped:
                self._report_skipped(checkpoint.path, checkpoint.why, checkpoint.is_permanent)
            self._candidates = on_disk
            choice = self._next_on_disk()
        if torn is not None and (choice.step if choice else 0) < (step := torn.snapshot.draft.step):
            self.report(f"step {step} was in memory, but {', '.join(torn.missing_files)} is lost with its node", step)
        return choice

    @property
    def may_be_incomplete(self) -> bool:
        """Nodes may still be writing a newer sharded state than the whole ones that they have."""
        return self.entry is None and (
            self.torn_state is not None or not self._usable_states() or self._step is not None
        )

    @property
    def torn_state(self) -> HeldState | None:
        """The newest state, where files of it are missing."""
        return next((state for state in self.states[:1] if state.missing_files), None)

    def reject_held(self, choice: Choice, why: str, below: int = 0) -> None:
        """No state in processes or in memory from step `below` on is of use any more."""
        self.states = [state for state in self.states if state.snapshot.draft.step < below]
        where = "in processes" if choice.in_processes else "in memory"
        self.report(f"the state of step {choice.step} {where} cannot be used: {why}", choice.step)

    def judge_places(self, choice: Choice, words: list[Message]) -> Message:
        """Decide whether this state in processes is used. A word: `why` the rank has no place for it, and whether the
        rank `holds` a state.

        If a rank that holds none has no place, such as a new process, the state of another rank is tried, where there
        is one. A rank that holds another state decides nothing: either of the two may be wrong.
        """
        failed = [(rank, word) for rank, word in enumerate(words) if word["why"]]
        if not failed:
            return {"why": "", "rejected": False}
        held = f"the state of step {choice.step} in the processes of rank {', '.join(map(str, choice.holder_ranks))}"
        why = f"{held} has no place in rank {failed[0][0]}: {failed[0][1]['why']}"
        others = [state for state in self.states if state.holder_ranks != choice.holder_ranks]
        rejected = any(state.holder_ranks for state in others) and not all(word["holds"] for _, word in failed)
        if rejected:
            self.states = others
            self.report(why, choice.step)
        return {"why": why, "rejected": rejected}

    def reject_checkpoint(self, choice: Choice, why: str) -> None:
        """The checkpoint is damaged."""
        self._report_skipped(self._directory / choice.name, why)

    def report(self, reason: str, step: int | None) -> None:
        self._context.warn("message", reason, self._directory, step)

    def _usable_states(self) -> list[HeldState]:
        """States of which the nodes hold all files, without those that an earlier round has refused."""
        refused = step_files.refused_states()
        return [
            state for state in self.states if not state.missing_files and state.snapshot.original_key not in refused
        ]

    def _choose_held(self, state: HeldState, step_on_disk: int) -> Choice:
        snapshot = state.snapshot
        draft, others = snapshot.draft, [other.snapshot for other in self.states if other is not state]
        for rival in (
            other for other in self.states if other is not state and other.holder_ranks and state.holder_ranks
        ):
            if (rival.snapshot.draft.round, rival.snapshot.draft.step) == (draft.round, draft.step):
                theirs, ours = (", ".join(map(str, one.holder_ranks)) for one in (rival, state))
                self.report(f"rank {theirs} holds another state of step {draft.step} than rank {ours}", draft.step)
        return Choice(
            source=StateSource.PROCESS if state.holder_ranks else StateSource.MEMORY,
            manifest=draft,
            name=draft.name,
            save_number=snapshot.save_number,
            key=snapshot.key,
            holder_ranks=state.holder_ranks,
            file_holders=state.holders,
            servers=self.servers if state.holders else {},
            copy_only_files=state.copy_only_files,
            has_alike=find_alike(others, draft) is not None,
            step_on_disk=step_on_disk,
        )

    def _newest_allowed(self, whole: list[HeldState], on_disk: list[Entry]) -> tuple[HeldState | None, list[Entry]]:
        """The newest state in memory and the checkpoints, without those that the script goes back behind, or from which
        restarts have made no progress.
        """
        newest = whole[0] if whole else None
        in_memory = [state.snapshot for state in whole]
        if self._step is not None:
            known = [*(snapshot.draft.step for snapshot in in_memory), *(entry.manifest.step for entry in on_disk)]
            mark = retention.went_back_mark(self._directory, self._step)
            if mark.exists() and max(known, default=-1) >= self._step:
                where, what = path_or_url(self._directory), f"restore(step={self._step}) has no effect"
                self.report(f"{what}: {where} went back to it before; rm {path_or_url(mark)} to go again", self._step)
            else:
                newest, on_disk = None, self.go_back(self._step, on_disk)
        if older := self._older_than_suspect(in_memory[0] if newest else None, in_memory, on_disk):
            newest, on_disk, self.is_on_trial = None, older, True
        return newest, on_disk

    def _is_newest(self, held: Snapshot, on_disk: list[Entry]) -> bool:
        first = on_disk[0].manifest if on_disk else None
        superseded = held.key[0] < highest_round(self._directory)
        return not superseded and (first is None or (first.round, first.step) <= (held.key[0], held.draft.step))

    def _walk_lineage(self, has_other: bool) -> tuple[list[Entry], list[SkippedCheckpoint]]:
        """Walk the lineage. If the object store does not answer and there is a state in memory, use what this node
        knows.
        """
        store = store_of(self._directory)
        if store is None:
            return lineage(self._directory)
        usual_s, store.patience_s = store.patience_s, BRIEF_PATIENCE_S if has_other else RESTORE_PATIENCE_S
        try:
            return lineage(self._directory)
        except ObjectStoreError as error:
            if not has_other:
                raise
            self._context.warn("message", f"the state in memory is used: {error}", self._directory)
            known = walk_lineage(self._directory)
            return known.entries, known.skipped
        finally:
            store.patience_s = usual_s

    def _older_than_suspect(
        self, newest: Snapshot | None, in_memory: list[Snapshot], on_disk: list[Entry]
    ) -> list[Entry]:
        """The older checkpoints to use where restarts in a row made no progress from the newest state; else none."""
        count = self._context.environment.restarts_without_progress
        if count < SUSPECT_AFTER_RESTARTS or self._has_progressed(newest):
            return []
        steps = [snapshot.draft.step for snapshot in in_memory] + [entry.manifest.step for entry in on_disk[:1]]
        step = max(steps, default=0)
        older = [entry for entry in on_disk if entry.manifest.step < step]
        if older:
            self.report(
                f"the state of step {step} skipped: {count} restarts in a row have made no progress from it", step
            )
        return older

    def _has_progressed(self, newest: Snapshot | None) -> bool:
        """The last round has trained past the state that it resumed from."""
        if newest is None or newest.key[0] < highest_round(self._directory):
            return False
        if newest.adopting_round or newest.draft.relinked:
            return False
        return newest.draft.parent is None or newest.draft.step > newest.draft.parent[1]

    def _next_on_disk(self) -> Choice | None:
        """The first checkpoint that can be read, kept open; those before it are skipped. Raises CheckpointError where
        none can, and not for damage.
        """
        while self._candidates:
            entry = self._candidates.pop(0)
            try:
                fd = open_verified(entry)
            except ObjectStoreError:
                raise  # an older one is no better
            except (CheckpointCorrupt, OSError) as error:
                self._report_skipped(entry.path, str(error), is_permanent=isinstance(error, CheckpointCorrupt))
                continue
            try:
                content = load_mapped(fd)
            except (CheckpointError, OSError) as error:
                os.close(fd)
                self._report_skipped(entry.path, str(error), is_permanent=False)
                continue
            self.entry = entry
            self._opened.fd, self._opened.content, self._opened.checksum = fd, content, entry.manifest.checksum
            return Choice(StateSource.DISK, entry.manifest, entry.path.name)
        where = path_or_url(self._directory)
        if self._undamaged:
            raise CheckpointError(
                f"no checkpoint in {where} can be used, and training does not begin anew, as {self._undamaged}. Make "
                "it readable for this job, or use another directory"
            )
        if self._skipped:
            self.report(f"no checkpoint in {where} can be used, {self._skipped} skipped: training begins anew", None)
        return None

    def go_back(self, step: int, on_disk: list[Entry]) -> list[Entry]:
        """Set newer checkpoints than that of `step` aside; returns those that are left. Raises CheckpointError."""
        steps = sorted({entry.manifest.step for entry in on_disk})
        if step not in steps:
            there = f"there are steps {', '.join(map(str, steps))}" if steps else "there is none"
            raise CheckpointError(f"restore(step={step}): {self._directory} has no checkpoint of that step; {there}")
        whys = [find_damage(entry) for entry in on_disk if entry.manifest.step == step]
        if None not in whys:
            raise CheckpointError(f"restore(step={step}): the checkpoint of that step cannot be used: {whys[0]}")
        if aside := retention.set_aside(self._directory, step):
            names = ", ".join(path.name for path in aside)
            self.report(f"went back to step {step}: newer checkpoints were set aside as {names}", step)
        return [entry for entry in on_disk if entry.manifest.step <= step]

    def _report_skipped(self, path: Path, why: str, is_permanent: bool = True) -> None:
        self._skipped += 1
        if not is_permanent:
            self._undamaged = self._undamaged or f"{path.name} may be undamaged: {why}"
        self._context.warn("checkpoint_skipped", f"checkpoint {path.name} skipped: {why}", path)
