"""Calls of `train` again in the same process: which scripts allow that, and what is put back before.

A process that stays meets new ones, which run the script from its beginning. So both must make the same calls to one
another up to `run`: a new process makes the group and its DistributedDataParallel modules, a process that stays makes
them again. A script that does more with the other ranks before `run` would leave one side waiting for ever, and objects
that hold a process group of the round before would use it. Such scripts change their ranks by restarts, as without
`run`, with one sentence in the job's log.
"""

from __future__ import annotations

import traceback
from collections.abc import Mapping
from typing import Any

import torch
from torch.amp import GradScaler
from torch.nn import Module
from torch.optim import Optimizer

from elasticd.checkpointing.state import sharded, training_state
from elasticd.data_parallel import DataParallelModules
from elasticd.process_group import DefaultGroup


def reason_against(
    attached: Mapping[str, Any], modules: DataParallelModules, group: DefaultGroup, collectives: int
) -> str:
    """Why this process cannot stay when the ranks change, "" if it can. `collectives`: those of the script so far, -1
    unknown.
    """
    from torch.distributed import ProcessGroup
    from torch.distributed.distributed_c10d import _world

    if group.device.type != "cpu":
        return f"collectives of {group.device.type} devices cannot be left"
    if not group.created:
        return "the script makes the process group itself, before elasticd.init()"
    if len(_world.pg_map) > 1:
        return "the script makes another process group before session.run(): make it in what run() calls"
    if names := sharded.names(attached):
        return f"the state of {', '.join(names)} is divided among the ranks"
    for name, obj in attached.items():
        if not isinstance(obj, Module):
            continue
        wrapper = training_state.parallel(obj)
        if wrapper is not None and not modules.knows(wrapper):
            return f"{name} was made before elasticd.init()"
        for inner in training_state.unwrap(obj).modules():
            if any(isinstance(value, ProcessGroup) for value in vars(inner).values()):
                return f"{type(inner).__name__} in {name} holds a process group"
    if collectives != modules.collectives:
        return "the script uses collectives before session.run(): a new process would wait for the others in them"
    return modules.reason_against()


def clear_frames(error: BaseException) -> None:
    """Drop what the frames have held through which an error was raised: iterators, outputs, groups of the round."""
    seen: BaseException | None = error
    while seen is not None:
        traceback.clear_frames(seen.__traceback__)
        seen = seen.__cause__ or seen.__context__


class EntryState:
    """State that no checkpoint holds, as this process had it before `train`: modes, frozen parameters, random state."""

    def __init__(self, attached: Mapping[str, Any], device: torch.device) -> None:
        self._attached, self._device = attached, device
        modules = [obj for obj in attached.values() if isinstance(obj, Module)]
        self._training = [(inner, inner.training) for module in modules for inner in module.modules()]
        self._trained = [
            (parameter, parameter.requires_grad) for module in modules for parameter in module.parameters()
        ]
        self._random_state = training_state.random_state(device)
        self._is_grad_enabled = torch.is_grad_enabled()

    def put_back(self) -> None:
        """A rank without a random state in the checkpoint begins with this one, as a new process does."""
        torch.set_grad_enabled(self._is_grad_enabled)
        for module, training in self._training:
            module.training = training
        for parameter, requires_grad in self._trained:
            parameter.requires_grad_(requires_grad)
        for obj in self._attached.values():
            if isinstance(obj, Module | Optimizer):
                obj.zero_grad(set_to_none=True)
            elif isinstance(obj, GradScaler):
                obj._per_optimizer_states.clear()
        training_state.set_random_state(self._random_state, self._device)
