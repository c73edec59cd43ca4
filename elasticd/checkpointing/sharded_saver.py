"""How all ranks save a sharded state together: each copies its part into its node's memory, and the writers write it.

Rank 0 decides three things at every save, and the others wait for it: whether the planner has to run again, whether the
disk is ready for another state, and whether every node could take its copy. Otherwise all ranks write their files at
once and train on when they are done; so it is without our launcher.
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
from typing import TYPE_CHECKING, Any

from elasticd.checkpointing.memory import held_states, shard_files
from elasticd.checkpointing.memory.buffers import WriteTask
from elasticd.checkpointing.memory.mapped_buffer import MappedBuffers
from elasticd.checkpointing.memory.shard_server import Server
from elasticd.checkpointing.memory.writer_client import SnapshotRefused, WriterClient
from elasticd.checkpointing.state import checkpoint_files, shard_plan, sharded
from elasticd.checkpointing.state.layout import Layout
from elasticd.checkpointing.state.safe_types import check_loadable
from elasticd.checkpointing.state.shard_plan import ShardPlan
from elasticd.checkpointing.state.training_state import RESERVED, no_garbage_collection
from elasticd.checkpointing.storage.atomic_write import Staging
from elasticd.checkpointing.storage.manifest import STATE, FileState, Manifest
from elasticd.checkpointing.storage.object_url import url_of
from elasticd.errors import UsageError

if TYPE_CHECKING:
    from elasticd.checkpointing.saver import Saver

LOST_PART_S = 2.0
"""For the part of a node that does not write any more: a network file system may show it late."""
_BUSY = "the disk is slower than the saves: an earlier state is still being written"


class ShardedSaver:
    """Of one session. All ranks call `save` at the same steps."""

    def __init__(self, saver: Saver, objects: Mapping[str, Any]) -> None:
        """`objects` are saved in shards. Raises UsageError on every rank where they differ between ranks."""
        self._saver, self.objects = saver, objects
        self._plan: ShardPlan | None = None
        self._mapped = MappedBuffers()
        self._is_unserved = False
        try:
            mine = sharded.digests(objects)
        except UsageError as error:
            mine = {"error": str(error)}
        probe = self._agree("sharded objects", "what is attached there", mine, self._compare)["probe"]
        directory = saver.directory
        assert directory is not None
        sees = not probe or url_of(directory) is not None or (directory / probe).exists()
        self._agree("shared directory", "whether it sees the checkpoint directory", sees, self._check_shared)

    def _compare(self, every: list[dict[str, str]]) -> dict[str, Any]:
        """Raises UsageError for other objects than rank 0's; makes a file that all ranks should see."""
        if why := next((each["error"] for each in every if "error" in each), ""):
            raise UsageError(why)
        for name in every[0]:
            different = [str(rank) for rank, each in enumerate(every) if each.get(name) != every[0][name]]
            if different:
                raise UsageError(
                    f"attach({name}=...): its class, parameters, settings, mesh or placements on rank "
                    f"{', '.join(different)} are not those of rank 0; a sharded state needs the same on all ranks"
                )
        directory = self._saver.directory
        assert directory is not None
        self._probe = directory / f".probe-{secrets.token_hex(4)}"
        try:
            self._probe.touch(0o600)
        except OSError:
            return {"probe": ""}  # the disk may be writable later
        return {"probe": self._probe.name}

    def _check_shared(self, every: list[bool]) -> dict[str, Any]:
        with contextlib.suppress(OSError):
            self._probe.unlink()
        if blind := [str(rank) for rank, sees in enumerate(every) if not sees]:
            raise UsageError(
                f"rank {', '.join(blind)} does not see what rank 0 writes in {self._saver.directory}: a sharded state "
                "needs a checkpoint directory that all nodes share"
            )
        return {}

    def save(self, draft: Manifest, content: Callable[[], dict[str, Any]], unable: str, why: str, wait: bool) -> bool:
        """As `Saver.save`. On rank 0 `content` returns what goes into state.pt, and `unable` why there is none."""
        saver, start = self._saver, time.monotonic()
        state = sharded.gather(self.objects, saver.group.rank)
        changed = self._plan is None or not self._plan.fits(state)
        layout: Layout | None = None

        def begin(every: list[tuple[bool, bool]]) -> dict[str, Any]:
            nonlocal layout
            is_new, others_write = (any(each) for each in zip(*every, strict=True))
            if unable:
                return {"event": "checkpoint_failed", "why": unable}
            # A part that no node is writing and that has not come is lost: with its node's writer, during the copy.
            if self.is_busy(wait, None if others_write else LOST_PART_S):
                return {"event": "checkpoint_dropped", "why": _BUSY}
            checkpoint_files.check_cursor(draft)
            if is_new:
                check_loadable(sharded.values(state))
            small = content()
            small[RESERVED][sharded.NAMES] = list(self.objects)
            check_loadable(small)
            layout = Layout(small)
            return {"event": "", "plan": is_new}

        # This starts a writer that has died: the first node waits for its part.
        writes = saver.group.rank != 0 and self.is_busy(wait=False)
        answer = self._agree("plan", f"whether it has another state at step {draft.step}", (changed, writes), begin)
        if answer["event"]:
            if saver.group.rank == 0:
                reason = f"checkpoint of step {draft.step} failed ({answer['why']}); {saver.next_try}"
                saver.warn(answer["event"], reason, saver.path(draft), draft.step)
            return False
        if answer["plan"] or self._plan is None:
            self._make_plan(state)
        assert self._plan is not None
        token, is_lost = None, False
        try:
            token = self._copy(draft, self._plan, layout, why, start)
        except OSError as error:
            self._report_lost(draft, error)
            is_lost = True
        if token is not None:
            return self._write(draft, token, self._plan, layout, why, start)
        if wait:
            self._settle()
        return not is_lost and (saver.wait() if wait else saver.group.rank == 0)

    def _settle(self) -> None:
        """Where all other nodes have written their parts or lost them, the first one waits for them no longer."""
        writer, timeout_s, has_ended = self._saver.writer, self._saver.channel.timeout_s, True
        if writer is not None and writer.share == 0 and self._saver.group.rank != 0:
            try:
                writer.settle(True, timeout_s / 2)
            except TimeoutError:
                has_ended = False
            except (OSError, SnapshotRefused):
                pass  # there is no writer any more
        what = "whether its node has written its part"
        if self._agree("settled", what, has_ended, lambda every: {"all": all(every)})["all"]:
            self.is_busy(False, None if self._saver.group.rank else LOST_PART_S)

    def _make_plan(self, state: dict[str, Any]) -> None:
        with no_garbage_collection():
            self._plan = ShardPlan(state, self._saver.group)

    def _agree(self, key: str, what: str, mine: Any, decide: Callable[[list[Any]], dict[str, Any]]) -> dict[str, Any]:
        """Rank 0's decision about every rank's word, on every rank."""
        channel, number = self._saver.channel, self._saver.saves
        every = channel.collect(f"{key}/{number}", json.dumps(mine).encode(), what)
        if channel.rank == 0 and channel.store is not None and number > 1:
            channel.delete(f"{key}/{number - 1}")
        return channel.on_rank0(f"{key}/{number}", what, lambda: decide([json.loads(each) for each in every]))

    def is_busy(self, wait: bool, parts_s: float | None = None) -> bool:
        """Whether this node is still writing an earlier state; on the first node, whether it is not committed yet.

        `parts_s`: so long it waits for the parts of other nodes at most.
        """
        writer, timeout_s = self._saver.writer, self._saver.channel.timeout_s
        try:
            return writer is not None and writer.share == 0 and writer.settle(wait, timeout_s, parts_s)
        except (OSError, SnapshotRefused):
            return False

    def _copy(self, draft: Manifest, plan: ShardPlan, layout: Layout | None, why: str, start: float) -> str | None:
        """Copy this rank's part into its node's memory; where a node takes no copy, returns a token for `_write`.

        Raises OSError if the writer ends meanwhile.
        """
        saver = self._saver
        fd, files, refused = self._borrow(draft, plan, layout)
        self._serve()
        try:

            def decide(every: list[str]) -> dict[str, Any]:
                refusal = next((each for each in every if each), "")
                return {"refused": refusal, "token": secrets.token_hex(4)}

            answer = self._agree("copy", "whether its node takes a copy", refused, decide)
            if answer["refused"]:
                if saver.writer is not None:
                    saver.writer.close()  # gives the buffer back
                    saver.report_refusal(answer["refused"], draft.step)
                token: str = answer["token"]
                return token
            for name, (offset, _) in files.items():
                content = self._content(name, plan, layout)
                if name != shard_plan.file_name(saver.group.rank):  # its size differs from save to save
                    shard_plan.write_pieces(fd, offset, content)
                    continue
                buffer = self._mapped.begin(fd)
                for piece in content:
                    buffer.write(offset, piece)
                    offset += len(piece)
                buffer.end()
        finally:
            if fd >= 0:
                os.close(fd)
        node, nodes = saver.environment.node, saver.environment.nodes

        def task() -> WriteTask:
            found = replace(saver.task(why, time.monotonic() - start), token=answer["token"], node=node, nodes=nodes)
            return found if node == 0 else replace(found, events="")

        assert saver.writer is not None
        saver.writer.copied(draft, saver.saves, saver.writer.share, task, files, self._partner())
        saver.expect_write(draft.step)
        return None

    def _report_lost(self, draft: Manifest, error: OSError) -> None:
        """This node's part is lost with its writer, and so is the checkpoint."""
        saver = self._saver
        assert saver.writer is not None
        saver.writer.close()
        if saver.writer.share == 0:
            reason = f"checkpoint of step {draft.step} failed (the writer has ended: {error}); {saver.next_try}"
            saver.warn("checkpoint_failed", reason, saver.path(draft), draft.step)

    def _serve(self) -> None:
        """Before all ranks agree about the copy: where this node's part will be read, for the next node."""
        saver, who = self._saver, self._saver.environment
        if saver.writer is None or not self._keeps_copies(saver.writer):
            return
        server: Server | None = None
        try:
            server = held_states.serve(saver.writer)
        except (OSError, SnapshotRefused) as error:
            if not self._is_unserved:
                reason = f"no node keeps a copy of this node's part of the state: {error}"
                saver.events.write("message", reason, None)
        self._is_unserved = server is None
        saver.channel.put(f"shards/{who.node}", json.dumps(server).encode())

    def _partner(self) -> dict[str, Any] | None:
        """The node before this one, of whose part this node's writer makes a copy."""
        saver, who = self._saver, self._saver.environment
        if saver.writer is None or not self._keeps_copies(saver.writer):
            return None
        node = (who.node - 1) % who.nodes
        server = json.loads(saver.channel.read(f"shards/{node}", f"where the part of node {node} is read"))
        found = {"server": server, "node": node, "events": str(saver.events.path or ""), "rank": saver.group.rank}
        return found if server is not None else None

    def _keeps_copies(self, writer: WriterClient) -> bool:
        """This rank is the one that asks its node's writer for copies."""
        return self._saver.partner_copies and self._saver.environment.nodes > 1 and writer.share == 0

    def _borrow(
        self, draft: Manifest, plan: ShardPlan, layout: Layout | None
    ) -> tuple[int, dict[str, tuple[int, int]], str]:
        """The node's buffer, where this rank's files go in it, and why there is none."""
        writer, rank = self._saver.writer, self._saver.group.rank
        if writer is None:
            return -1, {}, "there is no launcher that runs a writer"
        first = rank - writer.share
        local = plan.sizes[first : first + writer.shares]
        files, end = {shard_plan.file_name(rank): (sum(local[: writer.share]), plan.sizes[rank])}, sum(local)
        if layout is not None:  # last, as their sizes change
            files |= {shard_plan.METADATA: (end, len(plan.metadata)), STATE: (end + len(plan.metadata), layout.bytes)}
            end += len(plan.metadata) + layout.bytes
        try:
            shares = (writer.share, writer.shares)
            fd, _ = writer.begin(replace(draft, bytes=end), self._saver.saves, *shares, digest="", copies=1)
        except (OSError, SnapshotRefused) as error:
            return -1, {}, str(error)
        return fd, files, ""

    def _content(self, name: str, plan: ShardPlan, layout: Layout | None) -> Any:
        if name == shard_plan.METADATA:
            return iter([plan.metadata])
        if name == STATE and layout is not None:
            small = io.BytesIO()
            layout.write(small.write)
            return iter([small.getbuffer()])
        return plan.content()

    def _write(
        self, draft: Manifest, token: str, plan: ShardPlan, layout: Layout | None, why: str, start: float
    ) -> bool:
        """All ranks write their files; rank 0 commits them."""
        saver, group = self._saver, self._saver.group
        names = [shard_plan.file_name(group.rank), *((shard_plan.METADATA, STATE) if layout is not None else ())]
        contents = {name: shard_files.stream(self._content(name, plan, layout)) for name in names}
        key, what = f"part/{saver.saves}", f"its part of the checkpoint of step {draft.step}"
        if group.rank != 0:
            folder = saver.channel.on_rank0(key, "the staging directory", dict)["folder"]
            if folder:
                assert saver.directory is not None
                part = shard_files.write_other_part(saver.directory, draft, token, group.rank, contents)
                saver.channel.collect(key, json.dumps(part).encode(), what)
            return False
        opened = False

        def fill(staging: Staging) -> dict[str, FileState]:
            nonlocal opened
            opened = True
            saver.channel.on_rank0(key, what, lambda: {"folder": str(staging.path)})
            own = json.dumps(shard_files.write_part(staging.path, contents)).encode()
            every = [json.loads(each) for each in saver.channel.collect(key, own, what)]
            return shard_files.merge({f"rank {rank}": part for rank, part in enumerate(every)})

        saved = saver.write(draft, lambda path: checkpoint_files.write_files(path, draft, fill, token), why, start)
        if not opened:
            saver.channel.on_rank0(key, what, lambda: {"folder": ""})
        return saved
