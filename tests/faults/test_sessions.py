"""Several sessions of one script, each with a default process group of its own, under a fault."""

from __future__ import annotations

import pytest

from tests.faults.conftest import StartJob
from tests.faults.job import Fault


def test_later_session_of_a_process_meets_the_others(job: StartJob) -> None:
    """Also in the next round, and also where rank 0 dies in it."""
    run = job("sessions.py", "3", "4", workers="2", faults=[Fault(0, 7, "SIGKILL", 1)])
    assert run.wait() == 0, run.err
    assert [step for _, step in run.steps(1)][-8:] == [5, 6, 7, 8, 9, 10, 11, 12]
    assert len(run.events("group_started")) == 2
    assert "trained again" not in run.err, "not the last session's steps, which nobody had trained"


@pytest.mark.parametrize("fold", [0, 1])
def test_process_stays_in_its_first_session_only(job: StartJob, fold: int) -> None:
    """A new process begins with the first fold, where a rank that has stayed would wait for it in the second one."""
    fault = Fault(1, 4 * fold + 3, "SIGKILL", 1)
    run = job("folds.py", "2", "4", faults=[fault], flags=["--checkpoint-dir", "checkpoints"])
    assert run.wait() == 0, run.err
    assert [event["kept"] for event in run.events("group_started")] == [0, 1 - fold]
    assert "did not leave it" not in run.err
    trained = [(int(fold), int(step)) for _, fold, step, _ in map(str.split, run.file("folds-1").splitlines())]
    assert {*trained} == {(fold, step) for fold in (0, 1) for step in (1, 2, 3, 4)}
    assert "this process has had another session before" in run.err
