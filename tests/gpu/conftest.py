"""`gpu_job(faults, …)` starts a job of NCCL ranks that share one GPU. Without a CUDA device every test here skips.

ELASTICD_TEST_DEVICE=cpu runs the same scripts and tests over gloo instead, on any machine: that shows that the harness
works, and nothing about GPUs.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Protocol

import pytest

from elasticd_agent.system.python_packages import installed_version
from elasticd_agent.workers.environment import FR_HOOKS_IN_TORCH
from tests.faults.job import Fault, Job
from tests.gpu.machine import missing

SCRIPT = Path(__file__).parent / "scripts" / "train.py"
ALONE = {"NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "1", "NCCL_IB_DISABLE": "1", "NCCL_SOCKET_IFNAME": "lo"}
"""Ranks that pretend to be on machines of their own must not find each other's device: sockets are what is left."""
TUNED = ("--hang-floor", "2s", "--stopped-after", "1s", "--hang-factor", "3")


class StartGpuJob(Protocol):
    def __call__(
        self,
        faults: Sequence[Fault] = (),
        *,
        workers: int = 2,
        communicators: int = 1,
        script: Path = SCRIPT,
        args: Sequence[str] = (),
    ) -> Job: ...


@pytest.fixture(scope="session")
def device() -> str:
    """What the jobs train on: "cuda", or "cpu" where the switch says so."""
    wanted = os.environ.get("ELASTICD_TEST_DEVICE", "cuda")
    assert wanted in ("cuda", "cpu"), f"ELASTICD_TEST_DEVICE={wanted}: cuda or cpu"
    if wanted == "cuda" and (why := missing(os.environ)):
        pytest.skip(f"{why} (ELASTICD_TEST_DEVICE=cpu tries the harness without one)")
    return wanted


@pytest.fixture(params=["", "nccl2"])
def nccl2(request: pytest.FixtureRequest, device: str) -> bool:
    """torch makes its second class for "nccl"."""
    if request.param and (device == "cpu" or torch_version() < (2, 14)):
        pytest.skip("this torch has one class for NCCL" if device == "cuda" else "gloo has one class")
    return bool(request.param)


@pytest.fixture
def recorder(nccl2: bool) -> None:
    """torch 2.14 records nothing of nccl2."""
    if nccl2 and torch_version() < FR_HOOKS_IN_TORCH:
        pytest.skip("this torch has no recorder of nccl2")


def torch_version() -> tuple[int, int]:
    found = installed_version("torch", sys.executable, {})
    assert found is not None
    return found


@pytest.fixture
def gpu_job(tmp_path: Path, device: str, nccl2: bool) -> Iterator[StartGpuJob]:
    started: list[Job] = []

    def start(
        faults: Sequence[Fault] = (),
        *,
        workers: int = 2,
        communicators: int = 1,
        script: Path = SCRIPT,
        args: Sequence[str] = (),
    ) -> Job:
        work = tmp_path / f"job-{len(started)}"
        first = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
        env = {"TEST_DEVICE": device, "TEST_COMMUNICATORS": str(communicators), **ALONE}
        env["TORCH_DIST_USE_NCCL2"] = str(int(nccl2))
        env["CUDA_VISIBLE_DEVICES"] = first if device == "cuda" else ""
        # With it LOCAL_RANK is 0 everywhere: all ranks take the one device there is.
        flags = ["--virtual-local-rank", "--max-restarts", "1000", "--log-dir", str(work / "log"), *TUNED]
        flags += ["--checkpoint-dir", str(work / "checkpoints")]
        started.append(Job(work, script, *args, workers=str(workers), flags=flags, faults=faults, env=env))
        return started[-1]

    yield start
    for job in started:
        job.end()
