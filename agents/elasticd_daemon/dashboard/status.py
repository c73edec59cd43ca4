"""A job's state and its ranks' in a word each, its problem in a sentence, its facts, its ranks node by node. Pure.

The page, `elasticd status` and `elasticd jobs` use these words, so a job is described in one way wherever it is seen. A
word is chosen for what a person would do about it: a rank that is blocked or stopped is bad, since it will not continue
by itself; a rank that is slow is a warning, since it may.
"""

from __future__ import annotations

from collections.abc import Sequence

from elasticd_agent.model.phrases import count, listing
from elasticd_agent.system.durations import in_words
from elasticd_daemon.api.schema import (
    AssignmentStatus,
    CheckpointStatus,
    JobProgress,
    JobStatus,
    RankProgress,
    ScalarSeries,
)
from elasticd_daemon.dashboard import formatting
from elasticd_daemon.health.result import GpuUsage

JOB_STATE_STYLES = {
    "running": "good",
    "succeeded": "good",
    "starting": "busy",
    "leaving": "busy",
    "pending": "idle",
    "cancelled": "idle",
    "failed": "bad",
}
_NODE_STYLES = {"running": "good", "unreachable": "bad", "offline": "bad", "refused": "bad"}
MAX_SHOWN_RANKS = 128
"""The most ranks that are shown: those with the oldest progress."""
STALLED_AFTER_S = 5.0
"""A rank without progress for this long is marked: the shortest time after which a hang is suspected."""
_STALLED_AFTER_STEPS = 10
"""A rank may miss this many slow steps."""


def rank_condition(rank: RankProgress, progress: JobProgress) -> tuple[str, str]:
    """A word or two about the rank, and their style: good, busy, warn, bad or idle."""
    if rank.exited:
        return "done", "idle"
    if rank.state in ("T", "t"):
        return "stopped", "bad"
    if rank.state in ("Z", "X"):
        return "dead", "bad"
    phase = f"at barrier {rank.barrier}" if rank.phase == "barrier" and rank.barrier else rank.phase or "unknown"
    rate = progress.steps_per_second
    is_stalled = rank.idle_seconds > max(STALLED_AFTER_S, _STALLED_AFTER_STEPS / rate if rate else 0.0)
    if rank.state == "D" and is_stalled:
        return f"{phase}, blocked", "bad"
    if is_stalled and rank.phase == "step":
        return f"{phase}, stalled", "warn"
    return phase, "good" if rank.phase == "step" else "busy"


def job_problem(job: JobStatus) -> tuple[str, str] | None:
    """A word and a sentence; None without a problem."""
    if job.ended:
        return None
    progress = job.known
    newest = progress.newest_round
    if newest is not None and newest.first_step_at is None and newest.lost_seconds is not None:
        lost = in_words(newest.lost_seconds)
        return "recovering", f"No step for {lost}: round {newest.round} is starting: {newest.reason}"
    if progress.phase in ("stopping", "settling"):
        return "stopping", f"The workers of round {progress.round} are being stopped."
    conditions = [(rank, *rank_condition(rank, progress)) for rank in progress.ranks]
    for rank, word, style in conditions:
        if style == "bad":
            others = " The other ranks wait for it." if len(progress.ranks) > 1 else ""
            since = f"no progress for {in_words(rank.idle_seconds)}."
            return "stalled", f"Rank {rank.rank} on {rank.node} is {word}: {since}{others}"
    stalled = [rank for rank, _, style in conditions if style == "warn"]
    if not stalled:
        return None
    first, since = stalled[0], in_words(max(rank.idle_seconds for rank in stalled))
    which = f"Rank {first.rank} on {first.node} has" if len(stalled) == 1 else f"{len(stalled)} ranks have"
    return "stalled", f"{which} made no progress for {since}."


def job_state_chip(job: JobStatus) -> tuple[str, str]:
    """The words of a chip, and its style."""
    wrong = job_problem(job)
    return (f"{job.state}, {wrong[0]}", "warn") if wrong else (job.state, JOB_STATE_STYLES.get(job.state, "idle"))


def _spares_fact(job: JobStatus) -> tuple[str, str, str]:
    names = job.known.spare_names
    return "Spares", str(len(names)), listing(names) if names else "none is ready"


