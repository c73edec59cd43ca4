"""`session.barrier` under elasticd run and torchrun; plain python is in test_session.py."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.faults.job import Job

MISSING = (
    r"barrier 'epoch': 1 of 2 ranks is missing after 1\.5 s: "
    r"rank 1 \(step 0, phase (?:eval(?: for \d s)?, reported .* s|starting, reported more than .* s ago)\)"
)


@pytest.fixture
def job(tmp_path: Path, scripts: Path) -> Iterator[Job]:
    job = Job(tmp_path, scripts / "meet.py")
    yield job
    job.end()


def test_missed_barrier_under_elasticd_restarts(job: Job) -> None:
    """Under elasticd a missed barrier is a restart that names the missing rank and blames no slot."""
    assert job.wait() == 0, job.err
    assert sorted(re.findall(r"rank \d passed", job.out)) == ["rank 0 passed", "rank 1 passed"]
    again = job.event("round_published", round=2)
    told = rf"rank 0 lost its peers: it exited with code 1 \(elasticd\.errors\.BarrierTimeout: {MISSING}\)"
    assert re.search(told, again["reason"]), again["reason"]
    assert not job.events("round_published", round=3)


@pytest.mark.system
def test_missed_barrier_under_torchrun_names_rank(scripts: Path, environment: dict[str, str]) -> None:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [*torchrun, str(scripts / "meet.py")],
        env={**environment, "GLOO_SOCKET_IFNAME": "lo"},
        capture_output=True,
        text=True,
        timeout=90,
        check=False,
    )
    assert done.returncode == 1
    assert re.search(rf"BarrierTimeout: {MISSING}", done.stderr), done.stderr
