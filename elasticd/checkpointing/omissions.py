"""Omissions of a script through which a restart would lose data or updates, found in its first steps.

It is an error where the script cannot mean it, and else a warning, as later in a job that has trained for long. All
ranks of a script do the same, so each of them finds it at the same step.

What a script forgets costs nothing until a restart, and then work. So each omission is looked for while the work at
stake is small: in the first steps it is an error, on every rank, with the call that is missing; later it is a warning,
once, since to end a job that has trained for hours would cost what the check is to save.

Nothing is judged by a single look. An evaluation fetches from a sampler as training does, a search for a learning rate
steps an optimizer as training does; so a pattern has to repeat, at distances at which only training repeats it. What
cannot be told apart is not mentioned.

The price is a hook on optimizer steps, which all of torch's optimizers call anyway, and a look at samplers in three of
32 steps.
"""

from __future__ import annotations

import gc
import logging
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch.amp import GradScaler
from torch.nn import Module, Parameter
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from elasticd.checkpointing.context import SaveContext
from elasticd.checkpointing.state import training_state
from elasticd.checkpointing.state.training_state import local_part
from elasticd.errors import UsageError
from elasticd.sampler import ElasticBatchSampler, SamplerUsage, uncommitted_samplers, usage_of

logger = logging.getLogger("elasticd")

ERROR_STEPS = 8
"""The first steps, in which a mistake is an error: a later one costs too much work."""
LOOK_EVERY, LOOKS = 32, 3
"""Steps between two times at which samplers are looked at, and how often in a row: an evaluation between two steps
fetches once, and training before each."""
MANY_STEPS, MANY_S = 1000, 60.0
"""Optimizer steps without a `session.step()`, or their time, that no usual loop makes: one of reinforcement learning
makes hundreds for each."""
MAX_SEARCH_STEPS = 200
"""Optimizer steps that a search for a learning rate makes at most before training: 100 as a rule, also of a small data
set."""
_SCHEDULED_MARK = "_wrapped_by_lr_sched"
"""An attribute of an optimizer's `step` once a scheduler has been made for it."""
_WRONG_ORDERS_BEFORE_ERROR = 2
"""Times that an optimizer is seen to step after `session.step()`, with the gradients from before it."""
_MAX_GRADIENTS_KEPT = 4


