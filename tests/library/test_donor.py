"""What a rank answers to the launcher at a fault, and that its forked children keep apart."""

from __future__ import annotations

import contextlib
import fcntl
import functools
import os
import resource
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import distributed
from torch.nn import Module
from torch.nn.parallel import DistributedDataParallel
from torch.testing._internal.distributed.fake_pg import FakeStore

import elasticd
from elasticd import channel
from elasticd.checkpointing import directory_writes
from elasticd.checkpointing.at_fault import committed_state, donor, donor_rules, step_files, step_record
from elasticd.checkpointing.at_fault.committed_state import CommittedState, RankDraws, RankRecord
from elasticd.checkpointing.at_fault.donor import MAX_TRIAL_COMMITS, CopyTrial, Donor
from elasticd.checkpointing.context import SaveContext
from elasticd.checkpointing.directory_writes import DirectoryWrites
from elasticd.checkpointing.memory.buffers import WRITER_KILLED_REASON, donated_number
from elasticd.checkpointing.memory.writer_client import WriterClient
from elasticd.checkpointing.saver import Saver
from elasticd.checkpointing.state.training_state import RESERVED_NAME, StateDict
from elasticd.checkpointing.storage.atomic_write import Staging, write_file
from elasticd.checkpointing.storage.lineage import lineage
from elasticd.checkpointing.storage.manifest import NO_CHECKSUM, STATE, Manifest, SizeAndChecksum
from elasticd.errors import CheckpointError, CheckpointRefused
from elasticd.heartbeat.worker_events import WorkerEventReader, WorkerEventWriter
from elasticd.process_group import DefaultGroup

CPU = torch.device("cpu")
NOTHING: Any = None


class Model(Module):
    def __init__(self, mean: float) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(3))
        self.register_buffer("mean", torch.full((3,), mean))

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        return batch * self.weight


class TwoRanks:
    """Two ranks of one node that train: their collectives send nothing, and this process is both ranks."""

    def __init__(self, folder: Path) -> None:
        self.notes = folder / "notes"
        self.writer = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.writer.bind(str(folder / "writer"))
        self.writer.listen()
        self.attached: list[dict[str, Any]] = []
        for rank in (0, 1):
            model = DistributedDataParallel(Model(mean=float(rank)))
            self.attached.append({"model": model, "optimizer": torch.optim.SGD(model.parameters())})

    def context(self, rank: int) -> SaveContext:
        environment: Any = SimpleNamespace(round=1, job="job", run="run")
        events = WorkerEventWriter(self.notes, 1, rank)
        writer = WriterClient(str(self.writer.getsockname()), 0, 1, True)
        return SaveContext(environment, DefaultGroup(rank, 2, CPU, False), NOTHING, events, NOTHING, writer=writer)

    def committed(self, rank: int) -> CommittedState:
        attached = self.attached[rank]
        return CommittedState(
            self.context(rank), attached, donor_rules.averaged_parameters(attached, 2), lambda _: None
        )

    def donor(self, rank: int, is_in_step: Callable[[], bool] = lambda: False) -> tuple[Donor, socket.socket]:
        """A rank, and the writer's end of its connection."""
        made = Donor(self.context(rank), self.attached[rank], True, is_in_step)
        connection, _ = self.writer.accept()
        assert (channel.receive(connection) or {})["do"] == "donor"
        return made, connection


@pytest.fixture
def two_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[TwoRanks]:
    monkeypatch.setenv("ELASTICD_HEARTBEAT", str(tmp_path / "heartbeat-0"))
    distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    ranks = TwoRanks(tmp_path)
    yield ranks
    ranks.writer.close()
    distributed.destroy_process_group()


def fail(*_: object) -> Any:
    raise AssertionError("a mistake")


