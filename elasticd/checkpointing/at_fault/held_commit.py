"""The state of a commit that a process holds in its objects while it goes from one round to the next.

A rank that stays in its process needs no copy of its state: parameters and the optimizer's tensors are those of the
last commit, and the rest is kept as of it (`committed_state`). In the next round the newest state that any process
holds counts like one in memory; ranks that lack it get it from those that have it (`process_state`).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import chain
from typing import Any

from torch.nn import Module
from torch.optim import Optimizer

from elasticd.channel import Message
from elasticd.checkpointing.at_fault.step_ring import Commit
from elasticd.checkpointing.memory.buffers import Snapshot
from elasticd.checkpointing.memory.held_states import HeldState
from elasticd.checkpointing.state import training_state
from elasticd.checkpointing.state.layout import Layout
from elasticd.checkpointing.state.training_state import StateDict, StorageAddresses
from elasticd.checkpointing.storage.manifest import Manifest

_LARGE_BYTES = 64 << 10
"""A smaller tensor is sent with the Python values: to send each by itself takes longer."""
_PROCESS_KEY = "process"


@dataclass(frozen=True, slots=True)
class HeldCommit:
    """The state that a save at the fault would have copied. Its large tensors are those of the attached objects."""

    commit: Commit
    draft: Manifest
    save_number: int  #: as of a state that is saved at a fault
    content: StateDict
    layout: Layout  #: of the content; large tensors are its shared ones

    @property
    def digest(self) -> str:
        """A digest of samples of the large tensors and of all small ones."""
        return f"{self.layout.shared_digest} {self.layout.unshared_checksum}"

    def to_message(self) -> Message:
        """The word for `held_states`, on rank 0."""
        return {_PROCESS_KEY: [self.draft.to_json().decode(), self.save_number, self.layout.shared_digest]}


def large_storages(attached: Mapping[str, Any]) -> StorageAddresses:
    """The addresses of the large tensors that a process keeps: parameters, and what optimizers keep for them."""
    modules = [obj for obj in attached.values() if isinstance(obj, Module)]
    optimizers = [obj for obj in attached.values() if isinstance(obj, Optimizer)]
    kept = chain(
        (parameter for module in modules for parameter in module.parameters()),
        (tensor for optimizer in optimizers for tensor in training_state.tensors(optimizer.state)),
    )
    storages = (tensor.untyped_storage() for tensor in kept)
    return frozenset(storage.data_ptr() for storage in storages if storage.nbytes() >= _LARGE_BYTES)


def decode_held_states(messages: list[bytes]) -> list[HeldState]:
    """The states that processes hold, by each rank's word; the ranks of one hold the same state, by samples of it."""
    states: dict[tuple[int, int, str], HeldState] = {}
    for rank, word in enumerate(messages):
        if described := json.loads(word or b"{}").get(_PROCESS_KEY):
            draft, number, digest = described
            snapshot = Snapshot.of_draft(draft.encode(), number)
            key = (snapshot.draft.round, snapshot.draft.step, digest)
            states.setdefault(key, HeldState(snapshot)).holder_ranks.append(rank)
    return list(states.values())
