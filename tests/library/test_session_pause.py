"""Pauses: all ranks wait at one step, right after its checkpoint, and continue or are killed there."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from elasticd.coordination.decisions import Action, DecisionPoints
from elasticd.coordination.pause import DEFAULT_TIMEOUT_S, PauseController, timeout_from_environment
from elasticd.coordination.store_channel import StoreChannel
from elasticd.errors import DecisionTimeout, UsageError
from elasticd.heartbeat import record as heartbeat
from elasticd.heartbeat.record import PAUSE, PAUSE_BARRIER, STOP, Phase
from elasticd.heartbeat.worker_events import WorkerEvent, WorkerEventReader, WorkerEventWriter
from tests.library.checkpoints import verified_lineage

ENDLESS = {"steps": 10**9, "sleep": 0.002}
NEVER_DUE = 10**6


def paused_at(job: Any, wait_for: Any) -> int:
    """Ask for a hold; the step at which all ranks wait."""
    job.ranks[0].request(PAUSE)
    note: WorkerEvent = wait_for(lambda: events_of(job, "paused"), "the pause")[0]
    assert note.step is not None
    for rank in job.ranks:
        wait_for(lambda rank=rank: rank.read_heartbeat().barrier == PAUSE_BARRIER, "a rank to wait")
        seen = rank.read_heartbeat()
        assert (seen.phase, seen.step) == (Phase.BARRIER, note.step)
    return note.step


def events_of(job: Any, kind: str) -> list[WorkerEvent]:
    return [note for note in job.ranks[0].read_events() if note.kind == kind]


def stepped(job: Any, step: int) -> Callable[[], bool]:
    return lambda: all(rank.read_heartbeat().step >= step for rank in job.ranks)


def steps_saved(directory: Path) -> list[int]:
    return [entry.manifest.step for entry in verified_lineage(directory)[0]]


@pytest.mark.parametrize(("world_size", "every"), [(2, NEVER_DUE), (1, 1)])
def test_pause_ends_when_request_is_withdrawn(
    start: Any, tmp_path: Path, wait_for: Any, world_size: int, every: int
) -> None:
    """All ranks wait after a checkpoint, and continue when the request is withdrawn."""
    options = {**ENDLESS, "directory": str(tmp_path / "shared"), "every": every}
    job = start("toy.py", options, world_size=world_size, round=3)
    step = paused_at(job, wait_for)
    assert steps_saved(tmp_path / "shared")[0] == step
    job.ranks[0].request(0)
    wait_for(stepped(job, step + 5), "steps after the pause")
    for rank in job.ranks:
        assert (rank.read_heartbeat().phase, rank.read_heartbeat().barrier) != (Phase.BARRIER, PAUSE_BARRIER)
    job.ranks[0].request(STOP)
    results = job.results()
    assert {each["steps"] for each in results} == {results[0]["steps"]}
    (holding,), (over,) = events_of(job, "paused"), events_of(job, "pause_ended")
    assert (holding.round, holding.reason) == (3, f"paused at step {step} for the next round, up to 30 s")
    assert (over.step, over.reason) == (step, f"the pause at step {step} is over: the agent withdrew its request")
    assert over.extra["seconds"] <= over.mono - holding.mono
    saved = [note for note in events_of(job, "checkpoint_saved") if note.step == step]
    assert len(saved) == 1
    assert saved[0].mono <= holding.mono


def test_ranks_killed_in_pause_resume_at_its_step(start: Any, tmp_path: Path, wait_for: Any) -> None:
    broken = start("toy.py", {"directory": str(tmp_path / "broken"), "every": NEVER_DUE, "sleep": 0.05})
    step = paused_at(broken, wait_for)
    assert step < 12
    broken.kill()
    whole = start("toy.py", {"directory": str(tmp_path / "whole")})
    resumed = start("toy.py", {"directory": str(tmp_path / "broken")}, round=2)
    for first, second in zip(whole.results(), resumed.results(), strict=True):
        assert {**first, "round": 2, "resumed": [1, step, 2]} == second
    assert [note.kind for note in WorkerEventReader(broken.ranks[0].notes).read()[0]] == [
        *("attached", "can_pause", "checkpoint_saved", "paused"),
    ]


def test_timed_out_pause_is_not_repeated(start: Any, tmp_path: Path, wait_for: Any) -> None:
    # Holding needs no checkpoint() where restore() has named the directory.
    options = {**ENDLESS, "directory": str(tmp_path / "shared"), "every": None}
    job = start("toy.py", options, ELASTICD_HOLD_TIMEOUT_S="0.25")
    job.ranks[0].request(PAUSE)
    over = wait_for(lambda: events_of(job, "pause_ended"), "the end of the pause")[0]
    assert over.reason.endswith("is over: no new round started within 0.25 s")
    assert over.extra["seconds"] >= 0.25
    wait_for(stepped(job, over.step + 50), "steps after the pause")
    job.ranks[0].request(PAUSE | 1 << 8)
    wait_for(lambda: len(events_of(job, "pause_ended")) == 2, "the end of the second pause")
    job.ranks[0].request(STOP)
    first, second = job.results()
    assert first["steps"] == second["steps"]
    assert job.ranks[0].kinds() == ["checkpoint_saved", "paused", "pause_ended"] * 2


def test_pause_without_directory_is_refused(start: Any, wait_for: Any) -> None:
    job = start("toy.py", {**ENDLESS, "every": None, "restore": False})
    job.ranks[0].request(PAUSE)
    note = wait_for(lambda: events_of(job, "cannot_pause"), "the answer")[0]
    assert note.reason.endswith("nothing is attached, or the script uses no checkpoint directory")
    wait_for(stepped(job, note.step + 50), "steps after it")
    job.ranks[0].request(STOP)
    first, second = job.results()
    assert first["steps"] == second["steps"]
    assert [each.kind for each in WorkerEventReader(job.ranks[0].notes).read()[0]] == ["cannot_pause"]


def test_pause_with_full_disk_is_refused(start: Any, tmp_path: Path, wait_for: Any) -> None:
    options = {**ENDLESS, "directory": str(tmp_path / "shared"), "every": NEVER_DUE, "full": [2, 10**9]}
    job = start("toy.py", options)
    wait_for(stepped(job, 3), "the full disk")
    job.ranks[0].request(PAUSE)
    note = wait_for(lambda: events_of(job, "cannot_pause"), "the answer")[0]
    assert note.reason == f"no pause at step {note.step}: its checkpoint could not be saved"
    wait_for(stepped(job, note.step + 50), "steps after it")
    job.ranks[0].request(STOP)
    first, second = job.results()
    assert first["steps"] == second["steps"]
    assert job.ranks[0].kinds() == ["checkpoint_failed", "cannot_pause", "checkpoint_failed"]
    assert steps_saved(tmp_path / "shared") == []


def test_stop_ends_pause_at_its_step(start: Any, tmp_path: Path, wait_for: Any) -> None:
    job = start("toy.py", {**ENDLESS, "directory": str(tmp_path / "shared"), "every": NEVER_DUE})
    step = paused_at(job, wait_for)
    job.ranks[0].request(STOP)
    assert [(each["steps"], each["stopped"]) for each in job.results()] == [(step, True)] * 2
    assert job.ranks[0].kinds() == ["checkpoint_saved", "paused", "pause_ended"]
    assert events_of(job, "pause_ended")[0].reason == f"the pause at step {step} is over: the agent requested a stop"


class Agent:
    """A heartbeat and an event file with both sides of each."""

    def __init__(self, folder: Path, timeout_s: float = 5) -> None:
        heartbeat.create(folder / "beat")
        self.pauses = PauseController(
            heartbeat.HeartbeatWriter(folder / "beat"), WorkerEventWriter(folder / "notes"), timeout_s
        )
        self._beat, self._notes = folder / "beat", WorkerEventReader(folder / "notes")

    def request(self, request: int) -> None:
        with heartbeat.HeartbeatReader(self._beat) as reader:
            reader.write_request(request)

    def kinds(self) -> list[str]:
        return [note.kind for note in self._notes.read()[0]]


def not_stopped() -> str:
    return ""


def test_request_has_one_answer_until_it_changes(tmp_path: Path) -> None:
    agent = Agent(tmp_path, timeout_s=0)
    assert not agent.pauses.take_request(1, can_pause=False)
    assert agent.kinds() == []
    agent.request(PAUSE)
    assert not agent.pauses.take_request(2, can_pause=False)
    assert not agent.pauses.take_request(3, can_pause=False)
    assert agent.kinds() == ["cannot_pause"]
    agent.request(PAUSE | 1 << 8)
    assert agent.pauses.take_request(4, can_pause=True)
    assert agent.pauses.wait(4, saved=True, stop_reason=not_stopped)[0] == "continue"
    assert not agent.pauses.take_request(5, can_pause=True)
    assert agent.kinds() == ["can_pause", "paused", "pause_ended"]
    agent.request(0)
    assert not agent.pauses.take_request(6, can_pause=True)
    agent.request(PAUSE | 1 << 8)
    assert agent.pauses.take_request(7, can_pause=True)
    assert agent.pauses.wait(7, saved=False, stop_reason=not_stopped)[0] == "continue"
    assert not agent.pauses.take_request(8, can_pause=True)
    assert agent.kinds() == ["cannot_pause"]


def test_withdrawn_pause_may_be_requested_again(tmp_path: Path) -> None:
    agent = Agent(tmp_path)
    agent.request(PAUSE)
    assert agent.pauses.take_request(1, can_pause=True)
    agent.request(0)
    assert agent.pauses.wait(1, saved=True, stop_reason=not_stopped) == (
        *("continue", "the pause at step 1 is over: the agent withdrew its request"),
    )
    agent.request(PAUSE)
    assert agent.pauses.take_request(2, can_pause=True)


def test_wait_for_end_of_pause_has_longer_deadline() -> None:
    from torch.distributed import HashStore

    shared = HashStore()
    channels = [StoreChannel(rank, 2, shared, "a", 0.1) for rank in range(2)]
    first, second = (DecisionPoints(channel, lambda: ("continue", "")) for channel in channels)
    with pytest.raises(DecisionTimeout, match=r"rank 1 waited 0\.1 s for rank 0: the decision at step 7"):
        second.decide_again(7, lambda: ("continue", ""), longest_s=0.3)
    released, begun = threading.Event(), threading.Event()

    def decide() -> tuple[Action, str]:
        begun.set()
        assert released.wait(20)
        return "stop", "enough"

    thread = threading.Thread(target=lambda: first.decide_again(8, decide, longest_s=0))
    thread.start()
    assert begun.wait(20)
    released.set()
    verdict = second.decide_again(8, decide, longest_s=20)
    thread.join(20)
    assert (verdict.step, verdict.action, verdict.reason) == (8, "stop", "enough")


@pytest.mark.parametrize("text", ["soon", "-1", "nan", "inf"])
def test_invalid_pause_timeout_raises_usage_error(text: str) -> None:
    assert timeout_from_environment({}) == DEFAULT_TIMEOUT_S
    assert timeout_from_environment({"ELASTICD_HOLD_TIMEOUT_S": "2.5"}) == 2.5
    with pytest.raises(UsageError, match="ELASTICD_HOLD_TIMEOUT_S"):
        timeout_from_environment({"ELASTICD_HOLD_TIMEOUT_S": text})
