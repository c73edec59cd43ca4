"""The control socket: what reaches the agent's inbox and comes back, and what callers cannot do to it."""

from __future__ import annotations

import json
import os
import queue
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import pytest

from elasticd_agent.system.network.control_socket import (
    MAX_CALLERS,
    SOCKET_NAME,
    ControlServer,
    ControlSocketError,
    DumpRequested,
    send_request,
)
from tests.system.control_server import Answering

WAIT_S = 20.0


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def agent(stack: ExitStack, runtime: Path, directory: Path, answer: str = "") -> Answering:
    made = Answering(runtime, directory, answer)
    stack.callback(made.close)
    return made


def connected(path: Path) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX)
    sock.settimeout(WAIT_S)
    sock.connect(str(path))
    return sock


def test_dump_request_and_its_reply(stack: ExitStack, tmp_path: Path) -> None:
    one = agent(stack, tmp_path, tmp_path / "evidence")
    assert send_request(tmp_path / SOCKET_NAME, {"do": "dump"}) == {"path": str(tmp_path / "evidence")}
    assert send_request(tmp_path / SOCKET_NAME, {"do": "dump", "out": str(tmp_path / "out")}) == {
        "path": str(tmp_path / "out")
    }
    assert [message.out for message in one.asked] == [None, tmp_path / "out"]


def test_dump_reply_with_a_sentence_is_an_error(stack: ExitStack, tmp_path: Path) -> None:
    agent(stack, tmp_path, tmp_path, "no workers are running")
    assert send_request(tmp_path / SOCKET_NAME, {"do": "dump"}) == {"error": "no workers are running"}


def test_about_needs_no_deciding_thread(stack: ExitStack, tmp_path: Path) -> None:
    server = ControlServer(tmp_path / SOCKET_NAME, lambda _: None, {"job": "llama"})
    stack.callback(server.close)
    assert send_request(tmp_path / SOCKET_NAME, {"do": "about"}) == {"job": "llama", "pid": os.getpid()}


@pytest.mark.parametrize(
    ("line", "error"),
    [
        (b"dump\n", "a request is one JSON object a line"),
        (b"[1]\n", "a request is one JSON object a line"),
        (b"[" * 9000 + b"\n", "a request is one JSON object a line"),
        (b'{"do": "die"}\n', "unknown request 'die'; there are about, dump"),
        (b'{"do": "dump", "out": "here"}\n', "out must be an absolute path"),
        (b'{"do": "dump", "out": 7}\n', "out must be an absolute path"),
    ],
)
def test_invalid_requests(stack: ExitStack, tmp_path: Path, line: bytes, error: str) -> None:
    one = agent(stack, tmp_path, tmp_path)
    with connected(tmp_path / SOCKET_NAME) as sock:
        sock.sendall(line)
        assert json.loads(sock.makefile().readline()) == {"error": error}
    assert not one.asked


def test_stalled_closed_and_flooding_callers(stack: ExitStack, tmp_path: Path) -> None:
    agent(stack, tmp_path, tmp_path / "evidence")
    with ExitStack() as callers:
        for _ in range(MAX_CALLERS - 2):  # room is left for one that talks and one that asks
            callers.enter_context(connected(tmp_path / SOCKET_NAME)).sendall(b'{"do": ')
        with connected(tmp_path / SOCKET_NAME) as gone:
            gone.sendall(b'{"do": "dump"}\n')
        with connected(tmp_path / SOCKET_NAME) as flood, pytest.raises((BrokenPipeError, ConnectionResetError)):
            flood.sendall(b"x" * (64 << 20))
        assert "path" in send_request(tmp_path / SOCKET_NAME, {"do": "dump"}, WAIT_S)


