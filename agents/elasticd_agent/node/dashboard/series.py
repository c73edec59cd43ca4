"""Two drawings of a job's course: the numbers that its script logs, and the step times of its ranks. Pure."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from elasticd_agent.node.api.schema import RankSteps, ScalarSeries
from elasticd_agent.node.dashboard import formatting
from elasticd_agent.node.dashboard.markup import Child, Html, tag

WIDTH, HEIGHT, LEFT, BASE = 320, 120, 6, 98
MAX_ROWS = 32
"""Of more ranks, the slowest are drawn."""
ROW, NAMES = 14, 52
LEVELS = (1.15, 1.5, 2.5, 5.0)
"""Step times above these many medians are drawn in the next colour."""


def scalar_charts(found: Sequence[ScalarSeries]) -> Child:
    drawn = [_scalar(one) for one in found if one.points]
    if not drawn:
        return tag("p", "The script logs none: session.log(loss=loss).", class_="quiet")
    return tag("div", drawn, class_="numbers")


def _scalar(one: ScalarSeries) -> Html:
    steps, values = zip(*one.points, strict=True)
    low, high, first, last = min(values), max(values), steps[0], steps[-1]
    span, width = (high - low) or 1.0, (last - first) or 1
    places = [
        f"{LEFT + (WIDTH - 2 * LEFT) * (step - first) / width:.1f},{BASE - 80 * (value - low) / span:.1f}"
        for step, value in one.points
    ]
    title = f"{one.name}: {values[-1]:.6g} at step {last:,}, between {low:.6g} and {high:.6g}"
    return tag(
        "div",
        tag("h3", one.name, " ", tag("span", f"{values[-1]:.6g}", class_="quiet")),
        tag(
            "svg",
            tag("title", title),
            tag("line", x1=LEFT, x2=WIDTH - LEFT, y1=BASE, y2=BASE, class_="grid"),
            tag("polyline", points=" ".join(places), class_="rate"),
            tag("text", f"{high:.4g}", x=LEFT, y=12),
            tag("text", f"{low:.4g}", x=LEFT, y=BASE - 4),
            tag("text", f"step {first:,}", x=LEFT, y=HEIGHT - 6),
            tag("text", f"{last:,}", x=WIDTH - LEFT, y=HEIGHT - 6, class_="number"),
            viewBox=f"0 0 {WIDTH} {HEIGHT}",
            role="img",
            class_="chart",
        ),
    )


@dataclass(frozen=True, slots=True)
class _Span:
    """A stretch of a rank's time."""

    begin: float
    end: float
    step_s: float | None
    """None: it made no step."""


def step_times(found: Sequence[RankSteps], width: int = 900) -> Child:
    """A row for each rank: the darker, the longer its steps took against the median of all."""
    rows = {one.rank: _spans(one) for one in found if len(one.points) > 1}
    known = [span.step_s for spans in rows.values() for span in spans if span.step_s is not None]
    if not known:
        return tag("p", "Nothing was measured in this round yet.", class_="quiet")
    usual = median(known)
    worst = sorted(rows, key=lambda rank: -_typical(rows[rank], usual))
    shown = sorted(worst[:MAX_ROWS])
    begin = min(spans[0].begin for spans in rows.values())
    end = max(spans[-1].end for spans in rows.values())
    scale = (width - NAMES) / max(end - begin, 1e-3)
    drawn = [_row(rank, rows[rank], y * ROW, begin, scale, usual) for y, rank in enumerate(shown)]
    title = f"Step times of {len(shown)} of {len(rows)} ranks, {formatting.clock(begin)} to {formatting.clock(end)}"
    most = formatting.step_time(_typical(rows[worst[0]], usual))
    slowest = f"The median is {formatting.step_time(usual)}; rank {worst[0]} is the slowest with {most}."
    svg = tag(
        "svg",
        tag("title", title),
        tag("desc", slowest),
        drawn,
        viewBox=f"0 0 {width} {len(shown) * ROW}",
        role="img",
        class_="chart",
    )
    keys = [tag("span", tag("i", class_=f"key h{level}"), text) for level, text in enumerate(_legend(usual))]
    drawing = tag("div", svg, class_="drawn", tabindex="0", role="region", aria_label="Step times")
    return [drawing, tag("p", keys, class_="legend"), tag("p", slowest, class_="quiet")]


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


def _row(rank: int, spans: Sequence[_Span], y: int, begin: float, scale: float, usual: float) -> list[Html]:
    """Neighbours of one colour are one box."""
    boxes = [tag("text", f"rank {rank}", x=0, y=y + ROW - 3)]
    for level, alike in itertools.groupby(spans, key=lambda span: _level(span, usual)):
        together = list(alike)
        left, right = (NAMES + scale * (at - begin) for at in (together[0].begin, together[-1].end))
        width = round(max(0.5, right - left), 1)
        boxes.append(tag("rect", x=round(left, 1), y=y, width=width, height=ROW - 2, class_=f"h{level}"))
    return boxes


def _level(span: _Span, usual: float) -> int:
    if span.step_s is None:
        return len(LEVELS) + 1
    return sum(span.step_s > level * usual for level in LEVELS)
