"""What a rank answers to the launcher at a fault, and that its forked children keep apart."""

from __future__ import annotations

import functools
import json
import os
import socket
from types import SimpleNamespace
from typing import Any

import pytest

from elasticd.checkpointing.donor import Donor
from elasticd.checkpointing.saver import Saver
from elasticd.checkpointing.writer_client import WriterClient


def test_launcher_gets_an_answer_whatever_a_rank_raises() -> None:
    writer, rank = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    donor: Any = SimpleNamespace(_socket=rank, _why="")

    def fail(until: float) -> None:
        raise AssertionError("a mistake")

    donor._catch_up, donor._give_up = fail, functools.partial(setattr, donor, "_why")
    with writer, rank:
        for _ in range(2):
            writer.send(json.dumps({"save": 1, "write": True}).encode())
        writer.shutdown(socket.SHUT_WR)
        assert Donor._answer_requests(donor) == ""
        answers = [json.loads(writer.recv(100))["do"] for _ in range(4)]
    assert answers == ["saving", "donated"] * 2
    assert donor._why == "AssertionError: a mistake"


def test_forked_child_leaves_what_is_its_parents() -> None:
    asked: list[object] = []
    nothing: Any = None
    record = SimpleNamespace(expect=asked.append)
    parent = os.getppid()  # as in a child of that process
    donor: Any = SimpleNamespace(_next_step=5, _why="", _record=record, _commits=0, _trials=0, _pid=parent)
    donor._is_forked = functools.partial(Donor._is_forked, donor)
    Donor._expect(donor, nothing)
    writer: Any = SimpleNamespace(wait=lambda *of: asked.append(of))
    saver = Saver(*[nothing] * 5, writer=writer, _pending=True, _pid=parent)
    assert not saver.wait()
    assert asked == []


def test_answer_without_a_buffer_is_an_error() -> None:
    writer, rank = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with writer, rank:
        writer.send(b'{"writing": false}')
        with pytest.raises(OSError, match="has no buffer"):
            WriterClient("", 0, 1, True, _socket=rank).open((1, 1))
