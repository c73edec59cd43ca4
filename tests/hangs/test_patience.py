"""The table of patience: what each kind of evidence gets, with a floor, and after kills for the same wait."""

from __future__ import annotations

import pytest

from elasticd_agent.hangs.patience import PATIENCE, Evidence, Shown, limit_s
from elasticd_agent.model.job import Policy

DEFAULT, FLOOR, LONG_FLOOR = Policy(), Policy(hang_floor_s=3.0), Policy(hang_floor_s=300.0)
QUICK = Shown(deadline_s=5.0)


@pytest.mark.parametrize(
    ("evidence", "policy", "shown", "expected"),
    [
        ("proven", DEFAULT, QUICK, 5),
        ("proven", DEFAULT, Shown(40.0), 40),
        ("proven", LONG_FLOOR, QUICK, 300),
        ("proven", DEFAULT, Shown(5.0, kills=2), 5),
        ("gil", DEFAULT, QUICK, 15),
        ("alike", DEFAULT, QUICK, 60),
        ("alike", FLOOR, Shown(3.0), 3),
        ("device", DEFAULT, QUICK, 60),
        ("device", FLOOR, Shown(3.0), 60),
        ("idle", DEFAULT, QUICK, 60),
        ("idle", DEFAULT, Shown(5.0, pause_s=20.0), 100),
        ("idle", DEFAULT, Shown(5.0, pause_s=2000.0), 1800),
        ("idle", FLOOR, Shown(5.0, pause_s=20.0), 5),
        ("idle", DEFAULT, Shown(5.0, kills=1), 120),
        ("idle", DEFAULT, Shown(5.0, kills=2), 1800),
        ("idle", DEFAULT, Shown(5.0, ceiling_s=7200.0, kills=3), 7200),
        ("idle", FLOOR, Shown(3.0, kills=1), 6),
        ("overdue", DEFAULT, QUICK, 60),
        ("overdue", DEFAULT, Shown(40.0), 200),
        ("overdue", FLOOR, Shown(3.0), 15),
        ("working", FLOOR, Shown(3.0), 1800),
        ("no_stack", DEFAULT, QUICK, 1800),
    ],
)
def test_limit(evidence: Evidence, policy: Policy, shown: Shown, expected: float) -> None:
    assert limit_s(evidence, policy, shown) == expected


def test_every_row_says_why() -> None:
    assert all(row.why for row in PATIENCE.values())
