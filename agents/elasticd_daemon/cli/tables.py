"""The agents' answers -> tables and pages of plain text. Pure.

Columns are aligned; the reason comes last and is never wrapped or cut. Control characters in text of jobs are escaped.

What a person sees is made of typed answers only, and every text that a job or another user has chosen passes `visible`
on the way: a job's name may hold escape sequences, and a terminal that shows it must not obey them.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from elasticd_agent.model.phrases import count, plural, ranges, visible, with_reason
from elasticd_daemon.api.schema import (
    AssignmentStatus,
    JobProgress,
    JobStatus,
    JobSummary,
    NodeSummary,
    RoundStatus,
)
from elasticd_daemon.dashboard.status import job_facts, job_problem, rank_condition
from elasticd_daemon.records import submitter

_MAX_SHOWN_NODES = 3
MAX_SHOWN_RANKS = 64
"""The ranks that are shown: those with the oldest progress."""
MAX_SHOWN_ROUNDS = 20
"""The rounds that are shown: the newest; --json has up to a hundred."""
MAX_SHOWN_PROBLEMS = 20
RECENT_FAILURE_S = 3600.0
FAILING_NODE_STATES = ("lost", "offline", "quarantined")
"""States of a node that nobody asked for."""
_NAME_COLUMN_WIDTH = 11


def jobs(rows: Sequence[JobSummary]) -> str:
    """The table of `elasticd jobs`."""
    if not rows:
        return "no jobs; elasticd submit FILE submits one\n"
    cells = [
        (
            visible(row.job),
            visible(row.state),
            _first_names(row.nodes),
            str(row.slots or "-"),
            f"{_age_or_dash(row.ended_seconds)} ago" if row.ended else _age_or_dash(row.age_seconds),
            visible(row.reason),
        )
        for row in rows
    ]
    return table(("JOB", "STATE", "NODES", "SLOTS", "AGE", "REASON"), cells)


def queue(rows: Sequence[JobSummary]) -> str:
    """The table of `elasticd queue`: pending jobs in the order in which they start. `rows`: all jobs."""
    waiting = sorted((row for row in rows if row.place is not None), key=lambda row: row.place or 0)
    if not waiting:
        return "no job is pending\n"
    used = Counter[str]()
    for row in rows:
        used[submitter(row.submitted_by)] += row.slots
    cells = [
        (
            str(row.place),
            visible(row.job),
            visible(row.priority),
            visible(submitter(row.submitted_by)) or "-",
            str(used[submitter(row.submitted_by)]),
            _age_or_dash(row.age_seconds),
            visible(row.reason),
        )
        for row in waiting
    ]
    return table(("PLACE", "JOB", "PRIORITY", "BY", "USES", "AGE", "REASON"), cells)


def cancel_line(answer: Mapping[str, Any]) -> str:
    """The line that says what was ended, and where its workers are still being stopped."""
    leaving = answer.get("leaving")
    stopping = f"; its workers on {_first_names(leaving)} are being stopped" if leaving else ""
    return visible(f"{answer['job']}: {answer['reason']}{stopping}") + "\n"


def nodes(rows: Sequence[NodeSummary], running: Sequence[JobStatus] = ()) -> str:
    """The table of nodes; it has the use of the GPUs of those where a job of `running` runs."""
    if not rows:
        return "no nodes: no agent is registered\n"
    cells = [
        (
            visible(row.node),
            visible(row.state),
            f"{row.used}/{row.slots}",
            ", ".join([str(len(row.gpus) or "-"), *_gpu_usage(row.node, running)]),
            _first_names(row.jobs),
            visible(row.address) or "-",
            visible(row.versions.get("elasticd", "")) or "-",
            visible(row.reason),
        )
        for row in rows
    ]
    return table(("NODE", "STATE", "USED", "GPUS", "JOBS", "ADDRESS", "VERSION", "REASON"), cells)


def _gpu_usage(node: str, running: Sequence[JobStatus]) -> list[str]:
    """The average use of the node's GPUs, and their memory in use; empty if unknown."""
    gpus = {gpu.gpu: gpu for job in running for gpu in job.known.gpus if gpu.node == node}.values()
    busy = [gpu.utilization_percent for gpu in gpus if gpu.utilization_percent is not None]
    total_bytes = sum(gpu.memory_total_bytes or 0 for gpu in gpus)
    used_bytes = sum(gpu.memory_used_bytes or 0 for gpu in gpus)
    shown = [f"{sum(busy) / len(busy):.0f} %"] if busy else []
    return [*shown, f"{used_bytes / 1e9:.0f} of {total_bytes / 1e9:.0f} GB"] if total_bytes else shown