class Omissions:
    """The omissions in one session. `attached` is the session's own dict, which grows until the first step."""

    def __init__(self, context: SaveContext, attached: Mapping[str, Any]) -> None:
        self._context, self._attached = context, attached
        self._hook: Any = None
        self._is_compiling: Callable[[], bool]
        self._known: set[int] = set()
        self._steps = 0
        """Calls of `session.step()`."""
        self._stepped: dict[int, weakref.ref[Any]] = {}
        """Optimizers since the last of these calls, in the order of their last steps."""
        self._counts: dict[int, int] = {}
        """Steps of attached optimizers before the first call."""
        self._trains_others = True
        """Each step so far was one of optimizers that train nothing that is attached."""
        self._judged: weakref.WeakSet[Any] = weakref.WeakSet()
        """Optimizers that are not attached, and of which all has been said."""
        self._first_at = 0.0
        self._told: set[str] = set()
        self._scheduled: set[int] = set()
        """Attached optimizers of which a scheduler was made before `attach()`, so without knowing what is restored."""
        self._group_sizes: dict[str, list[int]] = {}
        """The parameters of each group of the attached optimizers."""
        self._fetched: dict[int, tuple[int, int]] = {}
        """Counts of samplers that are not attached: fetches at the last look, looks in a row at which these grew."""
        self._iterations: dict[int, int] = {}
        """The iteration in which an optimizer made the first step, for each attached sampler."""
        self._gradients: dict[int, list[tuple[Any, weakref.ref[torch.Tensor], int]]] = {}
        self._fetches = 0
        self._wrong_orders = 0
        self._order_is_known = False

    def watch_attached(self) -> None:
        """More has been attached."""
        for name, obj in self._attached.items():
            for what in _unsaved_of_ddp(obj) if self._context.group.world_size > 1 else ():
                self._warn_once(f"attach({name}=...): {what}")
        self._known = {id(obj) for obj in self._all_attached()}
        self._scheduled |= {id(obj) for obj in self._optimizers().values() if hasattr(obj.step, _SCHEDULED_MARK)}
        if self._hook is None:
            from torch.compiler import is_compiling
            from torch.optim.optimizer import register_optimizer_step_post_hook

            self._is_compiling = is_compiling
            self._hook = register_optimizer_step_post_hook(self._on_optimizer_step)

    def close(self, has_failed: bool) -> None:
        """At the end of the session."""
        if self._hook is not None:
            self._hook.remove()
            self._hook = None
        if self._counts and not self._steps and self._context.every and not has_failed:
            self._warn_once(
                f"the script has ended after {max(self._counts.values())} optimizer steps without session.step(): no "
                "checkpoint was saved. Call it after each optimizer step"
            )
        self._counts = {}

    def check_at_step(self) -> None:
        """At the beginning of each `session.step()`. Raises UsageError."""
        number, self._steps = self._steps, self._steps + 1
        stepped, self._stepped = self._stepped, {}
        if self._context.directory is None:
            return
        if not stepped.keys() <= self._known:
            self._check_optimizers(stepped, number)
        if number < ERROR_STEPS:
            self._check_trained(stepped, number)
        if number == LOOKS:
            self._check_kept()
        if number % LOOK_EVERY < LOOKS:
            self._check_samplers(number)
        if number % LOOK_EVERY == 0:
            self._check_groups(number)
        if not number:
            self._check_schedulers()
            self._check_scaler()
            self._check_joined()
        if not self._order_is_known:
            self._keep_gradients(number)

    def _on_optimizer_step(self, optimizer: Any, *_: Any) -> None:
        # As a part of a graph that is compiled this would break it.
        if self._is_compiling() or optimizer in self._judged:
            return
        key = id(optimizer)
        if key in self._stepped:
            del self._stepped[key]
        self._stepped[key] = weakref.ref(optimizer)
        if key in self._known:
            if not self._steps:
                self._check_missing_steps(key)
            elif self._gradients:
                self._check_order(key)

    # --- optimizers ---------------------------------------------------------------------------------------------------

    def _check_optimizers(self, stepped: Mapping[int, weakref.ref[Any]], number: int) -> None:
        """One that was made again, or forgotten: what it keeps for attached parameters is in no checkpoint.

        What an attached one steps afterwards is its own: the other one has searched for a learning rate, if it is no
        part of that one.
        """

        modules = {name: obj for name, obj in self._attached.items() if isinstance(obj, Module)}
        of_module = {id(parameter): name for name, module in modules.items() for parameter in module.parameters()}
        steppers: list[torch.optim.Optimizer] = [living for of in stepped.values() if (living := of()) is not None]
        last = {id(parameter): of for of in steppers for group in of.param_groups for parameter in group["params"]}
        another = {name: obj for name, obj in self._attached.items() if isinstance(obj, Optimizer)}
        inside = {id(value): f"{of}.{name}" for of, obj in another.items() for name, value in vars(obj).items()}
        for optimizer in steppers:
            key, parameters = (
                id(optimizer),
                [id(parameter) for group in optimizer.param_groups for parameter in group["params"]],
            )
            own = [parameter for parameter in parameters if key in inside or last[parameter] is optimizer]
            names = [of_module[parameter] for parameter in own if parameter in of_module]
            kept = [values for values in optimizer.state.values() if isinstance(values, Mapping)]
            state_names = sorted({str(name) for values in kept for name in values})
            if key in self._known or not state_names or not names or optimizer in self._judged:
                continue
            self._judged.add(optimizer)
            if self._is_saved_by_another(optimizer):
                continue
            name = names[0]
            what = f"{type(optimizer).__name__} trains {name} and is not attached: at each restart its state "
            what += f"({', '.join(state_names)}) would begin anew. "
            if key in inside:
                what += f"Attach {inside[key]}, too: nothing that is attached saves its state"
            elif another:
                what += "Make it before session.attach(), attach it, and do not make it again after that"
            else:
                what += "Attach it before session.restore(): session.attach(optimizer=optimizer)"
            is_new = number < ERROR_STEPS and self._context.parent is None  # a later stage may begin in the first steps
            self._raise_or_warn(what, is_error=bool(another) and is_new)

    def _check_trained(self, stepped: Mapping[int, weakref.ref[Any]], number: int) -> None:
        """Model and optimizer that were made again after they had been attached: nothing of the training is saved."""
        every = self._all_attached()
        if not self._trains_others or any(not isinstance(obj, _KINDS_OF_TORCH) for obj in every):
            return
        optimizers = [obj for obj in every if isinstance(obj, Optimizer)]
        attached = {id(parameter) for obj in every if isinstance(obj, Module) for parameter in obj.parameters()}
        attached |= set(map(id, _trained_parameters(optimizers)))
        steppers = [living for of in stepped.values() if (living := of()) is not None]
        trained = list(_trained_parameters(steppers))
        # Which parameters a module has that FSDP2 shards depends on the moment.
        are_plain = all(local_part(parameter) is parameter for parameter in trained)
        self._trains_others = bool(attached and trained) and are_plain and attached.isdisjoint(map(id, trained))
        if self._trains_others and number == ERROR_STEPS - 1:
            self._raise_or_warn(
                f"{type(steppers[0]).__name__} trains nothing that is attached, and nothing that is attached has been "
                "trained: no checkpoint would hold the training. Attach what the loop trains, after it has been made",
                is_error=self._context.parent is None,
            )

    def _check_kept(self) -> None:
        """Tensors that an optimizer keeps for parameters or modules beside its `state`, as some code of KFAC."""
        if any(not isinstance(obj, _KINDS_OF_TORCH) for obj in self._all_attached()):
            return  # another object may save it
        for name, obj in self._optimizers().items():
            usual = vars(obj) if type(obj).state_dict is Optimizer.state_dict else {}
            for attribute in (key for key, value in usual.items() if key != "state" and _has_tensors_by_object(value)):
                self._warn_once(
                    f"{name} keeps tensors in {attribute}, which its state_dict() lacks: after a restart they would "
                    "begin anew. Keep them in its `state`, or attach an object that saves them"
                )

    def _is_saved_by_another(self, optimizer: Any) -> bool:
        """True if something else that is attached, such as a wrapper, saves the optimizer's state."""
        own = _storages(dict(optimizer.state))
        for obj in self._attached.values():
            if isinstance(obj, Module):
                continue
            try:
                saved = _storages(obj.state_dict())
            except Exception:  # noqa: BLE001 - of any object: ZeroRedundancyOptimizer has none before it is gathered
                return True
            # One that has a method of its own, and knows the optimizer, may save copies. A scheduler knows it, too.
            has_own = saved and getattr(type(obj), "state_dict", None) is not Optimizer.state_dict
            if saved & own - {0} or (has_own and any(value is optimizer for value in _attributes(obj).values())):
                return True
        return False

    def _check_groups(self, number: int) -> None:
        """The next start has to make the same groups before `restore()`, and their parameters' values are needed."""
        before, self._group_sizes = (
            self._group_sizes,
            {name: [len(group["params"]) for group in obj.param_groups] for name, obj in self._optimizers().items()},
        )
        if before == self._group_sizes:
            return
        self._check_parameters(number)
        for name in before:
            if before[name] != self._group_sizes[name]:
                self._warn_once(
                    f"{name} has other parameter groups than before: the next restore() fails unless the script makes "
                    "the same groups before it. Make all of them at the start, such as with lr=0 until they are trained"
                )

    def _check_parameters(self, number: int) -> None:
        """One that an attached optimizer trains, and of which no checkpoint has the value."""
        every = self._all_attached()
        others = [obj for obj in every if not isinstance(obj, _KINDS_OF_TORCH)]
        modules = [obj for obj in every if isinstance(obj, Module)]
        values = [value for obj in others for value in _values(obj)]
        modules += [value for value in values if isinstance(value, Module)]
        held = {id(parameter) for module in modules for parameter in module.parameters()} | set(map(id, values))
        for name, optimizer in self._optimizers().items():
            lost = [
                parameter
                for group in optimizer.param_groups
                for parameter in group["params"]
                if parameter.requires_grad and id(parameter) not in held
            ]
            # Which parameters a module has that FSDP2 shards depends on the moment.
            if not lost or any(local_part(parameter) is not parameter for parameter in lost):
                continue
            try:
                states = [training_state.unwrap(obj).state_dict() for obj in modules + others]
                saved = _storages(states)
                lost = [parameter for parameter in lost if _storages(parameter).isdisjoint(saved)]
            except Exception:  # noqa: BLE001 - of any object
                continue
            if lost:
                self._raise_or_warn(
                    f"{name} trains {_count_parameters(lost)} of nothing that is attached: its value is not saved, "
                    "and a restart would begin with another one. Attach the module before session.restore(); a "
                    "parameter of no module belongs into one, such as torch.nn.ParameterList",
                    is_error=not others and number < ERROR_STEPS,
                )

    def _check_schedulers(self) -> None:
        """One that was made before `attach()`, and whose position is in no checkpoint."""
        unknown = {id(obj): name for name, obj in self._optimizers().items() if id(obj) in self._scheduled}
        saved = {
            id(each) for obj in self._all_attached() if isinstance(obj, LRScheduler) for each in _nested_schedulers(obj)
        }
        for obj in self._all_attached() if unknown else ():
            for value in () if isinstance(obj, (Module, Optimizer, LRScheduler)) else _values(obj):
                unknown.pop(id(value.optimizer if isinstance(value, LRScheduler) else value), None)
        if not unknown:
            return
        # torch's optimizers do not know their schedulers.
        living = [obj for obj in gc.get_objects() if issubclass(type(obj), LRScheduler) and id(obj) not in saved]
        for scheduler in living:
            name = unknown.get(id(getattr(scheduler, "optimizer", None)))
            # After a resume the script may have set it to the step that was reached.
            if name is not None and (self._context.parent is None or scheduler.last_epoch <= 1):
                self._warn_once(
                    f"{type(scheduler).__name__} schedules {name} and is not attached: after a restart it, and so the "
                    "learning rate, would begin anew. Attach it before session.restore(), or make it after that call, "
                    "for session.steps"
                )

    def _check_scaler(self) -> None:
        """A GradScaler that has scaled a loss, and whose scale is in no checkpoint."""
        every = self._all_attached()
        if any(isinstance(obj, GradScaler) or not isinstance(obj, _KINDS_OF_TORCH) for obj in every):
            return  # another object may save one
        scalers = [obj for obj in gc.get_objects() if issubclass(type(obj), GradScaler)]
        if any(getattr(scaler, "_scale", None) is not None for scaler in scalers):
            self._warn_once(
                "a GradScaler scales the loss and is not attached: after a restart its scale would begin anew, and "
                "steps be skipped until it fits. Attach it before session.restore(): session.attach(scaler=scaler)"
            )

    def _check_joined(self) -> None:
        """A model in torch's Join, of which ranks make different numbers of steps."""
        if self._sampler_usages():
            return
        for name, obj in self._attached.items():
            join = getattr(training_state.find_ddp(obj), "_join_config", None)
            if join is not None and join.enable and not join.throw_on_early_termination:
                self._warn_once(
                    f"{name} trains in torch's Join: where a rank has more batches than another one, session.step() "
                    "waits for a rank that makes no more steps, and the job restarts. Give all ranks as many batches, "
                    "as ElasticBatchSampler does, or end all of them with Join(throw_on_early_termination=True)"
                )

    # --- samplers -----------------------------------------------------------------------------------------------------

    def _check_samplers(self, number: int) -> None:
        """One that gives the batches of each step, and whose position is in no checkpoint, or is behind the loop."""
        for usage in self._sampler_usages():
            if usage.left_out_steps:
                batches = f"{usage.left_out_steps} batch{'es' * (usage.left_out_steps > 1)}"
                self._warn_once(
                    f"{batches} of the attached sampler without session.step(): a restart in this epoch trains again "
                    "on as many. Call session.step() for a batch that the loop leaves out, too"
                )
            if usage.skipped_steps:
                self._warn_once(
                    f"the loop has left out the first {usage.skipped_steps} steps after restore(), but the attached "
                    "sampler continues by itself after what was trained on: in this epoch nobody trains on their "
                    "samples. Remove what the script does to skip batches"
                )
        before, self._fetched = self._fetched, {}
        for sampler in uncommitted_samplers():
            if id(sampler) in self._known:
                continue
            fetched = usage_of(sampler).fetched_training_batches
            known, times = before.get(id(sampler), (fetched, 0)) if number % LOOK_EVERY else (fetched, 0)
            times = times + 1 if fetched > known else 0
            self._fetched[id(sampler)] = fetched, times
            if times == LOOKS - 1:
                has_another = bool(self._context.per_rank or self._sampler_usages())
                self._raise_or_warn(
                    "an ElasticBatchSampler gives batches for each step and is not attached: after a restart its epoch "
                    "would begin anew, and samples would be trained on again. Attach it before session.restore(): "
                    "session.attach(sampler=sampler); if it is for an evaluation, fetch its batches in torch.no_grad()",
                    is_error=not has_another and number < ERROR_STEPS,
                )

    # --- session.step() -----------------------------------------------------------------------------------------------

    def _check_missing_steps(self, key: int) -> None:
        """Attached optimizers step, and `session.step()` has not been called yet."""
        self._counts[key] = count = self._counts.get(key, 0) + 1
        every = self._context.every
        if every is None:
            return
        self._first_at = self._first_at or time.monotonic()
        age_s = time.monotonic() - self._first_at
        if (count >= MANY_STEPS or age_s >= MANY_S) and count >= (every.steps or 2) and age_s >= (every.seconds or 0):
            self._warn_once(
                f"{count} optimizer steps without session.step(): nothing is saved before it is called, and a restart "
                "would lose them. Call it after each optimizer step"
            )
        for usage in self._sampler_usages():
            first = self._iterations.setdefault(id(usage), usage.begun_iterations)
            if (
                count > MAX_SEARCH_STEPS
                and first <= usage.last_exhausted_iteration < usage.begun_iterations
                and not usage.has_committed
            ):
                raise UsageError(
                    f"an epoch of the attached sampler has ended, with {count - 1} optimizer steps, and session.step() "
                    "was not called: nothing of it would be in a checkpoint. Call it after each optimizer step"
                )

    def _keep_gradients(self, number: int) -> None:
        """Keep gradients that an optimizer's next step may find unchanged."""
        self._gradients = {}
        self._order_is_known = number >= ERROR_STEPS
        if self._order_is_known:
            return
        self._fetches = self._count_fetches()
        for obj in self._attached.values():
            if isinstance(obj, Optimizer):
                parameters = (parameter for group in obj.param_groups for parameter in group["params"])
                trained = [parameter for parameter in parameters if parameter.grad is not None][:_MAX_GRADIENTS_KEPT]
                gradients = [
                    (parameter, weakref.ref(parameter.grad), local_part(parameter.grad)._version)
                    for parameter in trained
                ]
                self._gradients |= {id(obj): gradients} if gradients else {}

    def _check_order(self, key: int) -> None:
        """Check an optimizer's step with the gradients from before `session.step()`: it is in no checkpoint of its
        step.

        Clipping changes them in place, as a backward pass may: where there is a sampler, that shows whether there was
        one. Neither counts what a CUDA graph does.
        """
        gradients = self._gradients.pop(key, [])
        if not gradients:
            return
        samplers = self._sampler_usages()
        are_same = all(gradient() is not None and parameter.grad is gradient() for parameter, gradient, _ in gradients)
        if samplers and all(usage.last_exhausted_iteration < usage.begun_iterations for usage in samplers):
            is_wrong = are_same and self._count_fetches() == self._fetches
        else:
            is_wrong = are_same and all(
                local_part(parameter.grad)._version == version and parameter.device.type == "cpu"
                for parameter, _, version in gradients
            )
        if not is_wrong:
            self._order_is_known, self._gradients = True, {}
            return
        self._wrong_orders += 1
        if self._wrong_orders == _WRONG_ORDERS_BEFORE_ERROR:
            raise UsageError(
                "session.step() is called before optimizer.step(): a restart would lose the update of a step whose "
                "samples count as trained on. Call session.step() after optimizer.step()"
            )

    def _count_fetches(self) -> int:
        return sum(usage.fetched_batches for usage in self._sampler_usages())

    def _all_attached(self) -> list[Any]:
        return [*self._attached.values(), *self._context.per_rank.values()]

    def _optimizers(self) -> dict[str, Optimizer]:
        """The attached ones by name."""
        every = {**self._attached, **self._context.per_rank}
        return {name: obj for name, obj in every.items() if isinstance(obj, Optimizer)}

    def _sampler_usages(self) -> list[SamplerUsage]:
        """Return the usage of each attached sampler."""
        return [usage_of(sampler) for sampler in self._all_attached() if isinstance(sampler, ElasticBatchSampler)]

    def _raise_or_warn(self, what: str, is_error: bool) -> None:
        if is_error:
            raise UsageError(what)
        self._warn_once(what)

    def _warn_once(self, what: str) -> None:
        """Once."""
        if (kind := what.partition(":")[2]) in self._told:
            return
        self._told.add(kind)
        logger.warning(what)
        if self._context.group.rank == 0:
            self._context.events.write("message", what, None, once=kind)


