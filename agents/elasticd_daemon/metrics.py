"""The metrics of a node: names, help and labels in one table, their page, and docs/node-metrics.md.

A skipped health check has no series, so that an alert on a failing check stays honest.

`RunnerScraper` adds the metrics of jobs. Runners are queried in parallel, so a scrape takes as long as the slowest
runner. A runner belongs to its job's user and must not corrupt the page: its reply is reduced to a bounded number of
well-formed samples of its own job.
"""

from __future__ import annotations

import re
import threading
import time
from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, get_args

from elasticd_agent.system.network.control_socket import ControlSocketError
from elasticd_agent.telemetry.metric_table import LEASE_BUCKETS, MetricSpec, escape_label, shorten_reason
from elasticd_daemon.api.audit import ACTIONS
from elasticd_daemon.health.policy import HealthVerdict
from elasticd_daemon.health.result import CheckResult, GpuUsage
from elasticd_daemon.records import JobResult, NodeState, RunnerState
from elasticd_daemon.runners.spec import RunnerExit

if TYPE_CHECKING:
    from prometheus_client import Metric

NODE_STATES: tuple[NodeState, ...] = get_args(NodeState)
RUNNER_STATES: tuple[RunnerState, ...] = get_args(RunnerState)
MAX_FAILED_JOBS = 16
"""Jobs with a series for their failure."""
RUNNER_OUTCOMES = ("succeeded", "failed", "refused", "left", "lost")

INFO = MetricSpec("elasticd_node_info", "Always 1; the label is the version of the node's agent.", ("version",))
AGENT_START = MetricSpec("elasticd_node_agent_start_timestamp_seconds", "Unix time the agent started.")
SLOTS = MetricSpec("elasticd_node_slots", "Concurrent workers of this node.")
SLOTS_USED = MetricSpec("elasticd_node_slots_used", "Slots in use by runners, including runners that are leaving.")
NODE_STATE = MetricSpec(
    "elasticd_node_state",
    f"1 for the state of the node: {', '.join(NODE_STATES)}. A cordon or drain by a person counts above the others.",
    ("state",),
    label_sets=len(NODE_STATES),
)
REGISTERED = MetricSpec(
    "elasticd_node_registered", "1 while the node's status is in the store, as far as the agent knows."
)
IS_SCHEDULER = MetricSpec("elasticd_node_is_scheduler", "1 on the one node whose agent is the scheduler.")
RUNNERS = MetricSpec(
    "elasticd_node_runners",
    f"Runners on this node, by state: {', '.join(RUNNER_STATES)}.",
    ("state",),
    label_sets=len(RUNNER_STATES),
)
JOBS_WAITING = MetricSpec("elasticd_node_jobs_waiting", "Pending jobs in the queue, as this node sees it.")
RUNNER_STARTS = MetricSpec("elasticd_node_runner_starts_total", "Runners started by this agent.")
RUNNER_EXITS = MetricSpec(
    "elasticd_node_runner_exits_total",
    f"Runners that ended, by outcome: {', '.join(RUNNER_OUTCOMES)}.",
    ("outcome",),
    label_sets=len(RUNNER_OUTCOMES),
)
JOB_FAILED_AT = MetricSpec(
    "elasticd_node_job_failed_timestamp_seconds",
    "Unix time at which a job failed that ran here or, for the scheduler, nowhere; for 15 minutes, with the reason.",
    ("job_id", "reason"),
    label_sets=MAX_FAILED_JOBS,
)
STORE_UP = MetricSpec("elasticd_node_store_up", "1 while the store is available to this agent.")
STORE_OUTAGES = MetricSpec("elasticd_node_store_outages_total", "Times the store became unavailable to this agent.")
LEASE_TTL = MetricSpec(
    "elasticd_node_lease_seconds", "Lifetime of the lease of the node's status, as the store granted it."
)
LEASE_RENEWAL = MetricSpec(
    "elasticd_node_lease_renewal_seconds",
    "Duration of a renewal of the lease of the node's status, including failed renewals.",
    buckets=LEASE_BUCKETS,
)
LOOP_LAG = MetricSpec("elasticd_node_loop_lag_seconds", "Delay of the agent's main loop.")
EVENT_LOG_LINES_LOST = MetricSpec("elasticd_node_event_log_lines_lost", "Lines lost from the agent's event log.")
AUDITED_REQUESTS = MetricSpec(
    "elasticd_node_audited_requests_total",
    f"Lines of the audit log, by action: {', '.join(ACTIONS)}.",
    ("action",),
    label_sets=len(ACTIONS),
)

