"""Random lives of a job against the real core and planner: invariants 1 and 4, and the restart budget.

Each group gets a fate (it crashes, ends well, loses its store, ...). Deliveries are late, repeated and out of order.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field, replace
from itertools import count

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from elasticd_agent.job.state_machine import step
from elasticd_agent.model.job import Policy
from elasticd_agent.model.messages import (
    Action,
    Event,
    ExitReport,
    ExitStatus,
    FirstStep,
    GroupEnded,
    KillGroup,
    Phase,
    RoundPublished,
    Running,
    Settling,
    StartFailed,
    StartGroup,
    StopForced,
    StopGroup,
    Stopping,
    StopRequested,
    StoreExited,
    WorkerExited,
)
from elasticd_agent.model.records import Round
from elasticd_agent.rendezvous.view import Requirements
from tests.rendezvous.world import World

OWN = ExitReport("exception", "ValueError", "bad", "Traceback …")
ECHO = ExitReport("exception", "torch.distributed.DistBackendError", "peer", "Traceback …")


@dataclass(frozen=True)
class Fate:
    """What becomes of one group: after `after_s` it ends as `how` says, with `steps` new ones done before that."""

    how: str
    rank: int = 0
    steps: int = 0
    saves: bool = False
    after_s: float = 1.0


WAYS = ("done", "killed", "raises", "echo", "all raise", "all but one done", "store", "vanishes", "no start")
fates = st.builds(
    Fate,
    how=st.sampled_from(WAYS),
    rank=st.integers(0, 3),
    steps=st.sampled_from((0, 0, 0, 5)),
    saves=st.booleans(),
    after_s=st.sampled_from((0.01, 1.0, 100.0)),
)
tails = st.sampled_from((Fate("done"), Fate("killed"), Fate("raises", rank=1), Fate("killed", steps=1, saves=True)))
policies = st.integers(1, 3).flatmap(
    lambda limit: st.builds(
        Policy,
        max_restarts=st.sampled_from((None, None, 0, 1, 3)),
        max_restarts_per_hour=st.integers(1, 6),
        no_progress_limit=st.just(limit),
        slot_strikes=st.integers(1, limit),
    )
)


@dataclass
class History(World):
    """A World whose groups live by their fates. `noise` says how late and how often things are delivered."""

    fates: list[Fate]
    tail: Fate
    noise: list[int]
    seq: count[int] = field(default_factory=count)
    queue: list[tuple[float, int, Event]] = field(default_factory=list)
    dead: set[int] = field(default_factory=set)
    number: int = 0
    gone: bool = True
    seen: list[Event] = field(default_factory=list)
    progress: dict[int, bool] = field(default_factory=dict)
    published_at: list[float] = field(default_factory=list)

    def later(self, event: Event, delay_s: float) -> None:
        heapq.heappush(self.queue, (self.now + delay_s, next(self.seq), event))

    def luck(self) -> int:
        return self.noise.pop() if self.noise else 0

    def delay(self) -> float:
        return (0.001, 0.0, 0.05, 2.0)[self.luck() % 4]

    def publish(self, r: Round) -> None:
        self.published_at.append(self.now)
        for _ in range(1 + (self.luck() % 3 == 1)):
            self.later(RoundPublished(r), self.delay())

    def log_transition(self, before: Phase, event: Event, actions: list[Action]) -> None:
        stale = getattr(event, "round_number", None)
        if stale is not None and not (
            isinstance(before, Running | Settling | Stopping) and before.round.number == stale
        ):
            assert (self.phase, actions) == (before, []), "an event of another round never acts"
        if not isinstance(event, StopForced):
            assert step(self.phase, event, self.rules) == (self.phase, []), "a repeated event never acts"
        for action in actions:
            if isinstance(action, StartGroup):
                self.start(action.round)

    def start(self, r: Round) -> None:
        assert self.gone, "invariant 1"
        self.number, self.dead, self.gone = r.number, set(), False
        fate = self.fates.pop(0) if self.fates else self.tail
        self.progress[r.number] = fate.steps > 0
        if fate.steps or self.luck() % 2:
            self.later(FirstStep(r.number, self.now), fate.after_s / 2)
        self.trained(self.view.high_water + fate.steps)
        if fate.saves and self.view.high_water > (r.last_checkpoint or (0, 0))[1]:
            self.saved(r.number, self.view.high_water)
            self.progress[r.number] = True
        self.meet(r, fate)

    def meet(self, r: Round, fate: Fate) -> None:
        ranks, n, late = list(range(r.world_size)), r.number, fate.after_s
        rank = fate.rank % r.world_size
        match fate.how:
            case "done":
                for other in ranks:
                    self.exits(r, other, 0, None, late)
            case "killed":
                self.exits(r, rank, -9, None, late)
            case "raises":
                self.exits(r, rank, 1, OWN, late)
            case "echo":
                self.exits(r, rank, 1, ECHO, late)
            case "all raise":
                for other in ranks:
                    self.exits(r, other, 1, OWN, late)
            case "all but one done":
                for other in ranks:
                    self.exits(r, other, 3 if other == rank else 0, None, late + (other == rank) * 0.1)
            case "store":
                self.later(StoreExited(n, "was killed by SIGKILL", self.now + late), late)
            case "vanishes":
                self.later(GroupEnded(n), late)
            case "no start":
                self.later(StartFailed(n, "no memory", self.now), 0.0)

    def exits(self, r: Round, rank: int, code: int, words: ExitReport | None, late: float) -> None:
        slot = next(slot for rk, _, _, slot in r.assignments() if rk == rank)
        late += self.delay()
        self.later(
            WorkerExited(r.number, rank, rank, slot, ExitStatus.from_returncode(code), words, self.now + late), late
        )

    def ends(self, action: KillGroup | StopGroup) -> None:
        r = self.started[-1]
        assert action.round_number == r.number
        for rank in set(range(r.world_size)) - self.dead:
            self.exits(r, rank, -9, None, 0.0)
            self.dead.add(rank)
        self.later(GroupEnded(r.number), self.delay() + 0.001)

    def deliver(self, event: Event) -> None:
        if isinstance(event, WorkerExited) and event not in self.seen and event.round_number == self.number:
            killed = event.rank in self.dead and event.status.signal != 9
            if killed or self.gone:
                return  # it was killed before its fate came
            self.dead.add(event.rank)
            r = self.started[-1]
            if len(self.dead) == r.world_size:
                self.later(GroupEnded(r.number), 0.01)
        if isinstance(event, GroupEnded) and event.round_number == self.number:
            self.gone = True
        self.seen.append(event)
        self.feed(event)
        if self.luck() % 5 == 1:
            old = self.seen[self.luck() % len(self.seen)]
            if old != GroupEnded(self.number):  # saying that a living group is gone would be a lie
                self.later(old, self.delay())

    def run(self) -> None:
        self.look()
        for _ in range(20_000):
            times = [t for t in (self.look_at, *self.wakes) if t is not None]
            if self.queue and (not times or self.queue[0][0] <= min(times)):
                at, _, event = heapq.heappop(self.queue)
                self.now = max(self.now, at)
                self.deliver(event)
            elif times:
                self.pass_time(max(self.now, min(times)))
            else:
                return
        raise AssertionError("the job never ends")


def history(policy: Policy, slots: int, fewest: int, fates: list[Fate], tail: Fate, noise: list[int]) -> History:
    h = History(fates=list(fates), tail=tail, noise=list(noise))
    World.__init__(h, tuple(range(slots)), Requirements(min(fewest, slots), slots), policy)
    return h


def check_budget(h: History, policy: Policy) -> None:
    """Counted from what happened to the groups, without the planner's own counters."""
    restarts = [(old, new) for old, new in zip(h.rounds, h.rounds[1:], strict=False) if not new.terminal]
    if policy.max_restarts is not None:
        assert len(restarts) <= policy.max_restarts
        return
    row = 0
    for old, new in restarts:
        row = 0 if h.progress.get(old.number) else row
        aside = {b for b in new.quarantined_slots if b.left_s > 0} - {
            replace(b, left_s=b.left_s) for b in old.quarantined_slots
        }
        newly = [
            b for b in aside if b.times > max((o.times for o in old.quarantined_slots if o.slot == b.slot), default=0)
        ]
        row += not newly
        assert row <= policy.no_progress_limit, "too many restarts without progress"
    times = [t for t, r in zip(h.published_at, h.rounds, strict=True) if r.restarts and not r.terminal]
    for i, start in enumerate(times):
        assert sum(t < start + 3600 for t in times[i:]) <= 2 * policy.max_restarts_per_hour, "bucket plus its refill"


