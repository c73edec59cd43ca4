"""The names of a job's records."""

from __future__ import annotations

import zlib

import pytest

from elasticd.errors import WireError
from elasticd_agent.model.keys import COMPRESSED_FROM, MAX_BYTES, Keys, decode_record, encode_record
from elasticd_agent.model.records import Member, Round


def test_watched_keys_are_not_written_by_every_node() -> None:
    """Or a hang of N nodes is N² messages, each with a node's report in it."""
    keys = Keys("job")
    for watched in (keys.round, keys.planner, keys.master(), keys.pause, keys.hang_report_request):
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
    assert len(few.to_json()) < COMPRESSED_FROM
    for round in (few, many):
        assert decode_record(Round, "/x/round", encode_record(round)) == round
        assert decode_record(Round, "/x/round", round.to_json()) == round


@pytest.mark.parametrize(
    ("value", "why"),
    [
        (zlib.compress(b"{}" * 9000)[:-9], "it is cut off, or longer than 64 MiB"),
        (zlib.compress(b" " * (MAX_BYTES + 1)), "it is cut off, or longer than 64 MiB"),
        (zlib.compress(b"[]"), "Round: expected an object"),
        (b"x\x9cno", "Round: not JSON"),
        (b"", "it is cut off"),
    ],
)
def test_damaged_record_is_left_alone(value: bytes, why: str) -> None:
    with pytest.raises(WireError, match=f"^/x/round in the store cannot be decoded and is left alone: {why}"):
        decode_record(Round, "/x/round", value)
