"""What a checkpoint may hold, compared with the restricted unpickler of the installed torch."""

from __future__ import annotations

import collections
import dataclasses
import datetime
import enum
import fractions
import functools
import io
import os
import random
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch

from elasticd.checkpointing.state import training_state as states
from elasticd.checkpointing.state.rank_differences import ComparedState
from elasticd.checkpointing.state.safe_types import check_loadable
from elasticd.errors import CheckpointRefused
from tests.library import checkpoints
from tests.library.checkpoints import verified_lineage


class Point(collections.namedtuple("Point", "x y")):
    __slots__ = ()


class Color(enum.Enum):
    RED = 1


class Level(enum.IntEnum):
    LOW = 1


class Text(str):
    __slots__ = ()


class MyTensor(torch.Tensor):
    pass


@dataclasses.dataclass
class Settings:
    rate: float = 0.1


def compressed(tensor: torch.Tensor) -> list[torch.Tensor]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # "beta state"
        return [tensor.to_sparse_csr(), tensor.to_sparse_bsc((2, 2))]


class Kept:
    """Keeps the state that it gets."""

    def state_dict(self) -> dict[str, Any]:
        return self.state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state = state


def opens(value: Any) -> bool:
    """Whether plain torch.load opens what torch.save writes of it."""
    buffer = io.BytesIO()
    try:
        torch.save({"value": value}, buffer)
        buffer.seek(0)
        torch.load(buffer, weights_only=True)
    except Exception:  # noqa: BLE001 - every way of not loading it counts
        return False
    return True


def ordered_with_attribute(value: Any) -> collections.OrderedDict[str, Any]:
    found: collections.OrderedDict[str, Any] = collections.OrderedDict(a=1)
    found._metadata = value  # type: ignore[attr-defined]
    return found


def tensor_with_attribute(value: Any) -> torch.Tensor:
    tensor = torch.ones(2)
    tensor.note = value  # type: ignore[attr-defined]
    return tensor


def nest(depth: int) -> list[Any]:
    value: list[Any] = []
    for _ in range(depth):
        value = [value]
    return value


def trained(make: Any) -> Any:
    model = torch.nn.Linear(3, 3)
    optimizer = make(model.parameters())
    model(torch.ones(3)).sum().backward()
    optimizer.step()
    return optimizer


SGD = functools.partial(torch.optim.SGD, lr=0.1)
SHARED = torch.ones(3)

ACCEPTED: dict[str, Any] = {
    "None": None,
    "bools": [True, False],
    "integers": [0, -1, 1 << 31, 1 << 64, -(1 << 64), (1 << 2039) - 1, -(1 << 2039) + 1],
    "floats": [0.5, float("nan"), float("-inf"), -0.0],
    "strings": ["", "a", "火", "\x00", "\udc80"],
    "bytes": b"\x00\xff",
    "bytearrays": [bytearray(), bytearray(b"\x00\xff")],
    "containers": {"a": [1, (2, ()), {}], 3: {4.5: None, (1, "b"): set(), None: {1, "x"}, True: b"x"}},
    "OrderedDict": collections.OrderedDict(a=1),
    "OrderedDict with attributes": ordered_with_attribute({"version": 2}),
    "Counter": collections.Counter("abca"),
    "Size": torch.Size([2, 3]),
    "dtypes": [torch.float32, torch.bfloat16, torch.bool, torch.uint8, torch.complex64, torch.float8_e4m3fn],
    "devices": [torch.device("cpu"), torch.device("cuda", 1)],
    "layout": torch.strided,
    "tensors": [
        torch.ones(dtype_shape, dtype=dtype)
        for dtype_shape in ((), (0,), (2, 3))
        for dtype in (
            torch.float32,
            torch.float64,
            torch.float16,
            torch.bfloat16,
            torch.int64,
            torch.uint8,
            torch.bool,
            torch.complex64,
        )
    ],
    "views": [torch.arange(10)[2:5], torch.ones(2, 3).t(), torch.ones(1).expand(4)],
    "conjugated": torch.ones(2, dtype=torch.complex64).conj(),
    "a leaf that needs a gradient": torch.ones(2, requires_grad=True),
    "Parameter": torch.nn.Parameter(torch.ones(2)),
    "Buffer": torch.nn.Buffer(torch.ones(2)),
    "sparse": torch.eye(3).to_sparse(),
    "compressed sparse": compressed(torch.eye(4)),
    "tensor with attributes": tensor_with_attribute({"a": 1}),
    "shared": [SHARED, SHARED, SHARED[1:]],
    "deep": nest(90),
    "random states": [torch.get_rng_state(), [random.getstate()[0], list(random.getstate()[1])]],
    "python's random state": random.getstate(),
    "Module": torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2), torch.nn.LSTM(2, 2)).state_dict(),
    "GradScaler": torch.amp.GradScaler("cpu").state_dict(),
}


