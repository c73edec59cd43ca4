"""The state of the attached objects and of every rank's random streams: gathered for a checkpoint, and restored from
it.

Modules are saved without DDP's and torch.compile's wrappers, so a state saved wrapped loads unwrapped and the other way
round. Random states are plain tensors, lists and numbers, so that `torch.load(weights_only=True)` opens them.

What belongs to the state of a job is what the script attaches, and the random streams that its code draws from without
knowing. Both are read by public calls and put into plain containers, for two readers: a person with `torch.load`, and a
later version of elasticd. Wrappers are looked through by what they are, never by their names, so a model that was
compiled at the save and is not at the restore loads without renaming keys.

What divides its state among ranks in a format of its own (engines of DeepSpeed and Megatron) is refused when it is
attached, since a part of a state that looks whole is worse than none.
"""

from __future__ import annotations

import contextlib
import copy
import ctypes
import gc
import inspect
import io
import random
import sys
from array import array
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

import torch
from torch.nn import DataParallel, Module
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from elasticd.errors import CheckpointError, UsageError

StateDict = dict[str, Any]
"""The state of one object, or of several by their names, as torch has it: nested containers, numbers and tensors."""
RandomState = dict[str, Any]
"""The states of a rank's random generators by kind: torch, python, numpy, and the type of its device."""
Notes = list[str]
"""Sentences about what a restore could not use of a state."""
StorageAddresses = frozenset[int]
"""The addresses of storages in memory."""
RESERVED_NAME = "elasticd"
_COMPILED_KEY = "_orig_mod"
_HUGE_PAGE_BYTES = 2 << 20
_MADV_HUGEPAGE = 14
"""MADV_HUGEPAGE of linux/mman.h."""
_FOREIGN_SHARDING_MODULES = (
    *(f"deepspeed.runtime.{module}" for module in ("base_optimizer", "engine", "pipe", "zero")),
    *(f"megatron.core.{module}" for module in ("distributed", "optimizer", "transformer")),
)
"""Modules of engines, models and optimizers that divide the state among ranks without DTensor."""
RANK_INDEPENDENT_ATTRIBUTE = "rank_independent"
"""An attribute that is True of an object whose state any rank may save for all, even where ranks' states differ."""

ONLY_AT_SAVES_ATTRIBUTE = "only_at_saves"
"""An attribute that is True of an object whose state_dict() calls the script, which does not expect it at each step."""


@contextlib.contextmanager
def no_garbage_collection() -> Iterator[None]:
    """10,000 parameters are a million new objects and none of them garbage; looking for it took half of a restore."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def as_attachable(name: str, obj: Any) -> Any:
    """The object that is saved and loaded: the given one, except for a generator.

    Raises UsageError for an object that cannot be saved and loaded.
    """
    if isinstance(obj, torch.Generator):
        return GeneratorState(obj)
    if name == RESERVED_NAME:
        raise UsageError(f"attach({name}=...): that name is elasticd's own part of a checkpoint; choose another")
    if isinstance(obj, type) and not inspect.ismethod(getattr(obj, "state_dict", None)):
        raise UsageError(f"attach({name}=...): {obj.__name__} is a class: attach the object that the script uses")
    foreign = next(
        (kind.__module__ for kind in type(obj).__mro__ if kind.__module__.startswith(_FOREIGN_SHARDING_MODULES)), ""
    )
    if foreign:
        raise UsageError(
            f"attach({name}=...): {type(obj).__name__} is {foreign.partition('.')[0]}'s, which keeps a part of the "
            "state on each rank in a format of its own; save it with its own checkpoints, or train with fully_shard()"
        )
    missing = [f"{name}()" for name in ("state_dict", "load_state_dict") if not callable(getattr(obj, name, None))]
    if missing:
        raise UsageError(
            f"attach({name}=...): {type(obj).__name__} has no {' and no '.join(missing)}. What the script changes "
            "while it trains belongs into an object of a class with both methods, which return and take a dict; what "
            "is the same at each start, such as settings, needs no checkpoint"
        )
    return obj


class GeneratorState:
    """The state of a torch.Generator, in a form in which any rank can save it at a fault: bytes and no tensor."""

    def __init__(self, generator: torch.Generator) -> None:
        self._generator = generator

    def state_dict(self) -> StateDict:
        offered = self._generator.get_state()
        return {"state": ctypes.string_at(offered.data_ptr(), offered.nbytes)}

    def load_state_dict(self, saved: StateDict) -> None:
        self._generator.set_state(torch.frombuffer(bytearray(saved["state"]), dtype=torch.uint8))

    def load_state_dicts(self, saved: list[StateDict], rank: int, world_size: int) -> str:
        """A rank that has none keeps its own, as of torch's default generator."""
        if rank < len(saved):
            self.load_state_dict(saved[rank])
            return ""
        return f"there is no state for rank {rank}, which keeps its own"


