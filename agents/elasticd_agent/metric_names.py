"""Every metric of a job: the one table of names, help and labels, and how many series each can be. docs/metrics.md's.

It exists so that a name is written once, and so that what a page of metrics may grow to can be counted before it does:
every label says how many values it may take. Nothing is measured or served here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from elasticd_agent.core import MOVES
from elasticd_agent.observation import CAUSES as HANGS

CAUSES = ("crash", "hung", "store_lost", "start_failed", "resize", "other")
EXIT_KINDS = ("success", "exit_code", "signal", "asked")
MODES = ("warm", "cold")
PARTS = ("detect", "evidence", "agree", "stop", "start", "first_step")
FAULTS = ("crash", "hung", "node_lost", "store_lost", "start_failed", "other")
SPENT = ("useful", "lost", "idle")
PHASES = tuple(phase.__name__.lower() for phase in MOVES)
MOST_BLAMED = 16
"""So many pairs of a cause and a node at fault have a series of their own; what more there are share one a cause."""
OTHERS = "..."
"""The culprit where there are more; no node can be called that."""
LEASE_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)
"""A renewal gives up after 0.9 s by default; a lease is 3 s."""
REASON = 200
"""Characters of a round's reason that a label carries."""


@dataclass(frozen=True, slots=True)
class Spec:
    """One metric. A job's also carry `job_id` and `node`, a node's `node`; Prometheus itself owns the label `job`.

    `many`: how many sets of values its labels can have, the ranks of a node aside.
    """

    name: str
    kind: Literal["gauge", "counter", "histogram"]
    help: str
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()
    many: int = 1

    def series(self, ranks: int) -> int:
        """How many series it can be on a node with so many ranks of the job."""
        each = len(self.buckets) + 3 if self.buckets else 1  # +Inf, _sum and _count
        return each * self.many * (ranks if "rank" in self.labels else 1)


