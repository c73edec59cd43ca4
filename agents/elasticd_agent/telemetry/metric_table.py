"""Every metric of a job: name, help, labels, and the largest number of its series. docs/metrics.md shows it.

A name that was published stays: alerts and dashboards of others depend on it. A new metric is a row here, with its
help, its labels and the most series that one job can have; the page, the tests and the alert rules find it by its
constant.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from elasticd_agent.hangs.causes import CAUSES as HANGS
from elasticd_agent.model.messages import Phase
from elasticd_agent.model.phrases import shortened

RESTART_CAUSES = ("crash", "hung", "store_lost", "start_failed", "resize", "other")
EXIT_KINDS = ("success", "exit_code", "signal", "requested")
START_MODES = ("warm", "cold")
RECOVERY_PARTS = ("detect", "evidence", "agree", "stop", "start", "first_step")
FAULT_CAUSES = ("crash", "hung", "node_lost", "store_lost", "start_failed", "other")
TIME_STATES = ("useful", "lost", "idle")
PHASES = tuple(phase.__name__.lower() for phase in get_args(Phase))
MAX_CULPRITS = 8
"""Pairs of a cause and a node at fault with a series of their own; further ones share one per cause."""
OTHER_CULPRITS = "..."
"""The culprit of the shared series; no node can have this name."""
LEASE_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)
"""A renewal gives up after 0.9 s by default; a lease is 3 s."""
MAX_STRAGGLERS = 16
"""The slowest stragglers have a series, the others none."""
MAX_REASON_CHARS = 200
"""Characters of a reason in a label."""
STEP_BUCKETS = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0)


@dataclass(frozen=True, slots=True)
class MetricSpec:
    """One metric. A job's also carry `job_id` and `node`, a node's `node`; Prometheus itself owns the label `job`."""

    name: str  #: a counter's ends in "_total"
    help: str
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()  #: of a histogram
    label_sets: int = 1  #: how many sets of values its labels can have; 0: one for each rank or health check
    initial_label_values: tuple[str, ...] = ()  #: of its only label, if there is a series for each from the start

    def __post_init__(self) -> None:
        object.__setattr__(self, "label_sets", len(self.initial_label_values) or self.label_sets)

    @property
    def kind(self) -> Literal["gauge", "counter", "histogram"]:
        return "histogram" if self.buckets else "counter" if self.name.endswith("_total") else "gauge"


def escape_label(text: str) -> str:
    """The text as a label's value in the text format."""
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def shorten_reason(reason: str) -> str:
    """A reason as a label's value: one line of at most MAX_REASON_CHARS."""
    return shortened(" ".join(reason.split()), MAX_REASON_CHARS)


