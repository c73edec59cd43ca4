"""What is told of a round: the numbers that others compare with."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from elasticd.heartbeat.record import Heartbeat
from elasticd.heartbeat.worker_events import WorkerEvent
from elasticd_agent.config.run_options import parse_run
from elasticd_agent.hangs.observer import Observation
from elasticd_agent.job.story import JobReporter
from elasticd_agent.model.messages import ExitStatus, StepRules, StopRequested, StoreExited
from elasticd_agent.model.records import BudgetState, Member, Round
from elasticd_agent.system.nonblocking_writer import NonBlockingWriter
from elasticd_agent.telemetry import events as happened
from elasticd_agent.telemetry.console import PlainConsole
from elasticd_agent.telemetry.event_log import NullEventLog
from elasticd_agent.telemetry.events import LogEvent
from elasticd_agent.telemetry.metrics import Metrics
from elasticd_agent.workers.manager import GroupStarted


class RecordingEventLog(NullEventLog):
    """An event log in a list."""

    def __init__(self, into: list[LogEvent]) -> None:
        self._into = into

    def write(self, record: LogEvent) -> None:
        self._into.append(record)


StartReporter = Callable[[str], JobReporter]


@pytest.fixture
def story(tmp_path: Path) -> Iterator[StartReporter]:
    nowhere = os.open(os.devnull, os.O_WRONLY)
    outlet = NonBlockingWriter(nowhere)

    def start(flags: str) -> JobReporter:
        spec, policy, _ = parse_run([*flags.split(), "train.py"], {}, tmp_path)
        console = PlainConsole(outlet, "lm")
        return JobReporter(spec, policy, "a", NullEventLog(), Metrics("lm", "a"), console, lambda number: None)

    yield start
    assert outlet.close()
    os.close(nowhere)


@pytest.mark.parametrize(("nodes", "workers", "here", "aim"), [(1, 4, 3, 4), (4, 2, 2, 8), (1, 2, 2, 2), (2, 1, 3, 3)])
def test_a_job_aims_at_all_of_its_nodes(nodes: int, workers: int, here: int, aim: int, story: StartReporter) -> None:
    """`here` workers are there; nodes that have more slots than this one can make it more than was aimed at."""
    flags = f"--nnodes 1:{nodes} --nproc-per-node {workers} --rdzv-backend etcd --rdzv-endpoint h:1 --rdzv-id lm"
    told = story(flags)
    told.round_published(Round(1, (Member("a", "x", tuple(range(here))),), cause="start"), time.monotonic())
    served = told.metrics.render().decode()
    assert f'elasticd_world_size{{job_id="lm",node="a"}} {here}.0' in served
    assert f'elasticd_world_size_target{{job_id="lm",node="a"}} {aim}.0' in served


def test_who_leaves_others_does_not_end_the_job(story: StartReporter) -> None:
    """A drained node's log told that the job had stopped, which went on elsewhere."""
    flags = "--rdzv-backend etcd --rdzv-endpoint h:1 --rdzv-id lm --nproc-per-node 1 "
    written: list[LogEvent] = []
    for nnodes, rules, within in (
        ("1:2", StepRules("a", leave_on_stop=True, leave_grace_s=60.0), 60.0),
        ("1", StepRules("a"), 30.0),
    ):
        told = story(f"{flags} --nnodes {nnodes}")
        told.events = RecordingEventLog(written)
        told.asked_to_stop(StopRequested("SIGTERM", 143, 1.0, "drained: a fan"), rules)
        without = Round(2, (Member("b", "x", (0,)),), cause="resize")
        told.ended(143, "stopped: drained: a fan", without)
        asked, ended = written[-2:]
        assert isinstance(asked, happened.StopRequestedEvent)
        assert isinstance(ended, happened.JobEndedEvent)
        assert (asked.by, asked.grace_seconds) == ("SIGTERM", within)
        assert ended.outcome == ("left" if rules.leave_on_stop else "stopped")
    assert [record.reason for record in written] == [
        "a leaves within 60 s: drained: a fan", "stopped: drained: a fan",
        "SIGTERM received: workers have 30 s to stop", "stopped: drained: a fan",
    ]  # fmt: skip


