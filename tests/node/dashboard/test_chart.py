"""The drawing tells the truth: rates are what steps and time make them, and time without a step counts."""

from __future__ import annotations

from typing import Any

import pytest

from elasticd_agent.node.dashboard import chart
from elasticd_agent.node.dashboard import decode as facts
from elasticd_agent.node.dashboard.chart import TimeWindow
from tests.node.dashboard.hostile_texts import WICKED, read
from tests.node.dashboard.samples import NOW, a_job

TEN = TimeWindow(0.0, 10.0)


@pytest.mark.parametrize(
    ("track", "live", "wanted"),
    [
        ((), True, [None] * 5),
        (((0.0, 1, 0),), False, [None] * 5),
        (((0.0, 1, 0), (10.0, 1, 20)), False, [2.0] * 5),
        (((0.0, 1, 0), (4.0, 1, 8)), False, [2.0, 2.0, None, None, None]),
        # It is going on: for a while as before, then it stands.
        (((0.0, 1, 0), (2.0, 1, 4)), True, [2.0, 2.0, 2.0, 1.0, 0.0]),
        # A fault: what it cost is a dent, steps made again are no negative rate.
        (((0.0, 1, 0), (4.0, 1, 8), (5.0, 2, 6), (10.0, 2, 16)), False, [2.0, 2.0, 1.0, 2.0, 2.0]),
        # A clock that was set back.
        (((0.0, 1, 0), (9.0, 1, 9), (2.0, 1, 10), (10.0, 1, 18)), False, [1.0] * 5),
    ],
)
def test_rates(track: Any, live: bool, wanted: list[float | None]) -> None:
    assert chart.rates(track, TEN, live, columns=5) == pytest.approx(wanted)


def test_steps_are_neither_lost_nor_made_up() -> None:
    job = facts.job_status(a_job())
    shown = chart.window(job, NOW, None)
    found = chart.rates(chart.points(job), shown, live=False)
    width = (shown.until - shown.since) / len(found)
    assert sum((one or 0.0) * width for one in found) == pytest.approx(100 + 14 * 14, rel=0.05)


def test_without_its_runner_the_log_still_tells_each_rounds_rate() -> None:
    job = facts.job_status({**a_job(track=[]), "ended_at": NOW - 96.0})
    job_rounds = a_job()["progress"]["rounds"]
    job_rounds[1] |= {"last_step": 191, "over_at": NOW - 96.0}
    job = facts.job_status({**a_job(track=[], rounds=job_rounds), "ended_at": NOW - 96.0})
    found = chart.rates(chart.points(job), chart.window(job, NOW, None), live=False)
    assert {round(one, 2) for one in found if one} >= {1.0}
    assert found[-1] == pytest.approx(1.0)


def test_two_hosts_clocks_make_no_spike() -> None:
    said = a_job()
    said["progress"]["rounds"][1]["first_step_at"] += 0.004  # the log's clock is ahead of the runner's
    said["progress"]["rounds"][1]["first_step"] = 93
    job = facts.job_status(said)
    found = chart.rates(chart.points(job), chart.window(job, NOW, None), live=True)
    assert max(one for one in found if one is not None) < 1.3


def test_a_window_is_never_longer_than_the_job_nor_empty() -> None:
    job = facts.job_status(a_job())
    assert chart.window(job, NOW, 60.0) == TimeWindow(NOW - 60, NOW)
    assert chart.window(job, NOW, 3600.0).since == NOW - 310
    assert chart.window(facts.JobStatus("new"), NOW, None).until == NOW
    ended = facts.job_status({**a_job(), "ended_at": NOW - 50.0})
    assert chart.window(ended, NOW, 60.0) == TimeWindow(NOW - 110, NOW - 50)


def test_the_drawing_says_each_round_and_what_it_cost() -> None:
    said = a_job()
    said["progress"]["rounds"][1]["reason"] = WICKED
    page = read(chart.chart(facts.job_status(said), NOW, None))
    text = "\n".join(page.text)
    assert "Round 1, 4 workers: first round" in text
    assert "4.0 s without a step" in text
    assert "onerror" in text
