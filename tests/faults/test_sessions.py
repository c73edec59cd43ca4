"""Several sessions of one script, each with a default process group of its own, under a fault."""

from __future__ import annotations

from tests.faults.conftest import StartJob
from tests.faults.job import Fault, Job


def trained(run: Job) -> list[tuple[int, int]]:
    """(session, step) of rank 1 in order, in all rounds."""
    return [(int(session), int(step)) for _, session, step, _ in map(str.split, run.file("trained-1").splitlines())]


def test_later_session_of_a_process_meets_the_others(job: StartJob) -> None:
    """Also in the next round, and also where rank 0 dies in it."""
    run = job("sessions.py", "3", "4", faults=[Fault(0, 7, "SIGKILL", 1)])
    assert run.wait() == 0, run.err
    assert trained(run) == [(session, step) for session in (0, 1, 2) for step in (1, 2, 3, 4)]
    assert len(run.events("group_started")) == 2
    assert "trained again" not in run.err, "not the last session's steps, which nobody had trained"
    assert "before the restart" not in run.err, "the directories are the same"


def test_directory_that_is_another_one_at_each_start_is_reported(job: StartJob) -> None:
    """Such as one with the time in its name: memory has the state this time."""
    run = job("sessions.py", "1", "4", "moves", faults=[Fault(0, 3, "SIGKILL", 1)])
    assert run.wait() == 0, run.err
    assert trained(run) == [(0, step) for step in (1, 2, 3, 4)]
    own, before = (run.work / "checkpoints" / number / "0" for number in "21")
    assert f"the checkpoint directory is {own}, and was {before} before the restart" in run.err


def test_process_stays_in_its_first_session_only(job: StartJob) -> None:
    """A new process begins with the first one, where a rank that has stayed would wait for it in the second one."""
    faults = [Fault(1, 3, "SIGKILL", 1), Fault(1, 4 + 3, "SIGKILL", 2)]
    run = job("sessions.py", "2", "4", "run", faults=faults, flags=["--checkpoint-dir", "checkpoints"])
    assert run.wait() == 0, run.err
    assert [event["kept"] for event in run.events("group_started")] == [0, 1, 0]
    assert "did not leave it" not in run.err
    assert {*trained(run)} == {(session, step) for session in (0, 1) for step in (1, 2, 3, 4)}
    assert "this process has had another session before" in run.err
