"""A person stops the job, once or twice: workers hear of it, the exit code says so, nothing is left."""

from __future__ import annotations

import os
import re
import signal
import sys
import time
from pathlib import Path

import pytest

from elasticd.heartbeat.record import INIT_PROCESS_GROUP_BARRIER, HeartbeatReader
from elasticd.sigterm import TOGETHER_S
from elasticd_agent.system.processes import procfs
from tests.faults.conftest import StartJob
from tests.faults.job import REPOSITORY, SCRIPTS, Fault, Job, until

COLD = "${local_rank}"


def ready(run: Job) -> Job:
    for rank in (0, 1):
        run.file(f"ready-{rank}")
    return run


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_signal_reaches_the_workers(job: StartJob, signum: signal.Signals) -> None:
    """One signal reaches the workers as it is."""
    run = ready(job("plain.py", COLD, "polite"))
    run.process.send_signal(signum)
    assert run.wait() == 128 + signum
    assert [run.file(f"got-{rank}") for rank in (0, 1)] == [signum.name, signum.name]
    assert run.event("job_ended", outcome="stopped", exit_code=128 + signum, restarts=0)
    assert run.event("stop_requested", by=signum.name)
    assert not run.events("worker_exited", requested=False)


def test_signals_that_the_starter_has_blocked(job: StartJob) -> None:
    """As a program does that waits for its own. The exits of workers would go unnoticed."""
    block = "import os, signal, sys; signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals()); "
    block += "os.execv(sys.argv[1], sys.argv[1:])"
    run = ready(job("plain.py", COLD, "polite", prefix=[sys.executable, "-c", block]))
    run.process.terminate()
    assert run.wait() == 128 + signal.SIGTERM
    assert [run.file(f"got-{rank}") for rank in (0, 1)] == ["SIGTERM", "SIGTERM"]


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
def test_the_second_signal_does_not_wait(job: StartJob, signum: signal.Signals) -> None:
    quiet = signum == signal.SIGTERM
    run = ready(job("plain.py", COLD, "deaf", flags=["--quiet"] if quiet else []))
    run.process.send_signal(signum)
    run.event("stop_requested", grace_seconds=30.0)
    time.sleep(2 * TOGETHER_S)
    started = time.monotonic()
    run.process.send_signal(signum)
    assert run.wait() == 128 + signum
    assert time.monotonic() - started < 28
    assert ("workers have 30 s to stop; Ctrl-C again kills them at once" in run.err) != quiet
    assert not quiet or all("warning: workers start cold" in line for line in run.err.splitlines()), run.err
    assert {event["signal"] for event in run.events("worker_exited")} == {signal.SIGKILL}


@pytest.mark.parametrize(
    ("script", "ready", "signum", "said"),
    [
        ("apart.py", "first_step", signal.SIGTERM, "1 rank waits in session.step() after the exit of rank 0"),
        ("donor.py", "joining", signal.SIGINT, "1 rank waits in init_process_group after the exit of rank 0"),
    ],
)
def test_ranks_that_wait_for_one_that_has_ended(
    job: StartJob, script: str, ready: str, signum: signal.Signals, said: str
) -> None:
    """It had no handler yet, or was in no C++ as the others are."""
    args = ["--steps", "10"] if script == "donor.py" else []
    run = job(script, *args, faults=[Fault(0, 0, "stop")] if args else [])
    if ready == "first_step":
        run.event(ready)
    else:
        run.file("fired")
        with HeartbeatReader(run.memory()[0] / "round-1/heartbeat-1") as heartbeat:
            until(lambda: heartbeat.read().barrier == INIT_PROCESS_GROUP_BARRIER, "rank 1 to join")
    run.process.send_signal(signum)
    assert run.wait(within=15) == 128 + signum
    assert said in run.err
    assert {event["rank"]: event["signal"] for event in run.events("worker_exited")}[1] == signal.SIGKILL


