"""A save of a state of which every rank has all, as under DistributedDataParallel: one file, copied by shares.

The ranks of a node copy disjoint shares of it into the node's memory. The part that is not equal on all ranks, such as
buffers, is rank 0's: rank 0 sends it to every node that keeps a copy, so that any node's copy may be resumed from.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from typing import Any

from elasticd.checkpointing.context import SaveContext
from elasticd.checkpointing.directory_writes import DirectoryWrites
from elasticd.checkpointing.memory.buffers import WriteTask
from elasticd.checkpointing.memory.writer_client import SnapshotRefused, WriterClient
from elasticd.checkpointing.state import training_state
from elasticd.checkpointing.state.layout import Layout, write_packed
from elasticd.checkpointing.state.safe_types import check_loadable
from elasticd.checkpointing.state.training_state import StateDict
from elasticd.checkpointing.storage.checkpoint_files import check_cursor
from elasticd.checkpointing.storage.manifest import STATE, Manifest, parse
from elasticd.errors import CheckpointRefused

MAX_SENT_BYTES = 8 << 20
"""The most that rank 0 sends to every node at a save: buffers, random states, numbers. A larger part that is not equal
on all ranks, such as averaged weights, is kept on rank 0's node only. Also the most that rank 0 gets from each rank."""
_NOT_SAVED_MESSAGE = b"not saved"
"""The message of a rank 0 that cannot save this time, in place of its part."""


class WholeSaver:
    """The whole states of one session. All ranks call `save` at the same steps."""

    def __init__(self, context: SaveContext, writes: DirectoryWrites) -> None:
        self._context, self._writes = context, writes
        self._keeps_copies = True
        """This rank copies its share at each save; if not, it still saves its state at a fault."""
        self._was_accepted = False
        """A state was not refused: the job has trained, and is not ended for what a later one holds."""

    def save(
        self,
        draft: Manifest,
        attached: Mapping[str, Any],
        content: Callable[[], StateDict],
        unable: str,
        why: str,
        wait: bool,
    ) -> bool:
        """Save as `Saver.save` does. `content` returns the state, and `unable` is why there is none."""
        context, start = self._context, time.monotonic()
        is_rank0 = context.group.rank == 0
        if not is_rank0 and not (context.writer and self._keeps_copies):
            return False
        try:
            layout, draft = self._lay_out(draft, attached, content, unable)
        except CheckpointRefused as error:
            if not self._was_accepted:
                raise
            if is_rank0:
                self._send_rank0_part(lambda: _NOT_SAVED_MESSAGE)
                context.warn_failed(draft.step, str(error))
            return False
        self._was_accepted = True
        exchanged = self._exchange_rank0_part(draft, layout)
        if exchanged is None:
            return False
        has_copied = self._copy_share(*exchanged, layout, why, start)
        if not is_rank0:
            return False
        if not has_copied:
            return self._writes.write_now(draft, lambda staging: {STATE: layout.write_file(staging.path)}, why, start)
        return self._writes.wait_until_saved() if wait else True

    def _lay_out(
        self, draft: Manifest, attached: Mapping[str, Any], content: Callable[[], StateDict], unable: str
    ) -> tuple[Layout, Manifest]:
        """The state's layout, and its description with its size. Raises CheckpointRefused."""
        if unable:
            raise CheckpointRefused(unable)
        context, state = self._context, content()
        shared = training_state.replicated_storages(attached, context.group.world_size)
        if context.group.rank == 0:
            check_loadable(state)
        layout = Layout(state, shared, save=context.save_count)
        draft = context.draft(draft.step, layout.bytes, draft.cursor)
        if context.group.rank == 0:
            check_cursor(draft)
        return layout, draft

    def _send_rank0_part(self, make: Callable[[], bytes]) -> None:
        """Send rank 0's part of the state to every node that keeps a copy: all of them have read the one before."""
        environment, channel, number = self._context.environment, self._context.channel, self._context.save_count
        if environment.nodes > 1 and environment.round:
            channel.put(f"own/{number}", make())
            if number > 1:
                channel.delete(f"own/{number - 1}")

    def _exchange_rank0_part(self, draft: Manifest, layout: Layout) -> tuple[Manifest, Callable[[int], None]] | None:
        """Rank 0's draft, and a function that writes rank 0's part of the state into a file; None if rank 0 does not
        save.
        """
        context = self._context

        def own() -> bytes:
            header = json.dumps({"draft": draft.to_json().decode(), "digest": layout.shared_digest})
            packed = layout.pack_unshared(MAX_SENT_BYTES)
            return header.encode() + b"\n" + packed if packed else b""

        if context.group.rank == 0:
            self._send_rank0_part(own)
            return draft, layout.copy_unshared
        writer = context.writer
        if writer is None or writer.is_first_node:
            return draft, layout.copy_unshared
        if layout.unshared_bytes > MAX_SENT_BYTES:
            self._keeps_copies = False
            why = f"more than {MAX_SENT_BYTES >> 20} MB of it are not equal on all ranks"
            self._report_no_copy(writer, why, draft.step)
        elif writer.share == 0:
            sent = context.channel.read_from_rank0(
                f"own/{context.save_count}", f"rank 0's part of the state of step {draft.step}"
            )
            if sent == _NOT_SAVED_MESSAGE:
                return None
            described, _, packed = sent.partition(b"\n")
            of_rank0 = json.loads(described) if packed else {}
            sent_draft = parse(of_rank0.get("draft", "").encode())
            if isinstance(sent_draft, Manifest) and of_rank0["digest"] == layout.shared_digest:
                return sent_draft, lambda fd: write_packed(fd, packed)
            self._report_no_copy(writer, "its shape differs from rank 0's", draft.step)
            context.writer = None
        return draft, layout.copy_unshared

    def _report_no_copy(self, writer: WriterClient, why: str, step: int) -> None:
        if writer.share == 0:
            self._context.report(f"this node keeps no copy of the state in memory: {why}", step)

    def _copy_share(
        self, draft: Manifest, copy_unshared: Callable[[int], None], layout: Layout, why: str, start: float
    ) -> bool:
        """Copy this rank's share into the writer's memory; False where rank 0 has to write the checkpoint itself."""
        context = self._context
        if context.writer is None or not self._keeps_copies:
            return False

        def task() -> WriteTask:
            return context.write_task(why, time.monotonic() - start)

        try:
            context.writer.copy_share(
                draft, context.save_count, layout, copy_unshared, task if context.group.rank == 0 else None
            )
        except (OSError, SnapshotRefused) as error:
            refusal = str(error) if isinstance(error, SnapshotRefused) else f"the writer has ended ({error})"
            self._writes.report_refusal(refusal, draft.step)
            if isinstance(error, OSError):
                self._writes.report_if_save_lost()
            return False
        self._writes.expect_write(draft.step)
        return True
