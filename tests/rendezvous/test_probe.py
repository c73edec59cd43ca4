"""Probes: agents that answer, agents that are certainly gone, and silence."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import select
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from elasticd.errors import UsageError
from elasticd_agent.rendezvous import probe as knocking
from elasticd_agent.rendezvous.probe import (
    REFUSAL_CONFIRM_S,
    ProbeAlive,
    ProbeNoAnswer,
    ProbeRefused,
    ProbeServer,
    probe_nodes,
)
from tests.etcd import free_ports

DEADLINE = 20.0
LONG = 30.0  # a knock's timeout where an answer is expected: only a failure ever takes it
SHORT = 0.3  # where silence is expected: this long it takes

AGENT = """
import sys
from elasticd_agent.rendezvous.probe import ProbeServer
server = ProbeServer("127.0.0.1", "a", "i1")
print(server.port, flush=True)
sys.stdin.read()
"""


@contextlib.contextmanager
def serving(address: str = "127.0.0.1", node: str = "a", **given: object) -> Iterator[ProbeServer]:
    server = ProbeServer(address, node, "i1", **given)  # type: ignore[arg-type]
    try:
        yield server
    finally:
        server.close()


@contextlib.contextmanager
def agent(program: str = AGENT, *arguments: str) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """A real process that answers knocks, and its port."""
    path = os.pathsep.join(map(str, (Path(knocking.__file__).parents[1], Path(knocking.__file__).parents[2])))
    process = subprocess.Popen(
        [sys.executable, "-c", program, *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": path},
    )
    with process:
        try:
            yield process, int(process.stdout.readline())
        finally:
            process.kill()


@contextlib.contextmanager
def saying(what: bytes, reset: bool = False, then: bytes | None = None) -> Iterator[int]:
    """The port of a server that is no agent: it sends these bytes and closes; `then` is for its second caller."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            for answer in itertools.chain([what], itertools.repeat(what if then is None else then)):
                try:
                    sock = listener.accept()[0]
                except OSError:  # the test is over
                    return
                with sock:
                    sock.sendall(answer)
                    if reset:
                        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield listener.getsockname()[1]
        finally:
            listener.shutdown(socket.SHUT_RDWR)
            thread.join(DEADLINE)


@contextlib.contextmanager
def closed_port(address: str = "127.0.0.1") -> Iterator[int]:
    """One that nobody listens on, or can."""
    with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET) as sock:
        sock.bind((address, 0))
        yield sock.getsockname()[1]


def one(address: str, port: int, timeout_s: float = LONG) -> ProbeAlive | ProbeRefused | ProbeNoAnswer:
    return probe_nodes({"a": (address, port)}, timeout_s)["a"]


def why(result: ProbeAlive | ProbeRefused | ProbeNoAnswer) -> str:
    assert isinstance(result, ProbeNoAnswer), result
    return result.why


@pytest.mark.parametrize("address", ["127.0.0.1", "127.0.0.77", "::1"])
def test_answer_has_node_and_incarnation(address: str) -> None:
    with serving(address) as server:
        assert one(address, server.port) == ProbeAlive("a", "i1")


def test_answer_is_one_line_of_json() -> None:
    with serving() as server, socket.create_connection(("127.0.0.1", server.port), DEADLINE) as sock:
        sock.shutdown(socket.SHUT_WR)  # who does not stay is not kept
        text = b""
        while data := sock.recv(1000):
            text += data
    assert text.endswith(b"\n") and text.count(b"\n") == 1
    store = {"store": None, "lost": False, "leaving": False}
    assert json.loads(text) == {"node": "a", "incarnation": "i1", "version": "1.0", **store}


def test_no_nodes() -> None:
    assert probe_nodes({}, LONG) == {}


@pytest.mark.parametrize("address", ["127.0.0.1", "::1"])
def test_closed_port_is_refused_after_two_attempts(address: str) -> None:
    begun = time.monotonic()
    with closed_port(address) as port:
        assert one(address, port) == ProbeRefused()
    assert REFUSAL_CONFIRM_S <= time.monotonic() - begun < LONG, "not before the second knock, and not at the timeout"


