"""A state that is read in place is the state that is loaded from mapped tensors, and its memory is its own."""

from __future__ import annotations

import copy
import gc
import itertools
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from elasticd.checkpointing.state import in_place, training_state
from elasticd.checkpointing.state.layout import load_mapped
from elasticd.checkpointing.storage.lineage import Entry, open_verified
from elasticd.errors import CheckpointCorrupt, CheckpointError
from tests.library import checkpoints
from tests.library.checkpoints import Kept

Objects = dict[str, Any]


class Doubling(torch.nn.Linear):
    """Loads in a way of its own: the tensors are exchanged and doubled."""

    def _load_from_state_dict(self, state_dict: dict[str, Any], *rest: Any) -> None:
        state_dict.update(w1=state_dict["w2"] * 2, w2=state_dict["w1"] * 2)
        super()._load_from_state_dict(state_dict, *rest)

    def __init__(self) -> None:
        super().__init__(1, 1, bias=False)
        self.w1, self.w2 = (torch.nn.Parameter(torch.randn(50)) for _ in range(2))


class Compiled(torch.nn.Module):
    """As torch.compile wraps a module."""

    def __init__(self, module: torch.nn.Module) -> None:
        super().__init__()
        self._orig_mod = module


class Tied(torch.nn.Module):
    def __init__(self, tied: bool) -> None:
        super().__init__()
        self.a, self.b = torch.nn.Linear(30, 30), torch.nn.Linear(30, 30)
        if tied:
            self.b.weight = self.a.weight


class Flat(torch.nn.Module):
    """Its parameters lie in one memory."""

    def __init__(self, gap: int) -> None:
        super().__init__()
        memory = torch.randn(200)
        self.a, self.b = (torch.nn.Parameter(memory[start : start + 100]) for start in (0, gap))


class Spectrum(torch.nn.Module):
    """Its buffer is the conjugate of what lies in its memory, or that itself."""

    def __init__(self, is_conjugate: bool) -> None:
        super().__init__()
        memory = torch.randn(60, dtype=torch.complex64)
        self.register_buffer("it", memory.conj() if is_conjugate else memory)


def net(dtype: torch.dtype = torch.float32) -> torch.nn.Module:
    layers = [torch.nn.Conv2d(3, 7, 3), torch.nn.BatchNorm2d(7), torch.nn.Flatten(), torch.nn.Linear(7, 5)]
    return torch.nn.Sequential(*layers).to(dtype)


def hooked() -> torch.nn.Module:
    def exchange(_: Any, state: dict[str, Any], prefix: str, *__: Any) -> None:
        state["0.weight"], state["1.weight"] = state["1.weight"], state["0.weight"]

    module = torch.nn.Sequential(torch.nn.Linear(9, 9), torch.nn.Linear(9, 9))
    module.register_load_state_dict_pre_hook(exchange)
    return module


def optimized(steps: int, make: Callable[..., Any] = torch.optim.Adam, **options: Any) -> Objects:
    model = torch.nn.Sequential(torch.nn.Linear(33, 21), torch.nn.Linear(21, 1))
    optimizer = make(model.parameters(), **options)

    def closure() -> Any:
        optimizer.zero_grad()
        loss = model(torch.randn(4, 33)).square().mean()
        loss.backward()
        return loss

    for _ in range(steps):
        optimizer.step(closure)
    return {"model": model, "optimizer": optimizer}


