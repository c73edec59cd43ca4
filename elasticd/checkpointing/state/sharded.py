"""Sharded state: what of the attached objects is saved by torch.distributed.checkpoint (DCP), and how it is loaded.

A session is sharded if a module has DTensor parameters (FSDP2, HSDP, tensor parallelism) or an optimizer keeps a part
of its state on each rank (ZeroRedundancyOptimizer). Then all modules and optimizers are in DCP's files, an optimizer's
state by the names of its parameters, as `get_optimizer_state_dict` has it; everything else is in state.pt.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch.nn import Module, Parameter
from torch.optim import Optimizer

from elasticd.checkpointing.state import training_state
from elasticd.checkpointing.state.training_state import StateDict
from elasticd.checkpointing.storage.manifest import CHECKSUM_ALGORITHM, Checksum
from elasticd.errors import CheckpointError, CheckpointRefused, UsageError

if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import Metadata
from elasticd.process_group import host_bytes

NAMES_KEY = "sharded"
"""Key in elasticd's own part of state.pt: the objects that are in DCP's files."""
STATE_KEY, GROUPS_KEY = "state", "param_groups"
"""Keys in an optimizer's state, as torch names them."""


def check_mesh(name: str, obj: Any, world_size: int) -> None:
    """Raises UsageError for a module that would not be saved or loaded whole."""
    fsdp = getattr(sys.modules.get("torch.distributed.fsdp"), "FullyShardedDataParallel", None)
    if fsdp is not None and isinstance(obj, fsdp):
        raise UsageError(f"attach({name}=...): FullyShardedDataParallel is not supported; shard it with fully_shard()")
    if _is_zero_redundancy(obj) and _meshes(obj):
        raise UsageError(
            f"attach({name}=...): its parameters are sharded already, and ZeroRedundancyOptimizer would divide them "
            "again; use the optimizer itself"
        )
    for key, mesh in _meshes(obj):
        ranks = sorted(_root_mesh(mesh).mesh.flatten().tolist())
        if ranks != list(range(world_size)):
            raise UsageError(
                f"attach({name}=...): {key} is sharded over a mesh of ranks {', '.join(map(str, ranks))}, but this job "
                f"has {world_size}: make the mesh with init_device_mesh() from all of them"
            )


def _root_mesh(mesh: Any) -> Any:
    """The mesh that `mesh` is a slice of, or itself."""
    if hasattr(mesh, "_get_root_mesh"):
        return mesh._get_root_mesh()
    from torch.distributed import device_mesh  # up to torch 2.9

    return device_mesh._mesh_resources.get_root_mesh(mesh)


def names_saved_in_shards(attached: Mapping[str, Any]) -> frozenset[str]:
    """The modules and optimizers, if one of them is sharded; else none."""
    large = {name: obj for name, obj in attached.items() if isinstance(obj, (Module, Optimizer))}
    is_sharded = any(
        _is_zero_redundancy(obj) or any(_is_dtensor(parameter) for _, parameter in _named_parameters(obj))
        for obj in large.values()
    )
    return frozenset(large) if is_sharded else frozenset()


def structure_digests(attached: Mapping[str, Any]) -> dict[str, str]:
    """Digests of what has to be the same on all ranks, for each object. Raises UsageError for an optimizer that would
    not be saved whole.
    """
    described: dict[str, Any] = {}
    for name, obj in attached.items():
        if isinstance(obj, Optimizer):
            owners = _parameter_names(obj, name, attached)
            part = _local_optimizer(obj)
            is_own = type(part).state_dict is not Optimizer.state_dict
            if is_own and part.state_dict().keys() != {STATE_KEY, GROUPS_KEY}:
                raise UsageError(
                    f"attach({name}=...): the state_dict() of {type(part).__name__} is not state and param_groups, "
                    "which alone are saved of an optimizer where the state is sharded. If it holds other optimizers, "
                    "attach each of these in its place"
                )
            settings = [
                {key: _without_address(value) for key, value in group.items()} for group in _named_groups(obj, owners)
            ]
            described[name] = [type(obj).__qualname__, settings]
        else:
            parameters = _named_parameters(obj)
            described[name] = [
                [
                    (key, tuple(parameter.shape), parameter.dtype, getattr(parameter, "placements", None))
                    for key, parameter in parameters
                ],
                [(str(mesh), _root_mesh(mesh).mesh.tolist()) for _, mesh in _meshes(obj)],
            ]
    return {
        name: hashlib.sha256(repr(description).encode()).hexdigest()[:16] for name, description in described.items()
    }