def test_more_callers_than_allowed(stack: ExitStack, tmp_path: Path) -> None:
    agent(stack, tmp_path, tmp_path / "evidence")
    with ExitStack() as callers:
        for _ in range(MAX_CALLERS):
            callers.enter_context(connected(tmp_path / SOCKET_NAME))
        with pytest.raises(ControlSocketError):
            send_request(tmp_path / SOCKET_NAME, {"do": "dump"}, WAIT_S)
    until = time.monotonic() + WAIT_S
    while time.monotonic() < until:
        try:
            assert "path" in send_request(tmp_path / SOCKET_NAME, {"do": "dump"}, WAIT_S)
            return
        except ControlSocketError:  # it has not yet noticed that they went
            continue
    pytest.fail("nobody was served any more")


def test_caller_for_whom_no_thread_can_be_started(
    stack: ExitStack, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    agent(stack, tmp_path, tmp_path / "evidence")
    with monkeypatch.context() as full:
        full.setattr(threading.Thread, "start", lambda _: (_ for _ in ()).throw(RuntimeError("can't start new thread")))
        for _ in range(MAX_CALLERS):
            with pytest.raises(ControlSocketError):
                send_request(tmp_path / SOCKET_NAME, {"do": "dump"}, WAIT_S)
    assert "path" in send_request(tmp_path / SOCKET_NAME, {"do": "dump"}, WAIT_S)


def test_timeout_of_a_stuck_agent(stack: ExitStack, tmp_path: Path) -> None:
    server = ControlServer(tmp_path / SOCKET_NAME, lambda _: None)
    stack.callback(server.close)
    with pytest.raises(ControlSocketError, match="no answer within"):
        send_request(tmp_path / SOCKET_NAME, {"do": "dump"}, 0.2)


def test_answer_in_single_bytes_ends_at_the_deadline(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listener, ThreadPoolExecutor() as pool:
        listener.bind(str(tmp_path / SOCKET_NAME))
        listener.listen()

        def drip() -> int:
            sock, _ = listener.accept()
            with sock:
                for sent in range(100_000):
                    try:
                        sock.send(b" ")
                    except OSError:
                        return sent
                    until = time.perf_counter() + 0.0002
                    while time.perf_counter() < until:
                        time.sleep(0)
            return 100_000

        sent = pool.submit(drip)
        began = time.monotonic()
        with pytest.raises(ControlSocketError, match="no answer within"):
            send_request(tmp_path / SOCKET_NAME, {"do": "about"}, 0.3)
        assert time.monotonic() - began < WAIT_S
        assert sent.result(WAIT_S) < 100_000, "it would have answered for longer"


def test_reply_after_caller_or_server_closed(tmp_path: Path) -> None:
    inbox: queue.SimpleQueue[DumpRequested] = queue.SimpleQueue()
    server = ControlServer(tmp_path / SOCKET_NAME, inbox.put)
    with connected(tmp_path / SOCKET_NAME) as sock:
        sock.sendall(b'{"do": "dump"}\n')
        asked = inbox.get(timeout=WAIT_S)
    asked.reply("nobody hears this")
    with connected(tmp_path / SOCKET_NAME) as sock:
        sock.sendall(b'{"do": "dump"}\n')
        asked = inbox.get(timeout=WAIT_S)
        server.close()
        asked.reply(tmp_path)
        assert sock.recv(1) == b""
    assert not (tmp_path / SOCKET_NAME).exists()
    with pytest.raises(ControlSocketError, match="No such file"):
        send_request(tmp_path / SOCKET_NAME, {"do": "about"})


def test_socket_path_longer_than_an_address(stack: ExitStack, tmp_path: Path) -> None:
    deep = tmp_path / ("d" * 120)
    deep.mkdir()
    server = ControlServer(deep / SOCKET_NAME, lambda _: None)
    stack.callback(server.close)
    assert send_request(deep / SOCKET_NAME, {"do": "about"}) == {"pid": os.getpid()}


def test_other_users_are_refused(stack: ExitStack, tmp_path: Path) -> None:
    server = ControlServer(tmp_path / SOCKET_NAME, lambda _: None, users=[os.geteuid() + 1])
    stack.callback(server.close)
    with pytest.raises(ControlSocketError):
        send_request(tmp_path / SOCKET_NAME, {"do": "about"})
    assert (tmp_path / SOCKET_NAME).stat().st_mode & 0o777 == 0o600
