"""Random streams: what a checkpoint has of them, and what a rank is told that it does not get."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
import torch

from elasticd.checkpointing.state import training_state
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
    before = training_state.torch_state()
    torch.empty((), dtype=torch.int64).random_()  # as DataLoader's iterator draws its seed
    torch.rand(more)
    training_state.take_back_seed(before)
    assert torch.equal(training_state.torch_state(), before) == is_taken_back