def in_sequence(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.SequentialLR:
    schedulers = [
        torch.optim.lr_scheduler.ConstantLR(optimizer),
        torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9),
    ]
    return torch.optim.lr_scheduler.SequentialLR(optimizer, schedulers, [3])


TRAINED: dict[str, Callable[[], Any]] = {
    "SGD": lambda: trained(functools.partial(SGD, momentum=0.9)),
    "AdamW": lambda: trained(torch.optim.AdamW),
    "Adagrad": lambda: trained(torch.optim.Adagrad),
    "Rprop": lambda: trained(torch.optim.Rprop),
    "MultiStepLR": lambda: torch.optim.lr_scheduler.MultiStepLR(trained(SGD), [2, 2, 5]),
    "OneCycleLR": lambda: torch.optim.lr_scheduler.OneCycleLR(trained(SGD), 1.0, total_steps=9),
    "LambdaLR": lambda: torch.optim.lr_scheduler.LambdaLR(trained(SGD), lambda step: 0.5),
    "SequentialLR": lambda: in_sequence(trained(SGD)),
    "ReduceLROnPlateau": lambda: torch.optim.lr_scheduler.ReduceLROnPlateau(trained(SGD)),
}
"""Made by their test: torch's first optimizer imports its compiler."""


@pytest.mark.filterwarnings("ignore:Sparse")
@pytest.mark.parametrize("kind", [*ACCEPTED, *TRAINED])
def test_accepted_state_opens_with_torch_load(tmp_path: Path, kind: str) -> None:
    value = TRAINED[kind]().state_dict() if kind in TRAINED else ACCEPTED[kind]
    entry = checkpoints.save(tmp_path, state={"value": value})
    loaded = torch.load(entry.path / "state.pt", weights_only=True)["value"]
    assert type(loaded) is type(value)
    assert str(checkpoints.load(entry)["value"]) == str(loaded)
    kept = Kept()
    states.load_attached({"kept": kept}, {"kept": checkpoints.load(entry)})
    assert str(kept.state["value"]) == str(loaded)