def test_rank_that_stops_after_the_one_that_it_has_waited_for_saves_to_the_end(job: StartJob) -> None:
    run = job("apart.py", "go")
    run.event("first_step")
    with HeartbeatReader(run.memory()[0] / "round-1/heartbeat-1") as heartbeat:
        until(lambda: heartbeat.read().wait_call == "step()", "rank 1 to wait")
    run.process.terminate()
    run.event("stop_requested")
    (run.work / "go").touch()
    assert run.wait() == 128 + signal.SIGTERM
    assert (run.work / "saved").exists()
    assert {event["exit_code"] for event in run.events("worker_exited")} == {0}


def test_stray_signal_ends_nothing(job: StartJob) -> None:
    """As schedulers send it. By default it would end the agent without a word, and with it the job."""
    run = ready(job("plain.py", COLD, "polite"))
    for signum in (signal.SIGUSR1, signal.SIGXCPU):
        run.process.send_signal(signum)
        said = f"{signum.name} is ignored: --signals-to-handle names those that stop the job"
        until(lambda said=said: said in run.err, 20)
    run.process.terminate()
    assert run.wait() == 128 + signal.SIGTERM


BATCH_SIGNALS = (
    "USR1", "ALRM", "PIPE", "XCPU", "XFSZ", "VTALRM", "PROF", "IO", "PWR", "RTMAX", "INT", "HUP", "QUIT",
)  # fmt: skip


def pending(pid: int) -> bool:
    """Signals of the process that have not been delivered."""
    (found,) = re.findall(r"^ShdPnd:\t(\w+)$", Path(f"/proc/{pid}/status").read_text(), re.M)
    return int(found, 16) != 0


def test_stray_signals_end_no_process_of_ours(job: StartJob, tmp_path: Path) -> None:
    """A batch system sends them to every process of a job. Workers get them with their usual meaning, or with that of a
    preloaded module, in C, too."""
    (tmp_path / "dumps.py").write_text(
        "import faulthandler, signal\nfaulthandler.register(signal.SIGUSR2, all_threads=False)\n"
    )
    path = f"{tmp_path}:{REPOSITORY}:{REPOSITORY / 'agents'}"
    flags = ["--preload", "dumps", "--checkpoint-dir", "checkpoints"]
    run = job("resume.py", "--steps", "100000", flags=flags, env={"PYTHONPATH": path})
    run.step(12)
    ours = {name: run.helper(name) for name in ("owner", "templ", "store", "writer")}

    def adopted() -> set[int]:
        """The template and the parked workers; an intermediate process of a fork is gone in a moment."""
        templates = (pid for pid, comm in run.processes().items() if comm == "elasticd-templ")
        return {pid for pid in templates if (found := procfs.stat(pid)) is not None and found.parent == ours["owner"]}

    until(lambda: len(adopted()) == 3, "a parked group")
    parked = adopted()
    for name in BATCH_SIGNALS:
        for pid in {*ours.values(), *parked}:
            os.kill(pid, signal.Signals[f"SIG{name}"])
        # One at a time: faulthandler's small stack for handlers has no room for so many of them at once.
        until(lambda: not any(map(pending, (*ours.values(), *parked))), f"SIG{name} to be handled")
    run.step(run.steps()[-1][1] + 20)
    assert {name: run.helper(name) for name in ours} == ours
    assert parked <= run.processes().keys()
    os.kill(run.worker(0, 1), signal.SIGUSR2)
    until(lambda: "most recent call first" in run.err, "a traceback of rank 0")
    os.kill(run.worker(1, 1), signal.SIGUSR1)
    run.step(run.steps()[-1][1] + 1, round=2)
    assert {event["signal"] for event in run.events("worker_exited", requested=False)} == {signal.SIGUSR1}
    assert all(event["warm"] for event in run.events("group_started"))
    run.process.terminate()
    assert run.wait() == 128 + signal.SIGTERM