HEALTHY = MetricSpec("elasticd_node_healthy", "1 while the node is healthy: it gets work.")
QUARANTINED = MetricSpec(
    "elasticd_node_quarantined",
    "1 during the cool-off after a failed check or after job failures that this node caused.",
)
QUARANTINE_LEFT_S = MetricSpec(
    "elasticd_node_quarantine_left_seconds", "Remaining time of the cool-off; 0 without one."
)
FAILURE_STREAK = MetricSpec(
    "elasticd_node_failure_streak", "Failures of the node in a row; a day without failures resets it."
)
CHECK_FAILING = MetricSpec(
    "elasticd_health_check_failing", "1 if the check failed in its last run.", ("check",), label_sets=0
)
CHECK_SECONDS = MetricSpec(
    "elasticd_health_check_seconds", "Duration of the check's last run.", ("check",), label_sets=0
)
GPU_UTILIZATION = MetricSpec(
    "elasticd_node_gpu_utilization_ratio",
    "The share of the time in which a kernel ran on the GPU, as NVML reports it at the last health check.",
    ("gpu",),
    label_sets=0,
)
GPU_MEMORY_USED = MetricSpec(
    "elasticd_node_gpu_memory_used_bytes", "Memory of the GPU in use, at the last health check.", ("gpu",), label_sets=0
)
GPU_MEMORY_TOTAL = MetricSpec("elasticd_node_gpu_memory_bytes", "Memory of the GPU.", ("gpu",), label_sets=0)

METRICS = (
    INFO, AGENT_START, SLOTS, SLOTS_USED, NODE_STATE, REGISTERED, IS_SCHEDULER, RUNNERS, JOBS_WAITING, RUNNER_STARTS,
    RUNNER_EXITS, JOB_FAILED_AT, STORE_UP, STORE_OUTAGES, LEASE_TTL, LEASE_RENEWAL, LOOP_LAG, EVENT_LOG_LINES_LOST,
    AUDITED_REQUESTS,
    HEALTHY, QUARANTINED, QUARANTINE_LEFT_S, FAILURE_STREAK, CHECK_FAILING, CHECK_SECONDS,
    GPU_UTILIZATION, GPU_MEMORY_USED, GPU_MEMORY_TOTAL,
)  # fmt: skip

LabelValues = tuple[str, ...]
Samples = Mapping[tuple[MetricSpec, LabelValues], float]


def health_samples(
    verdict: HealthVerdict, failure_streak: int, results: Iterable[CheckResult], gpus: Iterable[GpuUsage]
) -> Samples:
    """The metrics of the node's health at this moment."""
    shown = [result for result in results if result.outcome != "skipped"]
    return {
        (HEALTHY, ()): verdict.state == "healthy",
        (QUARANTINED, ()): verdict.state == "quarantined",
        (QUARANTINE_LEFT_S, ()): verdict.quarantine_left_s,
        (FAILURE_STREAK, ()): failure_streak,
        **{(CHECK_FAILING, (result.check,)): result.outcome == "failed" for result in shown},
        **{(CHECK_SECONDS, (result.check,)): result.seconds for result in shown},
        **{(spec, (str(gpu.gpu),)): value for gpu in gpus for spec, value in _gpu_samples(gpu)},
    }


def _gpu_samples(gpu: GpuUsage) -> Iterable[tuple[MetricSpec, float]]:
    busy = None if gpu.utilization_percent is None else gpu.utilization_percent / 100
    values = (
        (GPU_UTILIZATION, busy),
        (GPU_MEMORY_USED, gpu.memory_used_bytes),
        (GPU_MEMORY_TOTAL, gpu.memory_total_bytes),
    )
    return [(spec, value) for spec, value in values if value is not None]


FAILED_JOB_KEPT_S = 900.0
"""Longer than Prometheus needs to scrape, and a person to look."""


