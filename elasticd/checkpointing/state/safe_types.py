"""The types that `torch.load(weights_only=True)` will load, checked before anything is written, by an explicit list.

The list is what the oldest and the newest supported torch both load, pickled as `torch.save` does by default. A refusal
at the save names the key and what to store instead; a refusal at the load, hours later, would lose the work.
"""

from __future__ import annotations

import collections
import enum
import os
import sys
from dataclasses import is_dataclass
from typing import Any

import torch

from elasticd.errors import CheckpointRefused

# Pickle and this walk recurse; both stay far below Python's own limit.
_MAX_DEPTH = 100
# The restricted unpickler knows integers of up to 255 bytes.
_MAX_INT_BITS = 255 * 8 - 1


def check_loadable(state: Any) -> None:
    """Raise CheckpointRefused, naming the path of keys, for the first value in `state` that would not load again."""
    if type(state) is not dict:
        raise CheckpointRefused(f"a checkpoint is a dict of attached objects, not {_type_name(state)}")
    _Walk().visit(state, ())


class _Walk:
    """One walk over a state, with what it has seen: containers that are open (a cycle), memory and its type."""

    def __init__(self) -> None:
        self._plain = (type(None), bool, float, str, bytearray, torch.Size, torch.dtype, torch.device, torch.layout)
        self._allowed = [kind for kind in torch.serialization.get_safe_globals() if isinstance(kind, type)]
        """The types of packages that have registered them, such as torchao's tensors of 8 and 4 bits."""
        self._seen: set[int] = set()
        self._open: set[int] = set()
        # torch.save refuses one memory seen as two types.
        self._memory: dict[tuple[str, int], tuple[torch.dtype, tuple[Any, ...]]] = {}

    def visit(self, value: Any, path: tuple[Any, ...]) -> None:
        """Check one value. `path` holds the keys that lead to it, for the sentence of a refusal."""
        kind = type(value)
        if kind in self._plain:
            return
        if kind is int:
            if value.bit_length() > _MAX_INT_BITS:
                raise _refusal(path, f"is an integer of {value.bit_length()} bits", "store it as a string")
        elif kind is bytes:
            if not value:
                raise _refusal(path, "is empty bytes", "store None, an empty string or a tensor")
        elif kind is torch.Tensor or kind is torch.nn.Parameter:
            self._visit_tensor(value, path)
        elif kind in self._allowed and hasattr(kind, "__tensor_flatten__") and not hasattr(value, "_local_tensor"):
            for name in value.__tensor_flatten__()[0]:
                self.visit(getattr(value, name), (*path, name))
        elif kind in (dict, collections.OrderedDict, collections.Counter, list, tuple, set):
            self._visit_container(value, path)
        else:
            raise _refusal(path, f"is {_type_name(value)}", _advice_for(value))

    def _visit_container(self, value: Any, path: tuple[Any, ...]) -> None:
        """Check a container's items, once each, without cycles and not too deep."""
        if id(value) in self._open:
            raise _refusal(path, "contains itself", "remove the cycle")
        if id(value) in self._seen:
            return
        if len(path) >= _MAX_DEPTH:
            raise _refusal((*path[:8], "..."), f"is nested deeper than {_MAX_DEPTH} levels", "flatten it")
        self._open.add(id(value))
        if isinstance(value, dict):
            for key, item in value.items():
                self.visit(key, (*path, f"(key {key!r:.60})"))
                self.visit(item, (*path, key))
            self._visit_attributes(value, path)
        else:
            for i, item in enumerate(value):
                self.visit(item, (*path, i))
        self._open.discard(id(value))
        self._seen.add(id(value))

    def _visit_attributes(self, value: Any, path: tuple[Any, ...]) -> None:
        """Attributes that pickle writes with the value: torch sets `_metadata` on an OrderedDict."""
        for name, item in getattr(value, "__dict__", {}).items():
            self.visit(item, (*path, name))

    def _visit_tensor(self, tensor: torch.Tensor, path: tuple[Any, ...]) -> None:
        """Check a tensor: kinds that torch cannot save, and memory that is seen as two types."""
        if id(tensor) in self._seen:
            return
        self._seen.add(id(tensor))
        if any(name is not None for name in getattr(tensor, "names", ())):
            raise _refusal(path, "is a tensor with named dimensions", "store tensor.rename(None)")
        if tensor.is_nested:
            raise _refusal(path, "is a nested tensor", "store its parts, tensor.unbind()")
        if tensor.device.type == "meta":
            raise _refusal(path, "is on the meta device and holds no values", "materialize it first")
        self._visit_attributes(tensor, path)
        if tensor.layout is not torch.strided or tensor.is_quantized:
            return
        storage = tensor.untyped_storage()
        if storage.data_ptr():
            where = (str(tensor.device), storage.data_ptr())
            dtype, first = self._memory.setdefault(where, (tensor.dtype, path))
            if dtype != tensor.dtype:
                what = f"is {tensor.dtype} in the memory of {_dotted(first)}, which is {dtype}"
                raise _refusal(path, what, "store tensor.clone()")


def _refusal(path: tuple[Any, ...], what: str, instead: str) -> CheckpointRefused:
    """Return the error with the path of keys, what is there, and what to store instead."""
    return CheckpointRefused(
        f"{_dotted(path)} {what}, which torch.load(weights_only=True) would not load again; {instead}. "
        "Nothing was saved"
    )


def _dotted(path: tuple[Any, ...]) -> str:
    return ".".join(str(part) for part in path) or "the state"


def _type_name(value: Any) -> str:
    kind = type(value)
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"


def _advice_for(value: Any) -> str:
    """Return what the script can store instead, by the kind of the value; the order goes from the particular to the
    general.
    """
    if isinstance(value, type):
        return "store its name, and look it up in load_state_dict()"
    numpy = sys.modules.get("numpy")
    if numpy is not None and isinstance(value, numpy.ndarray):
        return "store torch.from_numpy(x) and turn it back in load_state_dict()"
    if numpy is not None and isinstance(value, numpy.generic):
        return "store x.item()"
    cases: list[tuple[Any, str]] = [
        (torch.Generator, "store x.get_state()"),
        (
            torch.Tensor,
            "import the package that registers its class (torch.serialization.add_safe_globals), or store a plain "
            "tensor, x.as_subclass(torch.Tensor); gather a DTensor on all ranks before",
        ),
        (complex, "store [x.real, x.imag]"),
        (enum.Enum, "store x.value"),
        (os.PathLike, "store str(x)"),
        (collections.defaultdict, "store dict(x)"),
        (dict, "store dict(x)"),
        (tuple, "store tuple(x) or x._asdict()"),
        ((list, collections.deque, range), "store list(x)"),
        (frozenset, "store a set or a sorted list"),
        (str, "store str(x)"),
        (int, "store int(x)"),
        (float, "store float(x)"),
    ]
    for kinds, instead in cases:
        if isinstance(value, kinds):
            return instead
    if callable(getattr(value, "state_dict", None)):
        return "store x.state_dict()"
    if is_dataclass(value):
        return "store dataclasses.asdict(x)"
    if callable(value):
        return "store its name, and look it up in load_state_dict()"
    return "store its parts: tensors, numbers, strings, lists and dicts"
