"""Drains: jobs leave the node at a checkpoint, lose no step, and continue elsewhere or later."""

from __future__ import annotations

import pytest

from tests.daemon.conftest import MakeNode
from tests.daemon.node import COLD, AgentNode, lives, until
from tests.etcd import EtcdServers
from tests.faults.job import Event


def assert_none_lost(job: str, where: AgentNode, *nodes: AgentNode) -> None:
    """Every step was trained once: each round goes on right after the step at which the one before it was held.

    `where` is the node whose folder rank 0 writes to. A held group ends inside `step()`: the script cannot write that
    one down, the agent does.
    """
    steps = where.steps()
    held = [event["step"] for node in nodes for event in node.job_events(job, "paused")]
    trained = sorted([step for _, step in steps] + [step for step in held if step not in dict(map(reversed, steps))])
    twice = sorted({step for step in trained if trained.count(step) > 1})
    assert trained == list(range(1, trained[-1] + 1)), (twice, held, steps)
    assert steps == sorted(steps)
    for node in nodes:
        for resumed in node.job_events(job, "resumed"):
            assert resumed["step"] in held


@pytest.mark.system
def test_single_node_job_resumes_exactly_where_the_drain_paused_it(node: MakeNode) -> None:
    n1 = node()
    saved = n1.work / "ck"
    n1.job("one", "resume.py", "--steps", "600", "--every", "1000", workers=2, checkpoint_dir=str(saved))
    n1.start()
    n1.wait_for_step(50)
    workers = n1.workers("one")
    assert n1.drain() == 0
    assert not any(map(lives, workers))
    n1.assert_gone()
    left = n1.wait_for_exit("one")
    assert (left.outcome, left.exit_code, left.step) == ("left", 143, n1.steps()[-1][1])
    n1.start()
    until(lambda: n1.wait_for_exit("one").outcome == "succeeded", n1.diagnostics)
    assert_none_lost("one", n1, n1)
    assert {number for number, _ in n1.steps()} == {1, 2}
    assert n1.drain() == 0


@pytest.mark.system
def test_drain_of_one_of_two_nodes_loses_no_step(nodes: MakeNode) -> None:
    n1, n2 = nodes("n1", slots=1), nodes("n2", slots=1)
    shared = {"env": {"WORK": str(n1.work)}, "checkpoint_dir": str(n1.work / "ck")}
    n1.job("both", "resume.py", "--steps", "100000", "--every", "100000", nodes="1:2", workers=1, **shared)
    n2.start()
    n1.start()
    both = until(lambda: both_in(n1, n2), n1.diagnostics)[-1]
    until(lambda: n1.steps() and n1.steps()[-1][0] >= both["round"], n1.diagnostics)
    n1.wait_for_step(n1.steps()[-1][1] + 30)
    leaver = n1 if both["nodes"][0] == "n1" else n2
    stayer = n2 if leaver is n1 else n1
    assert leaver.drain() == 0
    reached = n1.steps()[-1][1]
    n1.wait_for_step(reached + 30)
    assert_none_lost("both", n1, n1, n2)
    newest = stayer.job_events("both", "round_published")[-1]
    assert newest["nodes"] == [stayer.name]
    assert newest["cause"] == "resize"
    assert newest["reason"].startswith(f"{leaver.name} leaves: the agent was stopped (SIGTERM); restart ")
    leaver.start()
    grown = until(lambda: [e for e in both_in(n1, n2) if e["round"] > newest["round"]], stayer.diagnostics)[-1]
    until(lambda: n1.steps()[-1][0] >= grown["round"], n1.diagnostics)
    assert stayer.drain() == 0
    assert leaver.drain() == 0
    assert_none_lost("both", n1, n1, n2)


@pytest.mark.system
def test_agent_that_is_replaced_while_a_job_leaves_lets_it_finish(node: MakeNode) -> None:
    """A second SIGTERM would be one to kill: the steps since the last save would be lost."""
    n1 = node()
    n1.job("one", "plain.py", COLD, "slow", workers=1)
    n1.start()
    until(lambda: (n1.work / "ready-0").exists(), n1.diagnostics)
    assert n1.unix().post("/v1/nodes/n1/drain").code == 200
    n1.wait_for_log("stopping its runner")
    n1.upgrade()
    assert n1.wait_for_exit("one").outcome == "left"
    assert (n1.work / "got-0").read_text() == "SIGTERM", n1.diagnostics()
    assert "twice" not in n1.files("one").runner_log.read_text()
    assert n1.drain() == 0


@pytest.mark.system
def test_stop_without_the_store_saves_the_last_step(nodes: MakeNode, etcd: EtcdServers) -> None:
    """No next round can be published: the node alone stops its group, which saves."""
    n1 = nodes("n1", drain_timeout="3s")
    checkpoints = n1.work / "ck"
    n1.job("one", "resume.py", "--steps", "100000", "--every", "100000", workers=2, checkpoint_dir=str(checkpoints))
    n1.start()
    n1.wait_for_step(50)
    etcd.kill()
    n1.event("store_unavailable")
    assert n1.drain() == 0
    left, trained = n1.wait_for_exit("one"), n1.steps()[-1][1]
    assert left.outcome == "left"
    saved = max((int(path.name.partition("-s")[2]) for path in checkpoints.glob("r*-s*")), default=0)
    assert saved >= trained, n1.diagnostics()


def both_in(*nodes: AgentNode) -> list[Event]:
    return [e for node in nodes for e in node.job_events("both", "round_published") if len(e["nodes"]) == 2]


@pytest.mark.system
def test_job_that_needs_both_nodes_waits_at_a_checkpoint(nodes: MakeNode) -> None:
    n1, n2 = nodes("n1", slots=1), nodes("n2", slots=1)
    shared = {"env": {"WORK": str(n1.work)}, "checkpoint_dir": str(n1.work / "ck")}
    n1.job("both", "resume.py", "--steps", "100000", "--every", "100000", nodes=2, workers=1, **shared)
    n2.start()
    n1.start()
    n1.wait_for_step(30)
    assert n2.drain() == 0
    until(lambda: not n1.job_is_running("both"), n1.diagnostics)
    reached = n1.steps()[-1][1]
    assert "pending: needs 2 nodes" in n1.log
    n2.start()
    n1.wait_for_step(reached + 30)
    assert_none_lost("both", n1, n1, n2)
    assert [n1.drain(), n2.drain()] == [0, 0]
    assert_none_lost("both", n1, n1, n2)
