"""Calls of `train` again in the same process: which scripts allow that, and what is put back before.

A process that stays meets new ones, which run the script from its beginning. So both must make the same calls to one
another up to `run`: a new process makes the group and its DistributedDataParallel modules, a process that stays makes
them again. A script that does more with the other ranks before `run` would leave one side waiting for ever, and objects
that hold a process group of the round before would use it. Such scripts change their ranks by restarts, as without
`run`, with one sentence in the job's log.
"""

from __future__ import annotations

import gc
import traceback
from collections.abc import Callable, Collection, Mapping
from typing import Any, TypeVar

import torch
from torch.amp import GradScaler
from torch.nn import Module
from torch.optim import Optimizer
from torch.utils.data import DistributedSampler

from elasticd.checkpointing.state import sharded, training_state
from elasticd.errors import Reason, RoundChanged
from elasticd.process_group import DefaultGroup
from elasticd.rejoin.data_parallel import DataParallelModules
from elasticd.rejoin.launch_channel import NoLaunchChannel
from elasticd.sampler import has_sampler_with_given_rank

T = TypeVar("T")
_DEVICE_ERRORS = ("CUDA error", "HIP error")
"""Errors of a kernel, which every later call for the device raises again."""

NOTHING_TO_RESTORE = "nothing is attached, or there is no checkpoint directory"


def reason_against_group(modules: DataParallelModules, group: DefaultGroup, collectives: int) -> Reason:
    """Why this process cannot stay when the ranks change, "" if it can, by the calls of the script before `run`.

    `collectives`: those of the script, -1 unknown.
    """
    from torch.distributed.distributed_c10d import _world

    if not group.created_by_join:
        return "the script makes the process group itself, before elasticd.init()"
    if group.number > 1:
        return "this process has had another session before, with which a new process would begin"
    if len(_world.pg_map) > 1:
        return "the script makes another process group before session.run(): make it in what run() calls"
    if has_sampler_with_given_rank():
        return "an ElasticBatchSampler is given a rank before session.run(): leave rank= and world_size= out"
    if collectives != modules.collectives:
        return "the script uses collectives before session.run(): a new process would wait for the others in them"
    return modules.reason_against()


def reason_against_state(attached: Mapping[str, Any], modules: DataParallelModules) -> Reason:
    """The same by what is attached."""
    from torch.distributed import ProcessGroup

    if names := sharded.names_saved_in_shards(attached):
        return f"the state of {', '.join(names)} is divided among the ranks"
    for name, obj in attached.items():
        if not isinstance(obj, Module):
            continue
        wrapper = training_state.find_ddp(obj)
        if wrapper is not None and not modules.knows(wrapper):
            return f"{name} was made before elasticd.init()"
        for inner in training_state.unwrap(obj).modules():
            if any(isinstance(value, ProcessGroup) for value in vars(inner).values()):
                return f"{type(inner).__name__} in {name} holds a process group"
    return ""


def reason_against_objects(world_size: int) -> Reason:
    """The same by what the script has made for this rank: its share of the samples, or its place in a mesh."""
    from torch.distributed.device_mesh import DeviceMesh

    for obj in gc.get_objects():
        if issubclass(type(obj), (DistributedSampler, DeviceMesh)):
            ranks = getattr(obj, "num_replicas", world_size)
            if ranks > 1 or ranks == world_size:
                return f"a {type(obj).__name__} is made before session.run(), for one rank: make it in what run() calls"
    return ""


def run(train: Callable[[], T], launch: NoLaunchChannel, change_round: Callable[[str], None]) -> T:
    """Call `train` until it ends in a round whose ranks do not change, and return what it returns.

    `change_round` gets the reason why this process cannot stay, "" if `train` has shown none.
    """
    while True:
        try:
            result = train()
        except BaseException as error:
            if not (isinstance(error, Exception | RoundChanged) and launch.ask_if_change_caused(error)):
                launch.leave_train()
                raise
            why = device_failure(error)
            clear_frames(error)
        else:
            if launch.leave_train():
                return result
            why = ""
        change_round(why)


def device_failure(error: BaseException) -> Reason:
    """Return the first line of an error after which a device can do nothing more for this process, "" for others."""
    seen: BaseException | None = error
    while seen is not None:
        text = str(seen)
        if isinstance(seen, RuntimeError) and any(words in text for words in _DEVICE_ERRORS):
            return text.splitlines()[0]
        seen = seen.__cause__ or seen.__context__
    return ""


def is_restored(attached: Mapping[str, Any], optional: Collection[str], module: Any) -> bool:
    """Every state holds all parameters of a DistributedDataParallel, and its buffers unless each forward pass sends
    them.
    """
    inner = training_state.unwrap(module)
    if not any(training_state.unwrap(obj) is inner for name, obj in attached.items() if name not in optional):
        return False
    held = set(map(id, inner.state_dict(keep_vars=True).values()))
    sends = getattr(module, "forward_sync_buffers", getattr(module, "broadcast_buffers", False))
    return all(id(tensor) in held for tensor in (*inner.parameters(), *(() if sends else inner.buffers())))


def clear_frames(error: BaseException) -> None:
    """Drop what the frames have held through which an error was raised: iterators, outputs, groups of the round."""
    seen: BaseException | None = error
    while seen is not None:
        traceback.clear_frames(seen.__traceback__)
        seen = seen.__cause__ or seen.__context__


class EntryState:
    """State that no checkpoint holds, as this process had it before `train`: modes, frozen parameters, random state."""

    def __init__(self, attached: Mapping[str, Any], device: torch.device) -> None:
        self._device = device
        self._random_state = training_state.random_state(device)
        self._is_grad_enabled = torch.is_grad_enabled()
        self.keep(attached)

    def keep(self, attached: Mapping[str, Any]) -> None:
        """Objects that `train` attaches: their state as they were then."""
        self._objects = list(attached.values())
        modules = [obj for obj in self._objects if isinstance(obj, Module)]
        self._training = [(inner, inner.training) for module in modules for inner in module.modules()]
        self._trained = [
            (parameter, parameter.requires_grad) for module in modules for parameter in module.parameters()
        ]

    def put_back(self) -> None:
        """A rank without a random state in the checkpoint begins with this one, as a new process does."""
        torch.set_grad_enabled(self._is_grad_enabled)
        for module, training in self._training:
            module.training = training
        for parameter, requires_grad in self._trained:
            parameter.requires_grad_(requires_grad)
        for obj in self._objects:
            if isinstance(obj, Module | Optimizer):
                obj.zero_grad(set_to_none=True)
            elif isinstance(obj, GradScaler):
                obj._per_optimizer_states.clear()
        training_state.set_random_state(self._random_state, self._device)
