"""Parts of a sharded state in memory: read by other nodes, copied to a partner, never a torn, stale or strange one."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from elasticd.checkpointing.memory import held_states, shard_server
from elasticd.checkpointing.memory.buffers import PARTNER_BUFFER, Buffers, Snapshot, WriteTask
from elasticd.checkpointing.memory.held_states import HeldState
from elasticd.checkpointing.memory.shard_server import PartnerCopy, ShardClient
from elasticd.checkpointing.memory.writer_client import SnapshotRefused, WriterClient
from elasticd.checkpointing.storage.manifest import METADATA, NO_CHECKSUM, STATE, Manifest
from elasticd.errors import CheckpointError
from elasticd.heartbeat.worker_events import WorkerEventReader
from tests.library.checkpoints import verified_lineage
from tests.library.conftest import wait_for
from tests.library.writers import Node

SIZE = 300_000


def draft(step: int, round: int = 1, run: str = "run") -> Manifest:
    return Manifest(round, step, None, 2, 0, NO_CHECKSUM, "job", run, None, 0.0)


class Part:
    """A rank, alone on its node, that saves its part of a state."""

    def __init__(self, folder: Path, number: int) -> None:
        self.number, self.folder = number, folder
        self.node = Node(folder)
        self.rank = WriterClient(str(self.node.path), 0, 1, is_first_node=number == 0)

    def names(self) -> list[str]:
        own = [f"__{self.number}_0.distcp"]
        return own if self.number else [*own, METADATA, STATE]

    def save(self, step: int, of: Part | None = None, size: int = SIZE, run: str = "run") -> None:
        """`of`: the node of whose part this one keeps a copy."""
        names = self.names()
        fd, _ = self.rank.borrow_buffer(
            replace(draft(step, run=run), bytes=size * len(names)), step, 0, 1, "", copies=1
        )
        os.pwrite(fd, b"".join(content(name, step, size) for name in names), 0)
        os.close(fd)
        files = {name: (at * size, size) for at, name in enumerate(names)}
        partner = None
        if of is not None:
            server = of.rank.serve_shards("127.0.0.1")
            partner = {"server": server, "node": of.number, "events": str(self.folder / "events"), "rank": self.number}
        self.rank.report_copied(draft(step, run=run), step, 0, None, files, partner)

    def copy(self) -> Snapshot | None:
        """The other node's part."""
        return next((each for each in self.rank.find_all() if each.is_copy), None)

    def wait_for_copy(self, step: int) -> None:
        wait_for(lambda: (found := self.copy()) is not None and found.draft.step == step, f"a copy of step {step}")

    def messages(self) -> list[str]:
        found, _ = WorkerEventReader(self.folder / "events").read()
        return [event.reason for event in found if event.kind == "message"]

    def close(self) -> None:
        self.rank.close()
        self.node.close()


def content(name: str, step: int, size: int = SIZE) -> bytes:
    return f"{name} {step:5} ".encode().ljust(100)[:100] * (size // 100)


@pytest.fixture
def parts(tmp_path: Path) -> Iterator[list[Part]]:
    made = [Part(tmp_path / str(number), number) for number in (0, 1)]
    yield made
    for each in made:
        each.close()


def together(parts: list[Part]) -> list[HeldState]:
    reports = [{"node": each.number, "held": each.rank.find_all()} for each in parts]
    who: Any = [type("Who", (), {"node": each["node"], "nodes": 1}) for each in reports]
    found = [held_states.node_message(each["held"], parts[0].rank, one) for each, one in zip(reports, who, strict=True)]
    return held_states.merge_messages([*(json.dumps(one).encode() for one in found), b""])[0]


def test_copy_of_a_lost_nodes_part_is_written_at_the_end(parts: list[Part], tmp_path: Path) -> None:
    first, second = parts
    task = WriteTask(str(tmp_path / "checkpoints"), 3, "at the end of the job", "", "", 1, 0.0, node=1)
    second.rank.make_task_at_end = lambda: task
    first.save(5, of=second)
    second.save(5, of=first)
    second.wait_for_copy(5)
    first.node.end(signal.SIGKILL)
    assert second.node.flush() == {"step": 5, "path": str(tmp_path / "checkpoints" / "r1-s5"), "why": ""}
    (entry,) = verified_lineage(tmp_path / "checkpoints")[0]
    assert sorted(entry.manifest.files) == [METADATA, "__0_0.distcp", "__1_0.distcp"]


def test_partner_has_the_part_of_a_lost_node(parts: list[Part]) -> None:
    first, second = parts
    for step in (5, 6):
        first.save(step, of=second)
        second.save(step, of=first)
        first.wait_for_copy(step)
        second.wait_for_copy(step)
    both, _ = together(parts)
    assert (both.missing_files, both.copy_only_files, both.snapshot.draft.step) == ([], [], 6)
    assert both.holders[STATE] == [0, 1]
    first.node.end(signal.SIGKILL)
    held, _ = together([second])
    assert (held.missing_files, held.copy_only_files) == ([], sorted(first.names()))
    for name in first.names():
        fd, start, size = second.rank.open_buffer(held.snapshot.key, name)
        assert os.pread(fd, size, start) == content(name, 6)
        os.close(fd)
    second.rank.adopt(held.snapshot.key, held.snapshot.draft.relinked_to(2), None)
    adopted, _ = together([second])
    assert (adopted.snapshot.key, adopted.missing_files, adopted.snapshot.draft) == ((2, 0), [], held.snapshot.draft)


def test_state_without_all_files_is_not_whole(parts: list[Part]) -> None:
    first, second = parts
    first.save(5)
    second.save(5)
    first.save(6)
    newer, older = together(parts)
    assert (newer.snapshot.draft.step, newer.missing_files) == (6, second.names())
    assert (older.snapshot.draft.step, older.missing_files) == (5, [])


STRANGERS: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "secret": ({"secret": "0" * 32}, ConnectionResetError, "ended the connection"),
    "version": ({"version": 1}, ConnectionResetError, "ended the connection"),
    "job": ({"job": "another"}, CheckpointError, "not in its memory"),
    "run": ({"run": "another"}, CheckpointError, "not in its memory"),
    "earlier save": ({"number": 4}, CheckpointError, "not in its memory"),
    "later round": ({"round": 2}, CheckpointError, "not in its memory"),
    "line without end": ({"job": "x" * (1 << 17)}, OSError, "."),
}


