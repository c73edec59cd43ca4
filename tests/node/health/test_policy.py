"""When a node is fit, unhealthy or quarantined: tables, and what holds for any history whatever."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elasticd_agent.node.health.policy import (
    Healthy,
    Past,
    Quarantined,
    Rules,
    Unhealthy,
    blamed,
    looked,
    rebooted,
    verdict,
)
from elasticd_agent.node.health.result import Reading, bad, good, skipped

RULES = Rules(strikes=2, cooloff_s=60, cooloff_max_s=600, forgiven_s=10_000)
JOINED = Past(joined=True)


def through(past: Past, looks: str, rules: Rules = RULES, at: float = 0.0, every_s: float = 10.0) -> tuple[Past, float]:
    """A look every `every_s`: b bad, g good, s skipped, X something that has happened."""
    for letter in looks:
        reading = {
            "b": bad("a", "why"),
            "g": good("a", ""),
            "s": skipped("a", ""),
            "X": Reading("a", "bad", "X", 0, True),
        }
        past = looked(past, [reading[letter], good("other", "")], at, rules)
        at += every_s
    return past, at - every_s


def kind(past: Past, now: float) -> str:
    return type(verdict(past, now)).__name__


@pytest.mark.parametrize(
    ("looks", "says"),
    [
        ("g", "Healthy"),
        ("b", "Healthy"),  # a hiccup
        ("bg", "Healthy"),
        ("bgg", "Healthy"),
        ("bggg", "Healthy"),
        ("bgggb", "Healthy"),  # the first one is too long ago
        ("bb", "Unhealthy"),
        ("bgb", "Unhealthy"),  # it flaps
        ("bbb", "Unhealthy"),
        ("bbg", "Quarantined"),
        ("bbgb", "Unhealthy"),
        ("bbgggggg", "Quarantined"),  # 60 s from the first good look
        ("bbggggggg", "Healthy"),
        ("X", "Unhealthy"),  # it needs no second look
        ("Xg", "Quarantined"),
        ("Xs", "Quarantined"),
        ("bs", "Healthy"),
        ("bsb", "Healthy"),  # what is not looked at is forgotten
    ],
)
def test_a_node_that_has_joined(looks: str, says: str) -> None:
    past, now = through(JOINED, looks)
    assert kind(past, now) == says


@pytest.mark.parametrize(
    ("looks", "says"),
    [
        ("", "Unhealthy"),
        ("b", "Unhealthy"),
        ("g", "Healthy"),
        ("s", "Healthy"),
        ("bbbbg", "Healthy"),
        ("X", "Unhealthy"),
    ],
)
def test_before_it_joins_once_is_enough_and_nothing_is_held_against_it(looks: str, says: str) -> None:
    past, now = through(Past(), looks)
    assert kind(past, now) == says
    assert past.times == 0


def test_the_cool_off_doubles_up_to_a_bound_and_a_long_good_time_forgives() -> None:
    past, now, lefts = JOINED, 0.0, []
    for _ in range(7):
        past, now = through(past, "bbg", at=now)
        found = verdict(past, now)
        assert isinstance(found, Quarantined)
        lefts.append(round(found.left_s))
        now = past.until + 1
        assert kind(past, now) == "Healthy"
    assert lefts == [60, 120, 240, 480, 600, 600, 600]
    past, now = through(past, "bbg", at=now + RULES.forgiven_s)
    found = verdict(past, now)
    assert isinstance(found, Quarantined)
    assert found.left_s == 60


def test_it_says_what_is_wrong_then_what_was_and_how_often() -> None:
    past = looked(JOINED, [Reading("gpu xid", "bad", "GPU 3 had XID 79", certain=True)], 0.0, RULES)
    assert verdict(past, 0.0) == Unhealthy("gpu xid: GPU 3 had XID 79")
    past = looked(past, [], 30.0, RULES)
    found = verdict(past, 30.0)
    assert found == Quarantined(
        "this is over, but leaves the node out for 60 s (the first time): gpu xid: GPU 3 had XID 79", 60.0
    )


def test_who_is_to_blame_again_and_again_is_quarantined_though_all_is_well() -> None:
    past = blamed(JOINED, "rank 3 hung", 0.0, RULES)
    assert verdict(past, 0.0) == Healthy()
    assert kind(blamed(past, "rank 3 hung", RULES.blamed_within_s + 1, RULES), RULES.blamed_within_s + 1) == "Healthy"
    past = looked(past, [good("a", "")], 5.0, RULES)
    past = blamed(past, "rank 2 hung", 10.0, RULES)
    found = verdict(past, 10.0)
    assert found == Quarantined(
        "it was to blame 2 times within 60 minutes and is left out for 60 s (the first time); last: rank 2 hung", 60.0
    )
    past = looked(past, [good("a", "")], 70.0, RULES)
    assert verdict(past, 70.0) == Healthy()
    past = blamed(blamed(past, "", 80.0, RULES), "", 90.0, RULES)
    assert verdict(past, 90.0) == Quarantined(past.why, 120.0)


def test_a_reboot_ends_a_cool_off_and_keeps_count() -> None:
    past, now = through(JOINED, "bbg")
    past = rebooted(past)
    assert kind(past, now) == "Unhealthy"  # it has to be looked at first
    past, now = through(past, "g", at=now)
    assert (kind(past, now), past.times) == ("Healthy", 1)


READINGS = st.lists(
    st.builds(
        Reading,
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
def test_whatever_happens(history: list[tuple[float, list[Reading] | str]], strikes: int) -> None:
    rules = Rules(strikes, 10, 300, forgiven_s=2000)
    past, now, trouble = Past(), 0.0, float("-inf")
    for after_s, what in history:
        now += after_s
        before = past
        if isinstance(what, str):
            past = blamed(past, what, now, rules)
            trouble = now
        else:
            past = looked(past, what, now, rules)
            trouble = now if any(reading.outcome == "bad" for reading in what) else trouble
            if before.joined and sum(reading.outcome == "bad" for reading in what) == 0:
                assert past.times <= before.times
        found = verdict(past, now)
        assert past.times <= before.times + 1
        assert all(len(row.looks) <= 2 * strikes for row in past.rows)
        assert len(past.blames) < max(strikes, 1)
        if isinstance(found, Quarantined):
            assert 0 < found.left_s <= rules.cooloff_max_s
        if isinstance(found, Unhealthy) and past.joined:
            assert isinstance(what, str) or any(reading.outcome == "bad" for reading in what)
    # Left alone, it is taken again within the longest cool-off.
    past = looked(past, [good("a", "")], now + 1, rules)
    assert verdict(past, now + 1 + rules.cooloff_max_s) == Healthy()
    assert past.until <= max(trouble, now + 1) + rules.cooloff_max_s
