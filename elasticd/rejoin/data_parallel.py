"""DistributedDataParallel modules that follow their process into another process group.

Each is built anew on the same object by its own constructor: gradients are summed by position in buckets, which a
module lays out anew after its first backward pass, so modules of different ages would add up those of different
parameters, without an error. Everything that a script may hold stays: the object, the module inside, its hooks.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import warnings
import weakref
from collections.abc import Callable, Iterator
from typing import Any

from elasticd.errors import Reason

_KEPT_ATTRIBUTES = ("_ddp_sink_clone", "training")
_GROUP_ATTRIBUTES = ("reducer", "logger", "process_group")
"""Attributes that belong to a process group, and keep it alive."""


class DataParallelModules:
    """The modules that this process has made since `watch()`, in their order. `issued` counts the default group's
    collectives.
    """

    def __init__(self, issued: Callable[[], int]) -> None:
        self._issued = issued
        self._made: list[tuple[weakref.ref[Any], dict[str, Any], dict[str, bool]]] = []
        """Each with the arguments of its constructor, and with its parameters of then: true if one was trained."""
        self._of_round: list[weakref.ref[Any]] = []
        self._is_in_round = False
        self._made_before_restore: int | None = None
        """The number of modules at the script's own `restore()`."""
        self.collectives = 0
        """Collectives of the constructors."""
        self._build: Callable[..., None] | None = None
        self._watched: Callable[..., None] | None = None

    def watch(self) -> None:
        """Know each module that is made from now on, with its arguments: torch keeps not all of them."""
        from torch.nn.parallel import DistributedDataParallel

        build = DistributedDataParallel.__init__
        signature = inspect.signature(build)

        @functools.wraps(build)
        def init(wrapper: Any, /, *args: Any, **kwargs: Any) -> None:
            before = self._issued()
            build(wrapper, *args, **kwargs)
            self.collectives += self._issued() - before
            arguments = dict(signature.bind(wrapper, *args, **kwargs).arguments)
            del arguments["self"], arguments["module"]
            if self._is_in_round:
                self._of_round.append(weakref.ref(wrapper))
            else:
                self._made.append((weakref.ref(wrapper), arguments, _trained_parameters(wrapper)))

        self._build = build
        self._watched = DistributedDataParallel.__init__ = init  # type: ignore[method-assign,assignment]

    def unwatch(self) -> None:
        from torch.nn.parallel import DistributedDataParallel

        if self._build is not None and DistributedDataParallel.__init__ is self._watched:
            DistributedDataParallel.__init__ = self._build  # type: ignore[method-assign]

    def on_restore(self) -> None:
        """The script restores before `run`."""
        self._made_before_restore = len(self._made)

    def on_run_begin(self) -> None:
        """The modules that are made from now on are made again in the next round, by the function that makes these."""
        self._is_in_round = True

    def _alive(self) -> list[tuple[Any, dict[str, Any], dict[str, bool]]]:
        return [(of(), arguments, trained) for of, arguments, trained in self._made if of() is not None]

    def reason_against(self) -> Reason:
        """Why one of them cannot be built anew, "" if all can."""
        if len(self._alive()) < len(self._made):
            return "a DistributedDataParallel of before run() is gone: a new process would wait in its constructor"
        if self._made_before_restore not in (None, len(self._made)):
            return "a DistributedDataParallel is made after session.restore(): leave that call out, as run() restores"
        for module, arguments, _ in self._alive():
            if why := _reason_against(module, arguments):
                return why
        return ""

    def knows(self, module: Any) -> bool:
        return any(known is module for known, *_ in self._alive()) or any(of() is module for of in self._of_round)

    def check_before_forward(self, check: Callable[[], None]) -> None:
        """Call `check` before each forward pass from now on, until `release_group()`; by another thread. A hook that
        was always there would cost each step a moment, and be compiled with the module."""
        for of in (*(of for of, *_ in tuple(self._made)), *tuple(self._of_round)):
            if (module := of()) is not None:
                module.__dict__.setdefault("forward", functools.partial(_checked_forward, check, of))

    def release_group(self) -> None:
        """Drop what keeps the process group alive."""
        of_round, self._of_round = self._of_round, []
        for module in (*(kept for kept, *_ in self._alive()), *filter(None, (of() for of in of_round))):
            for name in _GROUP_ATTRIBUTES:
                module.__dict__.pop(name, None)
            if getattr(module.__dict__.get("forward"), "func", None) is _checked_forward:
                del module.__dict__["forward"]

    def rebuild(self, is_restored: Callable[[Any], bool], has_new_ranks: bool, keeps_values: bool) -> None:
        """Build each of them anew, in the order in which a new process makes them. Every rank calls it.

        The constructor sends rank 0's values to all. Those of a module that `is_restored` afterwards are sent only with
        `has_new_ranks`, where other ranks are in the constructor for the first time, and do not reach this rank's own
        with `keeps_values`.
        """
        from torch.nn import Module

        assert self._build is not None
        own = vars(Module())
        has_sync = "init_sync" in inspect.signature(self._build).parameters
        for module, arguments, trained in self._alive():
            restored = is_restored(module)
            is_sent = has_new_ranks or not (has_sync and restored)
            if not is_sent:
                arguments = {**arguments, "init_sync": False}
            kept = {name: module.__dict__[name] for name in (*own, *_KEPT_ATTRIBUTES) if name in module.__dict__}
            hooks, is_static = module._comm_hooks, module.static_graph
            with (
                warnings.catch_warnings(),
                _values_set_aside(module.module if restored and keeps_values and is_sent else None),
                _trained_as(trained, module),
            ):
                warnings.simplefilter("ignore")  # said when it was made
                self._build(module, module.module, **arguments)
            module.__dict__.update(kept)
            for hook, state in hooks:
                module.register_comm_hook(state, hook)
            if is_static and not module.static_graph:
                module._set_static_graph()


