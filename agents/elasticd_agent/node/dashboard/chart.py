"""A job's history as one drawing: the step rate, and below it each round with its number of workers. Pure.

It is SVG made by the agent, so that a page without a script shows it, too. Time without a step is part of the rate, so
that even a short fault is a dent; the gap between two blocks is the cost of a fault.
"""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

from elasticd_agent.model.phrases import count
from elasticd_agent.node.api.schema import JobStatus, RoundStatus, StepSample
from elasticd_agent.node.dashboard import formatting
from elasticd_agent.node.dashboard.markup import Html, tag
from elasticd_agent.system.durations import in_words

WIDTH, LEFT, RIGHT = 960, 56, 12
TOP, RATE_H, GAP, BLOCKS_H, AXIS = 22, 130, 30, 40, 22
HEIGHT = TOP + RATE_H + GAP + BLOCKS_H + AXIS
COLUMNS = 180
MAX_MARKS = 40
"""Of more rounds in the window only the newest are marked with a line."""
_TICKS = (1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 10800, 21600, 43200, 86400, 172800, 604800)
_LAST_RATE_HOLDS = 2.5
"""A rate holds after its last point for this many times the distance of its last two points."""
_MIN_POINT_GAP_S = 1.0
"""Two nearer points give no rate."""


@dataclass(frozen=True, slots=True)
class TimeWindow:
    since: float
    until: float

    def x(self, at: float) -> float:
        share = (at - self.since) / (self.until - self.since)
        return round(LEFT + (WIDTH - LEFT - RIGHT) * min(1.0, max(0.0, share)), 1)


def window(job: JobStatus, now: float, seconds: float | None) -> TimeWindow:
    """From the job's start, or for the last `seconds`, until now or its end."""
    until = job.ended_at if job.ended_at is not None else now
    progress = job.known
    starts = [at for at in (progress.started_at, progress.rounds[0].at if progress.rounds else None) if at]
    since = min(starts, default=until - 60.0)
    if seconds is not None:
        since = max(since, until - seconds)
    return TimeWindow(min(since, until - 10.0), until)


def points(job: JobStatus) -> tuple[StepSample, ...]:
    """Steps over time: the runner's samples, and each round's first and last step from the event log."""
    found = list(job.known.step_samples)
    for one in job.known.rounds:
        if one.first_step_at is not None and one.first_step is not None:
            found.append((one.first_step_at, one.round, one.first_step))
            over = one.ended_at if one.ended_at is not None else job.ended_at
            if over is not None and one.last_step is not None and over > one.first_step_at:
                found.append((over, one.round, max(one.last_step, one.first_step)))
    kept: list[StepSample] = []
    for at, number, step in sorted(found):
        if not kept or number > kept[-1][1]:
            kept.append((at, number, step))
        # Samples and log may come from two hosts with different clocks: within a round steps only grow.
        elif number == kept[-1][1] and step >= kept[-1][2]:
            near = at - kept[-1][0] < _MIN_POINT_GAP_S
            first = len(kept) == 1 or kept[-2][1] != number
            if near and not first:
                kept.pop()
            if not (near and first):
                kept.append((at, number, step))
    return tuple(kept)


def rates(samples: Sequence[StepSample], shown: TimeWindow, live: bool, columns: int = COLUMNS) -> list[float | None]:
    """Steps per second in each of `columns` equal parts of the window; None where nothing is known.

    Steps are spread evenly between two samples of a round; between two rounds there are none. `live`: the newest sample
    is not the end.
    """
    pieces: list[tuple[float, float, float]] = []  # from, to, steps per second
    for (then, first, low), (at, number, high) in itertools.pairwise(samples):
        if at > then:
            same = first == number and high >= low
            pieces.append((then, at, (high - low) / (at - then) if same else 0.0))
    if live and pieces:
        then, at, last = pieces[-1]
        holds = min(shown.until, at + _LAST_RATE_HOLDS * max(at - then, 2.0))
        pieces += [(at, holds, last), (holds, shown.until, 0.0)]
    width = (shown.until - shown.since) / columns
    ends = [end for _, end, _ in pieces]
    found: list[float | None] = []
    for column in range(columns):
        begin = shown.since + column * width
        steps = known = 0.0
        for then, at, rate in pieces[bisect.bisect_right(ends, begin) :]:
            if then >= begin + width:
                break
            overlap = max(0.0, min(at, begin + width) - max(then, begin))
            steps += rate * overlap
            known += overlap
        found.append(steps / known if known > 0.2 * width else None)
    return found


