"""One job's metrics, recorded by events in its life and rendered for Prometheus.

Each job has a registry of its own, and prometheus_client is imported only with a metrics port (61 ms). One thread
records, `lease` may come from another, and others render.

Every series has a bounded number of label values: ranks that are slow are at most MAX_STRAGGLERS, and causes come from
a list. A job that restarts a thousand times has as many series as one that never did.

Counters never fall, whatever process counts: what an event log or a tracker reports is exported as an increase since
the last scrape, and a smaller total changes nothing.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from elasticd_agent.hangs.causes import CAUSES as HANGS
from elasticd_agent.model.log_events import TimeSplit
from elasticd_agent.telemetry import metric_table as names
from elasticd_agent.telemetry.goodput import monotonic_counters
from elasticd_agent.telemetry.metric_table import MetricSpec

MAX_STEPS_PER_LOOK = 16
"""The most steps between two observations that the histogram counts: their average says no more."""


class _NullLibrary:
    """Stands for prometheus_client where no metrics are served: whatever is read or called, it is the same object."""

    def __getattr__(self, name: str) -> _NullLibrary:
        return self

    def __call__(self, *args: object, **options: object) -> _NullLibrary:
        return self

    def __bytes__(self) -> bytes:
        return b""


class Metrics:
    """A gauge without a value yet is absent, a counter starts at 0. `wall` is unix seconds."""

    def __init__(self, job_id: str, node: str = "", version: str = "", *, served: bool = True) -> None:
        """`served`: False without a metrics port; then nothing is kept."""
        self._library: Any = _NullLibrary()
        if served:
            import prometheus_client

            self._library = prometheus_client
        self._job = job_id
        self._node = node
        self._registry = self._library.CollectorRegistry()
        self._families: dict[str, Any] = {spec.name: self._make_family(spec) for spec in names.METRICS}
        self._ranks: frozenset[int] = frozenset()
        self._stragglers: frozenset[int] = frozenset()
        self._culprits: dict[str, set[tuple[str, str]]] = {}
        self._leads = False
        self._round: tuple[str, str, str] | None = None
        self._time_source: Callable[[], TimeSplit] = TimeSplit
        self._budget_source: Callable[[], int | None] = lambda: None
        self._exported = TimeSplit()
        self._render_lock = threading.Lock()
        self._lines_lost = 0
        self._step: tuple[int, float] | None = None  # the last one of this round, and when
        self._series(names.AGENT_UP).set(1)
        self._series(names.AGENT_INFO, version).set(1)
        self._series(names.AGENT_START_TIMESTAMP).set(time.time())
        for cause in HANGS:
            self._series(names.HANGS_TOTAL, cause, "")
        for cause in names.FAULT_CAUSES:
            self._series(names.FAULTS_TOTAL, cause, "")
        for spec in names.METRICS:
            for value in spec.initial_label_values:
                self._series(spec, value)
            if spec.kind != "gauge" and not spec.labels and spec is not names.LEASE_RENEWAL:
                self._series(spec)

    def _make_family(self, spec: MetricSpec) -> Any:
        labels = ("job_id", "node", *spec.labels)
        if spec.kind == "histogram":
            return self._library.Histogram(spec.name, spec.help, labels, registry=self._registry, buckets=spec.buckets)
        made = self._library.Counter if spec.kind == "counter" else self._library.Gauge
        return made(spec.name, spec.help, labels, registry=self._registry)

    def _series(self, spec: MetricSpec, *labels: str) -> Any:
        return self._families[spec.name].labels(self._job, self._node, *labels)

    def _drop_series(self, spec: MetricSpec, *labels: str) -> None:
        self._families[spec.name].remove(self._job, self._node, *labels)

    def round_published(
        self, number: int, world_size: int, target: int, ranks: Iterable[int], restart_cause: str | None = None
    ) -> None:
        """`ranks`: this node's; `restart_cause`: None for the first round. Ranks that left lose their series."""
        self._series(names.ROUND).set(number)
        self._series(names.WORLD_SIZE).set(world_size)
        self._series(names.WORLD_SIZE_TARGET).set(target)
        if restart_cause is not None:
            self._series(names.RESTARTS, restart_cause if restart_cause in names.RESTART_CAUSES else "other").inc()
        now = frozenset(ranks)
        for rank in self._ranks - now:
            self._drop_series(names.WORKER_STEP, str(rank))
        self._ranks &= now
        self._step = None

    def round_info(self, number: int, cause: str, reason: str, wall: float) -> None:
        """The current round and its reason; it has a series on the leader node only, one at a time."""
        self._series(names.ROUND_START_TIMESTAMP).set(wall)
        self._show_round(None)
        self._round = str(number), cause, names.shorten_reason(reason)
        self._show_round(self._round if self._leads else None)

    def leading(self, on: bool) -> None:
        """This node is the leader, or no longer: another node reports what only the leader does."""
        self._leads = on
        if not on:
            self.stragglers({})
        self._show_round(self._round if on else None)

    def _show_round(self, round: tuple[str, str, str] | None) -> None:
        self._families[names.ROUND_INFO.name].clear()
        if round is not None:
            self._series(names.ROUND_INFO, *round).set(1)

    def phase(self, name: str) -> None:
        """`name`: one of PHASES; the series of the others become 0."""
        for phase in names.PHASES:
            self._series(names.JOB_PHASE, phase).set(int(phase == name))

    def fault(self, cause: str, culprit: str) -> None:
        """`culprit`: the node at fault, "" if none is."""
        self._count_culprit(names.FAULTS_TOTAL, cause if cause in names.FAULT_CAUSES else "other", culprit)

    def _count_culprit(self, spec: MetricSpec, cause: str, culprit: str) -> str:
        """Count it; returns the culprit of its series: a job on many nodes must not have a series for each."""
        blamed = self._culprits.setdefault(spec.name, set())
        if culprit and (cause, culprit) not in blamed:
            if len(blamed) >= names.MAX_CULPRITS:
                culprit = names.OTHER_CULPRITS
            else:
                blamed.add((cause, culprit))
        self._series(spec, cause, culprit).inc()
        return culprit

    def set_time_source(self, spent: Callable[[], TimeSplit]) -> None:
        """`spent`: the split of the time until now, called from any thread."""
        self._time_source = spent

    def set_budget_source(self, left: Callable[[], int | None]) -> None:
        """`left`: the restarts left now, called from any thread; None while unknown."""
        self._budget_source = left

    def group_started(self, workers: int, warm: bool) -> None:
        self._series(names.WORKERS_RUNNING).set(workers)
        self._series(names.LAUNCHER_STARTS, "warm" if warm else "cold").inc()

    def spares(self, slots: int) -> None:
        self._series(names.SPARES).set(slots)

    def worker_exited(self, kind: str) -> None:
        """`kind`: one of EXIT_KINDS, else KeyError."""
        self._series(names.WORKER_EXITS, {known: known for known in names.EXIT_KINDS}[kind]).inc()
        self._series(names.WORKERS_RUNNING).dec()

    def group_ended(self) -> None:
        self._series(names.WORKERS_RUNNING).set(0)
        self._series(names.STEPS_PER_SECOND).set(0)

    def first_step(self, start_seconds: float, recovery_seconds: float | None) -> None:
        self._series(names.START_TO_FIRST_STEP).set(start_seconds)
        if recovery_seconds is not None:
            self._series(names.RECOVERY).observe(recovery_seconds)

    def progress(self, steps: Mapping[int, int], steps_per_second: float | None, wall: float) -> None:
        """`steps` by rank, this node's workers; `wall` is when one of them last moved. A rate not known yet is None."""
        for rank, step in steps.items():
            self._series(names.WORKER_STEP, str(rank)).set(step)
        self._ranks |= steps.keys()
        if steps:
            newest = max(steps.values())
            self._series(names.LAST_STEP).set(newest)
            self._series(names.LAST_PROGRESS).set(wall)
            if self._step is not None and newest > self._step[0]:
                done = newest - self._step[0]
                self._series(names.STEPS_TOTAL).inc(done)
                for _ in range(min(done, MAX_STEPS_PER_LOOK)):
                    self._series(names.STEP_SECONDS).observe(max(0.0, wall - self._step[1]) / done)
            if self._step is None or newest != self._step[0]:
                self._step = newest, wall
        if steps_per_second is not None:
            self._series(names.STEPS_PER_SECOND).set(steps_per_second)

    def checkpoint_saved(self, size: int, seconds: float, written_s: float) -> None:
        """`seconds`: training was blocked; `written_s`: until it was on the disk."""
        self._series(names.CHECKPOINTS_SAVED).inc()
        self._series(names.CHECKPOINT_BYTES).set(size)
        self._series(names.CHECKPOINT_BLOCKED_SECONDS).set(seconds)
        self._series(names.CHECKPOINT_WRITTEN_SECONDS).set(written_s)

    def snapshot(self, step: int, wall: float) -> None:
        self._series(names.SNAPSHOT_STEP).set(step)
        self._series(names.SNAPSHOT_TIMESTAMP).set(wall)

    def newest_checkpoint(self, step: int, wall: float) -> None:
        """The steps that a fault would cost count from here: this node has saved it, or resumed from another one's."""
        self._series(names.CHECKPOINT_STEP).set(step)
        self._series(names.CHECKPOINT_TIMESTAMP).set(wall)

    def donor_resumed(self, steps_saved: int) -> None:
        self._series(names.DONOR_RESUMES).inc()
        self._series(names.DONOR_STEPS_SAVED).inc(steps_saved)

    def checkpoint_dropped(self) -> None:
        self._series(names.CHECKPOINTS_DROPPED).inc()

    def checkpoint_failed(self) -> None:
        self._series(names.CHECKPOINT_FAILURES).inc()
        self._series(names.CHECKPOINT_FAILED_AT).set(time.time())

    def checkpoint_skipped(self) -> None:
        self._series(names.CHECKPOINTS_SKIPPED).inc()

    def checkpoint_interval(self, seconds: float) -> None:
        self._series(names.CHECKPOINT_INTERVAL).set(seconds)

    def hang_suspected(self) -> None:
        self._series(names.HANG_SUSPICIONS).inc()

    def hang_detected(self, cause: str, seconds: float, culprit: str = "") -> None:
        """Count a hang by its cause and the node that caused it. `cause`: one of hangs.causes.CAUSES, else KeyError."""
        culprit = self._count_culprit(names.HANGS_TOTAL, {known: known for known in HANGS}[cause], culprit)
        self._series(names.LAST_HANG, cause, culprit).set(time.time())
        self._series(names.HANG_DETECTION).observe(seconds)

    def recovered(self, parts: Mapping[str, float]) -> None:
        """Seconds by part; a part that did not occur is absent."""
        for part, seconds in parts.items():
            self._series(names.RECOVERY_PART, {known: known for known in names.RECOVERY_PARTS}[part]).observe(seconds)

    def stragglers(self, ratios: Mapping[int, float]) -> None:
        """The slowest stragglers; the others lose their series."""
        ratios = dict(sorted(ratios.items(), key=lambda of: -of[1])[: names.MAX_STRAGGLERS])
        for rank, ratio in ratios.items():
            self._series(names.STRAGGLER_RATIO, str(rank)).set(ratio)
        for rank in self._stragglers - ratios.keys():
            self._drop_series(names.STRAGGLER_RATIO, str(rank))
        self._stragglers = frozenset(ratios)

    def unkillable_processes(self, processes: int) -> None:
        self._series(names.STUCK_PROCESSES).set(processes)

    def store_available(self, up: bool) -> None:
        self._series(names.STORE_UP).set(int(up))
        if not up:
            self._series(names.STORE_OUTAGES).inc()

    def lease(self, ttl_s: float, renewal_s: float | None) -> None:
        """The store granted a lease of `ttl_s`, or a renewal took `renewal_s`."""
        self._series(names.LEASE_TTL).set(ttl_s)
        if renewal_s is not None:
            self._series(names.LEASE_RENEWAL).observe(renewal_s)

    def event_lines_lost(self, total: int) -> None:
        """`total`: as the event log counts it; a smaller one changes nothing."""
        self._series(names.LINES_LOST).inc(max(0, total - self._lines_lost))
        self._lines_lost = max(total, self._lines_lost)

    def render(self) -> bytes:
        """The text format, version 0.0.4."""
        with self._render_lock:
            before, self._exported = self._exported, monotonic_counters(self._exported, self._time_source())
            for state in names.TIME_STATES:
                self._series(names.TIME_BY_STATE, state).inc(
                    max(0.0, getattr(self._exported, state) - getattr(before, state))
                )
            if (left := self._budget_source()) is not None:
                self._series(names.BUDGET_REMAINING).set(left)
        return bytes(self._library.generate_latest(_WithoutCreated(self._registry)))


class _WithoutCreated:
    """The registry without the `_created` series prometheus_client adds; switching these off there is process-wide."""

    def __init__(self, registry: Any) -> None:
        self._registry = registry

    def collect(self) -> Iterable[Any]:
        for family in self._registry.collect():
            family.samples = [sample for sample in family.samples if not sample.name.endswith("_created")]
            yield family
