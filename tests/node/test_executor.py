"""What cannot be started is refused, or tried again: in a sentence, and never at the price of the daemon."""

from __future__ import annotations

import errno
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from elasticd.errors import UsageError
from elasticd_agent.node.executor import RETRY_S, Executor
from elasticd_agent.node.metrics import NodeMetrics
from elasticd_agent.node.reconcile import NodePlan, RunnerEnd, RunnerStart, RunOutcomes
from elasticd_agent.node.records import Submission
from elasticd_agent.node.runners.spawn import NotAllowed
from elasticd_agent.node.runners.spec import RunnerSpec, exit_for

FULL = OSError(errno.ENOSPC, "No space left on device", "/state/jobs/llm.1")


@dataclass
class FakeRunners:
    """Runners and orders of a node on which one thing or another goes wrong."""

    account_fails: Exception | None = None
    start_fails: Exception | None = None
    refuse_fails: Exception | None = None
    did: list[str] = field(default_factory=list)
    settings: Any = field(default_factory=lambda: SimpleNamespace(drain_timeout_s=60.0))

    def build(self, start: RunnerStart) -> RunnerSpec:
        return RunnerSpec(start.submission.job, start.submission.number, "n1", start.slots, "{}")

    def account(self, order: RunnerSpec) -> Any:
        if self.account_fails:
            raise self.account_fails

    def secrets(self) -> Any: ...

    def start(self, order: RunnerSpec, account: Any, secrets: Any) -> int:
        self.did.append("start")
        if self.start_fails:
            raise self.start_fails
        return 4711

    def refuse(self, order: RunnerSpec, account: Any, why: str) -> RunnerEnd:
        self.did.append(f"refuse: {why}")
        if self.refuse_fails:
            raise self.refuse_fails
        return RunnerEnd(order, exit_for(order, 2, why, (), 0), requested=False)


class RecordingJournal:
    def __init__(self) -> None:
        self.sentences: list[str] = []

    def warn(self, sentence: str) -> None:
        self.sentences.append(sentence)

    def event(self, kind: Any, sentence: str, **fields: Any) -> None:
        self.sentences.append(sentence)


PLAN = NodePlan(start=(RunnerStart(Submission("llm", 1, "{}", 1, 1, 1, 1), (0,)),))


def on(machine: FakeRunners) -> tuple[Executor, RunOutcomes, list[str]]:
    heard, ended = RecordingJournal(), RunOutcomes()
    it: Any = machine
    return Executor(it, heard, NodeMetrics("n1", "1"), it, ended), ended, heard.sentences  # type: ignore[arg-type]


def test_a_runner_that_starts() -> None:
    machine = FakeRunners()
    performing, _, said = on(machine)
    performing.execute(PLAN, 100.0)
    assert said == ["job llm: its runner starts as pid 4711, with slots 0"]
    assert performing.has_started(("llm", 1))


@pytest.mark.parametrize(
    "machine",
    [
        FakeRunners(account_fails=UsageError("user 'x' does not exist")),
        FakeRunners(start_fails=NotAllowed("user 'x' may not")),
    ],
    ids=["no such user", "python out of reach"],
)
def test_who_may_not_be_started_is_refused(machine: FakeRunners) -> None:
    performing, ended, said = on(machine)
    performing.execute(PLAN, 100.0)
    assert ended.exits[("llm", 1)].outcome == "refused"
    assert said[0].startswith("job llm is refused by this node: user 'x' ")
    assert not performing.has_started(("llm", 1))


@pytest.mark.parametrize(
    "machine",
    [
        FakeRunners(start_fails=FULL),
        FakeRunners(account_fails=UsageError("user 'x' does not exist"), refuse_fails=FULL),
        FakeRunners(start_fails=NotAllowed("user 'x' may not"), refuse_fails=FULL),
    ],
    ids=["to start", "to refuse", "to refuse after all"],
)
def test_a_full_disk_costs_a_while_and_not_the_daemon(machine: FakeRunners) -> None:
    performing, ended, said = on(machine)
    performing.execute(PLAN, 100.0)
    assert said == ["job llm cannot be started: /state/jobs/llm.1: No space left on device; it is tried again in 10 s"]
    tried = len(machine.did)
    performing.execute(PLAN, 100.0 + RETRY_S - 1)
    assert len(machine.did) == tried
    machine.start_fails = machine.account_fails = machine.refuse_fails = None
    performing.execute(PLAN, 100.0 + RETRY_S)
    assert performing.has_started(("llm", 1))
    assert not ended.exits