def job_facts(job: JobStatus) -> list[tuple[str, str, str]]:
    """Name, value, and more about it: the tiles of the page, and lines of `elasticd status JOB`."""
    progress = job.known
    rate, size, most = progress.steps_per_second, progress.world_size, job.max_workers
    goodput = "–" if progress.goodput is None else f"{100 * progress.goodput:.1f} %"
    return [
        ("Step", "–" if progress.step is None else f"{progress.step:,}", "" if rate is None else formatting.rate(rate)),
        ("Workers", "–", "")
        if job.ended
        else ("Workers", str(size or "–"), "" if most in (None, size) else f"of at most {most}"),
        *([_spares_fact(job)] if progress.spares or (not job.ended and job.requested and job.requested.spares) else []),
        ("Round", str(progress.round or "–"), "" if progress.restarts is None else count(progress.restarts, "restart")),
        _saved_fact("Checkpoint", progress.checkpoint),
        *([_saved_fact("In memory", progress.snapshot)] if progress.snapshot else []),
        ("Goodput", goodput, "the share of its time that counted"),
        _lost_fact(progress),
        *(_scalar_fact(series) for series in progress.scalars if series.points),
    ]


def _saved_fact(name: str, saved: CheckpointStatus | None) -> tuple[str, str, str]:
    if saved is None:
        return name, "none", ""
    age = "" if saved.age_seconds is None else f"{in_words(saved.age_seconds)} ago"
    return name, f"step {saved.step:,}", ", ".join(filter(None, [age, saved.cost_words]))


def _lost_fact(progress: JobProgress) -> tuple[str, str, str]:
    """The fact about what faults have cost so far: time, steps that were trained again, and steps
    that a donor saved.
    """
    faults = [row for row in progress.rounds if not row.planned]
    lost = [row.lost_seconds for row in faults if row.lost_seconds is not None]
    if not lost:
        return "Lost", "nothing", ""
    again = sum(row.lost_steps or 0 for row in faults)
    more = f"{count(len(faults), 'fault')}, {count(again, 'step')} again"
    if progress.donor_resumes:
        more += f", {count(progress.donor_steps, 'step')} saved after a fault"
    return "Lost", in_words(sum(lost)), more


def _scalar_fact(series: ScalarSeries) -> tuple[str, str, str]:
    """The newest value that the script has passed to `session.log`."""
    step, value = series.points[-1]
    return series.name, f"{value:.6g}", f"at step {step:,}"


def node_boxes(job: JobStatus) -> tuple[list[dict[str, object]], int]:
    """The values of `node_box` in templates/job.html for each node of the round, and how many ranks are left out."""
    progress = job.known
    shown = sorted(progress.ranks, key=lambda rank: -rank.idle_seconds)[:MAX_SHOWN_RANKS]
    ranks: dict[str, list[RankProgress]] = {}
    for rank in sorted(shown, key=lambda rank: rank.rank):
        ranks.setdefault(rank.node, []).append(rank)
    more = len(progress.ranks) - len(shown)
    names = dict.fromkeys([*(() if more else job.nodes), *progress.unreachable, *ranks])
    assigned = {assignment.node: assignment for assignment in job.assignments}
    return [_node_box(name, assigned.get(name), progress, ranks.get(name, ())) for name in names], more


def _node_box(
    name: str, assigned: AssignmentStatus | None, progress: JobProgress, ranks: Sequence[RankProgress]
) -> dict[str, object]:
    silence = progress.unreachable.get(name, "")
    state = "unreachable" if silence else assigned.state if assigned is not None else ""
    return {
        "name": name,
        "state": state,
        "style": _NODE_STYLES.get(state, "busy"),
        "reason": silence or (assigned.reason if assigned is not None else ""),
        "gpus": [_describe_gpu_usage(gpu) for gpu in progress.gpus if gpu.node == name],
        "ranks": [(rank, *rank_condition(rank, progress)) for rank in ranks],
        "absent": _no_ranks_reason(progress) if not ranks and not silence else "",
    }


def steps_behind(rank: RankProgress, progress: JobProgress) -> str:
    """Return by how many steps a rank is behind the first one, in words; "" if that is nothing unusual."""
    missing = max(other.step for other in progress.ranks) - rank.step
    return f" ({missing:,} behind)" if missing > 1 and rank.phase != "starting" else ""


def _no_ranks_reason(progress: JobProgress) -> str:
    """The reason why a node has no ranks."""
    why = progress.runner_problem
    return f"The runner does not answer: {why}" if progress.round and why else "No workers at this moment."


def _describe_gpu_usage(gpu: GpuUsage) -> str:
    """ "GPU 0: 97 %, 61 of 80 GB"."""
    facts = [] if gpu.utilization_percent is None else [f"{gpu.utilization_percent} %"]
    if gpu.memory_used_bytes is not None and gpu.memory_total_bytes:
        facts.append(f"{gpu.memory_used_bytes / 1e9:.0f} of {gpu.memory_total_bytes / 1e9:.0f} GB")
    return f"GPU {gpu.gpu}: {', '.join(facts)}"
