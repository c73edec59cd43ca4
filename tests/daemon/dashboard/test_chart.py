"""The drawing: rates are steps by time, and time without a step counts."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from elasticd_daemon.api.schema import JobStatus
from elasticd_daemon.dashboard import chart
from elasticd_daemon.dashboard.chart import TimeWindow
from tests.daemon.dashboard.hostile_texts import WICKED
from tests.daemon.dashboard.samples import NOW, a_job

TEN = TimeWindow(0.0, 10.0)


@pytest.mark.parametrize(
    ("samples", "live", "expected"),
    [
        ((), True, [None] * 5),
        (((0.0, 1, 0),), False, [None] * 5),
        (((0.0, 1, 0), (10.0, 1, 20)), False, [2.0] * 5),
        (((0.0, 1, 0), (4.0, 1, 8)), False, [2.0, 2.0, None, None, None]),
        # Live: the last rate holds for a while, then it is 0.
        (((0.0, 1, 0), (2.0, 1, 4)), True, [2.0, 2.0, 2.0, 1.0, 0.0]),
        # A fault: its cost is a dent; steps trained again give no negative rate.
        (((0.0, 1, 0), (4.0, 1, 8), (5.0, 2, 6), (10.0, 2, 16)), False, [2.0, 2.0, 1.0, 2.0, 2.0]),
        # The clock was set back.
        (((0.0, 1, 0), (9.0, 1, 9), (2.0, 1, 10), (10.0, 1, 18)), False, [1.0] * 5),
    ],
)
def test_rates(samples: Any, live: bool, expected: list[float | None]) -> None:
    assert chart.rates_by_column(samples, TEN, live, columns=5) == pytest.approx(expected)


def test_rates_sum_up_to_the_steps() -> None:
    job = JobStatus.from_dict(a_job())
    shown = chart.time_window(job, NOW, None)
    found = chart.rates_by_column(chart.step_samples(job), shown, is_live=False)
    width = (shown.until - shown.since) / len(found)
    assert sum((one or 0.0) * width for one in found) == pytest.approx(100 + 14 * 14, rel=0.05)


def test_rates_from_the_event_log_alone() -> None:
    job = JobStatus.from_dict({**a_job(step_samples=[]), "ended_at": NOW - 96.0})
    job_rounds = a_job()["progress"]["rounds"]
    job_rounds[1] |= {"last_step": 191, "ended_at": NOW - 96.0}
    job = JobStatus.from_dict({**a_job(step_samples=[], rounds=job_rounds), "ended_at": NOW - 96.0})
    found = chart.rates_by_column(chart.step_samples(job), chart.time_window(job, NOW, None), is_live=False)
    assert {round(one, 2) for one in found if one} >= {1.0}
    assert found[-1] == pytest.approx(1.0)


def test_different_host_clocks_give_no_spike() -> None:
    answer = a_job()
    answer["progress"]["rounds"][1]["first_step_at"] += 0.004  # the log's clock is ahead of the runner's
    answer["progress"]["rounds"][1]["first_step"] = 93
    job = JobStatus.from_dict(answer)
    found = chart.rates_by_column(chart.step_samples(job), chart.time_window(job, NOW, None), is_live=True)
    assert max(one for one in found if one is not None) < 1.3


def test_window_is_within_the_job_and_never_empty() -> None:
    job = JobStatus.from_dict(a_job())
    assert chart.time_window(job, NOW, 60.0) == TimeWindow(NOW - 60, NOW)
    assert chart.time_window(job, NOW, 3600.0).since == NOW - 310
    assert chart.time_window(JobStatus("new"), NOW, None).until == NOW
    ended = JobStatus.from_dict({**a_job(), "ended_at": NOW - 50.0})
    assert chart.time_window(ended, NOW, 60.0) == TimeWindow(NOW - 110, NOW - 50)


def test_drawing_names_each_round_and_its_cost() -> None:
    job = JobStatus.from_dict(a_job())
    first, second = job.known.rounds
    job = replace(job, progress=replace(job.known, rounds=(first, replace(second, reason=WICKED))))
    drawn = chart.chart_values(job, NOW, None)
    assert [block["title"] for block in drawn["blocks"]] == [
        "Round 1, 4 workers: first round",
        f"Round 2, 4 workers: {WICKED}",
    ]
    assert [lost["title"] for lost in drawn["lost"]] == ["4.0 s without a step"]
    assert "onerror" in drawn["marks"][-1]["title"]


_SHADES = [("text", "card"), ("text", "back"), ("quiet", "card"), ("quiet", "back"), ("link", "card"), ("bad", "card")]
_SHADES += [("block-text", "block"), *((name, f"{name}-back") for name in ("good", "busy", "warn", "bad"))]


@pytest.mark.parametrize(("ink", "ground"), _SHADES)
def test_text_can_be_read_in_both_schemes(ink: str, ground: str) -> None:
    """WCAG's contrast of 4.5; axe-core (test_axe.py) sees what is text of HTML, and not the drawing's."""
    style = Path(chart.__file__).with_name("style.css").read_text()
    for scheme in re.split("@media", style)[:2]:
        shades = {name: _light(shade) for name, shade in re.findall(r"--([a-z-]+): #([0-9a-f]{6})", scheme)}
        dark, light = sorted((shades[ink], shades[ground]))
        assert (light + 0.05) / (dark + 0.05) >= 4.5


def _light(shade: str) -> float:
    parts = [part / 255 for part in bytes.fromhex(shade)]
    red, green, blue = (part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue
