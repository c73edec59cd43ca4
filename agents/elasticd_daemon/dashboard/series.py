"""Two drawings of a job's course: the numbers that its script logs, and the step times of its ranks. Pure."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from statistics import median
from typing import NamedTuple

from elasticd_daemon.api.schema import RankSteps, ScalarSeries
from elasticd_daemon.dashboard import formatting

WIDTH, LEFT, BASE = 320, 6, 98
MAX_ROWS = 32
"""The slowest ranks, which are drawn."""
NAMES = 52
LEVELS = (1.15, 1.5, 2.5, 5.0)
"""Step times above these many medians are drawn in the next colour."""


def scalar_chart(series: ScalarSeries) -> dict[str, object]:
    """The values of `numbers` in templates/drawings.html."""
    steps, values = zip(*series.points, strict=True)
    low, high, first, last = min(values), max(values), steps[0], steps[-1]
    span, width = (high - low) or 1.0, (last - first) or 1
    places = [
        f"{LEFT + (WIDTH - 2 * LEFT) * (step - first) / width:.1f},{BASE - 80 * (value - low) / span:.1f}"
        for step, value in series.points
    ]
    newest = f"{values[-1]:.6g}"
    return {
        "name": series.name,
        "title": f"{series.name}: {newest} at step {last:,}, between {low:.6g} and {high:.6g}",
        "newest": newest,
        "high": f"{high:.4g}",
        "low": f"{low:.4g}",
        "first": first,
        "last": last,
        "points": " ".join(places),
    }


class _Span(NamedTuple):
    """A stretch of a rank's time."""

    begin: float
    end: float
    step_s: float | None
    """None: it made no step."""


def step_times(ranks: Sequence[RankSteps], width: int = 900) -> dict[str, object] | None:
    """The values of `step_times` in templates/drawings.html, with a row for each rank: the darker, the longer its steps
    took against the median of all. None: nothing is known.
    """
    rows = {rank.rank: _spans(rank) for rank in ranks if len(rank.points) > 1}
    known = [span.step_s for spans in rows.values() for span in spans if span.step_s is not None]
    if not known:
        return None
    usual = median(known)
    worst = sorted(rows, key=lambda rank: -_typical(rows[rank], usual))
    shown = sorted(worst[:MAX_ROWS])
    begin = min(spans[0].begin for spans in rows.values())
    end = max(spans[-1].end for spans in rows.values())
    scale = (width - NAMES) / max(end - begin, 1e-3)
    most = formatting.step_time(_typical(rows[worst[0]], usual))
    return {
        "title": f"Step times of {len(shown)} of {len(rows)} ranks, "
        f"{formatting.clock(begin)} to {formatting.clock(end)}",
        "slowest": f"The median is {formatting.step_time(usual)}; rank {worst[0]} is the slowest with {most}.",
        "boxes": [(rank, _boxes(rows[rank], begin, scale, usual)) for rank in shown],
        "legend": _legend(usual),
        "width": width,
    }


def _legend(usual: float) -> list[str]:
    ends = [formatting.step_time(level * usual) for level in LEVELS]
    return [f"up to {ends[0]} a step", *(f"to {end}" for end in ends[1:]), "longer", "no step"]


def _spans(rank: RankSteps) -> list[_Span]:
    spans = []
    for (then, low), (now, high) in itertools.pairwise(rank.points):
        if now > then:
            spans.append(_Span(then, now, (now - then) / (high - low) if high > low else None))
    return spans or [_Span(rank.points[0][0], rank.points[0][0], None)]


def _typical(spans: Sequence[_Span], usual: float) -> float:
    """The median of one rank, as `usual` is that of all. The slowest rank's is then never below it."""
    known = [span.step_s for span in spans if span.step_s is not None]
    return median(known) if known else 100 * usual


def _boxes(spans: Sequence[_Span], begin: float, scale: float, usual: float) -> list[tuple[float, float, int]]:
    """The x, width and level of a rank's boxes; neighbours of one colour are one box."""
    boxes = []
    for level, alike in itertools.groupby(spans, key=lambda span: _level(span, usual)):
        together = list(alike)
        left, right = (NAMES + scale * (at - begin) for at in (together[0].begin, together[-1].end))
        boxes.append((round(left, 1), round(max(0.5, right - left), 1), level))
    return boxes


def _level(span: _Span, usual: float) -> int:
    if span.step_s is None:
        return len(LEVELS) + 1
    return sum(span.step_s > level * usual for level in LEVELS)
