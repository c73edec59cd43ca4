"""A job's timeline from its events: rounds, the step, the last checkpoint, and goodput."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elasticd_agent.model.log_events import EVENT_TYPES, LogLine, TimeSplit, decode
from elasticd_agent.telemetry.event_log import encode
from elasticd_agent.telemetry.timeline import MAX_ROUNDS, MAX_SCALAR_POINTS, CheckpointStatus, JobTimeline, RoundStatus
from tests.log_lines import line


def reported(*lines: LogLine) -> JobTimeline:
    timeline = JobTimeline()
    for each in lines:
        timeline.feed(each)
    return timeline


def saved(step: int, at: float) -> CheckpointStatus:
    return CheckpointStatus(step, 1, at, bytes=0, blocked_seconds=0.0)


STARTED = (
    line("round_published", 100.0, world_size=2, nodes=("a",), restarts=0, reason="first round"),
    line("group_started", 101.0, ranks=(0, 1)),
    line("first_step", 110.0, step=1),
)
CRASHED = (line("worker_exited", 130.0, step=21), line("group_ended", 131.0))
TRAINS = line("first_step", 110.0, step=1, spent=TimeSplit(0.0, 0.0, 10.0, "useful"))
FAILED = line("worker_exited", 130.0, step=20, spent=TimeSplit(19.0, 1.0, 10.0, "lost"))


@pytest.mark.parametrize(
    ("cause", "lost", "planned", "kind"),
    [
        ("resize", "", True, "resize"),
        ("resize", "b", False, "node lost"),
        ("crash", "b", False, "crash"),
        ("crash", "", False, "crash"),
        ("", "", True, "round"),
    ],
)
def test_kind_of_a_round(cause: str, lost: str, planned: bool, kind: str) -> None:
    status = RoundStatus(2, cause=cause, lost_nodes=tuple(lost))
    assert (status.planned, status.cause_words) == (planned, kind)


@pytest.mark.parametrize(
    ("lines", "now", "goodput"),
    [
        ((), 200.0, None),
        (STARTED, 200.0, None),  # an older version wrote them
        ((line("round_published", 100.0, spent=TimeSplit()),), 200.0, None),
        ((TRAINS,), 120.0, 0.5),
        ((TRAINS, FAILED), 138.0, 0.5),
        ((TRAINS, FAILED, line("waiting", 131.0, spent=TimeSplit(19.0, 2.0, 10.0, "lost"))), 138.0, 0.5),
        # After the end nothing counts any more, neither for nor against it.
        ((TRAINS, line("job_ended", 120.0, spent=TimeSplit(10.0, 0.0, 10.0))), 9999.0, 0.5),
        # Another process continues the log after the writer was killed; a line that is a moment late does not.
        ((TRAINS, FAILED, line("first_step", 900.0, spent=TimeSplit(0.0, 0.0, 8.0, "useful"))), 900.0, 19 / 38),
        # So does one after the time of day was set back.
        (
            (
                line("first_step", 1000.0, spent=TimeSplit(500.0, 0.0, 0.0, "useful")),
                line("first_step", 900.0, 2, spent=TimeSplit(0.0, 0.0, 100.0, "useful")),
            ),
            900.0,
            500 / 600,
        ),
        # A machine that was suspended has another time of day, and the same process.
        ((TRAINS, line("scalars", 7000.0, mono=130.0, spent=TimeSplit(20.0, 0.0, 10.0, "useful"))), 7000.0, 2 / 3),
        # A reboot sets the other clock back.
        ((TRAINS, FAILED, line("scalars", 200.0, mono=8.0, spent=TimeSplit(8.0, 0.0, 0.0, "useful"))), 200.0, 27 / 38),
        ((TRAINS, FAILED, line("scalars", 129.0, spent=TimeSplit(19.0, 0.0, 10.0, "useful"))), 130.0, 20 / 30),
        ((TRAINS, FAILED, line("scalars", 112.0, spent=TimeSplit(2.0, 0.0, 10.0, "lost"))), 120.0, 2 / 20),
    ],
)
def test_goodput_is_the_writers_and_what_has_passed_since(
    lines: tuple[LogLine, ...], now: float, goodput: float | None
) -> None:
    assert reported(*lines).goodput(now) == (None if goodput is None else pytest.approx(goodput))


def test_a_written_line_is_read_back() -> None:
    event = TRAINS.event
    raw = json.loads(encode(event, "lm", "a"))
    read = decode({**raw, "a newer field": [1]})
    assert read is not None and (read.job, read.node) == ("lm", "a")
    assert read.event.to_dict() == {**event.to_dict(), "v": 1, "a newer field": [1]}
    assert decode({**raw, "kind": "a newer kind"}) is None
    assert decode({**raw, "kind": ["first_step"]}) is None
    assert decode({**raw, "step": "12"}) is None
    odd = decode({**raw, "reason": "/data/\udcff"})
    assert odd is not None and odd.event.reason == "/data/?"


def test_newest_step_rounds_and_checkpoint_are_kept() -> None:
    progress = reported(
        *STARTED,
        line("checkpoint_saved", 115.0, step=6),
        *CRASHED,
        line("round_published", 132.0, 2, world_size=1, nodes=("b",), restarts=1, reason="rank 1 was killed"),
        line("job_ended", 150.0, 2, outcome="failed", step=40, restarts=1, reason="no progress"),
    )
    assert (progress.began_at, progress.ended_at) == (100.0, 150.0)
    assert (progress.step, progress.checkpoint, progress.restarts) == (
        40,
        CheckpointStatus(6, 1, 115.0, bytes=0, blocked_seconds=0.0),
        1,
    )
    assert [(one.round, one.nodes, one.reason) for one in progress.rounds.values()] == [
        (1, ("a",), "first round"),
        (2, ("b",), "rank 1 was killed"),
    ]
    assert progress.ended_at == 150.0
    progress.feed(line("worker_exited", 149.0, 2, step=38))
    assert progress.step == 40, "a line that is a moment late"
    progress.feed(line("round_published", 160.0, 3, world_size=1, nodes=("b",), restarts=2, reason="another runner"))
    assert progress.ended_at is None, "the job went on"


def test_memory_is_bounded_over_years_of_rounds() -> None:
    timeline = reported(*STARTED)
    for number in range(2, 3 * MAX_ROUNDS):
        at = 100.0 + 40 * number
        timeline.feed(line("round_published", at, number, nodes=("a",), restarts=number))
        timeline.feed(line("resumed", at + 9, number, step=20 * number))
        timeline.feed(line("first_step", at + 10, number, step=20 * number))
        timeline.feed(line("worker_exited", at + 39, number, step=20 * number + 19))
    assert len(timeline.rounds) == MAX_ROUNDS
    assert timeline.restarts == 3 * MAX_ROUNDS - 1


values = (
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3) | st.lists(st.integers(), max_size=3)
)
FIELDS = (
    "mono reason spent step seconds requested exit_code cause lost recovery_seconds nodes ranks world_size restarts"
    " outcome values idle_seconds donor"
)
kinds = st.sampled_from([*(event_type.kind for event_type in EVENT_TYPES), "nonsense"])
torn = st.fixed_dictionaries(
    {"kind": kinds | values, "wall": st.floats(0, 1e10) | values, "round": st.integers(0, 5) | values},
    optional=dict.fromkeys(FIELDS.split(), values),
)


@settings(max_examples=100, deadline=None)
@given(st.lists(torn, max_size=20))
def test_torn_log_raises_nothing_and_counts_no_extra_time(log: list[dict[str, object]]) -> None:
    goodput = reported(*filter(None, map(decode, log))).goodput(1e10)
    assert goodput is None or 0 <= goodput <= 1


def costs(timeline: JobTimeline, now: float) -> dict[int, tuple[float, int | None]]:
    rounds = timeline.rounds_with_costs(now)
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
    measured = line("first_step", 140.0, 2, step=1, recovery_seconds=8.125)
    assert costs(reported(*STARTED, *CRASHED, second[0], again), 0.0) == {2: (10.0, None)}
    # The figure of the console and the metrics, which begins at the fault and not at the step before it.
    assert costs(reported(*STARTED, *CRASHED, second[0], measured), 0.0) == {2: (8.125, None)}
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
    assert len(reported(*STARTED, *logged[:MAX_SCALAR_POINTS]).scalars["loss"]) == MAX_SCALAR_POINTS
    loss = reported(*STARTED, *logged).scalars["loss"]
    steps = [step for step, _ in loss]
    assert len(steps) <= MAX_SCALAR_POINTS and steps == sorted(set(steps))
    assert (loss[0], loss[-1]) == ((1, 8.0), (1999, -1990.0))
    again = line("scalars", 5000.0, 2, step=900, values={"loss": 1.5})
    assert reported(*STARTED, *logged, again).scalars["loss"][-1] == (900, 1.5), "trained again from there"
    names = line("scalars", 100.0, step=1, values={f"n{n}": n for n in range(40)})
    assert len(reported(*STARTED, names).scalars) == 16
    repeated = line("scalars", 101.0, step=1, values={"n0": 7.0, "n39": 7.0})
    assert reported(*STARTED, names, repeated).scalars["n0"] == [(1, 7.0)]
    assert len(reported(*STARTED, names, repeated).scalars) == 16


def test_age_and_cost_of_a_checkpoint() -> None:
    saved = CheckpointStatus(5, at=10.0, bytes=2_000_000, blocked_seconds=0.5)
    assert (saved.with_age(12.0).age_seconds, saved.cost_words) == (2.0, "2 MB, training blocked 0.5 s")
    unknown = CheckpointStatus(5)
    assert (unknown.with_age(12.0), unknown.cost_words) == (unknown, "")


def test_end_of_training_in_a_round() -> None:
    hang = line("hang_detected", 150.0, seconds=30.0, action="restart")
    assert reported(*STARTED, hang).rounds[1].ended_at == 120.0
    reported_only = line("hang_detected", 150.0, seconds=30.0, action="report")
    assert reported(*STARTED, reported_only).rounds[1].ended_at is None
    paused, resumed = line("paused", 150.0), line("pause_ended", 160.0)
    assert reported(*STARTED, paused).rounds[1].ended_at == 150.0
    assert reported(*STARTED, paused, resumed).rounds[1].ended_at is None
    assert 7 not in reported(*STARTED, line("pause_ended", 160.0, 7)).rounds


def test_checkpoint_of_another_node_counts_after_resume() -> None:
    resumed = line("resumed", 139.0, 2, step=11, saved_at=60.0)
    seen = reported(*STARTED, *CRASHED, resumed)
    assert seen.checkpoint == CheckpointStatus(11, 2, 60.0), "its age counts from when it was saved"
    unknown = reported(*STARTED, *CRASHED, line("resumed", 139.0, 2, step=11))
    assert unknown.checkpoint == CheckpointStatus(11, 2, None)
    # Its own stays what was saved, when it was saved.
    seen = reported(*STARTED, line("checkpoint_saved", 125.0, step=11), *CRASHED, resumed)
    assert seen.checkpoint == saved(11, 125.0)


def test_checkpoint_is_one_that_can_be_resumed_from() -> None:
    """A newer one could not be used; and what ranks hold in their processes is on no disk."""
    before = (*STARTED, line("checkpoint_saved", 125.0, step=11), *CRASHED)
    older = line("resumed", 139.0, 2, step=6, saved_at=60.0)
    assert reported(*before, older).checkpoint == CheckpointStatus(6, 2, 60.0)
    held = line("resumed", 139.0, 2, step=21, saved_at=130.0, in_processes=True)
    assert reported(*before, held).checkpoint == saved(11, 125.0)
    assert reported(*STARTED, *CRASHED, held).checkpoint is None
    late = line("checkpoint_saved", 126.0, step=9)
    assert reported(*before[: -len(CRASHED)], late).checkpoint == saved(11, 125.0), "it had resumed from that one"


def test_lost_nodes_belong_to_the_round_after() -> None:
    progress = JobTimeline()
    for one in (*STARTED, line("round_published", 130.0, 2, cause="resize", nodes=("a",), lost=("b",))):
        progress.feed(one)
    assert [one.lost_nodes for one in progress.rounds.values()] == [(), ("b",)]


def test_kept_processes_are_counted() -> None:
    again = (line("round_published", 131.0, 2, world_size=2), line("group_started", 131.1, 2, ranks=(0, 1), kept=1))
    newest = reported(*STARTED, *CRASHED, *again).newest_round()
    assert newest is not None and newest.origin_phrases == ["1 of 2 ranks kept the process"]


@pytest.mark.parametrize(
    ("donor", "origins"), [(None, []), (0, ["resumed from step 21, saved by rank 0 after the fault"])]
)
def test_round_says_which_rank_saved_its_state(donor: int | None, origins: list[str]) -> None:
    assert RoundStatus(2, resumed_step=21, donor=donor).origin_phrases == origins
