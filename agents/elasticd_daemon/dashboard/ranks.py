"""The ranks as a grid, node by node: phase, step, and the time since their last progress. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from elasticd_daemon.api.schema import AssignmentStatus, GpuStatus, JobProgress, JobStatus, RankProgress

MAX_RANKS = 128
"""Of more ranks, those with the oldest progress are shown."""
STALLED_S = 5.0
"""A rank without progress for this long is marked: the shortest time after which a hang is suspected."""
_STALLED_STEPS = 10
"""Of slow steps a rank may miss this many."""
_STATE_STYLES = {"running": "good", "unreachable": "bad", "offline": "bad", "refused": "bad"}


def condition(rank: RankProgress, progress: JobProgress) -> tuple[str, str]:
    """A word or two about the rank, and their style: good, busy, warn, bad or idle."""
    if rank.exited:
        return "done", "idle"
    if rank.state in ("T", "t"):
        return "stopped", "bad"
    if rank.state in ("Z", "X"):
        return "dead", "bad"
    phase = f"at barrier {rank.barrier}" if rank.phase == "barrier" and rank.barrier else rank.phase or "unknown"
    rate = progress.steps_per_second
    is_stalled = rank.idle_seconds > max(STALLED_S, _STALLED_STEPS / rate if rate else 0.0)
    if rank.state == "D" and is_stalled:
        return f"{phase}, blocked", "bad"
    if is_stalled and rank.phase == "step":
        return f"{phase}, stalled", "warn"
    return phase, "good" if rank.phase == "step" else "busy"


@dataclass(frozen=True, slots=True)
class NodeBox:
    """A node of the round with its ranks, each with a word and its style; one that did not answer is named."""

    name: str
    state: str
    style: str
    reason: str
    gpus: Sequence[str]
    ranks: Sequence[tuple[RankProgress, str, str]]
    absent: str
    """Why it has no ranks."""


def grid(job: JobStatus) -> tuple[list[NodeBox], int]:
    """The boxes, and how many more ranks there are."""
    progress = job.known
    shown = sorted(progress.ranks, key=lambda rank: -rank.idle_seconds)[:MAX_RANKS]
    ranks: dict[str, list[RankProgress]] = {}
    for rank in sorted(shown, key=lambda rank: rank.rank):
        ranks.setdefault(rank.node, []).append(rank)
    more = len(progress.ranks) - len(shown)
    names = dict.fromkeys([*(() if more else job.nodes), *progress.unreachable, *ranks])
    assigned = {one.node: one for one in job.assignments}
    return [_box(name, assigned.get(name), progress, ranks.get(name, ())) for name in names], more


def _box(name: str, assigned: AssignmentStatus | None, progress: JobProgress, ranks: Sequence[RankProgress]) -> NodeBox:
    problem = progress.unreachable.get(name, "")
    state = "unreachable" if problem else assigned.state if assigned is not None else ""
    return NodeBox(
        name,
        state,
        _STATE_STYLES.get(state, "busy"),
        problem or (assigned.reason if assigned is not None else ""),
        [_gpu(one) for one in progress.gpus if one.node == name],
        [(rank, *condition(rank, progress)) for rank in ranks],
        _absent(progress) if not ranks and not problem else "",
    )


def behind(rank: RankProgress, progress: JobProgress) -> str:
    missing = max(one.step for one in progress.ranks) - rank.step
    return f" ({missing:,} behind)" if missing > 1 and rank.phase != "starting" else ""


def _absent(progress: JobProgress) -> str:
    why = progress.runner_problem
    return f"The runner does not answer: {why}" if progress.round and why else "No workers at this moment."


def _gpu(one: GpuStatus) -> str:
    """ "GPU 0: 97 %, 61 of 80 GB"."""
    facts = [] if one.utilization_percent is None else [f"{one.utilization_percent} %"]
    if one.memory_used_bytes is not None and one.memory_total_bytes:
        facts.append(f"{one.memory_used_bytes / 1e9:.0f} of {one.memory_total_bytes / 1e9:.0f} GB")
    return f"GPU {one.gpu}: {', '.join(facts)}"
