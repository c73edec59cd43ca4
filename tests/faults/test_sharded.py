"""A sharded job under kills: its world size changes, and it ends where the uninterrupted run on one rank does."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.faults.conftest import StartJob
from tests.faults.job import Fault, Job, until
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
    train = ("sharded.py", "--kind", kind, "--steps", str(steps), "--every", "5", "--pause", "0.05", "--ranks", "4")
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
    found = sorted((each["round"], each["reason"]) for agent in everyone for each in agent.events("resumed"))
    from_memory = [reason for _, reason in found if "in memory" in reason]
    assert len(from_memory) >= 2, found  # a node may be lost while its part is copied
    (ended,) = [agent for agent in agents.values() if (agent.work / "parameters").exists()]
    assert parameters(ended.work) == pytest.approx(parameters(whole.work), abs=1e-4)
    assert_each_sample_once(everyone, steps)


def assert_each_sample_once(agents: list[Job], steps: int) -> None:
    for epoch, by_step in effective_samples(agents).items():
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
    last = lambda: next((step for _, step, _ in reversed(steps_of(agents))), 0)  # noqa: E731 0: only others have one
    until_step = last() + steps
    until(lambda: last() >= until_step, lambda: f"{steps} more steps\n{report(agents)}")


def test_next_round_resumes_from_memory_although_all_workers_die(job: StartJob, tmp_path: Path) -> None:
    """What is being written meanwhile becomes a checkpoint of the first round."""
    train = ("sharded.py", "--steps", "100000", "--every", "10", "--ballast", str(100 << 20), "--pause", "0.02")
    faults = [Fault(rank, 15, "SIGKILL", round=1) for rank in (0, 1)]
    run = job(*train, faults=faults, flags=directory(tmp_path, "shared"))
    run.step(10, round=1)
    writer = run.helper("writer")
    os.kill(writer, signal.SIGSTOP)
    run.event("group_ended", round=1)
    os.kill(writer, signal.SIGCONT)
    resumed = run.event("resumed", round=2)
    assert resumed["step"] == 10
    assert re.fullmatch(r"resumed from step 10 of round 1, in memory(; steps? 11 .* trained again)?", resumed["reason"])
    assert run.event("checkpoint_saved", round=1)["step"] == 10
    assert run.event("checkpoint_saved", round=2)["step"] > 10
    assert run.events("checkpoint_failed") == []
    run.process.terminate()
    assert run.wait() == 128 + signal.SIGTERM
    assert not list((tmp_path / "shared").glob(".*staging"))


def hold_at(job_nodes: Nodes, names: str, step: int, flags: list[str], kind: str, workers: str) -> dict[str, Job]:
    """A job of these nodes that stands still before `step`; every node has a copy of another one's last part."""
    last = len(names) * int(workers) - 1
    train = ("sharded.py", "--steps", "60", "--every", "10", "--pause", "0.02", "--kind", kind)
    faults = [Fault(last, step, "stop", round=1)]
    how: dict[str, Any] = {"flags": [*flags, "--rdzv-conf", "last_call_timeout=60"], "warm": True}
    agents = {name: job_nodes.agent(name, *train, workers=workers, faults=faults, **how) for name in names}
    what = f"part of step {step // 10 * 10} is in memory here"

    def look() -> bool:
        assert all(each.process.poll() is None for each in agents.values()), report(agents)
        return all(what in worker_events(each) for each in agents.values())

    until(look, lambda: f"{what}\n{report(agents)}", within=120)
    until(lambda: any((each.work / "fired").exists() for each in agents.values()), "the fault")
    for each in agents.values():
        each.faults = ()  # it fires on the node with the last rank
    return agents


def worker_events(agent: Job) -> str:
    files = (path for directory in agent.memory() for path in directory.glob("round-*/worker-events-*"))
    return "".join(path.read_text() for path in files)


def lose(agent: Job) -> None:
    """All processes of a node die at once."""
    for pid in agent.processes():
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    agent.end()


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """The parameters that one rank ends with, without a fault."""
    folder = tmp_path_factory.mktemp("whole")
    alone = ("sharded.py", "--kind", "whole", "--steps", "60")
    run = Job(folder / "job", *alone, workers="1", flags=directory(folder, "checkpoints"))
    try:
        assert run.wait() == 0
        return parameters(run.work)
    finally:
        run.end()


@pytest.mark.timeout(180)
@pytest.mark.parametrize(
    ("names", "workers", "kind"), [("abc", "1", "fsdp"), ("ab", "2", "fsdp"), ("ab", "2", "hsdp"), ("abc", "1", "zero")]
)
def test_lost_node_costs_the_steps_since_the_last_save(
    nodes: StartNodes, tmp_path: Path, whole: list[float], names: str, workers: str, kind: str
) -> None:
    """Its part of the state is copied on another node: the checkpoint of that step is deleted before."""
    flags = directory(tmp_path, "shared")
    agents = hold_at(nodes(f"1:{len(names)}"), names, 35, flags, kind, workers)
    everyone = list(agents.values())
    until(lambda: (tmp_path / "shared" / "r1-s30").exists(), "r1-s30")
    shutil.rmtree(tmp_path / "shared" / "r1-s30")
    lost = next(name for name, each in agents.items() if (each.work / "fired").exists())
    lose(agents.pop(lost))
    (resumed,) = until(lambda: [found for each in agents.values() for found in each.events("resumed")], report(agents))
    assert resumed["step"] == 30
    assert resumed["reason"].startswith("resumed from step 30 of round 1, in memory"), resumed
    assert [agent.wait(90) for agent in agents.values()] == [0] * len(agents)
    saved = [event for each in agents.values() for event in each.events("checkpoint_saved", round=2)]
    assert saved[0]["step"] < 40, "the state is not left with a single copy of a part"
    (ended,) = [each for each in agents.values() if (each.work / "parameters").exists()]
    assert parameters(ended.work) == pytest.approx(whole, abs=1e-4)
    assert_each_sample_once(everyone, 60)


@pytest.mark.timeout(180)
def test_node_and_its_partner_are_lost(nodes: StartNodes, tmp_path: Path, whole: list[float]) -> None:
    flags = directory(tmp_path, "shared")
    agents = hold_at(nodes("1:3"), "abc", 35, flags, "fsdp", "1")
    everyone = list(agents.values())
    until(lambda: (tmp_path / "shared" / "r1-s30").exists(), "r1-s30")
    shutil.rmtree(tmp_path / "shared" / "r1-s30")
    first = next(name for name, each in agents.items() if (each.work / "steps-0").exists())
    for name in [name for name in agents if name != first]:
        lose(agents.pop(name))
    (left,) = agents.values()
    resumed = left.event("resumed")
    assert resumed["step"] == 20
    assert "in memory" not in resumed["reason"]
    assert "step 30 was in memory, but __1_0.distcp is lost with its node" in left.err
    assert left.wait(90) == 0
    assert parameters(left.work) == pytest.approx(whole, abs=1e-4)
    assert_each_sample_once(everyone, 60)
