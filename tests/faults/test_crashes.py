"""Workers die in every way they can, at a step or before the first one: the next round trains, the log says why."""

from __future__ import annotations

import signal

import pytest

from tests.faults.conftest import StartJob
from tests.faults.job import Fault

WAYS = [
    (Fault(1, 3, "SIGKILL", round=1), "rank 1 was killed by SIGKILL"),
    (Fault(0, 3, "SIGKILL", round=2), "rank 0 was killed by SIGKILL"),
    (Fault(0, 5, "SIGSEGV", round=3), "rank 0 was killed by SIGSEGV"),
    (Fault(1, 1, "SIGABRT", round=4), "rank 1 was killed by SIGABRT"),
    (Fault(1, 4, "exit 3", round=5), "rank 1 exited with code 3"),
    (Fault(0, 4, "raise ValueError", round=6), "rank 0 exited with code 1 (ValueError: a fault)"),
    (Fault(1, 2, "sys.exit 5", round=7), "rank 1 exited with code 5"),
    (Fault(1, 0, "SIGKILL", round=8), "rank 1 was killed by SIGKILL"),
    # One rank alone that raises is no user error: those are all ranks'.
    (Fault(1, 0, "raise ValueError", round=9), "rank 1 exited with code 1 (ValueError: a fault)"),
]


def test_every_way_to_die(job: StartJob) -> None:
    run = job("train.py", "20", faults=[fault for fault, _ in WAYS])
    assert run.wait(90) == 0
    for number, (fault, why) in enumerate(WAYS, start=1):
        published = run.event("round_published", round=number + 1)
        assert published["reason"].startswith(why), published
        assert published["restarts"] == number
        assert run.event("group_started", round=number + 1)["warm"]
        assert run.event("worker_exited", round=number, rank=fault.rank, requested=False)["step"] == (
            fault.step - 1 if fault.step > 1 else None
        )
    assert run.steps(0)[-20:] == run.steps(1)[-20:] == [(len(WAYS) + 1, step) for step in range(1, 21)]
    assert run.event("job_ended", outcome="succeeded", exit_code=0)["restarts"] == len(WAYS)


@pytest.mark.system
def test_ten_kills_in_a_row_and_then_all_ranks_at_once(job: StartJob) -> None:
    run = job("train.py", "100000")
    for number in range(1, 11):
        run.step(2, round=number)
        run.kill(number % 2, number)
        assert run.event("first_step", round=number + 1)["recovery_seconds"] < 10
    run.step(2, round=11)
    run.kill_all((0, 1), round=11)
    run.step(5, round=12)
    run.process.terminate()
    assert run.wait() == 128 + signal.SIGTERM
