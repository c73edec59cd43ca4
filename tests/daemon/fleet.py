"""A simulated fleet: real schedulers and `reconcile` over one store, with a fake clock.

A machine has runners, which outlive its daemon. Everything that can happen to a fleet is a method; `step` lets half a
second go by for all. After every step `check` compares what really runs with what must never be.
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field

from elasticd.errors import StoreUnavailable, UsageError
from elasticd_agent.model.keys import Keys
from elasticd_agent.store import Lease
from elasticd_agent.store.cache import StoreCache
from elasticd_agent.store.memory import MemoryStore
from elasticd_daemon import keys as names
from elasticd_daemon.records import ClusterView, Cordon, JobResult, NodeStatus, Placement, Submission
from elasticd_daemon.runners.reconcile import (
    REFUSAL_RETRY_S,
    LocalRunner,
    NodePlan,
    RunnerEnd,
    RunOutcomes,
    reconcile,
)
from elasticd_daemon.runners.spec import RunnerExit, RunnerSpec
from elasticd_daemon.scheduler import job_queue as queue
from elasticd_daemon.scheduler.scheduler import Scheduler
from tests.daemon.stores import Clock, InterruptedStore

STEP_S = 0.5
ADOPT_S = 60.0
LEASE_S = 3.0
LEAVING_S = 4.0


@dataclass(eq=False)
class FleetRunner:
    spec: RunnerSpec
    since: float
    state: str = "running"
    gone_at: float = float("inf")
    stop_requested: bool = False
    alone_since: float | None = None

    @property
    def key(self) -> tuple[str, int]:
        return self.spec.job, self.spec.number

    def leave(self, now: float, chance: random.Random) -> None:
        if self.state != "leaving":
            self.state, self.gone_at = "leaving", now + chance.uniform(0.0, LEAVING_S)


@dataclass(eq=False)
class FleetAgent:
    """What dies with the process."""

    store: InterruptedStore
    scheduler: Scheduler
    lease: Lease | None = None
    version: int | None = None
    written: bytes = b""
    outcomes: RunOutcomes = field(default_factory=RunOutcomes)


@dataclass(eq=False)
class FleetNode:
    node: str
    slots: int
    runners: list[FleetRunner] = field(default_factory=list)
    exits: list[RunnerEnd] = field(default_factory=list)
    agent: FleetAgent | None = None
    back_at: float = 0.0
    paused_until: float = 0.0
    disconnected_until: float = 0.0


class Fleet:
    def __init__(
        self,
        seed: int,
        nodes: int,
        store: MemoryStore | None = None,
        clock: Clock | None = None,
        *,
        retention_s: float = 1e9,
        steady: int = 0,
    ) -> None:
        """The daemons of the first `steady` machines never die."""
        self.retention_s, self.steady = retention_s, steady
        self.chance = random.Random(seed)
        self.clock = clock or Clock()
        self.memory = store or MemoryStore(self.clock)
        self.machines = [FleetNode(f"n{i}", self.chance.choice((2, 4, 4, 8))) for i in range(1, nodes + 1)]
        self.refusing: set[tuple[str, str]] = set()
        self.submitted: set[tuple[str, int]] = set()
        self.started = 0
        self.counts: Counter[str] = Counter()
        self.sentences: list[str] = []
        self._copies = StoreCache(self.memory, lambda sentence: None)
        self._read: ClusterView | None = None
        self.memory.watch(self._changed, "")

    def _changed(self, key: str) -> None:
        self._copies.invalidate(key)
        if not key.startswith((names.NODES, names.SCHEDULER, names.SCHEDULER_CLOCK)):
            self._read = None

    def view(self) -> ClusterView:
        """What `queue.view` says, read again only where something has changed: a fleet of months must not take them."""
        if self._read is None:
            self._read = ClusterView(
                cordons=self._copies.records(names.CORDONS, Cordon),
                submissions=self._copies.records(names.SUBMISSIONS, Submission),
                placements=self._copies.records(names.PLACEMENTS, Placement),
                results=self._copies.records(names.RESULTS, JobResult),
            )
        return self._read

    def _view_from(self, machine: FleetNode) -> ClusterView:
        if self.clock.now < machine.disconnected_until:
            raise StoreUnavailable("cut off")
        return self.view()

    # ---- what may happen

    def submit(self) -> None:
        nodes = sorted(self.chance.choices((1, 1, 2, 3), k=2))
        slots = sorted(self.chance.choices((1, 2, 4, 8), k=2))
        job = self.chance.choice([None, *(f"j{i}" for i in range(6))])
        try:
            made = queue.submit(self.memory, Submission(job or "", 0, "{}", *nodes, *slots))
        except UsageError:
            return
        self.submitted.add((made.job, made.number))
        if self.chance.random() < 0.1:
            self.refusing.add((made.job, self.chance.choice(self.machines).node))

    def cancel(self) -> None:
        if unended := self.view().unfinished():
            queue.cancel(self.memory, self.chance.choice(unended).job, "", 0.0)

    def succeed(self) -> None:
        """All workers of one job are done, on all of its nodes."""
        running = [r for machine in self.machines for r in machine.runners if r.state == "running"]
        if running:
            key = self.chance.choice(running).key
            for machine in self.machines:
                for runner in [r for r in machine.runners if r.key == key and r.state == "running"]:
                    self._runner_ended(machine, runner, RunnerExit(*key, 0, "succeeded", "done"))

    def crash_runner(self) -> None:
        machine = self.chance.choice(self.machines)
        if machine.runners:
            self._runner_ended(machine, self.chance.choice(machine.runners), None)

    def kill_agent(self) -> None:
        machine = self.chance.choice(self.machines[self.steady :])
        if machine.agent is not None:
            self._die(machine)
            machine.back_at = self.clock.now + self.chance.choice((0.0, 1.0, 5.0, 30.0, 59.0, 90.0))
            for runner in machine.runners:
                runner.alone_since = self.clock.now

    def power_loss(self) -> None:
        machine = self.chance.choice(self.machines[self.steady :])
        self._die(machine)
        machine.runners, machine.exits = [], []
        machine.back_at = self.clock.now + self.chance.choice((2.0, 30.0, 100.0))

    def _die(self, machine: FleetNode) -> None:
        """Nothing is said to anybody; but a connection whose client is dead ends, and its watches with it."""
        if machine.agent is not None:
            machine.agent.scheduler.forget_key()
        machine.agent = None

    def pause(self) -> None:
        """The deciding thread of one daemon stands still; its runners hear nothing of it for a moment."""
        machine = self.chance.choice(self.machines)
        machine.paused_until = self.clock.now + self.chance.choice((1.0, 4.0, 10.0))

    def disconnect(self) -> None:
        machine = self.chance.choice(self.machines)
        machine.disconnected_until = self.clock.now + self.chance.choice((1.0, 4.0, 20.0, 80.0))

    def cordon(self) -> None:
        machine = self.chance.choice(self.machines)
        queue.cordon(self.memory, machine.node, self.chance.random() < 0.5, "why", "", 0.0)

    def uncordon(self) -> None:
        queue.uncordon(self.memory, self.chance.choice(self.machines).node)

    EVENTS = ("submit",) * 8 + ("succeed",) * 6 + ("cancel", "uncordon", "uncordon", "cordon", "kill_agent")
    EVENTS += ("crash_runner", "power_loss", "pause", "disconnect")

    def empty_store(self) -> None:
        """What only the test remembers."""
        self.submitted.clear()
        self.sentences.clear()
        self._copies.clear()
        for machine in self.machines:
            if machine.agent is not None:
                machine.agent.store.requests.clear()

    def random_fault(self) -> None:
        what = self.chance.choice(self.EVENTS)
        self.counts[what] += 1
        getattr(self, what)()

    def heal(self) -> None:
        """Nothing is wrong with any node from now on."""
        for machine in self.machines:
            machine.back_at = machine.paused_until = machine.disconnected_until = 0.0
            queue.uncordon(self.memory, machine.node)
        self.refusing.clear()

    # ---- time

    def step(self) -> None:
        self.clock.now += STEP_S
        for machine in self.chance.sample(self.machines, len(self.machines)):
            self._live(machine)
            if machine.agent is None and self.clock.now >= machine.back_at:
                self._start(machine)
            elif machine.agent is not None and self.clock.now >= machine.paused_until:
                self._turn(machine, machine.agent)
        self.check()

    def _live(self, machine: FleetNode) -> None:
        for runner in list(machine.runners):
            if runner.alone_since is not None and self.clock.now >= runner.alone_since + ADOPT_S:
                runner.leave(self.clock.now, self.chance)
            if self.clock.now >= runner.gone_at:
                self._runner_ended(machine, runner, RunnerExit(*runner.key, 143, "left", "asked to leave"))
            elif runner.state == "running" and (runner.spec.job, machine.node) in self.refusing:
                self._runner_ended(machine, runner, RunnerExit(*runner.key, 2, "refused", "no such script"))

    def _runner_ended(self, machine: FleetNode, runner: FleetRunner, last: RunnerExit | None) -> None:
        machine.runners.remove(runner)
        machine.exits.append(RunnerEnd(runner.spec, last, runner.stop_requested))

    def _start(self, machine: FleetNode) -> None:
        self.started += 1
        store = InterruptedStore(self.memory)

        def cut(n: int, verb: str, key: str) -> None:
            if self.clock.now < machine.disconnected_until:
                raise StoreUnavailable("cut off")

        store.before = cut
        times = {"lease_s": LEASE_S, "adopt_timeout_s": ADOPT_S, "retention_s": self.retention_s}
        placer = Scheduler(store, machine.node, f"i{self.started}", **times)
        machine.agent = FleetAgent(store, placer)
        for runner in machine.runners:
            runner.alone_since = None
        self._turn(machine, machine.agent)

    def _turn(self, machine: FleetNode, daemon: FleetAgent) -> None:
        for over in machine.exits:
            daemon.outcomes.add(over, 0.0, self.clock.now)
        machine.exits.clear()
        try:
            plan = self._plan(machine, daemon)
            self._announce(machine, daemon, plan)
            for ending in plan.results:
                queue.record_result(daemon.store, ending)
            self.sentences += daemon.scheduler.turn(self.clock.now)
            plan = self._plan(machine, daemon)
            daemon.outcomes.forget_recorded(self._view_from(machine), machine.node, self.clock.now - REFUSAL_RETRY_S)
        except StoreUnavailable:
            return
        for stop in plan.stop:
            for runner in machine.runners:
                if runner.spec is stop.spec:
                    runner.stop_requested = True
                    runner.leave(self.clock.now, self.chance)
        for start in plan.start:
            wants = start.submission
            order = RunnerSpec(wants.job, wants.number, machine.node, start.slots, wants.spec)
            machine.runners.append(FleetRunner(order, self.clock.now))
            keys = Keys(wants.job)
            for key in (keys.spec, keys.done(1) + machine.node):  # as a job's own agents leave some behind
                self.memory.compare_and_swap(key, None, b"{}")
        self._announce(machine, daemon, self._plan(machine, daemon))

    def _plan(self, machine: FleetNode, daemon: FleetAgent) -> NodePlan:
        runs = [LocalRunner(runner.spec, runner.state) for runner in machine.runners]  # type: ignore[arg-type]
        return reconcile(self._view_from(machine), machine.node, runs, daemon.outcomes, "", self.clock.now)

    def _announce(self, machine: FleetNode, daemon: FleetAgent, plan: NodePlan) -> None:
        key = names.NODES + machine.node
        value = NodeStatus(machine.node, "i", machine.slots, runners=plan.runner_statuses).to_json()
        try:
            if daemon.lease is not None and not daemon.lease.renew():
                daemon.lease = None
            if daemon.lease is None:
                self.memory.delete(key)  # ours from before we were killed: the name is ours
                daemon.lease = daemon.store.announce(key, value, LEASE_S)
                daemon.written, daemon.version = value, None
            elif value != daemon.written:
                found = daemon.store.read(key)
                daemon.lease.put(key, value, None if found is None else found.version)
                daemon.written = value
        except StoreUnavailable:
            return

    # ---- what must never be

    def check(self) -> None:
        for machine in self.machines:
            used = [slot for runner in machine.runners for slot in runner.spec.slots]
            assert len(used) == len(set(used)), f"{machine.node}: a slot runs two jobs"
            keys = [runner.key for runner in machine.runners]
            assert len(keys) == len(set(keys)), f"{machine.node}: two runners of one job"
            assert not used or max(used) < machine.slots
        view = self.view()
        numbers = {s.job: s.number for s in view.unfinished()}
        live = [p for p in view.placements if numbers.get(p.job) == p.number]
        given = [(at.node, slot) for placement in live for at in placement.assignments for slot in at.slots]
        assert len(given) == len(set(given)), "a slot is placed twice"
        for placement in live:
            nodes = [place.node for place in placement.assignments]
            assert len(nodes) == len(set(nodes))
            wants = next(s for s in view.submissions if s.job == placement.job)
            assert not nodes or wants.min_nodes <= len(nodes) <= wants.max_nodes

    def waiting(self) -> dict[str, str]:
        """Of the jobs that have not ended, those that do not run on all their places, and why."""
        view = self.view()
        found = {}
        for wants in view.unfinished():
            placement = next((p for p in view.placements if (p.job, p.number) == (wants.job, wants.number)), None)
            if placement is None:
                found[wants.job] = ""
                continue
            on = {m.node for m in self.machines for r in m.runners if r.key == (wants.job, wants.number)}
            if not placement.assignments or {place.node for place in placement.assignments} != on:
                found[wants.job] = placement.reason
        return found
