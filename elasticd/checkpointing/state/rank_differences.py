"""Parts of a state of which rank 0's alone is saved, compared between ranks.

Each rank describes its state at every save: a digest of small objects, of the plain values that an optimizer keeps, and
a few numbers of parameters and of an optimizer's tensors. Rank 0 compares them. In the first save of a job a difference
is an error, since the script cannot mean it; later it has cost too much work to end the job, and rank 0's state is
worth more than none.
"""

from __future__ import annotations

import contextlib
import gc
import hashlib
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import Module
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from elasticd.checkpointing.state import sharded, training_state

MAX_DIGEST_S, DIGEST_TRIALS = 5e-3, 3
"""An object of which the digest takes longer at each of so many saves is not compared at others."""
MAX_SAMPLED_PARAMETERS = 256
"""Parameters of a module, or of an optimizer, that are compared at a save; of a larger one others at the next save."""
_NUMBERS_PER_PARAMETER = 8
_ROUNDING, _ROUNDED_STEPS = 1e-5, 1000
"""The share by which ranks on GPUs of different kinds may differ after so many steps. Errors of rounding add up as the
square root of their number.
"""
_WHOLE_STATE_KEY = ""
"""Stands for the key of a whole state."""
Sample = tuple["torch.Tensor", float, bool, tuple[Any, ...]]
"""Some numbers, the share of them that rounding may change, whether nothing but a mistake explains more, and of which
parameters an optimizer keeps them, by number, each with whether it is kept in part."""
SampleName = str | tuple[str] | tuple[str, str]
"""A module's name, in a tuple for its buffers; an optimizer's, and a key of its state."""


@dataclass(frozen=True)
class Difference:
    name: str
    sentence: str
    is_error: bool  #: the difference ends the first save of a job


class ComparedState:
    """The part of a rank's state that is compared at each save of a session."""

    def __init__(self) -> None:
        self.stepped: set[int] = set()
        """Attached optimizers, by id, that have made a step in this process."""
        self._fastest_s: dict[str, float] = {}
        """A digest of each object has taken."""
        self._saves = 0

    def describe(
        self, attached: Mapping[str, Any], in_shards: Mapping[str, Any], world_size: int, step: int, is_first: bool
    ) -> list[Any]:
        """This rank's description for `find_differences`, as plain data. `in_shards` are saved in shards, `attached`
        not.
        """
        self._saves += 1
        unsharded = sharded.unsharded_digests(in_shards, world_size) if is_first else {}
        modules = sample_modules({**attached, **in_shards}, self.stepped, step, self._saves)
        if is_first:
            modules |= _sample_buffers({**attached, **in_shards}, modules, step)
        optimizers = _sample_optimizers(attached, self.stepped, step, self._saves, is_first)
        return [self._object_digests(attached, is_first), unsharded, {**modules, **optimizers}]

    def _object_digests(self, attached: Mapping[str, Any], is_first: bool) -> dict[str, dict[str, str] | None]:
        """Digests of each object but modules: of the whole state, or of what an optimizer keeps, by key. None: not
        compared.
        """

        digests: dict[str, dict[str, str] | None] = {}
        for name, obj in attached.items():
            if isinstance(obj, Module) or getattr(obj, training_state.RANK_INDEPENDENT_ATTRIBUTE, False):
                continue
            is_slow = self._saves > DIGEST_TRIALS and self._fastest_s.get(name, 0.0) > MAX_DIGEST_S
            if not is_first and (is_slow or getattr(obj, training_state.ONLY_AT_SAVES_ATTRIBUTE, False)):
                digests[name] = None
                continue
            start = time.perf_counter()
            with contextlib.suppress(RecursionError):  # rank 0 refuses it with a reason
                if not isinstance(obj, Optimizer):
                    digests[name] = {_WHOLE_STATE_KEY: plain_digest(obj.state_dict())}
                elif id(obj) in self.stepped:
                    digests[name] = _value_digests(obj)
            took_s = time.perf_counter() - start
            self._fastest_s[name] = min(self._fastest_s.get(name, took_s), took_s)
        return digests


