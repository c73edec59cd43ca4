"""Workers that do not die of SIGKILL: the job goes on without their slots, which come back when they end at last."""

from __future__ import annotations

import signal

import pytest

from tests.faults.conftest import StartJob
from tests.faults.job import Job, until
from tests.tracing import Tracer


@pytest.mark.system
def test_a_slot_is_left_out_or_waited_for_until_its_worker_has_ended(job: StartJob) -> None:
    """Two jobs side by side, since each of them waits as long: one can spare a slot, the other cannot."""
    spares, needs = (job("undying.py", "${local_rank}", workers=workers) for workers in ("1:3", "2"))
    stays, needed = started(spares, 1)[2], started(needs, 1)[1]
    with Tracer(stays) as spared, Tracer(needed) as missed:
        for run in (spares, needs):
            run.kill(0, 1)
        goes_on_without(spares, stays)
        waits(needs)
        missed.let_go()
        assert len(started(needs, 2)) == 2
        spared.let_go()
        freed = spares.event("process_reaped", pid=stays)
        assert freed["reason"].endswith("has ended; slot 2 can be used again")
    spares.kill(1, 3)
    assert len(started(spares, 4)) == 3
    for run, restarts in ((spares, 3), (needs, 1)):
        run.process.terminate()
        assert run.wait() == 128 + signal.SIGTERM
        assert run.event("job_ended")["restarts"] == restarts


def goes_on_without(run: Job, pid: int) -> None:
    stuck = run.event("process_unkillable")
    assert (stuck["pid"], stuck["rank"], stuck["slot"], stuck["state"]) == (pid, 2, 2, "Z")
    assert run.event("group_ended", round=1)["survivors"] == [pid]
    smaller = run.event("round_published", round=3)
    assert (smaller["world_size"], smaller["cause"]) == (2, "resize")
    assert f"slot 2 of {smaller['nodes'][0]} is in use by process {pid}, which does not die" in smaller["reason"]
    started(run, 3)
    assert not run.events("group_started", round=2), "nobody starts on a slot that is held"


def waits(run: Job) -> None:
    run.event("process_unkillable", slot=1)
    run.event("group_ended", round=1)
    assert not run.events("group_started", round=2)


def started(run: Job, round: int) -> list[int]:
    """The workers' pids, once all of them run the script."""
    pids: list[int] = run.event("group_started", round=round)["pids"]
    for rank, pid in enumerate(pids):
        ready(run, rank, pid)
    return pids


def ready(run: Job, rank: int, pid: int) -> None:
    until(lambda: str(pid) in run.file(f"ready-{rank}").split(), f"rank {rank} in process {pid}")
