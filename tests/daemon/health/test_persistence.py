"""The health history across restarts and reboots, with any content of the file."""

from __future__ import annotations

import json
import logging
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elasticd_daemon.health.persistence import HealthFile
from elasticd_daemon.health.policy import (
    HealthHistory,
    HealthRules,
    HealthVerdict,
    after_checks,
    after_job_failure,
    health_verdict,
)
from elasticd_daemon.health.result import failed

RULES = HealthRules()


def test_cool_off_continues_within_a_boot(tmp_path: Path) -> None:
    past = after_checks(HealthHistory(fit_since_boot=True), [failed("a", "full")] * 1, 100.0, HealthRules(strikes=1))
    past = after_job_failure(past, "x", 110.0, RULES)
    kept = HealthFile(tmp_path / "h", "b")
    kept.max_gpus = 8
    kept.save(past, 120.0)
    again = HealthFile(tmp_path / "h", "b")
    found = again.load(130.0)
    assert health_verdict(found, 130.0) == HealthVerdict("unhealthy", "a: full", failing_checks=("a",))
    cooling = after_checks(found, [], 130.0, RULES)
    assert health_verdict(cooling, 130.0) == HealthVerdict("quarantined", past.why, 60.0)
    assert (
        found.failure_streak,
        found.job_failure_times,
        found.last_failure_at,
        found.fit_since_boot,
        again.max_gpus,
    ) == (
        1,
        (110.0,),
        110.0,
        True,
        8,
    )


def test_reboot_keeps_only_the_streak(tmp_path: Path) -> None:
    past = after_checks(HealthHistory(fit_since_boot=True), [failed("a", "full")], 5000.0, HealthRules(strikes=1))
    HealthFile(tmp_path / "h", "b").save(past, 5010.0)
    found = HealthFile(tmp_path / "h", "c").load(3.0)
    assert (found.failure_streak, found.fit_since_boot, found.checks, found.job_failure_times) == (1, False, (), ())
    assert found.last_failure_at == -7.0
    assert health_verdict(found, 3.0).state == "unhealthy"


def test_file_is_private_and_alone(tmp_path: Path) -> None:
    HealthFile(tmp_path / "health.json", "b").save(HealthHistory(), 1.0)
    assert os.listdir(tmp_path) == ["health.json"]
    assert (tmp_path / "health.json").stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("text", [b"", b"{", b"[]", b'{"version": "9.0"}', b'{"version": "1.0"}', b"\xff", b"null"])
def test_invalid_file_is_dropped_with_a_warning(tmp_path: Path, text: bytes, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "h").write_bytes(text)
    with caplog.at_level(logging.WARNING):
        assert HealthFile(tmp_path / "h", "b").load(1.0) == HealthHistory()
    assert "the health history of this node is lost" in caplog.text


def test_missing_directory_is_logged_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    kept = HealthFile(tmp_path / "none" / "h", "b")
    for _ in range(3):
        kept.save(HealthHistory(), 1.0)
    assert [record.levelname for record in caplog.records] == ["WARNING"]


@given(st.floats(1, 1e6), st.floats(0, 1e6), st.integers(0, 9), st.lists(st.floats(0, 1e5), max_size=3), st.booleans())
def test_history_round_trips(
    tmp_path_factory: pytest.TempPathFactory, at: float, later_s: float, times: int, ages: list[float], joined: bool
) -> None:
    path = tmp_path_factory.getbasetemp() / "health-any.json"
    past = HealthHistory(
        fit_since_boot=joined,
        failure_streak=times,
        quarantined_until=at + 50,
        last_failure_at=at - 1,
        why="w",
        job_failure_times=tuple(at - a for a in ages),
    )
    HealthFile(path, "b").save(past, at)
    found = HealthFile(path, "b").load(at + later_s)
    assert (found.fit_since_boot, found.failure_streak, found.why) == (joined, times, "w")
    assert found.quarantined_until == pytest.approx(past.quarantined_until)
    assert found.last_failure_at == pytest.approx(past.last_failure_at)
    assert found.job_failure_times == pytest.approx(past.job_failure_times)
    assert "wall" not in json.loads(path.read_bytes())
