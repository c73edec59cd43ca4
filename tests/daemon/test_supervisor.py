"""`elasticd agent --supervised`: the replacement for systemd in a container. Jobs survive the agent."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest

from elasticd_agent.system.processes.process import signal_name
from elasticd_daemon.sd_notify import take_notifier
from elasticd_daemon.supervisor import WatchdogMonitor
from tests.daemon.conftest import MakeNode
from tests.daemon.node import COLD, comm_of, lives, until
from tests.faults.job import REPOSITORY, parent_of


def children(pid: int) -> set[int]:
    return set(map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split()))


def test_killed_agent_is_restarted_and_adopts_its_runners(node: MakeNode) -> None:
    """SIGTERM to the supervisor drains the node."""
    n1 = node()
    n1.job("one", "plain.py", COLD, "sleep", workers=1)
    n1.start("--supervised")
    until(lambda: (n1.work / "ready-0").exists(), n1.diagnostics)
    (worker,), runner = n1.workers("one"), n1.runner("one")
    agent = n1.events("agent_started")[0]["pid"]
    assert parent_of(agent) == n1.pid
    assert comm_of(n1.pid) == "elasticd-super"
    os.kill(agent, signal.SIGKILL)
    again = until(lambda: n1.events("agent_started")[1:], n1.diagnostics)[0]
    assert again["pid"] != agent
    assert again["adopted"] == 1
    assert "the agent was killed by SIGKILL and is started again in 0 s" in n1.log
    assert parent_of(runner) == n1.pid, "a subreaper takes the orphan, as process 1 of a container does"
    assert n1.workers("one") == (worker,)
    until(lambda: len(n1.events("node_registered")) > 1, n1.diagnostics)
    n1.signal(signal.SIGHUP)
    n1.event("agent_reloaded")
    os.kill(runner, signal.SIGKILL)
    until(lambda: not lives(worker), "the end of the worker of a killed runner", 15.0)
    n1.event("runner_ended", outcome="lost")
    until(lambda: runner not in children(n1.pid), lambda: f"the zombie {runner} to be reaped\n{n1.diagnostics()}")
    until(lambda: n1.runner("one") != runner and n1.workers("one") != (worker,), n1.diagnostics)
    assert n1.drain() == 0
    n1.assert_gone()


def test_stray_signals_and_a_wrong_configuration_end_no_job(node: MakeNode) -> None:
    """Signals as schedulers, limits and timers send them: the log names each. With the container, a wrong configuration
    would end the job without a checkpoint.
    """
    n1 = node()
    n1.job("one", "plain.py", COLD, "sleep", workers=1)
    n1.start("--supervised")
    until(lambda: (n1.work / "ready-0").exists(), n1.diagnostics)
    (agent,), runner, workers = children(n1.pid) - {n1.runner("one")}, n1.runner("one"), n1.workers("one")
    stray = [signal.SIGUSR1, signal.SIGALRM, signal.SIGPROF, signal.SIGPIPE, signal.SIGIO, signal.SIGRTMIN + 3]
    for signum in stray:
        n1.signal(signum)
        os.kill(runner, signum)
    for name in (signal_name(one) for one in stray if one != signal.SIGPIPE):  # which Python ignores
        n1.wait_for_log(f"{name} is ignored: SIGTERM drains")
        until(lambda name=name: f"{name} is ignored" in n1.files("one").runner_log.read_text(), n1.diagnostics)
    assert agent in children(n1.pid)
    right = n1.config.read_text()
    n1.config.write_text(right + "nonsense = 1\n")
    os.kill(agent, signal.SIGKILL)
    n1.wait_for_log("the agent ended with code 2 and is started again")
    n1.config.write_text(right)
    until(lambda: len(n1.events("node_registered")) > 1, n1.diagnostics)
    assert (n1.runner("one"), n1.workers("one")) == (runner, workers) and lives(*workers)
    assert n1.drain() == 0


def test_wrong_configuration_is_not_retried(node: MakeNode) -> None:
    n1 = node(slots=0)
    n1.start("--supervised", wait=False)
    assert n1.wait() == 2
    assert n1.log.count("elasticd agent: error:") == 1


@pytest.mark.system
@pytest.mark.skipif(shutil.which("unshare") is None, reason="needs unshare (util-linux)")
def test_as_process_1_of_a_container(node: MakeNode) -> None:
    """A process namespace of its own: the supervisor reaps all orphans there, and its end ends all processes."""
    n1 = node()
    n1.job("one", "plain.py", COLD, "family", workers=1)
    n1.start("--supervised", prefix=["unshare", "--pid", "--fork", "--mount-proc", "--kill-child"])
    until(lambda: (n1.work / "ready-0").exists(), n1.diagnostics)
    assert n1.events("agent_started")[0]["pid"] < 50, "it is numbered anew"
    (first,) = children(n1.pid)
    until(lambda: len((n1.work / "family").read_text().split()) == 3, n1.diagnostics)
    agent = next(pid for pid in children(first) if comm_of(pid) != "elasticd-job")
    os.kill(agent, signal.SIGKILL)
    again = until(lambda: n1.events("agent_started")[1:], n1.diagnostics)[0]
    assert again["adopted"] == 1
    until(lambda: len(n1.events("node_registered")) == 2, n1.diagnostics)
    os.kill(first, signal.SIGTERM)
    assert n1.wait() == 0
    n1.assert_gone()


SUPERVISE = """
import sys
from elasticd_daemon.supervisor import supervise
sys.exit(supervise(sys.argv[2:], float(sys.argv[1]), 0.3))
"""
HANGS_ONCE = """
import os, pathlib, sys, time
from elasticd_daemon.sd_notify import take_notifier
take_notifier(os.environ).ready()
hung = pathlib.Path(sys.argv[1])
if not hung.exists():
    hung.touch()
    time.sleep(100)
