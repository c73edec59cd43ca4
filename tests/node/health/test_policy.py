"""When a node is fit, unhealthy or quarantined: tables, and what holds for any history whatever."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elasticd_agent.node.health.policy import (
    HealthHistory,
    HealthRules,
    HealthyVerdict,
    QuarantinedVerdict,
    UnhealthyVerdict,
    after_checks,
    after_job_failure,
    after_reboot,
    health_verdict,
)
from elasticd_agent.node.health.result import CheckResult, failed, passed, skipped

RULES = HealthRules(strikes=2, cooloff_s=60, cooloff_max_s=600, streak_reset_s=10_000)
JOINED = HealthHistory(fit_since_boot=True)


def through(
    past: HealthHistory, looks: str, rules: HealthRules = RULES, at: float = 0.0, every_s: float = 10.0
) -> tuple[HealthHistory, float]:
    """A look every `every_s`: b bad, g good, s skipped, X something that has happened."""
    for letter in looks:
        reading = {
            "b": failed("a", "why"),
            "g": passed("a", ""),
            "s": skipped("a", ""),
            "X": CheckResult("a", "bad", "X", 0, True),
        }
        past = after_checks(past, [reading[letter], passed("other", "")], at, rules)
        at += every_s
    return past, at - every_s


def kind(past: HealthHistory, now: float) -> str:
    return type(health_verdict(past, now)).__name__


@pytest.mark.parametrize(
    ("looks", "says"),
    [
        ("g", "HealthyVerdict"),
        ("b", "HealthyVerdict"),  # a hiccup
        ("bg", "HealthyVerdict"),
        ("bgg", "HealthyVerdict"),
        ("bggg", "HealthyVerdict"),
        ("bgggb", "HealthyVerdict"),  # the first one is too long ago
        ("bb", "UnhealthyVerdict"),
        ("bgb", "UnhealthyVerdict"),  # it flaps
        ("bbb", "UnhealthyVerdict"),
        ("bbg", "QuarantinedVerdict"),
        ("bbgb", "UnhealthyVerdict"),
        ("bbgggggg", "QuarantinedVerdict"),  # 60 s from the first good look
        ("bbggggggg", "HealthyVerdict"),
        ("X", "UnhealthyVerdict"),  # it needs no second look
        ("Xg", "QuarantinedVerdict"),
        ("Xs", "QuarantinedVerdict"),
        ("bs", "HealthyVerdict"),
        ("bsb", "HealthyVerdict"),  # what is not looked at is forgotten
    ],
)
def test_a_node_that_has_joined(looks: str, says: str) -> None:
    past, now = through(JOINED, looks)
    assert kind(past, now) == says


@pytest.mark.parametrize(
    ("looks", "says"),
    [
        ("", "UnhealthyVerdict"),
        ("b", "UnhealthyVerdict"),
        ("g", "HealthyVerdict"),
        ("s", "HealthyVerdict"),
        ("bbbbg", "HealthyVerdict"),
        ("X", "UnhealthyVerdict"),
    ],
)
def test_before_it_joins_once_is_enough_and_nothing_is_held_against_it(looks: str, says: str) -> None:
    past, now = through(HealthHistory(), looks)
    assert kind(past, now) == says
    assert past.streak == 0


def test_the_cool_off_doubles_up_to_a_bound_and_a_long_good_time_forgives() -> None:
    past, now, lefts = JOINED, 0.0, []
    for _ in range(7):
        past, now = through(past, "bbg", at=now)
        found = health_verdict(past, now)
        assert isinstance(found, QuarantinedVerdict)
        lefts.append(round(found.left_s))
        now = past.quarantined_until + 1
        assert kind(past, now) == "HealthyVerdict"
    assert lefts == [60, 120, 240, 480, 600, 600, 600]
    past, now = through(past, "bbg", at=now + RULES.streak_reset_s)
    found = health_verdict(past, now)
    assert isinstance(found, QuarantinedVerdict)
    assert found.left_s == 60


def test_it_says_what_is_wrong_then_what_was_and_how_often() -> None:
    past = after_checks(JOINED, [CheckResult("gpu xid", "bad", "GPU 3 had XID 79", certain=True)], 0.0, RULES)
    assert health_verdict(past, 0.0) == UnhealthyVerdict("gpu xid: GPU 3 had XID 79")
    past = after_checks(past, [], 30.0, RULES)
    found = health_verdict(past, 30.0)
    assert found == QuarantinedVerdict(
        "this is over, but leaves the node out for 60 s (the first time): gpu xid: GPU 3 had XID 79", 60.0
    )


def test_who_is_to_blame_again_and_again_is_quarantined_though_all_is_well() -> None:
    past = after_job_failure(JOINED, "rank 3 hung", 0.0, RULES)
    assert health_verdict(past, 0.0) == HealthyVerdict()
    assert (
        kind(
            after_job_failure(past, "rank 3 hung", RULES.job_failure_window_s + 1, RULES),
            RULES.job_failure_window_s + 1,
        )
        == "HealthyVerdict"
    )
    past = after_checks(past, [passed("a", "")], 5.0, RULES)
    past = after_job_failure(past, "rank 2 hung", 10.0, RULES)
    found = health_verdict(past, 10.0)
    assert found == QuarantinedVerdict(
        "it was to blame 2 times within 60 minutes and is left out for 60 s (the first time); last: rank 2 hung", 60.0
    )
    past = after_checks(past, [passed("a", "")], 70.0, RULES)
    assert health_verdict(past, 70.0) == HealthyVerdict()
    past = after_job_failure(after_job_failure(past, "", 80.0, RULES), "", 90.0, RULES)
    assert health_verdict(past, 90.0) == QuarantinedVerdict(past.why, 120.0)


def test_a_reboot_ends_a_cool_off_and_keeps_count() -> None:
    past, now = through(JOINED, "bbg")
    past = after_reboot(past)
    assert kind(past, now) == "UnhealthyVerdict"  # it has to be looked at first
    past, now = through(past, "g", at=now)
    assert (kind(past, now), past.streak) == ("HealthyVerdict", 1)


READINGS = st.lists(
    st.builds(
        CheckResult,
        st.sampled_from("abc"),
        st.sampled_from(["good", "bad", "skipped"]),
        st.just("why"),
        certain=st.booleans(),
    ),
    max_size=3,
    unique_by=lambda reading: reading.check,
)
HISTORY = st.lists(st.tuples(st.floats(0.1, 5000), st.one_of(READINGS, st.just("blamed"))), max_size=40)


@given(HISTORY, st.integers(1, 4))
def test_whatever_happens(history: list[tuple[float, list[CheckResult] | str]], strikes: int) -> None:
    rules = HealthRules(strikes, 10, 300, streak_reset_s=2000)
    past, now, trouble = HealthHistory(), 0.0, float("-inf")
    for after_s, what in history:
        now += after_s
        before = past
        if isinstance(what, str):
            past = after_job_failure(past, what, now, rules)
            trouble = now
        else:
            past = after_checks(past, what, now, rules)
            trouble = now if any(reading.outcome == "bad" for reading in what) else trouble
            if before.fit_since_boot and sum(reading.outcome == "bad" for reading in what) == 0:
                assert past.streak <= before.streak
        found = health_verdict(past, now)
        assert past.streak <= before.streak + 1
        assert all(len(row.recent_failures) <= 2 * strikes for row in past.checks)
        assert len(past.job_failures) < max(strikes, 1)
        if isinstance(found, QuarantinedVerdict):
            assert 0 < found.left_s <= rules.cooloff_max_s
        if isinstance(found, UnhealthyVerdict) and past.fit_since_boot:
            assert isinstance(what, str) or any(reading.outcome == "bad" for reading in what)
    # Left alone, it is taken again within the longest cool-off.
    past = after_checks(past, [passed("a", "")], now + 1, rules)
    assert health_verdict(past, now + 1 + rules.cooloff_max_s) == HealthyVerdict()
    assert past.quarantined_until <= max(trouble, now + 1) + rules.cooloff_max_s
