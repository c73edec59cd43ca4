"""Which ranks can be donors: the rules, each a function that gives the reason against it, or "".

A donor's state has to be that of every rank, and has to be copied as tensors and small objects are.

At a fault the state of the job's last step is taken from a rank that survived, and given to all. That is right only if
every rank, the dead one included, had that very state. The rules ask for proof of it before training begins, since at
the fault there is no time to look, and the only witness may be dead. In doubt a rank is no donor, and the job resumes
from its last save: that costs steps, a wrong donor would cost the run.

Three kinds of proof are accepted:
- DistributedDataParallel keeps parameters equal: the same start, and averaged gradients. So an optimizer that trains
  only what DDP averages keeps an equal state. Hooks that average rarely or keep a state end this proof.
- A small object is equal if its digest equals rank 0's at the fault; a class may declare itself `rank_independent`.
- Buffers that a forward pass changes are kept as they were at the commit, on the device.

Everything else (a state of its own on each rank, tensors in objects of unknown kinds, `state_dict` methods of the
script, tensors that are made of others) is a reason. Each reason is one sentence that names the object; it is shown
once, in the event that says whether states are saved at faults, so that a person can change the script.

On a GPU the processor runs ahead of the device. Rules about it refuse what would be read too early: values of an
optimizer that are no tensors, parameters on two devices, collectives that NCCL aborts so that the device trains on.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.amp import GradScaler
from torch.nn import Module
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau
from torch.optim.swa_utils import AveragedModel

from elasticd.checkpointing.context import SaveContext
from elasticd.checkpointing.state import training_state
from elasticd.checkpointing.state.layout import tensors_by_path
from elasticd.errors import Reason
from elasticd.sampler import ElasticBatchSampler

MAX_GPU_BUFFER_BYTES = 16 << 20
"""The most that a rank's buffers on its GPU may have: several copies of them are kept there."""
MUTABLE_SETTING_REASON = (
    "a parameter group of the optimizer has values that can change in place, such as lr in a tensor"
)


@dataclass(frozen=True)
class _Rank:
    context: SaveContext
    attached: Mapping[str, Any]
    averaged_parameters: Mapping[int, torch.nn.Parameter]

    @property
    def is_alone(self) -> bool:
        """True if no other rank has to be equal: its state is that of the job."""
        return self.context.group.world_size == 1

    @property
    def modules(self) -> dict[str, torch.nn.Module]:
        """The attached modules by name, without the wrappers around them."""
        return {name: training_state.unwrap(obj) for name, obj in self.attached.items() if isinstance(obj, Module)}

    @property
    def optimizers(self) -> list[torch.optim.Optimizer]:
        return [obj for obj in self.attached.values() if isinstance(obj, Optimizer)]

    @property
    def ddp_models(self) -> list[DistributedDataParallel]:
        return [model for obj in self.attached.values() if (model := training_state.find_ddp(obj)) is not None]


def reason_against(
    context: SaveContext, attached: Mapping[str, Any], averaged_parameters: Mapping[int, torch.nn.Parameter]
) -> Reason:
    """Why this rank can never be a donor, "" if it can: by the first rule that applies."""
    rank = _Rank(context, attached, averaged_parameters)
    return next((why for rule in _RULES if (why := rule(rank))), "")


def _no_launcher(rank: _Rank) -> Reason:
    environment = rank.context.environment
    if rank.context.writer is None or not environment.round or "ELASTICD_HEARTBEAT" not in os.environ:
        return "there is no launcher that keeps states in memory"
    return ""


def _sharded_state(rank: _Rank) -> Reason:
    """The rule for sharded states: what a rank has, no other has."""
    return "the state is sharded, and no other rank has this one's part" if rank.context.is_sharded else ""


def _other_objects(rank: _Rank) -> Reason:
    """A state that lacks an object of another rank could not be restored by that rank."""
    of_rank0 = rank.context.attached_on_rank0
    if of_rank0 is None or set(of_rank0) == rank.attached.keys():
        return ""
    return f"it attaches {', '.join(rank.attached)}, and rank 0 {', '.join(of_rank0)}: attach the same on every rank"


def _another_device(rank: _Rank) -> Reason:
    """The rule for devices without the proofs that are used here."""
    device = rank.context.group.device.type
    return "" if device in ("cpu", "cuda") else f"this is built for CPUs and CUDA GPUs, not for {device}"


def _aborted_collectives(rank: _Rank) -> Reason:
    """The kernels of a communicator that is aborted end without the others' part, and the optimizer's step follows."""
    name = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
    if rank.context.group.device.type == "cuda" and os.environ.get(name) in ("1", "2"):
        return f"{name}={os.environ[name]} aborts NCCL's collectives, after which the GPU would train on; 3 does not"
    return ""


def _large_device_buffers(rank: _Rank) -> Reason:
    """The rule for buffers on the GPU, of which copies are kept there at each step."""
    every = [buffer for module in rank.modules.values() for buffer in module.buffers()]
    size = sum(buffer.nbytes for buffer in every if buffer.device.type != "cpu")
    return (
        "" if size <= MAX_GPU_BUFFER_BYTES else f"its buffers have {size >> 20} MB on the GPU, and several copies there"
    )