def test_steps_that_were_made_while_the_job_was_being_stopped_were_made(story: StartReporter) -> None:
    """The last ones before a stop, and the checkpoint of them, were in no number."""
    told, written = story("--nproc-per-node 1"), list[LogEvent]()
    told.events = RecordingEventLog(written)
    told.round_published(Round(1, (Member("a", "x", (0,)),), cause="start"), 1.0)
    told.started(GroupStarted(1, [10], 11, True), 1.0)
    told.observed(Observation(1, (Heartbeat(step=5, progress_ns=2 * 10**9, first_step_ns=2 * 10**9),), (), 0.0), 2.0)
    told.round_published(Round(2, (), outcome="stopped", exit_code=143, reason="stopped by SIGTERM"), 3.0)
    told.observed(Observation(1, (Heartbeat(step=9, progress_ns=4 * 10**9, first_step_ns=2 * 10**9),), (), 0.0), 4.0)
    told.ended(143, "stopped by SIGTERM", told.round)
    assert isinstance(written[-1], happened.JobEndedEvent)
    assert written[-1].step == 9
    assert _value(told, "elasticd_step") == 9.0


def test_what_ended_the_workers_store_is_told(story: StartReporter) -> None:
    told, written = story("--nproc-per-node 1"), list[LogEvent]()
    told.events = RecordingEventLog(written)
    told.round_published(Round(1, (Member("a", "x", (0,)),), cause="start"), 1.0)
    told.started(GroupStarted(1, [10], 11, True), 1.0)
    told.happened(StoreExited(1, "was killed by SIGKILL", 2.0, ExitStatus.of(-9)))
    assert isinstance(written[-1], happened.StoreExitedEvent)
    assert (written[-1].pid, written[-1].exit_code, written[-1].signal) == (11, None, 9)


def test_whoever_goes_on_from_another_nodes_checkpoint_has_one(story: StartReporter) -> None:
    """Until it saves one itself, nobody else is there who could say how much a fault would cost."""
    told = story("--nproc-per-node 1")
    told.round_published(Round(2, (Member("a", "x", (0,)),), cause="resize"), 90.0)

    def noted(kind: str, step: int, wall: float) -> list[str]:
        told.observed(Observation(2, (), (WorkerEvent(kind, 2, 0, step, wall, wall, ""),), 0.0), wall)
        served = told.metrics.render().decode().splitlines()
        return [line.rpartition(" ")[2] for line in served if line.startswith("elasticd_checkpoint_last_")][:2]

    assert noted("resumed", 50, 100.0) == ["50.0", "100.0"]
    assert noted("checkpoint_saved", 60, 110.0) == ["60.0", "110.0"]
    assert noted("resumed", 60, 120.0) == ["60.0", "110.0"]


def test_what_is_left_of_the_restarts_follows_progress_and_the_clock(story: StartReporter) -> None:
    """It stood as the last fault had left it, until the next one."""
    told = story("--nproc-per-node 1")
    left = lambda: _value(told, "elasticd_restart_budget_remaining")  # noqa: E731
    assert left() is None
    now = time.monotonic()
    state = BudgetState(streak=2, tokens=30.0, high_water=70)
    again = Round(3, (Member("a", "x", (0,)),), last_checkpoint=(2, 50), cause="crash", budget=state)
    told.round_published(again, now)
    assert left() == 1.0
    saved = lambda step: Observation(3, (), (WorkerEvent("checkpoint_saved", 3, 0, step, now, now, ""),), 0.0)  # noqa: E731
    told.observed(saved(50), now)
    assert left() == 1.0, "it is a copy of what it resumed from"
    told.observed(saved(60), now)
    assert left() == 3.0
    for ago_s, granted in ((20.0, 0.0), (70.0, 1.0), (200.0, 3.0)):  # 60 an hour: one a minute
        told.round_published(replace(again, number=again.number + 1, budget=replace(state, tokens=0.0)), now - ago_s)
        told.observed(Observation(4, (), (WorkerEvent("checkpoint_saved", 4, 0, 60, now, now, ""),), 0.0), now)
        assert left() == granted


def _value(told: JobReporter, name: str) -> float | None:
    lines = told.metrics.render().decode().splitlines()
    return next((float(line.rpartition(" ")[2]) for line in lines if line.startswith(f"{name}{{")), None)