class Restarting(torch.optim.SGD):
    """Loads in a way of its own: with half of the momentum."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        for values in self.state.values():
            values["momentum_buffer"] = values["momentum_buffer"] / 2


def hooked_optimizer() -> Objects:
    def halve(_: Any, state: dict[str, Any]) -> dict[str, Any]:
        halved = {number: {key: value / 2 for key, value in own.items()} for number, own in state["state"].items()}
        return {**state, "state": halved}

    objects = optimized(1)
    objects["optimizer"].register_load_state_dict_pre_hook(halve)
    return objects


def one_of(make: Callable[[], Any]) -> Callable[[], Objects]:
    return lambda: {"it": make()}


SHARED = torch.randn(40)
CASES: dict[str, tuple[Callable[[], Objects], Callable[[], Objects], int]] = {
    # what is saved, what it is loaded into, how many storages are read in place
    "a module with buffers": (one_of(net), one_of(net), 9),
    "another type": (one_of(net), one_of(lambda: net(torch.float64)), 1),
    "bfloat16": (one_of(lambda: net(torch.bfloat16)), one_of(lambda: net(torch.bfloat16)), 9),
    "channels last": (
        one_of(lambda: net().to(memory_format=torch.channels_last)),
        one_of(lambda: net().to(memory_format=torch.channels_last)),
        9,
    ),
    "channels last, later not": (one_of(lambda: net().to(memory_format=torch.channels_last)), one_of(net), 8),
    "a part was compiled by itself": (one_of(net), one_of(lambda: torch.nn.Sequential(*map(Compiled, net()))), 9),
    "a conjugate, later": (one_of(lambda: Spectrum(False)), one_of(lambda: Spectrum(True)), 0),
    "complex numbers": (one_of(lambda: Spectrum(False)), one_of(lambda: Spectrum(False)), 1),
    "tied weights": (one_of(lambda: Tied(True)), one_of(lambda: Tied(True)), 3),
    "tied weights, later not": (one_of(lambda: Tied(True)), one_of(lambda: Tied(False)), 2),
    "weights, later tied": (one_of(lambda: Tied(False)), one_of(lambda: Tied(True)), 0),
    "parameters side by side": (one_of(lambda: Tied(False)), one_of(lambda: Tied(False)), 4),
    "parameters in one memory": (one_of(lambda: Flat(100)), one_of(lambda: Flat(100)), 0),
    "separate, later in one memory": (
        one_of(lambda: copy.deepcopy(torch.nn.ParameterDict({"a": torch.randn(100), "b": torch.randn(100)}))),
        one_of(lambda: Flat(100)),
        1,
    ),
    "a hook that exchanges weights": (one_of(hooked), one_of(hooked), 0),
    "a method that exchanges weights": (one_of(Doubling), one_of(Doubling), 0),
    "Adam with a state": (lambda: optimized(3), lambda: optimized(1), 16),
    "Adam without a state": (lambda: optimized(3), lambda: optimized(0), 16),
    "amsgrad, later": (lambda: optimized(3, amsgrad=True), lambda: optimized(2), 20),
    "a hook that changes momentum": (lambda: optimized(3), hooked_optimizer, 4),
    "a method that changes momentum": (
        lambda: optimized(3, Restarting, lr=0.1, momentum=0.9),
        lambda: optimized(1, Restarting, lr=0.1, momentum=0.9),
        4,
    ),
    "LBFGS": (lambda: optimized(3, torch.optim.LBFGS), lambda: optimized(1, torch.optim.LBFGS), 7),
    "an object that keeps it": (
        one_of(
            lambda: Kept(a=torch.randn(70000), b=[torch.nn.Parameter(torch.randn(3)), (torch.randn(5).to_sparse(),)])
        ),
        one_of(Kept),
        2,
    ),
    "an object with views of one memory": (one_of(lambda: Kept(a=SHARED, b=SHARED[3:])), one_of(Kept), 0),
    "memory of two objects": (
        lambda: {"a": Kept(x=SHARED), "b": Kept(y=SHARED)},
        lambda: {"a": Kept(), "b": Kept()},
        0,
    ),
    "empty and odd": (
        one_of(
            lambda: Kept(e=torch.empty(0), t=torch.randn(4, 6).t(), s=torch.randn(9)[::2], x=torch.ones(1).expand(8))
        ),
        one_of(Kept),
        1,
    ),
}


def saved(directory: Path, objects: Objects) -> Entry:
    return checkpoints.save(directory, state=training_state.collect_states(objects))


@contextmanager
def opened(entry: Entry) -> Iterator[int]:
    fd = open_verified(entry)
    try:
        yield fd
    finally:
        os.close(fd)


def content_of(objects: Objects) -> Any:
    return copy.deepcopy(training_state.collect_states(objects))


def equal(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        alike = (type(one), one.dtype, one.shape, one.layout) == (type(other), other.dtype, other.shape, other.layout)
        return alike and torch.equal(one.to_dense(), other.to_dense())
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(equal(value, other[key]) for key, value in one.items())
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(equal, one, other))
    return bool(one == other)


def load_in_place(entry: Entry, target: Objects) -> list[int]:
    found: list[int] = []
    with opened(entry) as fd:
        content = load_mapped(fd)

        def read() -> list[int]:
            found.extend(in_place.read(fd, content, target, entry.manifest.checksum))
            return found

        training_state.load_attached(target, content, (), read)
    return found


@pytest.mark.parametrize("kind", CASES)
def test_read_in_place_is_what_mapped_tensors_load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    make_saved, make_target, count = CASES[kind]
    torch.manual_seed(1)  # LBFGS diverges from some weights
    entry = saved(tmp_path, make_saved())
    mapped = make_target()
    training_state.load_attached(mapped, checkpoints.load(entry))
    expected = content_of(mapped)
    for on_host, step_bytes in itertools.product((True, False), (4096, 4 << 20)):
        monkeypatch.setattr(in_place, "_READ_BYTES", step_bytes)
        if not on_host:  # as on a GPU
            monkeypatch.setattr(in_place, "_host_memory", lambda piece: None)
        target = make_target()
        assert len(load_in_place(entry, target)) == count, (on_host, step_bytes)
        assert equal(content_of(target), expected), (on_host, step_bytes)
    gc.collect()
    assert str(entry.path) not in Path("/proc/self/maps").read_text()


@pytest.mark.parametrize("make", [torch.optim.Adam, torch.optim.LBFGS, torch.optim.Adagrad])
@pytest.mark.parametrize("steps", [0, 1])
def test_optimizer_keeps_its_own_memory_where_tensors_are_mapped(tmp_path: Path, make: Any, steps: int) -> None:
    entry, target = saved(tmp_path, optimized(3, make)), optimized(steps, make)
    before = training_state.storage_addresses(target["optimizer"].state)
    loaded = checkpoints.load(entry)
    training_state.load_attached(target, loaded)
    own = training_state.storage_addresses(target["optimizer"].state)
    assert training_state.storage_addresses(loaded).isdisjoint(own)
    assert equal(content_of(target), loaded)
    if steps and make is torch.optim.Adam:
        assert own == before


def test_damage_after_verification_is_found(tmp_path: Path) -> None:
    entry = saved(tmp_path, {"it": net()})
    target = net()
    with opened(entry) as fd:
        content = load_mapped(fd)
        path = entry.path / "state.pt"
        data = bytearray(path.read_bytes())
        data[500] ^= 1
        path.write_bytes(data)
        with pytest.raises(CheckpointCorrupt, match="damaged after it had been verified"):
            in_place.read(fd, content, {"it": target}, entry.manifest.checksum)


def test_nothing_is_changed_where_the_checkpoint_lacks_an_object(tmp_path: Path) -> None:
    entry = saved(tmp_path, {"it": net()})
    target = {"it": net(), "other": net()}
    before = content_of(target)
    with opened(entry) as fd:
        content = load_mapped(fd)
        with pytest.raises(CheckpointError, match="holds nothing for other"):
            training_state.load_attached(target, content, (), lambda: in_place.read(fd, content, target))
    assert equal(content_of(target), before)


def test_what_an_optimizer_lacks_is_made_on_the_device_of_its_parameter(tmp_path: Path) -> None:
    """The meta device stands for a GPU. A count stays where the state has it, on the host."""

    def adagrad(device: str) -> torch.optim.Optimizer:
        weight = torch.nn.Parameter(torch.ones(700, device=device))
        optimizer = torch.optim.Adagrad([weight])
        weight.grad = torch.full_like(weight, 3)
        return optimizer

    trained, target = adagrad("cpu"), adagrad("meta")
    trained.step()
    target.state.clear()
    entry = saved(tmp_path, {"it": trained})
    with opened(entry) as fd:
        content = load_mapped(fd)
        pieces, replace = in_place.find_places(fd, content, {"it": target})
        assert sorted(piece.device.type for piece in pieces.values()) == ["cpu", "meta"]
        in_place.read_pieces(fd, pieces, entry.manifest.checksum)
        replace()
    values = content["it"]["state"][0]
    assert (values["step"], values["step"].device.type) == (1, "cpu")
    assert (values["sum"].shape, values["sum"].device.type) == ((700,), "meta")


def test_parameters_without_memory_are_not_read(tmp_path: Path) -> None:
    entry, target = (
        saved(tmp_path, {"it": torch.nn.Linear(3, 3, bias=False)}),
        torch.nn.Linear(3, 3, bias=False, device="meta"),
    )
    with opened(entry) as fd:
        assert in_place.read(fd, load_mapped(fd), {"it": target}) == frozenset()
