"""The file timer's server against torch's own client. Nothing is killed here: the server only reports."""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from torch.distributed.elastic.timer import FileTimerClient

from elasticd.errors import UsageError
from elasticd_agent.workers import file_timer
from elasticd_agent.workers.file_timer import FileTimerExpired, FileTimerServer

SOON_S = 20.0


class Server:
    def __init__(self, path: Path) -> None:
        self.path = path
        self.reports: queue.SimpleQueue[FileTimerExpired] = queue.SimpleQueue()
        self.lines: list[str] = []
        self.server = FileTimerServer(path, self.reports.put, self.lines.append)

    def write(self, *requests: dict[str, Any]) -> None:
        """All lines in one write."""
        fd = os.open(self.path, os.O_WRONLY | os.O_NONBLOCK)
        os.write(fd, b"".join(json.dumps(request).encode() + b"\n" for request in requests))
        os.close(fd)

    def report(self) -> FileTimerExpired:
        return self.reports.get(timeout=SOON_S)

    def nothing_else(self) -> None:
        """A timer that is set now expires, and nothing has before it."""
        self.write(request("last", time.time()))
        assert self.report().scope == "last"


def request(scope: str, at: float, signum: int = 9, pid: int | None = None) -> dict[str, Any]:
    return {"version": 1, "pid": pid or os.getpid(), "scope_id": scope, "expiration_time": at, "signal": signum}


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    server = Server(tmp_path / "timers")
    yield server
    server.server.close()
    assert not server.path.exists()


def test_timer_of_torchs_client_expires(server: Server) -> None:
    client = FileTimerClient(str(server.path), signal.SIGUSR1)
    began = time.monotonic()
    client.acquire("a step", time.time() + 0.2)
    report = server.report()
    assert (report.pid, report.scope, report.signum) == (os.getpid(), "a step", signal.SIGUSR1)
    assert time.monotonic() - began > 0.1
    server.nothing_else()


def test_released_timer_does_not_expire(server: Server) -> None:
    client = FileTimerClient(str(server.path))
    for _ in range(50):
        client.acquire("a step", time.time() + 30)
        client.release("a step")
    client.acquire("another", time.time() + 0.2)
    assert server.report().scope == "another"


def test_timer_that_is_set_again_counts_from_then(server: Server) -> None:
    server.write(request("a step", time.time() + 0.1), request("a step", time.time() + 600))
    server.write(request("another", time.time() + 0.3))
    assert server.report().scope == "another"


@pytest.mark.parametrize(
    ("requests", "expected"),
    [
        ([("a", 2, 9), ("b", 1, 15)], ("b", 15)),
        ([("a", 1, 0), ("b", 2, 15)], ("b", 15)),
        ([("a", 1, -1), ("b", 2, 0)], ("a", 0)),
        ([("a", 1, 9), ("b", -1, 0)], ("a", 9)),
        ([("a", 1, 9999)], ("a", 0)),
    ],
)
def test_one_report_for_each_process(
    server: Server, requests: list[tuple[str, float, int]], expected: tuple[str, int]
) -> None:
    server.write(*(request(scope, at, signum) for scope, at, signum in requests))
    report = server.report()
    assert (report.scope, report.signum) == expected
    server.nothing_else()


def test_release_that_waits_in_the_pipe_counts(server: Server) -> None:
    """The agent may have stood still for longer than the timer."""
    server.write(request("a step", time.time() - 100), request("a step", -1, 0))
    server.nothing_else()


def test_clock_that_jumps_expires_nothing(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    server.write(request("a step", time.time() + 600))
    server.nothing_else()
    now = time.time
    monkeypatch.setattr(file_timer.time, "time", lambda: now() + 10_000)
    server.nothing_else()


def test_timer_of_an_ended_process_is_forgotten(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        server.write(request("a step", time.time() + 300, pid=process.pid))
        server.nothing_else()
        process.communicate(b"\n")
    later = SimpleNamespace(time=time.time, monotonic=lambda: time.monotonic() + 600)
    monkeypatch.setattr(file_timer, "time", later)
    server.nothing_else()


@pytest.mark.parametrize("line", [b"no JSON", b"[]", b"{}", b'{"pid": "x"}', b"\xff", b"[" * 5000, b'{"pid": 1e999}'])
def test_line_that_cannot_be_decoded(server: Server, line: bytes) -> None:
    fd = os.open(server.path, os.O_WRONLY)
    os.write(fd, line + b"\n")
    os.close(fd)
    server.nothing_else()
    (logged,) = server.lines
    assert "cannot be decoded" in logged


@pytest.mark.parametrize("at", [float("nan"), float("inf")])
def test_time_that_is_no_number(server: Server, at: float) -> None:
    server.write(request("a step", at))
    server.nothing_else()


def test_path_that_is_no_pipe(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("precious")
    with pytest.raises(UsageError, match="is not a named pipe"):
        Server(tmp_path / "file")
    with pytest.raises(UsageError, match="No such file"):
        Server(tmp_path / "nowhere" / "pipe")
    assert (tmp_path / "file").read_text() == "precious"


def test_pipe_that_another_agent_has_replaced_stays(tmp_path: Path) -> None:
    first, second = Server(tmp_path / "timers"), Server(tmp_path / "timers")
    first.server.close()
    second.nothing_else()
    second.server.close()
