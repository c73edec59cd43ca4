"""Requests and reports of agent and owner: what arrives is what was sent, also from a version that knows more."""

from __future__ import annotations

import errno
import json
import os
import socket
import sys
from pathlib import Path

import pytest

from elasticd import channel
from elasticd_agent.model.job import EntrypointMode, JobSpec
from elasticd_agent.workers.launcher import messages
from elasticd_agent.workers.launcher.requests import LaunchRequests, PreloadPlan, WorkerSpec


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


@pytest.mark.parametrize(("workers", "arguments"), [(256, ()), (8, tuple(f"shard-{n:06}.tar" for n in range(20_000)))])
def test_a_cold_group_fits_into_a_message(workers: int, arguments: tuple[str, ...]) -> None:
    """What all workers have is sent once: the kernel's default bounds a message to 416 KiB."""
    spec = JobSpec(
        sys.executable, EntrypointMode.SCRIPT, "train.py", arguments, Path.cwd(), "job", "0", max_workers=256
    )
    env = {name: f"/dev/shm/elasticd-0-1-abcdefgh/{name}" for name in ("ELASTICD_HEARTBEAT", "TORCHELASTIC_ERROR_FILE")}
    requests = LaunchRequests(spec, {}, PreloadPlan())
    group = tuple(WorkerSpec(env, None, None, "") for _ in range(workers))
    request = requests.cold_start_request(1, group, "127.0.0.1", 0, store=True, keep=False)
    assert len(json.dumps(messages.to_message(request))) < 2 * 212_992


def test_a_cold_worker_has_its_own_arguments_and_logs() -> None:
    spec = JobSpec(sys.executable, EntrypointMode.SCRIPT, "train.py", ("${local_rank}",), Path.cwd(), "job", "0")
    group = WorkerSpec({"RANK": "0"}, None, None, ""), WorkerSpec({"RANK": "1"}, "out", None, "")
    requests = LaunchRequests(spec, {}, PreloadPlan())
    request = requests.cold_start_request(1, group, "127.0.0.1", 0, store=True, keep=False)
    hooks = [json.loads({**request.workers_env, **each["env"]}["ELASTICD_LAUNCH"]) for each in request.workers]
    last = [(each["argv"] or request.argv)[-1] for each in request.workers]
    assert (last, [hook["logs"] for hook in hooks]) == (["0", "1"], [[], [1]])


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
