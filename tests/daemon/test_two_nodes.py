"""One of two nodes loses its runner or its agent: the other continues, and the lost node returns by itself."""

from __future__ import annotations

import os
import re
import signal
import time
from typing import Any

import pytest

from elasticd_agent.store.etcd.store import EtcdStore
from elasticd_daemon import keys as names
from tests.daemon.conftest import MakeNode
from tests.daemon.node import COLD, AgentNode, lives, until
from tests.etcd import EtcdServers
from tests.faults.job import Event


def together(n1: AgentNode, n2: AgentNode) -> Event:
    """A job of both that makes steps; its round."""
    shared = {"env": {"WORK": str(n1.work)}, "checkpoint_dir": str(n1.work / "ck")}
    n1.job("both", "resume.py", "--steps", "100000", nodes="1:2", workers=1, **shared)
    n2.start()
    n1.start()
    both = until(lambda: rounds(2, n1, n2), n1.diagnostics)[-1]
    until(lambda: n1.steps() and n1.steps()[-1][0] >= both["round"], n1.diagnostics)
    return both


def rounds(size: int, *nodes: AgentNode, after: int = 0) -> list[Event]:
    found = [e for node in nodes for e in node.job_events("both", "round_published")]
    return sorted(
        (e for e in found if len(e["nodes"]) == size and e["round"] > after), key=lambda event: event["round"]
    )


def rows(node: AgentNode) -> list[dict[str, Any]]:
    """What `elasticd nodes` shows there; nothing while the store does not answer."""
    found: list[dict[str, Any]] = node.unix().get("/v1/nodes").document().get("nodes", [])
    return found


def trains_in(n1: AgentNode, number: int) -> None:
    until(lambda: n1.steps()[-1][0] >= number, n1.diagnostics)


@pytest.mark.system
def test_killed_runner_costs_one_round_and_is_restarted(nodes: MakeNode) -> None:
    n1, n2 = nodes("n1", slots=1), nodes("n2", slots=1)
    both = together(n1, n2)
    runner, (worker,) = n2.runner("both"), n2.workers("both")
    stays = n1.runner("both")
    os.kill(runner, signal.SIGKILL)
    until(lambda: not lives(worker), n2.diagnostics, 3.0)
    n2.event("runner_ended", name="both", outcome="lost")
    until(lambda: n2.runner("both") != runner, n2.diagnostics)
    alone = until(lambda: rounds(1, n1, after=both["round"]) or rounds(2, n1, after=both["round"]), n1.diagnostics)[0]
    trains_in(n1, alone["round"])
    again = until(lambda: rounds(2, n1, n2, after=both["round"]), n1.diagnostics)[-1]
    trains_in(n1, again["round"])
    assert n1.runner("both") == stays
    assert {n1.drain(), n2.drain()} == {0}


def test_lost_node_is_shown_and_one_that_left_is_not(nodes: MakeNode) -> None:
    """By the scheduler's own node, which is the one that is lost, and by an agent that has started since."""
    n1, n2, n3 = nodes("n1"), nodes("n2"), nodes("n3")
    for one in (n1, n2, n3):
        one.start()

    def shown() -> dict[str, str]:
        return {row["node"]: row["state"] for row in rows(n2)}

    until(lambda: shown() == dict.fromkeys(("n1", "n2", "n3"), "ready"), n2.diagnostics)
    assert n3.drain() == 0
    n1.kill()
    until(lambda: shown() == {"n1": "lost", "n2": "ready"}, n2.diagnostics)
    until(lambda: "node n1 is lost" in n2.log, n2.diagnostics)
    n2.kill()
    n2.start()
    lost = until(lambda: [row for row in rows(n2) if row["node"] == "n1"], n2.diagnostics)[0]
    assert re.fullmatch(r"for .+, since .+ UTC: its agent, the machine or its network is down", lost["reason"])
    n1.start()
    until(lambda: shown() == {"n1": "ready", "n2": "ready"}, n2.diagnostics)
    assert {n1.drain(), n2.drain()} == {0}


@pytest.mark.system
def test_only_an_agent_that_stays_away_loses_its_jobs(nodes: MakeNode) -> None:
    """They leave at a checkpoint; an agent that comes back within adopt_timeout loses nothing."""
    # Much longer than an agent takes to start on a machine with other things to do.
    n1, n2 = nodes("n1", slots=1, adopt_timeout="25s"), nodes("n2", slots=1, adopt_timeout="25s")
    both = together(n1, n2)
    n2.kill()
    time.sleep(5)  # longer than its lease: the node is away, its job's runner is not
    n2.start()
    time.sleep(6)
    assert rounds(2, n1, n2)[-1]["round"] == both["round"]
    assert not rounds(1, n1, after=both["round"])
    n2.kill()
    gone = time.monotonic()
    alone = until(lambda: rounds(1, n1, after=both["round"]), n1.diagnostics)[-1]
    assert time.monotonic() - gone > 20
    assert alone["nodes"] == ["n1"]
    assert "no agent has contacted this runner" in n2.files("both").runner_log.read_text()
    trains_in(n1, alone["round"])
    assert n1.drain() == 0
    until(lambda: not n2.processes(), n2.diagnostics)


@pytest.mark.system
def test_stopped_agent_registers_again_without_effect_on_its_job(nodes: MakeNode, etcd: EtcdServers) -> None:
    """Its lease and the placer's key were lost meanwhile; another agent places."""
    n1, n2 = nodes("n1"), nodes("n2")
    n1.job("one", "ticking.py", COLD, workers=2)
    n1.start()
    n1.wait_for_log("n1 is the scheduler now")
    n1.wait_for_step(10)
    workers = n1.workers("one")
    n2.start()
    n1.signal(signal.SIGSTOP)
    n2.wait_for_log("n2 is the scheduler now")
    store = EtcdStore(etcd.endpoints)
    try:
        until(lambda: store.read(f"{names.NODES}n1") is None, n2.diagnostics)
        n1.signal(signal.SIGCONT)
        until(lambda: store.read(f"{names.NODES}n1") is not None, n1.diagnostics)
    finally:
        store.close()
    reached = n1.steps()[-1][1]
    n1.wait_for_step(reached + 200)
    assert n1.workers("one") == workers
    assert {number for number, _ in n1.steps()} == {1}
    assert n2.drain() == 0
    n1.until(lambda: n1.log.count("n1 is the scheduler now") == 2, "n1 to place again")
    assert n1.drain() == 0