def find_differences(every_rank: Sequence[Sequence[Any]]) -> Iterator[Difference]:
    """The differences from rank 0. `every_rank` is what ranks have described."""
    small, unsharded, sampled = zip(*every_rank, strict=True)
    for name in {name: None for digests in small for name in digests}:
        of_every_rank = [digests.get(name, {}) for digests in small]
        # An optimizer may make no step on other ranks.
        if not any(of_rank and _WHOLE_STATE_KEY in of_rank for of_rank in of_every_rank):
            of_every_rank = [of_rank or of_every_rank[0] for of_rank in of_every_rank]
        apart = {} if None in of_every_rank else dict(_differing_ranks(of_every_rank))
        if _WHOLE_STATE_KEY in apart:
            yield Difference(
                name,
                f"the state of {name} on rank {apart[_WHOLE_STATE_KEY]} differs from rank 0's, which alone is saved. "
                f"Attach it with attach(per_rank={{{name!r}: ...}}) if each rank needs its own, or make it the same on "
                "all ranks, for example by averaging the number that it depends on",
                True,
            )
        elif apart:
            yield Difference(
                name,
                f"{', '.join(apart)} in the state of {name} on rank {next(iter(apart.values()))} differs from rank "
                "0's, which alone is saved. Make it the same on all ranks, for example by averaging the loss that the "
                "optimizer's step gets",
                False,
            )
    for name, ranks in _differing_ranks(unsharded):
        yield Difference(
            name,
            f"{name} is not sharded, and on rank {ranks} it differs from rank 0's, which alone is saved. Shard it, or "
            "broadcast it from rank 0 and average its gradient over all ranks, or attach its module with per_rank= if "
            "each rank needs its own",
            True,
        )
    for name, numbers, is_error in _differing_samples(sampled):
        ranks = ", ".join(map(str, numbers))
        if isinstance(name, tuple) and len(name) == 1:
            yield Difference(
                f"the buffers of {name[0]}",
                f"the buffers of {name[0]} on rank {ranks} differ from rank 0's, which alone are saved: after a "
                "restart all ranks have those. SyncBatchNorm has the same statistics on every rank",
                False,
            )
            continue
        if isinstance(name, tuple):
            optimizer, key = name
            yield Difference(
                optimizer,
                f"{key} in the state of {optimizer} on rank {ranks} differs from rank 0's, which alone is saved: the "
                "optimizer divides its state among the ranks, or each rank trains apart. Keep all of it on every rank, "
                "shard it with fully_shard(), or attach it with per_rank= (8 MB at most). If any rank's will do, set "
                "its rank_independent = True",
                is_error,
            )
            continue
        yield Difference(
            name,
            f"the parameters of {name} on rank {ranks} differ from rank 0's, which alone are "
            "saved. Train it in DistributedDataParallel (wrap it again after unfreezing a layer), and change it in the "
            "same way on all ranks: the same seed for noise, the same steps, no save within no_sync(). If each rank "
            "trains its own, attach it with per_rank=",
            is_error,
        )


def _differing_ranks(digests: Sequence[Mapping[str, str]]) -> Iterator[tuple[str, str]]:
    """Each key of which a rank has another digest than rank 0, and these ranks."""
    for key in {key: None for of_rank in digests for key in of_rank}:
        if ranks := [str(rank) for rank, of_rank in enumerate(digests) if of_rank.get(key) != digests[0].get(key)]:
            yield key, ", ".join(ranks)


def _value_digests(optimizer: Any) -> dict[str, str]:
    """Digests of what an optimizer keeps of its parameters beside tensors, by key: such as counts, and a loss."""
    parameters = (parameter for group in optimizer.param_groups for parameter in group["params"])
    places = {id(parameter): number for number, parameter in enumerate(parameters)}
    values: dict[str, list[Any]] = {}
    for of, state_of in sorted(optimizer.state.items(), key=lambda item: places.get(id(item[0]), -1)):
        for key, value in (state_of if isinstance(state_of, Mapping) else {of: state_of}).items():
            if not isinstance(value, torch.Tensor):
                values.setdefault(str(key), []).append((places.get(id(of)), value))
    return {key: plain_digest(value) for key, value in values.items()}