AGENT_UP = MetricSpec("elasticd_agent_up", "1 while the agent runs; the last scrape before it ends still shows 1.")
AGENT_INFO = MetricSpec("elasticd_agent_info", "Always 1; the labels say which agent this is.", ("version",))
AGENT_START_TIMESTAMP = MetricSpec("elasticd_agent_start_timestamp_seconds", "Unix time the agent started.")
JOB_PHASE = MetricSpec(
    "elasticd_job_phase",
    f"1 for the phase the agent of this node is in, 0 for the others: {', '.join(PHASES)}.",
    ("phase",),
    label_sets=len(PHASES),
)
TIME_BY_STATE = MetricSpec(
    "elasticd_time_seconds_total",
    "This node's time: useful (steps beyond the highest one so far), lost (from the last step before a fault until a "
    "step beyond the highest one) or idle (before the job's first step, waiting for nodes, pauses).",
    ("state",),
    initial_label_values=TIME_STATES,
)
ROUND = MetricSpec("elasticd_round", "Number of the current round.")
ROUND_INFO = MetricSpec(
    "elasticd_round_info",
    "1 for the current round, reported by the leader node: its cause in a word (start, resize, or the fault; for the "
    f"last round the outcome of the job) and its reason in at most {MAX_REASON_CHARS} characters.",
    ("round", "cause", "reason"),
)
ROUND_START_TIMESTAMP = MetricSpec(
    "elasticd_round_start_timestamp_seconds", "Unix time this node received the current round."
)
WORLD_SIZE = MetricSpec("elasticd_world_size", "Workers in the current round, over all nodes.")
WORLD_SIZE_TARGET = MetricSpec(
    "elasticd_world_size_target", "Workers of the job at its maximal number of nodes, with no slot quarantined."
)
WORKERS_RUNNING = MetricSpec("elasticd_workers_running", "Worker processes of the current round alive on this node.")
SPARES = MetricSpec(
    "elasticd_spares",
    "Slots of this node that stand by while the job has all that it asks for, and take the place of lost ranks.",
)
RESTARTS = MetricSpec(
    "elasticd_restarts_total",
    f"Rounds after the first, by cause: {', '.join(RESTART_CAUSES)}.",
    ("cause",),
    initial_label_values=RESTART_CAUSES,
)
FAULTS_TOTAL = MetricSpec(
    "elasticd_faults_total",
    f"Faults that ended a round, counted once by the node whose agent plans, by cause: {', '.join(FAULT_CAUSES)}; "
    "culprit is the node at fault, empty when no single one is.",
    ("cause", "culprit"),
    label_sets=2 * len(FAULT_CAUSES) + MAX_CULPRITS,
)
BUDGET_REMAINING = MetricSpec(
    "elasticd_restart_budget_remaining",
    "Restarts left before the job fails, without progress: in a row, or within the hour if these are fewer; or of "
    "`max_restarts`. Progress and time restore the former. Not every node sees all progress: the highest value over "
    "the nodes is right.",
)
WORKER_EXITS = MetricSpec(
    "elasticd_worker_exits_total",
    "Worker processes of this node that ended: success, exit_code (non-zero), signal, requested (by the agent).",
    ("kind",),
    initial_label_values=EXIT_KINDS,
)
LAST_STEP = MetricSpec("elasticd_step", "Last optimizer step finished by any worker of this node.")
WORKER_STEP = MetricSpec(
    "elasticd_worker_step",
    "Last optimizer step finished by the rank; only ranks of the current round.",
    ("rank",),
    label_sets=0,
)
STEPS_TOTAL = MetricSpec(
    "elasticd_steps_total", "Optimizer steps finished by this node's fastest worker, repeated ones as well."
)
STEP_SECONDS = MetricSpec(
    "elasticd_step_seconds",
    "Duration of an optimizer step, from one finished step to the next; of many steps a second only a part.",
    buckets=STEP_BUCKETS,
)
STEPS_PER_SECOND = MetricSpec("elasticd_steps_per_second", "Recent optimizer steps per second.")
LAST_PROGRESS = MetricSpec(
    "elasticd_last_progress_timestamp_seconds", "Unix time of the last step finished by a worker of this node."
)
START_TO_FIRST_STEP = MetricSpec(
    "elasticd_start_to_first_step_seconds", "From the start of the round's workers to its first finished step."
)
RECOVERY = MetricSpec(
    "elasticd_recovery_seconds",
    "From a fault to the first step finished by the next round, on the leader node.",
    # A warm restart of 2 workers takes 0.1 s, a cold one 2 s; a big model's checkpoint takes minutes to load.
    buckets=(0.02, 0.05, 0.1, 0.15, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 180.0, 600.0),
)
CHECKPOINTS_SAVED = MetricSpec("elasticd_checkpoints_saved_total", "Checkpoints written whole.")
CHECKPOINT_FAILURES = MetricSpec("elasticd_checkpoint_failures_total", "Checkpoints that could not be written.")
CHECKPOINT_FAILED_AT = MetricSpec(
    "elasticd_checkpoint_last_failure_timestamp_seconds", "Unix time of the last checkpoint that could not be written."
)
CHECKPOINTS_DROPPED = MetricSpec(
    "elasticd_checkpoints_dropped_total",
    "States that were in memory only, because a newer one took their place before they were on the disk.",
)
CHECKPOINT_WRITTEN_SECONDS = MetricSpec(
    "elasticd_checkpoint_last_written_seconds", "From the begin of the last save until it was on the disk."
)
SNAPSHOT_STEP = MetricSpec("elasticd_snapshot_last_step", "Step of the last save that was whole in memory here.")
SNAPSHOT_TIMESTAMP = MetricSpec(
    "elasticd_snapshot_last_timestamp_seconds", "Unix time the last save was whole in memory here."
)
DONOR_RESUMES = MetricSpec(
    "elasticd_donor_resumes_total", "Rounds that resumed from a state saved by a rank after the fault."
)
DONOR_STEPS_SAVED = MetricSpec(
    "elasticd_donor_steps_saved_total",
    "Steps that such states were ahead of the newest checkpoint on the disk, and were not trained again.",
)
CHECKPOINTS_SKIPPED = MetricSpec("elasticd_checkpoints_skipped_total", "Checkpoints skipped because a check failed.")
CHECKPOINT_STEP = MetricSpec(
    "elasticd_checkpoint_last_step", "Step of the last checkpoint written here, or resumed from."
)
CHECKPOINT_TIMESTAMP = MetricSpec(
    "elasticd_checkpoint_last_timestamp_seconds",
    "Unix time the last checkpoint was written here, or another node's was resumed from.",
)
CHECKPOINT_BYTES = MetricSpec("elasticd_checkpoint_last_size_bytes", "Size of the last checkpoint written.")
CHECKPOINT_BLOCKED_SECONDS = MetricSpec(
    "elasticd_checkpoint_last_write_seconds", "How long training paused for the last checkpoint."
)
CHECKPOINT_INTERVAL = MetricSpec(
    "elasticd_checkpoint_interval_seconds",
    "The script's checkpoint interval; absent where the interval is in steps, or the script saves by itself.",
)
LAUNCHER_STARTS = MetricSpec(
    "elasticd_launcher_starts_total",
    "Worker groups started on this node: warm (forked) or cold.",
    ("mode",),
    initial_label_values=START_MODES,
)
HANG_SUSPICIONS = MetricSpec(
    "elasticd_hang_suspicions_total", "Times this node's agent suspected a hang; most suspicions clear by themselves."
)
HANGS_TOTAL = MetricSpec(
    "elasticd_hangs_total",
    f"Hangs detected, counted by the leader node, by cause: {', '.join(HANGS)}; culprit is "
    "the node at fault, empty when no single one is.",
    ("cause", "culprit"),
    label_sets=2 * len(HANGS) + MAX_CULPRITS,
)
LAST_HANG = MetricSpec(
    "elasticd_last_hang_timestamp_seconds",
    "Unix time of the last such hang: `increase()` does not see the first count of a series of the counter.",
    ("cause", "culprit"),
    label_sets=len(HANGS) + MAX_CULPRITS + len(HANGS),
)
HANG_DETECTION = MetricSpec(
    "elasticd_hang_detection_seconds",
    "From the last progress of a hung group to the verdict, on the leader node.",
    buckets=(1.0, 1.5, 2.5, 3.5, 5.0, 7.5, 10.0, 30.0, 60.0, 180.0, 600.0, 1800.0),
)
RECOVERY_PART = MetricSpec(
    "elasticd_recovery_part_seconds",
    "The parts of a recovery, on the leader node: until the fault was detected (detect), evidence of a hang, until the "
    "next round was agreed on (agree), until the old group had ended (stop), until the new one had started (start), "
    "until its first step (first_step). A part that overlaps another one counts from the end of that one.",
    ("part",),
    initial_label_values=RECOVERY_PARTS,
    buckets=(0.025, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0, 60.0, 600.0),
)
STRAGGLER_RATIO = MetricSpec(
    "elasticd_straggler_ratio",
    "Duration of a straggler's own work, relative to its peers', reported by the leader node; absent for other ranks.",
    ("rank",),
    label_sets=MAX_STRAGGLERS,
)
STUCK_PROCESSES = MetricSpec("elasticd_stuck_processes", "Processes of this node that survived SIGKILL so far.")
STORE_UP = MetricSpec("elasticd_store_up", "1 while the rendezvous store answers this agent, else 0.")
STORE_OUTAGES = MetricSpec("elasticd_store_outages_total", "Times the store became unavailable to this agent.")
LEASE_TTL = MetricSpec("elasticd_lease_seconds", "Time to live of this agent's lease, as granted by the store.")
LEASE_RENEWAL = MetricSpec(
    "elasticd_lease_renewal_seconds",
    "How long a renewal of this agent's lease took, also one that failed; absent for a job on one node.",
    buckets=LEASE_BUCKETS,
)
LINES_LOST = MetricSpec("elasticd_event_log_lines_lost_total", "Event-log lines that could not be written.")

