"""What is no worker dies: the template, the round's store, the owner; and the agent is not there for a while."""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import time

import pytest

from elasticd_agent.model.job import REQUEUE_EXIT_CODE
from tests.etcd import free_ports
from tests.faults.conftest import StartJob
from tests.faults.job import Job, alive, comm_of, descendants, parent_of, until


@pytest.mark.system
def test_deaths_of_the_launchers_processes(job: StartJob) -> None:
    """The launchers processes die one after the other and the job goes on."""
    run = job("train.py", "100000")
    run.step(3, round=1)
    the_template_dies(run, 1)
    the_store_dies(run, 2)
    a_parked_worker_dies(run, 3)
    the_owner_dies(run, 4)
    the_owner_is_stopped(run, 5)
    the_agent_is_stopped(run, 6)
    run.process.terminate()
    assert run.wait() == 128 + signal.SIGTERM
    assert run.event("job_ended")["restarts"] == 5
    assert all(event["warm"] for event in run.events("group_started"))


@pytest.mark.system
def test_owner_that_cannot_be_started_is_tried_again(job: StartJob) -> None:
    """The machine has no descriptor, process or memory for it at the moment."""
    run = job("train.py", "100000")
    run.step(3, round=1)
    limits = resource.prlimit(run.pid, resource.RLIMIT_NOFILE)
    resource.prlimit(run.pid, resource.RLIMIT_NOFILE, (8, limits[1]))
    os.kill(run.helper("owner"), signal.SIGKILL)
    until(lambda: "owns the workers cannot be started: Too many open files" in run.err, run.report)
    resource.prlimit(run.pid, resource.RLIMIT_NOFILE, limits)
    run.step(3, round=2)


@pytest.mark.system
def test_owner_that_never_stays_ends_this_node_for_now(job: StartJob) -> None:
    """While it waits for another node, no round of workers is lost with it, which the restart budget would count."""
    (port,) = free_ports(1)
    meet = ["--nnodes", "2", "--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{port}", "--rdzv-id", "alone"]
    run = job("plain.py", "${local_rank}", "sleep", flags=[*meet, "--local-addr", "127.0.0.1"])
    run.helper("owner")
    while run.process.poll() is None:
        for pid in descendants(run.pid):
            if comm_of(pid) == "elasticd-owner":
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        time.sleep(0.05)
    assert run.wait() == REQUEUE_EXIT_CODE
    assert "the process that owns the workers was lost 11 times before it had started any" in run.err


def the_template_dies(run: Job, round: int) -> None:
    """Training does not notice, and the round after the next crash starts warm again."""
    run.step(3, round=round)
    pids = [run.worker(rank, round) for rank in (0, 1)]
    template = run.helper("templ")
    os.kill(template, signal.SIGKILL)
    until(lambda: run.events("launcher_ready", mode="warm")[1:], "another template")
    run.step(max(run.steps())[1] + 5, round=round)
    assert all(map(alive, pids))
    assert not run.events("round_published", round=round + 1)
    run.kill(1, round)
    run.step(3, round=round + 1)


def the_store_dies(run: Job, round: int) -> None:
    """Its round cannot do without it: a new one, with another store."""
    run.step(3, round=round)
    started = run.event("group_started", round=round)
    store = run.helper("store")
    os.kill(store, signal.SIGKILL)
    exited = run.event("store_exited", round=round)
    assert (exited["pid"], exited["signal"]) == (store, signal.SIGKILL)
    assert exited["mono"] > started["mono"]
    assert "the workers' store was killed by SIGKILL" in run.event("round_published", round=round + 1)["reason"]
    run.step(3, round=round + 1)


def a_parked_worker_dies(run: Job, round: int) -> None:
    """It was forked ahead for the next round, which then starts without it."""
    run.step(3, round=round)
    until(lambda: len(parked(run)) == 2, lambda: f"two parked workers: {run.processes()}")
    os.kill(parked(run)[0], signal.SIGKILL)
    until(lambda: not parked(run), "the end of the other one")
    assert not run.events("round_published", round=round + 1)
    run.kill(0, round)
    run.step(3, round=round + 1)


def parked(run: Job) -> list[int]:
    """Parked workers go by the template's name and, as its forks, came after it; the owner has adopted them."""
    owner = run.helper("owner")
    return sorted(p for p, comm in run.processes().items() if comm == "elasticd-templ" and parent_of(p) == owner)[1:]


def the_owner_dies(run: Job, round: int) -> None:
    """The workers die with it; the agent takes another owner and goes on."""
    run.step(3, round=round)
    before = run.processes()
    os.kill(run.helper("owner"), signal.SIGKILL)
    run.step(3, round=round + 1)
    assert not [pid for pid in before if pid != run.pid and alive(pid)]
    assert "owns the workers was killed" in run.err


def the_owner_is_stopped(run: Job, round: int) -> None:
    """It neither reaps nor kills any more: after five seconds the agent takes another one."""
    run.step(3, round=round)
    os.kill(run.helper("owner"), signal.SIGSTOP)
    run.step(3, round=round + 1)
    assert "owns the workers was killed" in run.err


def the_agent_is_stopped(run: Job, round: int) -> None:
    """For three seconds, in which training goes on and after which nobody is thought to hang."""
    run.step(3, round=round)
    run.process.send_signal(signal.SIGSTOP)
    before = max(run.steps())[1]
    time.sleep(3)  # the fault itself
    during = max(run.steps())[1]
    run.process.send_signal(signal.SIGCONT)
    assert during > before + 20
    run.step(during + 20, round=round)
    assert not run.events("round_published", round=round + 1)
