"""What a rank cannot save at a fault for its replicas, and what it cannot read, is named."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

from elasticd.checkpointing.manifest import Manifest
from elasticd.checkpointing.object_store import ObjectStore, store_of
from elasticd.checkpointing.restore import _Restore
from elasticd.checkpointing.shard_donor import ShardDonor
from elasticd.errors import CheckpointError


class Counts(torch.optim.Optimizer):
    """Its state counts steps in an int."""

    def step(self, closure: Any = None) -> None:
        for parameter in self.param_groups[0]["params"]:
            self.state[parameter]["step"] = self.state[parameter].get("step", 0) + 1


class Remembers(torch.nn.Linear):
    def get_extra_state(self) -> torch.Tensor:
        return torch.tensor(3.0)

    def set_extra_state(self, state: torch.Tensor) -> None: ...


@pytest.mark.parametrize(
    ("module", "optimizer", "unrecorded"),
    [
        (torch.nn.Linear, torch.optim.AdamW, ""),
        (torch.nn.BatchNorm1d, torch.optim.SGD, ""),
        (torch.nn.Linear, lambda parameters: Counts(parameters, {}), "optimizer.state.weight.step"),
        (Remembers, torch.optim.AdamW, "model._extra_state"),
    ],
    ids=["adamw", "sgd", "a-number", "extra-state"],
)
def test_values_that_are_not_recorded_at_each_step_are_named(module: Any, optimizer: Any, unrecorded: str) -> None:
    model = module(4) if module is torch.nn.BatchNorm1d else module(4, 4)
    made = optimizer(model.parameters())
    model(torch.ones(2, 4)).sum().backward()
    made.step()
    plan: Any = SimpleNamespace(replicas=(0, 1))
    assert ShardDonor(plan, {"model": model, "optimizer": made}).unrecorded == unrecorded


def test_shard_that_cannot_be_read_now_is_no_damage(tmp_path: Path) -> None:
    """A store that does not answer must not cost all checkpoints, and the training."""
    directory = tmp_path / "s3:" / "bucket" / "x"
    directory.mkdir(parents=True)
    sums = {"__0_0.distcp": (100, "sha256:00")}
    manifest = Manifest(1, 2, None, 1, 100, "sha256:00", "j", "r", None, 0.0, files=sums)
    store = store_of(directory)
    assert store is not None
    store.place("r1-s2", manifest)
    channel: Any = SimpleNamespace(collect=lambda key, mine, what: [mine], on_rank0=lambda key, what, decide: decide())
    environment: Any = SimpleNamespace(environment=SimpleNamespace(local_rank=0))
    group: Any = SimpleNamespace(rank=0, world_size=1)
    events: Any = SimpleNamespace(write=mock.Mock())
    restore = _Restore(directory, {}, (), None, environment, group, channel, events)
    restore._fd = os.open(os.devnull, os.O_RDONLY)
    chosen = {"draft": manifest.to_json().decode(), "name": "r1-s2", "step": 2, "number": None}
    full = OSError(28, "No space left on device")
    with (
        mock.patch.object(ObjectStore, "_call", side_effect=full),
        pytest.raises(CheckpointError, match="No space left"),
    ):
        restore._verify_shards(chosen, 0)
    os.close(restore._fd)
    events.write.assert_not_called()
