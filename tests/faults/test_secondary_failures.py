"""A rank raises, closes its connections, and takes its time to end: its peers fall first, and it is still to blame."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable

import pytest

from elasticd_agent.job.state_machine import ROOT_CAUSE_EXIT_WAIT_S
from tests.faults.conftest import StartJob
from tests.faults.job import Fault, Job, alive, until
from tests.faults.nodes import Nodes

AT_FAULT = "rank 0 exited with code 1 (ValueError: a fault)"


def ended_by_themselves(run: Job, number: int) -> list[int]:
    return [event["rank"] for event in run.events("worker_exited", round=number, requested=False)]


def test_root_cause_that_exits_last(job: StartJob) -> None:
    """Before the first step, and after some."""
    run = job("parting.py", "10", "0", faults=[Fault(0, step, "raise ValueError") for step in (1, 9)])
    assert run.wait() == 0
    for number in (int(path.name.removeprefix("parting-")) for path in run.work.glob("parting-*")):
        ended = ended_by_themselves(run, number)
        assert ended in ([1, 0], [1]), "it did not end last: nothing was tested"
        # On a busy machine its end may take longer than it is waited for.
        blamed = AT_FAULT if ended == [1, 0] else "rank 0 raised ValueError: a fault, and then rank 1 lost its peers"
        assert run.event("round_published", round=number + 1)["reason"].startswith(blamed)


@pytest.mark.system
def test_root_cause_that_does_not_exit(job: StartJob) -> None:
    """Who does not end is not waited for."""
    run = job("parting.py", "10", "60", faults=[Fault(0, 5, "raise ValueError", round=1)])
    assert run.wait() == 0
    assert ended_by_themselves(run, 1) == [1]
    published = run.event("round_published", round=2)
    assert published["reason"].startswith("rank 1 lost its peers: it exited with code 1 (RuntimeError: ")
    assert published["mono"] - run.event("worker_exited", round=1, rank=1)["mono"] > 0.9 * ROOT_CAUSE_EXIT_WAIT_S


@pytest.mark.system
def test_save_in_finally(job: StartJob) -> None:
    """The other rank trains on, so the save fails, with an error of its own: the first one is the cause. Two of them
    with progress in between end no job.
    """
    faults = [Fault(1, step, "raise ValueError") for step in (7, 13)]
    flags = ["--checkpoint-dir", "checkpoints"]
    run = job("resume.py", "--steps", "20", "--save-at-end", faults=faults, flags=flags)
    assert run.wait() == 0
    assert "MissedCall: rank 0 has not called save()" in run.err, "it did not wait for the other: nothing was tested"
    reasons = [run.event("round_published", round=number)["reason"] for number in (2, 3)]
    assert all(reason.startswith("rank 1 exited with code 1 (ValueError: a fault)") for reason in reasons), reasons


@pytest.mark.system
def test_late_agent_reads_all_exits_first(job: StartJob) -> None:
    """An agent that could not listen hears everybody before it blames."""
    run = job("parting.py", "10", "0", faults=[Fault(0, 5, "raise ValueError", round=1)])
    run.file("parting-1")
    workers = [run.worker(rank) for rank in (0, 1)]
    os.kill(run.pid, signal.SIGSTOP)
    try:
        until(lambda: not any(map(alive, workers)), "the workers' end")
        time.sleep(1.1 * ROOT_CAUSE_EXIT_WAIT_S)
    finally:
        os.kill(run.pid, signal.SIGCONT)
    assert run.wait() == 0
    assert ended_by_themselves(run, 1) == [1, 0], "it did not end last: nothing was tested"
    assert run.event("round_published", round=2)["reason"].startswith(AT_FAULT)


@pytest.mark.system
def test_exception_on_another_node(nodes: Callable[[str], Nodes]) -> None:
    """Nobody waits for its exit handlers."""
    both = nodes("2")
    agents = [both.agent(name, "lingering.py", warm=True) for name in "ab"]
    assert [agent.wait() for agent in agents] == [0, 0]
    (fallen,) = [event for agent in agents for event in agent.events("worker_exited", round=1, requested=False)]
    (lingering,) = [event for agent in agents for event in agent.events("worker_exited", round=1, requested=True)]
    assert (fallen["rank"], lingering["rank"], lingering["signal"]) == (0, 1, signal.SIGKILL)
    published = agents[0].event("round_published", round=2)
    assert published["reason"].startswith("rank 1 raised ValueError: a fault, and then rank 0 lost its peers: ")
    assert published["mono"] - fallen["mono"] < ROOT_CAUSE_EXIT_WAIT_S


@pytest.mark.system
def test_rank_that_ends_early_in_every_round_ends_the_job(job: StartJob) -> None:
    """A plain script whose ranks have unequal numbers of batches: no restart mends that."""
    run = job("train.py", "40", faults=[Fault(1, 20, "sys.exit 0", times=4)])
    assert run.wait() == 1
    assert "3 restarts without progress beyond step 19" in run.event("job_ended")["reason"]
