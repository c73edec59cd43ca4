"""The small state of a rank at its last commits: exact, readable after its process has died, and never a mixture."""

from __future__ import annotations

import itertools
import os
import random
import signal
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch

from elasticd.checkpointing.at_fault import step_files, step_record
from elasticd.checkpointing.at_fault.step_record import OtherBuffers, StepRecord
from elasticd.checkpointing.state import generators, training_state
from elasticd.errors import CheckpointError
from tests.library.weak_memory import Store, WeakCore

CPU = torch.device("cpu")
PYTHON: Any = vars(random)["_inst"]
NUMPY: Any = vars(numpy.random.mtrand)["_rand"]


def places(buffers: list[torch.Tensor]) -> list[step_record.BufferPlace]:
    held = dict(enumerate(buffers))
    return [(held, key) for key in held]


DRAWS: list[tuple[str, Callable[[], Any]]] = [
    ("torch", lambda: torch.rand(3)),
    ("torch's half of a pair", lambda: torch.randn(1)),
    ("torch's seed", lambda: torch.manual_seed(5)),
    ("python", random.random),
    ("python's half of a pair", lambda: random.gauss(0, 1)),
    ("numpy", lambda: numpy.random.rand(3)),
    ("numpy's half of a pair", lambda: numpy.random.randn()),
    ("nothing", lambda: None),
]


