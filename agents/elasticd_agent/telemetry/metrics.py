"""What the agent says happened -> its metrics. Names, help and labels are metric_names', nobody else knows them.

The agent owns one registry per job, never prometheus_client's global one, and imports the library only when a metrics
port was asked for (it costs 61 ms). The methods are named for what happened and take plain values. Safe to call from
one thread, and `lease` from another, while others render. Nothing here talks to the network.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol

from elasticd_agent.model.reports import CAUSES as HANGS
from elasticd_agent.telemetry import metric_table as names
from elasticd_agent.telemetry.goodput import Times, grown
from elasticd_agent.telemetry.metric_table import Spec


class Measures(Protocol):
    """What the agent says happened; `wall` is unix seconds, all else as the metric's help says."""

    def round_published(
        self, number: int, world_size: int, target: int, ranks: Iterable[int], restart_cause: str | None = None
    ) -> None: ...
    def round_told(self, number: int, cause: str, reason: str, wall: float) -> None: ...
    def plans(self, on: bool) -> None: ...
    def phase(self, name: str) -> None: ...
    def fault(self, cause: str, culprit: str) -> None: ...
    def spends(self, spent: Callable[[], Times]) -> None: ...
    def restarts_left(self, left: Callable[[], int | None]) -> None: ...
    def group_started(self, workers: int, warm: bool) -> None: ...
    def worker_exited(self, kind: str) -> None: ...
    def group_gone(self) -> None: ...
    def first_step(self, start_seconds: float, recovery_seconds: float | None) -> None: ...
    def progress(self, steps: Mapping[int, int], steps_per_second: float | None, wall: float) -> None: ...
    def checkpoint_saved(self, step: int, wall: float, size: int, seconds: float) -> None: ...
    def checkpoint_resumed(self, step: int, wall: float) -> None: ...
    def checkpoint_failed(self) -> None: ...
    def checkpoint_skipped(self) -> None: ...
    def checkpoint_interval(self, seconds: float) -> None: ...
    def suspected(self) -> None: ...
    def hung(self, cause: str, seconds: float, culprit: str = "") -> None: ...
    def recovered(self, parts: Mapping[str, float]) -> None: ...
    def slowness(self, ratios: Mapping[int, float]) -> None: ...
    def stuck(self, processes: int) -> None: ...
    def store(self, up: bool) -> None: ...
    def lease(self, lives_s: float, renewal_s: float | None) -> None: ...
    def event_lines_lost(self, total: int) -> None: ...
    def render(self) -> bytes: ...


class NullMetrics:
    """The metrics of an agent nobody scrapes."""

    def round_published(
        self, number: int, world_size: int, target: int, ranks: Iterable[int], restart_cause: str | None = None
    ) -> None:
        pass

    def round_told(self, number: int, cause: str, reason: str, wall: float) -> None:
        pass

    def plans(self, on: bool) -> None:
        pass

    def phase(self, name: str) -> None:
        pass

    def fault(self, cause: str, culprit: str) -> None:
        pass

    def spends(self, spent: Callable[[], Times]) -> None:
        pass

    def restarts_left(self, left: Callable[[], int | None]) -> None:
        pass

    def group_started(self, workers: int, warm: bool) -> None:
        pass

    def worker_exited(self, kind: str) -> None:
        pass

    def group_gone(self) -> None:
        pass

    def first_step(self, start_seconds: float, recovery_seconds: float | None) -> None:
        pass

    def progress(self, steps: Mapping[int, int], steps_per_second: float | None, wall: float) -> None:
        pass

    def checkpoint_saved(self, step: int, wall: float, size: int, seconds: float) -> None:
        pass

    def checkpoint_resumed(self, step: int, wall: float) -> None:
        pass

    def checkpoint_failed(self) -> None:
        pass

    def checkpoint_skipped(self) -> None:
        pass

    def checkpoint_interval(self, seconds: float) -> None:
        pass

    def suspected(self) -> None:
        pass

    def hung(self, cause: str, seconds: float, culprit: str = "") -> None:
        pass

    def recovered(self, parts: Mapping[str, float]) -> None:
        pass

    def slowness(self, ratios: Mapping[int, float]) -> None:
        pass

    def stuck(self, processes: int) -> None:
        pass

    def store(self, up: bool) -> None:
        pass

    def lease(self, lives_s: float, renewal_s: float | None) -> None:
        pass

    def event_lines_lost(self, total: int) -> None:
        pass

    def render(self) -> bytes:
        return b""


