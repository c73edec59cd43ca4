"""docs/hangs.md promises the times that the rules use."""

from __future__ import annotations

from pathlib import Path

import pytest

from elasticd_agent.hangs import deadlines, verdict
from elasticd_agent.hangs.patience import LIMIT_RULES, OVERDUE_AFTER_DEADLINES, HangEvidence
from elasticd_agent.model.job import MIN_DEADLINE_S, Policy

PAGE = (Path(__file__).parents[2] / "docs" / "hangs.md").read_text()
SHOWN: dict[HangEvidence, str] = {
    "proven": "proof:",
    "gil": "native code holds the GIL",
    "loading": "weak: a rank is idle outside of collectives",
    "alike": "all wait alike in one collective",
    "device": "all wait alike in one collective",
    "unrecorded": "the same, where a rank has a process group",
    "idle": "weak: a rank is idle outside of collectives",
    "overdue": "a rank waits in a collective while others make steps",
    "left": "a rank is idle after others have ended",
    "outside": "a person is at a debugger's prompt",
}
USUAL = Policy()


def row(first: str) -> str:
    """What the table says behind the cell that begins so."""
    return cells(first)[2]


def cells(first: str) -> list[str]:
    (found,) = (line for line in PAGE.splitlines() if line.startswith(f"| {first}"))
    return found.split("|")


def test_every_evidence_with_a_time_is_on_the_page() -> None:
    assert {name for name, one in LIMIT_RULES.items() if one.report_s is not None} == SHOWN.keys()


@pytest.mark.parametrize("name", SHOWN)
def test_seconds_of_evidence(name: HangEvidence) -> None:
    seconds, ends = LIMIT_RULES[name].report_s, cells(SHOWN[name])[3]
    assert f" {seconds:g} s" in row(SHOWN[name])
    assert {"at once": "the same", "if cheap": "below", "at ceiling": "the ceiling", "never": "never"}[
        LIMIT_RULES[name].kill_when
    ] in ends


@pytest.mark.parametrize(
    ("first", "text"),
    [
        ("a process is stopped", f"({USUAL.stopped_after_s:g} s)"),
        ("a worker is a zombie", f"{verdict.ZOMBIE_S:g} s"),
        ("a rank waits in a collective while others", f"{OVERDUE_AFTER_DEADLINES:g} deadlines"),
        ("steps", f"({USUAL.hang_factor:g}) × the longest recent step, at least {MIN_DEADLINE_S:g} s"),
        ("declared evaluations", f"({USUAL.progress_ceiling_s / 60:g} min)"),
        ("before the first step", f"at least {deadlines.STARTUP_FLOOR_S / 60:g} min"),
        ("before the first step", f"`--startup-ceiling` ({USUAL.startup_ceiling_s / 60:g} min)"),
        ("before the first step", f"`--first-step-ceiling` ({USUAL.first_step_ceiling_s / 60:g} min)"),
        ("all training is done", f"at least {deadlines.EXIT_FLOOR_S:g} s"),
        ("ranks at a `session.barrier`", f"{verdict.TIMEOUT_GRACE_S:g} s"),
    ],
)
def test_other_times(first: str, text: str) -> None:
    assert text in row(first)
