"""The drawing of a job's course: its step rate, and below it each round with its number of workers. Pure.

Time without a step is part of the rate, so that even a short fault is a dent; the gap between two blocks is the cost of
a fault.
"""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

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
RATE_COLUMNS = 180
MAX_ROUND_MARKS = 40
"""The newest rounds of the window, which are marked with a line."""
_TICK_DISTANCES_S = (
    *(1, 2, 5, 10, 15, 30),
    *(60, 120, 300, 600, 900, 1800),
    *(3600, 7200, 10800, 21600, 43200),
    *(86400, 172800, 604800),
)
_LAST_RATE_FACTOR = 2.5
"""A rate holds after its last point for this many times the distance of its last two points."""
_MIN_POINT_GAP_S = 1.0
"""Two nearer points give no rate."""


@dataclass(frozen=True, slots=True)
class TimeWindow:
    since: float
    until: float

    def x(self, at: float) -> float:
        """Return the horizontal place of a time, within the drawing."""
        share = (at - self.since) / (self.until - self.since)
        return round(LEFT + (WIDTH - LEFT - RIGHT) * min(1.0, max(0.0, share)), 1)


def time_window(job: JobStatus, now: float, seconds: float | None) -> TimeWindow:
    """The time from the job's start, or the last `seconds`, until now or its end."""
    until = job.ended_at if job.ended_at is not None else now
    progress = job.known
    starts = [at for at in (progress.started_at, progress.rounds[0].at if progress.rounds else None) if at]
    since = min(starts, default=until - 60.0)
    if seconds is not None:
        since = max(since, until - seconds)
    return TimeWindow(min(since, until - 10.0), until)


def step_samples(job: JobStatus) -> tuple[StepSample, ...]:
    """Steps over time: the runner's samples, and each round's first and last step from the event log."""
    samples = list(job.known.step_samples)
    for row in job.known.rounds:
        if row.first_step_at is not None and row.first_step is not None:
            samples.append((row.first_step_at, row.round, row.first_step))
            over = row.ended_at if row.ended_at is not None else job.ended_at
            if over is not None and row.last_step is not None and over > row.first_step_at:
                samples.append((over, row.round, max(row.last_step, row.first_step)))
    growing: list[StepSample] = []
    for at, number, step in sorted(samples):
        if not growing or number > growing[-1][1]:
            growing.append((at, number, step))
        # Samples and log may come from two hosts with different clocks: within a round steps only grow.
        elif number == growing[-1][1] and step >= growing[-1][2]:
            near = at - growing[-1][0] < _MIN_POINT_GAP_S
            first = len(growing) == 1 or growing[-2][1] != number
            if near and not first:
                growing.pop()
            if not (near and first):
                growing.append((at, number, step))
    return tuple(growing)


def rates_by_column(
    samples: Sequence[StepSample], shown: TimeWindow, is_live: bool, columns: int = RATE_COLUMNS
) -> list[float | None]:
    """Steps per second in each of `columns` equal parts of the window; None where nothing is known.

    Steps are spread evenly between two samples of a round; between two rounds there are none. `is_live`: the newest
    sample is not the end.
    """
    pieces: list[tuple[float, float, float]] = []  # from, to, steps per second
    for (then, first, low), (at, number, high) in itertools.pairwise(samples):
        if at > then:
            same = first == number and high >= low
            pieces.append((then, at, (high - low) / (at - then) if same else 0.0))
    if is_live and pieces:
        then, at, last = pieces[-1]
        holds = min(shown.until, at + _LAST_RATE_FACTOR * max(at - then, 2.0))
        pieces += [(at, holds, last), (holds, shown.until, 0.0)]
    width = (shown.until - shown.since) / columns
    ends = [end for _, end, _ in pieces]
    column_rates: list[float | None] = []
    for column in range(columns):
        begin = shown.since + column * width
        steps = known = 0.0
        for then, at, rate in pieces[bisect.bisect_right(ends, begin) :]:
            if then >= begin + width:
                break
            overlap = max(0.0, min(at, begin + width) - max(then, begin))
            steps += rate * overlap
            known += overlap
        column_rates.append(steps / known if known > 0.2 * width else None)
    return column_rates


RoundShape = dict[str, str | float]
"""A part of the drawing that stands for a round."""


def chart_values(job: JobStatus, now: float, seconds: float | None) -> dict[str, Any]:
    """The values of `history` in templates/drawings.html."""
    shown = time_window(job, now, seconds)
    column_rates = rates_by_column(step_samples(job), shown, is_live=not job.ended)
    most = _round_up_for_axis(max((rate for rate in column_rates if rate is not None), default=0.0))
    newest = job.known.newest_round
    rounds = [row for row in job.known.rounds if (row.ended_at or shown.until) >= shown.since or row is newest]
    size = max([row.world_size for row in rounds], default=1) or 1
    blocks = (_round_block(row, rounds, shown, size) for row in rounds)
    return {
        "title": f"Step rate and rounds of {job.job}, "
        f"{formatting.clock(shown.since)} to {formatting.clock(shown.until)}",
        "description": _description(column_rates, rounds),
        "labels": _axis_labels(most, size),
        "ticks": _ticks(shown),
        "areas": _areas(column_rates, most),
        "lost": [_lost_time_bar(row, shown) for row in rounds if row.lost_seconds],
        "blocks": [block for block in blocks if block is not None],
        "marks": [_round_mark(row, shown) for row in rounds[-MAX_ROUND_MARKS:] if row.at > shown.since],
        "geometry": _GEOMETRY,
    }


