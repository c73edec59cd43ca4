"""What a rank answers to the launcher at a fault, and that its forked children keep apart."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from elasticd.checkpointing.at_fault import committed_state, donor_rules, step_files
from elasticd.checkpointing.at_fault.donor import MOST_TRIALS, TRIALS, Donor
from elasticd.checkpointing.at_fault.step_record import StepRecord
from elasticd.checkpointing.context import SaveContext
from elasticd.checkpointing.directory_writes import DirectoryWrites
from elasticd.checkpointing.memory.buffers import KILLED
from elasticd.checkpointing.memory.writer_client import WriterClient
from elasticd.errors import CheckpointError, CheckpointRefused
from elasticd.session import Session


@pytest.mark.parametrize(("can_copy", "expected"), [(True, ["saving", "donated"] * 2), (False, ["donated"] * 2)])
def test_launcher_gets_an_answer_whatever_a_rank_raises(can_copy: bool, expected: list[str]) -> None:
    writer, rank = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    donor: Any = SimpleNamespace(_socket=rank, _why="", _change_s=0.0, _committed=SimpleNamespace(copies=None))

    def fail(until: float) -> None:
        raise AssertionError("a mistake")

    donor._can_copy = lambda: can_copy
    donor._catch_up, donor._give_up = fail, functools.partial(setattr, donor, "_why")
    with writer, rank:
        for _ in range(2):
            writer.send(json.dumps({"save": 1}).encode())
        writer.shutdown(socket.SHUT_WR)
        assert Donor._answer_requests(donor) == ""
        answers = [json.loads(writer.recv(100))["do"] for _ in expected]
    assert answers == expected
    assert donor._why == ("AssertionError: a mistake" if can_copy else "")


@pytest.mark.parametrize(
    ("copy_s", "step_s", "gives_up_at"),
    [
        (150e-6, 0.01, 0),
        (300e-6, 0.01, 128),
        (300e-6, 0.2, 0),  # of a long step it is less
        (lambda commit: 1.0 if commit < 100 else 150e-6, 0.01, 0),  # the machine was busy
    ],
)
def test_rank_gives_up_where_recording_a_step_takes_too_long(
    monkeypatch: pytest.MonkeyPatch, copy_s: Any, step_s: float, gives_up_at: int
) -> None:
    now = 0.0
    monkeypatch.setattr("time.perf_counter", lambda: now)
    committed: Any = SimpleNamespace(commits=0, set_step_s=abs)
    donor: Any = SimpleNamespace(_committed=committed, _trials=TRIALS, _copy_s=1e9, _step_s=1e9, _at=0.0, _expect_s=0.0)
    donor._optimized = True
    gave_up: list[int] = []
    donor._give_up = lambda _: gave_up.append(committed.commits)

    def commit(_: int, skipped: bool) -> str:
        assert not skipped
        nonlocal now
        committed.commits += 1
        now += copy_s(committed.commits) if callable(copy_s) else copy_s
        return ""

    committed.commit = commit
    donor._measure = functools.partial(Donor._measure, donor)
    for step in range(1, 2 * MOST_TRIALS):
        now += step_s
        Donor._copy(donor, step)
    assert gave_up == [gives_up_at] * (gives_up_at > 0)


def test_forked_child_leaves_what_is_its_parents() -> None:
    asked: list[object] = []
    nothing: Any = None
    committed = SimpleNamespace(expect=asked.append, commits=0)
    parent = os.getppid()  # as in a child of that process
    donor: Any = SimpleNamespace(_next_step=5, _why="", _committed=committed, _trials=0, _pid=parent)
    donor._is_forked = functools.partial(Donor._is_forked, donor)
    Donor._expect(donor, nothing)
    writer: Any = SimpleNamespace(wait=lambda *of: asked.append(of))
    rank0: Any = SimpleNamespace(rank=0)
    writes = DirectoryWrites(SaveContext(nothing, rank0, nothing, nothing, nothing, saves=1, writer=writer))
    writes.expect(10)
    writes._pid = parent
    assert not writes.wait()
    assert asked == []


def test_answer_without_a_buffer_is_an_error() -> None:
    writer, rank = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with writer, rank:
        writer.send(b'{"writing": false}')
        with pytest.raises(OSError, match="has no buffer"):
            WriterClient("", 0, 1, True, _socket=rank).open((1, 1))


@pytest.mark.parametrize("held", [False, True])
@pytest.mark.parametrize("learned", ["at the next save", "at the end"])
def test_save_that_was_lost_with_its_writer_is_reported_once(tmp_path: Path, learned: str, held: bool) -> None:
    """Rank 0 had copied, another rank had not when the writer was killed."""

    def copy(*_: object) -> None:
        raise BrokenPipeError

    events: list[tuple[str, int]] = []
    note = SimpleNamespace(write=lambda kind, _, step, **__: events.append((kind, step)), path=None)
    phase = SimpleNamespace(current_phase=None, set_phase=lambda _: None)
    found = [SimpleNamespace(saved=(1, 4))] if held else []
    lost = {"saved": False, "path": "", "why": KILLED}
    writer: Any = SimpleNamespace(copy=copy, close=lambda: None, find_all=lambda: found, wait=lambda *_: lost)
    parts: Any = (None, SimpleNamespace(rank=0), SimpleNamespace(timeout_s=1), note, phase, tmp_path)
    context = SaveContext(*parts, round=1, saves=4, writer=writer)
    writes = DirectoryWrites(context)
    writes.expect(20)
    tell = writes.report_lost if learned == "at the next save" else writes.wait
    for _ in range(2):
        assert not tell()  # type: ignore[func-returns-value]
    assert [step for kind, step in events if kind == "checkpoint_failed"] == ([] if held else [20])


def test_state_that_a_save_refuses_is_not_saved_at_the_fault_either() -> None:
    closed: list[bool] = []

    def refuse(*_: Any) -> bool:
        raise CheckpointRefused("the state of counter on rank 1 differs from rank 0's")

    session: Any = object.__new__(Session)
    session._barrier_s, session._steps, session._attached = None, 1, {}
    donor = SimpleNamespace(look=lambda: None, close=lambda: closed.append(True))
    session._saver, session._donor = SimpleNamespace(save=refuse), donor
    with pytest.raises(CheckpointRefused):
        session._save("every 10 steps", wait=False)
    assert closed


@pytest.mark.parametrize(
    ("raised", "in_step", "calls"),
    [(True, False, ["fail False", "close"]), (False, True, ["fail True", "close"]), (False, False, ["close"])],
)
def test_script_that_ends_in_a_step_may_have_caught_an_exception(
    raised: bool, in_step: bool, calls: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its state is saved; that it is not is a message only where an exception has ended the script."""
    monkeypatch.setattr(sys, "last_value", ValueError(), raising=False)
    if not raised:
        monkeypatch.delattr(sys, "last_value")
    called: list[str] = []
    donor: Any = SimpleNamespace(_is_in_step=lambda: in_step, _is_silent=False, close=lambda: called.append("close"))
    donor.fail = lambda: called.append(f"fail {donor._is_silent}")
    Donor._at_exit(donor)
    assert called == calls


