"""StepTrack: bounded, the last minutes finely, the whole run coarsely."""

from __future__ import annotations

import itertools

from elasticd_daemon.runners.history import FINE_INTERVAL_S, MAX_COARSE_POINTS, MAX_FINE_POINTS, StepTrack


def test_one_month_is_a_few_hundred_points() -> None:
    track, day = StepTrack(), 86_400
    for second in range(0, 30 * day, 5):
        track.add(float(second), 1, second)
    points = track.points()
    assert len(points) <= MAX_FINE_POINTS + MAX_COARSE_POINTS
    assert points == sorted(points)
    assert points[0][0] < day and points[-1][0] > 30 * day - 10
    gaps = [b[0] - a[0] for a, b in itertools.pairwise(points)]
    assert max(gaps) < 30 * day / (MAX_COARSE_POINTS / 4)
    assert max(gaps[-MAX_FINE_POINTS // 2 :]) <= 5.0


def test_first_step_of_each_round_is_kept_and_rounds_are_bounded() -> None:
    track = StepTrack()
    for number in range(10_000):
        track.add(number * 0.1, number, 1)
        track.add(number * 0.1 + 0.05, number, 2)
    points = track.points()
    assert len(points) <= MAX_FINE_POINTS + MAX_COARSE_POINTS
    assert [number for _, number, _ in points[-MAX_FINE_POINTS:]] == list(range(10_000 - MAX_FINE_POINTS, 10_000))


def test_clock_set_back_does_not_stop_the_recording() -> None:
    track = StepTrack()
    track.add(1000.0, 1, 1)
    track.add(500.0, 1, 2)
    track.add(500.0 + FINE_INTERVAL_S / 2, 1, 3)
    track.add(500.0 + FINE_INTERVAL_S, 1, 4)
    assert [step for _, _, step in track.points()] == [1, 2, 4]