@pytest.mark.parametrize("case", STRANGERS)
def test_stranger_reads_nothing(parts: list[Part], monkeypatch: pytest.MonkeyPatch, case: str) -> None:
    wrong, error, why = STRANGERS[case]
    part = parts[0]
    part.save(5)
    server = part.rank.serve_shards("127.0.0.1")
    for ask in (lambda remote: remote.wait_for_snapshot(), lambda remote: remote.file_size(STATE)):
        own = {"secret": server[2], "job": "job", "run": "run", "round": 1, "number": 5, **wrong}
        with monkeypatch.context() as patch:
            patch.setattr(shard_server, "PROTOCOL_VERSION", wrong.get("version", shard_server.PROTOCOL_VERSION))
            stranger = ShardClient((*server[:2], own["secret"]), own["job"], own["run"], (own["round"], own["number"]))
        with contextlib.closing(stranger) as remote, pytest.raises(error, match=why):
            ask(remote)
    with contextlib.closing(ShardClient(server, "job", "run", (1, 5))) as remote:
        assert remote.wait_for_snapshot().draft.step == 5
        piece = bytearray(1000)
        remote.read(STATE, 500, memoryview(piece))
        assert piece == content(STATE, 5)[500:1500]
        with pytest.raises(CheckpointError, match="shorter"):
            remote.read(STATE, SIZE - 500, memoryview(piece))


def test_part_that_is_replaced_while_it_is_read_is_refused(parts: list[Part]) -> None:
    part, piece = parts[0], memoryview(bytearray(1000))
    part.save(5)
    with contextlib.closing(ShardClient(part.rank.serve_shards("127.0.0.1"), "job", "run", (1, 5))) as remote:
        remote.read(STATE, 0, piece)
        part.save(6)
        part.save(7)  # in its place
        part.rank.find_all()  # the writer has handled the save
        for ask in (lambda: remote.read(STATE, 1000, piece), remote.wait_for_snapshot):
            with pytest.raises(CheckpointError, match="not in its memory"):
                ask()


@pytest.mark.system
@pytest.mark.parametrize("victim", [0, 1])
def test_copy_is_whole_or_none_where_a_node_is_lost_meanwhile(parts: list[Part], victim: int) -> None:
    """A large part; the node that has it, or the one that copies it, loses its writer in between."""
    first, second = parts
    first.save(5, size=200_000_000)
    second.save(5, of=first)
    wait_for(lambda: os.fstat(second.node.memory[1 + PARTNER_BUFFER]).st_blocks > 0, "the copy has begun")
    parts[victim].node.end(signal.SIGKILL)
    if victim == 1:
        second.node.start()
        second.rank.close()
    else:
        wait_for(second.messages, "the reason")
        assert "this node has no copy of node 0's part of the state: " in second.messages()[0]
    assert second.copy() is None
    assert [each.draft.step for each in second.rank.find_all()] == [5]


def test_later_save_ends_a_copy(parts: list[Part]) -> None:
    first, second = parts
    second.save(5, of=first)  # waits for the first node's part
    first.save(6)
    second.save(6, of=first)
    second.wait_for_copy(6)
    assert second.messages() == []


@pytest.mark.system
def test_copy_that_is_slower_than_the_saves_is_reported(parts: list[Part]) -> None:
    first, second = parts
    first.save(5, size=200_000_000)
    second.save(5, of=first)
    wait_for(lambda: os.fstat(second.node.memory[1 + PARTNER_BUFFER]).st_blocks > 0, "the copy has begun")
    first.save(6)
    second.save(6, of=first)
    second.wait_for_copy(6)  # well before its patience of 30 s ends: a smaller state makes the buffer shorter
    (reason,) = second.messages()
    assert "this node has no copy of node 0's part of the state: " in reason


def test_no_memory_for_a_copy_is_one_sentence(
    parts: list[Part], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shard_server, "available_bytes", lambda: (66 << 20, "of this machine's memory"))
    first, _ = parts
    memory = [os.memfd_create(f"test-{number}") for number in range(4)]
    copies = PartnerCopy(Buffers(memory[0], memory[1:]), threading.Condition())
    try:
        for step in (5, 6):
            first.save(step, size=1 << 20)
            server = first.rank.serve_shards("127.0.0.1")
            partner = {"server": server, "node": 0, "events": str(first.folder / "events"), "rank": 1}
            copies.copy_and_report({**partner, "own": Snapshot(draft(step), step, None)})
        (said,) = first.messages()
        assert said == (
            "this node has no copy of node 0's part of the state: a copy of 3 MB takes 67 MB more, and 66 MB are left "
            "of this machine's memory"
        )
        assert os.fstat(memory[1 + PARTNER_BUFFER]).st_size == 0
    finally:
        for fd in memory:
            os.close(fd)


def test_writer_cannot_listen_at_another_machines_address(parts: list[Part]) -> None:
    with pytest.raises(SnapshotRefused, match=r"the writer cannot listen at 192\.0\.2\.1"):
        parts[0].rank.serve_shards("192.0.2.1")
