"""`elasticd agent --supervised`: what a container has instead of systemd. The agent dies, jobs do not notice."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest

from elasticd_agent.node.sd_notify import open_notifier
from elasticd_agent.node.watchdog import WatchdogMonitor
from tests.faults.job import REPOSITORY, parent_of
from tests.node.conftest import MakeNode
from tests.node.node import COLD, comm_of, lives, until


def children(pid: int) -> set[int]:
    return set(map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split()))


def test_the_agent_is_started_again_and_finds_its_runners_and_a_sigterm_drains_it(node: MakeNode) -> None:
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
    until(lambda: len(n1.events("agent_joined")) == 2, n1.diagnostics)
    n1.signal(signal.SIGHUP)
    n1.event("agent_reloaded")
    os.kill(runner, signal.SIGKILL)
    n1.event("runner_ended", outcome="lost")
    until(lambda: runner not in children(n1.pid), lambda: f"the zombie {runner} to be reaped\n{n1.diagnostics()}")
    until(lambda: n1.runner("one") != runner and n1.workers("one") != (worker,), n1.diagnostics)
    assert n1.drain() == 0
    assert not lives(worker)
    n1.assert_gone()


def test_an_agent_that_cannot_work_as_it_is_configured_is_not_started_again(node: MakeNode) -> None:
    n1 = node(slots=0)
    n1.start("--supervised", wait=False)
    assert n1.wait() == 2
    assert n1.log.count("elasticd agent: error:") == 1


@pytest.mark.system
@pytest.mark.skipif(shutil.which("unshare") is None, reason="needs unshare (util-linux)")
def test_as_process_1_of_a_container(node: MakeNode) -> None:
    """A process namespace of its own: whoever is orphaned in it is this one's to reap; its end ends everybody."""
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
    until(lambda: len(n1.events("agent_joined")) == 2, n1.diagnostics)
    os.kill(first, signal.SIGTERM)
    assert n1.wait() == 0
    n1.assert_gone()


SUPERVISE = """
import sys
from elasticd_agent.node.supervisor import supervise
sys.exit(supervise(sys.argv[2:], float(sys.argv[1]), 0.3))
"""
HANGS_ONCE = """
import os, pathlib, sys, time
from elasticd_agent.node.sd_notify import open_notifier
open_notifier(os.environ).ready()
hung = pathlib.Path(sys.argv[1])
if not hung.exists():
    hung.touch()
    time.sleep(100)
"""


def test_who_feeds_is_left_alone_and_who_leaves_is_not_waited_for() -> None:
    feeding = WatchdogMonitor(30.0)
    with closing(feeding):
        environ = dict(feeding.environment)
        notifier = open_notifier(environ)
        assert notifier.watchdog_s == 30
        assert not feeding.expired(100.0), "it is not ready yet, and may take its time"
        notifier.ready("here")
        assert not feeding.expired(200.0)
        assert not feeding.expired(229.0)
        assert notifier.feed()
        assert not feeding.expired(231.0)
        assert feeding.expired(262.0)
        feeding.reset()
        assert not feeding.expired(300.0), "another one"
        notifier.ready()
        notifier.stopping(60)
        assert notifier.ready()
        assert not feeding.expired(301.0)
        assert not feeding.expired(400.0)


def test_an_agent_that_hangs_is_ended_and_started_again(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", SUPERVISE, "1.0", sys.executable, "-c", HANGS_ONCE, str(tmp_path / "hung")],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(REPOSITORY), str(REPOSITORY / "agents")])},
    )
    assert done.returncode == 0, done.stderr
    assert "the agent has decided nothing for 1 s; it is ended, with its stacks if it can" in done.stderr
    assert "the agent was killed by SIGABRT and is started again in 0 s" in done.stderr


def test_an_agent_that_cannot_be_started_is_tried_again_and_nobody_need_listen(tmp_path: Path) -> None:
    """Our end would be that of every runner: neither a full process table nor a closed standard error is worth it."""
    late, beside = tmp_path / "agent", tmp_path / "new"
    beside.write_text(f"#!/bin/sh\n[ -e {tmp_path}/died ] && exit 2\n: > {tmp_path}/died\nexit 1\n")
    beside.chmod(0o700)
    with subprocess.Popen(
        [sys.executable, "-c", SUPERVISE, "30", str(late)],
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(REPOSITORY), str(REPOSITORY / "agents")])},
    ) as process:
        assert process.stderr is not None
        assert "the agent cannot be started (No such file or directory), and" in process.stderr.readline()
        process.stderr.close()
        beside.rename(late)
        assert process.wait(30) == 2
    assert (tmp_path / "died").exists()


@pytest.mark.system
def test_a_stopped_agent_is_started_again_and_its_jobs_do_not_notice(node: MakeNode) -> None:
    n1 = node()
    n1.job("one", "plain.py", COLD, "sleep", workers=1)
    n1.write()
    path = os.pathsep.join(n1.path)
    with open(n1.root / "agent.log", "ab") as log:
        command = [n1.python, "-m", "elasticd_agent", "agent", "--config", str(n1.config)]
        n1.process = subprocess.Popen(
            [n1.python, "-c", SUPERVISE, "3.0", *command],
            env={**os.environ, "PYTHONPATH": path, **n1._marked()},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
        )
    (worker,) = n1.workers("one")
    agent = n1.events("agent_started")[0]["pid"]
    os.kill(agent, signal.SIGSTOP)
    again = until(lambda: n1.events("agent_started")[1:], n1.diagnostics)[0]
    assert again["pid"] != agent
    assert again["adopted"] == 1
    assert n1.workers("one") == (worker,)
    assert lives(worker)
    until(lambda: len(n1.events("agent_joined")) == 2, n1.diagnostics)
    assert n1.drain() == 0