def test_refused_within_a_timeout_shorter_than_the_pause() -> None:
    with closed_port() as port:
        assert one("127.0.0.1", port, timeout_s=REFUSAL_CONFIRM_S / 2) == ProbeRefused()


def test_closed_server_refuses() -> None:
    with serving() as server:
        assert isinstance(one("127.0.0.1", server.port), ProbeAlive)
        server.close()
        assert one("127.0.0.1", server.port) == ProbeRefused()


def test_port_that_is_back_within_the_pause_answers() -> None:
    deadline = time.monotonic() + DEADLINE
    result: ProbeAlive | ProbeRefused | ProbeNoAnswer = ProbeRefused()
    # Whether the port is back in time is a race against the pause, so it is run until it is won once.
    while result == ProbeRefused() and time.monotonic() < deadline:
        (port,), back = free_ports(1), list[ProbeServer]()

        def come_back(port: int = port, back: list[ProbeServer] = back) -> bool:
            # The second node is dialled after the first: when it is, the first has been refused.
            if not back:
                back.append(ProbeServer("127.0.0.1", "a", "i2", port))
            return True

        with serving(node="b", answering=come_back) as b:
            results = probe_nodes({"a": ("127.0.0.1", port), "b": ("127.0.0.1", b.port)}, LONG)
        for server in back:
            server.close()
        assert results["b"] == ProbeAlive("b", "i1")
        result = results["a"]
    assert result == ProbeAlive("a", "i2")


def test_stopped_agent_is_silent_and_killed_one_refuses() -> None:
    with agent() as (process, port):
        assert one("127.0.0.1", port) == ProbeAlive("a", "i1")
        process.send_signal(signal.SIGSTOP)
        assert os.WIFSTOPPED(os.waitpid(process.pid, os.WUNTRACED)[1])
        assert why(one("127.0.0.1", port, SHORT)) == "connected, but no answer within 0.3 s"
        process.send_signal(signal.SIGCONT)
        assert one("127.0.0.1", port) == ProbeAlive("a", "i1")
        process.kill()
        process.wait(DEADLINE)
        assert one("127.0.0.1", port) == ProbeRefused()


def test_server_ends_with_the_main_thread() -> None:
    with agent(AGENT.replace("sys.stdin.read()", "")) as (process, _):
        assert process.wait(DEADLINE) == 0


def test_stuck_agent_is_silent_until_it_continues() -> None:
    stuck = threading.Event()
    stuck.set()
    with serving(answering=lambda: not stuck.is_set()) as server:
        assert why(one("127.0.0.1", server.port, SHORT)).startswith("connected, but no answer")
        stuck.clear()
        assert one("127.0.0.1", server.port) == ProbeAlive("a", "i1")


def test_late_answer_within_the_timeout_counts() -> None:
    verdicts = iter([False, False, False])
    with serving(answering=lambda: next(verdicts, True)) as server:
        assert one("127.0.0.1", server.port) == ProbeAlive("a", "i1")


def test_stuck_server_closes_at_once() -> None:
    """Waiting callers are reset."""
    asked = threading.Event()

    def stuck() -> bool:
        asked.set()
        return False

    with serving(answering=stuck) as server, socket.create_connection(("127.0.0.1", server.port), DEADLINE) as sock:
        assert asked.wait(DEADLINE)
        server.close()
        with pytest.raises(ConnectionResetError):
            sock.recv(1)


@pytest.mark.parametrize("accepted", [False, True])
def test_agent_that_dies_during_a_probe_refuses(accepted: bool) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]

        def die() -> None:
            # When it is readable the caller is in the backlog; what is there when it closes is reset.
            assert select.select([listener], [], [], DEADLINE)[0]
            caller = listener.accept()[0] if accepted else contextlib.nullcontext()
            with caller:
                listener.close()

        thread = threading.Thread(target=die)
        thread.start()
        assert one("127.0.0.1", port) == ProbeRefused()
        thread.join(DEADLINE)