def _optimizer_ahead_of_gpu(rank: _Rank) -> Reason:
    """An optimizer's numbers are those of the last step that was queued."""
    if rank.context.group.device.type == "cpu":
        return ""
    values_kept = [
        value for optimizer in rank.optimizers for values in optimizer.state.values() for value in values.values()
    ]
    if all(value is None or hasattr(value, "data_ptr") for value in values_kept):
        return ""
    return "an optimizer's state has values that are no tensors, and may be ahead of the GPU"


def _no_replicated_model(rank: _Rank) -> Reason:
    """The rule for a model in DistributedDataParallel over all ranks."""
    sizes = {obj.process_group.size() for obj in rank.ddp_models}
    if sizes != {rank.context.group.world_size} and not rank.is_alone:
        return "no model in DistributedDataParallel is attached"
    return ""


def _own_communication_hook(rank: _Rank) -> Reason:
    """Some hooks average rarely, or keep a state that is not attached."""
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

    usual = (default_hooks.allreduce_hook, default_hooks.fp16_compress_hook, default_hooks.bf16_compress_hook)
    for obj in rank.ddp_models:
        if any(hook not in usual for hook, _ in getattr(obj, "_comm_hooks", [])):
            return "the model has a communication hook, which may keep ranks different"
    return ""


def _no_replicated_optimizer(rank: _Rank) -> Reason:
    if not rank.optimizers:
        return "no optimizer is attached"
    for obj in rank.optimizers:
        if type(obj).state_dict is not Optimizer.state_dict:
            return "an optimizer's state is not the same on every rank"
        # Without a gradient, and without a state of a time when it had one, it is left as it is.
        every = [parameter for group in obj.param_groups for parameter in group["params"]]
        own = {id(parameter) for parameter in every if parameter.requires_grad or parameter in obj.state}
        if not own <= rank.averaged_parameters.keys() and rank.is_alone:
            return "an optimizer trains a parameter of no attached module"
        if not own <= rank.averaged_parameters.keys():
            return "an optimizer trains a parameter whose gradient DistributedDataParallel does not average"
    return ""


def _state_made_at_saves(rank: _Rank) -> Reason:
    """The rule for objects whose state the script makes in hooks that are called at saves."""
    names = (name for name, obj in rank.attached.items() if getattr(obj, training_state.ONLY_AT_SAVES_ATTRIBUTE, False))
    return next(
        (f"the state of {name} is made by the script's hooks, which are called at saves only" for name in names), ""
    )


def _tensors_elsewhere(rank: _Rank) -> Reason:
    """The rule for tensors in objects that are neither modules nor optimizers: nothing keeps them equal."""
    for name, obj in rank.attached.items():
        if isinstance(obj, (Module, Optimizer, GradScaler)):
            continue
        if any(tensors_by_path(obj.state_dict(), "")):
            return f"{name} keeps tensors and is neither a module nor an optimizer"
    return ""


def _per_rank_state(rank: _Rank) -> Reason:
    """The dead rank's is lost."""
    return next((f"{name} has a state of its own on every rank" for name in rank.context.per_rank), "")


def _modules_may_differ(rank: _Rank) -> Reason:
    """A module has to be alike on all ranks; of small objects a digest is compared with rank 0's, at the fault."""
    if rank.context.group.rank == 0:
        return ""
    modules = ((name, obj) for name, obj in rank.attached.items() if isinstance(obj, Module))
    return next((may_differ_reason(name) for name, obj in modules if not is_alike_on_ranks(obj)), "")


def _own_module_state_dict(rank: _Rank) -> Reason:
    """The rule for modules with a `state_dict`, a part of it, or hooks of their own: they may return anything, such as
    a number that each forward pass changes.
    """
    for name, module in rank.modules.items():
        for submodule in module.modules():
            hooks = (submodule._state_dict_hooks, submodule._state_dict_pre_hooks)
            methods = (submodule.state_dict, submodule.get_extra_state, submodule._save_to_state_dict)
            functions = [getattr(method, "__func__", method) for method in methods]
            are_own = functions[:2] != [Module.state_dict, Module.get_extra_state]
            if are_own or any(hooks) or not functions[2].__module__.startswith("torch."):
                return f"{name} holds {type(submodule).__name__}, which has a state_dict of its own"
    return ""


def _own_optimizer_state(rank: _Rank) -> Reason:
    """A number that is no count, such as a loss, may have been another one on the dead rank."""
    for obj in rank.optimizers:
        if any(training_state.component_tensors(tensor)[0] is not tensor for tensor in _state_tensors(obj)):
            return f"the state of {type(obj).__name__} has tensors that are made of others"
        for key, value in (item for values in obj.state.values() for item in values.items()):
            if not isinstance(value, (torch.Tensor, int, str, type(None))):
                return f"{key} in the state of {type(obj).__name__} is no tensor, and may differ between ranks"
        if any((obj._optimizer_state_dict_pre_hooks, obj._optimizer_state_dict_post_hooks)):
            return "an optimizer has hooks for its state_dict"
    return MUTABLE_SETTING_REASON if any(has_mutable_setting(obj.param_groups) for obj in rank.optimizers) else ""


