"""A rank's answers to the launcher at a fault."""

from __future__ import annotations

import functools
import json
import socket
from types import SimpleNamespace
from typing import Any

from elasticd.checkpointing.donor import Donor


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