def sample_modules(
    attached: Mapping[str, Any], stepped: Collection[int], step: int, save: int
) -> dict[SampleName, Sample]:
    """Some numbers of each module that this rank trains: other parameters at each save, until all have been seen.
    `stepped` are the optimizers, by id, that have made a step in this process.

    They are equal on all ranks if DistributedDataParallel, or the script, averages gradients. A communication hook may
    leave them different for some steps.
    """

    optimizers = [obj for obj in attached.values() if isinstance(obj, Optimizer)]
    groups = [group for optimizer in optimizers if id(optimizer) in stepped for group in optimizer.param_groups]
    trained = {id(parameter) for group in groups for parameter in group["params"] if parameter.requires_grad}
    sampled: dict[SampleName, Sample] = {}
    for name, obj in attached.items():
        if not isinstance(obj, Module) or getattr(obj, training_state.RANK_INDEPENDENT_ATTRIBUTE, False):
            continue
        wrapper = training_state.find_ddp(obj)
        parameters = (obj if wrapper is None else wrapper.module).parameters()
        # One that is frozen may be a rank's own by design, which is no error at the first save.
        is_in_ddp = wrapper is not None
        every = [
            parameter
            for parameter in parameters
            if id(parameter) in trained or (is_in_ddp and (parameter.requires_grad or save > 1))
        ]
        interval = len(every) // MAX_SAMPLED_PARAMETERS + 1
        every = [parameter.detach() for parameter in every[save % interval :: interval]]
        if every := list(filter(_is_plain_float, every)):
            sampled[name] = (*_sample(every, step), wrapper is None or _averages_all(wrapper), ())
    return sampled


def _sample_buffers(
    attached: Mapping[str, Any], trained: Collection[SampleName], step: int
) -> dict[SampleName, Sample]:
    """Some numbers of the buffers of each module that is trained, and of which each rank has its own: no
    DistributedDataParallel broadcasts them.
    """
    bare = {name: obj for name, obj in attached.items() if name in trained and training_state.find_ddp(obj) is None}
    own = {name: obj for name, obj in bare.items() if _saved_buffers(obj)}
    every = [obj for obj in gc.get_objects() if issubclass(type(obj), DistributedDataParallel)] if own else []
    broadcast = {id(module) for obj in every if obj.broadcast_buffers for module in obj.module.modules()}
    return {
        (name,): (*_sample(_saved_buffers(obj)[:MAX_SAMPLED_PARAMETERS], step), False, ())
        for name, obj in own.items()
        if id(training_state.unwrap(obj)) not in broadcast
    }


def _saved_buffers(module: Module) -> list[torch.Tensor]:
    """Buffers that hold numbers, of those that a checkpoint has."""
    every = ((part, key, buffer) for part in module.modules() for key, buffer in part._buffers.items())
    return [
        buffer
        for part, key, buffer in every
        if buffer is not None and key not in part._non_persistent_buffers_set and _is_plain_float(buffer)
    ]


def _sample_optimizers(
    attached: Mapping[str, Any], stepped: Collection[int], step: int, save: int, is_first: bool
) -> dict[SampleName, Sample]:
    """Some numbers of the tensors that each optimizer keeps of its parameters, by key: equal where gradients are. Of
    all parameters at the first save, since ranks that divide them may do so by any rule.
    """
    modules = (obj for obj in attached.values() if isinstance(obj, Module))
    is_mistake = all(_averages_all(wrapper) for wrapper in map(training_state.find_ddp, modules) if wrapper is not None)
    sampled: dict[SampleName, Sample] = {}
    for name, obj in attached.items():
        if not isinstance(obj, Optimizer) or id(obj) not in stepped:
            continue
        if getattr(obj, training_state.RANK_INDEPENDENT_ATTRIBUTE, False):
            continue
        parameters = [parameter for group in obj.param_groups for parameter in group["params"]]
        interval = 1 if is_first else len(parameters) // MAX_SAMPLED_PARAMETERS + 1
        by_key: dict[str, dict[tuple[int, bool], torch.Tensor]] = {}
        for place in range(save % interval, len(parameters), interval):
            values = obj.state.get(parameters[place])
            for key, value in values.items() if isinstance(values, Mapping) else ():
                if _is_plain_float(value):
                    is_part = 1 < value.numel() < parameters[place].numel()
                    by_key.setdefault(str(key), {})[place, is_part] = value.detach()
        for key, every in by_key.items():
            sampled[name, key] = (*_sample([*every.values()], step), is_mistake, tuple(every))
    return sampled