def problem_line(job: JobStatus, prefix: str = "elasticd: ") -> str:
    """A line about a job's present problem; "" if it has none."""
    wrong = job_problem(job)
    return f"{prefix}{wrong[0]}: {visible(wrong[1])}\n" if wrong else ""


def job_page(job: JobStatus) -> str:
    """One job's page: its problem, its state and why, then its ranks and rounds."""
    progress = job.known
    known = [] if job.progress is None else job_facts(job)
    rows = [
        ("reason", visible(job.reason)),
        *_node_rows(job),
        *((visible(name.lower()), visible(", ".join(filter(None, [value, more])))) for name, value, more in known),
        ("requested", _request_text(job)),
        ("submitted", _submission_text(job)),
    ]
    lines = [f"{visible(job.job)}: {_state_text(job)}"]
    lines += [f"  {name:<{_NAME_COLUMN_WIDTH}} {value}" for name, value in rows if value]
    page = problem_line(job) + "\n".join(lines) + "\n" + _rank_table(progress)
    if progress.rounds:
        older = len(progress.rounds) - MAX_SHOWN_ROUNDS
        cells = [_round_row(row) for row in progress.rounds[-MAX_SHOWN_ROUNDS:]]
        page += "\n" + table(("ROUND", "SINCE", "WORKERS", "NODES", "LOST", "REASON"), cells)
        page += f"and {older} older rounds: --json\n" if older > 0 else ""
    return page


def overview(answer: Mapping[str, Any], *, ended: bool = False) -> str:
    """Problems, the running jobs, all nodes, the pending jobs and, if asked for, the `ended` ones. Raises
    WireError.
    """
    listed = [JobSummary.from_dict(row) for row in answer["jobs"]]
    ready = [NodeSummary.from_dict(row) for row in answer["nodes"]]
    running = [JobStatus.from_dict(status) for status in answer["status"].values()]
    others = [row for row in listed if row.job not in answer["status"] and (ended or not row.ended)]
    pending = sum(1 for row in listed if row.place is not None)
    used, slots = sum(row.used for row in ready), sum(row.slots for row in ready)
    head = f"{count(len(running), 'job')} running, {pending} pending; {used} of {count(slots, 'slot')} in use\n"
    tables = [_running_table(running), nodes(ready, running), *([jobs(others)] if others else [])]
    return problem_lines(listed, ready, running) + head + "\n" + "\n".join(tables)


def problem_lines(listed: Sequence[JobSummary], ready: Sequence[NodeSummary], running: Sequence[JobStatus]) -> str:
    """A line for each problem of a running job, for each node that fails, and for each job that failed in the last
    hour; "" if there is none.
    """
    lines = [f"{job.job}: {line}" for job in running if (line := problem_line(job, "").rstrip())]
    lines += [f"{row.node}: {with_reason(row.state, row.reason)}" for row in ready if row.state in FAILING_NODE_STATES]
    recent = [row for row in listed if row.state == "failed" and (row.ended_seconds or 0) < RECENT_FAILURE_S]
    for row in sorted(recent, key=lambda row: row.ended_seconds or 0):
        lines.append(f"{row.job}: {with_reason(f'failed {_age_or_dash(row.ended_seconds)} ago', row.reason)}")
    more = len(lines) - MAX_SHOWN_PROBLEMS
    shown = [f"elasticd: {visible(line)}\n" for line in lines[:MAX_SHOWN_PROBLEMS]]
    return "".join(shown) + (f"elasticd: and {count(more, 'more problem')}\n" if more > 0 else "")


def _running_table(rows: Sequence[JobStatus]) -> str:
    """The table of running jobs with their progress."""
    if not rows:
        return "no job runs\n"
    cells = [
        (
            visible(job.job),
            visible(job.state),
            f"{job.known.world_size or 0}/{job.max_workers or job.slots}",
            _first_names(job.nodes),
            "-" if job.known.step is None else f"{job.known.step:,}",
            "-" if job.known.steps_per_second is None else f"{job.known.steps_per_second:.3g}",
            "-" if job.known.goodput is None else f"{100 * job.known.goodput:.1f} %",
            str(job.known.restarts or 0),
            _age_or_dash(job.age_seconds),
        )
        for job in rows
    ]
    return table(("JOB", "STATE", "WORKERS", "NODES", "STEP", "STEPS/S", "GOODPUT", "RESTARTS", "AGE"), cells)


