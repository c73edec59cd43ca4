"""States in the memory of the job's nodes, as the ranks of a new round find them, and the way to the files of one.

A node holds whole states (DDP), or its part of a sharded state and a copy of another node's part. A sharded state can
be resumed from if the nodes of the round hold all its files together.

Choosing among them needs no trust in a node: each describes what it holds, rank 0 merges the descriptions, and all
ranks read the result. A node that dies between the description and the reading makes the reading fail on some rank, all
ranks agree that it has failed, and the next state is tried.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property

from elasticd.channel import Message
from elasticd.checkpointing.memory import transfer
from elasticd.checkpointing.memory.buffers import SaveKey, Snapshot
from elasticd.checkpointing.memory.shard_server import ServerAddress, ShardClient, own_address_toward
from elasticd.checkpointing.memory.writer_client import SnapshotRefused, WriterClient
from elasticd.checkpointing.state.shard_plan import ReadRange, map_file
from elasticd.checkpointing.storage.manifest import STATE, Manifest, shard_names
from elasticd.errors import CheckpointError, Reason
from elasticd.process_group import WorkerEnvironment

_READ_AHEAD_BYTES = 4 << 20


@dataclass
class HeldState:
    """One state, and the nodes with its files."""

    snapshot: Snapshot  #: the snapshot of the node that holds state.pt, if any does
    owners: dict[str, list[int]] = field(default_factory=lambda: defaultdict(list))
    """The nodes that hold a file of a sharded state as a part of their own."""
    copy_holders: dict[str, list[int]] = field(default_factory=lambda: defaultdict(list))
    """The nodes that hold a copy of it."""
    holder_ranks: list[int] = field(default_factory=list)
    """The ranks that hold it in their process; none for one in memory."""

    @cached_property
    def holders(self) -> dict[str, list[int]]:
        """All that hold a file; none of a state that is not sharded."""
        return {name: self.owners[name] + self.copy_holders[name] for name in {*self.owners, *self.copy_holders}}

    @property
    def missing_files(self) -> list[str]:
        """Files that no node holds."""
        if not self.holders:
            return []
        return [name for name in shard_names(self.snapshot.draft.world_size) if not self.holders.get(name)]

    @property
    def copy_only_files(self) -> list[str]:
        """Files of which there is only a copy: their node is lost."""
        return sorted(name for name in self.holders if not self.owners.get(name))


def find_alike(held: list[Snapshot], draft: Manifest) -> Snapshot | None:
    """The newest whole state of the same step; it differs in little."""
    step = (draft.round, draft.step, draft.bytes)
    alike = [
        snapshot
        for snapshot in held
        if not snapshot.files and (snapshot.draft.round, snapshot.draft.step, snapshot.draft.bytes) == step
    ]
    return max(alike, key=lambda each: each.save_number, default=None)


def piece_checksums(draft: Manifest, held: list[Snapshot], writer: WriterClient | None) -> list[str]:
    """Those of the pieces of a state of the same step in this node's memory, none without one."""
    alike = find_alike(held, draft)
    if alike is None or writer is None:
        return []
    try:
        fd, _, _ = writer.open_buffer(alike.key)
        with contextlib.closing(os.fdopen(fd, "rb", 0)):
            return transfer.piece_checksums(fd, draft.bytes)
    except (OSError, SnapshotRefused):
        return []


def newest_first_key(state: HeldState) -> tuple[int, int, int, int]:
    """The order from the newest one on; of the same step that of the most processes, which takes no time."""
    round, number = state.snapshot.key
    return -round, -state.snapshot.draft.step, -len(state.holder_ranks), -number


def node_message(found: list[Snapshot], writer: WriterClient, who: WorkerEnvironment) -> Message:
    """This node's states, for `merge_messages`."""
    server = None
    if who.nodes > 1 and any(snapshot.files for snapshot in found):
        with contextlib.suppress(OSError, SnapshotRefused):
            server = serve_shards(writer)
    snapshots = [snapshot.to_json().decode() for snapshot in found]
    return {"node": who.node, "server": server, "held": snapshots}


def serve_shards(writer: WriterClient) -> ServerAddress:
    """The address at which other nodes of this round read this one's shards. Raises SnapshotRefused, OSError."""
    return writer.serve_shards(own_address_toward(os.environ["MASTER_ADDR"]))