def _checked_forward(check: Callable[[], None], of: weakref.ref[Any], *inputs: Any, **kwargs: Any) -> Any:
    check()
    module: Any = of()
    return type(module).forward(module, *inputs, **kwargs)


@contextlib.contextmanager
def _values_set_aside(module: Any) -> Iterator[None]:
    """Give its parameters and buffers other memory meanwhile: what they have may be saved at any time."""
    import torch

    tensors = [] if module is None else [*module.parameters(), *module.buffers()]
    own = [tensor.data for tensor in tensors]
    for tensor in tensors:
        tensor.data = torch.empty_like(tensor.data)
    try:
        yield
    finally:
        for tensor, data in zip(tensors, own, strict=True):
            tensor.data = data


def _trained_parameters(wrapper: Any) -> dict[str, bool]:
    return {name: parameter.requires_grad for name, parameter in wrapper.module.named_parameters()}


@contextlib.contextmanager
def _trained_as(trained: dict[str, bool], wrapper: Any) -> Iterator[None]:
    """Freeze and unfreeze its parameters as they were, meanwhile: the constructor has only those averaged that are
    trained at that moment, and a script may freeze others before `run`, and train them later.
    """
    now = _trained_parameters(wrapper)
    try:
        for name, parameter in wrapper.module.named_parameters():
            parameter.requires_grad_(trained.get(name, now[name]))
        yield
    finally:
        for name, parameter in wrapper.module.named_parameters():
            parameter.requires_grad_(now[name])


def _reason_against(module: Any, arguments: dict[str, Any]) -> Reason:
    name = type(module.module).__name__
    for argument in ("process_group", "device_mesh", "mixed_precision", "delay_all_reduce_named_params"):
        if arguments.get(argument) is not None:
            return f"DistributedDataParallel({name}, {argument}=...) depends on the process group of its round"
    hooks = getattr(module, "_comm_hooks", [])
    if any(state is not None for _, state in hooks):
        return f"the communication hook of DistributedDataParallel({name}) has a state, which is in no checkpoint"
    if not hooks and getattr(module, "logger", None) is not None and module._get_ddp_logging_data().get("comm_hook"):
        return f"the communication hook of DistributedDataParallel({name}) is one that torch does not name"
    if getattr(module, "_use_python_reducer", False):
        return f"DistributedDataParallel({name}) has torch's Python reducer"
    return ""
