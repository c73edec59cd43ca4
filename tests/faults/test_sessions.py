"""Several sessions of one script, each with a default process group of its own, under a fault."""

from __future__ import annotations

from tests.faults.conftest import StartJob
from tests.faults.job import Fault


def test_later_session_of_a_process_meets_the_others(job: StartJob) -> None:
    """Also in the next round, and also where rank 0 dies in it."""
    run = job("sessions.py", "3", "4", workers="2", faults=[Fault(0, 7, "SIGKILL", 1)])
    assert run.wait() == 0, run.err
    assert [step for _, step in run.steps(1)][-8:] == [5, 6, 7, 8, 9, 10, 11, 12]
    assert len(run.events("group_started")) == 2
    assert "trained again" not in run.err, "not the last session's steps, which nobody had trained"