def merge_messages(every: list[bytes]) -> tuple[list[HeldState], dict[int, ServerAddress]]:
    """Return the states that the nodes have together, newest first, and where each node is read. Answers of another
    version are left out.
    """
    states: dict[tuple[int, int, int, int], HeldState] = {}
    servers: dict[int, ServerAddress] = {}
    for message in every:
        try:
            answer = json.loads(message or b"{}")
            node, snapshots = (
                answer.get("node", 0),
                [Snapshot.from_json(data.encode()) for data in answer.get("held", [])],
            )
        except (ValueError, KeyError, TypeError):
            continue  # of another version
        if answer.get("server") is not None:
            servers[node] = answer["server"]
        for snapshot in snapshots:
            key = (*snapshot.key, snapshot.draft.step, snapshot.draft.world_size)
            state = states.setdefault(key, HeldState(snapshot))
            if STATE in snapshot.files:
                state.snapshot = snapshot
            for name in snapshot.files:
                (state.copy_holders if snapshot.is_copy else state.owners)[name].append(node)
    return [states[key] for key in sorted(states, reverse=True)], servers


class ShardsInMemory:
    """The files of the chosen state for one rank: those of its node are mapped, others are read from their nodes."""

    def __init__(
        self,
        key: SaveKey,
        files: Mapping[str, list[int]],
        servers: Mapping[int, ServerAddress],
        writer: WriterClient | None,
        who: WorkerEnvironment,
    ) -> None:
        """`files`: the nodes that hold each of them; `servers`: the address at which each node is read."""
        self._key, self._nodes, self._servers, self._writer = key, files, servers, writer
        self._whose, self._node = (who.job, who.run), who.node
        self._remote: dict[int, ShardClient] = {}

    def check_readable(self) -> Reason:
        """Why this rank cannot read all files, "" if it can."""
        try:
            for nodes in self._nodes.values():
                if not self._is_here(nodes):
                    self._connect(nodes[0])
        except (OSError, CheckpointError) as error:
            return str(error)
        return ""

    @contextlib.contextmanager
    def open(self, name: str) -> Iterator[ReadRange]:
        """Open a file as `shard_plan.load_shards` needs it. Raises OSError, CheckpointError."""
        nodes = self._nodes[name]
        if self._is_here(nodes):
            assert self._writer is not None
            try:
                fd, start, size = self._writer.open_buffer(self._key, name)
            except SnapshotRefused as refused:
                raise CheckpointError(str(refused)) from None
            try:
                read_range = map_file(fd, start, size)
            finally:
                os.close(fd)
        else:
            read_range = _read_ahead(self._connect(nodes[0]), name)
        yield read_range

    def copy_to_file(self, name: str) -> int:
        """A file of its own with the content of a small one; returns the descriptor."""
        fd = os.memfd_create("elasticd-received", os.MFD_CLOEXEC)
        try:
            with self.open(name) as read_range, open(fd, "wb", closefd=False) as file:
                file.write(read_range(0, None))
        except BaseException:
            os.close(fd)
            raise
        return fd

    def close(self) -> None:
        for node in self._remote.values():
            node.close()
        self._remote.clear()

    def _is_here(self, nodes: list[int]) -> bool:
        return self._writer is not None and self._node in nodes

    def _connect(self, node: int) -> ShardClient:
        if node not in self._remote:
            if node not in self._servers:
                raise CheckpointError(f"node {node} does not serve what it has in memory")
            try:
                self._remote[node] = ShardClient(self._servers[node], *self._whose, self._key)
            except OSError as error:
                raise CheckpointError(f"node {node} cannot be reached: {error}") from error
        return self._remote[node]


def _read_ahead(remote: ShardClient, name: str) -> ReadRange:
    """Pieces of a file in ascending order: small ones are read together."""
    end = remote.file_size(name)
    first, ahead = 0, memoryview(b"")

    def read_range(start: int, size: int | None) -> memoryview:
        nonlocal first, ahead
        size = end - start if size is None else size
        if not first <= start <= start + size <= first + len(ahead):
            ahead = memoryview(bytearray(max(size, min(_READ_AHEAD_BYTES, end - start))))
            remote.read(name, start, ahead)
            first = start
        return ahead[start - first : start - first + size]

    return read_range
