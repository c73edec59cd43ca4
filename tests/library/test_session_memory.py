"""Sessions that save through a writer: a resumed run is the uninterrupted one, whichever memory it resumes from."""

from __future__ import annotations

import json
import os
import signal
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from elasticd.heartbeat import record as heartbeat
from tests.library.conftest import Job, wait_for
from tests.library.writers import Node

Nodes = Callable[..., list[Node]]


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[Nodes]:
    made: list[Node] = []

    def make(count: int) -> list[Node]:
        for _ in range(count):
            made.append(Node(tmp_path / f"node{len(made)}"))
        return made[-count:]

    yield make
    for node in made:
        node.close()


def start_on(start: Any, where: list[Node], options: dict[str, Any], round: int = 1, ranks: int = 2) -> Job:
    """Two ranks on one node, or one on each of two."""
    shares = ranks // len(where)
    env = [
        where[rank // shares].environment(rank // shares, len(where), rank % shares, shares) for rank in range(ranks)
    ]
    job: Job = start("toy.py", options, world_size=ranks, round=round, each_env=env)
    return job


Uninterrupted = Callable[..., list[dict[str, Any]]]


@pytest.fixture(scope="module")
def results_of_whole_runs() -> dict[str, list[dict[str, Any]]]:
    return {}


@pytest.fixture
def uninterrupted(start: Any, tmp_path: Path, results_of_whole_runs: dict[str, list[dict[str, Any]]]) -> Uninterrupted:
    """Each rank's result, of one run for all tests: buffers of BatchNorm differ."""

    def run(optimizer: str = "adam") -> list[dict[str, Any]]:
        if optimizer not in results_of_whole_runs:
            job = start("toy.py", {"directory": str(tmp_path / "reference"), "optimizer": optimizer})
            results_of_whole_runs[optimizer] = job.results()
        return results_of_whole_runs[optimizer]

    return run


def die(job: Job) -> None:
    """Every rank kills itself at the same step; the last one may see the death of the others first."""
    codes = job.codes()
    assert -signal.SIGKILL in codes and 0 not in codes


def digests(results: list[dict[str, Any]]) -> list[str]:
    return [result["digest"] for result in results]


@pytest.mark.parametrize(("count", "optimizer"), [(1, "sgd"), (2, "adam")])
def test_resume_from_memory_is_exact(
    start: Any, nodes: Nodes, tmp_path: Path, uninterrupted: Uninterrupted, count: int, optimizer: str
) -> None:
    """Dropout, BatchNorm, moments, scheduler and random streams, bit for bit."""
    options = {"directory": str(tmp_path / "checkpoints"), "optimizer": optimizer}
    where = nodes(count)
    die(start_on(start, where, {**options, "die": 7}))
    results = start_on(start, where, options, round=2).results()
    expected = uninterrupted(optimizer)
    for result, reference in zip(results, expected, strict=True):
        assert result["resumed"] == [1, 6, 2]
        assert all(result[name] == reference[name] for name in ("digest", "lr", "draw"))


def test_resumed_state_that_becomes_a_checkpoint_deletes_no_others(start: Any, nodes: Nodes, tmp_path: Path) -> None:
    """Also after the round's first save: `restore()` comes before `checkpoint()`, which says how many are kept."""
    directory, (node,) = tmp_path / "checkpoints", nodes(1)
    options = {"directory": str(directory), "keep": 100}
    die(start_on(start, [node], {**options, "every": 1, "sleep": 0.1, "die": 12}))
    wait_for(lambda: len(list(directory.glob("r1-*"))) > 4, "checkpoints")  # a busy machine skips some
    before = {path.name.partition("-")[2] for path in directory.glob("r1-*")}
    start_on(start, [node], {**options, "every": 13, "steps": 13}, round=2).results()
    assert node.end() == 0
    assert {path.name.partition("-")[2] for path in directory.glob("r?-*")} >= before | {"s12", "s13"}


def test_parent_is_the_round_that_trained_the_state(start: Any, nodes: Nodes, tmp_path: Path) -> None:
    """The round between has made that state its own, and may have left no checkpoint."""
    options, (node,) = {"directory": str(tmp_path / "checkpoints")}, nodes(1)
    die(start_on(start, [node], {**options, "die": 7}))
    start_on(start, [node], {**options, "every": None, "steps": 6}, round=2).results()
    start_on(start, [node], {**options, "steps": 9}, round=3).results()
    client = node.client()
    held = client.find_newest()
    client.close()
    assert held is not None and (held.draft.round, held.draft.parent) == (3, (1, 6))


@pytest.mark.parametrize("lost", [0, 1])
def test_node_without_copy_gets_it_from_the_other(
    start: Any, nodes: Nodes, tmp_path: Path, uninterrupted: Uninterrupted, lost: int
) -> None:
    """The directory is gone, and so is one node's memory."""
    options = {"directory": str(tmp_path / "checkpoints")}
    where = nodes(2)
    die(start_on(start, where, {**options, "die": 7}))
    for node in where:
        node.end()  # what it had to write is written
        node.start()
    for path in (tmp_path / "checkpoints").iterdir():
        path.rename(tmp_path / path.name)
    where[lost] = nodes(1)[0]
    results = start_on(start, where, {**options, "every": None}, round=2).results()
    assert [result["resumed"] for result in results] == [[1, 6, 2]] * 2
    assert digests(results) == digests(uninterrupted())


def test_old_state_of_returning_node_is_not_used(start: Any, nodes: Nodes, tmp_path: Path) -> None:
    """It has step 6 of round 1; the others went back to step 3 on disk, and round 2 has re-linked that."""
    options = {"directory": str(tmp_path / "checkpoints"), "every": 3}
    away, others = nodes(1), nodes(1)
    die(start_on(start, others, {**options, "die": 4}))
    assert others[0].end() == 0
    apart = {**options, "directory": str(tmp_path / "apart"), "die": 7}
    die(start_on(start, away, apart))
    second = start_on(start, nodes(1), {**options, "every": None, "steps": 4}, round=2)
    assert second.results()[0]["resumed"] == [1, 3, 2]
    third = start_on(start, away, {**options, "every": None, "steps": 4}, round=3)
    assert third.results()[0]["resumed"] == [2, 3, 2]


@pytest.mark.parametrize("name", ["ELASTICD_RUN", "ELASTICD_JOB"])
def test_state_of_another_run_or_job_is_not_used(start: Any, nodes: Nodes, tmp_path: Path, name: str) -> None:
    where = nodes(1)
    options = {"directory": str(tmp_path / "one"), "every": 3}
    die(start_on(start, where, {**options, "die": 7}))
    env = [{**where[0].environment(0, 1, rank, 2), name: "another"} for rank in range(2)]
    other = start("toy.py", {"directory": str(tmp_path / "two"), "every": None, "steps": 2}, each_env=env)
    assert other.results()[0]["resumed"] is None


def test_session_of_another_directory_in_the_same_process_begins_anew(start: Any, nodes: Nodes, tmp_path: Path) -> None:
    """A fold of a cross-validation does not train on with the weights of the one before, nor after a restart that
    leaves out what has ended.
    """
    (node,) = nodes(1)
    a, b, c = ([str(tmp_path / name), steps] for name, steps in (("a", 6), ("b", 4), ("c", 2)))

    def run(round: int, *folds: list[Any]) -> tuple[list[int], str]:
        folder = tmp_path / f"round-{round}"
        folder.mkdir()
        heartbeat.create(folder / "beat")
        where = {**node.environment(0, 1, 0, 1), "ELASTICD_HEARTBEAT": str(folder / "beat")}
        job = start("folds.py", list(folds), world_size=1, round=round, each_env=[where])
        return job.results()[0]["resumed"], job.ranks[0].errors()

    resumed, errors = run(1, a, b)
    assert resumed == [0, 0]
    assert errors.count("this process has had a session with the directory") == 1
    assert sorted(path.name for path in (tmp_path / "b").glob("r*")) == ["r1-s2", "r1-s4"]
    assert run(2, b, c)[0] == [4, 0]
    assert run(3, a)[0] == [6]


def test_directory_of_rank_0_counts_on_its_node(start: Any, nodes: Nodes, tmp_path: Path) -> None:
    """What another rank saves at a fault, or leaves at the end, is where the next run looks for it."""
    (node,) = nodes(1)
    env = [node.environment(0, 1, rank, 2) for rank in range(2)]
    job = start("folds.py", [[str(tmp_path / "of {rank}"), 2]], each_env=env)
    assert [result["used"] for result in job.results()] == [[str(tmp_path / "of 0")]] * 2
    assert f"rank 1 gave restore() the directory {tmp_path}/of 1, and rank 0 {tmp_path}/of 0" in job.ranks[1].errors()


def test_second_start_of_a_round_continues_it(
    start: Any, nodes: Nodes, tmp_path: Path, uninterrupted: Uninterrupted
) -> None:
    """The agent numbers rounds from 1 where the script alone knows the directory."""
    options = {"directory": str(tmp_path / "checkpoints")}
    die(start_on(start, nodes(1), {**options, "die": 7}))
    wait_for(lambda: (tmp_path / "checkpoints" / "r1-s6").exists(), "the last checkpoint")
    results = start_on(start, nodes(1), options).results()
    assert results[0]["resumed"] == [1, 6, 2]
    assert digests(results) == digests(uninterrupted())


def test_close_waits_for_the_disk(start: Any, nodes: Nodes, tmp_path: Path) -> None:
    options = {"directory": str(tmp_path / "checkpoints"), "every": 4}
    job = start_on(start, nodes(1), options)
    job.results()
    assert {"r1-s4", "r1-s8", "r1-s12"} >= {path.name for path in (tmp_path / "checkpoints").glob("r*")} >= {"r1-s12"}


def test_session_without_its_writer_writes_itself(start: Any, nodes: Nodes, tmp_path: Path) -> None:
    """The writer is gone for good: one message, and checkpoints as without a launcher."""
    (node,) = nodes(1)
    node.end(signal.SIGKILL)
    node.listener.close()
    job = start_on(start, [node], {"directory": str(tmp_path / "checkpoints"), "every": 4})
    job.results()
    found = job.ranks[0].read_events()
    assert [event.kind for event in found if event.kind not in ("message", "snapshot")] == ["checkpoint_saved"] * 3
    assert [event.kind for event in found if "while training waits" in event.reason] == ["message"]
    assert sorted(path.name for path in (tmp_path / "checkpoints").glob("r*")) == ["r1-s12", "r1-s4", "r1-s8"]


def test_writer_killed_again_and_again_does_not_stop_training(start: Any, nodes: Nodes, tmp_path: Path) -> None:
    (node,) = nodes(1)
    directory = tmp_path / "checkpoints"
    job = start_on(start, [node], {"directory": str(directory), "every": 2, "steps": 100, "sleep": 0.005})
    for kills in range(5):
        wait_for(lambda kills=kills: len(job.ranks[0].read_events()) > 2 * kills, "another save")
        assert not (job.ranks[0].folder / "code").exists(), "it has ended before the kill"
        node.end(signal.SIGKILL)
        node.start()
    assert job.results()[0]["steps"] == 100
    again = start_on(start, [node], {"directory": str(directory), "every": None, "steps": 100}, round=2)
    assert again.results()[0]["resumed"][1] >= 98


def test_ranks_report_at_once_that_no_writer_is_left(start: Any, nodes: Nodes, tmp_path: Path) -> None:
    """They cannot save at a fault any more; training continues."""
    (node,) = nodes(1)
    options = {"directory": str(tmp_path / "checkpoints"), "every": 1000, "steps": 100_000, "sleep": 0.005}
    job = start_on(start, [node], options)
    for rank in job.ranks:
        wait_for(lambda rank=rank: rank.read_heartbeat().step > 3, "some steps")
    node.listener.close()
    node.end(signal.SIGKILL)
    for number, rank in enumerate(job.ranks):
        why = f"rank {number} cannot save its state at a fault: the writer has ended"
        wait_for(lambda rank=rank, why=why: [e for e in rank.read_events() if why in e.reason], "the message")
    step = job.ranks[0].read_heartbeat().step
    wait_for(lambda: job.ranks[0].read_heartbeat().step > step, "training")
    for rank in job.ranks:
        os.kill(rank.pid, signal.SIGKILL)
    job.codes()


def test_save_that_rank_0_cannot_make_holds_no_node_up(start: Any, nodes: Nodes, tmp_path: Path) -> None:
    """The other node waits for rank 0's part; the state of one rank has become too large for it."""
    directory = tmp_path / "checkpoints"
    options = {"directory": str(directory), "counter": "per_rank", "large": 12, "steps": 9}
    job = start_on(start, nodes(2), options)
    assert [each["steps"] for each in job.results()] == [9, 9]
    assert [each.kind for each in job.ranks[0].read_events()].count("checkpoint_failed") == 2
    assert [path.name for path in directory.glob("r*")] == ["r1-s3"]


@pytest.mark.system
def test_node_without_copies_saves_at_a_fault(start: Any, nodes: Nodes, tmp_path: Path) -> None:
    """Averaged weights are too large to be sent at each save, and the surviving node has its own."""
    where = nodes(2)
    options = {"directory": str(tmp_path / "checkpoints"), "every": 3, "averaged": True, "sleep": 0.01}
    job = start_on(start, where, {**options, "steps": 100_000})
    wait_for(lambda: job.ranks[1].read_heartbeat().step > 7, "some steps")
    job.ranks[0].kill(signal.SIGSTOP)  # the other rank waits in a collective, as on a lost node's peers
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as launcher:
        launcher.connect(str(where[1].path))
        launcher.settimeout(10)
        launcher.send(json.dumps({"do": "donate", "round": 1}).encode())
        while "busy" in json.loads(launcher.recv(4096)):
            pass
    messages = [event.reason for event in job.ranks[1].read_events()]
    assert [reason for reason in messages if "equal on all ranks" in reason] == messages
    step = job.ranks[1].read_heartbeat().step
    job.kill()
    again = start_on(start, where, {**options, "every": None, "steps": step}, round=2).results()
    assert [result["resumed"] for result in again] == [[1, step, 2]] * 2
