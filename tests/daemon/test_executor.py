"""Executor: a job that cannot be started is refused or retried, with the reason, and never ends the agent."""

from __future__ import annotations

import errno
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from elasticd.errors import UsageError
from elasticd_daemon.executor import START_RETRY_S, Executor
from elasticd_daemon.metrics import NodeMetrics
from elasticd_daemon.records import ClusterView, Placement, SlotAssignment, Submission
from elasticd_daemon.runners.reconcile import NodePlan, RunnerEnd, RunnerStart, RunOutcomes, reconcile
from elasticd_daemon.runners.spawn import NodeRefusesJob
from elasticd_daemon.runners.spec import RunnerSpec, exit_for

JOB = '{"command": ["train.py"], "workdir": "/"}'
FULL = OSError(errno.ENOSPC, "No space left on device", "/state/jobs/llm.1")


@dataclass
class FakeRunners:
    """RunnerManager and SpecBuilder of a node, with faults."""

    account_fails: Exception | None = None
    start_fails: Exception | None = None
    refuse_fails: Exception | None = None
    calls: list[str] = field(default_factory=list)
    settings: Any = field(default_factory=lambda: SimpleNamespace(drain_timeout_s=60.0))

    def build(self, start: RunnerStart) -> RunnerSpec:
        return RunnerSpec(start.submission.job, start.submission.number, "n1", start.slots, JOB)

    def account(self, spec: RunnerSpec) -> Any:
        if self.account_fails:
            raise self.account_fails

    def secrets(self) -> Any: ...

    def cgroup_limits(self, spec: RunnerSpec) -> dict[str, int]:
        return {}

    def start(self, spec: RunnerSpec, account: Any, secrets: Any, limits: dict[str, int]) -> int:
        self.calls.append("start")
        if self.start_fails:
            raise self.start_fails
        return 4711

    def refuse(self, spec: RunnerSpec, account: Any, why: str) -> RunnerEnd:
        self.calls.append(f"refuse: {why}")
        if self.refuse_fails:
            raise self.refuse_fails
        return RunnerEnd(spec, exit_for(spec, 2, why, (), 0), stop_requested=False)


class RecordingJournal:
    def __init__(self) -> None:
        self.sentences: list[str] = []

    def warn(self, sentence: str) -> None:
        self.sentences.append(sentence)

    def event(self, kind: Any, sentence: str, **fields: Any) -> None:
        self.sentences.append(sentence)


PLAN = NodePlan(start=(RunnerStart(Submission("llm", 1, "{}", 1, 1, 1, 1), (0,)),))


def executor_for(runners: FakeRunners) -> tuple[Executor, RunOutcomes, list[str]]:
    journal, outcomes = RecordingJournal(), RunOutcomes()
    fake: Any = runners
    made = Executor(fake, journal, NodeMetrics("n1", "1"), fake, outcomes)  # type: ignore[arg-type]
    return made, outcomes, journal.sentences


def test_start() -> None:
    executor, _, log = executor_for(FakeRunners())
    executor.execute(PLAN, 100.0)
    assert log == ["job llm: runner started as pid 4711 on slots 0"]
    assert executor.is_own_runner(("llm", 1))


@pytest.mark.parametrize(
    "runners",
    [
        FakeRunners(account_fails=UsageError("user 'x' does not exist")),
        FakeRunners(start_fails=NodeRefusesJob("user 'x' may not")),
    ],
    ids=["no such user", "python out of reach"],
)
def test_refusal(runners: FakeRunners) -> None:
    executor, outcomes, log = executor_for(runners)
    executor.execute(PLAN, 100.0)
    assert outcomes.exits[("llm", 1)].outcome == "refused"
    assert log[0].startswith("job llm is refused by this node: user 'x' ")
    assert not executor.is_own_runner(("llm", 1))


@pytest.mark.parametrize(
    "runners",
    [
        FakeRunners(start_fails=FULL),
        FakeRunners(account_fails=UsageError("user 'x' does not exist"), refuse_fails=FULL),
        FakeRunners(start_fails=NodeRefusesJob("user 'x' may not"), refuse_fails=FULL),
    ],
    ids=["to start", "to refuse", "to refuse after the start"],
)
def test_full_disk_is_retried(runners: FakeRunners) -> None:
    executor, outcomes, log = executor_for(runners)
    executor.execute(PLAN, 100.0)
    assert log == ["job llm cannot be started: /state/jobs/llm.1: No space left on device; retrying in 10 s"]
    view = ClusterView(
        submissions=(PLAN.start[0].submission,), placements=(Placement("llm", 1, (SlotAssignment("n1", (0,)),), ""),)
    )
    early = reconcile(view, "n1", (), outcomes, "", 101.0)
    (shown,) = early.runner_statuses
    why = "it cannot start: /state/jobs/llm.1: No space left on device"
    assert (early.start, early.next_start_at, shown.state) == ((), 100.0 + START_RETRY_S, "starting")
    assert shown.why == f"{why}; 1 time in a row, the next start is within 10 s"
    later = reconcile(view, "n1", (), outcomes, "", 105.0)
    assert later.runner_statuses == early.runner_statuses, "each change is a write to the store"
    runners.start_fails = runners.account_fails = runners.refuse_fails = None
    executor.execute(reconcile(view, "n1", (), outcomes, "", 100.0 + START_RETRY_S), 100.0 + START_RETRY_S)
    assert executor.is_own_runner(("llm", 1))
    assert not outcomes.exits