"""


def test_watchdog_expires_only_for_a_silent_running_agent() -> None:
    watchdog = WatchdogMonitor(30.0)
    with closing(watchdog):
        environ = dict(watchdog.environment)
        notifier = take_notifier(environ)
        assert notifier.watchdog_s == 30
        assert not watchdog.expired(100.0), "an agent that is starting has no time limit"
        notifier.ready("here")
        assert not watchdog.expired(200.0)
        assert not watchdog.expired(229.0)
        assert notifier.feed()
        assert not watchdog.expired(231.0)
        assert watchdog.expired(262.0)
        watchdog.reset()
        assert not watchdog.expired(300.0), "another process"
        notifier.ready()
        notifier.stopping(60)
        assert notifier.ready()
        assert not watchdog.expired(301.0)
        assert not watchdog.expired(400.0)


def test_hung_agent_is_aborted_and_restarted(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", SUPERVISE, "1.0", sys.executable, "-c", HANGS_ONCE, str(tmp_path / "hung")],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(REPOSITORY), str(REPOSITORY / "agents")])},
    )
    assert done.returncode == 0, done.stderr
    assert "the agent's main loop has not run for 1 s; ending it with its stacks in the log" in done.stderr
    assert "the agent was killed by SIGABRT and is started again in 0 s" in done.stderr


def test_failed_start_is_retried_also_with_stderr_closed(tmp_path: Path) -> None:
    """The supervisor's end would end every runner: a full process table and a closed standard error do not end it."""
    late, beside = tmp_path / "agent", tmp_path / "new"
    beside.write_text(f"#!/bin/sh\n[ -e {tmp_path}/died ] && exit 2\n: > {tmp_path}/died\nexit 1\n")
    beside.chmod(0o700)
    with subprocess.Popen(
        [sys.executable, "-c", SUPERVISE, "30", str(late)],
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(REPOSITORY), str(REPOSITORY / "agents")])},
    ) as process:
        assert "the agent cannot be started (No such file or directory), retrying in" in process.stderr.readline()
        process.stderr.close()
        beside.rename(late)
        assert process.wait(30) == 2
    assert (tmp_path / "died").exists()


@pytest.mark.system
def test_stopped_agent_is_restarted_without_effect_on_jobs(node: MakeNode) -> None:
    n1 = node()
    n1.job("one", "plain.py", COLD, "sleep", workers=1)
    n1.write()
    path = os.pathsep.join(n1.path)
    with open(n1.root / "agent.log", "ab") as log:
        command = [n1.python, "-m", "elasticd_agent", "agent", "--config", str(n1.config)]
        n1.process = subprocess.Popen(
            [n1.python, "-c", SUPERVISE, "3.0", *command],
            env={**os.environ, "PYTHONPATH": path, **n1.marked()},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
        )
    n1.event("node_registered")
    n1.submit_jobs()
    (worker,) = n1.workers("one")
    agent = n1.events("agent_started")[0]["pid"]
    os.kill(agent, signal.SIGSTOP)
    again = until(lambda: n1.events("agent_started")[1:], n1.diagnostics)[0]
    assert again["pid"] != agent
    assert again["adopted"] == 1
    assert n1.workers("one") == (worker,)
    assert lives(worker)
    until(lambda: len(n1.events("node_registered")) == 2, n1.diagnostics)
    assert n1.drain() == 0
