"""A save of a sharded state: each rank copies its part into its node's memory, and the writers of all nodes write it.

Rank 0 decides three things at every save, and the others wait for it: whether the planner has to run again, whether the
disk is ready for another state, and whether every node could take its copy. Otherwise all ranks write their files at
once and train on when they are done; so it is without our launcher.

The steps of a save, each of which all ranks take together:
1. "plan": each rank says whether its state has another structure and whether its node still writes an earlier one. Rank
   0 drops the save, or says whether the plan is made anew.
2. The plan is made, if needed, by torch's planner on all ranks.
3. "copy": each rank has a place in its node's buffer, or the reason against it. One refusal makes all ranks write to
   the disk instead, as half a state in memory is none.
4. The parts are copied, and training continues. The writers do the rest; the first node's waits for the others and
   publishes the checkpoint.

An agreement is never skipped by one rank alone: an error on a rank (OSError of a writer that has ended) is carried to
the end of the save, where this rank leaves with its node's part lost. A checkpoint without a part is never published,
so a lost part costs this save and no other.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import secrets
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from elasticd.channel import Message
from elasticd.checkpointing.context import SaveContext
from elasticd.checkpointing.directory_writes import PATIENCE_SHARE, DirectoryWrites
from elasticd.checkpointing.memory import held_states, state_files
from elasticd.checkpointing.memory.buffers import WriteTask
from elasticd.checkpointing.memory.mapped_buffer import MappedBuffers
from elasticd.checkpointing.memory.shard_server import ServerAddress
from elasticd.checkpointing.memory.writer_client import LOST_PART_WAIT_S, SnapshotRefused, WriterClient
from elasticd.checkpointing.state import shard_plan, sharded
from elasticd.checkpointing.state.layout import Layout
from elasticd.checkpointing.state.safe_types import check_loadable
from elasticd.checkpointing.state.shard_plan import ShardPlan
from elasticd.checkpointing.state.training_state import RESERVED_NAME, StateDict, no_garbage_collection
from elasticd.checkpointing.storage.atomic_write import Staging
from elasticd.checkpointing.storage.checkpoint_files import check_cursor
from elasticd.checkpointing.storage.manifest import METADATA, STATE, Manifest, SizeAndChecksum, shard_name
from elasticd.checkpointing.storage.object_url import url_of
from elasticd.errors import CheckpointRefused, UsageError

_BUSY_REASON = "the disk is slower than the saves: an earlier state is still being written"


class ShardedSaver:
    """The sharded states of one session. All ranks call `save` at the same steps."""

    def __init__(self, context: SaveContext, writes: DirectoryWrites, objects: Mapping[str, Any]) -> None:
        """`objects` are saved in shards. Raises UsageError on every rank where they differ between ranks."""
        self._context, self._writes, self.objects = context, writes, objects
        self._plan: ShardPlan | None = None
        self._mapped = MappedBuffers()
        self._is_unserved = False
        try:
            mine = sharded.structure_digests(objects)
        except UsageError as error:
            mine = {"error": str(error)}
        probe = self._agree("sharded objects", "what is attached there", mine, self._compare_and_probe)["probe"]
        sees = not probe or url_of(context.chosen_directory) is not None or (context.chosen_directory / probe).exists()
        self._agree("shared directory", "whether it sees the checkpoint directory", sees, self._check_shared_directory)

    def _compare_and_probe(self, every: list[dict[str, str]]) -> Message:
        """Raises UsageError for other objects than rank 0's; makes a file that all ranks should see."""
        if why := next((words["error"] for words in every if "error" in words), ""):
            raise UsageError(why)
        for name in every[0]:
            different = [str(rank) for rank, words in enumerate(every) if words.get(name) != every[0][name]]
            if different:
                raise UsageError(
                    f"attach({name}=...): its class, parameters, settings, mesh or placements on rank "
                    f"{', '.join(different)} are not those of rank 0; a sharded state needs the same on all ranks"
                )
        self._probe = self._context.chosen_directory / f".probe-{secrets.token_hex(4)}"
        try:
            self._probe.touch(0o600)
        except OSError:
            return {"probe": ""}  # the disk may be writable later
        return {"probe": self._probe.name}

    def _check_shared_directory(self, every: list[bool]) -> Message:
        with contextlib.suppress(OSError):
            self._probe.unlink()
        if blind := [str(rank) for rank, sees in enumerate(every) if not sees]:
            raise UsageError(
                f"rank {', '.join(blind)} does not see what rank 0 writes in {self._context.directory}: a sharded "
                "state needs a checkpoint directory that all nodes share"
            )
        return {}

    def save(
        self,
        draft: Manifest,
        attached: Mapping[str, Any],
        content: Callable[[], StateDict],
        unable: str,
        why: str,
        wait: bool,
    ) -> bool:
        """Save as `Saver.save` does. On rank 0 `content` returns what goes into state.pt, and `unable` why there is
        none.
        """
        context, start = self._context, time.monotonic()
        state = sharded.nested_state(self.objects, context.group.rank)
        changed = self._plan is None or not self._plan.try_use_state(state)
        layout: Layout | None = None

        def begin(every: list[tuple[bool, bool]]) -> Message:
            nonlocal layout
            is_new, others_write = (any(words) for words in zip(*every, strict=True))
            if unable:
                return {"event": "checkpoint_failed", "why": unable}
            # A part that no node is writing and that has not come is lost: with its node's writer, during the copy.
            if self.is_busy(wait, None if others_write else LOST_PART_WAIT_S):
                return {"event": "checkpoint_dropped", "why": _BUSY_REASON}
            try:
                check_cursor(draft)
                if is_new:
                    check_loadable(sharded.non_tensor_values(state))
                small = content()
                small[RESERVED_NAME][sharded.NAMES_KEY] = list(self.objects)
                check_loadable(small)
                layout = Layout(small)
            except CheckpointRefused as error:
                if self._plan is None:
                    raise
                return {"event": "checkpoint_failed", "why": str(error)}
            return {"event": "", "plan": is_new}

        # This starts a writer that has died: the first node waits for its part.
        is_writing = context.group.rank != 0 and self.is_busy(wait=False)
        answer = self._agree("plan", f"whether it has another state at step {draft.step}", (changed, is_writing), begin)
        if answer["event"]:
            if context.group.rank == 0:
                context.warn_failed(draft.step, answer["why"], answer["event"])
            return False
        if answer["plan"] or self._plan is None:
            self._make_plan(state)
        assert self._plan is not None
        token, is_lost = None, False
        try:
            token = self._copy_into_memory(draft, self._plan, layout, why, start)
        except OSError as error:
            self._report_lost_part(draft, error)
            is_lost = True
        if token is not None:
            return self._write_now(draft, token, self._plan, layout, why, start)
        if wait:
            self._wait_for_parts()
        return not is_lost and (self._writes.wait_until_saved() if wait else context.group.rank == 0)

    def _wait_for_parts(self) -> None:
        """Tell the first node to wait no longer, once all other nodes have written their parts or lost them."""
        writer, timeout_s, has_ended = self._context.writer, self._context.channel.timeout_s, True
        if writer is not None and writer.share == 0 and self._context.group.rank != 0:
            try:
                writer.are_shards_pending(True, timeout_s / 2)
            except TimeoutError:
                has_ended = False
            except (OSError, SnapshotRefused):
                pass  # there is no writer any more
        what = "whether its node has written its part"
        if self._agree("settled", what, has_ended, lambda every: {"all": all(every)})["all"]:
            self.is_busy(False, None if self._context.group.rank else LOST_PART_WAIT_S)

    def _make_plan(self, state: StateDict) -> None:
        """Have all ranks plan together, without a garbage collection in between, which would make one of them late."""
        with no_garbage_collection():
            self._plan = ShardPlan(state, self._context.group)

    def _agree(self, key: str, what: str, mine: Any, decide: Callable[[list[Any]], Message]) -> Message:
        """Rank 0's decision about every rank's word, on every rank."""
        channel, number = self._context.channel, self._context.save_count

        def decide_and_tidy(every: list[Any]) -> Message:
            if channel.store is not None and number > 1:
                channel.delete(f"{key}/{number - 1}")  # all ranks have read it: they have sent another word
            return decide(every)

        decision: Message = self._context.agree(f"{key}/{number}", what, mine, decide_and_tidy)
        return decision

    def is_busy(self, wait: bool, parts_s: float | None = None) -> bool:
        """True if this node is still writing an earlier state, or the first node has not published it yet.

        `parts_s`: so long it waits for the parts of other nodes at most.
        """
        writer, timeout_s = self._context.writer, PATIENCE_SHARE * self._context.channel.timeout_s
        try:
            return writer is not None and writer.share == 0 and writer.are_shards_pending(wait, timeout_s, parts_s)
        except (OSError, SnapshotRefused):
            return False

    def _copy_into_memory(
        self, draft: Manifest, plan: ShardPlan, layout: Layout | None, why: str, start: float
    ) -> str | None:
        """Copy this rank's part into its node's memory.

        Returns None, or a token for `_write_now` where a node takes no copy. Raises OSError if the writer ends
        meanwhile.
        """
        context = self._context
        fd, files, refused = self._borrow_buffer(draft, plan, layout)
        self._publish_server()
        try:

            def decide(every: list[str]) -> Message:
                refusal = next((word for word in every if word), "")
                return {"refused": refusal, "token": secrets.token_hex(4)}

            answer = self._agree("copy", "whether its node takes a copy", refused, decide)
            if answer["refused"]:
                if context.writer is not None:
                    context.writer.close()  # gives the buffer back
                    self._writes.report_refusal(answer["refused"], draft.step)
                return str(answer["token"])
            for name, (offset, _) in files.items():
                content = self._file_content(name, plan, layout)
                if name != shard_name(context.group.rank):  # its size differs from save to save
                    shard_plan.write_pieces(fd, offset, content)
                    continue
                buffer = self._mapped.begin_copy(fd)
                for piece in content:
                    buffer.write(offset, piece)
                    offset += len(piece)
                buffer.end_copy()
        finally:
            if fd >= 0:
                os.close(fd)
        node, nodes, token = context.environment.node, context.environment.nodes, answer["token"]

        def task() -> WriteTask:
            own = replace(context.write_task(why, time.monotonic() - start), token=token, node=node, nodes=nodes)
            return own if node == 0 else replace(own, events="")

        assert context.writer is not None
        context.writer.report_copied(
            draft, context.save_count, context.writer.share, task, files, self._partner_message()
        )
        self._writes.expect_write(draft.step)
        return None

    def _report_lost_part(self, draft: Manifest, error: OSError) -> None:
        """This node's part is lost with its writer, and so is the checkpoint."""
        writer = self._context.writer
        assert writer is not None
        writer.close()
        if writer.share == 0:
            self._context.warn_failed(draft.step, f"the writer has ended: {error}")

    def _publish_server(self) -> None:
        """Before all ranks agree about the copy: where this node's part will be read, for the next node."""
        context, who = self._context, self._context.environment
        if context.writer is None or not self._keeps_copies(context.writer):
            return
        server: ServerAddress | None = None
        try:
            server = held_states.serve_shards(context.writer)
        except (OSError, SnapshotRefused) as error:
            if not self._is_unserved:
                reason = f"no node keeps a copy of this node's part of the state: {error}"
                context.events.write("message", reason, None)
        self._is_unserved = server is None
        context.channel.put(f"shards/{who.node}", json.dumps(server).encode())

    def _partner_message(self) -> Message | None:
        """The node before this one, of whose part this node's writer makes a copy."""
        context, who = self._context, self._context.environment
        if context.writer is None or not self._keeps_copies(context.writer):
            return None
        node = (who.node - 1) % who.nodes
        server = json.loads(context.channel.read_from_rank0(f"shards/{node}", f"where the part of node {node} is read"))
        if server is None:
            return None
        return {"server": server, "node": node, "events": str(context.events.path or ""), "rank": context.group.rank}

    def _keeps_copies(self, writer: WriterClient) -> bool:
        """This rank is the one that asks its node's writer for copies."""
        return self._context.partner_copies and self._context.environment.nodes > 1 and writer.share == 0

    def _borrow_buffer(
        self, draft: Manifest, plan: ShardPlan, layout: Layout | None
    ) -> tuple[int, dict[str, tuple[int, int]], str]:
        """The node's buffer, where this rank's files go in it, and why there is none."""
        writer, rank = self._context.writer, self._context.group.rank
        if writer is None:
            return -1, {}, "there is no launcher that runs a writer"
        first = rank - writer.share
        local = plan.sizes[first : first + writer.shares]
        files, end = {shard_name(rank): (sum(local[: writer.share]), plan.sizes[rank])}, sum(local)
        if layout is not None:  # last, as their sizes change
            files |= {METADATA: (end, len(plan.metadata)), STATE: (end + len(plan.metadata), layout.bytes)}
            end += len(plan.metadata) + layout.bytes
        try:
            shares = (writer.share, writer.shares)
            fd, _ = writer.borrow_buffer(
                replace(draft, bytes=end), self._context.save_count, *shares, digest="", copies=1
            )
        except (OSError, SnapshotRefused) as error:
            return -1, {}, str(error)
        return fd, files, ""

    def _file_content(self, name: str, plan: ShardPlan, layout: Layout | None) -> Any:
        """Return the bytes of one of this rank's files, piece by piece."""
        if name == METADATA:
            return iter([plan.metadata])
        if name == STATE and layout is not None:
            small = io.BytesIO()
            layout.write(small.write)
            return iter([small.getbuffer()])
        return plan.content()

    def _write_now(
        self, draft: Manifest, token: str, plan: ShardPlan, layout: Layout | None, why: str, start: float
    ) -> bool:
        """All ranks write their files; rank 0 commits them."""
        context, group = self._context, self._context.group
        names = [shard_name(group.rank), *((METADATA, STATE) if layout is not None else ())]
        contents = {name: state_files.stream(self._file_content(name, plan, layout)) for name in names}
        key, what = f"part/{context.save_count}", f"its part of the checkpoint of step {draft.step}"
        if group.rank != 0:
            folder = context.channel.on_rank0(key, "the staging directory", dict)["folder"]
            if folder:
                part = state_files.write_other_part(context.chosen_directory, draft, token, group.rank, contents)
                context.channel.gather_on_rank0(key, json.dumps(part).encode(), what)
            return False
        opened = False

        def fill(staging: Staging) -> dict[str, SizeAndChecksum]:
            nonlocal opened
            opened = True
            context.channel.on_rank0(key, what, lambda: {"folder": str(staging.path)})
            own = json.dumps(state_files.write_part(staging.path, contents)).encode()
            every = [json.loads(part) for part in context.channel.gather_on_rank0(key, own, what)]
            return state_files.merge_parts({f"rank {rank}: ": part for rank, part in enumerate(every)})

        saved = self._writes.write_now(draft, fill, why, start, token)
        if not opened:
            context.channel.on_rank0(key, what, lambda: {"folder": ""})
        return saved
