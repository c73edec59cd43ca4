"""Spares: nodes and slots whose workers stand at `session.run` take the place of lost ranks at once."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.faults.conftest import StartJob
from tests.faults.job import Job, until
from tests.faults.nodes import Nodes
from tests.faults.test_in_place import each_sample_once, entries, lines

StartNodes = Callable[[str], Nodes]


def stands_by(run: Job, times: int = 1) -> str:
    """What it says once its process is at its entry, so many times."""

    def said() -> list[str]:
        return [event["reason"] for event in run.events("waiting") if " by as a spare: " in event["reason"]]

    until(lambda: len(said()) >= times or run.process.poll() is not None, run.report)
    assert len(said()) == times, run.report()
    return said()[-1]


@pytest.mark.system
def test_spare_slot_takes_a_lost_ranks_place_and_the_lost_slot_is_the_next_spare(job: StartJob) -> None:
    """The spare's process dies first while it waits: another one comes."""
    run = job("stays.py", "", "40", workers="2", flags=["--checkpoint-dir", "checkpoints", "--spares", "1"])
    assert "slot 2 of " in stands_by(run)
    spare = int(run.file("newcomers"))
    os.kill(spare, signal.SIGKILL)
    stands_by(run, 2)
    run.kill(1, round=1)
    run.step(5, round=2)
    first, second = entries(run, 1), entries(run, 2)
    assert second[0] == first[0] and second[1] not in (first[1], spare)
    reason = run.event("round_published", round=2)["reason"]
    assert "rank 1 was killed by SIGKILL; its place went to spare slot 2; slot 1 of " in reason
    assert run.event("group_started", round=2)["kept"] == 2, "the survivor and the spare"
    assert "slot 1 of " in stands_by(run, 3)
    run.kill(0, round=2)
    run.step(5, round=3)
    assert run.event("group_started", round=3)["kept"] == 2
    run.process.send_signal(signal.SIGTERM)
    assert run.wait() == 128 + signal.SIGTERM


@pytest.mark.system
def test_spare_node_takes_a_lost_nodes_place(nodes: StartNodes, tmp_path: Path) -> None:
    """The survivor keeps its process; a spare that dies while it waits, or leaves, is not the job's."""
    group = nodes("2")
    flags = ["--checkpoint-dir", str(tmp_path / "checkpoints"), "--spares", "1"]
    a, b = (group.agent(name, "stays.py", "", "24", flags=flags, warm=True) for name in "ab")
    until(lambda: entries(a, 1), "the first round")
    c = group.agent("c", "stays.py", "", "24", flags=flags, warm=True)
    assert c.event("waiting")["reason"] == "c waits as a spare: the job has its 2 nodes"
    stands_by(c)
    c.process.kill()
    d = group.agent("d", "stays.py", "", "24", flags=flags, warm=True)
    stands_by(d)
    first = entries(a, 1)
    b.process.kill()
    until(lambda: entries(d, 2) and entries(a, 2), d.report)
    assert {*entries(a, 2).values()} == {*first.values()}
    assert [*entries(d, 2).values()] == [int(pid) for pid in d.file("newcomers").split()]
    published = a.event("round_published", round=2)
    assert "b is lost" in published["reason"] and "; its place went to spare d; restart with 2" in published["reason"]
    e = group.agent("e", "stays.py", "", "24", flags=flags, warm=True)
    e.event("waiting")
    assert [run.wait() for run in (a, d, e)] == [0, 0, 0]
    assert not e.events("group_started")
    assert each_sample_once(24, a, b, d)


@pytest.mark.system
def test_rank_that_dies_alone_on_its_node_is_replaced_by_the_spare_node(nodes: StartNodes, tmp_path: Path) -> None:
    """And its node is the next spare."""
    group = nodes("2")
    flags = ["--checkpoint-dir", str(tmp_path / "checkpoints"), "--spares", "1"]
    a, b, c = (group.agent(name, "stays.py", "", "60", flags=flags, warm=True) for name in "abc")
    until(lambda: any(run.events("waiting", nodes=False) for run in (a, b, c)), a.report)
    spare = next(run for run in (a, b, c) if run.events("waiting", nodes=False))
    stands_by(spare)
    lost, stays = (run for run in (a, b, c) if run is not spare)
    number = lines(lost, "entered")[-1]["round"]
    before = entries(stays, number)
    lost.kill(next(iter(entries(lost, number))), round=number)
    until(lambda: entries(spare, number + 1) and entries(stays, number + 1), spare.report)
    assert {*entries(stays, number + 1).values()} == {*before.values()}
    stands_by(lost)
    for run in (a, b, c):
        run.process.send_signal(signal.SIGTERM)
    assert [run.wait() for run in (a, b, c)] == [128 + signal.SIGTERM] * 3
