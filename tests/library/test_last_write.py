"""No round follows: the newest state in the memory of the nodes that are left becomes a checkpoint."""

from __future__ import annotations

import concurrent.futures
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from elasticd.checkpointing.memory import last_write
from elasticd.checkpointing.memory.buffers import Buffers, WriteTask, donated_number
from elasticd.checkpointing.memory.state_files import stream
from elasticd.checkpointing.memory.writer_client import WriterClient
from elasticd.checkpointing.storage.manifest import METADATA, NO_CHECKSUM, STATE, Manifest, shard_name, shard_names
from tests.library.checkpoints import verified_lineage
from tests.library.writers import Node

SIZE = 3000
RANKS = 4


class LastNode:
    """A rank, and its node, at the end of a job. Number 0 has rank 0."""

    def __init__(
        self, folder: Path, number: int, directory: Path, nodes: int = 1, whose: tuple[str, str] = ("job", "run")
    ) -> None:
        self.node, self.directory, self.whose = Node(folder), directory, whose
        task = WriteTask(str(directory), 3, "at the end of the job", "", "", number, 0.0, node=number, nodes=nodes)
        self.rank = WriterClient(str(self.node.path), 0, 1, number == 0, lambda: task)

    def save(self, step: int, at_fault: bool = True) -> None:
        """A whole state; without a fault, nothing on this node is to write it."""
        draft = Manifest(1, step, None, RANKS, SIZE, NO_CHECKSUM, *self.whose, None, 0.0)
        number = donated_number(step, 1) if at_fault else step
        fd, _ = self.rank.borrow_buffer(draft, number, 0, 1, "")
        os.pwrite(fd, content(STATE, step), 0)
        os.close(fd)
        self.rank.report_copied(draft, number, 0)
        self.rank.find_newest()  # the writer has handled the packet before this one

    def save_files(self, step: int, names: list[str]) -> None:
        """Files of a sharded state that nothing on this node is to write before the end."""
        draft = Manifest(1, step, None, RANKS, SIZE * len(names), NO_CHECKSUM, *self.whose, None, 0.0)
        fd, _ = self.rank.borrow_buffer(draft, step, 0, 1, "", copies=1)
        files = {name: (at * SIZE, SIZE) for at, name in enumerate(names)}
        for name, (offset, _) in files.items():
            os.pwrite(fd, content(name, step), offset)
        os.close(fd)
        self.rank.report_copied(draft, step, 0, files=files)
        self.rank.find_newest()  # the writer has handled the packet before this one

    def close(self) -> None:
        self.rank.close()
        self.node.close()


