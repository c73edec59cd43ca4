"""Training loops as people write them, right and wrong: a rank is killed, and nothing is lost or trained twice.

A healthy rank keeps its process, or the log says why it does not.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.faults.conftest import StartJob
from tests.faults.job import Fault, Job, until
from tests.faults.test_in_place import lines
from tests.faults.test_one_host import free_port

pytestmark = pytest.mark.system
EPOCHS, SAMPLES = 3, 240
WITHIN_S = 180.0
"""A whole job, of processes that may start their imports beside others."""
REASONS = (
    "did not leave it within",
    "while it left the round: a new process follows",
    "as its process cannot stay",
    "a change of ranks restarts every process",
)
HEALTHY = [
    *("accumulates", "compiled", "compiled outside", "loader", "outer loader", "two optimizers", "closures", "trainer"),
    *("tracker", "evaluates"),
]


def start(job: StartJob, kind: str, *flags: str, **how: str) -> Job:
    fault = Fault(1, -1 if kind == "evaluates" else 13, "SIGKILL", 1)
    return job("habits.py", kind, faults=[fault], flags=["--checkpoint-dir", "checkpoints", *flags], **how)


def used(*runs: Job) -> list[tuple[int, int]]:
    """Epoch and sample, in the last round that trained each step."""
    every = [one for run in runs for one in lines(run, "samples")]
    last = {one["step"]: one["round"] for one in sorted(every, key=lambda one: one["round"])}
    return sorted((one["epoch"], s) for one in every if last[one["step"]] == one["round"] for s in one["samples"])


def check(*runs: Job, last: int = SAMPLES // 12 * EPOCHS) -> None:
    """Each sample of each epoch once, no step twice, and a sentence about a survivor that is not kept."""
    assert len(used(*runs)) == len({*used(*runs)}) == last * 12
    steps = [(rank, step) for run in runs for rank in (0, 1) for _, step in run.steps(rank)]
    assert len(steps) == len({*steps}), "a rank has trained a step twice"
    assert {step for _, step in steps} == {*range(1, last + 1)}
    kept = max(event["kept"] for run in runs for event in run.events("group_started"))
    assert kept or any(reason in run.err for run in runs for reason in REASONS), runs[0].err


@pytest.mark.parametrize("kind", HEALTHY)
def test_healthy_script(job: StartJob, kind: str) -> None:
    run = start(job, kind)
    assert run.wait(WITHIN_S) == 0
    check(run)
    assert [run.file(f"result-{rank}") for rank in (0, 1)] == ["trained\n"] * 2
    if kind == "tracker":
        assert len(run.file("finished").split()) == 2, "the process that stayed has closed its tracker once"


def test_script_that_returns_early(job: StartJob) -> None:
    run = start(job, "returns early")
    assert run.wait(WITHIN_S) == 0
    check(run, last=30)
    assert [run.file(f"result-{rank}") for rank in (0, 1)] == ["good enough\n"] * 2


@pytest.mark.parametrize("kind", ["accumulates", "tracker"])
def test_healthy_script_on_two_nodes(job: StartJob, tmp_path: Path, kind: str) -> None:
    """The node of the lost rank returns if the job is not over before."""
    meet = ["--nnodes", "1:2", "--rdzv-backend", "c10d", "--rdzv-id", "job", "--local-addr", "127.0.0.1"]
    meet += ["--rdzv-endpoint", f"127.0.0.1:{free_port()}", "--checkpoint-dir", str(tmp_path / "checkpoints")]
    conf = {"a": "last_call_timeout=60", "b": "last_call_timeout=60,is_host=0"}
    runs = [start(job, kind, *meet, "--node-id", n, "--rdzv-conf", conf[n], workers="1") for n in "ab"]
    lost = until(lambda: [run for run in runs if (run.work / "fired").exists()], runs[0].report, WITHIN_S)[0]
    for run in runs:
        run.faults = run.faults if run is lost else ()
    assert [run.wait(WITHIN_S) for run in runs] == [0, 0]
    check(*runs)


@pytest.mark.parametrize(
    ("kind", "why"),
    [
        ("swallows errors", ""),
        ("swallows everything", ""),
        ("runs twice", ""),
        ("group before run", "restarts every process: the script makes another process group before session.run()"),
    ],
)
def test_wrong_use_that_loses_nothing(job: StartJob, kind: str, why: str) -> None:
    run = start(job, kind)
    assert run.wait(WITHIN_S) == 0
    check(run)
    assert why in run.err


@pytest.mark.parametrize(
    ("kind", "why"),
    [
        ("exits in finally", "round 1: rank 0 exited with code 3 while it left the round: a new process follows"),
        ("forgets the model", "rank 0 ends, as its process cannot stay: nothing has been saved yet"),
    ],
)
def test_wrong_use_that_begins_again(job: StartJob, kind: str, why: str) -> None:
    """No other state is there. The log says why, and each sample is used once in what counts."""
    run = start(job, kind)
    assert run.wait(WITHIN_S) == 0
    assert len(used(run)) == len({*used(run)}) == EPOCHS * SAMPLES
    assert why in run.err
    assert [event["kept"] for event in run.events("group_started")] == [0, 0]


def test_iterator_from_before_run_is_refused(job: StartJob) -> None:
    """It would use samples again in the process that stays."""
    run = start(job, "outer iterator")
    assert run.wait(WITHIN_S) == 1
    assert "this iterator would continue at epoch 0, sample " in run.err
