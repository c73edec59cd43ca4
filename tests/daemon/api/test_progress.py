"""A job's timeline from its event log: rounds, the step, the last checkpoint, and goodput."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elasticd_daemon.api.progress import MAX_POINTS, MAX_ROUNDS, JobTimeline
from elasticd_daemon.api.schema import CheckpointStatus

Line = dict[str, object]


def line(kind: str, wall: float, round: int = 1, **more: object) -> Line:
    return {"kind": kind, "wall": wall, "round": round, **more}


def reported(*lines: Line) -> JobTimeline:
    progress = JobTimeline()
    for one in lines:
        progress.feed(one)
    return progress


STARTED = (
    line("round_published", 100.0, world_size=2, nodes=["a"], restarts=0, reason="first round"),
    line("group_started", 101.0, ranks=[0, 1]),
    line("first_step", 110.0, step=1),
)
HELD = (line("paused", 120.0, step=10), line("pause_ended", 125.0), line("work_recovered", 130.0, step=11, seconds=0.0))
CRASHED = (line("worker_exited", 130.0, step=21), line("group_ended", 131.0))
AGAIN = (*STARTED, *CRASHED, line("resumed", 139.0, 2, step=11), line("first_step", 140.0, 2, step=12))


@pytest.mark.parametrize("set_s", [86_400.0, -50.0])
def test_clock_step_is_not_counted_as_time(set_s: float) -> None:
    before = [{**each, "mono": float(str(each["wall"])) - 90.0} for each in STARTED]
    saved = line("checkpoint_saved", 120.0 + set_s, step=20, mono=30.0)
    assert reported(*before, saved).goodput(130.0 + set_s) == pytest.approx(20 / 30)
    # A node that was restarted was away for that long.
    again = line("round_published", 3720.0, 2, cause="crash"), line("first_step", 3740.0, 2, step=12)
    restarted = [{**each, "mono": mono} for each, mono in zip(again, (40.0, 60.0), strict=True)]
    assert reported(*before, *restarted).goodput(3740.0) == reported(*STARTED, *again).goodput(3740.0)


@pytest.mark.parametrize(
    ("lines", "now", "goodput"),
    [
        ((), 200.0, None),
        (STARTED[:2], 200.0, None),
        (STARTED, 120.0, 0.5),
        ((*STARTED, *CRASHED), 140.0, 0.5),
        # All of 20 steps were kept, half of them, none of them: what is trained again is lost.
        ((*STARTED, *CRASHED, line("resumed", 139.0, 2, step=21), line("first_step", 140.0, 2, step=22)), 140.0, 0.5),
        ((*STARTED, *CRASHED, line("resumed", 139.0, 2, step=11), line("first_step", 140.0, 2, step=12)), 140.0, 0.5),
        ((*STARTED, *CRASHED, line("resumed", 139.0, 2, step=11), line("first_step", 140.0, 2, step=12)), 150.0, 0.4),
        ((*AGAIN, line("work_recovered", 150.0, 2, step=22, seconds=20.5)), 180.0, 49.5 / 80),
        ((*AGAIN, line("checkpoint_saved", 150.0, 2, step=22)), 180.0, 50 / 80),
        ((*AGAIN, line("work_recovered", 150.0, 2, step=22, seconds=8.0)), 180.0, 50 / 80),
        ((*STARTED, *CRASHED, line("first_step", 140.0, 2, step=1)), 160.0, 20 / 60),
        # Another node's worker, or another node, was lost.
        (
            (*STARTED, line("round_published", 130.0, 2, cause="crash"), line("first_step", 140.0, 2, step=9)),
            140.0,
            0.5,
        ),
        # A hang counts from when it began; a hold only while it lasts. One that is only reported may resume.
        (
            (
                *STARTED,
                line("hang_detected", 140.0, seconds=20.0, action="report"),
                line("checkpoint_saved", 150.0, step=9),
            ),
            180.0,
            40 / 80,
        ),
        ((*STARTED, line("hang_detected", 140.0, seconds=20.0)), 140.0, 0.25),
        ((*STARTED, line("paused", 120.0)), 140.0, 0.25),
        ((*STARTED, *HELD), 140.0, 0.5),
        # A round with other nodes that no fault has caused: what it takes is idle, what it trains again is lost.
        ((*STARTED, line("round_published", 130.0, 2, cause="resize", nodes=["a"])), 140.0, 0.5),
        # After the end nothing counts any more, neither for nor against it.
        ((*STARTED, line("job_ended", 120.0, outcome="succeeded", step=11)), 9999.0, 0.5),
    ],
)
def test_goodput_counts_time_of_new_steps(lines: tuple[Line, ...], now: float, goodput: float | None) -> None:
    assert reported(*lines).goodput(now) == (None if goodput is None else pytest.approx(goodput))


def test_newest_step_rounds_and_checkpoint_are_kept() -> None:
    progress = reported(
        *STARTED,
        line("checkpoint_saved", 115.0, step=6),
        *CRASHED,
        line("round_published", 132.0, 2, world_size=1, nodes=["b"], restarts=1, reason="rank 1 was killed"),
        line("job_ended", 150.0, 2, outcome="failed", step=40, restarts=1, reason="no progress"),
    )
    assert (progress.step, progress.checkpoint, progress.restarts) == (40, CheckpointStatus(6, 1, 115.0), 1)
    assert [(one.round, one.nodes, one.reason) for one in progress.rounds.values()] == [
        (1, ("a",), "first round"),
        (2, ("b",), "rank 1 was killed"),
    ]
    assert progress.ended_at == 150.0
    progress.feed(line("round_published", 160.0, 3, world_size=1, nodes=["b"], restarts=2, reason="another runner"))
    assert progress.ended_at is None, "the job went on"


def test_a_kind_that_is_no_text_is_ignored() -> None:
    timeline = JobTimeline()
    timeline.feed({"kind": ["group_started"], "wall": 1.0, "mono": 1.0, "round": 1})
    assert timeline.progress("n1", 2.0).step is None


def test_memory_is_bounded_over_years_of_rounds() -> None:
    progress = reported(*STARTED)
    for number in range(2, 3 * MAX_ROUNDS):
        at = 100.0 + 40 * number
        progress.feed(line("round_published", at, number, world_size=2, nodes=["a"], restarts=number))
        progress.feed(line("first_step", at + 10, number, step=20 * number))
        progress.feed(line("worker_exited", at + 39, number, step=20 * number + 19))
    assert len(progress.rounds) == MAX_ROUNDS
    goodput = progress.goodput(100.0 + 40 * 3 * MAX_ROUNDS)
    assert goodput == pytest.approx(29 / 40, rel=0.01), "what they add up to is kept of all"


values = (
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3) | st.lists(st.integers(), max_size=3)
)
KINDS = (
    "round_published group_started resumed first_step caught_up checkpoint_saved worker_exited store_exited group_gone"
    " hung holding hold_over stop_requested waiting"
)
kinds = st.sampled_from([*KINDS.split(), "job_ended", "nonsense"])
lines = st.fixed_dictionaries(
    {"kind": kinds | values, "wall": st.floats(0, 1e10) | values, "round": st.integers(0, 5) | values},
    optional=dict.fromkeys(
        (
            "step",
            "seconds",
            "asked",
            "exit_code",
            "cause",
            "lost",
            "recovery_seconds",
            "nodes",
            "ranks",
            "world_size",
            "restarts",
            "outcome",
        ),
        values,
    ),
)


@settings(max_examples=100, deadline=None)
@given(st.lists(lines, max_size=20))
def test_torn_log_raises_nothing_and_counts_no_extra_time(log: list[Line]) -> None:
    goodput = reported(*log).goodput(1e10)
    assert goodput is None or 0 <= goodput <= 1


def costs(timeline: JobTimeline, now: float) -> dict[int, tuple[float, int | None]]:
    rounds = timeline.history(now)
    return {one.round: (one.lost_seconds, one.lost_steps) for one in rounds if one.lost_seconds is not None}


def test_cost_of_each_round() -> None:
    second = (
        line("round_published", 131.5, 2),
        line("resumed", 139.0, 2, step=11),
        line("first_step", 140.0, 2, step=12),
    )
    assert costs(reported(*STARTED, *CRASHED, *second), 200.0) == {2: (10.0, 10)}
    # Not a step yet: so far. A script that counts from 1 in every process does not say where it went on.
    assert costs(reported(*STARTED, *CRASHED, second[0]), 150.0) == {2: (20.0, None)}
    again = line("first_step", 140.0, 2, step=1)
    assert costs(reported(*STARTED, *CRASHED, second[0], again), 0.0) == {2: (10.0, None)}
    # The figure of the console and the metrics, which begins at the fault and not at the step before it.
    assert costs(reported(*STARTED, *CRASHED, second[0], {**again, "recovery_seconds": 8.125}), 0.0) == {
        2: (8.125, None)
    }
    # A round that made no step is a part of what the next one cost.
    third = (line("round_published", 145.0, 3), line("first_step", 150.0, 3, step=22))
    assert costs(reported(*STARTED, *CRASHED, second[0], *third), 0.0) == {3: (20.0, 0)}
    assert costs(reported(*STARTED), 200.0) == {}


def test_cost_of_a_hang_judged_elsewhere_counts_from_its_start() -> None:
    second = line("round_published", 130.0, 2, cause="hung", idle_seconds=5.0)
    killed = line("worker_exited", 130.1, step=21, requested=True)
    trains = line("first_step", 131.0, 2, step=12)
    seen = reported(*STARTED, second, killed, line("resumed", 130.8, 2, step=11), trains)
    assert seen.rounds[1].ended_at == 125.0
    assert costs(seen, 200.0) == {2: (6.0, 10)}


def test_numbers_of_the_script_are_bounded_and_follow_the_steps() -> None:
    logged = [line("scalars", 100.0 + n, step=n, values={"loss": 9.0 - n, "bad": None}) for n in range(1, 2000)]
    assert reported(*STARTED, *logged).scalars.keys() == {"loss"}
    loss = reported(*STARTED, *logged).scalars["loss"]
    steps = [step for step, _ in loss]
    assert len(steps) <= MAX_POINTS and steps == sorted(set(steps))
    assert (loss[0], loss[-1]) == ((1, 8.0), (1999, -1990.0))
    again = line("scalars", 5000.0, 2, step=900, values={"loss": 1.5})
    assert reported(*STARTED, *logged, again).scalars["loss"][-1] == (900, 1.5), "trained again from there"
    names = line("scalars", 100.0, step=1, values={f"n{n}": n for n in range(40)})
    assert len(reported(*STARTED, names).scalars) == 16


def test_checkpoint_of_another_node_counts_after_resume() -> None:
    resumed = line("resumed", 139.0, 2, step=11, saved_at=60.0)
    seen = reported(*STARTED, *CRASHED, resumed)
    assert seen.checkpoint == CheckpointStatus(11, 2, 60.0), "its age counts from when it was saved"
    unknown = reported(*STARTED, *CRASHED, {**resumed, "saved_at": None})
    assert unknown.checkpoint == CheckpointStatus(11, 2, None)
    # Its own stays what was saved, when it was saved.
    seen = reported(*STARTED, line("checkpoint_saved", 125.0, step=11), *CRASHED, resumed)
    assert seen.checkpoint == CheckpointStatus(11, 1, 125.0)


def test_lost_nodes_belong_to_the_round_after() -> None:
    progress = JobTimeline()
    for one in (*STARTED, line("round_published", 130.0, 2, cause="resize", nodes=["a"], lost=["b"])):
        progress.feed(one)
    assert [one.lost_nodes for one in progress.rounds.values()] == [(), ("b",)]
