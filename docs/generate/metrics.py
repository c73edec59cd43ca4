"""docs/metrics.md and docs/node-metrics.md, from the tables of metrics."""

from __future__ import annotations

from collections.abc import Iterable

from elasticd_agent.telemetry import metric_table as job
from elasticd_agent.telemetry.goodput import AGREEMENT_S
from elasticd_agent.telemetry.metric_table import MetricSpec
from elasticd_daemon import metrics as node

CHECKS = 12
GPUS = 8
"""More health checks than most nodes have: seven of elasticd's own, the others directories and plugins."""


def job_page() -> str:
    reading = READING.replace("{agree:g}", f"{AGREEMENT_S:g}")
    return "\n\n".join([JOB, _table("`job_id` and `node`", job.METRICS), reading, _series_of_a_job()]) + "\n"


def node_page() -> str:
    in_a_job, own = max_series(8), max_node_series(0, 0)
    text = NODE_SERIES.format(
        job=in_a_job,
        own=own,
        each=max_node_series(1, 0) - own,
        gpu=max_node_series(0, 1) - own,
        checks=CHECKS,
        gpus=GPUS,
        three=3 * in_a_job + max_node_series(CHECKS, GPUS),
    )
    return "\n\n".join([NODE, _table("`node`", node.METRICS), text]) + "\n"


def series(spec: MetricSpec, ranks: int) -> int:
    """How many series it can be on a node with so many ranks of the job, or health checks."""
    return (len(spec.buckets) + 3 if spec.buckets else 1) * (spec.label_sets or ranks)  # +Inf, _sum and _count


def max_series(ranks: int) -> int:
    """What one job can have on a node with so many of its ranks, whatever happens to it."""
    return sum(series(spec, ranks) for spec in job.METRICS)


def max_node_series(checks: int, gpus: int) -> int:
    """The series of a node with this many health checks and GPUs, without those of its jobs."""
    return sum(series(spec, gpus if "gpu" in spec.labels else checks) for spec in node.METRICS)


def _table(labels: str, specs: Iterable[MetricSpec]) -> str:
    rows = [f"| name | type | labels besides {labels} | meaning |", "|---|---|---|---|"]
    for spec in specs:
        rows.append(
            f"| `{spec.name}` | {spec.kind} | {', '.join(f'`{label}`' for label in spec.labels)} | {spec.help} |"
        )
    return "\n".join(rows)


def _series_of_a_job() -> str:
    rows = ["| name | series of a job on one node, at most |", "|---|---|"]
    for spec in job.METRICS:
        if spec.labels or spec.buckets:
            times = "" if spec.label_sets == 1 else f"{spec.label_sets} × " if spec.label_sets else "ranks × "
            each = len(spec.buckets) + 3
            how = f"{times}{each} ({each - 2} buckets, sum, count)" if spec.buckets else str(spec.label_sets or "ranks")
            rows.append(f"| `{spec.name}` | {how} |")
    rows.append(f"| the {sum(not spec.labels and not spec.buckets for spec in job.METRICS)} others | 1 each |")
    text = JOB_SERIES.format(
        culprits=job.MAX_CULPRITS,
        stragglers=job.MAX_STRAGGLERS,
        reason=job.MAX_REASON_CHARS,
        most=max_series(8),
        others=job.OTHER_CULPRITS,
    )
    return text + "\n\n" + "\n".join(rows)


JOB = """# Metrics of a job

<!-- Written by `make docs` from docs/generate/metrics.py and agents/elasticd_agent/telemetry/metric_table.py. -->

`elasticd run --metrics-port PORT ...` serves these metrics at `/metrics` in Prometheus' text format. `elasticd agent`
serves those of every job that has ranks on its node, together with the [node's own](node-metrics.md). Every series has
the labels `job_id` and `node`, the node whose agent reports it. Units are base units (seconds, bytes). A timestamp is
in unix seconds, so alert on `time() - elasticd_last_progress_timestamp_seconds`. A gauge without a value yet is absent,
a counter starts at 0. Names and labels follow semantic versioning, as the event log does.

A job's metrics are kept by its runner, or by `elasticd run`. They continue when the agent is killed, upgraded or
restarted, and start at 0 with a new runner."""

