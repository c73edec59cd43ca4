"""The ranks as a grid, node by node: phase, step, and the time since their last progress. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from elasticd_agent.model.phrases import count
from elasticd_agent.node.api.schema import AssignmentStatus, GpuStatus, JobProgress, JobStatus, RankProgress
from elasticd_agent.node.dashboard.layout import chip
from elasticd_agent.node.dashboard.markup import Child, Html, tag
from elasticd_agent.system.durations import in_words

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


def grid(job: JobStatus) -> Child:
    """A box for each node of the round, with its ranks; a node that did not answer is named."""
    progress = job.known
    shown = sorted(progress.ranks, key=lambda rank: -rank.idle_seconds)[:MAX_RANKS]
    ranks: dict[str, list[RankProgress]] = {}
    for rank in sorted(shown, key=lambda rank: rank.rank):
        ranks.setdefault(rank.node, []).append(rank)
    more = len(progress.ranks) - len(shown)
    names = dict.fromkeys([*(() if more else job.nodes), *progress.unreachable, *ranks])
    assigned = {one.node: one for one in job.assignments}
    boxes = [_node(name, assigned.get(name), progress, ranks.get(name, ())) for name in names]
    rest = tag("p", f"and {count(more, 'more rank')} with newer progress", class_="below") if more else None
    return [tag("div", boxes, class_="grid-of-nodes"), rest]


def _node(name: str, assigned: AssignmentStatus | None, progress: JobProgress, ranks: Sequence[RankProgress]) -> Html:
    problem = progress.unreachable.get(name, "")
    reason = problem or (assigned.reason if assigned is not None else "")
    gpus = [_gpu(one) for one in progress.gpus if one.node == name]
    state = "unreachable" if problem else assigned.state if assigned is not None else ""
    return tag(
        "div",
        tag("h3", name, " ", chip(state, _STATE_STYLES.get(state, "busy")) if state else None),
        tag("p", reason, class_="quiet") if reason else None,
        tag("p", " · ".join(gpus), class_="quiet") if gpus else None,
        tag("ul", [_cell(rank, progress) for rank in ranks], class_="ranks") if ranks else None,
        tag("p", _absent(progress), class_="quiet") if not ranks and not problem else None,
        class_="of-node",
    )


def _absent(progress: JobProgress) -> str:
    why = progress.runner_problem
    return f"The runner does not answer: {why}" if progress.round and why else "No workers at this moment."


def _gpu(one: GpuStatus) -> str:
    """ "GPU 0: 97 %, 61 of 80 GB"."""
    facts = [] if one.utilization_percent is None else [f"{one.utilization_percent} %"]
    if one.memory_used_bytes is not None and one.memory_total_bytes:
        facts.append(f"{one.memory_used_bytes / 1e9:.0f} of {one.memory_total_bytes / 1e9:.0f} GB")
    return f"GPU {one.gpu}: {', '.join(facts)}"


def _cell(rank: RankProgress, progress: JobProgress) -> Html:
    word, style = condition(rank, progress)
    missing = max(one.step for one in progress.ranks) - rank.step
    behind = f" ({missing:,} behind)" if missing > 1 and rank.phase != "starting" else ""
    return tag(
        "li",
        tag("span", tag("span", "rank ", class_="quiet"), str(rank.rank), class_="which"),
        tag("span", word, class_="word"),
        tag("span", f"step {rank.step:,}{behind}", class_="step"),
        tag("span", f"progress {in_words(rank.idle_seconds)} ago", class_="age"),
        class_=f"rank {style}",
    )
