"""The parts of a recovery add up to it, in whatever order they come."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from elasticd_agent.telemetry.goodput import RecoveryTimer

PARTS = ("detect", "evidence", "agree", "stop", "start")


def test_a_hang_part_by_part() -> None:
    recovery = RecoveryTimer()
    recovery.start(10.0)
    for part, at in zip(PARTS, (13.0, 15.5, 15.6, 15.7, 15.8), strict=True):
        recovery.end_part(part, at)
    found = recovery.finish(16.0)
    assert found is not None
    seconds, parts = found
    assert seconds == 6.0
    assert {part: round(s, 3) for part, s in parts.items()} == {
        "detect": 3.0, "evidence": 2.5, "agree": 0.1, "stop": 0.1, "start": 0.1, "first_step": 0.2,
    }  # fmt: skip
    assert recovery.finish(17.0) is None, "it was over"


def test_nothing_counts_without_a_fault() -> None:
    recovery = RecoveryTimer()
    recovery.end_part("stop", 5.0)
    assert recovery.finish(6.0) is None


def test_the_first_sign_is_when_it_began() -> None:
    recovery = RecoveryTimer()
    recovery.start(10.0)
    recovery.end_part("detect", 10.5)
    recovery.start(11.0)
    recovery.end_part("stop", 11.5)
    assert recovery.finish(12.0) == (2.0, {"detect": 0.5, "stop": 1.0, "first_step": 0.5})


def test_a_round_that_came_to_no_step_did_not_take_so_long_to_stop() -> None:
    recovery = RecoveryTimer()
    recovery.start(0.0)
    for part, at in (("agree", 0.1), ("stop", 0.2), ("start", 0.3)):
        recovery.end_part(part, at)
    recovery.start(5.0)
    recovery.start(5.0)
    for part, at in (("stop", 5.1), ("agree", 6.0), ("start", 6.1)):
        recovery.end_part(part, at)
    found = recovery.finish(6.3)
    assert {part: round(s, 3) for part, s in found[1].items()} == {
        "agree": 1.0, "stop": 0.2, "start": 0.2, "first_step": 4.9,
    }  # fmt: skip


@given(st.lists(st.tuples(st.sampled_from(PARTS), st.floats(0, 100)), max_size=8), st.floats(0, 100))
def test_parts_add_up(marks: list[tuple[str, float]], end: float) -> None:
    recovery = RecoveryTimer()
    recovery.start(0.0)
    for part, at in marks:
        recovery.end_part(part, min(at, end))
    found = recovery.finish(end)
    assert abs(sum(found[1].values()) - found[0]) < 1e-6
    assert min(found[1].values()) >= 0
