"""A state on its way to other nodes: only the pieces that differ are sent where that is enough."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from elasticd.checkpointing.memory import transfer
from elasticd.checkpointing.memory.buffers import donated_number
from elasticd.checkpointing.memory.writer_client import SnapshotRefused
from elasticd.process_group import DefaultGroup
from tests.library.test_checkpoint_writer import Saves
from tests.library.writers import Node

MB = 1 << 20


def piece_checksums(data: bytes, size: int) -> list[str]:
    fd = os.memfd_create("test")
    try:
        os.pwrite(fd, data, 0)
        return transfer.piece_checksums(fd, size)
    finally:
        os.close(fd)


def answer(host: str, error: str = "", pieces: tuple[str, ...] = (), first: bool = True) -> dict[str, Any]:
    return {"host": host, "error": error, "pieces": list(pieces), "first": first}


HAS = answer("a", pieces=("1", "2", "3"))
WHOLE = [(0, 3 * MB)]


@pytest.mark.parametrize(
    ("answers", "receivers", "spans"),
    [
        ([HAS, answer("b", "gone", ("1", "x", "3"))], [1], [(MB, 2 * MB)]),
        ([HAS, answer("b", "gone", ("1", "2", "3"))], [1], []),
        (
            [HAS, answer("b", "gone", ("x", "2", "3")), answer("c", "gone", ("1", "2", "x"))],
            [1, 2],
            [(0, MB), (2 * MB, 3 * MB)],
        ),
        ([HAS, answer("b", "gone", ("x", "2", "3")), answer("b", "gone", first=False)], [1, 2], [(0, MB)]),
        ([HAS, answer("b", "gone", ("x", "2", "3")), answer("c", "gone")], [1, 2], WHOLE),
        ([answer("a"), answer("b", "gone", ("1", "2", "3"))], [1], WHOLE),
        ([answer("a"), answer("b", "gone")], [1], WHOLE),
        ([answer("b", "gone", ("1", "x", "3")), HAS], [0], [(MB, 2 * MB)]),
        ([HAS, answer("b")], [], WHOLE),
    ],
    ids=[
        "one piece",
        "nothing",
        "two nodes",
        "two ranks",
        "one has none",
        "sender has none",
        "none has any",
        "rank 0",
        "no receiver",
    ],
)
def test_pieces_that_some_node_lacks_are_sent(
    answers: list[dict[str, Any]], receivers: list[int], spans: list[transfer.Span]
) -> None:
    plan = transfer.plan_sending("r1-s7", answers, 3 * MB)
    assert (plan["receivers"], plan["spans"], plan["patched"]) == (receivers, spans, spans != WHOLE)


def test_states_that_differ_in_more_than_is_received_beside_them_are_sent_whole() -> None:
    count = transfer.MAX_BYTES_AT_ONCE // MB + 2
    every = tuple(map(str, range(count)))
    plan = transfer.plan_sending("r1-s7", [answer("a", pieces=every), answer("b", "gone", every[::-1])], count * MB)
    assert plan["spans"] == [(0, count * MB)]


def test_checksums_find_every_piece_that_differs() -> None:
    data = os.urandom(3 * MB + 5)
    other = bytearray(data)
    other[MB] ^= 1
    other[-1] ^= 1
    one, two = (piece_checksums(each, len(each)) for each in (data, bytes(other)))
    assert [a == b for a, b in zip(one, two, strict=True)] == [True, False, True, False]
    with pytest.raises(OSError, match="shorter"):
        piece_checksums(data, len(data) + 1)


def test_state_that_has_become_shorter_is_an_error() -> None:
    fd = os.memfd_create("test")
    try:
        os.pwrite(fd, b"x" * 10, 0)
        with pytest.raises(OSError, match="shorter than its description"):
            transfer.broadcast_spans(
                fd, 0, [(0, 11)], DefaultGroup(0, 2, torch.device("cpu"), created_by_join=False), None
            )
    finally:
        os.close(fd)


def test_writer_lends_the_memory_with_the_state_that_is_alike(tmp_path: Path) -> None:
    node = Node(tmp_path / "node")
    saves = Saves(node, tmp_path, shares=1)
    (rank,) = saves.ranks
    try:
        layout = saves.layout(7)
        draft = saves.draft(layout, 7)
        held, chosen = (donated_number(7, rank) for rank in (2, 0))
        fd, _ = rank.borrow_buffer(draft, held, 0, 1, "")
        layout.copy_unshared(fd)
        layout.copy_shared(lambda at, data: os.pwrite(fd, data, at), 0, 1)
        rank.report_copied(draft, held, 0)
        assert saves.held() == 7
        with pytest.raises(SnapshotRefused):
            rank.borrow_buffer(draft, donated_number(7, 1), 0, 1, "", like=(1, 12345))
        before = os.pread(fd, draft.bytes, 0)
        again, _ = rank.borrow_buffer(draft, chosen, 0, 1, "", like=(1, held))
        assert os.fstat(again).st_ino == os.fstat(fd).st_ino and os.pread(again, draft.bytes, 0) == before
        assert rank.find_newest() is None, "a state that is being changed is no state"
        rank.report_copied(draft, chosen, 0)
        found = rank.find_newest()
        assert found is not None and found.save_number == chosen and saves.held() == 7
        os.close(fd)
        os.close(again)
    finally:
        saves.close()
        node.close()
