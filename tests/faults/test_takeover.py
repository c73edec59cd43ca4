"""The agent that hosts a c10d store is lost, or only its store: another agent hosts the job's store, nobody waits."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from tests.faults.conftest import StartJob
from tests.faults.job import Event, Job, comm_of, descendants, until
from tests.faults.nodes import COLD
from tests.faults.test_in_place import entries
from tests.faults.test_one_host import free_port

pytestmark = pytest.mark.system
Start = Callable[[str], Job]
SERVER = "elasticd-c10d-h"


@pytest.fixture
def plain(job: StartJob) -> Start:
    """A node whose worker needs no others; a hosts the store."""
    return starter(job, "tells.py", COLD)


@pytest.fixture
def training(job: StartJob, tmp_path: Path) -> Start:
    """A node of a job that saves checkpoints, and pauses for a node that joins."""
    directory = str(tmp_path / "checkpoints")
    return starter(job, "resume.py", "--steps", "100000", flags=["--checkpoint-dir", directory])


@pytest.fixture
def staying(job: StartJob, tmp_path: Path) -> Callable[[str, str], Start]:
    """A node of a job that needs `nnodes`, whose ranks wait in their processes while there are fewer."""
    directory = str(tmp_path / "checkpoints")
    return lambda nnodes, conf: starter(
        job, "stays.py", "", "6", flags=["--checkpoint-dir", directory], nnodes=nnodes, conf=conf
    )


def starter(
    job: StartJob,
    *script: str,
    flags: list[str] | None = None,
    nnodes: str = "2:3",
    conf: str = "last_call_timeout=60",
) -> Start:
    meet = ["--nnodes", nnodes, "--rdzv-backend", "c10d", "--rdzv-id", "job", "--local-addr", "127.0.0.1"]
    meet += ["--rdzv-endpoint", f"127.0.0.1:{free_port()}", *(flags or [])]

    def start(name: str) -> Job:
        own = conf + ("" if name == "a" else ",is_host=0")
        return job(*script, flags=[*meet, "--node-id", name, "--rdzv-conf", own], workers="1")

    return start


def server(host: Job) -> int:
    """The process that serves the store."""
    return until(lambda: next(iter(servers(host)), 0), "the store's process")


def servers(agent: Job) -> list[int]:
    return [pid for pid in descendants(agent.pid) if comm_of(pid) == SERVER]


@contextmanager
def stopped(*pids: int) -> Iterator[None]:
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGCONT)


def test_host_is_killed_and_comes_back(training: Start) -> None:
    agents = {name: training(name) for name in "abc"}
    for agent in agents.values():
        agent.event("first_step", round=1)
    agents["a"].process.kill()
    left = [agents["b"], agents["c"]]
    for agent in left:
        without = next_round(agent, 1)
        assert sorted(without["nodes"]) == ["b", "c"]
        assert "a is lost" in without["reason"]
        agent.event("first_step", round=without["round"])
    again = training("a")
    together = next_round(left[0], without["round"])
    assert "a joined" in together["reason"]
    again.event("first_step", round=together["round"])


def test_only_the_stores_process_is_killed(plain: Start) -> None:
    agents = [plain(name) for name in "abc"]
    for agent in agents:
        agent.event("group_started", round=1)
    for _ in range(3):
        pid = server(agents[0])
        os.kill(pid, signal.SIGKILL)
        until(lambda pid=pid: server(agents[0]) != pid, "another process")  # type: ignore[misc]
    os.kill(agents[2].worker(rank_of(agents[2])), signal.SIGKILL)
    for agent in agents:
        assert len(agent.event("group_started", round=2)["ranks"]) == 1
        assert [e["round"] for e in agent.events("group_started")] == [1, 2], "only the worker's end restarts them"


def test_hosts_agent_is_stopped_for_a_while(training: Start) -> None:
    """Nobody reaches its store: the others host one, all ranks train on, and the former host finds that store."""
    agents = {name: training(name) for name in "abc"}
    for agent in agents.values():
        agent.event("first_step", round=1)
    with stopped(agents["a"].pid, server(agents["a"])):
        until(lambda: any(servers(agents[n]) for n in "bc"), "another host")
        until(lambda: any("the job's store is at" in agents[n].err for n in "bc"), "the other one is there, too")
    until(lambda: "the job's store is at" in agents["a"].err, lambda: f"a has moved: {agents['a'].err}")
    rank = rank_of(agents["a"])
    agents["a"].step(max(agents["a"].steps(rank))[1] + 20, rank=rank)
    assert [e["round"] for agent in agents.values() for e in agent.events("group_started")] == [1, 1, 1]
    os.kill(agents["c"].worker(rank_of(agents["c"])), signal.SIGKILL)
    for agent in agents.values():
        after = next_round(agent, 1)
        assert sorted(after["nodes"]) == ["a", "b", "c"]
        agent.event("first_step", round=after["round"])


def lose_host(agents: dict[str, Job]) -> list[Job]:
    """All of a is killed after some steps; the others, whose ranks wait then."""
    for agent in agents.values():
        agent.step(10, rank=min(until(lambda agent=agent: entries(agent, 1), "the first round")))  # type: ignore[misc]
    for pid in agents["a"].processes():
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    left = [agent for name, agent in agents.items() if name != "a"]
    for agent in left:
        assert agent.event("group_ended", round=1)["reason"].endswith("1 worker kept for the next round")
    return left


def test_ranks_that_wait_stay_while_another_agent_hosts_the_store(staying: Callable[[str, str], Start]) -> None:
    """And while its process is started again."""
    start = staying("3", "last_call_timeout=0")
    left = lose_host({name: start(name) for name in "abc"})
    host = until(lambda: next((agent for agent in left if servers(agent)), None), "another host")
    for agent in left:
        until(lambda agent=agent: "answers again" in agent.err, "its store")  # type: ignore[misc]
    pid = server(host)
    os.kill(pid, signal.SIGKILL)
    until(lambda: server(host) != pid, "another process")
    again = start("a")
    assert [agent.wait() for agent in (*left, again)] == [0, 0, 0]
    for agent in left:
        assert [event["kept"] for event in agent.events("group_started")] == [0, 1]


def test_what_ranks_hold_that_wait_is_saved_where_no_store_comes_back(
    staying: Callable[[str, str], Start], tmp_path: Path
) -> None:
    start = staying("2", "last_call_timeout=0,store_away=5")
    (left,) = lose_host({name: start(name) for name in "ab"})
    assert left.wait() == 75
    assert "the store has been unavailable for 5 s" in left.err
    last = max(step for _, step in left.steps(min(entries(left, 1))))
    assert [path.name for path in (tmp_path / "checkpoints").glob("r*")] == [f"r1-s{last}"]


def next_round(agent: Job, number: int) -> Event:
    return until(
        lambda: [e for e in agent.events("round_published") if e["round"] > number], f"a round after {number}"
    )[0]


def rank_of(agent: Job) -> int:
    rank: int = agent.event("group_started", round=1)["ranks"][0]
    return rank