def unwrap(obj: Any) -> Any:
    """The module inside DistributedDataParallel, DataParallel and torch.compile, however nested; others unchanged."""
    while isinstance(obj, Module):
        if isinstance(obj, (DistributedDataParallel, DataParallel)):
            obj = obj.module
        elif _COMPILED_KEY in obj._modules:
            obj = obj._modules[_COMPILED_KEY]
        else:
            break
    return obj


def find_ddp(obj: Any) -> DistributedDataParallel | None:
    """The DistributedDataParallel that `obj` is, or that torch.compile has wrapped."""
    while isinstance(obj, Module) and not isinstance(obj, DistributedDataParallel) and _COMPILED_KEY in obj._modules:
        obj = obj._modules[_COMPILED_KEY]
    return obj if isinstance(obj, DistributedDataParallel) else None


def collect_states(attached: Mapping[str, Any]) -> StateDict:
    """The state dict of every attached object."""
    return {name: _with_uncompiled_keys(unwrap(obj).state_dict()) for name, obj in attached.items()}


def replicated_storages(attached: Mapping[str, Any], world_size: int) -> StorageAddresses:
    """The addresses of the storages that should be bit for bit equal on all ranks: parameters that
    DistributedDataParallel trains, and what an optimizer of such parameters keeps for them.

    Buffers are not: each rank's BatchNorm has seen its own batches.
    """
    parameters: dict[int, torch.Tensor] = {}
    for obj in map(find_ddp, attached.values()):
        if obj is not None and obj.process_group.size() == world_size:
            trained = [
                parameter for name, parameter in obj.module.named_parameters() if name not in obj.parameters_to_ignore
            ]
            parameters |= {id(parameter): parameter for parameter in trained if parameter.requires_grad}
    tensors = list(parameters.values())
    for obj in attached.values():
        # ZeroRedundancyOptimizer shards its state and has a state_dict() of its own.
        if isinstance(obj, Optimizer) and type(obj).state_dict is Optimizer.state_dict:
            for parameter, values in obj.state.items():
                if id(parameter) in parameters and isinstance(values, dict):
                    tensors_kept = [value for value in values.values() if isinstance(value, torch.Tensor)]
                    tensors += [part for value in tensors_kept for part in component_tensors(value)]
    return frozenset(tensor.untyped_storage().data_ptr() for tensor in tensors)


def load_attached(
    attached: Mapping[str, Any],
    state: Mapping[str, Any],
    optional: Collection[str] = (),
    read: Callable[[], Collection[int]] = tuple,
) -> Notes:
    """Load every attached object; returns sentences about the parts of the checkpoint that were not used.

    `optional` are the names of which the checkpoint may hold nothing. `read` returns the addresses of the storages that
    are not mapped, which objects may keep; it may read into the objects' own.
    """
    absent = [name for name in attached if name not in state]
    missing = [name for name in absent if name not in optional]
    if missing:
        names = ", ".join(name for name in state if name != RESERVED_NAME)
        raise CheckpointError(
            f"the checkpoint holds nothing for {', '.join(missing)}, only {names}; attach under the names it was saved "
            "with, start in another directory, or attach what is new with optional=True"
        )
    in_place = read()
    for name, obj in attached.items():
        if name in state:
            _load_one(unwrap(obj), state[name], in_place)
    extra = [name for name in state if name not in attached and name != RESERVED_NAME]
    return [
        *(f"the checkpoint holds nothing for {name}, which is optional and stays as it is" for name in absent),
        *(f"nothing is attached as {name}: that part of the checkpoint was not used" for name in extra),
    ]