METRICS: tuple[MetricSpec, ...] = (
    AGENT_UP, AGENT_INFO, AGENT_START_TIMESTAMP, JOB_PHASE, TIME_BY_STATE, ROUND, ROUND_INFO, ROUND_START_TIMESTAMP,
    WORLD_SIZE, WORLD_SIZE_TARGET, WORKERS_RUNNING, SPARES, RESTARTS, FAULTS_TOTAL, BUDGET_REMAINING, WORKER_EXITS,
    LAST_STEP, WORKER_STEP, STEPS_TOTAL, STEP_SECONDS, STEPS_PER_SECOND, LAST_PROGRESS, START_TO_FIRST_STEP,
    RECOVERY, RECOVERY_PART, CHECKPOINTS_SAVED, CHECKPOINT_FAILURES, CHECKPOINT_FAILED_AT, CHECKPOINTS_SKIPPED,
    CHECKPOINT_STEP, CHECKPOINT_TIMESTAMP, CHECKPOINT_BYTES, CHECKPOINT_BLOCKED_SECONDS, CHECKPOINT_INTERVAL,
    CHECKPOINTS_DROPPED, CHECKPOINT_WRITTEN_SECONDS, SNAPSHOT_STEP, SNAPSHOT_TIMESTAMP, DONOR_RESUMES,
    DONOR_STEPS_SAVED, LAUNCHER_STARTS, HANG_SUSPICIONS, HANGS_TOTAL, LAST_HANG, HANG_DETECTION, STRAGGLER_RATIO,
    STUCK_PROCESSES, STORE_UP, STORE_OUTAGES, LEASE_TTL, LEASE_RENEWAL, LINES_LOST,
)  # fmt: skip