@pytest.mark.parametrize(
    ("error", "fails"),
    [(None, False), (SystemExit(0), False), (SystemExit(1), True), (ValueError(), True), (KeyboardInterrupt(), True)],
)
def test_session_closed_by_an_exception_saves_its_state_and_waits_for_no_checkpoint(
    error: BaseException | None, fails: bool
) -> None:
    """The other ranks wait for this one's end."""
    called: list[str] = []

    def note(name: str) -> Any:
        return lambda **how: called.append(name + "".join(f" {key}={value}" for key, value in how.items()))

    part = SimpleNamespace(fail=note("fail"), close=note("close"), created=False)
    session: Any = object.__new__(Session)
    session._scalars, session._closed, session._donor = None, True, part
    session._sigterm = session._barriers = session._publisher = session._channel = session._group = part
    session._saver = SimpleNamespace(close=note("saver"))
    session._omissions = SimpleNamespace(close=lambda has_failed: None)
    with contextlib.suppress(BaseException):
        try:
            if error is not None:
                raise error
        finally:
            session.close()
    first = ["fail", "close", "saver wait=False"] if fails else ["close", "saver wait=True"]
    assert called[: len(first)] == first


@pytest.mark.parametrize(
    ("on", "kept", "why"),
    [
        ("cuda", torch.ones(1), ""),
        ("cuda", None, ""),
        ("cuda", 3, "values that are no tensors"),
        ("cpu", 3, ""),
    ],
)
def test_what_would_be_ahead_of_a_gpu(on: str, kept: Any, why: str) -> None:
    optimizer = torch.optim.SGD([parameter := torch.nn.Parameter(torch.ones(1))])
    optimizer.state[parameter] = {"kept": kept}
    saver: Any = SimpleNamespace(group=SimpleNamespace(device=torch.device(on)))
    found = donor_rules._ahead_of_a_gpu(donor_rules._Rank(saver, {"optimizer": optimizer}, {}))
    assert why in found
    assert bool(why) == bool(found)


@pytest.mark.parametrize("on", [None, "cpu", "meta"])
def test_nothing_waits_for_what_a_gradscaler_keeps_on_a_gpu(on: str | None) -> None:
    """The numbers are kept at each commit, the tensors are copied on the GPU. No number can be read of "meta"."""
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=5)
    assert scaler.is_enabled()
    if on is not None:
        scaler._lazy_init_scale_growth_tracker(torch.device(on))
    keys = {key for (_, key), _ in step_files.buffers({"scaler": scaler})}
    assert keys == ({"scale", "_growth_tracker"} if on == "meta" else set())
    found = committed_state._state_of(scaler)()
    assert found.keys() | keys == torch.amp.GradScaler("cpu").state_dict().keys()
    assert (found["growth_interval"], found.get("scale", 8.0)) == (5, 8.0)
    assert not donor_rules._tensors_elsewhere(donor_rules._Rank(SimpleNamespace(), {"scaler": scaler}, {}))  # type: ignore[arg-type]


