"""NCCL on one GPU: warm forks, crashes, hangs, and memory that is given back. `make test-gpu` runs it."""

from __future__ import annotations

import json
import os
import subprocess
from dataclasses import dataclass

import pytest

from elasticd_agent.hangs.collector.record import NodeEvidence
from tests.faults.job import Fault, Job, until
from tests.gpu.conftest import StartGpuJob

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]

ROUNDS = int(os.environ.get("ELASTICD_GPU_ROUNDS", "10"))
COMMUNICATORS = 5
EVERY = 10
"""Steps between checkpoints."""
GAP = 30


def holders() -> set[int]:
    """Processes that hold memory on any GPU."""
    command = ["nvidia-smi", "--query-compute-apps=pid", "--format=csv,noheader"]
    return {int(pid) for pid in subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()}


def ends_well(run: Job, round: int) -> None:
    first = run.event("first_step", round=round)["step"]
    run.step(first + 5, round=round)
    (run.work / "enough").touch()
    assert run.wait() == 0
    assert run.event("job_ended", outcome="succeeded")


def test_warm_forks_make_a_hundred_communicators(gpu_job: StartGpuJob, device: str) -> None:
    """Forked after the imports, each worker of each round initialises CUDA and NCCL as if it had started cold."""
    run = gpu_job(communicators=COMMUNICATORS)
    for round in range(1, ROUNDS + 1):
        first = run.event("first_step", round=round)["step"]
        run.step(first + EVERY, round=round)  # progress, or each restart would be put off for longer
        started = run.event("group_started", round=round)
        assert started["warm"], run.err
        if round < ROUNDS:
            run.kill(round % 2, round)
            run.event("group_started", round=round + 1)
            if device == "cuda":
                assert not holders() & set(started["pids"]), "the next group started before memory was given back"
    assert "bad fork" not in run.err + run.out
    assert "Cannot re-initialize CUDA" not in run.err + run.out
    ends_well(run, ROUNDS)
    made = [int(line.split()[2]) for line in run.file("communicators").splitlines()]
    assert sum(made) == ROUNDS * 2 * COMMUNICATORS
    assert run.event("job_ended")["restarts"] == ROUNDS - 1
    assert not run.events("hang_detected")


@dataclass(frozen=True, slots=True)
class Hang:
    """What rank 1 does to itself; `causes` are right names for it, `answer` the ranks that can still be recorded."""

    what: str
    causes: tuple[str, ...]
    answer: tuple[int, ...]


STOPPED = Hang("stop", ("stopped",), (0,))
NEVER_CALLS = Hang("sleep", ("blocked", "missed_collective"), (0, 1))
SKIPS = Hang("skip", ("missed_collective", "mismatched_collectives"), (0, 1, 2))
OTHER = Hang("other", ("mismatched_collectives", "missed_collective"), (0, 1, 2))
SHAPE = Hang("shape", ("mismatched_collectives", "missed_collective"), (0, 1, 2))


@pytest.mark.usefixtures("recorder")
def test_a_rank_that_does_not_come_is_found_while_nccl_waits_for_it(gpu_job: StartGpuJob, device: str) -> None:
    hangs = (STOPPED, NEVER_CALLS)
    run = gpu_job([Fault(1, GAP * number, hang.what, number) for number, hang in enumerate(hangs, start=1)])
    for number, hang in enumerate(hangs, start=1):
        assert_hung(run, number, hang, device)
    ends_well(run, len(hangs) + 1)


@pytest.mark.usefixtures("recorder")
@pytest.mark.parametrize("hang", [SKIPS, OTHER, SHAPE], ids=lambda hang: hang.what)
def test_ranks_that_diverge(gpu_job: StartGpuJob, device: str, hang: Hang) -> None:
    """Three ranks, so that two agree."""
    run = gpu_job([Fault(1, GAP, hang.what, 1)], workers=3)
    assert_hung(run, 1, hang, device)
    ends_well(run, 2)


def assert_hung(run: Job, number: int, hang: Hang, device: str) -> None:
    """Found, blamed on rank 1, dumped; and the next round trains from the last checkpoint, where the dead were."""
    hung = run.event("hang_detected", round=number)
    assert hung["cause"] in hang.causes, hung
    assert tuple(hung["ranks"]) == (1,), hung
    evidence = run.work / "log" / f"round-{number}" / "evidence"
    after = run.event("round_published", round=number + 1)
    assert after["cause"] == "hung"
    (record,) = evidence.glob("evidence-*.json")
    ranks = NodeEvidence.from_json(record.read_bytes()).ranks
    assert len(ranks) == run.event("round_published", round=number)["world_size"]
    assert all(rank.source for rank in ranks), [rank.trouble for rank in ranks]
    recorded = [rank for rank in hang.answer if (evidence / f"rank-{rank}.flight.json").exists()]
    assert recorded == list(hang.answer), sorted(evidence.iterdir())
    for rank in recorded:
        flight = json.loads((evidence / f"rank-{rank}.flight.json").read_text())
        assert flight["entries"], "no collective in the flight recorder"
    dead = run.event("group_started", round=number)["pids"]
    run.event("group_started", round=number + 1)
    if device == "cuda":
        assert not holders() & set(dead), "the next group started before memory was given back"
    assert run.event("first_step", round=number + 1)["step"] > (GAP * number) - 2 * EVERY
    until((evidence / "verdict.json").exists, "the verdict beside the evidence")  # written when all is said and done
    assert json.loads((evidence / "verdict.json").read_text())["action"] == "restart"


def test_ras_counts_what_a_rank_has_not_launched(
    gpu_job: StartGpuJob, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without torch's recorder. Each gathering asks NCCL itself."""
    if device != "cuda":
        pytest.skip("gloo has no RAS")
    for name in ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE"):
        monkeypatch.setenv(name, "0")
    run = gpu_job([Fault(1, GAP, "sleep", 1)])
    run.event("round_published", round=2)
    (record,) = (run.work / "log" / "round-1" / "evidence").glob("evidence-*.json")
    launches = {rank.rank: rank.launches for rank in NodeEvidence.from_json(record.read_bytes()).ranks}
    assert any(count.launched == count.most for count in launches[0]), launches
    assert any(count.launched < count.most for count in launches[1]), launches
    ends_well(run, 2)