def table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Columns as wide as their cells; the last one is not padded."""
    cells = [tuple(heads), *map(tuple, rows)]
    widths = [max(len(row[column]) for row in cells) for column in range(len(heads) - 1)]
    return "".join(
        "  ".join([*(cell.ljust(width) for cell, width in zip(row, widths, strict=False)), row[-1]]).rstrip() + "\n"
        for row in cells
    )


def age(seconds: float) -> str:
    """ "7s", "12m", "3h20m", "4d" """
    whole = max(0, int(seconds))
    if whole < 120:
        return f"{whole}s"
    if whole < 7200:
        return f"{whole // 60}m"
    if whole < 2 * 86400:
        return f"{whole // 3600}h{whole % 3600 // 60:02}m"
    return f"{whole // 86400}d"


def _first_names(names: Sequence[object]) -> str:
    """The first names of a list and the number of the others."""
    shown = [visible(str(name)) for name in names[:_MAX_SHOWN_NODES]]
    more = f" +{len(names) - _MAX_SHOWN_NODES}" if len(names) > _MAX_SHOWN_NODES else ""
    return (",".join(shown) + more) or "-"


def _age_or_dash(seconds: float | None) -> str:
    return "-" if seconds is None else age(seconds)


def _state_text(job: JobStatus) -> str:
    """The state of a job in words, with how and when it ended."""
    state = visible(job.state)
    if not job.ended:
        return state
    leaving = f"; its workers on {_first_names(job.leaving)} are being stopped" if job.leaving else ""
    return f"{state}, {_age_or_dash(job.ended_seconds)} ago, with exit code {job.exit_code}{leaving}"


def _node_rows(job: JobStatus) -> list[tuple[str, str]]:
    """The rows that say on which nodes and slots a job runs."""
    if not job.assignments:
        return [("nodes", _first_names(job.nodes) if job.nodes else "")]
    return [
        ("" if index else "nodes", _assignment_text(assignment)) for index, assignment in enumerate(job.assignments)
    ]


def _assignment_text(one: AssignmentStatus) -> str:
    """One node of a job: slots, state and the reason for it."""
    slots = f" {plural(len(one.slots), 'slot')} {','.join(ranges(one.slots))}" if one.slots else ""
    reason = f": {visible(one.reason)}" if one.reason else ""
    return f"{visible(one.node)}{slots}, {visible(one.state)}{reason}"


def _request_text(job: JobStatus) -> str:
    """The numbers of nodes and slots that the job asked for, "" once it has ended."""
    if job.requested is None or job.ended:
        return ""
    (least, most), (low, high) = job.requested.nodes, job.requested.slots
    nodes = f"{least}" if least == most else f"{least} to {most}"
    slots = f"{low}" if low == high else f"{low} to {high}"
    spares = f" and {count(job.requested.spares, 'spare')}" if job.requested.spares else ""
    return f"{nodes} {plural(most, 'node')} with {slots} {plural(high, 'slot')} each{spares}"


def _submission_text(job: JobStatus) -> str:
    """The time at which the job was submitted, and by whom."""
    if job.submitted_at is None:
        return ""
    by = f" by {visible(job.submitted_by)}" if job.submitted_by else ""
    return f"{_local_time(job.submitted_at)}{by}, {_age_or_dash(job.age_seconds)} ago, as number {job.number}"


def _round_row(one: RoundStatus) -> tuple[str, ...]:
    """The cells of one round."""
    size = str(one.world_size) if one.world_size else "-"
    reason = ", ".join(filter(None, [one.reason, *one.origin_phrases]))
    return str(one.round), _local_time(one.at), size, _first_names(one.nodes), _lost_cell(one), visible(reason)


def _lost_cell(one: RoundStatus) -> str:
    """The time until its first step, and how many steps were trained again."""
    if one.lost_seconds is None:
        return "-"
    steps = "" if one.lost_steps is None else f", {count(one.lost_steps, 'step')}"
    return f"{one.lost_seconds:.1f}s{steps}"


def _rank_table(progress: JobProgress) -> str:
    """The table of ranks, those with the oldest progress first where not all are shown."""
    rows = progress.ranks
    if not rows:
        return ""
    shown = sorted(rows, key=lambda one: -one.idle_seconds)[:MAX_SHOWN_RANKS] if len(rows) > MAX_SHOWN_RANKS else rows
    cells = [
        (
            str(rank.rank),
            visible(rank.node),
            visible(rank_condition(rank, progress)[0]),
            str(rank.step),
            f"{rank.idle_seconds:.1f}s ago",
        )
        for rank in shown
    ]
    more = (
        f"and {len(rows) - MAX_SHOWN_RANKS} more with newer progress: --json\n" if len(rows) > MAX_SHOWN_RANKS else ""
    )
    return "\n" + table(("RANK", "NODE", "PHASE", "STEP", "PROGRESS"), cells) + more


def _local_time(at: float) -> str:
    if not 0 < at < 1e11:
        return "-"
    return time.strftime("%Y-%m-%d %H:%M:%S%z", time.localtime(at))
