"""How the ranks load a checkpoint together: rank 0 chooses, all load the same one, all succeed or all raise.

Rank 0 walks the lineage from the newest checkpoint, checks each while reading it and reports which it skipped and why.
The other ranks read the same file where they can, and get rank 0's copy over the process group where they cannot. The
re-link then makes the chosen checkpoint this round's own.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from elasticd.checkpointing import api as checkpoint
from elasticd.checkpointing import state
from elasticd.checkpointing.lineage import Entry
from elasticd.checkpointing.saver import Saver
from elasticd.coordination.store_channel import StoreChannel
from elasticd.errors import CheckpointCorrupt, CheckpointError
from elasticd.heartbeat.worker_events import WorkerEventWriter
from elasticd.process_group import DefaultGroup

logger = logging.getLogger("elasticd")

_PIECE_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class Resumed:
    """The checkpoint that `restore()` loaded."""

    round: int
    step: int
    world_size: int
    notes: tuple[str, ...] = ()
    """What could not be used of it, and on which rank; the same on every rank."""


def restore(
    attached: Mapping[str, Any], saver: Saver, group: DefaultGroup, channel: StoreChannel, events: WorkerEventWriter
) -> Resumed | None:
    """Load the newest valid checkpoint into `attached` on every rank, or raise on every rank; None without a
    checkpoint.
    """
    assert saver.directory is not None
    return _Restore(saver.directory, attached, saver, group, channel, events).run()


@dataclass
class _Restore:
    directory: Path
    attached: Mapping[str, Any]
    saver: Saver
    group: DefaultGroup
    channel: StoreChannel
    events: WorkerEventWriter
    _entry: Entry | None = None
    _content: dict[str, Any] | None = None

    def run(self) -> Resumed | None:
        chosen = self.channel.on_rank0("restore", "which checkpoint it restores", self._choose)
        if chosen["step"] is None:
            return None
        self._read_everywhere(chosen)
        notes: list[str] = []
        error: Exception | None = None
        try:
            assert self._content is not None
            notes += state.scatter(self.attached, self._content)
            notes += self._restore_random_state(self._content[state.RESERVED]["rng"])
        except Exception as raised:  # noqa: BLE001 - all ranks must learn of any error of a load_state_dict
            error = raised
        resumed = self._agree(chosen, error, notes)
        self.saver.parent = (resumed.round, resumed.step)
        if self._entry is not None:
            self._relink(self._entry, resumed)
        return resumed

    def _choose(self) -> dict[str, Any]:
        entries, skipped = checkpoint.lineage(self.directory)
        for each in skipped:
            self._skip(each.path, each.why)
        for entry in entries:
            try:
                self._content = checkpoint.load(entry)
            except (CheckpointCorrupt, OSError) as error:
                self._skip(entry.path, str(error))
                continue
            self._entry = entry
            found = entry.manifest
            return {
                "round": found.round,
                "step": found.step,
                "world_size": found.world_size,
                "checksum": found.checksum,
                "name": entry.path.name,
            }
        return {"step": None}

    def _skip(self, path: Path, why: str) -> None:
        reason = f"checkpoint {path.name} skipped: {why}"
        logger.warning(reason)
        self.events.write("checkpoint_skipped", reason, None, path=str(path))

    def _read_everywhere(self, chosen: Mapping[str, Any]) -> None:
        """Load the content on every rank: from its own file system, else from rank 0."""
        if self.group.world_size == 1:
            return
        error = "" if self.group.rank == 0 else self._read_here(chosen)
        answers = self.channel.collect("read", error.encode(), "whether it can read the checkpoint")
        unable = [rank for rank, answer in enumerate(answers) if answer]
        size = 0
        packed = b""
        if unable:
            packed = state.to_bytes(self._content)
            size = len(packed)
            reason = (
                f"rank {', '.join(map(str, unable))} cannot read {self.directory / chosen['name']} "
                f"({answers[unable[0]].decode()}); rank 0 sends it. Is the checkpoint directory shared by all nodes?"
            )
            logger.warning(reason)
            self.events.write("message", reason, chosen["step"], path=str(self.directory))
        size = self.channel.on_rank0("send", "whether it sends the checkpoint", lambda: {"size": size})["size"]
        if size:
            data = _broadcast(packed, size, self.group)
            if self._content is None:
                self._content = state.from_bytes(data)

    def _read_here(self, chosen: Mapping[str, Any]) -> str:
        """On other ranks than 0: load the same checkpoint; returns the error, "" for none."""
        try:
            for entry in checkpoint.lineage(self.directory)[0]:
                found = entry.manifest
                if (found.round, found.step, found.checksum) == (chosen["round"], chosen["step"], chosen["checksum"]):
                    self._content = checkpoint.load(entry)
                    return ""
        except (CheckpointCorrupt, OSError) as error:
            return str(error)
        return f"there is no {chosen['name']} with rank 0's checksum"

    def _restore_random_state(self, every_rank: list[Any]) -> list[str]:
        """Last, so that no load_state_dict moves the streams again."""
        rank, ranks, world_size = self.group.rank, len(every_rank), self.group.world_size
        counts = f"saved by {ranks} rank{'s' if ranks > 1 else ''}, now {world_size}"
        notes: list[str] = []
        if rank == 0 and ranks > world_size:
            unused = ", ".join(map(str, range(world_size, ranks)))
            notes.append(f"{counts}: the random state of rank {unused} was not used")
        if rank >= ranks:
            return [f"{counts}: there is no random state for rank {rank}, which keeps its own"]
        return notes + state.set_random_state(every_rank[rank], self.group.device)

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

    def _relink(self, entry: Entry, resumed: Resumed) -> None:
        """Rank 0: the chosen checkpoint becomes this round's first, so later writes of older rounds are not loaded."""
        where = f"resumed from step {resumed.step} of round {resumed.round}"
        reason = "; ".join([where, *resumed.notes])
        origin = {"from_round": resumed.round, "from_step": resumed.step}
        self.events.write("resumed", reason, resumed.step, path=str(entry.path), **origin)
        for note in resumed.notes:
            logger.warning("%s: %s", where, note)
        try:
            checkpoint.relink(self.directory, entry, self.saver.round)
        except OSError as error:
            reason = f"{entry.path.name} could not become round {self.saver.round}'s first checkpoint: {error}"
            logger.warning(reason)
            self.events.write("checkpoint_failed", reason, resumed.step, path=str(entry.path))


def _broadcast(packed: bytes, size: int, group: DefaultGroup) -> bytearray:
    """Rank 0's bytes on every rank, piece by piece, by the process group."""
    import torch
    import torch.distributed as dist

    data = bytearray(packed) if group.rank == 0 else bytearray(size)
    whole = torch.frombuffer(data, dtype=torch.uint8)
    for start in range(0, size, _PIECE_BYTES):
        part = whole[start : start + _PIECE_BYTES]
        piece = part.to(group.device)
        dist.broadcast(piece, src=0)
        part.copy_(piece)
    return data