@settings(max_examples=250, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    policy=policies,
    slots=st.integers(1, 4),
    fewest=st.integers(1, 4),
    fates=st.lists(fates, max_size=8),
    tail=tails,
    noise=st.lists(st.integers(0, 59), max_size=60),
    stop=st.none() | st.floats(0, 20),
    force=st.none() | st.floats(0, 20),
)
def test_any_life_keeps_the_invariants_and_ends(
    policy: Policy,
    slots: int,
    fewest: int,
    fates: list[Fate],
    tail: Fate,
    noise: list[int],
    stop: float | None,
    force: float | None,
) -> None:
    h = history(policy, slots, fewest, fates, tail, noise)
    if stop is not None:
        h.later(StopRequested("SIGTERM", 143, h.now + stop), stop)
        if force is not None:
            h.later(StopForced("SIGTERM", 143, h.now + stop + force), stop + force)
    h.run()
    assert h.left is not None, f"nothing is on its way any more, yet the agent waits in {h.phase}"
    assert h.left.exit_code in ((0, 1) if stop is None else (0, 1, 143))
    assert h.rounds[-1].terminal
    for r in h.rounds:
        assert r.terminal or min(fewest, slots) <= r.world_size <= slots
    check_budget(h, policy)


def test_a_job_that_always_crashes_is_given_up() -> None:
    h = history(Policy(), 2, 2, [], Fate("killed"), [])
    h.run()
    assert h.rounds[-1].reason.startswith("3 restarts without progress before any step was done: rank 0 was killed")
    assert h.now - 1000 < 10


def test_crashes_with_progress_exhaust_the_hourly_budget() -> None:
    """A job that crashes with progress is given up after a busy hour."""
    h = history(Policy(max_restarts_per_hour=6), 2, 2, [], Fate("killed", steps=1), [])
    h.run()
    assert h.rounds[-1].reason.startswith("more than 6 restarts an hour, 6 in all")
