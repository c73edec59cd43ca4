"""When a node is healthy, unhealthy or quarantined: tables, and properties of any history."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elasticd_daemon.health.policy import (
    HealthHistory,
    HealthRules,
    HealthVerdict,
    after_checks,
    after_job_failure,
    after_reboot,
    health_verdict,
)
from elasticd_daemon.health.result import CheckResult, failed, passed, skipped

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
            "X": CheckResult("a", "failed", "X", 0, True),
        }
        past = after_checks(past, [reading[letter], passed("other", "")], at, rules)
        at += every_s
    return past, at - every_s


def kind(past: HealthHistory, now: float) -> str:
    return health_verdict(past, now).state


@pytest.mark.parametrize(
    ("looks", "says"),
    [
        ("g", "healthy"),
        ("b", "healthy"),  # a hiccup
        ("bg", "healthy"),
        ("bgg", "healthy"),
        ("bggg", "healthy"),
        ("bgggb", "healthy"),  # the first one is too long ago
        ("bb", "unhealthy"),
        ("bgb", "unhealthy"),  # it flaps
        ("bbb", "unhealthy"),
        ("bbg", "quarantined"),
        ("bbgb", "unhealthy"),
        ("bbgggggg", "quarantined"),  # 60 s from the first good look
        ("bbggggggg", "healthy"),
        ("X", "unhealthy"),  # it needs no second look
        ("Xg", "quarantined"),
        ("Xs", "quarantined"),
        ("bs", "healthy"),
        ("bsb", "healthy"),  # what is not looked at is forgotten
    ],
)
def test_node_after_registration(looks: str, says: str) -> None:
    past, now = through(JOINED, looks)
    assert kind(past, now) == says


@pytest.mark.parametrize(
    ("looks", "says"),
    [
        ("", "unhealthy"),
        ("b", "unhealthy"),
        ("g", "healthy"),
        ("s", "healthy"),
        ("bbbbg", "healthy"),
        ("X", "unhealthy"),
    ],
)
def test_before_registration_one_failure_counts_without_cool_off(looks: str, says: str) -> None:
    past, now = through(HealthHistory(), looks)
    assert kind(past, now) == says
    assert past.failure_streak == 0


def test_cool_off_doubles_up_to_a_bound_and_resets() -> None:
    past, now, lefts = JOINED, 0.0, []
    for _ in range(7):
        past, now = through(past, "bbg", at=now)
        found = health_verdict(past, now)
        assert found.state == "quarantined"
        lefts.append(round(found.quarantine_left_s))
        now = past.quarantined_until + 1
        assert kind(past, now) == "healthy"
    assert lefts == [60, 120, 240, 480, 600, 600, 600]
    past, now = through(past, "bbg", at=now + RULES.streak_reset_s)
    found = health_verdict(past, now)
    assert found.state == "quarantined"
    assert found.quarantine_left_s == 60


def test_reason_during_and_after_a_failure() -> None:
    past = after_checks(JOINED, [CheckResult("gpu xid", "failed", "GPU 3 had XID 79", certain=True)], 0.0, RULES)
    assert health_verdict(past, 0.0) == HealthVerdict(
        "unhealthy", "gpu xid: GPU 3 had XID 79", failing_checks=("gpu xid",)
    )
    past = after_checks(past, [], 30.0, RULES)
    found = health_verdict(past, 30.0)
    assert found == HealthVerdict(
        "quarantined", "quarantined for 60 s after a failure (the first time): gpu xid: GPU 3 had XID 79", 60.0
    )


def test_failing_shared_directory_leaves_the_node_healthy() -> None:
    full = CheckResult("disk /shared", "failed", "full", directory="/shared")
    past = HealthHistory()
    for at in range(3):
        past = after_checks(past, [full, passed("a", "")], float(at), RULES)
        assert health_verdict(past, at) == HealthVerdict(
            "healthy", "disk /shared: full", unusable_directories=("/shared",)
        )
    past = after_checks(past, [passed("disk /shared", ""), passed("a", "")], 10.0, RULES)
    assert health_verdict(past, 10.0) == HealthVerdict("healthy"), "no cool-off"


def test_repeated_job_failures_quarantine_a_passing_node() -> None:
    past = after_job_failure(JOINED, "rank 3 hung", 0.0, RULES)
    assert health_verdict(past, 0.0) == HealthVerdict("healthy")
    assert (
        kind(
            after_job_failure(past, "rank 3 hung", RULES.job_failure_window_s + 1, RULES),
            RULES.job_failure_window_s + 1,
        )
        == "healthy"
    )
    past = after_checks(past, [passed("a", "")], 5.0, RULES)
    past = after_job_failure(past, "rank 2 hung", 10.0, RULES)
    found = health_verdict(past, 10.0)
    assert found == HealthVerdict(
        "quarantined",
        "quarantined for 60 s as root cause 2 times within 60 minutes (the first time): last: rank 2 hung",
        60.0,
    )
    past = after_checks(past, [passed("a", "")], 70.0, RULES)
    assert health_verdict(past, 70.0) == HealthVerdict("healthy")
    past = after_job_failure(after_job_failure(past, "", 80.0, RULES), "", 90.0, RULES)
    assert health_verdict(past, 90.0) == HealthVerdict("quarantined", past.why, 120.0)


def test_reboot_ends_the_cool_off_and_keeps_the_streak() -> None:
    past, now = through(JOINED, "bbg")
    past = after_reboot(past)
    assert kind(past, now) == "unhealthy"  # it has to be looked at first
    past, now = through(past, "g", at=now)
    assert (kind(past, now), past.failure_streak) == ("healthy", 1)


READINGS = st.lists(
    st.builds(
        CheckResult,
        st.sampled_from("abc"),
        st.sampled_from(["passed", "failed", "skipped"]),
        st.just("why"),
        certain=st.booleans(),
    ),
    max_size=3,
    unique_by=lambda reading: reading.check,
)
HISTORY = st.lists(st.tuples(st.floats(0.1, 5000), st.one_of(READINGS, st.just("blamed"))), max_size=40)


@given(HISTORY, st.integers(1, 4))
def test_any_history(history: list[tuple[float, list[CheckResult] | str]], strikes: int) -> None:
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
            trouble = now if any(reading.outcome == "failed" for reading in what) else trouble
            if before.fit_since_boot and sum(reading.outcome == "failed" for reading in what) == 0:
                assert past.failure_streak <= before.failure_streak
        found = health_verdict(past, now)
        assert past.failure_streak <= before.failure_streak + 1
        assert all(len(row.recent_failures) <= 2 * strikes for row in past.checks)
        assert len(past.job_failure_times) < max(strikes, 1)
        if found.state == "quarantined":
            assert 0 < found.quarantine_left_s <= rules.cooloff_max_s
        if found.state == "unhealthy" and past.fit_since_boot:
            assert isinstance(what, str) or any(reading.outcome == "failed" for reading in what)
    # Left alone, it is taken again within the longest cool-off.
    past = after_checks(past, [passed("a", "")], now + 1, rules)
    assert health_verdict(past, now + 1 + rules.cooloff_max_s) == HealthVerdict("healthy")
    assert past.quarantined_until <= max(trouble, now + 1) + rules.cooloff_max_s


def test_failing_directories_are_apart_from_what_fails_of_the_node() -> None:
    results = [
        CheckResult("disk /shared", "failed", "full", directory="/shared"),
        CheckResult("disk /other", "passed", "", directory="/other"),
        CheckResult("gpu xid", "failed", "XID 79", certain=True),
    ]
    history = after_checks(after_checks(HealthHistory(), results, 0.0, RULES), results, 1.0, RULES)
    assert [check.directory for check in history.failing_directory_checks] == ["/shared"]
    assert len(history.failing_node_checks) == 1
