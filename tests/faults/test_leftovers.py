"""Whoever dies, and whatever workers started, daemons too: nothing of it is left when the next group starts."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from tests.faults.conftest import StartJob
from tests.faults.job import Fault, alive, until

COLD = "${local_rank}"


def test_kill_9_of_the_agent_ends_everything(job: StartJob) -> None:
    run = job("family.py", "100000")
    run.step(3)
    until(lambda: len(run.file("family").split()) == 8, "all children")
    assert len(run.processes()) >= 13  # agent, owner, template, store, two workers, eight children less the parked
    run.process.kill()
    run.process.wait()
    run.assert_gone(within=2.0)


def test_children_of_a_dead_worker(job: StartJob) -> None:
    """A dead workers children are gone before the next group starts."""
    run = job("family.py", "20", faults=[Fault(1, 5, "SIGKILL", round=1)])
    started = run.event("group_started", round=2)
    family = run.file("family").split()[:8]
    assert len(family) == 8
    assert not [pid for pid in family if alive(int(pid))]
    assert started["mono"] >= run.event("group_ended", round=1)["mono"]
    assert run.wait() == 0
    assert len(run.file("family").split()) == 16


def test_daemon_left_by_a_successful_script(job: StartJob) -> None:
    """A daemon that a successful script leaves behind is told to end."""
    run = job("plain.py", COLD, "daemon")
    assert run.wait() == 0
    assert len(run.file("family").split()) == 2


@pytest.mark.system
def test_a_daemon_that_does_not_listen_is_killed(job: StartJob) -> None:
    run = job("plain.py", COLD, "deaf daemon", workers="1")
    ready = time.monotonic()
    assert run.wait() == 0
    assert time.monotonic() - ready < 20


def test_kill_9_of_the_agent_while_the_launcher_imports(job: StartJob) -> None:
    run = job("train.py", "10")
    run.helper("owner")
    run.process.kill()
    run.process.wait()
    run.assert_gone(within=2.0)


@pytest.mark.system
def test_kill_9_of_agent_and_owner_together(job: StartJob) -> None:
    run = job("train.py", "100000")
    run.step(3)
    owner = run.helper("owner")
    os.kill(owner, signal.SIGSTOP)  # it cannot clean up between the two
    run.process.kill()
    os.kill(owner, signal.SIGKILL)
    run.process.wait()
    until(lambda: not run.processes(), lambda: f"the end of {run.processes()}", 2.0)
    # A directory in memory is all that is left, and the next job sweeps it away.
    again = job("plain.py", COLD, "daemon")
    assert again.wait() == 0
    run.assert_gone()


@pytest.mark.parametrize("victim", ["worker", "agent", "owner"])
def test_shared_memory_of_killed_workers_is_given_back(job: StartJob, victim: str) -> None:
    run = job("sharing.py", COLD, "sleep")
    for rank in (0, 1):
        run.file(f"ready-{rank}")
    assert all(Path("/dev/shm", name).exists() for name in run.file("shared").split())
    os.kill({"worker": run.worker(0), "agent": run.pid, "owner": run.helper("owner")}[victim], signal.SIGKILL)
    assert run.wait() == (-signal.SIGKILL if victim == "agent" else 0)
    left = [name for name in run.file("shared").split() if Path("/dev/shm", name).exists()]
    for name in left:
        Path("/dev/shm", name).unlink()
    assert not left