def _description(column_rates: Sequence[float | None], rounds: Sequence[RoundStatus]) -> str:
    """The drawing in a sentence, for readers who do not see it."""
    known = [rate for rate in column_rates if rate is not None]
    if not known:
        return "No step in this time."
    fastest, last = formatting.rate(max(known)), formatting.rate(known[-1])
    return f"{fastest} at most, {last} at the end, in {count(len(rounds), 'round')}; see the list of rounds."


def _axis_labels(most: float, size: int) -> list[tuple[str, float]]:
    base = TOP + RATE_H
    rates = [
        ("steps/s", TOP - 9),
        (_short_number(most), TOP + 4),
        (_short_number(most / 2), TOP + RATE_H / 2 + 4),
        ("0", base + 4),
    ]
    return [*rates, ("workers", base + GAP - 7), (str(size), base + GAP + 9)]


def _ticks(shown: TimeWindow) -> list[tuple[float, str]]:
    """The ticks of the time axis: at most eight, at round distances."""
    span = shown.until - shown.since
    every = next((tick for tick in _TICK_DISTANCES_S if span / tick <= 8), span / 6)
    # Counted back from the end: a tick keeps its place while the window only grows.
    times = (shown.until - back * every for back in itertools.count())
    return [(shown.x(at), formatting.clock(at)) for at in itertools.takewhile(lambda at: at > shown.since, times)]


def _areas(column_rates: Sequence[float | None], most: float) -> list[tuple[str, str]]:
    """The outline of each stretch of known columns: with the base line, and without."""
    base, width = TOP + RATE_H, (WIDTH - LEFT - RIGHT) / RATE_COLUMNS
    drawn: list[tuple[str, str]] = []
    column = 0
    while column < len(column_rates):
        if column_rates[column] is None:
            column += 1
            continue
        first, path = column, []
        while column < len(column_rates) and (value := column_rates[column]) is not None:
            y = base - (RATE_H * value / most if most > 0 else 0.0)
            left = LEFT + column * width
            path += [f"{left:.1f},{y:.1f}", f"{left + width:.1f},{y:.1f}"]
            column += 1
        low, high = f"{LEFT + first * width:.1f},{base}", f"{LEFT + column * width:.1f},{base}"
        drawn.append((" ".join([low, *path, high]), " ".join(path)))
    return drawn


def _round_block(row: RoundStatus, rounds: Sequence[RoundStatus], shown: TimeWindow, size: int) -> RoundShape | None:
    """The round from its first step to its last, as high as its number of workers; an outline before the first step."""
    ends = [at for at in (row.ended_at, *(later.at for later in rounds if later.round > row.round)) if at is not None]
    has_steps = row.first_step_at is not None
    left = shown.x(row.at if row.first_step_at is None else row.first_step_at)
    right = shown.x(min(ends, default=shown.until))
    if right <= LEFT:
        return None
    width = max(1.5, right - left - 0.5)
    return {
        "title": f"Round {row.round}, {count(row.world_size, 'worker')}: {row.reason}",
        "x": left,
        "width": width,
        "kind": "block" if has_steps else "block none",
        "height": round(BLOCKS_H * min(1.0, row.world_size / size), 1),
        "label": f"{row.round}" if width > 9 * len(str(row.round)) + 6 else "",
    }


def _lost_time_bar(row: RoundStatus, shown: TimeWindow) -> RoundShape:
    """The time from the last step of the round before to the first step of this one."""
    assert row.lost_seconds is not None
    until = shown.until if row.first_step_at is None else row.first_step_at
    left, right = shown.x(until - row.lost_seconds), shown.x(until)
    title, kind = f"{in_words(row.lost_seconds)} without a step", "pause" if row.planned else "lost"
    return {"title": title, "x": left, "width": max(0.0, round(right - left, 1)), "kind": kind}


def _round_mark(row: RoundStatus, shown: TimeWindow) -> RoundShape:
    """A line at the begin of a round, planned or after a fault."""
    title = f"{formatting.clock(row.at)} round {row.round}: {row.reason}"
    return {"title": title, "x": shown.x(row.at), "kind": "planned" if row.planned else "fault"}


def _round_up_for_axis(value: float) -> float:
    """The next number that is easy to read off an axis."""
    if value <= 0:
        return 1.0
    power = 10.0 ** math.floor(math.log10(value))
    return next(step for step in (1, 1.2, 1.6, 2, 2.4, 3, 4, 5, 6, 8, 10, 20) if step * power >= value * 0.999) * power


def _short_number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
