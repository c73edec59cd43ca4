"""Survivors of a node copy each file once, whichever of them live on; the header names what is there."""

from __future__ import annotations

import itertools
import json
import os
import socket
import time
from typing import Any

import pytest

from elasticd.checkpointing.buffers import COUNT, Buffers, Snapshot, WriteTask, donated_by_all
from elasticd.checkpointing.file_fill import FileFill
from elasticd.checkpointing.held_states import HeldState
from elasticd.checkpointing.manifest import NO_CHECKSUM, STATE, Manifest
from elasticd.checkpointing.shard_plan import METADATA
from elasticd.checkpointing.writer import Writer

KEY = (1, donated_by_all(37))
DRAFT = Manifest(1, 37, None, 2, 0, NO_CHECKSUM, "job", "run", None, time.time())
FILES = [("a", 10), ("b", 20), ("c", 30)]


@pytest.fixture
def buffers() -> Any:
    fds = [os.memfd_create("test") for _ in range(COUNT + 2)]
    yield Buffers(fds[0], fds[1:])
    for fd in fds:
        os.close(fd)


def lend(fill: FileFill, rank: str, wanted: Any = FILES, key: Any = KEY, filled: Any = ()) -> Any:
    answer = fill.lend(rank, key, wanted, filled)[0]
    return answer.get("file", answer.get("refused"))


def test_each_file_once_and_again_after_a_death(buffers: Any) -> None:
    fill = FileFill(buffers, lambda size, fds: "")
    assert [lend(fill, rank) for rank in "xyz"] == ["a", "b", "c"]
    assert lend(fill, "w") == ""
    fill.lost("y")
    assert lend(fill, "w") == "b"
    for rank in "xzw":
        fill.returned(rank, KEY, DRAFT)
    assert lend(fill, "x") is None
    (held,) = [each for each in buffers.held if each is not None]
    spans = sorted(held.files.values())
    assert sorted(held.files) == ["a", "b", "c"]
    assert all(start + size <= after for (start, size), (after, _) in itertools.pairwise(spans))
    assert held.task is None


def test_header_names_what_is_there_while_others_copy(buffers: Any) -> None:
    fill = FileFill(buffers, lambda size, fds: "")
    assert [lend(fill, rank) for rank in "xy"] == ["a", "b"]
    fill.returned("x", KEY, DRAFT)
    (held,) = [each for each in buffers.held if each is not None]
    assert [*held.files] == ["a"]
    assert os.fstat(buffers.fds[fill._buffer]).st_size == 30, "cut while another rank copies"
    fill.returned("x", KEY, DRAFT)  # nothing is lent to it
    assert [*buffers.held[fill._buffer].files] == ["a"]


def test_older_state_gives_way_and_one_to_be_written_stays(buffers: Any) -> None:
    task = WriteTask("/x", 3, "a test", "", "", 0, 0.0)
    older, newer = (Snapshot(DRAFT, number, None, files={"a": (0, 1)}) for number in (1, 2))
    buffers.describe(0, newer)
    buffers.describe(1, older)
    fill = FileFill(buffers, lambda size, fds: "")
    assert lend(fill, "x") == "a"
    assert buffers.held[0] == newer
    assert lend(fill, "y", key=(1, donated_by_all(38))) == "each buffer is in use"
    fill.lost("x")
    assert lend(fill, "x", key=(1, donated_by_all(36))) == "a later step is saved"
    assert lend(fill, "x", key=(1, donated_by_all(38))) == "a"
    assert buffers.held[0] == newer, "of the same round, the later step takes the place of the earlier one"
    fill.lost("x")
    buffers.describe(1, Snapshot(DRAFT, 2, task))
    assert lend(fill, "x", key=(2, donated_by_all(50)), filled=[0]) == "each buffer is in use"
    assert lend(fill, "x", key=(2, donated_by_all(50))) == "a"
    assert buffers.held[1].task == task


def test_state_that_is_being_written_stays(buffers: Any) -> None:
    """At the end of a job, or when copies are given up, also one that no rank wanted to be written is."""
    for at in range(COUNT):  # the older one is the first
        buffers.describe(at, Snapshot(DRAFT, at + 1, None, files={"a": (0, 1)}))
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        writer = Writer(listener, buffers)
    writer._writing = 0
    rank, ours = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with rank, ours, writer._selector:
        writer._do_lend(ours, {"round": 2, "number": KEY[1], "files": FILES})
        answer, lent, _, _ = socket.recv_fds(rank, 4096, 1)
        os.close(lent[0])
    for fd in (writer._wake_read, writer._wake_write):
        os.close(fd)
    assert json.loads(answer)["file"] == "a"
    assert buffers.held[0] is not None


def test_memory_is_given_back_after_two_saves(buffers: Any) -> None:
    fill = FileFill(buffers, lambda size, fds: "")
    lend(fill, "x")
    fill.returned("x", KEY, DRAFT)
    at = fill._buffer
    for number, size in ((1, 10), (2, 0)):
        fill.release((2, number), 1 - at)
        assert os.fstat(buffers.fds[at]).st_size == size
    assert buffers.held[at] is None


def test_state_without_all_files_is_partial() -> None:
    names = ("__0_0.distcp", METADATA, STATE)
    state = HeldState(Snapshot(DRAFT, KEY[1], None))
    for name in names:
        state.own[name].append(0)
    assert state.is_partial
    assert state.describe_partial() == "step 37 cannot be resumed from: no rank saved __1_0.distcp at the fault"
    state.own["__1_0.distcp"].append(1)
    del state.nodes
    assert not state.is_partial
