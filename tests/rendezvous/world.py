"""A job on one node without processes: the real state machine and plan, and a fake clock.

The test says what happens; this performs the actions on a simulated group, publishes the planner's verdicts, and
checks the invariants at every turn.
"""

from __future__ import annotations

from dataclasses import replace

from elasticd_agent.job.state_machine import step
from elasticd_agent.model.job import Policy
from elasticd_agent.model.messages import (
    Action,
    Event,
    Flush,
    Flushed,
    GroupEnded,
    Joining,
    KillGroup,
    Leave,
    Phase,
    ReportDone,
    ReportFailure,
    RoundPublished,
    SetTimer,
    StartGroup,
    StateMachineRules,
    StopForced,
    StopGroup,
    StopRequested,
    TimerExpired,
)
from elasticd_agent.model.records import Failure, NodeRecord, Round
from elasticd_agent.rendezvous.plan import plan
from elasticd_agent.rendezvous.view import Pause, PresentNode, Requirements, View, Wait

NODE = "a"


class World:
    """One agent, one planner, one node. `alive` is the round whose group still has processes."""

    def __init__(
        self,
        slots: tuple[int, ...],
        asked: Requirements,
        policy: Policy,
        first_round_number: int = 1,
        now: float = 1000.0,
        plain: bool = False,
    ) -> None:
        """`plain`: each round counts its steps from 1, as those of a script without a Session."""
        self.now = now
        self.policy = policy
        self.rules = StateMachineRules(NODE, policy.user_error_wait_s, policy.shutdown_timeout_s)
        self.phase: Phase = Joining()
        node = NodeRecord(NODE, "i1", "127.0.0.1", slots)
        self.view = View(None, (PresentNode(node, now),), asked, first_round_number=first_round_number)
        self.alive: int | None = None
        self.ending = False
        self.started: list[Round] = []
        self.started_at = 0.0
        self.rounds: list[Round] = []
        self.wakes: list[float] = []
        self.look_at: float | None = None
        self.left: Leave | None = None
        self.lines: list[str] = []
        self._plain = plain
        self._steps_before = self._step = 0
        self._saved: dict[int, tuple[int, int]] = {}

    # ---- what drives it calls these

    def feed(self, event: Event) -> None:
        """Something happened."""
        if isinstance(event, GroupEnded) and event.round_number == self.alive:
            self.alive = None
            self.ending = False
        if isinstance(event, StopRequested | StopForced):
            self.view = replace(self.view, stop=self.view.stop or event)
        before = self.phase
        self.phase, actions = step(before, event, self.rules)
        self.log_transition(before, event, actions)
        for action in actions:
            self._perform(action)
        self.look()

    def hung(self, rank: int, why: str) -> None:
        """All agents' reports have shown that the group hangs, by this rank."""
        slot = next(slot for r, _, _, slot in self.view.current.assignments() if r == rank)
        failure = Failure(self.view.current.number, NODE, "hung", ((rank, slot),), why, cause="blocked")
        if not self.view.failures:
            self.view = replace(self.view, failures=(failure,), failure_seen_at=self.now)
        self.look()

    def look(self) -> None:
        """The planner looks at the job and publishes what it decides."""
        verdict = plan(self.view, self.policy, self.now)
        assert not isinstance(verdict, Pause), "one node has nobody to wait for"
        assert plan(self.view, self.policy, self.now) == verdict
        if isinstance(verdict, Wait):
            assert verdict.until is None or verdict.until > self.now, verdict
            if verdict.until is not None and verdict.until != self.look_at:
                self.lines.append(f"planner waits {verdict.until - self.now:g} s: {verdict.why}")
            self.look_at = verdict.until
            return
        self.look_at = None
        assert Round.from_json(verdict.to_json()) == verdict
        assert all(r.number < verdict.number for r in self.rounds), "round numbers only grow"
        assert not any(r.terminal for r in self.rounds), "a job ends once"
        assert verdict.reason
        self.rounds.append(verdict)
        self.lines.append(f"round {verdict.number}{_outcome(verdict)}: {verdict.reason}")
        here = tuple(
            replace(p, record=replace(p.record, seen_round=verdict.number, ready_round=verdict.number))
            for p in self.view.nodes
        )
        self.view = replace(
            self.view, current=verdict, nodes=here, failures=(), done=frozenset(), round_seen_at=self.now
        )
        self._steps_before, self._step = self.view.high_water, 0
        self.publish(verdict)

    def pass_time(self, until: float) -> None:
        """Wakes and the planner's waits come due in order."""
        while due := [t for t in (*self.wakes, self.look_at) if t is not None and t <= until]:
            self.now = max(self.now, min(due))
            if self.wakes and min(self.wakes) <= self.now:
                self.wakes.remove(min(self.wakes))
                self.feed(TimerExpired(self.now))
            else:
                self.look()
        self.now = until

    def trained(self, step: int) -> None:
        self._step = step
        done = self._steps_before + step if self._plain else step
        self.view = replace(self.view, high_water=max(done, self.view.high_water))
        stepped = [replace(p, record=replace(p.record, stepped_round=self.alive or 0)) for p in self.view.nodes]
        self.view = replace(self.view, nodes=tuple(stepped))

    def saved(self, number: int, step: int) -> None:
        self._saved[number] = (number, step)
        self.view = replace(self.view, checkpoint=(number, step))

    # ---- what a driver may replace

    def publish(self, r: Round) -> None:
        self.feed(RoundPublished(r))

    def log_transition(self, before: Phase, event: Event, actions: list[Action]) -> None:
        """After each event, before its actions are performed."""

    def ends(self, action: KillGroup | StopGroup) -> None:
        """The group was told to end."""

    # ---- performing

    def _perform(self, action: Action) -> None:
        assert self.left is None, "nothing is done after leaving"
        match action:
            case StartGroup(r):
                assert self.alive is None, f"round {r.number} starts while the group of {self.alive} lives"
                assert all(old.number < r.number for old in self.started)
                self.started.append(r)
                self.started_at = self.now
                self.alive = r.number
            case KillGroup(number) | StopGroup(number):
                assert number in (s.number for s in self.started)
                self.ending = True
                self.ends(action)
            case ReportFailure(failure):
                if not self.view.failures:
                    self.view = replace(self.view, failure_seen_at=self.now)
                saved = self._saved.get(failure.round)
                failure = replace(failure, high_water=self.view.high_water, checkpoint=saved, step=self._step)
                self.view = replace(self.view, failures=(*self.view.failures, failure))
            case ReportDone(number):
                if number == self.view.current.number:
                    self.view = replace(self.view, done=frozenset({NODE}))
            case SetTimer(at):
                assert at >= self.now
                self.wakes.append(at)
            case Flush():
                self.feed(Flushed())
            case Leave():
                assert self.alive is None, "left a living group behind"
                self.left = action


def _outcome(r: Round) -> str:
    return "" if r.outcome is None else f" ({r.outcome}, exit code {r.exit_code})"