def chart(job: JobStatus, now: float, seconds: float | None) -> Html:
    """The drawing, or nothing before the first step."""
    shown = window(job, now, seconds)
    found = rates(points(job), shown, live=not job.ended)
    most = _round_up(max((one for one in found if one is not None), default=0.0))
    progress = job.known
    newest = progress.newest_round
    rounds = [one for one in progress.rounds if (one.ended_at or shown.until) >= shown.since or one is newest]
    size = max([one.world_size for one in rounds], default=1) or 1
    return tag(
        "svg",
        tag(
            "title",
            f"Step rate and rounds of {job.job}, {formatting.clock(shown.since)} to {formatting.clock(shown.until)}",
        ),
        tag("desc", _description(found, rounds)),
        [_lost(one, shown) for one in rounds if one.lost_seconds],
        _grid(shown, most, size),
        _area(found, shown, most),
        [_block(one, rounds, shown, size) for one in rounds],
        [_mark(one, shown) for one in rounds[-MAX_MARKS:] if one.at > shown.since],
        viewBox=f"0 0 {WIDTH} {HEIGHT}",
        role="img",
        class_="chart",
    )


def _description(found: Sequence[float | None], rounds: Sequence[RoundStatus]) -> str:
    known = [one for one in found if one is not None]
    if not known:
        return "No step in this time."
    fastest, last = formatting.rate(max(known)), formatting.rate(known[-1])
    return f"{fastest} at most, {last} at the end, in {count(len(rounds), 'round')}; see the list of rounds."


def _grid(shown: TimeWindow, most: float, size: int) -> list[Html]:
    base, floor = TOP + RATE_H, TOP + RATE_H + GAP + BLOCKS_H
    lines = [
        tag("line", x1=LEFT, x2=WIDTH - RIGHT, y1=y, y2=y, class_="grid")
        for y in (TOP, TOP + RATE_H / 2, base)
    ]  # fmt: skip
    lines += [
        tag("text", "steps/s", x=LEFT - 6, y=TOP - 9, class_="number"),
        tag("text", _short(most), x=LEFT - 6, y=TOP + 4, class_="number"),
        tag("text", _short(most / 2), x=LEFT - 6, y=TOP + RATE_H / 2 + 4, class_="number"),
        tag("text", "0", x=LEFT - 6, y=base + 4, class_="number"),
        tag("text", "workers", x=LEFT - 6, y=base + GAP - 7, class_="number"),
        tag("text", str(size), x=LEFT - 6, y=base + GAP + 9, class_="number"),
    ]
    span = shown.until - shown.since
    every = next((tick for tick in _TICKS if span / tick <= 8), span / 6)
    # Counted back from the end: a tick keeps its place while the window only grows.
    back, at = 0, shown.until
    while at > shown.since:
        x = shown.x(at)
        anchor = "end" if back == 0 else "middle"
        lines.append(tag("line", x1=x, x2=x, y1=floor + 2, y2=floor + 6, class_="tick"))
        if x > LEFT + 30:
            lines.append(tag("text", formatting.clock(at), x=x, y=floor + 19, text_anchor=anchor, class_="time"))
        back += 1
        at = shown.until - back * every
    return lines