def divided_state_reason(optimizers: Sequence[torch.optim.Optimizer], stepped: Collection[int]) -> Reason:
    """The rule for an optimizer that divides its parameters among the ranks by itself, as some code of Muon. `stepped`
    are the parameters, by id, that had a gradient in its last step.
    """
    for obj in optimizers:
        for group in obj.param_groups:
            if len({bool(obj.state.get(weight)) for weight in group["params"] if id(weight) in stepped}) > 1:
                return f"{type(obj).__name__} keeps a state for a part of its parameters: other ranks may have the rest"
    return ""


def _state_tensors(optimizer: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
    for values in optimizer.state.values():
        yield from (tensor for tensor in values.values() if isinstance(tensor, torch.Tensor))


def _unusual_tensor(rank: _Rank) -> Reason:
    """The rule for tensors that cannot be copied as plain memory."""
    for name, module in rank.modules.items():
        every = [*module.parameters(), *module.buffers()]
        if not all(type(tensor.data) is torch.Tensor and tensor.layout is torch.strided for tensor in every):
            return f"{name} holds a tensor that is no plain tensor"
        # A GPU is behind its processor: with parameters on both, the state is that of two steps.
        if {parameter.device for parameter in module.parameters()} - {rank.context.group.device}:
            return f"{name} has parameters on another device than the rank's"
        if {buffer.device for buffer in module.buffers()} - {rank.context.group.device, torch.device("cpu")}:
            return f"{name} has buffers on another GPU"
        if not all(buffer.is_contiguous() for buffer in module.buffers()):
            return f"{name} has a buffer that is not contiguous"
    return ""


_RULES = (
    _no_launcher,
    _sharded_state,
    _other_objects,
    _another_device,
    _aborted_collectives,
    _large_device_buffers,
    _optimizer_ahead_of_gpu,
    _no_replicated_model,
    _own_communication_hook,
    _no_replicated_optimizer,
    _state_made_at_saves,
    _tensors_elsewhere,
    _per_rank_state,
    _modules_may_differ,
    _own_module_state_dict,
    _own_optimizer_state,
    _unusual_tensor,
)


def has_mutable_setting(groups: Sequence[Mapping[str, Any]]) -> bool:
    """True if an optimizer's parameter groups have values, beside their parameters, that can change in place."""
    own = ("params", "param_names")
    return not all(_is_constant(value) for group in groups for key, value in group.items() if key not in own)


def _is_constant(value: Any) -> bool:
    if isinstance(value, (tuple, frozenset)):
        return all(map(_is_constant, value))
    return value is None or isinstance(value, (bool, int, float, str))


def averaged_parameters(attached: Mapping[str, Any], world_size: int) -> dict[int, torch.nn.Parameter]:
    """The parameters that are equal on all ranks, by id: of one rank all, of several those that DistributedDataParallel
    keeps equal, which were trained when it was made. It does not name them, but counts them. The call has to come
    before the script freezes or unfreezes others.
    """
    parameters: dict[int, torch.nn.Parameter] = {}
    if world_size == 1:
        modules = (training_state.unwrap(obj) for obj in attached.values() if isinstance(obj, Module))
        return {id(parameter): parameter for module in modules for parameter in module.parameters()}
    for obj in filter(None, map(training_state.find_ddp, attached.values())):
        every = [parameter for name, parameter in obj.module.named_parameters() if name not in obj.parameters_to_ignore]
        counted: dict[str, Any] = obj._get_ddp_logging_data()  # type: ignore[no-untyped-call]
        were_all = counted.get("num_parameter_tensors") == len(every)
        parameters |= {id(parameter): parameter for parameter in every if were_all or parameter.requires_grad}
    return parameters


def trained_parameters(ddp: DistributedDataParallel) -> Iterator[torch.nn.Parameter]:
    """The parameters that it trains now."""
    for name, parameter in ddp.module.named_parameters():
        if parameter.requires_grad and name not in ddp.parameters_to_ignore:
            yield parameter


def may_differ_reason(name: str) -> str:
    """Return the sentence for an object that may differ between ranks, with the way to say that it does not."""
    return f"{name} may differ from rank 0's; if any rank's will do, give it the attribute rank_independent = True"


def is_alike_on_ranks(obj: Any) -> bool:
    """True if the object's state follows from what is equal on all ranks, buffers of modules aside."""
    if isinstance(obj, LRScheduler):
        return not isinstance(obj, ReduceLROnPlateau)
    if (parallel := training_state.find_ddp(obj)) is not None:
        return not parallel.parameters_to_ignore
    if getattr(obj, training_state.RANK_INDEPENDENT_ATTRIBUTE, False):
        return True
    return isinstance(obj, (AveragedModel, ElasticBatchSampler, GradScaler, Optimizer))
