"""What happens to a group -> what becomes of the node's time, one happening after the other."""

from __future__ import annotations

import pytest

from elasticd.heartbeat.record import Heartbeat, StepSource
from elasticd_agent.hangs.observer import Observation
from elasticd_agent.model.log_events import TimeSplit
from elasticd_agent.model.records import BudgetState, Exclusion, Member, Round
from elasticd_agent.telemetry.goodput import AGREEMENT_S, GoodputLedger, GoodputTracker, follows_fault

ME, OTHER = "a", "b"
BACKOFF_S = (0.0, 1.0, 2.0, 60.0)


def round(
    number: int,
    cause: str = "start",
    *,
    nodes: str = ME,
    high_water: int = 0,
    streak: int = 0,
    lost: str = "",
    **more: object,
) -> Round:
    return Round(
        number,
        tuple(Member(node, "i", (0,)) for node in nodes),
        cause=cause,
        budget=BudgetState(high_water=high_water, streak=streak),
        excluded=tuple(Exclusion(node, 1, 0.0) for node in lost),
        **more,  # type: ignore[arg-type]
    )


def seen(
    number: int, step: int, at: float, first_at: float | None = None, source: StepSource = StepSource.SESSION
) -> Observation:
    first = round_ns(at if first_at is None else first_at)
    return Observation(
        number, (Heartbeat(step=step, progress_ns=round_ns(at), first_step_ns=first, source=source),), (), 0.0
    )


def round_ns(seconds: float) -> int:
    return int(seconds * 1e9)


def trained() -> GoodputTracker:
    """Ten steps of a second each, the first of them finished at 10; all times are from 0."""
    spending = GoodputTracker(ME, GoodputLedger(0.0), BACKOFF_S)
    spending.on_round(round(1), 1.0)
    for step in range(1, 11):
        assert spending.on_observation(seen(1, step, 9.0 + step, first_at=10.0)) is None
    return spending


def exactly(useful: float, lost: float, idle: float) -> TimeSplit:
    return TimeSplit(pytest.approx(useful), pytest.approx(lost), pytest.approx(idle))


def test_a_crash_here_from_the_last_step_to_the_first_new_one() -> None:
    spending = trained()
    spending.on_fault(1, 19.5)
    spending.on_group_ending(1)
    spending.on_group_ended(1, 19.6)
    spending.on_round(round(2, "crash", high_water=10), 19.7)
    assert spending.on_observation(seen(2, 6, 25.0)) is None
    assert spending.on_observation(seen(2, 10, 29.0, first_at=25.0)) is None
    cost = spending.on_observation(seen(2, 11, 30.0, first_at=25.0))
    assert cost == pytest.approx(11.0)
    assert spending.totals_at(31.0) == exactly(10, 11, 10)
    assert spending.on_observation(seen(2, 12, 31.0, first_at=25.0)) is None, "it was made good once"
    for number, at in ((2, 31.5), (3, 35.0)):  # the second one before the first was made good
        spending.on_fault(number, at)
        spending.on_round(round(number + 1, "crash", high_water=12), at + 0.2)
    assert spending.on_observation(seen(4, 13, 40.0)) == pytest.approx(9.0)


def test_a_fault_of_a_round_that_has_ended_is_none_of_the_next() -> None:
    spending = trained()
    spending.on_round(round(2, "crash", high_water=10), 19.7)
    assert spending.on_observation(seen(2, 11, 30.0)) == pytest.approx(11.0)
    spending.on_fault(1, 31.0)
    assert spending.totals_at(40.0) == exactly(19, 11, 10)


def test_a_crash_elsewhere_is_heard_of_by_the_next_round() -> None:
    spending = trained()
    spending.on_round(round(2, "crash", high_water=10), 19.7)
    spending.on_group_ending(1)
    assert spending.totals_at(29.0) == exactly(9, 10, 10)


def test_a_lost_node_is_a_fault_and_one_that_leaves_is_none() -> None:
    assert follows_fault(round(2, "resize", lost=OTHER))
    assert not follows_fault(round(2, "resize"))
    for news, lost, idle in ((round(2, "resize", lost=OTHER), 10, 10), (round(2, "resize"), 0, 20)):
        spending = trained()
        spending.on_round(news, 20.0)
        assert spending.totals_at(29.0) == exactly(9, lost, idle)


def test_an_earlier_loss_of_a_node_is_no_fault_of_this_round() -> None:
    assert not follows_fault(Round(2, (Member(ME, "i", (0,)),), cause="resize", excluded=(Exclusion(OTHER, 1, 3.0),)))


def test_what_was_trained_again_after_a_round_without_a_fault_is_lost() -> None:
    spending = trained()
    spending.on_round(round(2, "resize", high_water=10), 20.0)
    assert spending.on_observation(seen(2, 6, 25.0)) is None
    assert spending.on_observation(seen(2, 11, 30.0, first_at=25.0)) == pytest.approx(5.0)
    assert spending.totals_at(30.0) == exactly(9, 5, 16)


def test_a_hold_is_idle_from_its_checkpoint_on() -> None:
    spending = trained()
    spending.on_pause(19.5)
    assert spending.on_observation(seen(1, 10, 19.5, first_at=10.0)) is None
    assert spending.totals_at(21.0) == exactly(9.5, 0, 11.5), "they stand still, and train nothing again"
    spending.on_round(round(2, "resize", high_water=10), 21.0)
    spending.on_observation(seen(2, 11, 23.0))
    assert spending.totals_at(24.0) == exactly(10.5, 0, 13.5)