def unsharded_digests(attached: Mapping[str, Any], world_size: int) -> dict[str, str]:
    """Digests of each parameter, and each tensor of an optimizer, that is not sharded: one rank's is saved for all of
    them.

    Not of single numbers of an optimizer, and not of what DistributedDataParallel and ZeroRedundancyOptimizer manage.
    Raises CheckpointRefused for what an optimizer keeps of no parameter.
    """

    for name, obj in attached.items():
        state = _local_optimizer(obj).state if isinstance(obj, Optimizer) else ()
        if keys := [key for key in state if not isinstance(key, torch.Tensor)]:
            raise CheckpointRefused(
                f"{type(obj).__name__} keeps {keys[0]!r} in the state of {name}, which is of no parameter: where the "
                "state is sharded, an optimizer's is saved by parameters. Keep it in a parameter group, or in an "
                "attached object with state_dict() and load_state_dict(). Nothing was saved"
            )
    equal = training_state.replicated_storages(attached, world_size)
    digests: dict[str, str] = {}

    def visit(value: Any, path: tuple[str, ...]) -> None:
        if isinstance(value, Mapping):
            for key, item in value.items():
                visit(item, (*path, str(key)))
        elif isinstance(value, torch.Tensor) and not _is_dtensor(value) and value.layout is torch.strided:
            is_number = value.numel() < 2 and not isinstance(value, torch.nn.Parameter)
            if not is_number and value.untyped_storage().data_ptr() not in equal:
                checksum = Checksum(CHECKSUM_ALGORITHM)
                checksum.update(f"{value.dtype} {tuple(value.shape)}".encode())
                checksum.update(host_bytes(value))
                digests[".".join(path)] = str(checksum)[-16:]  # every rank sends those of all its tensors

    own = {name: obj for name, obj in attached.items() if not _is_zero_redundancy(obj)}
    visit(nested_state(own, rank=1), ())  # ranks other than 0 have no buffers in it
    return digests


def nested_state(attached: Mapping[str, Any], rank: int) -> StateDict:
    """The state of this rank, nested as DCP takes it. Its tensors are those that are trained, not copies.

    Buffers and parameter groups are rank 0's: each rank's BatchNorm has seen its own batches.
    """

    gathered: StateDict = {}
    for name, obj in attached.items():
        if not isinstance(obj, Optimizer):
            items = training_state.unwrap(obj).state_dict(keep_vars=True).items()
            own = {
                key: value for key, value in items if rank == 0 or isinstance(value, Parameter) or _is_dtensor(value)
            }
            gathered[name] = {training_state.uncompiled_key(key): value for key, value in own.items()}
            continue
        owners = _parameter_names(obj, name, attached)
        part = _local_optimizer(obj)
        indices = _parameters_by_index(part)
        values = part.state_dict()[STATE_KEY]
        by_name = {owners[id(parameter)]: values[index] for index, parameter in indices.items() if index in values}
        gathered[name] = {STATE_KEY: by_name, **({GROUPS_KEY: _named_groups(obj, owners)} if rank == 0 else {})}
    return gathered


def non_tensor_values(state: Mapping[str, Any]) -> StateDict:
    """The parts of a nested state that are no tensors."""
    return {
        key: non_tensor_values(value) if isinstance(value, Mapping) else value
        for key, value in state.items()
        if not isinstance(value, torch.Tensor)
    }


