"""`session.run` under `elasticd run`: the job shrinks at once, and grows between two steps; the others stay."""

from __future__ import annotations

import json
import re
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.faults.conftest import StartJob
from tests.faults.job import Job, until
from tests.faults.nodes import Nodes

StartNodes = Callable[[str], Nodes]

ELASTIC = {"workers": "2:3", "flags": ["--checkpoint-dir", "checkpoints"]}


def lines(run: Job, name: str) -> list[dict[str, Any]]:
    path = run.work / name
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def entries(run: Job, round: int) -> dict[int, int]:
    """The pids of the ranks that have entered this round."""
    return {entry["rank"]: entry["pid"] for entry in lines(run, "entered") if entry["round"] == round}


def each_sample_once(epochs: int, *runs: Job) -> bool:
    """In the steps as they were committed: those of the last round that trained them."""
    used = [one for run in runs for one in lines(run, "samples")]
    last: dict[int, int] = {}
    for one in used:
        last[one["step"]] = max(one["round"], last.get(one["step"], 0))
    seen = [(one["epoch"], s) for one in used if last[one["step"]] == one["round"] for s in one["samples"]]
    return sorted(seen) == [(epoch, sample) for epoch in range(epochs) for sample in range(1200)]


@pytest.mark.system
def test_survivors_continue_at_once_and_the_third_returns_without_a_restart(job: StartJob) -> None:
    run = job("stays.py", "", "6", **ELASTIC)
    run.step(20)
    run.kill(1, round=1)
    run.step(1, round=3)
    assert run.wait() == 0
    first, second, third = (entries(run, number) for number in (1, 2, 3))
    assert [second[0], second[1]] == [first[0], first[2]], "both survivors keep their process"
    assert {third[0], third[2]} == {first[0], first[2]} and third[1] not in first.values()
    shrunk, grown = (run.event("round_published", round=number) for number in (2, 3))
    assert "rank 1 was killed by SIGKILL; slot 1 of " in shrunk["reason"] and " starts; restart" in shrunk["reason"]
    assert "slot 1 of " in grown["reason"] and "is back; restart with 3 workers" in grown["reason"]
    for round, step in re.findall(r"checkpoint r(\d+)-s(\d+)", grown["reason"]):
        assert run.events("checkpoint_saved", round=int(round), step=int(step)), "a pause saves nothing"
    assert run.event("group_started", round=3)["kept"] == 3
    assert each_sample_once(6, run)
    assert run.event("job_ended", outcome="succeeded", restarts=2)


@pytest.mark.system
def test_a_newcomer_that_fails_is_replaced_by_a_process_of_the_round(job: StartJob) -> None:
    """From then on the job changes its size by restarts, and says so once."""
    run = job("stays.py", "fails", "6", **ELASTIC)
    run.step(20)
    run.kill(1, round=1)
    run.step(1, round=3)
    run.kill(1, round=3)
    run.step(1, round=4)
    assert run.wait() == 0
    assert [len(entries(run, number)) for number in (1, 2, 3, 4)] == [3, 2, 3, 3]
    why = "the new process of slot 1 exited with code 1 (OSError: no licence left) before session.run: "
    assert run.err.count(f"{why}another one starts") == 2, run.err
    assert run.err.count(f"{why}from now on") == 1, run.err
    assert run.event("group_started", round=3)["kept"] == 2
    assert each_sample_once(6, run)


@pytest.mark.system
def test_job_ends_while_a_newcomer_is_on_its_way(job: StartJob) -> None:
    """With success as with a signal: nothing is left, and nobody waits."""
    ends, stops = (job("stays.py", "waits", epochs, **ELASTIC) for epochs in ("3", "60"))
    for run in (ends, stops):
        run.step(20)
        run.kill(2, round=1)
        assert run.file("newcomer") == "waits"
    stops.process.send_signal(signal.SIGTERM)
    assert ends.wait() == 0
    assert stops.wait() == 128 + signal.SIGTERM
    until(lambda: not entries(ends, 3) and not entries(stops, 3), "no third round")
    assert each_sample_once(3, ends)


@pytest.mark.system
def test_node_whose_only_worker_died_returns_between_two_steps(nodes: StartNodes, tmp_path: Path) -> None:
    group = nodes("2:3")
    flags = ["--checkpoint-dir", str(tmp_path / "checkpoints")]
    a, b, c = (group.agent(name, "stays.py", "", "12", flags=flags, warm=True) for name in "abc")
    until(lambda: any(entry["size"] == 3 for entry in lines(c, "entered")), "a round of all three")
    first = lines(c, "entered")[-1]["round"]
    rank = next(iter(entries(c, first)))
    until(lambda: [round for round, _ in c.steps(rank)].count(first) >= 20, "steps of that round")
    before = {run: entries(run, first) for run in (a, b, c)}
    b.kill(next(iter(before[b])), round=first)
    until(lambda: entries(c, first + 2), "the round that has b again")
    assert [run.wait() for run in (a, b, c)] == [0, 0, 0]
    assert not entries(b, first + 1)
    for run in (a, c):
        assert {*entries(run, first + 1).values()} == {*before[run].values()}
        assert {*entries(run, first + 2).values()} == {*before[run].values()}
    grown = a.event("round_published", round=first + 2)
    assert "b joined; restart with 3 workers on 3 nodes" in grown["reason"]
    assert b.event("group_started", round=first + 2)["kept"] == 1


@pytest.mark.system
def test_node_joins_between_two_steps(nodes: StartNodes, tmp_path: Path) -> None:
    """Its worker runs the script up to its entry while the others train."""
    group = nodes("2:3")
    flags = ["--checkpoint-dir", str(tmp_path / "checkpoints")]
    a, b = (group.agent(name, "stays.py", "", "16", flags=flags, warm=True) for name in "ab")
    until(lambda: entries(a, 1), "the first round")
    rank = next(iter(entries(a, 1)))
    a.step(5, round=1, rank=rank)
    c = group.agent("c", "stays.py", "", "16", flags=flags, warm=True)
    until(lambda: entries(c, 2), "the round that has c")
    assert [run.wait() for run in (a, b, c)] == [0, 0, 0]
    for run in (a, b):
        assert {*entries(run, 2).values()} == {*entries(run, 1).values()}
        assert "[c10d]" not in run.err, "a pause is no fault"
    assert c.event("group_started", round=2)["kept"] == 1
    assert "c joined; restart with 3 workers" in a.event("round_published", round=2)["reason"]
