"""A job's history as one drawing: the step rate, and below it each round with its number of workers. Pure.

Time without a step is part of the rate, so that even a short fault is a dent; the gap between two blocks is the cost of
a fault.
"""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from elasticd_agent.model.phrases import count
from elasticd_agent.system.durations import in_words
from elasticd_daemon.api.schema import JobStatus, RoundStatus, StepSample
from elasticd_daemon.dashboard import formatting

WIDTH, LEFT, RIGHT = 960, 56, 12
TOP, RATE_H, GAP, BLOCKS_H, AXIS = 22, 130, 30, 40, 22
HEIGHT = TOP + RATE_H + GAP + BLOCKS_H + AXIS
_GEOMETRY = {
    "width": WIDTH, "height": HEIGHT, "left": LEFT, "right": WIDTH - RIGHT, "top": TOP, "middle": TOP + RATE_H / 2,
    "base": TOP + RATE_H, "floor": TOP + RATE_H + GAP + BLOCKS_H,
}  # fmt: skip
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


@dataclass(frozen=True, slots=True)
class Shape:
    """Something of one round. Where its height is 0, it is as high as the drawing."""

    title: str
    x: float
    width: float
    kind: str
    height: float = 0.0
    label: str = ""


@dataclass(frozen=True, slots=True)
class Chart:
    """What templates/drawings.html draws."""

    title: str
    description: str
    labels: Sequence[tuple[str, float]]
    """Of the axes: text, y."""
    ticks: Sequence[tuple[float, str]]
    """x and time of day, from the end."""
    areas: Sequence[tuple[str, str]]
    """Of each stretch of known columns: the points around what is below it, and of its outline."""
    lost: Sequence[Shape]
    blocks: Sequence[Shape]
    marks: Sequence[Shape]
    geometry: Mapping[str, float]


def chart(job: JobStatus, now: float, seconds: float | None) -> Chart:
    shown = window(job, now, seconds)
    found = rates(points(job), shown, live=not job.ended)
    most = _round_up(max((one for one in found if one is not None), default=0.0))
    progress = job.known
    newest = progress.newest_round
    rounds = [one for one in progress.rounds if (one.ended_at or shown.until) >= shown.since or one is newest]
    size = max([one.world_size for one in rounds], default=1) or 1
    blocks = (_block(one, rounds, shown, size) for one in rounds)
    return Chart(
        title=f"Step rate and rounds of {job.job}, {formatting.clock(shown.since)} to {formatting.clock(shown.until)}",
        description=_description(found, rounds),
        labels=_labels(most, size),
        ticks=_ticks(shown),
        areas=_areas(found, most),
        lost=[_lost(one, shown) for one in rounds if one.lost_seconds],
        blocks=[block for block in blocks if block is not None],
        marks=[_mark(one, shown) for one in rounds[-MAX_MARKS:] if one.at > shown.since],
        geometry=_GEOMETRY,
    )


def _description(found: Sequence[float | None], rounds: Sequence[RoundStatus]) -> str:
    known = [one for one in found if one is not None]
    if not known:
        return "No step in this time."
    fastest, last = formatting.rate(max(known)), formatting.rate(known[-1])
    return f"{fastest} at most, {last} at the end, in {count(len(rounds), 'round')}; see the list of rounds."


def _labels(most: float, size: int) -> list[tuple[str, float]]:
    base = TOP + RATE_H
    rates = [("steps/s", TOP - 9), (_short(most), TOP + 4), (_short(most / 2), TOP + RATE_H / 2 + 4), ("0", base + 4)]
    return [*rates, ("workers", base + GAP - 7), (str(size), base + GAP + 9)]


def _ticks(shown: TimeWindow) -> list[tuple[float, str]]:
    span = shown.until - shown.since
    every = next((tick for tick in _TICKS if span / tick <= 8), span / 6)
    # Counted back from the end: a tick keeps its place while the window only grows.
    times = (shown.until - back * every for back in itertools.count())
    return [(shown.x(at), formatting.clock(at)) for at in itertools.takewhile(lambda at: at > shown.since, times)]


def _areas(found: Sequence[float | None], most: float) -> list[tuple[str, str]]:
    base, width = TOP + RATE_H, (WIDTH - LEFT - RIGHT) / COLUMNS
    drawn: list[tuple[str, str]] = []
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
        drawn.append((" ".join([low, *path, high]), " ".join(path)))
    return drawn


def _block(one: RoundStatus, rounds: Sequence[RoundStatus], shown: TimeWindow, size: int) -> Shape | None:
    """From its first step to its last, as high as its number of workers; an outline before the first step."""
    after = next((later for later in rounds if later.round > one.round), None)
    ends = [at for at in (one.ended_at, after.at if after is not None else None) if at is not None]
    until = min(ends, default=shown.until)
    begin = one.first_step_at if one.first_step_at is not None else one.at
    left, right = shown.x(begin), shown.x(until)
    if right <= LEFT:
        return None
    wide = max(1.5, right - left - 0.5)
    return Shape(
        f"Round {one.round}, {count(one.world_size, 'worker')}: {one.reason}",
        left,
        wide,
        "block" if one.first_step_at is not None else "block none",
        round(BLOCKS_H * min(1.0, one.world_size / size), 1),
        f"{one.round}" if wide > 9 * len(str(one.round)) + 6 else "",
    )


def _lost(one: RoundStatus, shown: TimeWindow) -> Shape:
    """From the last step of the round before to the first step of this one."""
    assert one.lost_seconds is not None
    until = one.first_step_at if one.first_step_at is not None else shown.until
    left, right = shown.x(until - one.lost_seconds), shown.x(until)
    kind = "pause" if one.planned else "lost"
    return Shape(f"{in_words(one.lost_seconds)} without a step", left, max(0.0, round(right - left, 1)), kind)


def _mark(one: RoundStatus, shown: TimeWindow) -> Shape:
    title = f"{formatting.clock(one.at)} round {one.round}: {one.reason}"
    return Shape(title, shown.x(one.at), 0.0, "planned" if one.planned else "fault")


def _round_up(value: float) -> float:
    """The next number that is easy to read off an axis."""
    if value <= 0:
        return 1.0
    power = 10.0 ** math.floor(math.log10(value))
    return next(step for step in (1, 1.2, 1.6, 2, 2.4, 3, 4, 5, 6, 8, 10, 20) if step * power >= value * 0.999) * power


def _short(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