def _averages_all(wrapper: Any) -> bool:
    return not (wrapper.parameters_to_ignore or getattr(wrapper, "_comm_hooks", []))


def _is_plain_float(value: Any) -> bool:
    is_plain = type(value) is torch.Tensor and value.layout is torch.strided
    return is_plain and value.is_floating_point() and value.numel() > 0


def _sample(every: Sequence[torch.Tensor], step: int) -> tuple[torch.Tensor, float]:
    """Numbers of each, and the share of them that rounding may change in so many steps."""
    pieces = [_spread_numbers(tensor).float() for tensor in every]
    devices = dict.fromkeys(piece.device for piece in pieces)
    numbers = [torch.cat([piece for piece in pieces if piece.device == device]).cpu() for device in devices]
    drift = _ROUNDING * max(step / _ROUNDED_STEPS, 1) ** 0.5
    share = max(drift, 4 * max(torch.finfo(tensor.dtype).eps for tensor in every))
    return torch.cat(numbers).nan_to_num(), share


def _spread_numbers(tensor: torch.Tensor) -> torch.Tensor:
    """A few of its numbers, without a copy where it fills its memory, in any order of dimensions."""
    size = 1 + sum((length - 1) * stride for length, stride in zip(tensor.shape, tensor.stride(), strict=True))
    flat = tensor.as_strided((size,), (1,)) if size == tensor.numel() else tensor.flatten()
    return flat[:: max(len(flat) // _NUMBERS_PER_PARAMETER, 1)][:_NUMBERS_PER_PARAMETER]


def _differing_samples(
    every_rank: Sequence[Mapping[SampleName, Sample]],
) -> Iterator[tuple[SampleName, list[int], bool]]:
    """Each name of which the samples are not those of rank 0, on which ranks, and whether that is a mistake.

    A rank that does not train a module counts only where it is rank 0. An optimizer that keeps whole tensors of
    the same parameters on all ranks may mean to have other numbers in them, such as errors that it feeds back.
    """
    for name in {name: None for of_rank in every_rank for name in of_rank}:
        having = {rank: of_rank[name] for rank, of_rank in enumerate(every_rank) if name in of_rank}
        first, share, is_mistake, places = having.get(0, (None, 0.0, False, None))
        if ranks := [
            rank for rank, (own, *_) in having.items() if first is None or not _is_within_rounding(own, first, share)
        ]:
            is_divided = any(having[rank][3] != places for rank in ranks) or any(is_part for _, is_part in places or ())
            yield name, ranks, is_mistake and (isinstance(name, str) or is_divided)


def _is_within_rounding(own: torch.Tensor, first: torch.Tensor, share: float) -> bool:
    return own.shape == first.shape and bool((own - first).abs().max() <= share * first.abs().max())


def plain_digest(value: Any) -> str:
    """Equal for equal plain values, whatever the order of keys; of tensors their types and shapes count."""
    return hashlib.sha256(_canonical_text(value).encode()).hexdigest()[:16]


def _canonical_text(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"{value.dtype} {tuple(value.shape)}"
    if isinstance(value, Mapping):
        return f"{{{', '.join(sorted(f'{key!r}: {_canonical_text(item)}' for key, item in value.items()))}}}"
    if isinstance(value, (set, frozenset)):
        return f"{{{', '.join(sorted(map(_canonical_text, value)))}}}"
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(_canonical_text, value))}]"
    return repr(value)
