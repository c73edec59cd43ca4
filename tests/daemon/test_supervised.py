"""`elasticd agent --supervised`: what a container has instead of systemd. The agent dies, jobs do not notice."""

from __future__ import annotations

import os
import shutil
import signal
from pathlib import Path

import pytest

from tests.daemon.conftest import MakeNode
from tests.daemon.node import COLD, comm_of, lives, until
from tests.faults.job import parent_of


def children(pid: int) -> set[int]:
    return set(map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split()))


def test_the_agent_is_started_again_and_finds_its_runners_and_a_sigterm_drains_it(node: MakeNode) -> None:
    n1 = node()
    n1.job("one", "plain.py", COLD, "sleep", workers=1)
    n1.start("--supervised")
    until(lambda: (n1.work / "ready-0").exists(), n1.told)
    (worker,), runner = n1.workers("one"), n1.runner("one")
    agent = n1.events("agent_started")[0]["pid"]
    assert parent_of(agent) == n1.pid
    assert comm_of(n1.pid) == "elasticd-super"
    os.kill(agent, signal.SIGKILL)
    again = until(lambda: n1.events("agent_started")[1:], n1.told)[0]
    assert again["pid"] != agent
    assert again["adopted"] == 1
    assert "the agent was killed by SIGKILL and is started again in 0 s" in n1.log
    assert parent_of(runner) == n1.pid, "a subreaper takes the orphan, as process 1 of a container does"
    assert n1.workers("one") == (worker,)
    until(lambda: len(n1.events("agent_joined")) == 2, n1.told)
    n1.signal(signal.SIGHUP)
    n1.event("agent_reloaded")
    os.kill(runner, signal.SIGKILL)
    n1.event("runner_ended", outcome="lost")
    until(lambda: runner not in children(n1.pid), lambda: f"the zombie {runner} to be reaped\n{n1.told()}")
    until(lambda: n1.runner("one") != runner and n1.workers("one") != (worker,), n1.told)
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
    until(lambda: (n1.work / "ready-0").exists(), n1.told)
    assert n1.events("agent_started")[0]["pid"] < 50, "it is numbered anew"
    (first,) = children(n1.pid)
    until(lambda: len((n1.work / "family").read_text().split()) == 3, n1.told)
    agent = next(pid for pid in children(first) if comm_of(pid) != "elasticd-job")
    os.kill(agent, signal.SIGKILL)
    again = until(lambda: n1.events("agent_started")[1:], n1.told)[0]
    assert again["adopted"] == 1
    until(lambda: len(n1.events("agent_joined")) == 2, n1.told)
    os.kill(first, signal.SIGTERM)
    assert n1.wait() == 0
    n1.assert_gone()