class BusyGpu(CommittedState):
    """A state on a GPU from which no copy ends."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.copies: Any = SimpleNamespace(can_copy=lambda _: False)


@pytest.mark.parametrize(
    ("where", "name", "broken", "answers", "why"),
    [
        (
            step_record,
            "last_committed_step",
            fail,
            ["saving", "donated"],
            "cannot save its state at a fault: AssertionError: a",
        ),
        (
            CommittedState,
            "is_gpu_behind",
            fail,
            ["saving", "donated"],
            "cannot save its state at a fault: AssertionError",
        ),
        (donor, "CommittedState", BusyGpu, ["donated"], "no copy from it ends"),
    ],
    ids=["before the save", "in the save", "no copy from a GPU ends"],
)
def test_launcher_gets_an_answer_whatever_a_rank_raises(
    two_ranks: TwoRanks,
    monkeypatch: pytest.MonkeyPatch,
    where: Any,
    name: str,
    broken: Any,
    answers: list[str],
    why: str,
) -> None:
    monkeypatch.setattr(where, name, broken)
    rank, writer = two_ranks.donor(1)
    with writer, contextlib.closing(rank):
        for _ in range(2):
            channel.send(writer, {"save": 1})
            received = [(channel.receive(writer) or {})["do"] for _ in answers]
            assert received == answers
    events, _ = WorkerEventReader(two_ranks.notes).read()
    assert why in events[0].reason


def test_rank_that_holds_its_state_answers_whatever_number_its_descriptor_has(
    two_ranks: TwoRanks, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Data sets and loaders keep thousands of files open, which select() cannot take."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(hard, 2048)), hard))
    connect = channel.connect

    def connect_high(path: str) -> socket.socket:
        with connect(path) as low:
            return socket.socket(fileno=fcntl.fcntl(low.fileno(), fcntl.F_DUPFD_CLOEXEC, 1024))

    monkeypatch.setattr(channel, "connect", connect_high)
    rank, writer = two_ranks.donor(0)
    with writer, contextlib.closing(rank):
        rank.begin_commit()
        rank.commit(4)
        for stays in (2, 0):
            channel.send(writer, {"save": 1, "stays": stays})
            writer.settimeout(10)
            assert channel.receive(writer) == {"do": "saving"}
            assert (channel.receive(writer) or {})["held"] == 4


@pytest.mark.parametrize(
    ("copy_s", "step_s", "gives_up_at"),
    [
        (lambda commit: 150e-6, 0.01, 0),
        (lambda commit: 300e-6, 0.01, 128),
        (lambda commit: 300e-6, 0.2, 0),  # of a long step it is less
        (lambda commit: 1.0 if commit < 100 else 150e-6, 0.01, 0),  # the machine was busy
    ],
)
def test_rank_gives_up_where_recording_a_step_takes_too_long(
    copy_s: Callable[[int], float], step_s: float, gives_up_at: int
) -> None:
    trial, now, why, commit = CopyTrial(), 1.0, "", 0
    while trial.measures_next(commit) and not why:
        commit += 1
        why = trial.add_commit(commit, now, copy_s(commit))
        now += step_s + copy_s(commit)
    assert (commit if why else 0) == gives_up_at
    assert commit <= MAX_TRIAL_COMMITS


def test_forked_child_leaves_what_is_its_parents(
    two_ranks: TwoRanks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[object] = []
    monkeypatch.setattr(CommittedState, "record_expected", lambda _, step: asked.append(step))
    writer_of_saves = SimpleNamespace(
        wait_for_result=lambda *_: asked.append("wait") or {"saved": True, "path": "", "why": ""}
    )
    writes = writes_of(tmp_path, writer_of_saves)
    writes.expect_write(10)
    rank, writer = two_ranks.donor(0)
    with writer, contextlib.closing(rank):
        rank.begin_commit()
        rank.commit(4)
        train = functools.partial(backward, two_ranks.attached[0]["model"])
        train()
        assert asked == [5]
        with monkeypatch.context() as child:
            child.setattr(os, "getpid", lambda: -1)
            train()
            assert not writes.wait_until_saved()
            rank.close()
        assert asked == [5]
        train()
        assert writes.wait_until_saved()
        assert asked == [5, 5, "wait"], "the parent goes on"


def writes_of(folder: Path, writer: Any, events: Any = NOTHING) -> DirectoryWrites:
    phase = SimpleNamespace(current_phase=None, set_phase=lambda _: None)
    parts: Any = (NOTHING, DefaultGroup(0, 2, CPU, False), SimpleNamespace(timeout_s=1), events, phase, folder)
    return DirectoryWrites(SaveContext(*parts, round=1, save_count=4, writer=writer))


def test_save_that_takes_too_long_has_failed_before_the_other_ranks_give_up(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """They wait for rank 0's word as long as for any message, and would end the job."""
    waited: list[float] = []

    def wait_for_result(round: int, number: int, timeout_s: float) -> Any:
        waited.append(timeout_s)
        raise TimeoutError("timed out")

    writes = writes_of(tmp_path, SimpleNamespace(wait_for_result=wait_for_result))
    writes.expect_write(20)
    assert not writes.wait_until_saved()
    assert waited == [0.9]
    assert "a checkpoint failed: it is not on the disk after 0.9 s" in caplog.text


