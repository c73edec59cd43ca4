"""Every metric of the agent: the one place where a name, its help and its labels are written; docs/metrics.md's source.

The agent owns one registry per job, never prometheus_client's global one, and imports the library only when a metrics
port was asked for (it costs 61 ms). The methods are named for what happened; they take plain values, so that no other
module knows a metric's name. Safe to call from one thread while another renders. Nothing here talks to the network.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from elasticd_agent.observation import CAUSES as HANGS

CAUSES = ("crash", "hung", "store_lost", "start_failed", "resize", "other")
EXIT_KINDS = ("success", "exit_code", "signal", "asked")
MODES = ("warm", "cold")
PARTS = ("detect", "evidence", "agree", "stop", "start", "first_step")


@dataclass(frozen=True, slots=True)
class Spec:
    """One metric. Every one also carries `job_id`; Prometheus itself owns the label `job`."""

    name: str
    kind: Literal["gauge", "counter", "histogram"]
    help: str
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()


AGENT_UP = Spec("elasticd_agent_up", "gauge", "1 while the agent runs; the last scrape before it ends still shows 1.")
AGENT_INFO = Spec("elasticd_agent_info", "gauge", "Always 1; the labels say which agent this is.", ("node", "version"))
AGENT_START = Spec("elasticd_agent_start_timestamp_seconds", "gauge", "Unix time the agent started.")
ROUND = Spec("elasticd_round", "gauge", "Number of the current round.")
WORLD_SIZE = Spec("elasticd_world_size", "gauge", "Workers in the current round, over all nodes.")
WORLD_SIZE_TARGET = Spec(
    "elasticd_world_size_target", "gauge", "Workers the job would have with nothing set aside or lost."
)
WORKERS_RUNNING = Spec("elasticd_workers_running", "gauge", "Worker processes of the current round alive on this node.")
RESTARTS = Spec(
    "elasticd_restarts_total", "counter", f"Rounds after the first, by cause: {', '.join(CAUSES)}.", ("cause",)
)
BUDGET = Spec(
    "elasticd_restart_budget_remaining", "gauge", "Restarts left before the job is given up; absent when unlimited."
)
EXITS = Spec(
    "elasticd_worker_exits_total",
    "counter",
    "Worker processes of this node that ended: success, exit_code (non-zero), signal, asked (stopped or killed by us).",
    ("kind",),
)
STEP = Spec("elasticd_step", "gauge", "Last optimizer step finished by any worker of this node.")
WORKER_STEP = Spec(
    "elasticd_worker_step",
    "gauge",
    "Last optimizer step finished by the rank; only ranks of the current round.",
    ("rank",),
)
STEPS_PER_SECOND = Spec("elasticd_steps_per_second", "gauge", "Optimizer steps a second, lately.")
LAST_PROGRESS = Spec(
    "elasticd_last_progress_timestamp_seconds",
    "gauge",
    "Unix time a worker of this node was last seen to finish a step.",
)
FIRST_STEP = Spec(
    "elasticd_start_to_first_step_seconds", "gauge", "From the start of the round's workers to its first finished step."
)
RECOVERY = Spec(
    "elasticd_recovery_seconds",
    "histogram",
    "From a fault to the first step finished by the next round.",
    # A warm restart of 2 workers takes 0.1 s, a cold one 2 s; a big model's checkpoint takes minutes to load.
    buckets=(0.02, 0.05, 0.1, 0.15, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 180.0, 600.0),
)
CHECKPOINTS_SAVED = Spec("elasticd_checkpoints_saved_total", "counter", "Checkpoints written whole.")
CHECKPOINT_FAILURES = Spec("elasticd_checkpoint_failures_total", "counter", "Checkpoints that could not be written.")
CHECKPOINTS_SKIPPED = Spec(
    "elasticd_checkpoints_skipped_total", "counter", "Checkpoints passed over because they could not be trusted."
)
CHECKPOINT_STEP = Spec("elasticd_checkpoint_last_step", "gauge", "Step of the last checkpoint written.")
CHECKPOINT_TIME = Spec(
    "elasticd_checkpoint_last_timestamp_seconds", "gauge", "Unix time the last checkpoint was written."
)
CHECKPOINT_BYTES = Spec("elasticd_checkpoint_last_size_bytes", "gauge", "Size of the last checkpoint written.")
CHECKPOINT_SECONDS = Spec(
    "elasticd_checkpoint_last_write_seconds", "gauge", "How long training stood still for the last checkpoint."
)
LAUNCHER_STARTS = Spec(
    "elasticd_launcher_starts_total", "counter", "Worker groups started on this node: warm (forked) or cold.", ("mode",)
)
SUSPICIONS = Spec(
    "elasticd_suspicions_total", "counter", "Times this node's agent suspected a hang; most end by themselves."
)
HANGS_SEEN = Spec(
    "elasticd_hangs_total",
    "counter",
    f"Hangs that were found, counted by the node whose agent judged, by cause: {', '.join(HANGS)}.",
    ("cause",),
)
HANG_DETECTION = Spec(
    "elasticd_hang_detection_seconds",
    "histogram",
    "From the last progress of a hung group to the verdict, on the node whose agent judged.",
    buckets=(1.0, 1.5, 2.5, 3.5, 5.0, 7.5, 10.0, 30.0, 60.0, 180.0, 600.0, 1800.0),
)
RECOVERY_PART = Spec(
    "elasticd_recovery_part_seconds",
    "histogram",
    "Of what a recovery was made: until the fault was seen (detect), evidence of a hang, until the next round was "
    "agreed on (agree), until the old group was gone (stop), until the new one was started (start), until its "
    "first step (first_step). A part that ran beside another one counts from that one's end.",
    ("part",),
    buckets=(0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 180.0, 600.0),
)
SLOWNESS = Spec(
    "elasticd_rank_slowness_ratio",
    "gauge",
    "How many times as long as its peers' the own work of a rank takes that the others wait for, told by the node "
    "whose agent plans; absent for all others.",
    ("rank",),
)
STUCK = Spec("elasticd_stuck_processes", "gauge", "Processes of this node that were sent SIGKILL and do not die.")
STORE_UP = Spec("elasticd_store_up", "gauge", "1 while the store agents meet in answers this one, else 0.")
STORE_OUTAGES = Spec("elasticd_store_outages_total", "counter", "Times the store went away for this agent.")
LINES_LOST = Spec("elasticd_event_log_lines_lost_total", "counter", "Event-log lines that could not be written.")

METRICS: tuple[Spec, ...] = (
    AGENT_UP, AGENT_INFO, AGENT_START, ROUND, WORLD_SIZE, WORLD_SIZE_TARGET, WORKERS_RUNNING, RESTARTS, BUDGET, EXITS,
    STEP, WORKER_STEP, STEPS_PER_SECOND, LAST_PROGRESS, FIRST_STEP, RECOVERY, CHECKPOINTS_SAVED, CHECKPOINT_FAILURES,
    CHECKPOINTS_SKIPPED, CHECKPOINT_STEP, CHECKPOINT_TIME, CHECKPOINT_BYTES, CHECKPOINT_SECONDS, LAUNCHER_STARTS,
    SUSPICIONS, HANGS_SEEN, HANG_DETECTION, RECOVERY_PART, SLOWNESS, STUCK, STORE_UP, STORE_OUTAGES,
    LINES_LOST,
)  # fmt: skip


class Measures(Protocol):
    """What the agent says happened; `wall` is unix seconds, all else as the metric's help says."""

    def round_published(
        self, number: int, world_size: int, target: int, ranks: Iterable[int], restart_cause: str | None = None
    ) -> None: ...
    def restart_budget(self, remaining: int | None) -> None: ...
    def group_started(self, workers: int, warm: bool) -> None: ...
    def worker_exited(self, kind: str) -> None: ...
    def group_gone(self) -> None: ...
    def first_step(self, start_seconds: float, recovery_seconds: float | None) -> None: ...
    def progress(self, steps: Mapping[int, int], steps_per_second: float | None, wall: float) -> None: ...
    def checkpoint_saved(self, step: int, wall: float, size: int, seconds: float) -> None: ...
    def checkpoint_failed(self) -> None: ...
    def checkpoint_skipped(self) -> None: ...
    def suspected(self) -> None: ...
    def hung(self, cause: str, seconds: float) -> None: ...
    def recovered(self, parts: Mapping[str, float]) -> None: ...
    def slowness(self, ratios: Mapping[int, float]) -> None: ...
    def stuck(self, processes: int) -> None: ...
    def store(self, up: bool) -> None: ...
    def event_lines_lost(self, total: int) -> None: ...
    def render(self) -> bytes: ...