@pytest.mark.parametrize("moves", [False, True])
def test_buffers_that_a_dead_rank_expected_count_unless_this_rank_found_them_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moves: bool
) -> None:
    """Rank 0 has died before the commit. Ranks run the same script: where one moves a buffer, the other has, too."""
    monkeypatch.setenv("ELASTICD_HEARTBEAT", str(tmp_path / "heartbeat-1"))
    held = [{"mean": torch.full((3,), float(rank))} for rank in (0, 1)]
    records = [
        StepRecord(step_files.path_of("commit", rank), [(held[rank], "mean")], [torch.ones(2)]) for rank in (0, 1)
    ]
    for record in records:
        record.expect(1)
    if moves:
        held[1]["mean"] = held[1]["mean"].clone()
    records[1].commit(1)
    survivor: Any = object.__new__(committed_state.CommittedState)
    survivor._context = SimpleNamespace(group=SimpleNamespace(rank=1, world_size=2))
    survivor._buffers, survivor._on_host = {"mean": held[1]["mean"]}, ["mean"]
    survivor._unlike, survivor._record = [], records[1]
    *_, buffers = survivor._records(1)
    assert buffers["mean"].tolist() == [float(moves)] * 3


ALIKE, APART = (0, 0), (0, 1)
NOISE: dict[str, tuple[tuple[int, int], Callable[[int, int], int], Any]] = {
    "alike, noise after the backward pass": (ALIKE, lambda rank, step: 3, "as the survivor"),
    "apart, noise after the backward pass": (APART, lambda rank, step: 3, "unknown"),
    "alike, nothing after it": (ALIKE, lambda rank, step: 0, "as expected"),
    "apart, nothing after it": (APART, lambda rank, step: 0, "as expected"),
    "alike, noise in the last step only": (ALIKE, lambda rank, step: 3 * (step == 3), "as the survivor"),
    "apart, noise in the last step only": (APART, lambda rank, step: 3 * (step == 3), "unknown"),
    "apart, samples of the survivor": (APART, lambda rank, step: 3 * (rank == 1), "as expected"),
    "apart, samples of the dead rank": (APART, lambda rank, step: 3 * (rank == 0), "unknown"),
}


@pytest.mark.parametrize("is_elsewhere", [False, True], ids=["one node", "two nodes"])
@pytest.mark.parametrize("case", NOISE)
def test_random_state_of_a_rank_that_dies_before_the_commit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: str, is_elsewhere: bool
) -> None:
    """Rank 0 dies in step 3, after the backward pass; rank 1 has finished the step. On another node than rank 1's the
    next round finds the same by the record that is there, and by what rank 1 has saved.
    """
    monkeypatch.setenv("ELASTICD_HEARTBEAT", str(tmp_path / "heartbeat-1"))
    seeds, draws, outcome = NOISE[case]
    records = [StepRecord(step_files.path_of("commit", rank), [], [torch.ones(2)]) for rank in (0, 1)]
    states = [torch.Generator().manual_seed(seed).get_state() for seed in seeds]
    for step in (1, 2, 3):
        for rank, record in enumerate(records):
            torch.set_rng_state(states[rank])
            torch.rand(5)  # dropout
            record.expect(step)
            expected = torch.get_rng_state()
            torch.rand(draws(rank, step))
            if (rank, step) != (0, 3):
                record.commit(step)
                states[rank] = torch.get_rng_state()
            else:
                states[rank] = expected
    survivor: Any = object.__new__(committed_state.CommittedState)
    nothing: Any = None
    group: Any = SimpleNamespace(rank=1, world_size=2)
    survivor._context = SaveContext(nothing, group, nothing, nothing, nothing, round=1)
    survivor._buffers, survivor._on_host, survivor._unlike = {}, [], []
    survivor._record = records[1]

    def found() -> dict[str, Any]:
        if not is_elsewhere:
            random_state: dict[str, Any] = survivor._records(3)[1][0]
            return random_state
        path = Path(step_files.path_of("commit", 0))
        there = path.rename(tmp_path / "of another node")
        drawn, random_states, is_as_expected, _ = survivor._records(3)
        assert random_states[0] is None
        there.rename(path)
        (saved,) = survivor._own_part(3, drawn, random_states, is_as_expected).values()
        known = committed_state.RankRecord(0, 3, []).random_state(committed_state.Drawn.of(saved))
        assert known is not None
        return known

    if outcome == "unknown":
        with pytest.raises(CheckpointError, match="rank 0 had not finished step 3, and draws random numbers"):
            found()
    else:
        assert torch.equal(found()["torch"], states[0 if outcome == "as expected" else 1])
