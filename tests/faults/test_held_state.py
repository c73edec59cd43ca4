"""No step is lost or trained twice where ranks hold the state in their processes, and die while they change rounds."""

from __future__ import annotations

import contextlib
import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from elasticd_agent.job.monitor import PARK_S
from tests.faults.conftest import StartJob
from tests.faults.job import Fault, Job, until

STEPS = 24
pytestmark = pytest.mark.system


def start(
    job: StartJob, workers: str, again: list[tuple[str, int, int]], *faults: Fault, lie: tuple[str, int] | None = None
) -> Job:
    options = json.dumps({"steps": STEPS, "again": again, "lie": lie or []})
    how: dict[str, Any] = {"workers": workers, "flags": ["--checkpoint-dir", "checkpoints"]}
    return job("staying_again.py", options, faults=list(faults), **how)


def digests(run: Job, rank: int) -> list[tuple[int, str]]:
    lines = (run.work / f"steps-{rank}").read_text().splitlines()
    return [(int(step), found) for _, step, found, _ in map(str.split, lines)]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[int, list[list[tuple[int, str]]]]:
    """The steps of each rank in runs without a fault, of two and of three ranks."""
    found = {}
    for workers in (2, 3):
        work = tmp_path_factory.mktemp(f"whole-{workers}")
        options = json.dumps({"steps": STEPS, "again": [], "lie": []})
        run = Job(work, "staying_again.py", options, workers=str(workers), flags=["--checkpoint-dir", "checkpoints"])
        try:
            assert run.wait() == 0, run.err
        finally:
            run.end()
        found[workers] = [digests(run, rank) for rank in range(workers)]
    return found


def check(run: Job, whole: dict[int, list[list[tuple[int, str]]]], workers: int, sources: list[str]) -> None:
    assert run.wait() == 0, run.err
    assert not list(run.work.glob("checkpoints/r1-*")), "the state of the first round went by no disk"
    for rank in range(workers):
        assert digests(run, rank) == whole[workers][rank]
    resumed = [event["reason"] for event in run.events("resumed")]
    assert len(resumed) == len(sources), resumed
    for reason, source in zip(resumed, sources, strict=True):
        assert source in reason, resumed


Whole = dict[int, list[list[tuple[int, str]]]]


@pytest.mark.parametrize("dead", [0, 1])
def test_replaced_rank_gets_the_state_of_the_other_one(job: StartJob, whole: Whole, dead: int) -> None:
    """Also where the new process is rank 0, whose weights DistributedDataParallel sends to all at its start."""
    run = start(job, "2", [], Fault(dead, 13, "SIGKILL"))
    check(run, whole, 2, [f"from step 12 of round 1, in the processes of rank {1 - dead}"])


@pytest.mark.parametrize(
    ("again", "source"),
    [
        (("unwound", 0, 1), "in the processes of rank 2"),
        (("joining", 0, 2), "in memory"),
        (("restoring", 2, 2), "in memory"),
    ],
    ids=["before it is parked", "before the group is made", "while the state is sent"],
)
def test_second_fault(job: StartJob, whole: Whole, again: tuple[str, int, int], source: str) -> None:
    run = start(job, "3", [again], Fault(1, 13, "SIGKILL"))
    check(run, whole, 3, [f"from step 12 of round 1, {source}" if "in the" in source else source])
    assert (run.work / "again-0").exists()


@pytest.mark.parametrize(
    ("lie", "reason", "source"),
    [
        ("goes on", "rank 0 said to wait for it, and did not begin it within 1.", "in memory"),
        ("changes its state", "rank 0 has not saved step 12 at the fault: ", "in the processes of rank 2"),
        ("another state", "rank 2 holds another state of step 12 than rank 0", "in the processes of rank 0"),
        # It says that it has not saved what it changed, unless rank 0 was first.
        ("fails to load", "ValueError: a load that has failed", "saved by rank 0"),
        ("another shape", "rank 0 has no place in rank 0: 1 of 3 large tensors", "in the processes of rank 2"),
    ],
)
def test_rank_that_lies(job: StartJob, whole: Whole, lie: str, reason: str, source: str) -> None:
    """Whatever is wrong with what a process says of itself, the steps are those of a run without a fault."""
    faults = [Fault(1, 13, "SIGKILL"), *[Fault(0, 13, "stop")] * (lie == "goes on")]
    run = start(job, "3", [], *faults, lie=(lie, 2 if lie == "fails to load" else 0))
    check(run, whole, 3, [f"from step 12 of round 1, {source}" if source != "in memory" else source])
    assert reason in run.err
    rounds = run.events("group_started")
    assert len(rounds) == (2 if "processes" in source else 3)
    if lie == "goes on":
        assert run.event("group_ended", round=2)["mono"] - rounds[1]["mono"] <= PARK_S + 2.0


def test_only_rank_that_holds_the_state_dies_while_it_waits(job: StartJob, whole: Whole) -> None:
    """The copy that it has begun to make as soon as it was alone is what the next round resumes from."""
    run = start(job, "2", [], Fault(1, 13, "SIGKILL"), Fault(1, 0, "stop", 2))
    started = run.event("group_started", round=2)
    until(lambda: (run.work / "fired").read_text().split() == ["0", "1"], "the new process")
    until(lambda: copied(run), "a copy in memory")
    for pid in started["pids"]:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    check(run, whole, 2, ["in memory"])


def copied(run: Job) -> bool:
    """The header of the node's memory, which is written last, has a state."""
    for fd in Path(f"/proc/{run.helper('owner')}/fd").iterdir():
        with contextlib.suppress(OSError):
            if os.readlink(fd).startswith("/memfd:elasticd-0") and b"draft" in fd.read_bytes():
                return True
    return False
