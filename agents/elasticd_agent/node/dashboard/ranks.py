"""The ranks as a grid, node by node: phase, step, and for how long nothing of one has moved. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from elasticd_agent.node.dashboard.decode import AssignmentStatus, JobStatus, RankProgress
from elasticd_agent.node.dashboard.layout import chip
from elasticd_agent.node.dashboard.markup import Child, Html, tag
from elasticd_agent.system.durations import in_words

STALLED_S = 5.0
"""Somebody who has not moved for so long is pointed out: the shortest time after which a hang is suspected."""
_STALLED_STEPS = 10
"""… if that is longer than so many steps take."""


def condition(rank: RankProgress, job: JobStatus) -> tuple[str, str]:
    """What is shown of it in a word or two, and whether that is good, busy or bad."""
    if rank.exited:
        return "done", "idle"
    if rank.state in ("T", "t"):
        return "stopped", "bad"
    if rank.state in ("Z", "X"):
        return "dead", "bad"
    phase = f"at barrier {rank.barrier}" if rank.phase == "barrier" and rank.barrier else rank.phase or "unknown"
    still = rank.idle_s > max(STALLED_S, _STALLED_STEPS / job.rate if job.rate else 0.0)
    if rank.state == "D" and still:
        return f"{phase}, blocked", "bad"
    if still and rank.phase == "step":
        return f"{phase}, still", "warn"
    return phase, "good" if rank.phase == "step" else "busy"


def grid(job: JobStatus) -> Child:
    """One box for each node of the round, with its ranks; who said nothing is named."""
    names = list(dict.fromkeys([*job.nodes, *(rank.node for rank in job.ranks)]))
    places = {place.node: place for place in job.assignments}
    silent = dict(job.unreachable_nodes)
    behind = max((rank.step for rank in job.ranks), default=0)
    return tag(
        "div",
        [
            _node(name, places.get(name), silent.get(name, ""), [r for r in job.ranks if r.node == name], job, behind)
            for name in names
        ],
        class_="grid-of-nodes",
    )


def _node(
    name: str, place: AssignmentStatus | None, silent: str, ranks: Sequence[RankProgress], job: JobStatus, behind: int
) -> Html:
    why = silent or (place.reason if place is not None else "")
    state = "silent" if silent else place.state if place is not None else ""
    kinds = {"running": "good", "silent": "bad", "away": "bad", "refused": "bad"}
    return tag(
        "div",
        tag("h3", name, " ", chip(state, kinds.get(state, "busy")) if state else None),
        tag("p", why, class_="quiet") if why else None,
        tag("ul", [_cell(rank, job, behind) for rank in ranks], class_="ranks") if ranks else None,
        tag("p", "No workers at this moment.", class_="quiet") if not ranks and not silent else None,
        class_="of-node",
    )


def _cell(rank: RankProgress, job: JobStatus, most: int) -> Html:
    word, kind = condition(rank, job)
    behind = f" ({most - rank.step:,} behind)" if most - rank.step > 1 and rank.phase != "starting" else ""
    return tag(
        "li",
        tag("span", tag("span", "rank ", class_="quiet"), str(rank.rank), class_="which"),
        tag("span", word, class_="word"),
        tag("span", f"step {rank.step:,}{behind}", class_="step"),
        tag("span", f"moved {in_words(rank.idle_s)} ago", class_="age"),
        class_=f"rank {kind}",
    )