def _load_one(target: Any, state: Any, in_place: Collection[int]) -> None:
    """Load a state whose tensors are mapped from a file: modules and optimizers copy them in place; other objects, and
    optimizers that load in a way of their own, as for one inside them, may keep what they get, and get copies. Tensors
    in memory of their own are loaded as they are.
    """
    mapped = storage_addresses(state) - set(in_place)
    if isinstance(target, Module):
        target.load_state_dict(with_compiled_keys(state, target))
        if mapped.isdisjoint(storage_addresses(target.state_dict())):
            return
    elif isinstance(target, Optimizer) and loads_as_usual(target):
        before, settings = dict(target.state), [list(group) for group in target.param_groups]
        target.load_state_dict(state)
        check_optimizer_class(target, settings)
        _replace_mapped(target.state, before, mapped)
        if mapped.isdisjoint(storage_addresses(target.state)):
            return
    elif not mapped and all(tensor.layout is torch.strided for tensor in tensors(state)):
        target.load_state_dict(state)
        return
    target.load_state_dict(with_compiled_keys(_deep_copy(state), target))


def loads_as_usual(optimizer: torch.optim.Optimizer) -> bool:
    """True if its `load_state_dict()` is torch's; it may be a wrapper that has not called torch's `__init__`."""
    load: Any = optimizer.load_state_dict
    return getattr(load, "__func__", load) is Optimizer.load_state_dict


def check_optimizer_class(optimizer: torch.optim.Optimizer, before: list[list[str]]) -> None:
    """Raises CheckpointError where it has loaded the state of an optimizer of another class: its next step would be a
    KeyError. `before` are the names of each group's settings.
    """
    groups = zip(before, optimizer.param_groups, strict=True)
    missing = sorted(
        {
            setting
            for names, group in groups
            for setting in names
            if setting in optimizer.defaults and setting not in group
        }
    )
    if missing:
        state_names = sorted({str(name) for values in optimizer.state.values() for name in values})
        what = f", which keeps {', '.join(state_names)}" if state_names else ""
        raise CheckpointError(
            f"the checkpoint has the state of another optimizer than {type(optimizer).__name__}{what}, and has no "
            f"{', '.join(missing)}: restore into the class that it was saved with, or attach the new optimizer under "
            "another name, with optional=True"
        )


def _replace_mapped(state: Mapping[Any, Any], before: Mapping[Any, Any], mapped: set[int]) -> None:
    """An optimizer keeps the tensors that it loads: replace mapped ones by the tensors it had before, with the new
    values, so that there is never a second copy of its state.
    """
    loaded = [
        (values, key, value, before.get(parameter, {}).get(key))
        for parameter, values in state.items()
        if isinstance(values, dict)
        for key, value in values.items()
        if isinstance(value, torch.Tensor) and storage_addresses(value) & mapped
    ]
    if len(loaded) != len({address for _, _, value, _ in loaded for address in storage_addresses(value)}):
        return  # some of them share memory
    for values, key, value, old in loaded:
        alike = isinstance(old, torch.Tensor) and (old.dtype, old.device) == (value.dtype, value.device)
        if alike and (old.shape, old.stride()) == (value.shape, value.stride()):
            values[key] = old.detach().copy_(value)
        else:
            values[key] = empty_in_huge_pages(value, value.device).copy_(value)


