"""Ranks that take long and do not hang: nobody is killed, and the job comes to its end.

Where a script is slow, times are a tenth of the issue's, and floors a second. `benchmarks/hangs.py --slow-minutes` has
them at full length.
"""

from __future__ import annotations

import itertools

import pytest

from tests.faults.job import Fault, Job, until
from tests.hangs import harms
from tests.hangs.conftest import StartHanging
from tests.hangs.situations import PLAIN, SESSION, slow

SCALE = 0.1


@pytest.mark.system
def test_script_slow_in_every_way(hanging: StartHanging) -> None:
    """A long first step, an evaluation, a checkpoint write and slow steps, of two jobs that have two cores together.

    With a session one comes late to a barrier, too, by more than the floor: the others have said how long they wait.
    """
    ways = slow(SCALE)
    faults = ways["a long first step"][0]
    faults += [
        Fault(0, 30, ways["a long evaluation"][0][0].what),
        Fault(0, 50, ways["a long checkpoint write"][0][0].what),
    ]
    late = [Fault(1, 10, "dawdle 3")]  # when the deadline is the floor, or nearly so
    args = ["--steps", "110", "--hiccup", "0.4", "--meet", "20"]
    runs = [hanging(script, faults + more, *args) for script, more in ((SESSION, late), (PLAIN, []))]
    for run in runs:
        assert run.wait(within=100) == 0
        nobody_was_killed(run)
        assert longest_step(run) > 0.8 * 45 * SCALE


@pytest.mark.system
def test_slow_steps(hanging: StartHanging) -> None:
    growing, accumulating = (slow(SCALE)[way][1] for way in ("steps that grow 10 × slower", "50 micro-steps a step"))
    runs = [hanging(SESSION, [], *growing), hanging(PLAIN, [], *accumulating, "--steps", "6")]
    for run, longest in zip(runs, (1.0 * SCALE, 50 * 0.2 * SCALE), strict=True):
        assert run.wait() == 0
        nobody_was_killed(run)
        assert longest_step(run) > 0.9 * longest


@pytest.mark.system
@pytest.mark.timeout(400)
def test_straggler_is_reported_and_not_ended(hanging: StartHanging) -> None:
    """Said after two windows of a minute; by an event, and no more is done."""
    runs = [hanging(SESSION, [], "--lag", "0.02", workers=3, flags=flags) for flags in ([], ["--slow-factor", "9"])]
    until(lambda: runs[0].events("straggler"), "the straggler", within=240)
    slow_rank = runs[0].event("straggler")
    assert (slow_rank["rank"], slow_rank["ratio"] > 1.5) == (1, True)
    for run in runs:
        (run.work / "enough").touch()
        assert run.wait() == 0
        nobody_was_killed(run)
    assert not runs[1].events("straggler"), "it was told to mind only a factor of 9"


@pytest.mark.system
def test_passing_disturbances(hanging: StartHanging) -> None:
    """A rank is stopped for 2 s, traced for 2 s; the machine sleeps; eight others want its two cores."""
    run = hanging(SESSION, [], flags=[])
    run.step(30)
    harms.stop([run.worker(1)], 2.0)
    goes_on(run)
    harms.trace(run.worker(0), 2.0)
    goes_on(run)
    harms.suspend(run, 6.0)  # longer than the floor
    goes_on(run)
    with harms.busy():
        goes_on(run)
    (run.work / "enough").touch()
    assert run.wait() == 0
    nobody_was_killed(run)


def goes_on(run: Job, steps: int = 20) -> None:
    run.step(max(run.steps())[1] + steps)


def longest_step(run: Job) -> float:
    times = [float(line.split()[2]) for line in (run.work / "steps-1").read_text().splitlines()]
    return max(later - earlier for earlier, later in itertools.pairwise(times))


def nobody_was_killed(run: Job) -> None:
    assert not run.events("hang_detected")
    assert [event["round"] for event in run.events("group_started")] == [1]
    assert run.event("job_ended", outcome="succeeded")
