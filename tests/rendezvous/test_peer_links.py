"""Standing connections between agents: they end with the process at the other end, and only then."""

from __future__ import annotations

import os
import queue
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from elasticd_agent.rendezvous.peers import PeerLinks
from elasticd_agent.rendezvous.probe import ProbeAlive, ProbeServer, probe_nodes

WITHIN_S = 20.0
AGENT = """
import sys, time
from elasticd_agent.rendezvous.probe import ProbeServer
server = ProbeServer("127.0.0.1", "a", "i1")
print(server.port, flush=True)
sys.stdin.read()
server.close()
"""


class Heard:
    """What broke, in order."""

    def __init__(self) -> None:
        self.nodes: queue.SimpleQueue[str] = queue.SimpleQueue()
        self.links = PeerLinks()

    def keep(self, **ports: int) -> None:
        self.links.keep({node: ("127.0.0.1", port) for node, port in ports.items()}, self.nodes.put)

    def next(self) -> str:
        return self.nodes.get(timeout=WITHIN_S)


@pytest.fixture
def heard() -> Iterator[Heard]:
    made = Heard()
    yield made
    made.links.close()


@pytest.fixture
def agent() -> Iterator[tuple[subprocess.Popen[str], int]]:
    process = subprocess.Popen([sys.executable, "-c", AGENT], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdin is not None
    yield process, int(process.stdout.readline())
    process.kill()
    process.stdin.close()
    process.stdout.close()
    process.wait(WITHIN_S)


def until_kept(port: int, callers: int) -> None:
    """Until so many connections to `port` are established on the server's side, as the kernel counts them."""
    deadline = time.monotonic() + WITHIN_S
    ours = f":{port:04X}"
    while time.monotonic() < deadline:
        with open("/proc/net/tcp") as table:
            rows = [line.split() for line in table.readlines()[1:]]
        if sum(row[1].endswith(ours) and row[3] == "01" for row in rows) == callers:
            return
        time.sleep(0.005)
    raise AssertionError(f"not {callers} callers at port {port}")


def test_killed_process_breaks_its_link(heard: Heard, agent: tuple[subprocess.Popen[str], int]) -> None:
    process, port = agent
    heard.keep(a=port)
    until_kept(port, 1)
    process.kill()
    assert heard.next() == "a"


def test_stopped_process_keeps_its_link(heard: Heard, agent: tuple[subprocess.Popen[str], int]) -> None:
    process, port = agent
    other = ProbeServer("127.0.0.1", "b", "i2")
    heard.keep(a=port, b=other.port)
    until_kept(port, 1)
    until_kept(other.port, 1)
    os.kill(process.pid, signal.SIGSTOP)
    other.close()  # heard after whatever the stop would have caused
    assert heard.next() == "b"
    assert heard.nodes.empty()


def test_removed_node_is_disconnected_without_a_report(heard: Heard) -> None:
    first, second = ProbeServer("127.0.0.1", "a", "i1"), ProbeServer("127.0.0.1", "b", "i2")
    heard.keep(a=first.port, b=second.port)
    until_kept(first.port, 1)
    heard.keep(b=second.port)
    until_kept(first.port, 0)
    until_kept(second.port, 1)
    second.close()
    assert heard.next() == "b"
    assert heard.nodes.empty()
    first.close()


def test_refused_connection_is_reported_once(heard: Heard) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        heard.keep(a=unused.getsockname()[1])
        assert heard.next() == "a"
        heard.keep()


def test_standing_link_does_not_delay_probes(heard: Heard) -> None:
    """A caller that stays connected costs the probe server nothing."""
    server = ProbeServer("127.0.0.1", "a", "i1")
    heard.keep(a=server.port)
    until_kept(server.port, 1)
    assert probe_nodes({"a": ("127.0.0.1", server.port)}, 5.0) == {"a": ProbeAlive("a", "i1")}
    assert heard.nodes.empty()
    server.close()
    assert heard.next() == "a"


def test_talking_caller_is_disconnected() -> None:
    server = ProbeServer("127.0.0.1", "a", "i1")
    with socket.create_connection(("127.0.0.1", server.port), WITHIN_S) as caller:
        assert caller.recv(4096).endswith(b"\n")
        caller.send(b"hello")
        with pytest.raises(ConnectionResetError):  # what was said is thrown away unread
            caller.recv(4096)
    server.close()


PLANNER = """
import os, resource, sys
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
from elasticd_agent.rendezvous.peers import PeerLinks
links = PeerLinks()
links.keep({f"n{i}": ("127.0.0.1", int(sys.argv[1])) for i in range(100)}, lambda node: None)
sys.stdin.readline()
spare = [os.open("/dev/null", os.O_RDONLY) for _ in range(32)]
print("there is room", flush=True)
links.close()
"""


def test_links_use_a_share_of_the_file_descriptors() -> None:
    """A thousand lines, of the 1,024 descriptors that a shell gives, would be the planner's end."""
    server = ProbeServer("127.0.0.1", "a", "i1")
    try:
        with subprocess.Popen(
            [sys.executable, "-c", PLANNER, str(server.port)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        ) as planner:
            until_kept(server.port, 8)
            said, _ = planner.communicate("\n", timeout=WITHIN_S)
        assert said == "there is room\n"
    finally:
        server.close()