def empty_in_huge_pages(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A new tensor in huge pages where the kernel grants them: page faults are three quarters of the time that a copy
    takes.
    """
    new = torch.empty_like(tensor, device=device, requires_grad=False)
    if new.device.type == "cpu":
        start = -(-new.data_ptr() // _HUGE_PAGE_BYTES) * _HUGE_PAGE_BYTES
        size = (new.data_ptr() + new.nbytes - start) // _HUGE_PAGE_BYTES * _HUGE_PAGE_BYTES
        if size > 0:
            ctypes.CDLL(None).madvise(ctypes.c_void_p(start), ctypes.c_size_t(size), _MADV_HUGEPAGE)
    return new


def _deep_copy(state: Any) -> Any:
    """A deep copy, in which tensors that share memory still do. Torch has none of a compressed sparse tensor (CSR)."""
    if any(component_tensors(tensor)[0] is not tensor for tensor in _tensors(state)):
        return from_bytes(to_bytes(state))  # their classes need not have a clone()
    usual = (torch.strided, torch.sparse_coo)
    return copy.deepcopy(state, {id(tensor): tensor.clone() for tensor in tensors(state) if tensor.layout not in usual})


def storage_addresses(state: Any) -> set[int]:
    """The storages of the dense tensors in nested containers."""
    return {tensor.untyped_storage().data_ptr() for tensor in tensors(state) if tensor.layout is torch.strided} - {0}


def tensors(state: Any) -> Iterator[torch.Tensor]:
    """The tensors in nested containers; in place of one that is made of others, such as of 8 bits, those."""
    for tensor_in in _tensors(state):
        yield from component_tensors(tensor_in)


def _tensors(state: Any) -> Iterator[torch.Tensor]:
    if isinstance(state, torch.Tensor):
        yield state
    elif isinstance(state, (Mapping, list, tuple, set)):
        for value in state.values() if isinstance(state, Mapping) else state:
            yield from _tensors(value)


def component_tensors(tensor: torch.Tensor) -> list[torch.Tensor]:
    """The tensor itself; those in a tensor subclass that wraps others, but a DTensor."""
    if not hasattr(tensor, "__tensor_flatten__") or hasattr(tensor, "_local_tensor"):
        return [tensor]
    return [part for name in tensor.__tensor_flatten__()[0] for part in component_tensors(getattr(tensor, name))]


def local_part(tensor: Any) -> torch.Tensor:
    """This rank's part of a DTensor, with its counter of changes; other tensors as they are."""
    part: torch.Tensor = getattr(tensor, "_local_tensor", tensor)
    return part


def uncompiled_key(key: str) -> str:
    """The name without the wrappers of submodules that were compiled by themselves."""
    return ".".join(part for part in key.split(".") if part != _COMPILED_KEY)


def _with_uncompiled_keys(state: Any) -> Any:
    if isinstance(state, OrderedDict) and any(_COMPILED_KEY in str(key) for key in state):
        return _rename_keys(state, uncompiled_key)
    return state


def with_compiled_keys(state: Any, target: Any) -> Any:
    """The state with the names that a module has whose submodules were compiled by themselves."""
    if not isinstance(target, Module):
        return state
    paths = [*target.state_dict(keep_vars=True), *(name for name, _ in target.named_modules())]
    renamed = {uncompiled_key(path): path for path in paths if _COMPILED_KEY in path}
    return _rename_keys(state, lambda key: renamed.get(key, key)) if renamed else state


def _rename_keys(state: OrderedDict[str, Any], rename: Callable[[str], str]) -> OrderedDict[str, Any]:
    renamed = OrderedDict((rename(key), value) for key, value in state.items())
    metadata = getattr(state, "_metadata", None)
    if metadata is not None:
        # torch keeps the versions of the modules there.
        renamed._metadata = OrderedDict((rename(key), value) for key, value in metadata.items())  # type: ignore[attr-defined]
    return renamed


def load_per_rank(
    objects: Mapping[str, Any], states: Mapping[str, list[Any]], rank: int, world_size: int, optional: Collection[str]
) -> Notes:
    """Load each object's state of this rank; returns sentences about what was not used.

    On another world size an object gets all ranks' states by `load_state_dicts(states, rank, world_size)`, which may
    return such a sentence. Raises CheckpointError where it has no such method.
    """
    notes: list[str] = []
    for name, obj in objects.items():
        if name not in states and name in optional:
            notes.append(f"the checkpoint holds nothing for {name}, which is optional and stays as it is")
        elif name not in states:
            raise CheckpointError(
                f"the checkpoint holds no state of each rank for {name}; attach under the names it was saved with, "
                "start in another directory, or attach what is new with optional=True"
            )
        elif len(states[name]) == world_size:
            obj.load_state_dict(_deep_copy(states[name][rank]))
        elif callable(getattr(obj, "load_state_dicts", None)):
            note = obj.load_state_dicts(_deep_copy(states[name]), rank, world_size)
            notes += [f"{name}: {note}"] if note else []
        else:
            raise CheckpointError(
                f"{name} was saved by {len(states[name])} ranks, and now there are {world_size}: give "
                f"{type(obj).__name__} a method load_state_dicts(states, rank, world_size), or start as many workers"
            )
    extra = [name for name in states if name not in objects]
    return notes + [
        f"nothing is attached per rank as {name}: that part of the checkpoint was not used" for name in extra
    ]


def random_state(device: torch.device) -> RandomState:
    """This rank's random streams: torch's default generator, the accelerator's, python's, and numpy's if imported."""
    version, numbers, gauss = random.getstate()
    # Tensors, since torch.save and torch.load take a list number by number.
    words = torch.frombuffer(array("q", numbers), dtype=torch.int64)
    state: RandomState = {"torch": torch.get_rng_state(), "python": [version, words, gauss]}
    if device.type != "cpu":
        state[device.type] = torch.get_device_module(device).get_rng_state(device)
    if "numpy" in sys.modules:
        name, keys, position, has_gauss, cached = sys.modules["numpy"].random.get_state()
        state["numpy"] = [name, torch.from_numpy(keys.astype("int64")), int(position), int(has_gauss), float(cached)]
    return state


def torch_random_state() -> torch.Tensor:
    """The state of torch's default generator."""
    return torch.get_rng_state()


def undo_seed_draw(before: torch.Tensor) -> None:
    """Back to this state, if a DataLoader's seed is all that was drawn since then."""
    generator = torch.Generator()
    generator.set_state(before)
    torch.empty((), dtype=torch.int64, device="cpu").random_(generator=generator)
    if torch.equal(generator.get_state(), torch.get_rng_state()):
        torch.set_rng_state(before)


def set_random_state(state: Mapping[str, Any], device: torch.device) -> Notes:
    """Restore this rank's random streams; returns sentences about those that could not be restored."""
    unused: list[str] = []
    try:
        version, numbers, gauss = state["python"]
        random.setstate((version, tuple(numbers.tolist()), gauss))
        if "numpy" in state and "numpy" in sys.modules:
            numpy = sys.modules["numpy"]
            name, keys, *rest = state["numpy"]
            numpy.random.set_state((name, numpy.array(keys.tolist(), dtype=numpy.uint32), *rest))
        elif "numpy" in state:
            unused.append("numpy's random state was saved, but numpy is not imported here")
        known = ("python", "torch", "numpy")
        for kind in (kind for kind in state if kind not in known):
            if kind == device.type:
                torch.get_device_module(device).set_rng_state(state[kind], device)
            else:
                unused.append(f"the random state of a {kind} device was saved, but this rank trains on {device.type}")
        if device.type != "cpu" and device.type not in state:
            unused.append(f"no random state of a {device.type} device was saved")
        torch.set_rng_state(state["torch"])
    except (KeyError, TypeError, ValueError, AttributeError, RuntimeError) as error:
        raise CheckpointError(f"the checkpoint's random state cannot be used: {error!r}") from error
    return unused


def to_bytes(state: Any) -> bytes:
    """The state as `torch.save` writes it."""
    buffer = io.BytesIO()
    torch.save(state, buffer)
    return buffer.getvalue()


def from_bytes(data: bytes | bytearray) -> Any:
    """The inverse of `to_bytes`, on the CPU. Only plain data and tensors: received bytes cannot run code."""
    return torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