@pytest.mark.parametrize("is_known", [True, False], ids=["known", "other-versions"])
@pytest.mark.parametrize("draw", [draw for _, draw in DRAWS], ids=[name for name, _ in DRAWS])
def test_random_states_at_each_commit_are_exact(
    tmp_path: Path, draw: Callable[[], Any], is_known: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not is_known:
        monkeypatch.setattr(generators, "_object_memory", lambda _: memoryview(bytes(8)))
    sources = (generators.python_source(PYTHON), *generators.numpy_sources(NUMPY))
    assert [isinstance(each, memoryview) for each in sources] == [is_known] * 3
    record, path = StepRecord(str(tmp_path / "record"), [], [torch.ones(3)]), str(tmp_path / "record")
    for step in range(1, 6):
        draw()
        record.commit(step)
        expected = training_state.to_bytes(training_state.random_state(CPU))
        read = step_record.read(path, step, [])
        assert read is not None
        assert (
            training_state.to_bytes({name: read.random_state[name] for name in training_state.random_state(CPU)})
            == expected
        )
        assert (step_record.read(path, step - 1, []) is not None) == (step > 1)
        assert step_record.read(path, step + 1, []) is None


def test_generator_that_numpy_gets_later_is_found_or_refused(tmp_path: Path) -> None:
    path, before = str(tmp_path / "record"), numpy.random.get_bit_generator()
    record = StepRecord(path, [], [])
    record.commit(1)
    try:
        numpy.random.set_bit_generator(numpy.random.MT19937(7))
        numpy.random.rand()
        record.commit(2)
        found = step_record.read(path, 2, [])
        assert found.random_state["numpy"][1].tolist() == numpy.random.get_state()[1].tolist()
        numpy.random.set_bit_generator(numpy.random.PCG64(7))
        with pytest.raises(CheckpointError, match="numpy's default generator is PCG64"):
            record.commit(3)
    finally:
        numpy.random.set_bit_generator(before)


def test_last_step_is_the_newest_commit(tmp_path: Path) -> None:
    path = str(tmp_path / "record")
    assert step_record.last_committed_step(path) == 0
    record = StepRecord(path, places([torch.ones(5)]), [torch.ones(3)])
    for step in range(1, 4):
        record.record_expected(step)
        assert step_record.last_committed_step(path) == step - 1
        record.commit(step)
        assert step_record.last_committed_step(path) == step


@pytest.mark.parametrize("size", [4, 1 << 22])
@pytest.mark.parametrize("moved", ["buffer", "parameter"])
def test_tensor_that_torch_has_moved_is_found(tmp_path: Path, size: int, moved: str) -> None:
    """It moves a tensor that is sent to another process, and gives the memory back."""
    tensors, path = {"buffer": torch.ones(size), "parameter": torch.ones(size)}, str(tmp_path / "record")
    held = [tensors["buffer"]]
    record = StepRecord(path, places(held), [tensors["parameter"]])
    record.record_expected(1)
    record.commit(1)
    tensors[moved].share_memory_()  # type: ignore[no-untyped-call]
    churn = [torch.full((size,), 7.0) for _ in range(20)]
    for tensor in tensors.values():
        tensor.fill_(2)
    record.record_expected(2)
    record.commit(2)
    if moved == "parameter":  # a piece may still be read where it was: no state is saved until it is located again
        record.locate_tensors()
        record.commit(2)
    committed = step_record.read(path, 2, held)
    expected = step_record.read(path, 2, held, expected=True)
    assert committed is not None and expected is not None
    assert committed.pieces == record.current_pieces()
    assert bool((committed.buffers[0] == 2).all())
    assert record.moved_at == (2 if moved == "buffer" else 0), "what was expected of this step is not known to be right"
    assert record.moved_at or bool((expected.buffers[0] == 2).all())
    assert len(churn) == 20


def test_buffers_are_those_of_the_commit(tmp_path: Path) -> None:
    kinds = [torch.float32, torch.int64, torch.bool, torch.bfloat16]
    buffers = [*(torch.ones(3, 5).to(kind) for kind in kinds), torch.zeros(0), torch.tensor(7)]
    path = str(tmp_path / "record")
    record = StepRecord(path, places(buffers), [torch.ones(3)])
    record.commit(1)
    expected = [buffer.clone() for buffer in buffers]
    for buffer in buffers:
        buffer.zero_()
    found = step_record.read(path, 1, buffers)
    assert found is not None
    assert all(torch.equal(one, other) for one, other in zip(found.buffers, expected, strict=True))
    assert step_record.read(path, 1, buffers[1:]) is None, "another shape"


def test_buffer_that_the_script_replaces_is_followed(tmp_path: Path) -> None:
    """Another tensor of the same shape at once, another shape by another record, which leaves the steps before."""
    path, held = str(tmp_path / "record"), {"mean": torch.ones(3), "count": torch.tensor(7)}
    record = StepRecord(path, [(held, key) for key in held], [torch.ones(3)])
    for step in range(1, 6):
        held["mean"] = held["mean"] * 2
        record.record_expected(step)
        held["mean"] = held["mean"] + 1
        record.commit(step, b"digest")
        assert record.moved_at == step
        for expected, mean in [(True, held["mean"] - 1), (False, held["mean"])][step == 1 :]:
            found = step_record.read(path, step, list(held.values()), expected)
            assert torch.equal(found.buffers[0], mean)
            assert found.digest.rstrip(b"\0") == (b"" if expected else b"digest")
    record = StepRecord(path, [(held, key) for key in held], [torch.ones(4)])
    record.commit(6)
    assert step_record.read(path, 5, list(held.values())) is not None
    for other in (torch.ones(4), torch.ones(3).double(), torch.ones(6)[::2], None):
        held["mean"] = other  # type: ignore[assignment]
        with pytest.raises(OtherBuffers):
            record.commit(7)


@pytest.mark.parametrize(
    ("draw", "same"), [(each, name == "nothing") for name, each in DRAWS], ids=[n for n, _ in DRAWS]
)
def test_expected_commit_counts_while_nothing_draws(tmp_path: Path, draw: Callable[[], Any], same: bool) -> None:
    path, parameters, buffers = str(tmp_path / "record"), [torch.ones(3)], [torch.zeros(2), torch.ones(2)]
    record = StepRecord(path, places(buffers), parameters)
    torch.randn(1), numpy.random.randn(1), random.gauss(0, 1)
    for step in (1, 2):
        record.record_expected(step)
        if step == 2:
            draw()
            buffers[1].zero_()
        record.commit(step)
    committed = step_record.read(path, 2, buffers)
    expected = step_record.read(path, 2, buffers, expected=True)
    assert step_record.read(path, 1, buffers) is not None, "the commit before stays"
    assert step_record.read(path, 1, buffers, expected=True) is not None, "so does what it expected"
    assert committed is not None
    assert expected.has_same_random_state(committed) == same
    theirs = [torch.full((2,), 5.0), torch.full((2,), 6.0)]
    merged = step_record.expected_or_committed(theirs, expected.buffers, committed.buffers)
    assert [each[0].item() for each in merged] == [5.0, 0.0]


def test_process_killed_inside_a_commit_leaves_the_step_before(tmp_path: Path) -> None:
    path, buffer = str(tmp_path / "record"), torch.zeros(4)
    record = StepRecord(path, places([buffer]), [torch.ones(3)])
    record.commit(6)
    child = os.fork()
    if child == 0:
        record._gathers[1].write = lambda: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore[method-assign]
        buffer.fill_(1)
        record.commit(8)
        os._exit(1)  # the kill did not fire
    _, status = os.waitpid(child, 0)
    assert os.WTERMSIG(status) == signal.SIGKILL
    assert step_record.read(path, 8, [buffer]) is None
    assert step_record.read(path, 6, [buffer]) is not None
    record.commit(7)
    assert step_record.read(path, 7, [buffer]) is not None


def test_rank_keeps_what_it_expected_of_a_commit_through_steps_that_are_none(tmp_path: Path) -> None:
    """Where gradients are accumulated a rank may be some steps further than the one that has died."""
    path, buffer = str(tmp_path / "record"), torch.zeros(4)
    for step in (8, 12, 16):  # the same slot, if the step decided
        record = StepRecord(path, places([buffer]), [torch.ones(3)])  # such as after add_param_group()
        record.record_expected(step)
        record.commit(step)
        for accumulated in range(step + 1, step + 4):
            record.record_expected(accumulated)
        found = [
            step_record.read(path, at, [buffer], expected) for at in (step - 4, step) for expected in (False, True)
        ]
        assert [each is not None for each in found] == [step > 8, False, True, True]


def test_what_an_optimizer_keeps_in_the_hosts_memory_for_a_gpu_is_recorded(tmp_path: Path) -> None:
    """A GPU may be a step behind it. Of parameters in the host's memory nothing is recorded."""
    path, parameters = (
        str(tmp_path / "record"),
        [torch.nn.Parameter(torch.ones(2, device=on)) for on in ("cpu", "meta")],
    )
    optimizer = torch.optim.AdamW(parameters)
    for each in parameters:
        optimizer.state[each] = {"step": torch.tensor(0.0), "exp_avg": torch.zeros_like(each)}
    found = dict(step_files.buffer_places({"optimizer": optimizer}))
    assert list(found) == [("optimizer", (1, "step"))]
    record = StepRecord(path, [], [], fixed=list(found.values()))
    held = [optimizer.state[parameters[1]]["step"]]
    for step in (1, 2):
        record.record_expected(step)
        held[0].fill_(step)
        record.commit(step)
    for step in (1, 2):
        committed = step_record.read(path, step, held)
        expected = step_record.read(path, step, held, expected=True)
        assert committed.buffers[0].item() == step
        mine = step_record.expected_or_committed(expected.buffers, expected.buffers, committed.buffers)
        assert mine[0].item() == step, "a rank that died before its commit has expected nothing of them"


@pytest.mark.parametrize("draw", [draw for name, draw in DRAWS if name != "nothing"])
def test_commit_that_is_made_again_has_what_was_drawn_and_keeps_the_one_before(
    tmp_path: Path, draw: Callable[[], Any]
) -> None:
    buffer, path = torch.zeros(3), str(tmp_path / "record")
    record = StepRecord(path, places([buffer]), [])
    for step in (1, 2):
        record.commit(step)
    assert not record.has_drawn()
    draw()
    buffer += 1
    assert record.has_drawn()
    record.replace_commit(2)
    record.mark_next_step_begun()
    again, before = (step_record.read(path, step, [buffer]) for step in (2, 1))
    assert (again.is_next_begun, again.has_late_changes, before.is_next_begun, before.has_late_changes) == (
        True,
        True,
        False,
        False,
    )
    assert again.buffers[0].tolist() == [1.0] * 3
    assert training_state.to_bytes(again.random_state["torch"]) == training_state.to_bytes(torch.get_rng_state())
    assert not record.has_drawn()
    record.commit(3)
    newest = step_record.read(path, 3, [buffer])
    assert newest is not None and not newest.is_next_begun and not newest.has_late_changes


def test_a_slot_that_is_being_written_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the writer's stores become visible in another order."""

    def commits() -> Iterator[Store]:
        for number in itertools.count(1):
            slot, word = number % 2 * 64, struct.pack("<q", number)
            yield from ((slot, struct.pack("<q", -1)), (slot + 16, word), (slot + 40, word), (slot, word))

    found = 0
    for seed in range(300):
        fd = os.open(tmp_path / "record", os.O_RDWR | os.O_CREAT | os.O_TRUNC)
        try:
            os.pwrite(fd, bytes(256), 0)
            core = WeakCore(fd, commits(), seed)
            with monkeypatch.context() as patched:
                patched.setattr(os, "pread", core.pread)
                patched.setattr(step_record, "order_stores", core.barrier)
                for step in range(1, 40):
                    slot = step_record.read_slot(fd, step, 64, 0)
                    assert slot is None or {*struct.unpack_from("<q8xq16xq", slot)} == {step}
                    found += slot is not None
        finally:
            os.close(fd)
    assert found > 100
