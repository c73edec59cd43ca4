"""A second fault while ranks wait in their processes for another node: what ends, what is new, what stays."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.faults.job import Job, until
from tests.faults.nodes import Nodes
from tests.faults.test_in_place import entries, lines

StartNodes = Callable[[str], Nodes]
pytestmark = pytest.mark.system


def lose(node: Job) -> None:
    for pid in node.processes():
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


class Waiting:
    """Node a, whose two ranks are parked since node b was lost; two nodes are needed."""

    def __init__(self, nodes: StartNodes, directory: Path) -> None:
        self.group = nodes("2")
        self.flags, self.checkpoints = ["--checkpoint-dir", str(directory)], directory
        self.a = self.agent("a", "2")
        b = self.agent("b", "1")
        until(lambda: len(lines(self.a, "entered")) == 2, "the first round")
        self.a.step(10, rank=min(entries(self.a, 1)))
        lose(b)
        self.group.agents.remove(b)
        assert self.a.event("group_ended", round=1)["reason"].endswith("2 workers kept for the next round")
        self.parked = set(entries(self.a, 1).values())

    def agent(self, name: str, workers: str) -> Job:
        return self.group.agent(name, "stays.py", "", "6", workers=workers, flags=self.flags, warm=True)

    def continues(self) -> int:
        """Another node comes, and the job ends well; returns how many of a's ranks have stayed."""
        c = self.agent("c", "1")
        assert [self.a.wait(), c.wait()] == [0, 0]
        last = max(entry["round"] for entry in lines(self.a, "entered"))
        return len(self.parked.intersection(entries(self.a, last).values()))


@pytest.fixture
def waiting(nodes: StartNodes, tmp_path: Path) -> Waiting:
    return Waiting(nodes, tmp_path / "checkpoints")


def test_stop_ends_ranks_that_wait(waiting: Waiting) -> None:
    """What they hold is on the disk then, although nothing has been saved before."""
    waiting.a.process.send_signal(signal.SIGTERM)
    assert waiting.a.wait(within=20) == 128 + signal.SIGTERM
    step = max(step for _, step in waiting.a.steps(min(entries(waiting.a, 1))))
    assert [path.name for path in waiting.checkpoints.glob("r*")] == [f"r1-s{step}"]


def test_agent_that_is_killed_takes_them_with_it(waiting: Waiting) -> None:
    waiting.a.process.kill()
    waiting.a.process.wait()
    until(lambda: not waiting.a.processes(), lambda: str(waiting.a.processes()), within=10)


def test_owner_that_is_killed_is_replaced_and_the_ranks_are_new(waiting: Waiting) -> None:
    os.kill(waiting.a.helper("owner"), signal.SIGKILL)
    until(lambda: "the process that owns the workers was killed" in waiting.a.err, "its sentence")
    assert waiting.continues() == 0


def test_template_that_is_killed_is_replaced_and_the_ranks_stay(waiting: Waiting) -> None:
    os.kill(waiting.a.helper("templ"), signal.SIGKILL)
    until(lambda: "another one is started" in waiting.a.err, "its sentence")
    assert waiting.continues() == 2


def test_rank_that_is_killed_is_new_and_the_other_stays(waiting: Waiting) -> None:
    os.kill(min(waiting.parked), signal.SIGKILL)
    until(lambda: "while it waited for the next round: a new process follows" in waiting.a.err, "its sentence")
    assert waiting.continues() == 1


def test_leader_that_is_lost_is_replaced_and_the_ranks_stay(nodes: StartNodes, tmp_path: Path) -> None:
    """The agent that plans the rounds dies with its own ranks, which wait as those of the third node do."""
    group, flags = nodes("3"), ["--checkpoint-dir", str(tmp_path / "checkpoints")]
    runs = {name: group.agent(name, "stays.py", "", "6", flags=flags, warm=True) for name in "abc"}
    first = runs["a"].event("round_published", round=1)
    leader = runs.pop(first["leader"])
    for run in runs.values():
        run.step(10, rank=min(until(lambda run=run: entries(run, 1), "the first round")))  # type: ignore[misc]
    lost, stays = runs.values()
    lose(lost)
    for run in (leader, stays):
        assert run.event("group_ended", round=1)["reason"].endswith("1 worker kept for the next round")
    lose(leader)
    both = [group.agent(name, "stays.py", "", "6", flags=flags, warm=True) for name in "de"]
    assert [run.wait() for run in (stays, *both)] == [0, 0, 0]
    assert stays.event("round_published", round=2)["leader"] != first["leader"]
    assert stays.event("group_started", round=2)["kept"] == 1
    assert {*entries(stays, 2).values()} == {*entries(stays, 1).values()}
    group.agents = [stays, *both]


def test_owner_of_a_node_that_would_join_is_replaced_with_its_new_process(nodes: StartNodes, tmp_path: Path) -> None:
    group, flags = nodes("2:3"), ["--checkpoint-dir", str(tmp_path / "checkpoints")]
    a, b = (group.agent(name, "stays.py", "", "60", flags=flags, warm=True) for name in "ab")
    a.step(5, rank=min(until(lambda: entries(a, 1), "the first round")))
    c = group.agent("c", "stays.py", "waits", "60", flags=flags, warm=True)
    assert c.file("newcomer") == "waits"
    os.kill(c.helper("owner"), signal.SIGKILL)
    until(lambda: c.file("newcomer") == "waitswaits", "another process")
    for run in (a, b, c):
        run.process.send_signal(signal.SIGTERM)
    assert [run.wait() for run in (c, b, a)] == [128 + signal.SIGTERM] * 3