def make_load_targets(attached: Mapping[str, Any], metadata: Metadata) -> StateDict:
    """The tensors that DCP loads to, nested in the same way: the modules' own, and new ones for optimizers.

    Raises CheckpointError for what the checkpoint lacks.
    """
    from torch.distributed.checkpoint._traverse import set_element

    nested: StateDict = {}
    owners: dict[str, dict[str, torch.Tensor]] = {}
    for name, obj in attached.items():
        if isinstance(obj, Optimizer):
            known = _parameter_names(obj, name, attached)
            owners[name] = {
                known[id(parameter)]: parameter for parameter in _parameters_by_index(_local_optimizer(obj)).values()
            }
            nested[name] = {STATE_KEY: {}, GROUPS_KEY: []}
        else:
            own = training_state.unwrap(obj).state_dict()
            nested[name] = {training_state.uncompiled_key(key): value for key, value in own.items()}
            saved_keys = list(dict.fromkeys(path[1] for path in metadata.planner_data.values() if path[0] == name))
            lacking = [key for key in nested[name] if key not in saved_keys]
            extra = [key for key in saved_keys if key not in nested[name]]
            if lacking or extra:
                what = f"holds nothing for {lacking[0]}" if lacking else f"holds {extra[0]}, which the module lacks"
                raise CheckpointError(f"{name}: the checkpoint {what}")
    for key, path in metadata.planner_data.items():
        if path[0] not in owners:
            continue
        if path[1] == GROUPS_KEY or path[2] in owners[path[0]]:
            parameter = None if path[1] == GROUPS_KEY else owners[path[0]][path[2]]
            set_element(nested, path, _empty_target(parameter, metadata.state_dict_metadata[key]))
    return nested


def divide_whole_state(attached: Mapping[str, Any], content: Mapping[str, Any]) -> StateDict:
    """The argument of `load_attached`, from a checkpoint that has these objects whole. Raises CheckpointError where
    they differ.
    """
    nested: StateDict = {}
    for name, obj in attached.items():
        saved = content[name]
        if not isinstance(obj, Optimizer):
            own = {
                training_state.uncompiled_key(key): value
                for key, value in training_state.unwrap(obj).state_dict().items()
            }
            if other := sorted(own.keys() ^ saved.keys()):
                where = "the module lacks" if other[0] in saved else "the checkpoint lacks"
                raise CheckpointError(f"{name}: {where} {other[0]}")
            nested[name] = {key: _own_shard(saved[key], value) for key, value in own.items()}
            continue
        owners = _parameter_names(obj, name, attached)
        numbers = [number for group in saved[GROUPS_KEY] for number in group["params"]]
        owner = dict(zip(numbers, (parameter for _, parameter in _named_parameters(obj)), strict=False))
        groups = [
            {**group, "params": [owners[id(owner[at])] for at in group["params"] if at in owner]}
            for group in saved[GROUPS_KEY]
        ]
        by_name = {
            owners[id(owner[at])]: {key: _own_shard(value, owner[at]) for key, value in values.items()}
            for at, values in saved[STATE_KEY].items()
            if at in owner
        }
        nested[name] = {STATE_KEY: by_name, GROUPS_KEY: groups}
    return nested


def load_attached(attached: Mapping[str, Any], loaded: Mapping[str, Any]) -> None:
    """Load what DCP has read into the targets. Raises CheckpointError for other parameter groups."""
    for name, obj in attached.items():
        if not isinstance(obj, Optimizer):
            target = training_state.unwrap(obj)
            current = target.state_dict()
            for key in current:
                current[key] = loaded[name][training_state.uncompiled_key(key)]
            target.load_state_dict(current)
            continue
        owners = _parameter_names(obj, name, attached)
        saved, now = loaded[name][GROUPS_KEY], _named_groups(obj, owners)
        if [set(group["params"]) for group in saved] != [set(group["params"]) for group in now]:
            raise CheckpointError(
                f"{name}: the checkpoint has {len(saved)} parameter groups and this optimizer {len(now)}, or they hold "
                "other parameters; make the same groups"
            )
        part = _local_optimizer(obj)
        values = loaded[name][STATE_KEY]
        own_values = {
            index: values[owners[id(parameter)]]
            for index, parameter in _parameters_by_index(part).items()
            if owners[id(parameter)] in values
        }
        settings = [{key: value for key, value in group.items() if key != "params"} for group in saved]
        own, before = part.state_dict()[GROUPS_KEY], [list(group) for group in part.param_groups]
        kept = [{key: value for key, value in group.items() if key not in part.defaults} for group in own]
        groups = [{**group, **new} for group, new in zip(kept, settings, strict=True)]
        part.load_state_dict({STATE_KEY: own_values, GROUPS_KEY: groups})
        training_state.check_optimizer_class(part, before)
        if part is not obj:
            for group, new in zip(obj.param_groups, settings, strict=True):
                group.update(new)