READING = """## How to read them

**Goodput** is `rate(elasticd_time_seconds_total{state="useful"}[5m])` divided by the sum of the rates of all three
states; any window is fine. The three states always add up to the time since the job's agent or runner started on the
node. Time after the last step counts as useful until a fault shows that it was not. A counter cannot decrease, so the
same amount of the time that follows counts as lost instead: 10 s after a hang that took 10 s to detect. Over a longer
window each state is right to within the quarter of a second between two looks of an agent at its workers. A script
without `elasticd.init()` counts the steps of its own process: only the script knows where it resumed, so all its steps
count as useful. A script without optimizer steps is idle all the time and has no `elasticd_step`.

What counts as lost, and what as idle:

- Lost, on every node of the round: fault detection, agreement on the next round, the backoff before a restart, stopping
  and starting the workers, and repeating the steps that no checkpoint had.
- A node that a round leaves out (the node was lost, its slots are quarantined, or it is surplus) is idle from that
  round on. Back in a round, it continues where it was: the time to train beyond all steps so far is lost if a fault had
  excluded the node, else idle.
- Where a fault leaves too few nodes, the leader counts the wait for more as idle from the beginning. The other nodes do
  not know of the wait: after the end of their group they count the backoff and {agree:g} s as lost, and all later time
  as idle. The same holds while an unavailable store prevents agreement on the next round.
- Pauses, drains and joining nodes are idle, from the checkpoint at which all ranks pause. Steps that are repeated there
  are lost.
- A node whose machine or agent has failed reports nothing: its time is in no state.

`elasticd status` computes the same from the node's event log, as far as the log has it.

**Faults**: `elasticd_faults_total`, `elasticd_hangs_total`, `elasticd_round_info` and `elasticd_straggler_ratio` are
reported by the leader node only; sum over nodes. A fault counts when it is detected, perhaps long before a round can
follow. Nodes that are lost together are one fault each. A new leader that takes over before the next round has started,
in a backoff or while nodes are missing, counts the fault of the last round again: it cannot know of the first count. A
series with a `culprit` starts with its first count, which `increase()` does not see;
`elasticd_last_hang_timestamp_seconds` has no such gap."""

JOB_SERIES = """## How many series

No label is a step, a pid, a time or a text from outside, except the reason in `elasticd_round_info` (at most {reason}
characters, and one series at a time). `rank` appears for ranks of the current round on this node, and among all ranks
of the job for the {stragglers} slowest stragglers; a rank that left loses its series. `culprit` has at most {culprits}
pairs of a cause and a node in each metric; beyond these it is `{others}`. So one job with 8 ranks on a node has at most
{most} series there, whatever happens to it and however many nodes it has."""

NODE = """# Metrics of a node

<!-- Written by `make docs` from docs/generate/metrics.py and agents/elasticd_daemon/metrics.py. -->

`elasticd agent` serves these at `/metrics` of its HTTP port, without a token, together with the
[metrics](metrics.md) of every job that runs on the node, distinguished by `job_id`. The runners are queried in
parallel; a runner that does not answer within 1.5 s has the series of its last answer for a minute; a scrape ends
after 5 s. Counters start with the agent: after a restart or an upgrade they count from 0 again, while the counters of
its jobs continue. The agent's own memory, processor time, open files and start are in the usual metrics
`process_*` (such as `process_resident_memory_bytes`), without labels."""

NODE_SERIES = """## How many series

At most {own}, and {each} for each health check that is not skipped (`gpus`, `memory`, one for each directory and plugin
...), {gpu} for each GPU. A job with 8 ranks on the node has at most {job}; three such jobs, {checks} checks and {gpus}
GPUs result in {three}. At most 500 series of a runner's reply are forwarded, and only those of its job.

A scrape with three runners takes 8 ms with a free core, and 12 ms of processor time in all processes
(`benchmarks/scrape.py`)."""
