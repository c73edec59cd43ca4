"""The table of patience: what each kind of evidence gets, with a floor, and after kills for the same wait."""

from __future__ import annotations

import math

import pytest

from elasticd_agent.hangs.patience import (
    LIMIT_RULES,
    HangEvidence,
    LimitFacts,
    ReportAndKillLimits,
    report_and_kill_limits,
    retransmission_s,
)
from elasticd_agent.model.job import Policy

DEFAULT, FLOOR, LONG_FLOOR = Policy(), Policy(hang_floor_s=3.0), Policy(hang_floor_s=300.0)
QUICK = LimitFacts(deadline_s=5.0)
CHEAP = LimitFacts(deadline_s=5.0, restart_is_cheap=True)


def cheap(**facts: float) -> LimitFacts:
    return LimitFacts(**{"deadline_s": 5.0, "restart_is_cheap": True, **facts})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("evidence", "policy", "facts", "report_s", "kill_s"),
    [
        ("proven", DEFAULT, QUICK, 5, 5),
        ("proven", DEFAULT, LimitFacts(40.0), 40, 40),
        ("proven", LONG_FLOOR, QUICK, 300, 300),
        ("proven", DEFAULT, LimitFacts(5.0, kills_for_wait=2), 5, 5),
        ("gil", DEFAULT, QUICK, 15, 15),
        ("loading", DEFAULT, QUICK, 60, 1800),
        ("loading", DEFAULT, CHEAP, 60, 60),
        ("alike", DEFAULT, QUICK, 60, 60),
        ("alike", FLOOR, LimitFacts(3.0), 3, 3),
        ("device", DEFAULT, QUICK, 60, 60),
        ("device", FLOOR, LimitFacts(3.0), 60, 60),
        ("alike", DEFAULT, LimitFacts(5.0, retransmission_s=137.0), 167, 167),
        ("device", FLOOR, LimitFacts(3.0, retransmission_s=4.0), 60, 60),
        ("gil", DEFAULT, LimitFacts(5.0, retransmission_s=137.0), 15, 15),
        # What a restart costs decides.
        ("idle", DEFAULT, QUICK, 60, 1800),
        ("idle", DEFAULT, LimitFacts(5.0, ceiling_s=603.0), 60, 603),
        ("idle", DEFAULT, LimitFacts(5.0, ceiling_s=23.0), 60, 60),
        ("idle", FLOOR, LimitFacts(3.0), 3, 3),
        ("idle", DEFAULT, CHEAP, 60, 60),
        ("idle", DEFAULT, cheap(pause_s=20.0), 100, 100),
        ("idle", DEFAULT, cheap(pause_s=2000.0), 1800, 1800),
        ("idle", FLOOR, cheap(pause_s=20.0), 5, 5),
        ("idle", DEFAULT, cheap(kills_for_wait=1), 60, 120),
        ("idle", DEFAULT, cheap(kills_for_wait=2), 60, 240),
        ("idle", DEFAULT, cheap(ceiling_s=7200.0, kills_for_wait=9), 60, 7200),
        ("idle", DEFAULT, cheap(deadline_s=600.0, kills_for_wait=1), 600, 1200),
        ("idle", DEFAULT, cheap(deadline_s=600.0, kills_for_wait=2), 600, 1800),
        ("idle", DEFAULT, cheap(deadline_s=2000.0, kills_for_wait=1), 2000, 2000),
        ("idle", FLOOR, LimitFacts(3.0, kills_for_wait=1), 3, 6),
        # A rank that trains is not hung, nor is an export after the others have ended.
        ("overdue", DEFAULT, CHEAP, 60, 1800),
        ("overdue", DEFAULT, LimitFacts(40.0), 200, 1800),
        ("overdue", FLOOR, LimitFacts(3.0), 15, 15),
        ("left", DEFAULT, CHEAP, 60, 1800),
        ("left", FLOOR, LimitFacts(3.0), 3, 3),
        ("outside", FLOOR, CHEAP, 60, math.inf),
        ("working", FLOOR, LimitFacts(3.0), 1800, 1800),
        ("no_stack", DEFAULT, CHEAP, 1800, 1800),
        # A verdict that repeats is doubted.
        ("proven", DEFAULT, LimitFacts(5.0, kills_for_wait=1, repeats_after_kill=True), 60, 1800),
        ("proven", DEFAULT, cheap(kills_for_wait=1, repeats_after_kill=True), 60, 120),
        ("gil", FLOOR, LimitFacts(3.0, kills_for_wait=1, repeats_after_kill=True), 3, 6),
        ("overdue", DEFAULT, LimitFacts(5.0, kills_for_wait=1, repeats_after_kill=True), 60, 1800),
    ],
)
def test_limits(evidence: HangEvidence, policy: Policy, facts: LimitFacts, report_s: float, kill_s: float) -> None:
    assert report_and_kill_limits(evidence, policy, facts) == ReportAndKillLimits(report_s, kill_s)


@pytest.mark.parametrize(
    ("environment", "seconds"),
    [
        ({}, 0.0),
        ({"NCCL_IB_TIMEOUT": "22"}, 137.4),
        ({"NCCL_IB_TIMEOUT": "22", "NCCL_IB_RETRY_CNT": "3"}, 68.7),
        ({"NCCL_IB_RETRY_CNT": "7"}, 34.4),
        ({"NCCL_IB_TIMEOUT": "soon"}, 0.0),
        ({"NCCL_IB_TIMEOUT": "9" * 99}, 70368.7),
    ],
)
def test_links_send_again(environment: dict[str, str], seconds: float) -> None:
    assert retransmission_s(environment) == pytest.approx(seconds, abs=0.1)


def test_every_row_says_why() -> None:
    assert all(row.why for row in LIMIT_RULES.values())
