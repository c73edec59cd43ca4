"""An outlet: whoever writes to it never waits, and what it accepted arrives whole and in order, or not at all."""

from __future__ import annotations

import contextlib
import fcntl
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from elasticd_agent.system.nonblocking_writer import NonBlockingWriter

DEADLINE = 30.0


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    ends = os.pipe()
    yield ends
    for end in ends:
        with contextlib.suppress(OSError):
            os.close(end)


def drain(fd: int, size: int) -> bytes:
    data = b""
    while len(data) < size and (more := os.read(fd, 1 << 16)):
        data += more
    return data


def test_everything_accepted_arrives_in_order(pipe: tuple[int, int]) -> None:
    outlet = NonBlockingWriter(pipe[1])
    pieces = [b"line %d\n" % i * (i % 50) for i in range(500)]
    assert all(outlet.put(piece) for piece in pieces)
    whole = b"".join(pieces)
    assert drain(pipe[0], len(whole)) == whole
    assert outlet.close(DEADLINE)


def test_a_reader_that_stopped_costs_no_time_and_no_memory(pipe: tuple[int, int]) -> None:
    outlet = NonBlockingWriter(pipe[1], capacity=100_000)
    begun = time.monotonic()
    accepted = sum(outlet.put(b"x" * 999 + b"\n") for _ in range(1000))
    assert time.monotonic() - begun < DEADLINE
    assert 100 <= accepted <= 100_000 // 1000 + 65_536 // 1000 + 66
    assert outlet.room_bytes() < 1000
    assert not outlet.close(within_s=0.1), "it says that not all of it was written"
    assert time.monotonic() - begun < 2 * DEADLINE
    assert drain(pipe[0], accepted * 1000) == (b"x" * 999 + b"\n") * accepted


def test_when_drained_is_called(pipe: tuple[int, int]) -> None:
    outlet, told = NonBlockingWriter(pipe[1], capacity=100_000), threading.Event()
    outlet.add_room_listener(told.set)
    assert outlet.put(b"x" * 100_000)
    assert not outlet.put(b"y")
    assert len(drain(pipe[0], 100_000)) == 100_000
    assert told.wait(DEADLINE)
    assert outlet.put(b"y")
    assert outlet.close(DEADLINE)


def test_a_reader_that_went_away_is_noticed_and_forgotten(pipe: tuple[int, int]) -> None:
    outlet = NonBlockingWriter(pipe[1])
    assert not outlet.is_reader_gone()
    os.close(pipe[0])
    assert outlet.is_reader_gone(), "before anything is written"
    until = time.monotonic() + DEADLINE
    while not outlet.broken and time.monotonic() < until:
        assert outlet.put(b"x\n")
    assert outlet.broken
    assert all(outlet.put(b"x" * 100_000) for _ in range(100)), "swallowed, so nobody waits for room"
    assert outlet.close(DEADLINE)


def test_full_disk_loses_no_later_line(tmp_path: Path) -> None:
    with open("/dev/full", "wb") as full, open(tmp_path / "log", "a+b") as log:
        outlet = NonBlockingWriter(full.fileno())
        for _ in range(2):
            assert outlet.put(b"lost\n")
            assert outlet.flush(DEADLINE)
        fds = [fd for fd in os.listdir("/proc/self/fd") if os.path.realpath(f"/proc/self/fd/{fd}") == "/dev/full"]
        (own,) = {int(fd) for fd in fds} - {full.fileno()}
        os.dup2(log.fileno(), own)  # there is room again
        assert outlet.put(b"kept\n")
        assert outlet.close(DEADLINE)
        log.seek(0)
        assert log.read() == b"\n[elasticd: 10 bytes are missing here: the disk was full]\nkept\n"


def test_descriptor_made_non_blocking(pipe: tuple[int, int]) -> None:
    os.set_blocking(pipe[1], False)
    outlet = NonBlockingWriter(pipe[1])
    assert outlet.put(b"x" * 500_000)
    assert outlet.put(b"y")
    assert drain(pipe[0], 500_001) == b"x" * 500_000 + b"y"
    assert outlet.close(DEADLINE)


def test_a_closed_descriptor_is_broken_from_the_start() -> None:
    outlet = NonBlockingWriter(12345)
    assert outlet.broken
    assert outlet.put(b"x")
    assert outlet.close(DEADLINE)


def test_it_leaves_the_shared_flags_alone(pipe: tuple[int, int]) -> None:
    before = fcntl.fcntl(pipe[1], fcntl.F_GETFL)
    outlet = NonBlockingWriter(pipe[1])
    outlet.put(b"x")
    assert outlet.close(DEADLINE)
    assert outlet.close(DEADLINE)
    assert fcntl.fcntl(pipe[1], fcntl.F_GETFL) == before


@pytest.mark.parametrize(("err", "same"), [(subprocess.STDOUT, True), (subprocess.PIPE, False)])
def test_stdout_and_stderr_to_one_file_share_a_writer(err: int, same: bool) -> None:
    code = (
        "from elasticd_agent.system.nonblocking_writer import *\n"
        "out, err = open_std_writers(); out.put(b'%d\\n' % (out is err)); out.close(); err.close()"
    )
    ran = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=err, timeout=60)
    assert ran.stdout == b"%d\n" % same