AGENT_UP = Spec("elasticd_agent_up", "gauge", "1 while the agent runs; the last scrape before it ends still shows 1.")
AGENT_INFO = Spec("elasticd_agent_info", "gauge", "Always 1; the labels say which agent this is.", ("version",))
AGENT_START = Spec("elasticd_agent_start_timestamp_seconds", "gauge", "Unix time the agent started.")
JOB_PHASE = Spec(
    "elasticd_job_phase",
    "gauge",
    f"1 for the phase the agent of this node is in, 0 for the others: {', '.join(PHASES)}.",
    ("phase",),
    many=len(PHASES),
)
TIME = Spec(
    "elasticd_time_seconds_total",
    "counter",
    "What became of this node's time: useful (steps beyond the highest one so far), lost (from the last step before a "
    "fault until a step is beyond that again) or idle (before the job's first step, waiting for nodes, holds).",
    ("state",),
    many=len(SPENT),
)
ROUND = Spec("elasticd_round", "gauge", "Number of the current round.")
ROUND_INFO = Spec(
    "elasticd_round_info",
    "gauge",
    "1 for the current round, told by the node whose agent plans: why there is one, in a word (start, resize, or what "
    f"went wrong; of the last one how the job ended) and in at most {REASON} characters.",
    ("round", "cause", "reason"),
)
ROUND_START = Spec("elasticd_round_start_timestamp_seconds", "gauge", "Unix time this node heard of the current round.")
WORLD_SIZE = Spec("elasticd_world_size", "gauge", "Workers in the current round, over all nodes.")
WORLD_SIZE_TARGET = Spec(
    "elasticd_world_size_target", "gauge", "Workers the job would have with nothing set aside or lost."
)
WORKERS_RUNNING = Spec("elasticd_workers_running", "gauge", "Worker processes of the current round alive on this node.")
RESTARTS = Spec(
    "elasticd_restarts_total",
    "counter",
    f"Rounds after the first, by cause: {', '.join(CAUSES)}.",
    ("cause",),
    many=len(CAUSES),
)
FAULTS_SEEN = Spec(
    "elasticd_faults_total",
    "counter",
    f"Faults that ended a round, counted once by the node whose agent plans, by cause: {', '.join(FAULTS)}; culprit is "
    "the node at fault, empty when no single one is.",
    ("cause", "culprit"),
    many=2 * len(FAULTS) + MOST_BLAMED,
)
BUDGET = Spec(
    "elasticd_restart_budget_remaining", "gauge", "Restarts left before the job is given up; absent when unlimited."
)
EXITS = Spec(
    "elasticd_worker_exits_total",
    "counter",
    "Worker processes of this node that ended: success, exit_code (non-zero), signal, asked (stopped or killed by us).",
    ("kind",),
    many=len(EXIT_KINDS),
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
CHECKPOINT_INTERVAL = Spec(
    "elasticd_checkpoint_interval_seconds",
    "gauge",
    "How often the script asked for a checkpoint; absent where it asked for one every so many steps, or saves itself.",
)
LAUNCHER_STARTS = Spec(
    "elasticd_launcher_starts_total",
    "counter",
    "Worker groups started on this node: warm (forked) or cold.",
    ("mode",),
    many=len(MODES),
)
SUSPICIONS = Spec(
    "elasticd_suspicions_total", "counter", "Times this node's agent suspected a hang; most end by themselves."
)
HANGS_SEEN = Spec(
    "elasticd_hangs_total",
    "counter",
    f"Hangs that were found, counted by the node whose agent judged, by cause: {', '.join(HANGS)}; culprit is "
    "the node at fault, empty when no single one is.",
    ("cause", "culprit"),
    many=2 * len(HANGS) + MOST_BLAMED,
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
    many=len(PARTS),
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
LEASE = Spec(
    "elasticd_lease_seconds",
    "gauge",
    "How long this agent's lease lives unless it is renewed, as the store granted it.",
)
LEASE_RENEWAL = Spec(
    "elasticd_lease_renewal_seconds",
    "histogram",
    "How long a renewal of this agent's lease took, also one that failed; absent for a job on one node.",
    buckets=LEASE_BUCKETS,
)
LINES_LOST = Spec("elasticd_event_log_lines_lost_total", "counter", "Event-log lines that could not be written.")

METRICS: tuple[Spec, ...] = (
    AGENT_UP, AGENT_INFO, AGENT_START, JOB_PHASE, TIME, ROUND, ROUND_INFO, ROUND_START, WORLD_SIZE, WORLD_SIZE_TARGET,
    WORKERS_RUNNING, RESTARTS, FAULTS_SEEN, BUDGET, EXITS, STEP, WORKER_STEP, STEPS_PER_SECOND, LAST_PROGRESS,
    FIRST_STEP, RECOVERY, RECOVERY_PART, CHECKPOINTS_SAVED, CHECKPOINT_FAILURES, CHECKPOINTS_SKIPPED, CHECKPOINT_STEP,
    CHECKPOINT_TIME, CHECKPOINT_BYTES, CHECKPOINT_SECONDS, CHECKPOINT_INTERVAL, LAUNCHER_STARTS, SUSPICIONS,
    HANGS_SEEN, HANG_DETECTION, SLOWNESS, STUCK, STORE_UP, STORE_OUTAGES, LEASE, LEASE_RENEWAL, LINES_LOST,
)  # fmt: skip


def document() -> str:
    """docs/metrics.md, whole."""
    rows = ["| name | type | labels besides `job_id` and `node` | meaning |", "|---|---|---|---|"]
    for spec in METRICS:
        labels = ", ".join(f"`{label}`" for label in spec.labels)
        rows.append(f"| `{spec.name}` | {spec.kind} | {labels} | {spec.help} |")
    return _INTRODUCTION + "\n\n" + "\n".join(rows) + "\n"


_INTRODUCTION = """# Metrics

<!-- Written by `make docs`: change agents/elasticd_agent/metric_names.py. -->

`elasticd run --metrics-port PORT ...` serves these at `/metrics` in Prometheus' text format. Units are base units
(seconds, bytes); a timestamp is unix seconds, so alert on `time() - elasticd_last_progress_timestamp_seconds`. A gauge
nobody has reported yet is absent, a counter starts at 0. `rank` appears only for ranks of the current round on this
node; a rank that left loses its series. The names and labels follow semantic versioning, as the event log does."""


if __name__ == "__main__":
    print(document(), end="")
