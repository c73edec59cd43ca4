"""Schedules jobs while this agent holds the scheduler key: one agent of the cluster at a time.

**Invariant.** A slot of a node is placed with one job at a time, whichever agents die or come back. What a turn does:

1. It reads all records: nodes, cordons, submissions, placements, results. Watches only say that something changed; all
   of it is read again every REREAD_S, so a missed one costs seconds.
2. It calls `schedule(view)`, which is pure and has the placements of the view as its only memory. Calling it twice
   gives the same answer, and once that is written there is nothing left to change. So a scheduler may die between two
   writes: the next one finds some of them done, and does the rest.
3. It writes the placements that differ. Every write compares the version of the placement *and* of the scheduler key.
   An agent that was paused in the middle of a turn, and has been replaced, loses from its next write on. Without the
   second comparison it would give slots away that its successor has given to another job.

A placement is a promise about slots, not about processes: nothing here starts or stops one. An agent reconciles its
runners with the placements (`runners.reconcile`), and reports in its status which slots still have processes. A slot
that a job has left is free only once no process of it is left there, so a placement is never taken over by two jobs at
once.

All state is in the store except the moments at which nodes became absent, which this agent takes on its own clock. A
new scheduler therefore waits for absent nodes a little longer at worst. An outage of the store is no absence, and
neither is the time in which no agent was the scheduler: otherwise all jobs would be moved when the store comes
back.

The first BOOT_GRACE_S after the boot of this machine are special: when the power comes back one node may be alone, with
its file servers away, and jobs that every node refuses then must not fail for that.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from elasticd import bounded_json
from elasticd.errors import StoreUnavailable, WireError
from elasticd_agent.model.keys import Keys, decode_record
from elasticd_agent.model.records import Round
from elasticd_agent.store import Lease, Store, Watch
from elasticd_agent.store.cache import StoreCache
from elasticd_agent.store.lease import LeasedKey
from elasticd_daemon import keys as names
from elasticd_daemon.records import ClusterView, Cordon, JobResult, KnownNode, NodeStatus, Placement, Submission
from elasticd_daemon.scheduler import job_queue, retention
from elasticd_daemon.scheduler.policy import jobs_refused_everywhere, schedule

REREAD_S = 20.0
"""Everything is read again this often, in case a watch missed something."""
REMOVAL_RETRY_S = 600.0
"""Before the records of an ended job that could not be removed are tried again."""
BOOT_GRACE_S = 600.0
"""After the boot of this machine: when the power comes back, one node may be alone, and its file servers away."""
WATCHED_PREFIXES = (names.NODES, names.KNOWN_NODES, names.CORDONS, names.SUBMISSIONS, names.PLACEMENTS, names.RESULTS)


@dataclass(eq=False, slots=True)
class Scheduler:
    """`turn` belongs to one thread and is called at least every `renewal_s`. Times are monotonic seconds."""

    store: Store
    node: str
    incarnation: str
    lease_s: float = 3.0
    renewal_s: float = 1.0
    adopt_timeout_s: float = 60.0
    refuse_timeout_s: float = 60.0
    """A job that every node refuses for so long has failed: a script that is not there does not come by itself."""
    retention_s: float = retention.RETENTION_S
    max_results: int = retention.MAX_RESULTS
    on_change: Callable[[], None] = lambda: None  #: called from any thread when there is something to look at
    announce: Callable[[str, bytes, float], Lease | None] | None = None  #: creates the key in place of `store.announce`
    cache: StoreCache | None = None  #: shared with the rest of the agent; None: its own
    trained_here: Callable[[str, int], bool] = lambda job, number: False
    """True if this node has logs of the job's ranks; without etcd its rounds are in no store."""
    key_version: int | None = None  #: the scheduler key's, while this agent holds it
    _key: LeasedKey = field(init=False)
    _records: StoreCache = field(init=False)
    _clock: retention.SchedulerClock = field(init=False)
    _next_attempt_at: float = 0.0
    _key_watch: Watch | None = None
    _seen_generation: int = -1  #: the cache's generation at the last look
    _last_statuses: dict[str, NodeStatus] = field(default_factory=dict)
    _absent_since: dict[str, float] = field(default_factory=dict)
    _refused_since: dict[tuple[str, int], float] = field(default_factory=dict)
    _placements_written: bool = False
    _sentences: list[str] = field(default_factory=list)
    _removal_retry_at: dict[tuple[str, int], float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._clock = retention.SchedulerClock(self.store)
        self._records = self.cache or StoreCache(self.store, self._sentences.append, self.on_change)
        self._key = LeasedKey(
            self.store, names.SCHEDULER, self.lease_s, self.renewal_s, is_own=self._is_own, announce=self.announce
        )

    @property
    def holds_key(self) -> bool:
        return self.key_version is not None

    def turn(self, now: float) -> list[str]:
        """Take or keep the key; while it is ours, write what `schedule()` returns. What was done, in sentences.

        Raises StoreUnavailable; absent nodes and refusals are timed anew after it, because an outage must not age them.
        """
        self._sentences.clear()
        try:
            if self._hold_key(now):
                self._schedule(now)
        except StoreUnavailable:
            self._records.clear()
            self._next_attempt_at = 0.0
            self._absent_since.clear()
            self._refused_since.clear()
            raise
        return list(self._sentences)

    def close(self) -> None:
        """Let another agent schedule. Raises StoreUnavailable."""
        self.forget_key()
        self._key.withdraw()

    def forget_key(self) -> None:
        """Stop watching the store, too; the key is not given up."""
        self._on_key_lost()
        if self._key_watch is not None:
            self._key_watch.close()
            self._key_watch = None

    def _hold_key(self, now: float) -> bool:
        if not self._key.renew(now):
            if now < self._next_attempt_at:
                return False
            if self._key_watch is None:
                self._key_watch = self.store.watch(self._on_key_changed, names.SCHEDULER)
            self._on_key_lost()
            # An attempt every second would cost a large store more than all other requests; the watch names the key
            # when it is free, perhaps while this attempt runs.
            self._next_attempt_at = now + REREAD_S
            value = json.dumps({"node": self.node, "incarnation": self.incarnation}).encode()
            if not self._key.create(value, now, self._is_own):
                return False
        if self.key_version is None:
            version = self._key.read_version()
            if version is None:
                self.close()
                return False
            self._records.clear()  # the previous scheduler may have written since
            self._records.watch(self, WATCHED_PREFIXES)
            self.key_version = version
            self._sentences.append(f"{self.node} is the scheduler now")
        return True

    def _is_own(self, value: bytes) -> bool:
        try:
            holder = bounded_json.loads(value)
        except (ValueError, RecursionError):
            return False
        return isinstance(holder, dict) and holder.get("incarnation") == self.incarnation

    def _on_key_lost(self) -> None:
        self._records.unwatch(self)
        self.key_version = None
        self._clock.reset()
        self._refused_since.clear()
        self._last_statuses.clear()
        self._absent_since.clear()

    def _on_key_changed(self, key: str) -> None:
        self._next_attempt_at = 0.0
        self.on_change()

    def _schedule(self, now: float) -> None:
        self._records.clear_if_due(now, REREAD_S)
        generation = self._records.generation  # before the look: a change during it is looked at in the next turn
        if generation == self._seen_generation:
            return
        view = self._read_view(now)
        self._placements_written = False
        if all(self._write_and_report(placement) for placement in schedule(view)):
            self._remove_expired_records(view, now)
        if self._placements_written:
            self._records.invalidate(names.PLACEMENTS)  # a watch names it, too, but perhaps not yet
        self._fail_refused_jobs(view, now)
        # Absent nodes are given up at some moment, whether anything changes or not; so are refused jobs.
        self._seen_generation = -1 if self._absent_since or self._refused_since else generation

    def _fail_refused_jobs(self, view: ClusterView, now: float) -> None:
        """A job that has trained stays pending: its state is worth more than an early answer."""
        refused = jobs_refused_everywhere(view)
        since_boot = max(now, BOOT_GRACE_S)  # monotonic time begins at the boot
        self._refused_since = {key: self._refused_since.get(key, since_boot) for key in refused}
        for (job, number), since in self._refused_since.items():
            if now >= since + self.refuse_timeout_s and not self._has_trained(job, number):
                why = f"every node refused it for {self.refuse_timeout_s:g} s: {refused[job, number]}"
                job_queue.record_result(self.store, JobResult(job, number, "failed", 1, why, time.time()))
                self._records.clear()
                self._sentences.append(f"job {job} has failed: {why}")

    def _write_and_report(self, placement: Placement) -> bool:
        written = self._write(placement)
        if written:
            self._sentences.append(f"job {placement.job}: {placement.reason}")
        return written

    def _write(self, placement: Placement) -> bool:
        """False: another process has written, perhaps another scheduler; the next turn looks again."""
        key = names.PLACEMENTS + placement.job
        before = self._records.list(names.PLACEMENTS).get(key)
        version = None if before is None else before.version
        if self.store.compare_and_swap(key, version, placement.to_json(), self._key_guard):
            self._placements_written = True
            return True
        self._records.clear()
        holder = self.store.read(names.SCHEDULER)
        if holder is None or holder.version != self.key_version:
            self._sentences.append("another agent is the scheduler now")
            self._on_key_lost()
        return False

    @property
    def _key_guard(self) -> tuple[str, int]:
        assert self.key_version is not None
        return names.SCHEDULER, self.key_version

    def _remove_expired_records(self, view: ClusterView, now: float) -> None:
        """Remove the records of jobs that ended long ago."""
        reached_s = max((p.ended_s for p in view.placements if p.ended_s is not None), default=0.0)
        clock_s = self._clock.now_s(now, self._key_guard, reached_s)
        for placement in retention.stamp_ended_placements(view, clock_s):
            if not self._write(placement):
                return
        self._note_lost_nodes(view, clock_s)
        expired = retention.expired_results(view, clock_s, self.retention_s, self.max_results)
        keys = {(result.job, result.number) for result in expired}
        self._removal_retry_at = {
            key: until for key, until in self._removal_retry_at.items() if key in keys and now < until
        }
        due = [result for result in expired if (result.job, result.number) not in self._removal_retry_at]
        for result in due[: retention.REMOVALS_PER_TURN]:
            self._records.clear()
            if retention.remove_records(self.store, result, self.node, self.lease_s):
                self._sentences.append(f"the records of job {result.job}, number {result.number}, were removed")
            else:
                self._removal_retry_at[result.job, result.number] = now + REMOVAL_RETRY_S

    def _note_lost_nodes(self, view: ClusterView, clock_s: float) -> None:
        """Note the loss of nodes in their records, for people: `schedule` times absent nodes itself."""
        written = self._records.list(names.KNOWN_NODES)
        for known in retention.changed_known_nodes(view, clock_s, time.time())[: retention.NODE_WRITES_PER_TURN]:
            before = written.get(key := names.KNOWN_NODES + known.node)
            if before and self.store.compare_and_swap(key, before.version, known.to_json(), self._key_guard):
                self._sentences.append(f"node {known.node} is {'back' if known.lost_s is None else 'lost'}")
        for node in retention.nodes_to_forget(view, clock_s, self.retention_s):
            self.store.delete(names.KNOWN_NODES + node)

    def _read_view(self, now: float) -> ClusterView:
        nodes, undecodable = self._records.records_and_undecodable(names.NODES, NodeStatus)
        placements, odd_placements = self._records.records_and_undecodable(names.PLACEMENTS, Placement)
        results, odd_results = self._records.records_and_undecodable(names.RESULTS, JobResult)
        present = {status.node: status for status in nodes}
        for key in undecodable:
            status = self._undecodable_status(key.removeprefix(names.NODES), placements)
            present[status.node] = status
        self._last_statuses |= present
        absent = self._absent_statuses(present, placements, now)
        # A job whose placement or result cannot be decoded is left alone.
        odd = {key.removeprefix(names.PLACEMENTS) for key in odd_placements}
        odd |= {key.removeprefix(names.RESULTS) for key in odd_results}
        submissions = self._records.records(names.SUBMISSIONS, Submission)
        return ClusterView(
            nodes=tuple(present.values()),
            known_nodes=self._records.records(names.KNOWN_NODES, KnownNode),
            cordons=self._records.records(names.CORDONS, Cordon),
            submissions=tuple(s for s in submissions if s.job not in odd),
            placements=placements,
            results=results,
            absent_nodes=absent,
            left_behind=self._left_behind(placements),
        )

    def _undecodable_status(self, node: str, placements: tuple[Placement, ...]) -> NodeStatus:
        """The status of a node that another version wrote: its jobs stay, new ones do not come."""
        assigned = [a for p in placements if (a := p.assignment(node)) is not None]
        slots = max((slot for assignment in assigned for slot in assignment.slots), default=-1) + 1
        status = self._last_statuses.get(node, NodeStatus(node, "", slots))
        return replace(status, state="cordoned", why="its status cannot be decoded")

    def _absent_statuses(
        self, present: dict[str, NodeStatus], placements: tuple[Placement, ...], now: float
    ) -> tuple[NodeStatus, ...]:
        """The last status of every absent node that is not given up yet."""
        assigned = {a.node for p in placements for a in p.assignments}
        absent = (self._last_statuses.keys() | assigned) - present.keys()
        self._absent_since = {node: self._absent_since.get(node, now) for node in sorted(absent)}
        given_up = {node for node, since in self._absent_since.items() if now >= since + self.adopt_timeout_s}
        for node in given_up - assigned:
            self._last_statuses.pop(node, None)
            del self._absent_since[node]
        return tuple(
            self._last_statuses.get(node) or NodeStatus(node, "", 0)
            for node in self._absent_since
            if node not in given_up
        )

    def _left_behind(self, placements: tuple[Placement, ...]) -> frozenset[tuple[str, str]]:
        """Assignments on absent nodes whose jobs have continued without them: the job's own Round has not the node."""
        behind = set()
        for placement in placements:
            absent = [a.node for a in placement.assignments if a.node in self._absent_since]
            round = self._last_round(placement.job, placement.number) if absent else None
            if round is not None and not round.terminal:
                behind |= {(placement.job, node) for node in absent if round.member(node) is None}
        return frozenset(behind)

    def _has_trained(self, job: str, number: int) -> bool:
        return self._last_round(job, number) is not None or self.trained_here(job, number)

    def _last_round(self, job: str, number: int) -> Round | None:
        """The newest Round of this run of the job, if it is in this store."""
        key = Keys(job).round
        entry = self.store.read(key)
        try:
            round = None if entry is None else decode_record(Round, key, entry.value)
        except WireError:
            return None
        return round if round is not None and round.run == str(number) else None