class NullMetrics:
    """The metrics of an agent nobody scrapes."""

    def round_published(
        self, number: int, world_size: int, target: int, ranks: Iterable[int], restart_cause: str | None = None
    ) -> None:
        pass

    def restart_budget(self, remaining: int | None) -> None:
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

    def checkpoint_failed(self) -> None:
        pass

    def checkpoint_skipped(self) -> None:
        pass

    def suspected(self) -> None:
        pass

    def hung(self, cause: str, seconds: float) -> None:
        pass

    def recovered(self, parts: Mapping[str, float]) -> None:
        pass

    def slowness(self, ratios: Mapping[int, float]) -> None:
        pass

    def stuck(self, processes: int) -> None:
        pass

    def store(self, up: bool) -> None:
        pass

    def event_lines_lost(self, total: int) -> None:
        pass

    def render(self) -> bytes:
        return b""


class Metrics:
    """The job's metrics in a registry of its own. A value nobody has reported yet is absent, a counter starts at 0."""

    def __init__(self, job_id: str, node: str = "", version: str = "") -> None:
        import prometheus_client

        self._job, self._library = job_id, prometheus_client
        self._registry = prometheus_client.CollectorRegistry()
        self._families: dict[str, Any] = {spec.name: self._family(spec) for spec in METRICS}
        self._ranks: frozenset[int] = frozenset()
        self._slow: frozenset[int] = frozenset()
        self._lines_lost = 0
        self._of(AGENT_UP).set(1)
        self._of(AGENT_INFO, node, version).set(1)
        self._of(AGENT_START).set(time.time())
        labels = (
            (RESTARTS, CAUSES),
            (EXITS, EXIT_KINDS),
            (LAUNCHER_STARTS, MODES),
            (HANGS_SEEN, HANGS),
            (RECOVERY_PART, PARTS),
        )
        for spec, values in labels:
            for value in values:
                self._of(spec, value)
        for spec in METRICS:
            if spec.kind != "gauge" and not spec.labels:
                self._of(spec)

    def _family(self, spec: Spec) -> Any:
        labels = ("job_id", *spec.labels)
        if spec.kind == "histogram":
            return self._library.Histogram(spec.name, spec.help, labels, registry=self._registry, buckets=spec.buckets)
        made = self._library.Counter if spec.kind == "counter" else self._library.Gauge
        return made(spec.name, spec.help, labels, registry=self._registry)

    def _of(self, spec: Spec, *labels: str) -> Any:
        return self._families[spec.name].labels(self._job, *labels)

    def _without(self, spec: Spec, *labels: str) -> None:
        self._families[spec.name].remove(self._job, *labels)

    def round_published(
        self, number: int, world_size: int, target: int, ranks: Iterable[int], restart_cause: str | None = None
    ) -> None:
        """`ranks` are this node's; `restart_cause` is None for the first round. Ranks that left lose their series."""
        self._of(ROUND).set(number)
        self._of(WORLD_SIZE).set(world_size)
        self._of(WORLD_SIZE_TARGET).set(target)
        if restart_cause is not None:
            self._of(RESTARTS, restart_cause if restart_cause in CAUSES else "other").inc()
        now = frozenset(ranks)
        for rank in self._ranks - now:
            self._without(WORKER_STEP, str(rank))
        self._ranks &= now

    def restart_budget(self, remaining: int | None) -> None:
        if remaining is not None:
            self._of(BUDGET).set(remaining)

    def group_started(self, workers: int, warm: bool) -> None:
        self._of(WORKERS_RUNNING).set(workers)
        self._of(LAUNCHER_STARTS, "warm" if warm else "cold").inc()

    def worker_exited(self, kind: str) -> None:
        """`kind` is one of EXIT_KINDS; anything else is a mistake of the caller: KeyError."""
        self._of(EXITS, {known: known for known in EXIT_KINDS}[kind]).inc()
        self._of(WORKERS_RUNNING).dec()

    def group_gone(self) -> None:
        self._of(WORKERS_RUNNING).set(0)
        self._of(STEPS_PER_SECOND).set(0)

    def first_step(self, start_seconds: float, recovery_seconds: float | None) -> None:
        self._of(FIRST_STEP).set(start_seconds)
        if recovery_seconds is not None:
            self._of(RECOVERY).observe(recovery_seconds)

    def progress(self, steps: Mapping[int, int], steps_per_second: float | None, wall: float) -> None:
        """`steps` by rank, this node's workers; `wall` is when one of them last moved. A rate not known yet is None."""
        for rank, step in steps.items():
            self._of(WORKER_STEP, str(rank)).set(step)
        self._ranks |= steps.keys()
        if steps:
            self._of(STEP).set(max(steps.values()))
            self._of(LAST_PROGRESS).set(wall)
        if steps_per_second is not None:
            self._of(STEPS_PER_SECOND).set(steps_per_second)

    def checkpoint_saved(self, step: int, wall: float, size: int, seconds: float) -> None:
        self._of(CHECKPOINTS_SAVED).inc()
        self._of(CHECKPOINT_STEP).set(step)
        self._of(CHECKPOINT_TIME).set(wall)
        self._of(CHECKPOINT_BYTES).set(size)
        self._of(CHECKPOINT_SECONDS).set(seconds)

    def checkpoint_failed(self) -> None:
        self._of(CHECKPOINT_FAILURES).inc()

    def checkpoint_skipped(self) -> None:
        self._of(CHECKPOINTS_SKIPPED).inc()

    def suspected(self) -> None:
        self._of(SUSPICIONS).inc()

    def hung(self, cause: str, seconds: float) -> None:
        """`cause` is one of hang.CAUSES; anything else is a mistake of the caller: KeyError."""
        self._of(HANGS_SEEN, {known: known for known in HANGS}[cause]).inc()
        self._of(HANG_DETECTION).observe(seconds)

    def recovered(self, parts: Mapping[str, float]) -> None:
        """Seconds by part; a part that did not occur is left out."""
        for part, seconds in parts.items():
            self._of(RECOVERY_PART, {known: known for known in PARTS}[part]).observe(seconds)

    def slowness(self, ratios: Mapping[int, float]) -> None:
        """Of the slow ranks; the others lose their series."""
        for rank, ratio in ratios.items():
            self._of(SLOWNESS, str(rank)).set(ratio)
        for rank in self._slow - ratios.keys():
            self._without(SLOWNESS, str(rank))
        self._slow = frozenset(ratios)

    def stuck(self, processes: int) -> None:
        self._of(STUCK).set(processes)

    def store(self, up: bool) -> None:
        self._of(STORE_UP).set(int(up))
        if not up:
            self._of(STORE_OUTAGES).inc()

    def event_lines_lost(self, total: int) -> None:
        """`total` as the event log counts it; a smaller one than before changes nothing."""
        self._of(LINES_LOST).inc(max(0, total - self._lines_lost))
        self._lines_lost = max(total, self._lines_lost)

    def render(self) -> bytes:
        """The text format, version 0.0.4."""
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


def document() -> str:
    """docs/metrics.md, whole."""
    rows = ["| name | type | labels besides `job_id` | meaning |", "|---|---|---|---|"]
    for spec in METRICS:
        labels = ", ".join(f"`{label}`" for label in spec.labels)
        rows.append(f"| `{spec.name}` | {spec.kind} | {labels} | {spec.help} |")
    return _INTRODUCTION + "\n\n" + "\n".join(rows) + "\n"


_INTRODUCTION = """# Metrics

<!-- Written by `python -m elasticd_agent.metrics > docs/metrics.md`: change agents/elasticd_agent/metrics.py. -->

`elasticd run --metrics-port PORT ...` serves these at `/metrics` in Prometheus' text format. Units are base units
(seconds, bytes); a timestamp is unix seconds, so alert on `time() - elasticd_last_progress_timestamp_seconds`. A gauge
nobody has reported yet is absent, a counter starts at 0. `rank` appears only for ranks of the current round on this
node; a rank that left loses its series. The names and labels follow semantic versioning, as the event log does."""


if __name__ == "__main__":
    print(document(), end="")