def test_checkpoint_is_saved_where_older_ones_cannot_be_deleted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As in a bucket where only putting is allowed."""
    kinds: list[str] = []
    events = SimpleNamespace(write=lambda kind, *_, **__: kinds.append(kind))
    writes = writes_of(tmp_path, None, events)
    monkeypatch.setattr(writes, "_lock", SimpleNamespace())
    monkeypatch.setattr(directory_writes, "retain", refuse)
    draft = Manifest(1, 20, None, 1, 0, NO_CHECKSUM, "job", "run")
    assert writes.write_now(draft, put_state, "by a test", 0.0)
    assert kinds == ["checkpoint_saved", "message"]
    assert "old checkpoints could not be deleted: access denied" in caplog.text
    assert [entry.manifest.step for entry in lineage(tmp_path)[0]] == [20]


def put_state(staging: Staging) -> dict[str, SizeAndChecksum]:
    return {STATE: write_file(staging.path / STATE, lambda file: file.write(b"state"))}


def refuse(*_: Any) -> Any:
    raise PermissionError("access denied")


def backward(model: DistributedDataParallel) -> None:
    with model.no_sync():
        model(torch.ones(3)).sum().backward()


def test_answer_without_a_buffer_is_an_error() -> None:
    writer, rank = channel.pair()
    with writer, rank:
        writer.send(b'{"writing": false}')
        with pytest.raises(OSError, match="has no buffer"):
            WriterClient("", 0, 1, True, _socket=rank).open_buffer((1, 1))


@pytest.mark.parametrize("held", [False, True])
@pytest.mark.parametrize("learned", ["at the next save", "at the end"])
def test_save_that_was_lost_with_its_writer_is_reported_once(tmp_path: Path, learned: str, held: bool) -> None:
    """Rank 0 had copied, another rank had not when the writer was killed."""
    events: list[tuple[str, int]] = []
    note = SimpleNamespace(write=lambda kind, _, step, **__: events.append((kind, step)), path=None)
    states = [SimpleNamespace(original_key=(1, 4))] if held else []
    lost = {"saved": False, "path": "", "why": WRITER_KILLED_REASON}
    writer = SimpleNamespace(close=lambda: None, find_all=lambda: states, wait_for_result=lambda *_: lost)
    writes = writes_of(tmp_path, writer, note)
    writes.expect_write(20)
    tell = writes.report_if_save_lost if learned == "at the next save" else writes.wait_until_saved
    for _ in range(2):
        assert not tell()  # type: ignore[func-returns-value]
    assert [step for kind, step in events if kind == "checkpoint_failed"] == ([] if held else [20])
    writes.wait_until_saved()  # else it would at the end of this process


@pytest.fixture
def called(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The calls of a session to its parts."""
    calls: list[str] = []

    def watch(kind: type[Any], name: str) -> None:
        method = getattr(kind, name)

        def note(obj: Any, wait: bool = False) -> None:
            calls.append(f"{kind.__name__}.{name}" + (" waits" if wait else ""))
            method(obj)

        monkeypatch.setattr(kind, name, note)

    for kind, name in ((Donor, "on_script_failure"), (Donor, "close"), (Saver, "close")):
        watch(kind, name)
    return calls


def test_state_that_a_save_refuses_is_not_saved_at_the_fault_either(tmp_path: Path, called: list[str]) -> None:
    refused = SimpleNamespace(state_dict=lambda: {"file": Path()}, load_state_dict=lambda _: None)
    with contextlib.closing(elasticd.init()) as session:
        session.attach(model=torch.nn.Linear(1, 1), refused=refused)
        session.checkpoint(1, tmp_path)
        with pytest.raises(CheckpointRefused):
            session.step()
        assert called == ["Donor.close"]


