"""Sessions with a sharded state resume from the parts in memory: on any nodes that hold them all, bit for bit."""

from __future__ import annotations

import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.library.conftest import Job, wait_for
from tests.library.test_sharded import fsdp2
from tests.library.writers import Node


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[list[Node]]:
    made = [Node(tmp_path / f"node{number}") for number in range(4)]
    yield made
    for node in made:
        node.close()


def start_on(start: Any, where: list[Node], options: dict[str, Any], round: int, ranks: int = 1, **more: str) -> Job:
    """So many ranks on each node."""
    places = [(number, share) for number in range(len(where)) for share in range(ranks)]
    env = [where[number].environment(number, len(where), share, ranks) for number, share in places]
    job: Job = start("sharded.py", options, world_size=len(env), round=round, each_env=env, **more)
    return job


def steps_copied(node: Node) -> list[int]:
    client = node.client()
    try:
        return [each.draft.step for each in client.find_all() if each.is_copy]
    finally:
        client.close()


# Where it is saved: nodes 0 and 1, two ranks each. Where it is resumed: nodes and ranks on each; node 3 is new.
RESUMED = {
    "another mesh": ([0, 1], 1, "hsdp"),
    "the same": ([0, 1], 2, "fsdp"),
    "node 1 is lost": ([0], 1, "fsdp"),
    "node 0 is lost": ([1], 2, "fsdp"),
    "a node is new": ([3, 1, 0], 1, "fsdp"),
    "a node is lost and one is new": ([3, 1], 1, "fsdp"),
}
SLOW = [pytest.param(*each, id=name, marks=pytest.mark.system) for name, each in list(RESUMED.items())[:-1]]


@fsdp2
@pytest.mark.parametrize(("where", "ranks", "kind"), [RESUMED["a node is lost and one is new"], *SLOW])
def test_state_is_resumed_from_memory(
    start: Any, nodes: list[Node], tmp_path: Path, where: list[int], ranks: int, kind: str
) -> None:
    options = {"directory": str(tmp_path / "shared"), "every": 4}
    first = start_on(start, nodes[:2], {**options, "kind": "fsdp"}, 1, ranks=2).results()
    for node in nodes[:2]:
        wait_for(lambda node=node: steps_copied(node) == [4], "a copy of the other node's part")
    shutil.rmtree(tmp_path / "shared")
    for number in {0, 1} - {*where}:
        nodes[number].end(signal.SIGKILL)
    options |= {"kind": kind, "steps": 6}
    second = start_on(start, [nodes[number] for number in where], options, 2, ranks)
    for each in second.results():
        assert each["resumed"]["step"] == 4
        assert each["before"] == {**first[0]["after"], "rank": each["before"]["rank"]}
    lost = {0, 1} - {*where}
    (resumed,) = [event for event in second.ranks[0].read_events() if event.kind == "resumed"]
    assert ", in memory" in resumed.reason
    saved = [event.step for event in second.ranks[0].read_events() if event.kind == "checkpoint_saved"]
    assert saved == ([5] if lost else []), "after a lost node the state is saved again at once"


@fsdp2
@pytest.mark.parametrize(("is_unread", "why"), [(False, "the writer has ended"), (True, "the writer was killed")])
def test_writer_that_dies_during_a_copy_costs_that_save_only(
    start: Any, nodes: list[Node], tmp_path: Path, is_unread: bool, why: str
) -> None:
    (node, *_) = nodes
    options = {"directory": str(tmp_path / "shared"), "steps": 9, "every": 3, "sleep": 0.6}
    job = start_on(start, [node], {**options, "writer dies": [node.process.pid, 6, is_unread]}, 1, ranks=2)
    assert node.process.wait(60) == -signal.SIGKILL
    node.start()
    job.results()
    events = [event for event in job.ranks[0].read_events() if event.kind.startswith("checkpoint")]
    assert [event.kind for event in events] == ["checkpoint_saved", "checkpoint_failed", "checkpoint_saved"]
    assert (events[0].step, events[2].step) == (3, 9)
    assert why in events[1].reason


@fsdp2
@pytest.mark.parametrize("is_unread", [pytest.param(False, marks=pytest.mark.system), True])
@pytest.mark.parametrize(
    ("every", "saves"),
    [pytest.param(3, [], marks=pytest.mark.system), (1000, [3, 6, 9])],
    ids=["every-3", "session.save"],
)
def test_part_that_another_node_has_lost_is_not_waited_for(
    start: Any, nodes: list[Node], tmp_path: Path, every: int, saves: list[int], is_unread: bool
) -> None:
    """Its writer dies during the copy. The first node's would wait for ten minutes, and drop all saves of that time."""
    other = nodes[1]
    options = {"directory": str(tmp_path / "shared"), "steps": 12, "every": every, "saves": saves, "sleep": 0.8}
    job = start_on(start, nodes[:2], {**options, "writer dies": [other.process.pid, 6, is_unread, 1]}, 1)
    assert other.process.wait(60) == -signal.SIGKILL
    other.start()
    job.results()
    events = [event for event in job.ranks[0].read_events() if event.kind.startswith("checkpoint")]
    found = {event.step: event.kind for event in events}
    assert (found[3], found[6]) == ("checkpoint_saved", "checkpoint_failed"), events
    assert "checkpoint_saved" in {found.get(9), found.get(12)}, events


@fsdp2
def test_slow_part_of_another_node_is_waited_for(start: Any, nodes: list[Node], tmp_path: Path) -> None:
    """One of its ranks copies longer than the other, and its writer takes longer than a lost part is waited for."""
    other = nodes[1].process
    options = {"directory": str(tmp_path / "shared"), "steps": 4, "every": 1000, "saves": [2]}
    job = start_on(start, nodes[:2], {**options, "writer stops": [other.pid, 2, 3]}, 1, ranks=2)
    assert {each["saved"] for each in job.results()} == {2}
    (event,) = [event for event in job.ranks[0].read_events() if event.kind.startswith("checkpoint")]
    assert event.kind == "checkpoint_saved"


@pytest.mark.system
def test_memory_of_another_run_is_not_used(start: Any, nodes: list[Node], tmp_path: Path) -> None:
    options = {"directory": str(tmp_path / "shared"), "every": 4}
    start_on(start, nodes[:2], options, 1).results()
    shutil.rmtree(tmp_path / "shared")
    second = start_on(start, nodes[:2], options, 2, ELASTICD_RUN="run-2").results()
    assert [each["resumed"] for each in second] == [None, None]


@pytest.mark.system
def test_part_without_a_copy_is_lost_with_its_node(start: Any, nodes: list[Node], tmp_path: Path) -> None:
    options = {"directory": str(tmp_path / "shared"), "every": 2, "partner copies": False}
    for round in (1, 2):
        start_on(start, nodes[:2], {**options, "steps": 2 * round}, round).results()
    assert [steps_copied(node) for node in nodes[:2]] == [[], []]
    shutil.rmtree(tmp_path / "shared" / "r2-s4")
    nodes[0].end(signal.SIGKILL)
    last = start_on(start, [nodes[1]], options, 3)
    assert last.results()[0]["resumed"]["step"] == 2
    messages = [event.reason for event in last.ranks[0].read_events() if event.kind == "message"]
    assert "step 4 was in memory, but __0_0.distcp, .metadata, state.pt is lost with its node" in messages