def failed_job_samples(
    ends: Iterable[JobResult | RunnerExit], node: str, *, is_scheduler: bool, now: float
) -> Mapping[tuple[MetricSpec, LabelValues], float]:
    """The series of the newest failed jobs: from the store's records, so that they outlive this process.

    `ends`: how jobs ended; those that are not in the store yet are exits of this node's runners. `now` is Unix time.
    """
    failed: dict[str, JobResult | RunnerExit] = {}
    for end in ends:
        if end.outcome != "failed" or now >= end.ended_at + FAILED_JOB_KEPT_S:
            continue
        nodes = end.nodes if isinstance(end, JobResult) else (node,)
        if node in nodes or (is_scheduler and not nodes):
            failed[end.job] = end
    newest = sorted(failed.values(), key=lambda end: end.ended_at)[-MAX_FAILED_JOBS:]
    return {(JOB_FAILED_AT, (end.job, shorten_reason(end.reason))): end.ended_at for end in newest}


class NodeMetrics:
    """The counters, and the page. Thread-safe."""

    def __init__(self, node: str, version: str) -> None:
        self._node = node
        self._lock = threading.Lock()
        self._samples: dict[tuple[MetricSpec, LabelValues], float] = {
            (INFO, (version,)): 1,
            (AGENT_START, ()): time.time(),
            (RUNNER_STARTS, ()): 0,
            **{(RUNNER_EXITS, (outcome,)): 0 for outcome in RUNNER_OUTCOMES},
            (STORE_OUTAGES, ()): 0,
            **{(AUDITED_REQUESTS, (action,)): 0 for action in ACTIONS},
        }
        self._renewals = [0] * (len(LEASE_BUCKETS) + 1)
        self._renewals_s = 0.0

    def count(self, counter: MetricSpec, *labels: str) -> None:
        """KeyError for labels that the metric cannot have."""
        with self._lock:
            self._samples[counter, labels] += 1

    def on_renewal(self, ttl_s: float, renewal_s: float | None) -> None:
        """The store granted a lease of `ttl_s`; `renewal_s`: how long its renewal took, also a failed one."""
        with self._lock:
            self._samples[LEASE_TTL, ()] = ttl_s
            if renewal_s is not None:
                self._renewals[bisect_left(LEASE_BUCKETS, renewal_s)] += 1
                self._renewals_s += renewal_s

    def render(self, gauges: Samples) -> bytes:
        """The text format, version 0.0.4, with `process_*` of this agent's process. `gauges`: the other metrics'
        present values.
        """
        import prometheus_client  # 61 ms, which only a scraped agent needs

        registry = prometheus_client.CollectorRegistry()
        registry.register(_FamilyCollector(tuple(f for spec in METRICS if (f := self._family(spec, gauges)).samples)))
        prometheus_client.ProcessCollector(registry=registry)
        return prometheus_client.generate_latest(registry)

    def _family(self, spec: MetricSpec, gauges: Samples) -> Metric:
        """Return one metric with its samples, in prometheus_client's form."""
        from prometheus_client import Metric

        family = Metric(spec.name.removesuffix("_total"), spec.help, spec.kind)
        node = {"node": self._node}
        with self._lock:
            for (named, labels), value in {**self._samples, **gauges}.items():
                if named is spec:
                    family.add_sample(spec.name, {**node, **dict(zip(spec.labels, labels, strict=True))}, value)
            if spec is LEASE_RENEWAL:
                counts = list(accumulate(self._renewals))
                for bound, count in zip([*map(repr, spec.buckets), "+Inf"], counts, strict=True):
                    family.add_sample(f"{spec.name}_bucket", {**node, "le": bound}, count)
                family.add_sample(f"{spec.name}_count", node, counts[-1])
                family.add_sample(f"{spec.name}_sum", node, self._renewals_s)
        return family


@dataclass(frozen=True, slots=True, eq=False)
class _FamilyCollector:
    """A collector of prometheus_client."""

    families: tuple[Metric, ...]

    def collect(self) -> tuple[Metric, ...]:
        return self.families


FetchRunnerPage = Callable[[str, int, float], bytes]
"""Job, number, timeout in seconds; raises ControlSocketError."""

SCRAPE_TIMEOUT_S = 5.0
"""The time for all runners together; Prometheus gives up after 10 s."""
RUNNER_TIMEOUT_S = 1.5
LAST_PAGE_KEPT_S = 60.0
"""A runner that has not answered for so long is stuck, and its series end."""
MAX_PARALLEL_SCRAPES = 8
MAX_SERIES_PER_JOB = 500
"""The limit of one job. A runner of this version has fewer; one of the next version may have more."""