@pytest.mark.parametrize(
    ("raised", "in_step", "calls", "messages"),
    [
        (True, False, ["Donor.on_script_failure", "Donor.close"], 1),
        (False, True, ["Donor.on_script_failure", "Donor.close"], 0),
        (False, False, ["Donor.close"], 0),
    ],
)
def test_script_that_ends_in_a_step_may_have_caught_an_exception(
    two_ranks: TwoRanks,
    monkeypatch: pytest.MonkeyPatch,
    called: list[str],
    raised: bool,
    in_step: bool,
    calls: list[str],
    messages: int,
) -> None:
    """Its state is saved; that it is not is a message only where an exception has ended the script."""
    at_exit: list[Callable[[], None]] = []
    monkeypatch.setattr("atexit.register", at_exit.append)
    monkeypatch.setattr(WriterClient, "find_newest", lambda _: None)
    monkeypatch.setattr("sys.last_value", ValueError(), raising=False)
    if not raised:
        monkeypatch.delattr("sys.last_value")
    rank, writer = two_ranks.donor(1, lambda: in_step)
    with writer:
        rank.begin_commit()  # no state of a step can be saved now
        at_exit.pop()()
    assert called == calls
    assert len(WorkerEventReader(two_ranks.notes).read()[0]) == messages


@pytest.mark.parametrize("saved_step", [None, 4])
def test_step_that_was_saved_before_the_script_ended_is_not_missing(
    two_ranks: TwoRanks, monkeypatch: pytest.MonkeyPatch, saved_step: int | None
) -> None:
    """A KeyboardInterrupt comes after the launcher's request, when this rank is in the next optimizer's step."""
    snapshot = SimpleNamespace(draft=SimpleNamespace(round=1, step=saved_step), save_number=donated_number(4, 0))
    monkeypatch.setattr(WriterClient, "find_newest", lambda _: snapshot if saved_step else None)
    rank, writer = two_ranks.donor(0)
    with writer, contextlib.closing(rank):
        rank.begin_commit()
        rank.commit(4)
        two_ranks.attached[0]["optimizer"].step()
        rank.on_script_failure()
    reasons = [event.reason for event in WorkerEventReader(two_ranks.notes).read()[0]]
    assert [reason.partition(" at the fault")[0] for reason in reasons] == ["rank 0 has not saved step 4"] * (
        saved_step is None
    )


def test_what_a_signal_handler_raises_leaves_the_state_unlocked(two_ranks: TwoRanks) -> None:
    def interrupt(*_: object) -> None:
        raise InterruptedError

    def end_save() -> None:
        rank._lock.release()
        signal.pthread_kill(threading.main_thread().ident, signal.SIGUSR1)

    rank, writer = two_ranks.donor(0)
    former = signal.signal(signal.SIGUSR1, interrupt)
    try:
        with writer, contextlib.closing(rank):
            rank._lock.acquire()
            threading.Timer(0.2, end_save).start()
            with pytest.raises(InterruptedError):
                rank.begin_commit()
            assert rank._lock.acquire(timeout=1.0)
    finally:
        signal.signal(signal.SIGUSR1, former)


@pytest.mark.parametrize(
    ("error", "fails"),
    [(None, False), (SystemExit(0), False), (SystemExit(1), True), (ValueError(), True), (KeyboardInterrupt(), True)],
)
def test_session_closed_by_an_exception_saves_its_state_and_waits_for_no_checkpoint(
    tmp_path: Path, called: list[str], error: BaseException | None, fails: bool
) -> None:
    """The other ranks wait for this one's end."""
    with contextlib.suppress(BaseException), elasticd.init() as session:
        session.attach(model=torch.nn.Linear(1, 1))
        session.checkpoint(10, tmp_path)
        session.step()
        if error is not None:
            raise error
    expected = (
        ["Donor.on_script_failure", "Donor.close", "Saver.close"] if fails else ["Donor.close", "Saver.close waits"]
    )
    assert called == expected


@pytest.mark.parametrize(("on", "kept", "is_refused"), [("cuda", None, False), ("cuda", 3, True), ("cpu", 3, False)])
def test_values_of_an_optimizer_may_be_ahead_of_a_gpu(
    two_ranks: TwoRanks, on: str, kept: Any, is_refused: bool
) -> None:
    attached, context = two_ranks.attached[0], two_ranks.context(0)
    context.group = DefaultGroup(0, 2, torch.device(on), False)
    optimizer = attached["optimizer"]
    optimizer.state[optimizer.param_groups[0]["params"][0]] = {"kept": kept, "tensor": torch.ones(1)}
    why = donor_rules.reason_against(context, attached, donor_rules.averaged_parameters(attached, 2))
    assert ("values that are no tensors" in why) == is_refused


