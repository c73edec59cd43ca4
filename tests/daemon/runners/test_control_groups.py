"""Limits of jobs by control groups of version 2, on a real kernel: a user-mode Linux with this machine's files."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.faults.job import REPOSITORY

GUEST = Path(__file__).with_name("guest.py")


def user_mode_linux() -> str:
    kept = REPOSITORY / ".venv" / "prometheus" / "usr" / "bin" / "linux.uml"
    return str(kept) if kept.exists() else shutil.which("linux.uml") or ""


def boot(program: str, work: Path, within: float, *options: str) -> str:
    """Run a Linux with this file tree until it halts; what it wrote."""
    command = [program, "mem=1500M", "root=root", "rootfstype=hostfs", "quiet", "con=null", "con0=fd:0,fd:1", *options]
    # It ends with this process; its memory is a file.
    done = subprocess.run(
        ["setpriv", "--pdeathsig", "KILL", *command],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        errors="replace",
        timeout=within,
        env={"TMPDIR": "/dev/shm", "HOME": str(work)},
    )
    return done.stdout[-3000:] + done.stderr[-3000:]


@pytest.fixture(scope="module")
def guest(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    if not (program := user_mode_linux()) or os.geteuid() != 0:
        pytest.skip("no user-mode Linux, or not root: tests/install-servers system fetches it")
    work = tmp_path_factory.mktemp("guest")
    wrote = boot(program, work, 280, "rootflags=/", "ro", f"init={sys.executable}", "--", str(GUEST), str(work))
    result = work / "result.json"
    assert result.exists(), wrote
    found: dict[str, Any] = json.loads(result.read_text())
    assert "error" not in found, found
    return found


@pytest.mark.system
@pytest.mark.timeout(300)
def test_job_beyond_its_memory_is_killed_alone(guest: dict[str, Any]) -> None:
    assert guest["memory"]["outcome"] == "failed"
    assert "SIGKILL" in guest["memory"]["reason"]
    assert 20_000_000 < guest["memory"]["taken"] < 150_000_000  # the rest of 150 MB are its runner and interpreters
    assert guest["exit"] == 0, "the agent lives"


@pytest.mark.system
@pytest.mark.timeout(300)
def test_job_beyond_its_pids_gets_no_more(guest: dict[str, Any]) -> None:
    assert guest["pids"]["outcome"] == "failed"
    assert 5 < guest["pids"]["taken"] < 60


@pytest.mark.system
@pytest.mark.timeout(300)
def test_job_gets_its_share_in_its_own_group(guest: dict[str, Any]) -> None:
    assert guest["share"]["outcome"] == "succeeded"
    assert guest["share"]["group"].split() == ["job.share.3", "7"]
    assert guest["pids"]["group"].split() == ["job.pids.2", "100"]
    assert guest["agent"].endswith("/elasticd.service/agent")