class Metrics:
    """The job's metrics in a registry of its own. A value nobody has reported yet is absent, a counter starts at 0."""

    def __init__(self, job_id: str, node: str = "", version: str = "") -> None:
        import prometheus_client

        self._job, self._node, self._library = job_id, node, prometheus_client
        self._registry = prometheus_client.CollectorRegistry()
        self._families: dict[str, Any] = {spec.name: self._family(spec) for spec in names.METRICS}
        self._ranks: frozenset[int] = frozenset()
        self._slow: frozenset[int] = frozenset()
        self._blamed: dict[str, set[tuple[str, str]]] = {}
        self._plans = False
        self._round: tuple[str, str, str] | None = None
        self._spent: Callable[[], Times] = Times
        self._left: Callable[[], int | None] = lambda: None
        self._told = Times()
        self._telling = threading.Lock()
        self._lines_lost = 0
        self._of(names.AGENT_UP).set(1)
        self._of(names.AGENT_INFO, version).set(1)
        self._of(names.AGENT_START).set(time.time())
        labels = (
            (names.RESTARTS, names.CAUSES),
            (names.EXITS, names.EXIT_KINDS),
            (names.LAUNCHER_STARTS, names.MODES),
            (names.RECOVERY_PART, names.PARTS),
            (names.TIME, names.SPENT),
        )
        for spec, values in labels:
            for value in values:
                self._of(spec, value)
        for cause in HANGS:
            self._of(names.HANGS_SEEN, cause, "")
        for cause in names.FAULTS:
            self._of(names.FAULTS_SEEN, cause, "")
        for spec in names.METRICS:
            if spec.kind != "gauge" and not spec.labels and spec is not names.LEASE_RENEWAL:
                self._of(spec)

    def _family(self, spec: Spec) -> Any:
        labels = ("job_id", "node", *spec.labels)
        if spec.kind == "histogram":
            return self._library.Histogram(spec.name, spec.help, labels, registry=self._registry, buckets=spec.buckets)
        made = self._library.Counter if spec.kind == "counter" else self._library.Gauge
        return made(spec.name, spec.help, labels, registry=self._registry)

    def _of(self, spec: Spec, *labels: str) -> Any:
        return self._families[spec.name].labels(self._job, self._node, *labels)

    def _without(self, spec: Spec, *labels: str) -> None:
        self._families[spec.name].remove(self._job, self._node, *labels)

    def round_published(
        self, number: int, world_size: int, target: int, ranks: Iterable[int], restart_cause: str | None = None
    ) -> None:
        """`ranks` are this node's; `restart_cause` is None for the first round. Ranks that left lose their series."""
        self._of(names.ROUND).set(number)
        self._of(names.WORLD_SIZE).set(world_size)
        self._of(names.WORLD_SIZE_TARGET).set(target)
        if restart_cause is not None:
            self._of(names.RESTARTS, restart_cause if restart_cause in names.CAUSES else "other").inc()
        now = frozenset(ranks)
        for rank in self._ranks - now:
            self._without(names.WORKER_STEP, str(rank))
        self._ranks &= now

    def round_told(self, number: int, cause: str, reason: str, wall: float) -> None:
        """The current round, and why there is one. Only where this agent plans it has a series, one at a time."""
        self._of(names.ROUND_START).set(wall)
        reason = " ".join(reason.split())
        short = reason if len(reason) <= names.REASON else reason[: names.REASON - 1] + "…"
        self._shown(None)
        self._round = str(number), cause, short
        self._shown(self._round if self._plans else None)

    def plans(self, on: bool) -> None:
        """This agent plans, or does not any more: what only the planner tells is another node's to tell then."""
        self._plans = on
        if not on:
            self.slowness({})
        self._shown(self._round if on else None)

    def _shown(self, round: tuple[str, str, str] | None) -> None:
        self._families[names.ROUND_INFO.name].clear()
        if round is not None:
            self._of(names.ROUND_INFO, *round).set(1)

    def phase(self, name: str) -> None:
        """`name` is one of PHASES; of all others the series say 0."""
        for phase in names.PHASES:
            self._of(names.JOB_PHASE, phase).set(int(phase == name))

    def fault(self, cause: str, culprit: str) -> None:
        """`culprit` is the node at fault, "" if none is."""
        self._blame(names.FAULTS_SEEN, cause if cause in names.FAULTS else "other", culprit)

    def _blame(self, spec: Spec, cause: str, culprit: str) -> str:
        """Count it, and say as whose; a job on many nodes must not have a series for each."""
        blamed = self._blamed.setdefault(spec.name, set())
        if culprit and (cause, culprit) not in blamed:
            if len(blamed) >= names.MOST_BLAMED:
                culprit = names.OTHERS
            else:
                blamed.add((cause, culprit))
        self._of(spec, cause, culprit).inc()
        return culprit

    def spends(self, spent: Callable[[], Times]) -> None:
        """Ask `spent`, from any thread, what became of the time until now."""
        self._spent = spent

    def restarts_left(self, left: Callable[[], int | None]) -> None:
        """Ask `left`, from any thread, how many there are now; None while nobody knows."""
        self._left = left

    def group_started(self, workers: int, warm: bool) -> None:
        self._of(names.WORKERS_RUNNING).set(workers)
        self._of(names.LAUNCHER_STARTS, "warm" if warm else "cold").inc()

    def worker_exited(self, kind: str) -> None:
        """`kind` is one of names.EXIT_KINDS; anything else is a mistake of the caller: KeyError."""
        self._of(names.EXITS, {known: known for known in names.EXIT_KINDS}[kind]).inc()
        self._of(names.WORKERS_RUNNING).dec()

    def group_gone(self) -> None:
        self._of(names.WORKERS_RUNNING).set(0)
        self._of(names.STEPS_PER_SECOND).set(0)

    def first_step(self, start_seconds: float, recovery_seconds: float | None) -> None:
        self._of(names.FIRST_STEP).set(start_seconds)
        if recovery_seconds is not None:
            self._of(names.RECOVERY).observe(recovery_seconds)

    def progress(self, steps: Mapping[int, int], steps_per_second: float | None, wall: float) -> None:
        """`steps` by rank, this node's workers; `wall` is when one of them last moved. A rate not known yet is None."""
        for rank, step in steps.items():
            self._of(names.WORKER_STEP, str(rank)).set(step)
        self._ranks |= steps.keys()
        if steps:
            self._of(names.STEP).set(max(steps.values()))
            self._of(names.LAST_PROGRESS).set(wall)
        if steps_per_second is not None:
            self._of(names.STEPS_PER_SECOND).set(steps_per_second)

    def checkpoint_saved(self, step: int, wall: float, size: int, seconds: float) -> None:
        self._of(names.CHECKPOINTS_SAVED).inc()
        self._of(names.CHECKPOINT_STEP).set(step)
        self._of(names.CHECKPOINT_TIME).set(wall)
        self._of(names.CHECKPOINT_BYTES).set(size)
        self._of(names.CHECKPOINT_SECONDS).set(seconds)

    def checkpoint_resumed(self, step: int, wall: float) -> None:
        """From one that another node's rank 0 had written; now it is ours, and what a fault would cost counts anew."""
        self._of(names.CHECKPOINT_STEP).set(step)
        self._of(names.CHECKPOINT_TIME).set(wall)

    def checkpoint_failed(self) -> None:
        self._of(names.CHECKPOINT_FAILURES).inc()
        self._of(names.CHECKPOINT_FAILED_AT).set(time.time())

    def checkpoint_skipped(self) -> None:
        self._of(names.CHECKPOINTS_SKIPPED).inc()

    def checkpoint_interval(self, seconds: float) -> None:
        self._of(names.CHECKPOINT_INTERVAL).set(seconds)

    def suspected(self) -> None:
        self._of(names.SUSPICIONS).inc()

    def hung(self, cause: str, seconds: float, culprit: str = "") -> None:
        """`cause` is one of hang.CAUSES; anything else is a mistake of the caller: KeyError."""
        culprit = self._blame(names.HANGS_SEEN, {known: known for known in HANGS}[cause], culprit)
        self._of(names.LAST_HANG, cause, culprit).set(time.time())
        self._of(names.HANG_DETECTION).observe(seconds)

    def recovered(self, parts: Mapping[str, float]) -> None:
        """Seconds by part; a part that did not occur is left out."""
        for part, seconds in parts.items():
            self._of(names.RECOVERY_PART, {known: known for known in names.PARTS}[part]).observe(seconds)

    def slowness(self, ratios: Mapping[int, float]) -> None:
        """Of the slow ranks, the slowest; the others lose their series."""
        ratios = dict(sorted(ratios.items(), key=lambda of: -of[1])[: names.MOST_SLOW])
        for rank, ratio in ratios.items():
            self._of(names.SLOWNESS, str(rank)).set(ratio)
        for rank in self._slow - ratios.keys():
            self._without(names.SLOWNESS, str(rank))
        self._slow = frozenset(ratios)

    def stuck(self, processes: int) -> None:
        self._of(names.STUCK).set(processes)

    def store(self, up: bool) -> None:
        self._of(names.STORE_UP).set(int(up))
        if not up:
            self._of(names.STORE_OUTAGES).inc()

    def lease(self, lives_s: float, renewal_s: float | None) -> None:
        """The store granted a lease of `lives_s`, or it was tried for `renewal_s` to renew it."""
        self._of(names.LEASE).set(lives_s)
        if renewal_s is not None:
            self._of(names.LEASE_RENEWAL).observe(renewal_s)

    def event_lines_lost(self, total: int) -> None:
        """`total` as the event log counts it; a smaller one than before changes nothing."""
        self._of(names.LINES_LOST).inc(max(0, total - self._lines_lost))
        self._lines_lost = max(total, self._lines_lost)

    def render(self) -> bytes:
        """The text format, version 0.0.4."""
        with self._telling:
            before, self._told = self._told, grown(self._told, self._spent())
            for state in names.SPENT:
                self._of(names.TIME, state).inc(max(0.0, getattr(self._told, state) - getattr(before, state)))
            if (left := self._left()) is not None:
                self._of(names.BUDGET).set(left)
        text: bytes = self._library.generate_latest(_WithoutCreated(self._registry))
        return text


class _WithoutCreated:
    """The registry without the `_created` series prometheus_client adds; switching these off there is process-wide."""

    def __init__(self, registry: Any) -> None:
        self._registry = registry

    def collect(self) -> Iterable[Any]:
        for family in self._registry.collect():
            family.samples = [sample for sample in family.samples if not sample.name.endswith("_created")]
            yield family