_KINDS_OF_TORCH = (
    *(Module, Optimizer, LRScheduler, GradScaler, ElasticBatchSampler),
    training_state.GeneratorState,
)
"""The kinds of attached objects of which the saved parameters are known."""


def _attributes(obj: Any) -> dict[str, Any]:
    return getattr(obj, "__dict__", {})


def _trained_parameters(optimizers: list[Any]) -> Iterator[torch.Tensor]:
    return (parameter for obj in optimizers for group in obj.param_groups for parameter in group["params"])


def _has_tensors_by_object(value: Any) -> bool:
    """It has tensors, beside parameters, for each parameter or module."""
    kept = value.items() if isinstance(value, dict) else ()
    of_objects = [each for key, each in kept if isinstance(key, (Module, torch.Tensor))]
    return any(not isinstance(tensor, Parameter) for tensor in training_state.tensors(of_objects))


def _nested_schedulers(scheduler: Any) -> Iterator[Any]:
    """A scheduler, and those that it consists of."""
    yield scheduler
    for value in _values(scheduler):
        if isinstance(value, LRScheduler):
            yield from _nested_schedulers(value)


def _values(obj: Any) -> Iterator[Any]:
    """The values of its attributes, and what these contain."""
    for value in _attributes(obj).values():
        yield value
        if isinstance(value, (list, tuple, dict)):
            yield from value.values() if isinstance(value, dict) else value


