"""The names of a job's records."""

from __future__ import annotations

import tracemalloc
import zlib
from collections.abc import Callable

import pytest

from elasticd.errors import WireError
from elasticd_agent.model.codec import Document
from elasticd_agent.model.keys import COMPRESSED_FROM_BYTES, Keys, decode_record, encode_record
from elasticd_agent.model.records import Member, Round
from elasticd_agent.model.reports import HangReport
from elasticd_daemon.records import JobResult, NodeStatus, Submission


def test_watched_keys_are_not_written_by_every_node() -> None:
    """Or a hang of N nodes is N² messages, each with a node's report in it."""
    keys = Keys("job")
    for watched in (keys.round, keys.planner, keys.master(), keys.pause, keys.ahead, keys.hang_report_request):
        for written in (keys.nodes, keys.failures(), keys.done(), keys.hang_reports()):
            assert not written.startswith(watched), f"a watch on {watched} hears of {written}"


def test_long_record_is_compressed() -> None:
    """4,096 nodes receive the Round of 4,096 nodes."""
    few, many = (
        Round(1, tuple(Member(f"node-{i}", f"{i:016x}", (0, 1), address=f"10.0.{i}.1:29500") for i in range(nodes)))
        for nodes in (2, 4096)
    )
    assert encode_record(few) == few.to_json()
    assert len(encode_record(many)) < len(many.to_json()) / 4
    assert len(few.to_json()) < COMPRESSED_FROM_BYTES
    for round in (few, many):
        assert decode_record(Round, "/x/round", encode_record(round)) == round
        assert decode_record(Round, "/x/round", round.to_json()) == round


@pytest.mark.parametrize(
    ("value", "why"),
    [
        (zlib.compress(b"{}" * 9000)[:-9], "it is cut off, or longer than 2048 KiB"),
        (zlib.compress(b" " * (Round.MAX_BYTES + 1)), "it is cut off, or longer than 2048 KiB"),
        (zlib.compress(b"[]"), "Round: expected an object"),
        (b"x\x9cno", "Round: not JSON"),
        (b"", "it is cut off"),
        (b"{" + b" " * Round.MAX_BYTES, "Round: not JSON: it is longer than 2048 KiB"),
        (
            zlib.compress(b'{"version":"1.0","x":[' + b"[]," * 600_000 + b"[]]}"),
            "Round: not JSON: more than 262144 values",
        ),
    ],
)
def test_damaged_record_is_left_alone(value: bytes, why: str) -> None:
    with pytest.raises(WireError, match=f"^/x/round in the store cannot be decoded and is left alone: {why}"):
        decode_record(Round, "/x/round", value)


BOMBS: dict[str, Callable[[], bytes]] = {
    "spaces": lambda: zlib.compress(b" " * (64 << 20), 9),
    "lists": lambda: zlib.compress(b'{"version":"1.0","x":[' + b"[]," * (21 << 20) + b"[]]}", 9),
    "few bytes, many values": lambda: b'{"version":"1.0","x":[' + b'{"":{}},' * (60 << 10) + b"{}]}",
}


@pytest.mark.parametrize("bomb", BOMBS)
@pytest.mark.parametrize("kind", [Round, Submission, JobResult, NodeStatus, HangReport], ids=lambda kind: kind.__name__)
def test_small_value_takes_no_multiple_of_its_size(kind: type[Document], bomb: str) -> None:
    """A role that may write one key must not fill the memory of every agent."""
    value = BOMBS[bomb]()
    tracemalloc.start()
    try:
        with pytest.raises(WireError):
            decode_record(kind, "/x/j", value)
        assert tracemalloc.get_traced_memory()[1] < 12 * kind.MAX_BYTES
    finally:
        tracemalloc.stop()