def test_dropped_packets_are_silence() -> None:
    with contextlib.ExitStack() as held:
        listener = held.enter_context(socket.socket())
        listener.bind(("127.0.0.1", 0))
        listener.listen(0)
        for _ in range(3):  # the first fills the backlog; the kernel drops what comes after
            filler = held.enter_context(socket.socket())
            filler.setblocking(False)
            filler.connect_ex(listener.getsockname())
        assert why(one("127.0.0.1", listener.getsockname()[1], SHORT)) == "no connection within 0.3 s"


@pytest.mark.parametrize(
    ("said", "words"),
    [
        (b"", "closed the connection without an answer"),
        (b'{"node":"a","incarnation":"i1","version":"1.0"}', "closed the connection without an answer"),
        (b"SSH-2.0-OpenSSH_9.2\r\n", "not as an agent does: ProbeAlive: not JSON"),
        (b"[1]\n", "expected an object"),
        (b'{"node":"","incarnation":"i1","version":"1.0"}\n', "needs a node"),
        (b'{"node":"a","incarnation":"i1","version":"2.0"}\n', "version 2.0 cannot be read"),
        (b"\xff" * 5000, "something that is not an agent's"),
    ],
)
def test_foreign_answer_is_no_answer(said: bytes, words: str) -> None:
    with saying(said) as port:
        assert words in why(one("127.0.0.1", port))


def test_reset_without_answer_is_silence_while_the_port_listens() -> None:
    """The port is probed again at once; only a refusal proves death."""
    with saying(b"", reset=True) as port:
        assert why(one("127.0.0.1", port)) == "connection reset by peer"


def test_partial_answer_is_discarded_before_the_second_attempt() -> None:
    whole = b'{"node":"a","incarnation":"i1","version":"1.0"}\n'
    with saying(whole[:20], then=whole) as port:
        assert one("127.0.0.1", port) == ProbeAlive("a", "i1")


def test_newer_minor_version_is_decoded() -> None:
    with saying(b'{"node":"a","incarnation":"i9","mood":3,"version":"1.7"}\n') as port:
        answer = one("127.0.0.1", port)
        assert isinstance(answer, ProbeAlive)
        assert (answer.node, answer.incarnation) == ("a", "i9")


@pytest.mark.parametrize(
    ("address", "port"),
    [
        ("localhost", 80),  # a name could take the resolver's own timeout
        ("", 80),
        ("no address", 80),
        ("a" * 300, 80),
        ("127.0.0.1", 0),
        ("127.0.0.1", 70000),
        ("127.0.0.1", -1),
        ("0.0.0.0", 1),  # the kernel would take it for this very machine, and refuse
        ("::", 1),
        ("fe80::1", 80),  # whose link?
        ("224.0.0.1", 80),
    ],
)
def test_invalid_address_is_silent_at_once(address: str, port: int) -> None:
    begun = time.monotonic()
    assert why(one(address, port))
    assert time.monotonic() - begun < LONG


def test_self_connection_is_refused() -> None:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        where = sock.getsockname()
        sock.connect(where)
        assert knocking.is_connected_to_itself(sock, where)
    with serving() as server, socket.create_connection(("127.0.0.1", server.port), DEADLINE) as sock:
        assert not knocking.is_connected_to_itself(sock, ("127.0.0.1", server.port))


def test_three_hundred_silent_nodes_take_one_timeout() -> None:
    # One server on every loopback address is 100 that answer; one socket nobody accepts from is 100 that do not.
    server_of_mute = socket.create_server(("127.0.0.1", 0), backlog=200)
    with serving("0.0.0.0") as server, server_of_mute as mute, closed_port("0.0.0.0") as gone:
        port = server.port
        answer = {f"a{i}": (f"127.0.1.{i}", port) for i in range(100)}
        refuse = {f"r{i}": (f"127.0.2.{i}", gone) for i in range(100)}
        silent = {f"s{i}": mute.getsockname() for i in range(100)}
        begun = time.monotonic()
        results = probe_nodes({**silent, **refuse, **answer}, 5.0)
        took = time.monotonic() - begun
        begun = time.monotonic()
        quick = probe_nodes({**refuse, **answer}, LONG)
        assert time.monotonic() - begun < LONG, "nobody waits for a timeout where all speak"
    assert 5.0 <= took < 2 * LONG
    assert all(results[node] == quick[node] == ProbeAlive("a", "i1") for node in answer)
    assert all(results[node] == quick[node] == ProbeRefused() for node in refuse)
    assert all(isinstance(results[node], ProbeNoAnswer) for node in silent)
    assert len(results) == 300


