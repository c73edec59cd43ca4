"""A rank that survives a fault saves the state of its last step: no step is trained again, and no bit differs."""

from __future__ import annotations

import pytest

from tests.faults.conftest import StartJob
from tests.faults.job import Fault, Job


def digests(run: Job, what: str, rank: int = 0) -> list[tuple[int, int, str]]:
    """(round, step, digest of the state) in order."""
    path = run.work / f"{what}-{rank}"
    lines = path.read_text().splitlines() if path.exists() else []
    return [(int(round_), int(step), found) for round_, step, found in (line.split() for line in lines)]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Job:
    """The run without a fault."""
    run = Job(tmp_path_factory.mktemp("whole"), "donor.py", "--steps", "60", flags=["--checkpoint-dir", "checkpoints"])
    try:
        assert run.wait() == 0
    finally:
        run.end()
    return run


def test_state_saved_at_a_fault_equals_that_of_an_undisturbed_run(job: StartJob, whole: Job) -> None:
    """One fault after the other: a rank is killed, rank 0 is killed, one exits, one raises."""
    faults = [Fault(1, 13, "SIGKILL"), Fault(0, 27, "SIGKILL"), Fault(1, 45, "exit 3")]
    saved = [(12, 0), (26, 1), (44, 0), (51, None)]
    flags = ["--checkpoint-dir", "checkpoints"]
    run = job("donor.py", "--steps", "60", "--fail-at", "4,1,52", faults=faults, flags=flags)
    assert run.wait() == 0
    found = run.events("resumed")
    for (step, rank), event in zip(saved, found, strict=True):
        assert event["step"] == step
        assert f"from step {step} of round" in event["reason"]
        assert "after the fault" in event["reason"]
        assert rank is None or f"saved by rank {rank} " in event["reason"]
    for rank in (0, 1):
        expected = {step: each for _, step, each in digests(whole, "steps", rank)}
        assert {step: each for _, step, each in digests(run, "steps", rank)} == expected
        restored = digests(run, "restored", rank)
        assert [step for _, step, _ in restored] == [step for step, _ in saved]
        assert all(expected[step] == each for _, step, each in restored)
        trained = [step for _, step, _ in digests(run, "steps", rank)]
        assert trained == sorted(set(trained)), "a step was trained twice"


@pytest.mark.system
def test_state_from_which_no_restart_progresses_is_left_for_an_older_one(job: StartJob) -> None:
    """The state that was saved at the fault may be the fault: with NaN in it, say."""
    flags = ["--checkpoint-dir", "checkpoints"]
    run = job("donor.py", "--steps", "40", "--every", "10", "--fail-at", "1,1,13", "--poisoned", "12", flags=flags)
    assert run.wait() == 0
    steps = [event["step"] for event in run.events("resumed")]
    assert steps == [12, 10]
