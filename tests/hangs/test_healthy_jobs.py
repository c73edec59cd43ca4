"""Healthy jobs that wait for less than 20 s: no kill, no restart. `benchmarks/healthy.py` has the longer ones."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.hangs.healthy import QUICK, SCRIPT_KINDS, HealthyWait, observe

UNLIKE = (
    HealthyWait("unequal all_to_all", "all-to-all", "idle", 9, workers=3),
    HealthyWait("receive from another program", "engine", "idle", 9),
)
"""Each was ended by a false proof, 5 s after the ranks had begun to wait."""


@pytest.mark.timeout(180)
def test_ranks_that_legitimately_differ_are_not_killed(tmp_path: Path) -> None:
    with ThreadPoolExecutor(len(UNLIKE)) as pool:
        outcomes = list(pool.map(lambda wait: observe(wait, "plain", tmp_path / wait.place), UNLIKE))
    assert [str(one) for one in outcomes if not one.ok] == []
    assert all(one.suspected for one in outcomes), "or nothing was tried"


@pytest.mark.system
@pytest.mark.timeout(300)
@pytest.mark.parametrize("script", SCRIPT_KINDS)
def test_short_waits_are_not_killed(tmp_path: Path, script: str) -> None:
    """Four jobs at a time: mostly they sleep."""

    def run(wait: HealthyWait) -> str:
        outcome = observe(wait, script, tmp_path / wait.name.replace("/", " "))
        return "" if outcome.ok else str(outcome)

    with ThreadPoolExecutor(4) as pool:
        assert [wrong for wrong in pool.map(run, [wait for wait in QUICK if not wait.missing()]) if wrong] == []
