"""Steps a second: of steps that were made, never of the jump to where a checkpoint was."""

from __future__ import annotations

from elasticd_agent.telemetry.goodput import RATE_WINDOW_S, StepRate


def test_a_group_that_resumes_at_step_1000_has_not_made_1000_steps() -> None:
    rate = StepRate()
    assert rate.observe(0, 0.0, stepped=False) is None
    assert rate.observe(1000, 1.0, stepped=False) is None, "resumed, and has not stepped yet"
    assert rate.observe(1001, 1.5, stepped=True) is None
    assert rate.observe(1003, 2.0, stepped=True) is None
    assert rate.observe(1006, 2.5, stepped=True) == 5.0


def test_only_the_last_seconds_count() -> None:
    rate = StepRate()
    for second in range(30):
        last = rate.observe(100 * second if second < 15 else 1400 + second, float(second), stepped=True)
    assert last == 1.0
    assert rate.observe(1429, 29 + RATE_WINDOW_S + 1, stepped=True) is None, "nothing is left to compare with"
    rate.reset()
    assert rate.observe(1430, 42.0, stepped=True) is None
    assert rate.observe(1440, 42.0 + RATE_WINDOW_S, stepped=True) == 1.0
