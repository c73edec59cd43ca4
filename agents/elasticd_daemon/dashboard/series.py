"""Two drawings of a job's course: the numbers that its script logs, and the step times of its ranks. Pure."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from elasticd_daemon.api.schema import RankSteps, ScalarSeries
from elasticd_daemon.dashboard import formatting

WIDTH, LEFT, BASE = 320, 6, 98
MAX_ROWS = 32
"""Of more ranks, the slowest are drawn."""
NAMES = 52
"""The width of the ranks' names."""
LEVELS = (1.15, 1.5, 2.5, 5.0)
"""Step times above these many medians are drawn in the next colour."""


@dataclass(frozen=True, slots=True)
class ScalarChart:
    name: str
    title: str
    newest: str
    high: str
    low: str
    first: int
    last: int
    """Steps."""
    points: str


def scalar_chart(one: ScalarSeries) -> ScalarChart:
    steps, values = zip(*one.points, strict=True)
    low, high, first, last = min(values), max(values), steps[0], steps[-1]
    span, width = (high - low) or 1.0, (last - first) or 1
    places = [
        f"{LEFT + (WIDTH - 2 * LEFT) * (step - first) / width:.1f},{BASE - 80 * (value - low) / span:.1f}"
        for step, value in one.points
    ]
    title = f"{one.name}: {values[-1]:.6g} at step {last:,}, between {low:.6g} and {high:.6g}"
    newest = f"{values[-1]:.6g}"
    return ScalarChart(one.name, title, newest, f"{high:.4g}", f"{low:.4g}", first, last, " ".join(places))


@dataclass(frozen=True, slots=True)
class _Span:
    """A stretch of a rank's time."""

    begin: float
    end: float
    step_s: float | None
    """None: it made no step."""


@dataclass(frozen=True, slots=True)
class StepTimes:
    title: str
    slowest: str
    rows: Sequence[tuple[int, Sequence[tuple[float, float, int]]]]
    """Of each rank: x, width and level of its boxes."""
    legend: Sequence[str]
    """By level."""
    width: int


def step_times(found: Sequence[RankSteps], width: int = 900) -> StepTimes | None:
    """A row for each rank: the darker, the longer its steps took against the median of all. None: nothing is known."""
    rows = {one.rank: _spans(one) for one in found if len(one.points) > 1}
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
    return StepTimes(
        title=f"Step times of {len(shown)} of {len(rows)} ranks, {formatting.clock(begin)} to {formatting.clock(end)}",
        slowest=f"The median is {formatting.step_time(usual)}; rank {worst[0]} is the slowest with {most}.",
        rows=[(rank, _boxes(rows[rank], begin, scale, usual)) for rank in shown],
        legend=_legend(usual),
        width=width,
    )


def _legend(usual: float) -> list[str]:
    ends = [formatting.step_time(level * usual) for level in LEVELS]
    return [f"up to {ends[0]} a step", *(f"to {end}" for end in ends[1:]), "longer", "no step"]


def _spans(one: RankSteps) -> list[_Span]:
    spans = []
    for (then, low), (now, high) in itertools.pairwise(one.points):
        if now > then:
            spans.append(_Span(then, now, (now - then) / (high - low) if high > low else None))
    return spans or [_Span(one.points[0][0], one.points[0][0], None)]


def _typical(spans: Sequence[_Span], usual: float) -> float:
    """Of one rank: its median, as `usual` is that of all. The slowest rank's is then never below it."""
    known = [span.step_s for span in spans if span.step_s is not None]
    return median(known) if known else 100 * usual


def _boxes(spans: Sequence[_Span], begin: float, scale: float, usual: float) -> list[tuple[float, float, int]]:
    """Neighbours of one colour are one box."""
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