def content(name: str, step: int) -> bytes:
    return f"{name} {step:5} ".encode().ljust(100)[:100] * (SIZE // 100)


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[list[LastNode]]:
    made = [LastNode(tmp_path / str(number), number, tmp_path / "shared") for number in range(2)]
    yield made
    for each in made:
        each.close()


def end(nodes: list[LastNode]) -> list[dict[str, Any]]:
    with concurrent.futures.ThreadPoolExecutor() as pool:
        return list(pool.map(lambda each: each.node.flush(), nodes))


def on_disk(directory: Path) -> list[int]:
    entries, _ = verified_lineage(directory)
    for entry in entries:
        for name in [STATE, *entry.manifest.files]:
            assert (entry.path / name).read_bytes() == content(name, entry.manifest.step)
    return [entry.manifest.step for entry in entries]


@pytest.mark.parametrize("at_fault", [True, False], ids=["saved-at-a-fault", "snapshot"])
def test_nodes_with_the_same_state_leave_one_checkpoint(nodes: list[LastNode], at_fault: bool) -> None:
    for each in nodes:
        each.save(12, at_fault)
    shared = nodes[0].directory
    assert end(nodes) == [{"step": 12, "path": str(shared / "r1-s12"), "why": ""}] * 2
    assert on_disk(shared) == [12]
    assert [path.name for path in shared.iterdir() if path.name != ".lock"] == ["r1-s12"]


def test_newest_state_of_all_nodes_is_left(tmp_path: Path) -> None:
    """Each node says which one that is."""
    nodes = [LastNode(tmp_path / str(number), number, tmp_path / "shared", nodes=2) for number in range(2)]
    try:
        for each, step in zip(nodes, (12, 13), strict=True):
            each.save(step)
        ended = end(nodes)
        assert [each["step"] for each in ended] == [13, 13], ended
        assert on_disk(nodes[0].directory) in ([13, 12], [13])
    finally:
        for each in nodes:
            each.close()


def test_node_without_rank_0_writes_alone(nodes: list[LastNode]) -> None:
    """Also after its writer was killed."""
    nodes[1].save(12)
    assert nodes[1].rank.find_newest() is not None
    nodes[1].node.end()
    nodes[1].node.start()
    assert nodes[1].node.flush()["step"] == 12
    assert on_disk(nodes[1].directory) == [12]


def test_rest_of_a_node_that_died_in_its_write_is_no_obstacle(nodes: list[LastNode]) -> None:
    rest = nodes[0].directory / ".r1-s12.e.staging"
    rest.mkdir(parents=True)
    (rest / "manifest.json").touch()
    (rest / STATE).write_bytes(b"half of it")
    nodes[1].save(12)
    assert nodes[1].node.flush()["step"] == 12
    assert on_disk(nodes[1].directory) == [12]
    assert not rest.exists()


NAMES = shard_names(RANKS)
LATER = [shard_name(2), shard_name(3)]
PARTS = {
    "apart": ([name for name in NAMES if name not in LATER], LATER),
    "overlapping": (NAMES[:3], [*NAMES[2:]]),
    "one-has-all": (NAMES, LATER),
    "each-has-all": (NAMES, NAMES),
    "the-other-has-the-index": ([shard_name(0), shard_name(1), shard_name(2)], [shard_name(3), METADATA, STATE]),
}


@pytest.mark.parametrize("parts", PARTS.values(), ids=PARTS)
def test_shards_of_all_nodes_become_one_checkpoint(nodes: list[LastNode], parts: tuple[list[str], ...]) -> None:
    for each, names in zip(nodes, parts, strict=True):
        each.save_files(37, names)
    shared = nodes[0].directory
    assert end(nodes) == [{"step": 37, "path": str(shared / "r1-s37"), "why": ""}] * 2
    assert on_disk(shared) == [37]
    (entry,) = verified_lineage(shared)[0]
    assert sorted([STATE, *entry.manifest.files]) == sorted(NAMES)
    assert not list(shared.glob(".*staging"))


@pytest.mark.system
def test_shard_that_no_node_has_leaves_the_state_before(nodes: list[LastNode]) -> None:
    """And the reason."""
    for each, names in zip(nodes, (NAMES[:2], LATER), strict=True):
        each.save(30, at_fault=False)
        each.save_files(37, names)
    results = end(nodes)
    assert [each["step"] for each in results] == [30, 30]
    assert all(each["why"].startswith("step 37: ") for each in results)
    assert METADATA in "".join(each["why"] for each in results)
    assert on_disk(nodes[0].directory) == [30]


def test_directory_that_cannot_be_written_is_named(nodes: list[LastNode]) -> None:
    nodes[0].directory.write_text("a file where a directory should be")
    nodes[0].save(12)
    result = nodes[0].node.flush()
    assert (result["step"], result["path"]) == (12, "") and "step 12: " in result["why"]


def test_nodes_with_directories_of_their_own_each_leave_one(tmp_path: Path) -> None:
    each = [LastNode(tmp_path / str(number), number, tmp_path / f"own-{number}") for number in range(2)]
    try:
        for node in each:
            node.save(12)
        assert [result["step"] for result in end(each)] == [12, 12]
        assert [on_disk(node.directory) for node in each] == [[12], [12]]
    finally:
        for node in each:
            node.close()


def test_node_that_dies_in_its_part_is_replaced_by_one_that_has_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it has begun is in the directory of the node that commits."""
    monkeypatch.setattr(last_write, "UNBEGUN_PARTS_WAIT_S", 0.1)
    monkeypatch.setattr(last_write, "PARTS_WAIT_WHEN_ENDED_S", 30.0)
    (tmp_path / METADATA).write_bytes(b"half")
    contents = {name: stream(iter([content(name, 5)])) for name in (METADATA, STATE)}
    with open(os.memfd_create("headers"), "rb") as headers:
        last = last_write.LastWrite(Buffers(headers.fileno(), []), lambda: True)
        files = last.commit(tmp_path, tmp_path / "r1-s5", contents, [METADATA, STATE])
    assert [size for size, _ in files.values()] == [SIZE, SIZE]
    assert (tmp_path / METADATA).read_bytes() == content(METADATA, 5)