@pytest.mark.parametrize("on", [None, "cpu", "meta"])
def test_nothing_waits_for_what_a_gradscaler_keeps_on_a_gpu(two_ranks: TwoRanks, on: str | None) -> None:
    """The numbers are kept at each commit, the tensors are copied on the GPU. No number can be read of "meta"."""
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=5)
    if on is not None:
        scaler.scale(torch.ones(1, device=on))
    keys = {key for (_, key), _ in step_files.buffer_places({"scaler": scaler})}
    assert keys == ({"scale", "_growth_tracker"} if on == "meta" else set())
    state = committed_state.nonblocking_state_reader(scaler)()
    assert state.keys() | keys == torch.amp.GradScaler("cpu").state_dict().keys()
    assert (state["growth_interval"], state.get("scale", 8.0)) == (5, 8.0)
    attached = {**two_ranks.attached[0], "scaler": scaler}
    assert not donor_rules.reason_against(two_ranks.context(0), attached, donor_rules.averaged_parameters(attached, 2))


def saved_by(survivor: CommittedState) -> StateDict:
    commit = survivor.commit_in_memory()
    assert commit is not None
    return survivor.content(commit)


def test_state_between_accumulated_gradients_is_wholly_that_of_the_last_commit(two_ranks: TwoRanks) -> None:
    """The script draws numbers in each micro-batch, and its place in the data is ahead of the commit."""
    place = {"offset": 8}
    sampler = SimpleNamespace(state_dict=lambda: dict(place), load_state_dict=place.update, rank_independent=True)
    two_ranks.attached[0]["sampler"] = sampler
    rank, writer = two_ranks.donor(0)
    with writer, contextlib.closing(rank):
        rank.begin_commit()
        rank.commit(4)
        torch.rand(1)
        assert rank.commit_late_changes(False, False)
        for step in (5, 6):
            place["offset"] += 2
            torch.rand(1)
            rank.begin_commit()
            rank.commit(step)
            assert not rank.commit_late_changes(False, False)
        held = saved_by(rank._committed)
        assert (held[RESERVED_NAME]["step"], held["sampler"]) == (4, {"offset": 8})


@pytest.mark.parametrize("moves", [False, True])
def test_buffers_that_a_dead_rank_expected_count_unless_this_rank_found_them_elsewhere(
    two_ranks: TwoRanks, moves: bool
) -> None:
    """Rank 0 has died before the commit. Ranks run the same script: where one moves a buffer, the other has, too."""
    ranks = [two_ranks.committed(rank) for rank in (0, 1)]
    for step in (1, 2, 3):
        for number, rank in enumerate(ranks):
            rank.before_optimizer_step(step > 1)
            rank.record_expected(step)
            model = two_ranks.attached[number]["model"].module
            if moves and step == 3:
                model.mean = model.mean.clone()
            if (number, step) != (0, 3):
                rank.commit(step, scaler_skipped=False)
    assert saved_by(ranks[1])["model"]["mean"].tolist() == [float(moves)] * 3


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
    two_ranks: TwoRanks, tmp_path: Path, case: str, is_elsewhere: bool
) -> None:
    """Rank 0 dies in step 3, after the backward pass; rank 1 has finished the step. On another node than rank 1's the
    next round finds the same by the record that is there, and by what rank 1 has saved.
    """
    seeds, draws, outcome = NOISE[case]
    ranks = [two_ranks.committed(rank) for rank in (0, 1)]
    states = [torch.Generator().manual_seed(seed).get_state() for seed in seeds]
    for step in (1, 2, 3):
        for number, rank in enumerate(ranks):
            torch.set_rng_state(states[number])
            torch.rand(5)  # dropout
            rank.record_expected(step)
            expected = torch.get_rng_state()
            rank.before_optimizer_step(step > 1)
            torch.rand(draws(number, step))
            if (number, step) != (0, 3):
                rank.commit(step, scaler_skipped=False)
                states[number] = torch.get_rng_state()
            else:
                states[number] = expected

    def random_state() -> Any:
        if not is_elsewhere:
            return saved_by(ranks[1])[RESERVED_NAME]["rng"][0]
        path = Path(step_files.record_path("commit", 0))
        there = path.rename(tmp_path / "of another node")
        saved = saved_by(ranks[1])[RESERVED_NAME]
        assert saved["rng"][0] is None
        there.rename(path)
        return RankRecord(0, 3, [torch.zeros(3)]).random_state(RankDraws.from_saved(saved))

    if outcome == "unknown":
        with pytest.raises(CheckpointError, match="rank 0 had not finished step 3, and draws random numbers"):
            random_state()
    else:
        assert torch.equal(random_state()["torch"], states[0 if outcome == "as expected" else 1])
