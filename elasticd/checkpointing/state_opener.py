"""The chosen state on one rank, and the way to it: from the rank's own node, else sent by the first rank that has it.

The ranks of a node share one copy. A state in memory is received into the node's memory, where all of them open it; a
checkpoint that a host cannot read is received by each rank into a file of its own.

Opening is an agreement: each rank says whether it can read the state, rank 0 plans who sends it to whom, and all ranks
follow the plan. A rank that cannot read and is not known to the others would wait alone in a collective, so every error
is a word in the agreement and not an exception.

Where a node lacks a state that others have in memory, one of its ranks receives it into the node's memory and the
others open it there, so a node with eight ranks receives it once. If it already holds an almost equal state of the same
step, only the pieces that differ are sent.
"""

from __future__ import annotations

import contextlib
import functools
import os
import socket
from pathlib import Path

from elasticd.checkpointing.choice import Choice, OpenState
from elasticd.checkpointing.context import SaveContext
from elasticd.checkpointing.memory import held_states, transfer
from elasticd.checkpointing.memory.buffers import Snapshot
from elasticd.checkpointing.memory.transfer import ReadAnswer, SendingPlan
from elasticd.checkpointing.memory.writer_client import SnapshotRefused, WriterClient
from elasticd.checkpointing.storage.atomic_write import write_at
from elasticd.checkpointing.storage.lineage import Entry, lineage, open_verified
from elasticd.checkpointing.storage.manifest import STATE
from elasticd.checkpointing.storage.object_store import store_of
from elasticd.errors import CheckpointCorrupt, Reason


class StateOpener:
    """The opening of a whole state, or of a checkpoint's state.pt, on every rank of a restore."""

    def __init__(self, context: SaveContext, directory: Path, opened: OpenState, held: list[Snapshot]) -> None:
        """`held`: on the first rank of each node, what is in the node's memory."""
        self._context, self._directory, self._opened, self._held = context, directory, opened, held

    def open_everywhere(self, choice: Choice, attempt: int) -> None:
        """Open the chosen state on every rank. Raises CheckpointError if no rank has it, OSError."""
        # A key has one message: a rank that reads it again would read the message of the attempt before.
        suffix = f"/{attempt}" if attempt else ""
        context, opened = self._context, self._opened
        group, writer = context.group, context.writer
        if group.world_size == 1 and opened.fd >= 0:
            return
        answer: ReadAnswer = {
            "host": socket.gethostname(),
            "error": "" if opened.fd >= 0 else self.open_here(choice),
            "first": writer is None or writer.share == 0,
            "pieces": held_states.piece_checksums(choice.manifest, self._held, writer) if choice.has_alike else [],
        }
        plan = context.agree(
            f"read{suffix}",
            "whether it can read the state",
            answer,
            functools.partial(self._plan_sending, choice),
            f"send{suffix}",
        )
        lacking = plan["receivers"]
        if lacking and choice.in_memory:
            lacking = self._send_into_memory(choice, plan, suffix)
        if lacking:
            receives = group.rank in lacking
            if receives:
                opened.fd = os.memfd_create("elasticd-received", os.MFD_CLOEXEC)
            write = functools.partial(write_at, opened.fd) if receives else None
            transfer.broadcast_spans(opened.fd, plan["sender"], [(0, choice.manifest.bytes)], group, write)

    def _plan_sending(self, choice: Choice, answers: list[ReadAnswer]) -> SendingPlan:
        """Rank 0: who sends the state, and to whom: all ranks of a host where one cannot read it."""
        plan = transfer.plan_sending(choice.name, answers, choice.manifest.bytes)
        if plan["receivers"] and not choice.in_memory:
            ranks, why = plan["receivers"], answers[plan["receivers"][0]]["error"]
            reason = (
                f"rank {', '.join(map(str, ranks))} cannot read {self._directory / choice.name} ({why}); rank 0 "
                "sends it. Is the checkpoint directory shared by all nodes?"
            )
            self._context.warn("message", reason, self._directory, choice.step)
        return plan

    def _send_into_memory(self, choice: Choice, plan: SendingPlan, suffix: str) -> list[int]:
        """One rank of each node receives into the node's memory, the others open it there; returns who could not."""
        context, writer, draft = self._context, self._context.writer, choice.manifest
        receives = context.group.rank in plan["receivers"]
        patches: list[tuple[int, bytes]] = []
        buffer = -1

        def begin(writer: WriterClient) -> int:
            with contextlib.suppress(OSError, SnapshotRefused):
                alike = held_states.find_alike(self._held, draft) if plan["patched"] else None
                return writer.borrow_buffer(draft, choice.save_number, 0, 1, "", like=alike.key if alike else None)[0]
            return -1

        def write(offset: int, data: memoryview) -> None:
            if plan["patched"]:  # the state that it has stays whole until all of them have arrived
                patches.append((offset, bytes(data)))
            elif buffer >= 0:
                write_at(buffer, offset, data)

        fills = receives and writer is not None and writer.share == 0
        if fills and writer is not None and not plan["patched"]:
            buffer = begin(writer)
        transfer.broadcast_spans(
            self._opened.fd, plan["sender"], plan["spans"], context.group, write if fills else None
        )
        if fills and writer is not None and plan["patched"]:
            buffer = begin(writer)
        if buffer >= 0 and writer is not None:
            for offset, data in patches:
                write_at(buffer, offset, memoryview(data))
            os.close(buffer)
            with contextlib.suppress(OSError, SnapshotRefused):
                writer.report_copied(draft, choice.save_number, 0)
                self._held[:] = writer.find_all()
        context.agree(f"sent{suffix}", "whether it has received the state", None, lambda _: {})
        error = self.open_here(choice) if receives else ""

        def lacking(errors: list[str]) -> dict[str, list[int]]:
            return {"ranks": [rank for rank, error in enumerate(errors) if error]}

        ranks: list[int] = context.agree(f"opened{suffix}", "whether it has the state", error, lacking)["ranks"]
        return ranks

    def open_here(self, choice: Choice) -> Reason:
        """Open the chosen state; returns the error, "" for none. In a directory one rank a node compares checksums."""
        try:
            if choice.in_memory:
                if self._context.writer is None:
                    return "no copy in memory"
                self._opened.fd, _, _ = self._context.writer.open_buffer(choice.key)
                return ""
            if store_of(self._directory) is not None:  # on each rank: a damaged copy is made again while others read
                return self._open_verified(choice.place_entry(self._directory))
            wanted = choice.manifest
            for entry in lineage(self._directory)[0]:
                there = entry.manifest
                if (there.round, there.step, there.checksum) == (wanted.round, wanted.step, wanted.checksum):
                    if self._context.environment.local_rank == 0:
                        return self._open_verified(entry)
                    self._opened.fd = os.open(entry.path / STATE, os.O_RDONLY | os.O_CLOEXEC)
                    return ""
        except (CheckpointCorrupt, SnapshotRefused, OSError) as error:
            return str(error)
        return f"there is no {choice.name} with rank 0's checksum"

    def _open_verified(self, entry: Entry) -> Reason:
        self._opened.fd, self._opened.checksum = open_verified(entry), entry.manifest.checksum
        return ""
