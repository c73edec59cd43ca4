"""Random streams: what a checkpoint has of them, and what a rank is told that it does not get."""

from __future__ import annotations

import random
import struct
from collections.abc import Iterator
from typing import Any

import numpy
import pytest
import torch

from elasticd.checkpointing.state import generators, training_state
from elasticd.errors import CheckpointError

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _streams() -> Iterator[None]:
    before = random.getstate()
    with torch.random.fork_rng():
        yield
    random.setstate(before)


def test_streams_continue_where_they_were() -> None:
    state = training_state.random_state(CPU)
    drawn = random.random(), torch.rand(3).tolist()
    assert training_state.set_random_state(state, CPU) == []
    assert (random.random(), torch.rand(3).tolist()) == drawn


def test_stream_of_another_device_is_named() -> None:
    state = training_state.random_state(CPU)
    gpu = torch.device("cuda")
    assert training_state.set_random_state(state, gpu) == ["no random state of a cuda device was saved"]
    saved = {**state, "cuda": state["torch"]}
    (sentence,) = training_state.set_random_state(saved, CPU)
    assert sentence == "the random state of a cuda device was saved, but this rank trains on cpu"


def test_stream_that_lacks_is_an_error() -> None:
    with pytest.raises(CheckpointError, match="random state cannot be used"):
        training_state.set_random_state({"python": (3, torch.zeros(1), None)}, CPU)


@pytest.mark.parametrize(("more", "is_taken_back"), [(0, True), (1, False)])
def test_seed_of_a_data_loader_is_taken_back_if_nothing_else_was_drawn(more: int, is_taken_back: bool) -> None:
    before = training_state.torch_random_state()
    torch.empty((), dtype=torch.int64).random_()  # as DataLoader's iterator draws its seed
    torch.rand(more)
    training_state.undo_seed_draw(before)
    assert torch.equal(training_state.torch_random_state(), before) == is_taken_back


class GpuGenerator:
    """As torch's generator of a GPU: a seed, and how much was drawn."""

    def __init__(self) -> None:
        self.drawn = 4

    def get_state(self) -> torch.Tensor:
        return torch.frombuffer(bytearray(struct.pack("=QQ", 7, self.drawn)), dtype=torch.uint8)

    def initial_seed(self) -> int:
        return 7


class Counting(GpuGenerator):
    """Of a later torch: has its two numbers one by one, too."""

    def get_offset(self) -> int:
        return self.drawn


class CountingOtherwise(GpuGenerator):
    """What it calls an offset is no part of its state."""

    def get_offset(self) -> int:
        return 4 * self.drawn


@pytest.mark.parametrize("kind", [GpuGenerator, Counting, CountingOtherwise])
def test_generator_of_a_gpu_is_read_at_each_look(kind: type[GpuGenerator], monkeypatch: pytest.MonkeyPatch) -> None:
    of_gpu = kind()
    monkeypatch.setattr(torch.cuda, "default_generators", (None, of_gpu))
    found = generators.Generators(torch.device("cuda", 1))
    for drawn in (4, 8):
        of_gpu.drawn = drawn
        numbers = found.read_numbers()
        assert numbers[-1] == struct.pack("=QQ", 7, drawn)
        memory = b"".join(map(bytes, found.memory))
        assert generators.decode(memory, numbers)["cuda"].tolist() == of_gpu.get_state().tolist()


def test_generator_of_a_gpu_with_another_state_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "default_generators", (torch.Generator(),))
    with pytest.raises(CheckpointError, match="the state of the GPU's random generator has another size than in torch"):
        generators.Generators(torch.device("cuda", 0))


def test_generators_of_a_rank_without_a_gpu() -> None:
    numpy.random.get_state()  # imported
    found = generators.Generators()
    numbers = found.read_numbers()
    state = generators.decode(b"".join(map(bytes, found.memory)), numbers)
    expected = training_state.random_state(CPU)
    assert state.keys() == expected.keys() and numbers[-1] == b""
    assert training_state.set_random_state(state, CPU) == []
    words, rest = expected["numpy"][1].tolist(), expected["numpy"][2:]
    assert (state["numpy"][1].tolist(), state["numpy"][2:]) == (words, rest)
    random.gauss(0, 1)  # leaves the half of a pair
    numbers = found.read_numbers()
    state = generators.decode(b"".join(map(bytes, found.memory)), numbers)
    assert state["python"][2] == random.getstate()[2] is not None
    random.gauss(0, 1)
    assert generators.decode(b"".join(map(bytes, found.memory)), found.read_numbers())["python"][2] is None


class Later(random.Random):
    """Of a later python, in whose memory the state is somewhere else."""

    def getstate(self) -> tuple[Any, ...]:
        return (4, *super().getstate()[1:])


def test_generator_of_another_python_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generators, "_object_memory", lambda _: memoryview(bytes(8)))
    with pytest.raises(CheckpointError, match="python's random state is of version 4, not 3"):
        generators.python_source(Later())
