"""--numa-binding on this machine: each process of a job on its own CPU, in every way to start one."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path

import pytest

from tests.faults.conftest import StartJob
from tests.faults.job import Fault, until

CPUS = sorted(os.sched_getaffinity(0))
FLAGS = ["--numa-binding", "exclusive"]
BINDS = f"--numa-binding exclusive binds workers: slot 0 to CPU {CPUS[0]} and slot 1 to CPU {CPUS[-1]}"
pytestmark = pytest.mark.skipif(len(CPUS) != 2, reason="the shares are those of 2 CPUs on one NUMA node")


def memory_policy(pid: int) -> str:
    return Path(f"/proc/{pid}/numa_maps").read_text().split()[1]


def test_a_cold_worker_and_its_programs_run_on_its_own_cpu(job: StartJob) -> None:
    says = r'echo "$RANK: $(grep Cpus_allowed_list /proc/self/status) $(head -n 1 /proc/self/numa_maps)"'
    run = job("sh", "-c", says, flags=[*FLAGS, "--no-python"])
    assert run.wait() == 0
    found = sorted(line.split() for line in run.out.splitlines())
    assert [(words[0], words[2], words[4]) for words in found] == [
        ("0:", str(CPUS[0]), "local"),
        ("1:", str(CPUS[1]), "local"),
    ]
    assert BINDS in run.err


@pytest.mark.system
def test_a_rank_that_stays_and_the_one_that_is_replaced_keep_their_cpus(job: StartJob) -> None:
    run = job(
        "staying.py",
        *("--steps", "100000"),
        faults=[Fault(1, 13, "SIGKILL")],
        flags=[*FLAGS, "--checkpoint-dir", "checkpoints"],
    )
    pids = {}
    for round in (1, 2):
        until(partial(has_step, run.work, round), f"a step of round {round}")
        pids[round] = [run.worker(rank, round) for rank in (0, 1)]
        assert [os.sched_getaffinity(pid) for pid in pids[round]] == [{cpu} for cpu in CPUS]
        assert [memory_policy(pid) for pid in pids[round]] == ["local", "local"]
    assert [pids[1][rank] == pids[2][rank] for rank in (0, 1)] == [True, False]
    (run.work / "last").write_text("1")
    assert run.wait() == 0


def has_step(work: Path, round: int) -> bool:
    path = work / "steps-1"
    return path.exists() and any(line.startswith(f"{round} ") for line in path.read_text().splitlines())