def test_who_has_only_gone_back_to_a_checkpoint_has_made_no_step() -> None:
    spending = trained()
    spending.on_round(round(2, "resize", high_water=10), 20.0)
    spending.on_observation(seen(2, 10, 21.0, first_at=0.0))
    assert spending.totals_at(25.0) == exactly(9, 0, 16)
    anew = GoodputTracker(ME, GoodputLedger(0.0), BACKOFF_S)
    anew.on_round(round(2), 1.0)
    anew.on_observation(seen(2, 10, 21.0, first_at=0.0))
    assert anew.totals_at(25.0) == exactly(0, 0, 25)


def test_a_step_before_the_fault_was_reported_counts() -> None:
    """It does not end the fault."""
    spending = trained()
    spending.on_fault(1, 20.5)
    assert spending.on_observation(seen(1, 11, 20.0, first_at=10.0)) is None
    assert spending.totals_at(25.0) == exactly(10, 5, 10)
    spending.on_round(round(2, "crash", high_water=11), 21.0)
    assert spending.on_observation(seen(1, 12, 22.0, first_at=10.0)) is None, "a group that was ended does nothing new"
    assert spending.totals_at(25.0) == exactly(10, 5, 10)


def test_a_hang_that_is_only_reported_ends_with_the_next_step() -> None:
    spending = trained()
    spending.on_fault(1, 30.0, ends=False)
    assert spending.totals_at(35.0) == exactly(9, 16, 10)
    assert spending.on_observation(seen(1, 11, 40.0, first_at=10.0)) == pytest.approx(21.0)
    assert spending.totals_at(41.0) == exactly(10, 21, 10)


def test_a_plain_script_counts_from_0_in_each_round_and_every_step_is_new() -> None:
    spending = GoodputTracker(ME, GoodputLedger(0.0), BACKOFF_S)
    spending.on_round(round(1), 1.0)
    spending.on_observation(seen(1, 50, 10.0, source=StepSource.HOOK))
    spending.on_round(round(2, "crash", high_water=50), 12.0)
    assert spending.on_observation(seen(2, 1, 15.0, source=StepSource.HOOK)) == pytest.approx(5.0)
    assert spending.ledger.high_water == 51


def test_who_joins_late_trains_nothing_new_until_the_others_do() -> None:
    spending = GoodputTracker(ME, GoodputLedger(0.0), BACKOFF_S)
    spending.on_round(round(7, "resize", nodes=OTHER, high_water=100), 1.0)
    spending.on_round(round(8, "resize", nodes=OTHER + ME, high_water=100), 5.0)
    spending.on_observation(seen(8, 91, 10.0))
    spending.on_observation(seen(8, 101, 20.0, first_at=10.0))
    assert spending.totals_at(21.0) == exactly(1, 10, 10)


def test_too_few_nodes_are_waited_for() -> None:
    spending = trained()
    spending.on_fault(1, 20.0)
    spending.on_group_ending(1)
    spending.on_waiting(20.5)
    assert spending.totals_at(100.0) == exactly(9, 1.5, 89.5), "where the planner is"
    spending.on_round(round(2, "resize", lost=OTHER, high_water=10), 90.0)
    spending.on_observation(seen(2, 11, 95.0))
    assert spending.totals_at(96.0) == exactly(10, 6.5, 79.5)

    spending = trained()
    spending.on_fault(1, 20.0)
    spending.on_group_ended(1, 21.0)
    assert spending.totals_at(21.0 + AGREEMENT_S) == exactly(9, 2 + AGREEMENT_S, 10), "to agree takes some time, too"
    assert spending.totals_at(121.0 + AGREEMENT_S) == exactly(9, 2 + AGREEMENT_S, 110)


def test_who_does_not_plan_takes_the_backoff_for_a_loss_and_no_more() -> None:
    spending = trained()
    spending.on_round(round(2, "crash", streak=2), 20.0)
    spending.on_fault(2, 22.0)
    spending.on_group_ended(2, 22.0)
    assert spending.totals_at(100.0).lost == pytest.approx(22.0 - 19.0 + 2.0 + AGREEMENT_S)
    spending.on_round(round(3, "crash", streak=9), 100.0)
    spending.on_group_ended(3, 101.0)
    assert spending.totals_at(200.0).lost == pytest.approx(5.0 + AGREEMENT_S + 1.0 + BACKOFF_S[-1] + AGREEMENT_S)


def test_a_fault_of_a_round_that_goes_on_elsewhere_costs_nothing_here() -> None:
    """Also where this node's agent plans, and so hears of it before there is another round."""
    for cause, lost in (("resize", 0.0), ("crash", 1.0)):
        spending = trained()
        spending.on_round(round(2, cause, nodes=OTHER, high_water=10), 20.0)
        spending.on_fault(2, 50.0)
        assert spending.totals_at(80.0) == exactly(9, lost, 71 - lost)


def test_the_planner_may_wait_for_more_nodes_while_all_trains() -> None:
    spending = trained()
    spending.on_waiting(19.5)
    spending.on_fault(1, 20.0)
    assert spending.totals_at(30.0) == exactly(9, 11, 10)


def test_the_end_of_a_job_is_no_loss() -> None:
    spending = trained()
    spending.on_exit(25.0)
    spending.on_group_ended(1, 25.5)
    spending.on_round(Round(2, (), outcome="succeeded", exit_code=0), 25.6)
    assert spending.totals_at(30.0) == exactly(15, 0, 15)


def test_step_of_a_round_that_is_not_known_yet_waits_for_the_round() -> None:
    spending = trained()
    assert spending.on_observation(seen(2, 11, 21.0)) is None
    assert spending.ledger.high_water == 10
    spending.on_round(round(2, "resize", high_water=10), 20.5)
    spending.on_observation(seen(2, 11, 21.5, first_at=21.0))
    assert spending.ledger.high_water == 11
