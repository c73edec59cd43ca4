"""A sharded job under kills: its world size changes, and it ends where the uninterrupted run on one rank does."""

from __future__ import annotations

import json
import signal
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.faults.conftest import StartJob
from tests.faults.job import Job, until
from tests.faults.nodes import Nodes

pytestmark = pytest.mark.system

StartNodes = Callable[[str], Nodes]
SAMPLES, BATCH = 240, 12


def effective_samples(agents: list[Job]) -> dict[int, dict[int, list[int]]]:
    """Of each epoch, the samples of each step in the last round that has trained it."""
    found: dict[int, dict[int, list[int]]] = defaultdict(lambda: defaultdict(list))
    rounds: dict[int, int] = {}
    lines = [
        json.loads(line)
        for agent in agents
        for path in agent.work.glob("samples-*")
        for line in path.read_text().splitlines()
    ]
    for line in lines:
        rounds[line["step"]] = max(rounds.get(line["step"], 0), line["round"])
    for line in lines:
        if line["round"] == rounds[line["step"]]:
            found[line["epoch"]][line["step"]] += line["samples"]
    return found


def parameters(work: Path) -> list[float]:
    found: list[float] = json.loads((work / "parameters").read_text())
    return found


@pytest.mark.timeout(300)
@pytest.mark.parametrize("kind", ["fsdp", "hsdp", "zero"])
def test_four_three_two_four_nodes(nodes: StartNodes, job: StartJob, tmp_path: Path, kind: str) -> None:
    """A node is killed, another one, and two come back; each change in the middle of an epoch."""
    steps = 160
    alone = ("sharded.py", "--kind", "whole", "--steps", str(steps), "--pause", "0")
    whole = job(*alone, workers="1", flags=directory(tmp_path, "a"))
    job_nodes = nodes("2:4")
    how: dict[str, Any] = {"flags": directory(tmp_path, "b"), "warm": True}
    train = ("sharded.py", "--kind", kind, "--steps", str(steps), "--every", "5", "--pause", "0.05")
    agents = {name: job_nodes.agent(name, *train, **how) for name in "abcd"}
    size_at(agents, 4)
    lost = [agents.pop(name) for name in "dc"]
    for size, agent in zip((3, 2), lost, strict=True):
        trained(agents, 8)
        agent.end()
        size_at(agents, size)
    trained(agents, 8)
    agents |= {name: job_nodes.agent(name, *train, **how) for name in "ef"}
    size_at(agents, 4)
    assert [agent.wait(120) for agent in agents.values()] == [0] * 4
    assert whole.wait() == 0

    everyone = [*agents.values(), *lost]
    (ended,) = [agent for agent in agents.values() if (agent.work / "parameters").exists()]
    assert parameters(ended.work) == pytest.approx(parameters(whole.work), abs=1e-4)
    for epoch, by_step in effective_samples(everyone).items():
        samples = sorted(sample for each in by_step.values() for sample in each)
        count = min(SAMPLES, steps * BATCH - epoch * SAMPLES)
        assert len(samples) == len(set(samples)) == count, f"epoch {epoch}"


def directory(tmp_path: Path, name: str) -> list[str]:
    return ["--checkpoint-dir", str(tmp_path / name)]


def steps_of(agents: dict[str, Job]) -> list[tuple[int, int, int]]:
    """(round, step, world size) of all steps of all ranks, in order."""
    lines = [
        line for each in agents.values() for path in each.work.glob("steps-*") for line in path.read_text().splitlines()
    ]
    return sorted((int(round), int(step), int(size)) for round, step, size in (line.split() for line in lines))


def size_at(agents: dict[str, Job], size: int) -> None:
    def look() -> bool:
        assert all(agent.process.poll() is None for agent in agents.values()), report(agents)
        return [each[2] for each in steps_of(agents)[-1:]] == [size]

    until(look, lambda: f"a step on {size} ranks\n{report(agents)}", within=120)


def report(agents: dict[str, Job]) -> str:
    return "\n".join(f"--- {name}\n{agent.err[-2000:]}" for name, agent in agents.items())


def trained(agents: dict[str, Job], steps: int) -> None:
    """Wait for so many more steps."""
    first = steps_of(agents)[-1][1]
    until(lambda: steps_of(agents)[-1][1] >= first + steps, lambda: f"{steps} more steps\n{report(agents)}")


def test_state_in_memory_is_written_although_all_workers_die(job: StartJob, tmp_path: Path) -> None:
    """100 MB take a while: the next round waits for them, and loses no step of the last save."""
    train = ("sharded.py", "--steps", "100000", "--every", "10", "--ballast", str(100 << 20))
    run = job(*train, flags=directory(tmp_path, "shared"))
    run.step(30)
    before = [each["step"] for each in run.events("checkpoint_saved")]
    run.kill_all((0, 1), round=1)
    resumed = run.event("resumed", round=2)
    assert resumed["step"] >= max(before, default=10), "the first one was in memory at step 10"
    failed = [each["reason"] for each in run.events("checkpoint_failed")]
    assert [reason for reason in failed if "while it copied its share" not in reason] == []
    assert "each rank has only a part of a sharded state" in run.err
    run.step(resumed["step"] + 10, round=2)
    run.process.terminate()
    assert run.wait() == 128 + signal.SIGTERM
    assert not list((tmp_path / "shared").glob(".*staging"))
