"""What is reported of a job: events, sentences, and the numbers that others compare with."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from elasticd.heartbeat.record import Heartbeat, StepSource
from elasticd.heartbeat.worker_events import WorkerEvent
from elasticd_agent.config.run_options import parse_run
from elasticd_agent.hangs.observer import Observation
from elasticd_agent.job.listener import JobLeft, SparesChanged, StopStarted
from elasticd_agent.job.reporting import JobReporter
from elasticd_agent.model import log_events as events
from elasticd_agent.model.log_events import LogEvent
from elasticd_agent.model.messages import (
    ExitStatus,
    FaultDetected,
    FirstStep,
    RoundPublished,
    StateMachineRules,
    StopRequested,
    StoreExited,
)
from elasticd_agent.model.records import BudgetState, Member, Round
from elasticd_agent.model.reports import HangVerdict
from elasticd_agent.system.nonblocking_writer import NonBlockingWriter
from elasticd_agent.telemetry.console import PlainConsole
from elasticd_agent.telemetry.event_log import NullEventLog
from elasticd_agent.telemetry.metrics import Metrics
from elasticd_agent.workers.events import GroupStarted


class RecordingEventLog(NullEventLog):
    """An event log in a list."""

    def __init__(self, into: list[LogEvent]) -> None:
        self._into = into

    def write(self, record: LogEvent) -> None:
        self._into.append(record)


StartReporter = Callable[..., JobReporter]
ALONE = (Member("a", "x", (0,)),)


@pytest.fixture
def start(tmp_path: Path) -> Iterator[StartReporter]:
    nowhere = os.open(os.devnull, os.O_WRONLY)
    writer = NonBlockingWriter(nowhere)

    def start(flags: str, written: list[LogEvent] | None = None) -> JobReporter:
        spec, policy, _ = parse_run([*flags.split(), "train.py"], {}, tmp_path)
        log = NullEventLog() if written is None else RecordingEventLog(written)
        return JobReporter(
            spec, policy, "a", log, Metrics("lm", "a"), PlainConsole(writer, "lm"), on_group_ended=lambda number: None
        )

    yield start
    assert writer.close()
    os.close(nowhere)


@pytest.mark.parametrize(("nodes", "workers", "here", "aim"), [(1, 4, 3, 4), (4, 2, 2, 8), (1, 2, 2, 2)])
def test_world_size_target_counts_all_nodes(
    nodes: int, workers: int, here: int, aim: int, start: StartReporter
) -> None:
    reporter = start(
        f"--nnodes 1:{nodes} --nproc-per-node {workers} --rdzv-backend etcd --rdzv-endpoint h:1 --rdzv-id lm"
    )
    reporter.on(RoundPublished(Round(1, (Member("a", "x", tuple(range(here))),), cause="start")), time.monotonic())
    served = reporter.metrics.render().decode()
    assert f'elasticd_world_size{{job_id="lm",node="a"}} {here}.0' in served
    assert f'elasticd_world_size_target{{job_id="lm",node="a"}} {aim}.0' in served


def test_world_size_target_of_nodes_with_different_numbers_of_workers(start: StartReporter) -> None:
    reporter = start("--nnodes 2:3 --nproc-per-node 4 --rdzv-backend etcd --rdzv-endpoint h:1 --rdzv-id lm")
    here, small = Member("a", "x", (0, 1, 2, 3)), Member("b", "x", (0, 1))
    for number, members, aim in [(1, (here, small), 10), (2, (here, small, replace(small, node="c")), 8),
                                 (3, (here, small, Member("c", "x", (0,))), 8)]:  # fmt: skip
        reporter.on(RoundPublished(Round(number, members, cause="start")), time.monotonic())
        assert _value(reporter, "elasticd_world_size_target") == aim


@pytest.mark.parametrize(
    ("flags", "members", "waits", "ready"),
    [
        ("--nproc-per-node 2 --spares 2", (Member("a", "x", (0, 1)),),
         "slots 2 and 3 of a wait as spares: the job has its 2 workers",
         "slots 2 and 3 of a stand by as spares: 2 workers at session.run()"),
        ("--nnodes 1 --rdzv-backend etcd --rdzv-endpoint h:1 --rdzv-id lm", (Member("b", "x", (0, 1)),),
         "a waits as a spare: the job has its 1 node", "a stands by as a spare: 2 workers at session.run()"),
    ],
    ids=["slots", "node"],
)  # fmt: skip
def test_spares_are_told_and_counted(
    flags: str, members: tuple[Member, ...], waits: str, ready: str, start: StartReporter
) -> None:
    written: list[LogEvent] = []
    reporter = start(flags, written)
    reporter.on(RoundPublished(Round(1, members, cause="start")), 1.0)
    for spares in (SparesChanged((2, 3)), SparesChanged(), SparesChanged((2,)), SparesChanged((2, 3), (2,))):
        reporter.on(spares, 1.0)
        assert _value(reporter, "elasticd_spares") == len(spares.slots)
    reporter.on(SparesChanged((2, 3), (2, 3)), 1.0)
    said = [event.reason for event in written if isinstance(event, events.WaitingEvent)]
    assert (said[0], said[-1]) == (waits, ready)


@pytest.mark.parametrize(("nodes", "culprit"), [("", ""), ("b", "b"), ("bb", "b"), ("bc", "")])
def test_hang_counts_for_a_node_only_where_that_is_the_only_one(nodes: str, culprit: str, start: StartReporter) -> None:
    reporter = start("--nproc-per-node 2")
    ranks = tuple((node, rank, 0) for rank, node in enumerate(nodes))
    reporter.on(HangVerdict(1, ranks, "stopped", "it is stopped", 3.0, False, ()), 1.0)
    served = reporter.metrics.render().decode()
    assert f'elasticd_hangs_total{{cause="stopped",culprit="{culprit}",job_id="lm",node="a"}} 1.0' in served


def test_a_leaving_node_does_not_end_the_job(start: StartReporter) -> None:
    """The log of a drained node must not report that the job stopped, which continues on other nodes."""
    flags = "--rdzv-backend etcd --rdzv-endpoint h:1 --rdzv-id lm --nproc-per-node 1 "
    written: list[LogEvent] = []
    leaving = StateMachineRules("a", 0.5, 30.0, leave_on_stop=True, leave_grace_s=60.0)
    for nnodes, rules, within in (("1:2", leaving, 60.0), ("1", StateMachineRules("a", 0.5, 30.0), 30.0)):
        reporter = start(f"{flags} --nnodes {nnodes}", written)
        reporter.on(StopStarted(StopRequested("SIGTERM", 143, 1.0, "drained: a fan"), rules), 1.0)
        without = Round(2, (Member("b", "x", (0,)),), cause="resize")
        reporter.on(JobLeft(143, "stopped: drained: a fan", without), 2.0)
        requested, ended = written[-2:]
        assert isinstance(requested, events.StopRequestedEvent)
        assert isinstance(ended, events.JobEndedEvent)
        assert (requested.by, requested.grace_seconds) == ("SIGTERM", within)
        assert ended.outcome == ("left" if rules.leave_on_stop else "stopped")
    assert [record.reason for record in written] == [
        "a leaves within 60 s: drained: a fan", "stopped: drained: a fan",
        "SIGTERM received: workers have 30 s to stop", "stopped: drained: a fan",
    ]  # fmt: skip


def test_steps_after_the_terminal_round_count(start: StartReporter) -> None:
    """The last steps before a stop, and the checkpoint of them, belong into the numbers."""
    written: list[LogEvent] = []
    reporter = start("--nproc-per-node 1", written)
    terminal = Round(2, (), outcome="stopped", exit_code=143, reason="stopped by SIGTERM")
    reporter.on(RoundPublished(Round(1, ALONE, cause="start")), 1.0)
    reporter.on(GroupStarted(1, [10], 11, True), 1.0)
    reporter.on(Observation(1, (_heartbeat(5, 2),), (), 0.0), 2.0)
    reporter.on(RoundPublished(terminal), 3.0)
    reporter.on(Observation(1, (_heartbeat(9, 4),), (), 0.0), 4.0)
    reporter.on(JobLeft(143, "stopped by SIGTERM", terminal), 5.0)
    assert isinstance(written[-1], events.JobEndedEvent)
    assert written[-1].step == 9
    assert _value(reporter, "elasticd_step") == 9.0


def test_the_end_of_the_workers_store_is_an_event(start: StartReporter) -> None:
    written: list[LogEvent] = []
    reporter = start("--nproc-per-node 1", written)
    reporter.on(RoundPublished(Round(1, ALONE, cause="start")), 1.0)
    reporter.on(GroupStarted(1, [10], 11, True), 1.0)
    reporter.on(StoreExited(1, "was killed by SIGKILL", 2.0, ExitStatus.from_returncode(-9)), 2.0)
    assert isinstance(written[-1], events.StoreExitedEvent)
    assert (written[-1].pid, written[-1].exit_code, written[-1].signal) == (11, None, 9)


@pytest.mark.parametrize(
    ("leader", "recovery_s"), [("a", 1.5), ("b", None), ("c, which has no workers", 1.5), ("of an older version", 1.5)]
)
def test_one_node_says_how_long_a_recovery_took(leader: str, recovery_s: float | None, start: StartReporter) -> None:
    """From when its leader read of the failure; the last step of its own workers may be long ago."""
    written: list[LogEvent] = []
    reporter = start("--nproc-per-node 1", written)
    members = (*ALONE, Member("b", "y", (0,)))
    reporter.on(RoundPublished(Round(1, members, cause="start")), 1.0)
    reporter.on(Observation(1, (_heartbeat(5, 2),), (), 98.0), 100.0)
    reporter.on(FaultDetected(1, "crash", "b", 100.0), 100.2)
    reporter.on(RoundPublished(Round(2, members, cause="crash", leader=leader[:1].replace("o", ""))), 100.5)
    reporter.on(GroupStarted(2, [10], None, True), 101.0)
    reporter.on(FirstStep(2, 101.5), 101.6)
    stepped = written[-1]
    assert isinstance(stepped, events.FirstStepEvent)
    assert (stepped.recovery_seconds, "after the fault" in stepped.reason) == (recovery_s, recovery_s is not None)
    assert _value(reporter, "elasticd_recovery_seconds_count") == (recovery_s is not None)


@pytest.mark.parametrize(("source", "first"), [(StepSource.HOOK, 1), (StepSource.SESSION, 5)])
def test_first_step_of_a_plain_script_is_its_first(source: StepSource, first: int, start: StartReporter) -> None:
    """However many it has made until somebody looks: only of the first one it is known that nothing was restored."""
    written: list[LogEvent] = []
    reporter = start("--nproc-per-node 1", written)
    reporter.on(RoundPublished(Round(1, ALONE, cause="start")), 1.0)
    reporter.on(GroupStarted(1, [10], None, True), 1.0)
    reporter.on(Observation(1, (replace(_heartbeat(5, 2), source=source),), (), 0.0), 2.1)
    reporter.on(FirstStep(1, 2.0), 2.1)
    assert isinstance(written[-1], events.FirstStepEvent)
    assert written[-1].step == first


def test_a_round_is_at_no_step_before_its_first_one(start: StartReporter, monkeypatch: pytest.MonkeyPatch) -> None:
    """The step that the last round had reached is lost, or at least not trained by this one."""
    shown: list[tuple[int, int | None]] = []
    monkeypatch.setattr(PlainConsole, "progress", lambda _, view: shown.append((view.round, view.step)))
    reporter = start("--nproc-per-node 1")
    for number, beat in ((1, _heartbeat(11, 2)), (2, Heartbeat()), (2, _heartbeat(5, 4))):
        reporter.on(RoundPublished(Round(number, ALONE, cause="start")), 1.0)
        reporter.on(GroupStarted(number, [10], None, True), 1.0)
        reporter.on(Observation(number, (beat,), (), 0.0), 2.0)
    assert shown == [(1, 11), (2, None), (2, 5)]


def test_a_restored_checkpoint_of_another_node_counts_as_the_last_one(start: StartReporter) -> None:
    """Until this node saves one itself, no other number shows how much a fault would cost."""
    reporter = start("--nproc-per-node 1")
    reporter.on(RoundPublished(Round(2, ALONE, cause="resize")), 90.0)

    def last_checkpoint(kind: str, step: int, wall: float, **extra: object) -> list[str]:
        reporter.on(Observation(2, (), (WorkerEvent(kind, 2, 0, step, wall, wall, "", extra=extra),), 0.0), wall)
        served = reporter.metrics.render().decode().splitlines()
        return [line.rpartition(" ")[2] for line in served if line.startswith("elasticd_checkpoint_last_")][:2]

    assert last_checkpoint("resumed", 50, 100.0) == ["50.0", "100.0"]
    assert last_checkpoint("checkpoint_saved", 60, 110.0) == ["60.0", "110.0"]
    assert last_checkpoint("checkpoint_saved", 50, 111.0) == ["60.0", "110.0"], "what it resumed from, written late"
    assert last_checkpoint("resumed", 60, 120.0) == ["60.0", "110.0"]
    assert last_checkpoint("resumed", 70, 130.0, in_processes=True) == ["60.0", "110.0"], "which is on no disk"
    assert last_checkpoint("resumed", 40, 140.0) == ["40.0", "140.0"], "the newer one cannot be used"


def test_states_in_memory_are_counted(start: StartReporter) -> None:
    written: list[LogEvent] = []
    reporter = start("--nproc-per-node 1", written)

    def happens(kind: str, **extra: object) -> None:
        event = WorkerEvent(kind, 1, 0, 60, 100.0, 100.0, "", extra=extra)
        reporter.on(Observation(1, (), (event,), 0.0), 100.0)

    happens("snapshot")
    assert _value(reporter, "elasticd_snapshot_last_step") == 60
    happens("checkpoint_dropped", path="/x/r1-s60")
    assert _value(reporter, "elasticd_checkpoints_dropped_total") == 1
    happens("resumed", path="/x/r1-s60", from_round=1, donor=1, steps_saved=7)
    happens("resumed", path="/x/r1-s60", from_round=1, saved_at=60.5)
    assert _value(reporter, "elasticd_donor_resumes_total") == 1
    assert _value(reporter, "elasticd_donor_steps_saved_total") == 7
    assert [one.saved_at for one in written if isinstance(one, events.ResumedEvent)] == [None, 60.5]


def test_checkpoints_that_take_longer_than_a_stop_may_are_reported_once(
    start: StartReporter, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    monkeypatch.setattr(PlainConsole, "log", lambda _, text, level: said.append(f"{level}: {text}"))
    reporter = start("--nproc-per-node 1 --shutdown-timeout 40")
    for step, written_s in (60, 39.0), (70, 66.4), (80, 70.0):
        event = WorkerEvent("checkpoint_saved", 1, 0, step, 1.0, 1.0, "", extra={"written_seconds": written_s})
        reporter.on(Observation(1, (), (event,), 0.0), 1.0)
    (warning,) = said
    assert warning.startswith("warning: the checkpoint of step 70 took 66 s to reach the disk, and a stop has 40 s (--")


def test_sentence_about_the_script_is_said_once_in_a_job(start: StartReporter, monkeypatch: pytest.MonkeyPatch) -> None:
    """The new process of each round says it again."""
    said: list[str] = []
    monkeypatch.setattr(PlainConsole, "log", lambda _, text, level: said.append(text))
    reporter = start("--nproc-per-node 1")
    for number, extra in (1, {"once": "key"}), (2, {"once": "key"}), (2, {"once": "other"}), (2, {}), (2, {}):
        event = WorkerEvent("message", number, 0, 0, 1.0, 1.0, f"{number} {extra}", extra=extra)
        reporter.on(Observation(number, (), (event,), 0.0), 1.0)
    assert said == ["1 {'once': 'key'}", "2 {'once': 'other'}", "2 {}", "2 {}"]


def test_remaining_restarts_follow_progress_and_the_clock(start: StartReporter) -> None:
    reporter = start("--nproc-per-node 1")
    left = lambda: _value(reporter, "elasticd_restart_budget_remaining")  # noqa: E731
    assert left() is None
    now = time.monotonic()
    state = BudgetState(streak=2, tokens=30.0, high_water=70)
    again = Round(3, ALONE, last_checkpoint=(2, 50), cause="crash", budget=state)
    reporter.on(RoundPublished(again), now)
    assert left() == 1.0
    saved = lambda number, step: Observation(  # noqa: E731
        number, (), (WorkerEvent("checkpoint_saved", number, 0, step, now, now, ""),), 0.0
    )
    reporter.on(saved(3, 50), now)
    assert left() == 1.0, "it is a copy of the restored one"
    reporter.on(saved(3, 60), now)
    assert left() == 3.0
    for number, ago_s, granted in ((4, 20.0, 0.0), (5, 70.0, 1.0), (6, 200.0, 3.0)):  # 60 an hour: one a minute
        reporter.on(RoundPublished(replace(again, number=number, budget=replace(state, tokens=0.0))), now - ago_s)
        reporter.on(saved(number, 60), now)
        assert left() == granted


def _heartbeat(step: int, at_s: int) -> Heartbeat:
    return Heartbeat(step=step, progress_ns=at_s * 10**9, first_step_ns=2 * 10**9)


def _value(reporter: JobReporter, name: str) -> float | None:
    lines = reporter.metrics.render().decode().splitlines()
    return next((float(line.rpartition(" ")[2]) for line in lines if line.startswith(f"{name}{{")), None)