# What to store, beside the kinds of things; True: weights_only=True refuses it, too.
REFUSED: dict[str, tuple[Any, str, bool]] = {
    "numpy scalar": (numpy.float64(1), "x.item()", True),
    "numpy integer": (numpy.int64(1), "x.item()", True),
    "numpy array": (numpy.ones(2), "torch.from_numpy(x)", True),
    "numpy state": (numpy.random.get_state(), "torch.from_numpy(x)", True),
    "generator": (torch.Generator(), "x.get_state()", True),
    "tensor subclass": (torch.ones(2).as_subclass(MyTensor), "a plain tensor", True),
    "namedtuple": (Point(1, 2), "x._asdict()", True),
    "enum": (Color.RED, "x.value", True),
    "enum that is an int": (Level.LOW, "x.value", True),
    "path": (Path("a"), "str(x)", True),
    "str subclass": (Text("a"), "str(x)", True),
    "defaultdict": (collections.defaultdict(list), "dict(x)", True),
    "deque": (collections.deque([1]), "list(x)", True),
    "range": (range(3), "list(x)", True),
    "frozenset": (frozenset([1]), "a set", True),
    "module": (torch.nn.Linear(1, 1), "x.state_dict()", True),
    "dataclass": (Settings(), "dataclasses.asdict(x)", True),
    "function": (len, "its name", True),
    "lambda": (lambda: 0, "its name", True),
    "class": (Settings, "its name", True),
    "datetime": (datetime.datetime(2026, 1, 1), "its parts", True),
    "fraction": (fractions.Fraction(1, 3), "its parts", True),
    "memory format": (torch.channels_last, "its parts", True),
    "empty bytes": (b"", "None", True),
    "huge integer": (1 << 2040, "a string", True),
    "in a list's tail": ([1, 2, (3, {"a": [Color.RED]})], "x.value", True),
    "as a key": ({Color.RED: 1}, "x.value", True),
    "as an attribute": (ordered_with_attribute(Color.RED), "x.value", True),
    "as a tensor's attribute": (tensor_with_attribute(Color.RED), "x.value", True),
    "two types of one memory": ([SHARED, SHARED.view(torch.int32)], "tensor.clone()", True),
    # These open with the newest torch and Python, not with the oldest ones supported, or hold nothing to restore.
    "complex": (1j, "[x.real, x.imag]", False),
    "no values": (torch.ones(2, device="meta"), "materialize", False),
    "nested too deep": (nest(2000), "flatten", False),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_refused_value_names_key_and_replacement(tmp_path: Path, kind: str) -> None:
    refuses(tmp_path, *REFUSED[kind])


def test_refused_optimizer_names_key_and_replacement(tmp_path: Path) -> None:
    refuses(tmp_path, trained(SGD), "x.state_dict()", True)


def refuses(tmp_path: Path, value: Any, instead: str, unloadable: bool) -> None:
    assert not (opens(value) and unloadable)
    with pytest.raises(CheckpointRefused) as refused:
        checkpoints.save(tmp_path, state={"model": {"value": value}})
    assert str(refused.value).startswith("model.value")
    assert instead in str(refused.value)
    assert os.listdir(tmp_path) == []


def test_refusal_names_key_path() -> None:
    state = {"optimizer": {"state": {3: {"foo": numpy.float32(1)}}, "param_groups": [{"lr": 0.1}]}}
    with pytest.raises(CheckpointRefused, match=r"^optimizer\.state\.3\.foo is numpy\.float32, .*x\.item\(\)"):
        check_loadable(state)
    with pytest.raises(CheckpointRefused, match=r"^groups\.1\.fn is .*function"):
        check_loadable({"groups": [{}, {"fn": nest}]})
    with pytest.raises(CheckpointRefused, match=r"^b is torch\.int32 in the memory of a\.0, "):
        check_loadable({"a": [SHARED], "b": SHARED.view(torch.int32)})
    with pytest.raises(CheckpointRefused, match="is a dict of attached objects, not list"):
        check_loadable([1])


def test_cyclic_state_is_refused() -> None:
    circle: dict[str, Any] = {"a": []}
    circle["a"].append(circle)
    with pytest.raises(CheckpointRefused, match=r"^state\.a\.0 contains itself"):
        check_loadable({"state": circle})


def test_shared_values_are_checked_once() -> None:
    value: list[Any] = [1]
    for _ in range(60):
        value = [value, value]  # 2 ** 60 ways down
    check_loadable({"value": value})


def test_non_json_cursor_is_refused(tmp_path: Path) -> None:
    for cursor in ({"a": torch.ones(1)}, {"a": float("nan")}, {"a": {1, 2}}):
        with pytest.raises(CheckpointRefused, match=r"^cursor: "):
            checkpoints.save(tmp_path, state={}, cursor=cursor)
    assert os.listdir(tmp_path) == []
    cursor = {"7": [1, (2, 3)], "name": "\udc80", "big": 1 << 80, "x": 0.1}
    checkpoints.save(tmp_path, state={}, cursor=cursor)
    (found,), _ = verified_lineage(tmp_path)
    assert found.manifest.cursor == {"7": [1, [2, 3]], "name": "\udc80", "big": 1 << 80, "x": 0.1}


def test_unpicklable_state_leaves_no_checkpoint(tmp_path: Path) -> None:
    class Fails:
        def __reduce__(self) -> Any:
            raise TypeError("cannot be pickled")

    tensor = torch.ones(2)
    tensor._backward_hooks = Fails()  # type: ignore[assignment]  # pickled beside the attributes the walk looks at
    state: Any = {"value": tensor}
    with pytest.raises(CheckpointRefused, match="the state cannot be pickled: "):
        checkpoints.save(tmp_path, state=state)
    assert os.listdir(tmp_path) == []


def test_state_that_contains_itself_is_refused_with_the_reason_and_not_by_its_digest() -> None:
    kept = Kept()
    content: dict[str, Any] = {}
    kept.state = content
    content["itself"] = content
    assert ComparedState().describe({"kept": kept}, {}, 2, 1, True)[0] == {}
    with pytest.raises(CheckpointRefused, match=r"kept\.itself contains itself"):
        check_loadable(states.collect_states({"kept": kept}))


class Halves(torch.Tensor):
    """Made of two tensors, as those of 8 bits are of numbers and scales."""

    @staticmethod
    def __new__(cls, first: torch.Tensor, second: torch.Tensor) -> Halves:
        made: Halves = torch.Tensor._make_wrapper_subclass(cls, (4,))  # type: ignore[attr-defined]
        made.first, made.second = first, second  # type: ignore[attr-defined]
        return made

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["first", "second"], None

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return cls(args[0].first, args[0].second)  # of detach()


def test_tensor_class_that_its_package_has_registered_is_saved(tmp_path: Path) -> None:
    """As torchao registers its own; without that, torch.load would refuse it."""
    kept = {"optimizer": {"state": {0: {"exp_avg": Halves(torch.ones(2), torch.full((2,), 3.0))}}, "param_groups": []}}
    with pytest.raises(CheckpointRefused, match="import the package that registers its class"):
        check_loadable(kept)
    with torch.serialization.safe_globals([Halves]):
        check_loadable(kept)
        loaded = checkpoints.load(checkpoints.save(tmp_path, state=kept))
    found = loaded["optimizer"]["state"][0]["exp_avg"]
    assert type(found) is Halves
    assert [each.tolist() for each in states.tensors(found)] == [[1.0, 1.0], [3.0, 3.0]]