def test_worker_that_ignores_the_signal(job: StartJob) -> None:
    """A worker that ignores the signal is killed after the shutdown timeout."""
    run = ready(job("plain.py", COLD, "deaf", flags=["--shutdown-timeout", "1"]))
    run.process.terminate()
    asked = run.event("stop_requested")["mono"]
    assert run.wait() == 128 + signal.SIGTERM
    exits = run.events("worker_exited", signal=int(signal.SIGKILL), requested=True)
    assert len(exits) == 2
    assert all(0.9 < event["mono"] - asked < 30 for event in exits)
    assert "did not stop in time" in run.err


@pytest.mark.parametrize("how", ["handler", pytest.param("session", marks=pytest.mark.system)])
def test_data_loader_works_until_its_script_has_saved(job: StartJob, how: str) -> None:
    """The signal goes to the ranks: with the loader's workers gone, the next batch is an exception."""
    run = job("loading.py", how)
    for rank in (0, 1):
        run.step(10, rank=rank)
    run.process.terminate()
    assert run.wait() == 128 + signal.SIGTERM
    assert [len(run.file(f"saved-{rank}").split()) for rank in (0, 1)] == [1, 1]
    assert {event["exit_code"] for event in run.events("worker_exited")} == {0}
    assert "DataLoader worker" not in run.err


@pytest.mark.parametrize(
    ("wrapper", "what"),
    [
        ('"$@"; echo more >> "$WORK/more"', "polite"),
        pytest.param('"$@"; echo more >> "$WORK/more"', "slow", marks=pytest.mark.system),
        ('trap "echo cleaned > $WORK/cleaned" TERM; "$@"', "polite"),
        ('("$@"; true); true', "polite"),
    ],
    ids=["ends by it", "ends before its program", "catches it", "in a subshell"],
)
def test_program_of_a_shell_hears_of_a_stop(job: StartJob, tmp_path: Path, wrapper: str, what: str) -> None:
    """As under torchrun, which signals the process group. A shell that ends by the signal leaves its program the rest
    of the time for a stop."""
    script = tmp_path / "wrapper.sh"
    script.write_text(f"#!/bin/bash\n{wrapper}\n")
    program = [sys.executable, str(SCRIPTS / "plain.py"), "", what]
    run = ready(job("bash", str(script), *program, flags=["--no-python"]))
    run.process.terminate()
    assert run.wait() == 128 + signal.SIGTERM
    assert [run.file(f"got-{rank}") for rank in (0, 1)] == ["SIGTERM", "SIGTERM"]
    assert (run.work / "cleaned").exists() == ("cleaned" in wrapper)
    assert not (run.work / "more").exists()


def test_hangup_means_nothing_under_nohup(job: StartJob) -> None:
    run = ready(job("plain.py", COLD, "polite", prefix=["nohup"]))
    run.process.send_signal(signal.SIGHUP)
    run.process.terminate()
    assert run.wait() == 128 + signal.SIGTERM
    assert [event["by"] for event in run.events("stop_requested")] == ["SIGTERM"]


def test_a_signal_during_the_backoff_ends_the_job(job: StartJob) -> None:
    run = job("test", "-d", "/no/such/directory", flags=["--no-python", "--max-restarts", "9"])
    until(lambda: run.events("group_ended", round=5), "the end of round 5")  # the next one is due eight seconds later
    run.process.send_signal(signal.SIGINT)
    assert run.wait() == 128 + signal.SIGINT
    assert not run.events("round_published", round=6)


def test_a_signal_at_the_very_start_is_not_lost(job: StartJob) -> None:
    for _ in range(4):
        run = job("plain.py", COLD, "sleep")
        run.event("group_started")
        run.process.terminate()
        assert run.wait() == 128 + signal.SIGTERM


def test_what_outlives_a_success_is_named(job: StartJob) -> None:
    """An upload in the background, say: under torchrun it would run to its end."""
    run = job("plain.py", COLD, "daemon")
    assert run.wait() == 0
    daemons = [int(pid) for pid in run.file("family").split()]
    said = run.err.partition("round 1: what outlived its workers got SIGTERM: ")[2].splitlines()[:1]
    assert daemons and all(f"{sys.executable} -c (pid {pid})" in "".join(said) for pid in daemons), run.err