def _storages(state: Any) -> set[int]:
    """The addresses of the tensors in a state. Raises what a tensor without a storage may."""
    return {tensor.untyped_storage().data_ptr() for tensor in map(local_part, training_state.tensors(state))}


def _count_parameters(parameters: list[Any]) -> str:
    shape = f"of shape {tuple(parameters[0].shape)}"
    return f"a parameter {shape}" if len(parameters) == 1 else f"{len(parameters)} parameters, the first {shape},"


def _unsaved_of_ddp(obj: Any) -> Iterator[str]:
    """Sentences about what each rank has of an attached model by itself, and gets from no checkpoint."""
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

    wrapper = training_state.find_ddp(obj)
    if wrapper is None:
        return
    saved = wrapper.module.state_dict().keys() - {name for name, _ in wrapper.module.named_parameters()}
    if saved and not wrapper.broadcast_buffers:
        yield "with broadcast_buffers=False each rank has buffers of its own, and after a restart all have rank 0's"
    stateless = (default_hooks.allreduce_hook, default_hooks.fp16_compress_hook, default_hooks.bf16_compress_hook)
    if any(hook not in stateless and state is not None for hook, state in getattr(wrapper, "_comm_hooks", [])):
        yield "the state of its communication hook is in no checkpoint, and begins anew after a restart"
