"""The way of a state that some ranks hold in their processes to those that lack it, without a copy in between.

The small part, Python values and small tensors, goes from the first holder to all ranks: a file like that of a whole
state, with holes in place of the large tensors. So random states, buffers, the sampler and all the rest are loaded on
every rank as from any other state, also by the holders. Large tensors go from a holder's objects into those of a rank
that lacks them, one after another; several holders share the work. A holder's own are not touched.

All ranks have to be ready before the first tensor is sent: one that raises would leave another one waiting for ever.
And before any state is given up for this one: it may have no place in the objects of the others.
"""

from __future__ import annotations

import json
import os
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist

from elasticd.channel import Message
from elasticd.checkpointing.at_fault.held_commit import HeldCommit
from elasticd.checkpointing.choice import Choice, OpenState
from elasticd.checkpointing.context import SaveContext
from elasticd.checkpointing.state import in_place, training_state
from elasticd.checkpointing.state.in_place import PiecesByOffset
from elasticd.checkpointing.state.layout import write_packed
from elasticd.checkpointing.state.training_state import StateDict, StorageAddresses
from elasticd.errors import Reason
from elasticd.process_group import host_bytes

_TENSORS_AT_ONCE = 8
"""The tensors that are on their way from one rank to another."""


class ProcessState:
    """One rank's part of a restore from processes. `held`: the state of its own, if it holds one."""

    def __init__(self, context: SaveContext, opened: OpenState, held: HeldCommit | None) -> None:
        self._context, self._opened, self._held = context, opened, held
        self._spans: list[tuple[int, int]] = []
        """Offset and size of each large tensor in the file."""
        self._pieces: PiecesByOffset = {}
        """The memory in this rank's objects for each tensor that they load."""
        self._replace: Callable[[], None]
        self._targets: PiecesByOffset = {}
        """The same, and mapped memory for the tensors that they do not."""

    def to_message(self) -> Message:
        """This rank's word about it."""
        return {} if self._held is None else self._held.to_message()

    def open_small_part(self, choice: Choice) -> None:
        """Give every rank the small part. All ranks call it. Raises OSError."""
        data = b""
        if self._context.group.rank == choice.holder_ranks[0]:
            assert self._held is not None
            layout = self._held.layout
            self._spans = [(offset, storage.nbytes()) for offset, storage in layout.shared_storages]
            data = json.dumps(self._spans).encode() + b"\n" + layout.pack_unshared()
        spans, _, packed = self._broadcast(data, choice.holder_ranks[0]).partition(b"\n")
        self._spans = [(offset, size) for offset, size in json.loads(spans)]
        self._opened.fd = os.memfd_create("elasticd-process", os.MFD_CLOEXEC)
        os.ftruncate(self._opened.fd, choice.manifest.bytes)
        write_packed(self._opened.fd, packed)

    def _broadcast(self, data: bytes, sender: int) -> bytes:
        group = self._context.group
        if group.world_size == 1:
            return data
        size = torch.tensor([len(data)], device=group.device)
        dist.broadcast(size, src=sender)
        is_sender = group.rank == sender
        sent = torch.frombuffer(bytearray(data), dtype=torch.uint8) if is_sender else torch.empty(0, dtype=torch.uint8)
        sent = sent.to(group.device).resize_(int(size))
        dist.broadcast(sent, src=sender)
        return data if is_sender else bytes(host_bytes(sent))

    def reason_against(self, attached: Mapping[str, Any]) -> Reason:
        """Why this rank cannot receive the state into these objects, "" if it can. Nothing is changed yet."""
        try:
            content = self._opened.load()
            self._pieces, self._replace = in_place.find_places(self._opened.fd, content, attached)
            self._targets = {**self._mapped_storages(content), **self._pieces}
        except Exception as error:  # noqa: BLE001 - state_dict() of any object, or a state that cannot be loaded
            return f"{type(error).__name__}: {error}"
        sizes = {offset: target.nbytes for offset, target in self._targets.items()}
        wrong = [offset for offset, size in self._spans if sizes.get(offset) != size]
        return f"{len(wrong)} of {len(self._spans)} large tensors have no place" if wrong else ""

    def receive(self, choice: Choice) -> StorageAddresses:
        """Put what the attached objects load into its place, as `in_place.read` does. All ranks call it."""
        self._exchange_large(choice)
        large = {offset for offset, _ in self._spans}
        small = {offset: piece for offset, piece in self._pieces.items() if offset not in large}
        in_place.read_pieces(self._opened.fd, small)
        self._replace()
        return frozenset(piece.untyped_storage().data_ptr() for piece in self._pieces.values())

    def _mapped_storages(self, content: StateDict) -> dict[int, torch.Tensor]:
        """The memory of each tensor in the mapped state: for those that have no place in an object."""
        offset_of, found = in_place.make_offset_lookup(self._opened.fd), {}
        for tensor in training_state.tensors(content):
            storage = tensor.untyped_storage()
            if (offset := offset_of(storage.data_ptr())) is not None:
                found[offset] = in_place.bytes_of_storage(storage)
        return found

    def _exchange_large(self, choice: Choice) -> None:
        """Fill the large targets."""
        group, holders, targets = self._context.group, choice.holder_ranks, self._targets
        receivers = [rank for rank in range(group.world_size) if rank not in holders]
        sources = {rank: holders[at % len(holders)] for at, rank in enumerate(receivers)}
        if group.rank in holders:
            assert self._held is not None
            mine = dict(self._held.layout.shared_storages)
            self._copy_own(mine, targets)
            to = [rank for rank, source in sources.items() if source == group.rank]
            pieces = [(in_place.bytes_of_storage(mine[offset]), rank) for offset, _ in self._spans for rank in to]
            _send_or_receive(dist.isend, pieces)
        else:
            _send_or_receive(dist.irecv, [(targets[offset], sources[group.rank]) for offset, _ in self._spans])

    def _copy_own(self, mine: Mapping[int, torch.UntypedStorage], targets: Mapping[int, torch.Tensor]) -> None:
        """Copy what this rank holds elsewhere than in the objects that load it."""
        for offset, _ in self._spans:
            if mine[offset].data_ptr() != targets[offset].data_ptr():
                targets[offset].copy_(in_place.bytes_of_storage(mine[offset]))


def _send_or_receive(operation: Any, pieces: list[tuple[torch.Tensor, int]]) -> None:
    """Send or receive them in this order, a few at a time."""
    under_way: deque[Any] = deque()
    for piece, rank in pieces:
        if len(under_way) == _TENSORS_AT_ONCE:
            under_way.popleft().wait()
        under_way.append(operation(piece, rank))
    for work in under_way:
        work.wait()
