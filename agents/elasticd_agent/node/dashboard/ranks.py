"""The ranks as a grid, node by node: phase, step, and for how long nothing of one has moved. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from elasticd_agent.node.dashboard import format as words
from elasticd_agent.node.dashboard.decode import Job, Place, Rank
from elasticd_agent.node.dashboard.layout import chip
from elasticd_agent.node.dashboard.markup import Child, Html, tag

STILL_S = 5.0
"""Somebody who has not moved for so long is pointed out: the shortest time after which a hang is suspected."""
_STEPS = 10
"""… if that is longer than so many steps take."""


def condition(rank: Rank, job: Job) -> tuple[str, str]:
    """What is shown of it in a word or two, and whether that is good, busy or bad."""
    if rank.exited:
        return "done", "idle"
    if rank.state in ("T", "t"):
        return "stopped", "bad"
    if rank.state in ("Z", "X"):
        return "dead", "bad"
    phase = f"at barrier {rank.barrier}" if rank.phase == "barrier" and rank.barrier else rank.phase or "unknown"
    still = rank.idle_s > max(STILL_S, _STEPS / job.rate if job.rate else 0.0)
    if rank.state == "D" and still:
        return f"{phase}, blocked", "bad"
    if still and rank.phase == "step":
        return f"{phase}, still", "warn"
    return phase, "good" if rank.phase == "step" else "busy"


def grid(job: Job) -> Child:
    """One box for each node of the round, with its ranks; who said nothing is named."""
    names = list(dict.fromkeys([*job.nodes, *(rank.node for rank in job.ranks)]))
    places = {place.node: place for place in job.places}
    silent = dict(job.silent)
    behind = max((rank.step for rank in job.ranks), default=0)
    return tag(
        "div",
        [
            _node(name, places.get(name), silent.get(name, ""), [r for r in job.ranks if r.node == name], job, behind)
            for name in names
        ],
        class_="grid-of-nodes",
    )


def _node(name: str, place: Place | None, silent: str, ranks: Sequence[Rank], job: Job, behind: int) -> Html:
    why = silent or (place.why if place is not None else "")
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


def _cell(rank: Rank, job: Job, most: int) -> Html:
    word, kind = condition(rank, job)
    behind = f" ({most - rank.step:,} behind)" if most - rank.step > 1 and rank.phase != "starting" else ""
    return tag(
        "li",
        tag("span", tag("span", "rank ", class_="quiet"), str(rank.rank), class_="which"),
        tag("span", word, class_="word"),
        tag("span", f"step {rank.step:,}{behind}", class_="step"),
        tag("span", f"moved {words.span(rank.idle_s)} ago", class_="age"),
        class_=f"rank {kind}",
    )