def _named_parameters(obj: Any) -> list[tuple[str, Any]]:
    """The parameters of a module by their keys, with buffers that are sharded; the parameters of an optimizer."""
    if isinstance(obj, Optimizer):
        return [("a parameter", parameter) for group in obj.param_groups for parameter in group["params"]]
    if not isinstance(obj, Module):
        return []
    module = training_state.unwrap(obj)
    buffers = [(key, buffer) for key, buffer in module.named_buffers() if _is_dtensor(buffer)]
    return [(training_state.uncompiled_key(key), tensor) for key, tensor in (*module.named_parameters(), *buffers)]


def _without_address(value: Any) -> Any:
    """Without addresses, which differ between processes."""
    return value if isinstance(value, (bool, int, float, str, list, tuple)) else type(value).__qualname__


def _meshes(obj: Any) -> list[tuple[str, Any]]:
    """Each mesh of its DTensors once, with the key of one of them."""
    meshes: dict[int, tuple[str, Any]] = {}
    for key, parameter in _named_parameters(obj):
        if _is_dtensor(parameter):
            meshes.setdefault(id(parameter.device_mesh), (key, parameter.device_mesh))
    return list(meshes.values())


def _parameter_names(optimizer: Any, name: str, attached: Mapping[str, Any]) -> dict[int, str]:
    """The keys of an optimizer's parameters in the module that it trains. Raises UsageError for any other parameter."""
    known: dict[int, str] = {}
    modules = {module: obj for module, obj in attached.items() if not isinstance(obj, Optimizer)}
    of_module = {module: {id(value): key for key, value in _named_parameters(obj)} for module, obj in modules.items()}
    own = [id(parameter) for group in optimizer.param_groups for parameter in group["params"]]
    used = [module for module, parameters in of_module.items() if any(parameter in parameters for parameter in own)]
    for module in used:
        # With more than one module, by their names, too.
        known |= {at: key if len(used) == 1 else f"{module}.{key}" for at, key in of_module[module].items()}
    if any(parameter not in known for parameter in own):
        raise UsageError(
            f"attach({name}=...): it trains a parameter of no attached module; attach the module, too, and make the "
            "optimizer after fully_shard()"
        )
    return known


def _named_groups(optimizer: Any, owners: Mapping[int, str]) -> list[StateDict]:
    return [
        {**group, "params": [owners[id(parameter)] for parameter in group["params"]]}
        for group in optimizer.param_groups
    ]


def _parameters_by_index(optimizer: Any) -> dict[int, torch.Tensor]:
    """The parameters by their numbers in the optimizer's state_dict()."""
    return dict(enumerate(parameter for group in optimizer.param_groups for parameter in group["params"]))


def _empty_target(parameter: torch.Tensor | None, saved: Any) -> Any:
    """Return an uninitialised tensor for a part of an optimizer's state: sharded as its parameter is, if it has its
    size.

    A scalar, such as a step count, stays on the host; so does a state whose parameter is unknown.
    """
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata  # imported by sharded states only

    if not isinstance(saved, TensorStorageMetadata):
        return None
    dtype = saved.properties.dtype
    if parameter is not None and saved.size == parameter.size():
        return torch.empty_like(parameter, dtype=dtype, requires_grad=False)
    device = "cpu" if parameter is None or not len(saved.size) else parameter.device
    return torch.empty(saved.size, dtype=dtype, device=device)


def _own_shard(saved: Any, like: torch.Tensor) -> Any:
    """This rank's part of a tensor, if that is sharded; in memory of its own."""
    if not isinstance(saved, torch.Tensor):
        return saved
    if not _is_dtensor(like) or saved.shape != like.shape:
        return saved.clone()
    from torch.distributed.tensor import DTensor, Replicate

    mesh, placements = like.device_mesh, like.placements  # type: ignore[attr-defined]
    whole = DTensor.from_local(saved, mesh, [Replicate()] * mesh.ndim, run_check=False)
    return whole.redistribute(placements=placements).clone()  # distribute_tensor() communicates before torch 2.7


def _local_optimizer(optimizer: Any) -> Any:
    """The optimizer that has this rank's part of the state."""
    return optimizer.optim if _is_zero_redundancy(optimizer) else optimizer


def _is_zero_redundancy(obj: Any) -> bool:
    kind = getattr(sys.modules.get("torch.distributed.optim"), "ZeroRedundancyOptimizer", None)
    return kind is not None and isinstance(obj, kind)


def _is_dtensor(value: Any) -> bool:
    kind = getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", None)
    return kind is not None and isinstance(value, kind)
