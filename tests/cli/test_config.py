"""The three frozen values check themselves, in sentences that do the arithmetic."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from elasticd.errors import UsageError
from elasticd_agent.config import JobSpec, Mode, Policy

WRONG: list[tuple[dict[str, Any], str]] = [
    ({"slot_strikes": 5}, "slot_strikes 5 must not exceed no_progress_limit 3, .* lower it by 2"),
    ({"startup_ceiling_s": 0.4}, "must exceed user_error_wait_s 0.5 s, a part of it; raise it by more than 0.1 s"),
    ({"backoff_s": ()}, "a growing list of seconds"),
    ({"backoff_s": (0, 4, 2)}, "a growing list of seconds"),
    ({"backoff_s": (-1, 0)}, "a growing list of seconds"),
    ({"progress_ceiling_s": 0}, "progress_ceiling_s 0 must be more than 0"),
    ({"first_step_ceiling_s": float("nan")}, "first_step_ceiling_s nan must be more than 0"),
    ({"stop_grace_s": -1}, "stop_grace_s -1 cannot be negative"),
    ({"no_progress_limit": 0}, "no_progress_limit 0 must be at least 1"),
]


@pytest.mark.parametrize(("numbers", "sentence"), WRONG, ids=[next(iter(numbers)) for numbers, _ in WRONG])
def test_a_policy_that_cannot_work_says_what_would(numbers: dict[str, Any], sentence: str) -> None:
    with pytest.raises(UsageError, match=sentence):
        Policy(**numbers)


def test_a_slot_stays_out_longer_each_time_but_never_more_than_an_hour() -> None:
    assert [Policy().cooloff_s(times) for times in (1, 2, 3, 7, 99)] == [60, 120, 240, 3600, 3600]
    assert Policy(slot_cooloff_s=7200).cooloff_s(2) == 7200


def test_more_workers_at_least_than_at_most_is_refused_with_the_right_order() -> None:
    with pytest.raises(UsageError, match="write 2:4"):
        JobSpec("python", Mode.SCRIPT, "t.py", (), Path("/"), "job", "run", min_workers=4, max_workers=2)
