"""An upgrade under `elasticd run`: every file of the installation moves; evidence, verdict and recovery still work."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from tests.faults.conftest import StartJob
from tests.faults.moved_version import hang_a_rank, install, kill_owner, upgrade


@pytest.mark.system
def test_upgrade_under_a_running_job(job: StartJob, tmp_path: Path) -> None:
    site = install(tmp_path / "site")
    run = job("train.py", "1000000", env={"PYTHONPATH": str(site)}, flags=["--log-dir", str(tmp_path / "logs")])
    run.step(20)
    upgrade(site)

    hang_a_rank(run.worker(1), run.events, next((tmp_path / "logs").rglob("round-1")).parent, lambda: run.err)
    run.event("first_step", round=2)
    kill_owner(run.pid)
    run.event("first_step", round=3)
    run.process.send_signal(signal.SIGTERM)
    run.wait()