def test_thousand_callers_are_answered() -> None:
    with serving() as server:
        results = probe_nodes({str(i): ("127.0.0.1", server.port) for i in range(1000)}, LONG)
    assert set(results.values()) == {ProbeAlive("a", "i1")}
    assert len(results) == 1000


def test_hostile_callers_delay_no_answer() -> None:
    with serving() as server, contextlib.ExitStack() as held:
        for turn in range(100):
            sock = held.enter_context(socket.create_connection(("127.0.0.1", server.port), DEADLINE))
            if turn % 3 == 0:
                with contextlib.suppress(OSError):  # it may have hung up already
                    sock.sendall(b"GET / HTTP/1.1\r\n" * 1000)
            elif turn % 3 == 1:
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                sock.close()
        assert one("127.0.0.1", server.port) == ProbeAlive("a", "i1")


CRAMPED = """
import os, resource, sys
from elasticd_agent.rendezvous.probe import probe_nodes
print(0, flush=True)
nodes = {str(i): ("127.0.0.1", int(sys.argv[1])) for i in range(200)}
resource.setrlimit(resource.RLIMIT_NOFILE, (64, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
few = probe_nodes(nodes, 10.0)
mute = probe_nodes({str(i): ("127.0.0.1", int(sys.argv[2])) for i in range(100)}, 1.0)
taken = []
try:
    while True:
        taken.append(os.open("/dev/null", os.O_RDONLY))
except OSError:
    pass
none = probe_nodes(nodes, 10.0)
for fd in taken[-3:]:  # the selector's, and two to knock with
    os.close(fd)
fewer = probe_nodes(nodes, 10.0)
os.close(taken[0])
print(*({str(answer) for answer in found.values()} for found in (few, none, fewer)), sep="\\n")
print(sum("connected" in answer.why for answer in mute.values()))
print(sum("not probed: too few file descriptors" in answer.why for answer in mute.values()))
"""


def test_few_file_descriptors_prove_no_death() -> None:
    """With few, all nodes are probed in turn; with none, no node is taken for dead."""
    with serving() as server, socket.create_server(("127.0.0.1", 0), backlog=100) as mute:
        ports = str(server.port), str(mute.getsockname()[1])
        with agent(CRAMPED, *ports) as (process, _):
            few, none, fewer, connected, left = process.stdout.read().splitlines()
            assert process.wait(DEADLINE) == 0
    assert few == fewer == str({str(ProbeAlive("a", "i1"))})
    assert none == str({str(ProbeNoAnswer("could not be probed: too many open files"))})
    assert (connected, left) == ("32", "68"), "half of them are the rest of the agent's"


def test_unbindable_address_is_a_usage_error() -> None:
    with serving() as server, pytest.raises(UsageError, match=rf"127\.0\.0\.1 port {server.port}: .*in use"):
        ProbeServer("127.0.0.1", "a", "i1", server.port)
    for address, port in (("203.0.113.7", 0), ("localhost", 0), ("", 0), ("127.0.0.1", 70000)):
        with pytest.raises(UsageError, match="cannot listen for other agents on"):
            ProbeServer(address, "a", "i1", port)


def test_restarted_agent_binds_its_port_at_once() -> None:
    with serving() as server:
        assert isinstance(one("127.0.0.1", server.port), ProbeAlive)
        port = server.port
    with serving(port=port, node="b"):
        assert one("127.0.0.1", port) == ProbeAlive("b", "i1")