_LABEL_VALUE = r'(?:[^"\\\x00-\x1f]|\\[\\n"])*'
_HEADER_LINE = re.compile(
    r"# (?:HELP elasticd_[a-z0-9_]+ [^\x00-\x1f]*|TYPE elasticd_[a-z0-9_]+ (?:counter|gauge|histogram))"
)
_SAMPLE_LINE = re.compile(
    rf'elasticd_[a-z0-9_]+{{((?:[a-z_]+="{_LABEL_VALUE}",?)*)}} (?:-?[0-9.]+(?:e[-+]?[0-9]+)?|NaN|[-+]Inf)'
)
_LABEL_PAIR = re.compile(rf'([a-z_]+)="({_LABEL_VALUE})"')


def merge_pages(pages: Iterable[bytes]) -> bytes:
    """Several pages as one: each family once, as the format requires, with the samples of all pages."""
    heads: dict[bytes, list[bytes]] = {}
    samples: dict[bytes, list[bytes]] = {}
    for page in pages:
        family = b""
        first: set[bytes] = set()
        for line in page.splitlines():
            if line.startswith((b"# HELP ", b"# TYPE ")):
                family = line.split(b" ", 3)[2]
                if family not in heads or family in first:
                    first.add(family)
                    heads.setdefault(family, []).append(line)
            elif line and not line.startswith(b"#"):
                samples.setdefault(family, []).append(line)
    named = [name for name in heads if name in samples]
    return b"".join(b"\n".join([*heads[name], *samples[name]]) + b"\n" for name in named)


class RunnerScraper:
    """The pages of the runners on `node`: a runner that does not answer in time has its last page for a while, because
    a busy machine must not look like the end of a job."""

    def __init__(self, node: str, query: FetchRunnerPage, clock: Callable[[], float] = time.monotonic) -> None:
        self._node = node
        self._query = query
        self._clock = clock
        self._last: dict[tuple[str, int], tuple[float, bytes]] = {}

    def scrape(self, jobs: Sequence[tuple[str, int]]) -> list[bytes]:
        """Safe from many threads at once. Of two runs of a job, the first of which is leaving, the second counts alone:
        their series have the same labels.
        """
        until = time.monotonic() + SCRAPE_TIMEOUT_S
        self._last = {key: known for key, known in list(self._last.items()) if key in jobs}
        jobs = list(dict(sorted(jobs)).items())
        if len(jobs) < 2:
            pages = [self.fetch_page(key, until) for key in jobs]
        else:
            with ThreadPoolExecutor(min(len(jobs), MAX_PARALLEL_SCRAPES), "elasticd-scrape") as pool:
                pages = list(pool.map(lambda key: self.fetch_page(key, until), jobs))
        return [page for page in pages if page]

    def fetch_page(self, key: tuple[str, int], until: float) -> bytes:
        """Return a runner's page, or its last one while that is younger than LAST_PAGE_KEPT_S."""
        left = until - time.monotonic()
        try:
            if left > 0:
                page = filter_samples(self._node, key[0], self._query(*key, min(RUNNER_TIMEOUT_S, left)))
                self._last[key] = (self._clock(), page)
                return page
        except ControlSocketError:
            pass
        at, page = self._last.get(key, (float("-inf"), b""))
        return page if self._clock() < at + LAST_PAGE_KEPT_S else b""


def filter_samples(node: str, job: str, page: bytes) -> bytes:
    """The valid samples of a runner's page: in Prometheus' text format, and of this job on this node."""
    expected = {"job_id": escape_label(job), "node": escape_label(node)}
    valid = []
    family = ""
    left = MAX_SERIES_PER_JOB
    for line in page.decode(errors="replace").split("\n"):
        if line.startswith("# "):
            if _HEADER_LINE.fullmatch(line):
                family = line.split(" ", 3)[2]
                valid.append(line)
            continue
        sample = _SAMPLE_LINE.fullmatch(line)
        if not left or sample is None or not family or not line.startswith(family):
            continue
        pairs = _LABEL_PAIR.findall(sample[1])
        labels = dict(pairs)
        if len(labels) < len(pairs):
            continue
        if labels.get("job_id") == expected["job_id"] and labels.get("node", expected["node"]) == expected["node"]:
            valid.append(line)
            left -= 1
    return "\n".join(valid).encode() + b"\n"