def _area(found: Sequence[float | None], shown: TimeWindow, most: float) -> list[Html]:
    """Each stretch of known columns: what is below it, and its outline."""
    base, width = TOP + RATE_H, (WIDTH - LEFT - RIGHT) / COLUMNS
    drawn: list[Html] = []
    column = 0
    while column < len(found):
        if found[column] is None:
            column += 1
            continue
        first, path = column, []
        while column < len(found) and (value := found[column]) is not None:
            y = base - (RATE_H * value / most if most > 0 else 0.0)
            left = LEFT + column * width
            path += [f"{left:.1f},{y:.1f}", f"{left + width:.1f},{y:.1f}"]
            column += 1
        low, high = f"{LEFT + first * width:.1f},{base}", f"{LEFT + column * width:.1f},{base}"
        drawn.append(tag("polygon", points=" ".join([low, *path, high]), class_="area"))
        drawn.append(tag("polyline", points=" ".join(path), class_="rate"))
    return drawn


def _block(one: RoundStatus, rounds: Sequence[RoundStatus], shown: TimeWindow, size: int) -> list[Html]:
    """From its first step to its last, as high as its number of workers; an outline before the first step."""
    after = next((later for later in rounds if later.round > one.round), None)
    ends = [at for at in (one.ended_at, after.at if after is not None else None) if at is not None]
    until = min(ends, default=shown.until)
    begin = one.first_step_at if one.first_step_at is not None else one.at
    left, right = shown.x(begin), shown.x(until)
    if right <= LEFT:
        return []
    floor = TOP + RATE_H + GAP + BLOCKS_H
    height = round(BLOCKS_H * min(1.0, one.world_size / size), 1)
    kind = "block" if one.first_step_at is not None else "block none"
    wide = max(1.5, right - left - 0.5)
    label = f"{one.round}" if wide > 9 * len(str(one.round)) + 6 else ""
    title = f"Round {one.round}, {count(one.world_size, 'worker')}: {one.reason}"
    return [
        tag(
            "g",
            tag("title", title),
            tag("rect", x=left, y=floor - height, width=round(wide, 1), height=height, rx=2, class_=kind),
            tag("text", label, x=round(left + wide / 2, 1), y=floor - height / 2 + 4, class_="in") if label else None,
        )
    ]


def _lost(one: RoundStatus, shown: TimeWindow) -> Html:
    """From the last step of the round before to the first step of this one."""
    assert one.lost_seconds is not None
    until = one.first_step_at if one.first_step_at is not None else shown.until
    left, right = shown.x(until - one.lost_seconds), shown.x(until)
    title = tag("title", f"{in_words(one.lost_seconds)} without a step")
    height = RATE_H + GAP + BLOCKS_H
    kind = "pause" if one.planned else "lost"
    return tag("rect", title, x=left, y=TOP, width=max(0.0, round(right - left, 1)), height=height, class_=kind)


def _mark(one: RoundStatus, shown: TimeWindow) -> Html:
    x, bottom = shown.x(one.at), TOP + RATE_H + GAP + BLOCKS_H
    kind = "planned" if one.planned else "fault"
    return tag(
        "g",
        tag("title", f"{formatting.clock(one.at)} round {one.round}: {one.reason}"),
        tag("line", x1=x, x2=x, y1=TOP - 4, y2=bottom, class_=f"mark {kind}"),
        tag("path", d=f"M{x - 4},{TOP - 12}h8l-4,7z", class_=f"flag {kind}"),
        tag("rect", x=x - 5, y=TOP - 14, width=10, height=bottom - TOP + 14, class_="touch"),
    )


def _round_up(value: float) -> float:
    """The next number that is easy to read off an axis."""
    if value <= 0:
        return 1.0
    power = 10.0 ** math.floor(math.log10(value))
    return next(step for step in (1, 1.2, 1.6, 2, 2.4, 3, 4, 5, 6, 8, 10, 20) if step * power >= value * 0.999) * power


def _short(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
