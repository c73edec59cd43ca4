"""Requests and reports of agent and owner: what arrives is what was sent, also from a version that knows more."""

from __future__ import annotations

import errno
import os
import socket

import pytest

from elasticd import channel
from elasticd_agent.workers.launcher import messages


@pytest.mark.parametrize("record", [messages.Park(1, 2, True, "::", 0), messages.Signal(1, 9, save=3, keep=[0])])
def test_request_arrives_as_sent(record: messages.Request) -> None:
    ours, theirs = channel.pair()
    with ours, theirs:
        channel.send(ours, {**messages.to_message(record), "new": "in a later version"})
        message = channel.receive(theirs)
    assert message is not None
    assert messages.decode_request(message) == record


@pytest.mark.parametrize("record", [messages.Refused("no"), messages.Flushed(7, "r1-s7"), messages.Ended(1, [], [0])])
def test_report_arrives_as_sent(record: messages.Report) -> None:
    assert messages.decode_report({**messages.to_message(record), "new": "in a later version"}) == record


def test_unknown_request_and_report_are_none() -> None:
    assert messages.decode_request({"type": "Freeze", "group": 9}) is None
    assert messages.decode_report({"type": "Thawed", "group": 9}) is None


def test_end_reset_and_nonsense() -> None:
    """A closed end is no message, nor is one that was reset with packets unread; other bytes than an object raise."""
    for is_reset in (False, True):
        ours, theirs = channel.pair()
        with ours:
            if is_reset:
                channel.send(ours, {})
            theirs.close()
            assert channel.receive(ours) is None
            assert channel.receive_with_descriptors(ours) == (None, [])
    ours, theirs = channel.pair()
    with ours, theirs:
        for packet in (b"no JSON", b"[1]", b"\xff"):
            ours.send(packet)
            with pytest.raises(ValueError):  # noqa: PT011 of JSON, of UTF-8 or ours
                channel.receive(theirs)


def test_descriptors_come_with_their_message() -> None:
    ours, theirs = channel.pair()
    read, write = os.pipe()
    with ours, theirs:
        channel.send(ours, {"n": 1}, write)
        os.close(write)
        message, (passed,) = channel.receive_with_descriptors(theirs, 1)
        assert message == {"n": 1}
        os.write(passed, b"x")
        assert os.read(read, 2) == b"x"
        os.close(passed)
        os.close(read)


def test_message_that_is_too_large_is_not_sent_in_part() -> None:
    ours, theirs = channel.pair()
    with ours, theirs:
        with pytest.raises(OSError) as raised:  # noqa: PT011 its number is what counts
            channel.send(ours, {"env": "x" * channel.MAX_PACKET_BYTES})
        assert raised.value.errno == errno.EMSGSIZE
        theirs.setblocking(False)
        with pytest.raises(BlockingIOError):
            theirs.recv(1, socket.MSG_PEEK)
