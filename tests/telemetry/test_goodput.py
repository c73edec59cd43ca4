"""What became of a node's time: the three add up to it, never shrink, and say what the steps said."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elasticd_agent.model.log_events import TimeSplit
from elasticd_agent.telemetry.goodput import GoodputLedger, monotonic_counters

BEGAN = 100.0


def after(*what: Callable[[GoodputLedger], GoodputLedger]) -> GoodputLedger:
    spent = GoodputLedger(BEGAN)
    for one in what:
        spent = one(spent)
    return spent


def stepped(step: int, at: float) -> Callable[[GoodputLedger], GoodputLedger]:
    return lambda spent: spent.on_step(step, at)


def broke(at: float) -> Callable[[GoodputLedger], GoodputLedger]:
    return lambda spent: spent.on_fault(at)


TRAINED = (stepped(1, 110.0), stepped(10, 120.0))


@pytest.mark.parametrize(
    ("spent", "at", "times"),
    [
        # Before the first step nothing is of use, and nothing is lost, whatever happens.
        (after(), 110.0, TimeSplit(idle=10)),
        (after(broke(105.0)), 110.0, TimeSplit(idle=10)),
        (after(*TRAINED), 125.0, TimeSplit(useful=15, idle=10)),
        # A fault takes back what came after the last step, until a step is beyond all others.
        (after(*TRAINED, broke(124.0)), 125.0, TimeSplit(useful=10, lost=5, idle=10)),
        (after(*TRAINED, broke(124.0), stepped(11, 130.0)), 135.0, TimeSplit(useful=15, lost=10, idle=10)),
        # A rollback is lost: steps 6 to 10 are made again.
        (
            after(*TRAINED, broke(124.0), stepped(6, 130.0), stepped(10, 134.0), stepped(11, 135.0)),
            135.0,
            TimeSplit(useful=10, lost=15, idle=10),
        ),
        # The same, where no fault was heard of: a round with other nodes, from an older checkpoint.
        (
            after(*TRAINED, GoodputLedger.on_pause, stepped(6, 130.0), stepped(11, 135.0)),
            135.0,
            TimeSplit(useful=10, lost=5, idle=20),
        ),
        # A hold, or another orderly pause, is idle; a fault meanwhile is lost from then on.
        (after(*TRAINED, GoodputLedger.on_pause), 135.0, TimeSplit(useful=10, idle=25)),
        (after(*TRAINED, lambda spent: spent.on_progress(122.0).on_pause()), 135.0, TimeSplit(useful=12, idle=23)),
        (after(*TRAINED, GoodputLedger.on_pause, broke(130.0)), 135.0, TimeSplit(useful=10, lost=5, idle=20)),
        (
            after(*TRAINED, GoodputLedger.on_pause, broke(130.0), stepped(11, 132.0)),
            135.0,
            TimeSplit(useful=13, lost=2, idle=20),
        ),
        # Who waits for nodes is idle, though a fault was why; then it goes on being lost.
        (after(*TRAINED, broke(121.0), lambda s: s.on_wait(123.0)), 135.0, TimeSplit(useful=10, lost=3, idle=22)),
        (
            after(
                *TRAINED, broke(121.0), lambda s: s.on_wait(123.0), lambda s: s.on_wait_end(130.0), stepped(11, 132.0)
            ),
            135.0,
            TimeSplit(useful=13, lost=5, idle=17),
        ),
        # A step that was made before the fault, and heard of after it.
        (
            after(*TRAINED, broke(121.0), lambda s: s.on_late_step(11, 120.8)),
            125.0,
            TimeSplit(useful=10.8, lost=4.2, idle=10),
        ),
        (
            after(*TRAINED, broke(121.0), lambda s: s.on_late_step(11, 120.8), stepped(11, 130.0)),
            130.0,
            TimeSplit(10.8, 9.2, 10),
        ),
    ],
)
def test_what_became_of_the_time(spent: GoodputLedger, at: float, times: TimeSplit) -> None:
    found = spent.totals_at(at)
    assert found == TimeSplit(*(pytest.approx(getattr(times, name)) for name in ("useful", "lost", "idle")))


def test_a_step_that_was_made_before_counts_once() -> None:
    spent = after(*TRAINED, broke(121.0), stepped(8, 130.0))
    assert spent.on_step(10, 131.0) == spent, "it is not beyond the highest"
    assert spent.on_step(11, 131.0).state == "useful"
    assert spent.on_late_step(10, 131.0) == spent


moments = st.floats(BEGAN - 5, BEGAN + 100)
moves: st.SearchStrategy[tuple[str, int, float]] = st.tuples(
    st.sampled_from(
        ["on_step", "on_progress", "on_late_step", "on_fault", "on_pause", "on_wait", "on_wait_end", "read"]
    ),
    st.integers(1, 12),
    moments,
)


def moved(spent: GoodputLedger, what: str, step: int, at: float) -> GoodputLedger:
    match what:
        case "on_step" | "on_late_step":
            return getattr(spent, what)(step, at)  # type: ignore[no-any-return]
        case "on_pause":
            return spent.on_pause()
        case _:
            return getattr(spent, what)(at)  # type: ignore[no-any-return]


@given(st.lists(moves, max_size=30))
def test_all_time_is_accounted_for_once_and_no_counter_ever_shrinks(history: list[tuple[str, int, float]]) -> None:
    spent, now, told = GoodputLedger(BEGAN), BEGAN, TimeSplit()
    for what, step, at in history:
        if what != "read":
            before = spent
            now = max(now, at)  # of what happened at `at` is heard now
            spent = moved(spent, what, step, at)
            assert spent.high_water >= before.high_water
            assert spent.totals_at(now).total == pytest.approx(now - BEGAN)
            continue
        found = spent.totals_at(now)
        after = monotonic_counters(told, found)
        assert after.total == pytest.approx(now - BEGAN), "the three add up to the time at every look"
        assert after.useful >= told.useful and after.lost >= told.lost and after.idle >= told.idle
        told = after


@given(st.lists(moves, max_size=20), st.lists(st.floats(0, 50), max_size=5))
def test_counters_say_what_the_ledger_says_as_soon_as_they_can(
    history: list[tuple[str, int, float]], looks: list[float]
) -> None:
    """However often and at whatever moments they were read before."""
    spent, now, told = GoodputLedger(BEGAN), BEGAN, TimeSplit()
    for what, step, at in history:
        now = max(now, at)
        if what != "read":
            spent = moved(spent, what, step, at)
        told = monotonic_counters(told, spent.totals_at(now))
    # As much of each as could have been told too much: then all is made good.
    final = spent.on_step(100, now).totals_at(now + 300)
    final = replace(final, lost=final.lost + 300, idle=final.idle + 300)
    for look in looks:
        told = monotonic_counters(told, spent.on_step(100, now).totals_at(now + look))
    told = monotonic_counters(told, final)
    assert (told.useful, told.lost, told.idle) == pytest.approx((final.useful, final.lost, final.idle))


def test_a_hang_that_was_told_as_useful_is_made_good_by_what_comes_next() -> None:
    trained = after(*TRAINED)
    told = monotonic_counters(TimeSplit(), trained.totals_at(140.0))
    assert told == TimeSplit(useful=30, idle=10), "nobody knows yet"
    hung = trained.on_fault(140.0)
    told = monotonic_counters(told, hung.totals_at(145.0))
    assert told == TimeSplit(useful=30, lost=5, idle=10)
    again = hung.on_step(11, 150.0)
    told = monotonic_counters(told, again.totals_at(155.0))
    assert told == TimeSplit(useful=30, lost=15, idle=10)
    told = monotonic_counters(told, again.totals_at(175.0))
    assert told == again.totals_at(175.0) == TimeSplit(useful=35, lost=30, idle=10)
