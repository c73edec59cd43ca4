"""The network of hosts itself: every fault it offers does what its name says, and nothing of it outlives its test."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from pathlib import Path

import pytest

from tests.multihost.conftest import StartNetwork
from tests.multihost.holder import network_of, processes_in
from tests.multihost.net import Host, Network, sweep

DEADLINE_S = 60.0
SILENCE_S = 0.2
"""So long nothing must come. A reset or an answer takes well under a millisecond here."""

REPOSITORY = Path(__file__).parents[2]

# Takes one connection and never reads what it brings; listens on until it is killed.
DEAF = (
    "import socket, sys; s = socket.create_server((sys.argv[1], 7000)); c = s.accept(); print(flush=True); s.accept()"
)

# Leaves one process behind that daemonised itself: a test run that only kills its own children misses it.
DAEMON = """
import os, time
middle = os.fork()
if middle:
    os.waitpid(middle, 0)
    os._exit(0)
os.setsid()
os.fork() and os._exit(0)
time.sleep(600)
"""


def listen(host: Host, address: str) -> socket.socket:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    server = host.call(lambda: socket.create_server((address, 0), family=family))
    server.settimeout(DEADLINE_S)
    return server


def connect(host: Host, server: socket.socket, within: float = DEADLINE_S) -> socket.socket:
    return host.call(lambda: socket.create_connection(server.getsockname()[:2], within))


class Wire:
    """A TCP connection from host `a` to host `b`, and the port it was made to."""

    def __init__(self, a: Host, b: Host, v6: bool = False) -> None:
        with ExitStack() as ending:
            self.server = ending.enter_context(listen(b, b.address6 if v6 else b.address))
            self.near = ending.enter_context(connect(a, self.server))
            self.far = ending.enter_context(self.server.accept()[0])
            self.far.settimeout(DEADLINE_S)
            self._ending = ending.pop_all()

    def close(self) -> None:
        self._ending.close()

    def assert_carries(self) -> None:
        """A word each way, after whatever was on its way."""
        for sender, receiver in ((self.near, self.far), (self.far, self.near)):
            sender.sendall(b".")
            while not receiver.recv(100).endswith(b"."):
                pass

    def assert_silent(self, sender: socket.socket) -> None:
        """What is sent there does not arrive, and nobody is told so."""
        receiver = self.far if sender is self.near else self.near
        sender.sendall(b"lost")
        receiver.settimeout(SILENCE_S)
        with pytest.raises(TimeoutError):
            receiver.recv(100)
        receiver.settimeout(DEADLINE_S)


@pytest.fixture
def net(network: StartNetwork) -> Network:
    return network(hosts=3, others=("store",))


@pytest.fixture(params=["v4", "v6"])
def wire(net: Network, request: pytest.FixtureRequest) -> Iterator[Wire]:
    """From node0 to node1."""
    with closing(Wire(net.hosts[0], net.hosts[1], v6=request.param == "v6")) as wire:
        yield wire


def test_hosts_have_own_names_and_addresses(net: Network) -> None:
    for host in (*net.hosts, net["store"]):
        assert host.run(["hostname"]).strip() == host.name
        assert {host.address, host.address6} <= set(host.run(["hostname", "-I"]).split())
        for other in (*net.hosts, net["store"]):
            assert host.run(["getent", "ahostsv4", other.name]).split()[0] == other.address
            assert host.run(["getent", "ahostsv6", other.name]).split()[0] == other.address6
    assert socket.gethostname() not in ("node0", "node1", "node2", "store", "switch")


def test_link_down_delays_packets_both_ways(net: Network, wire: Wire) -> None:
    net.hosts[1].link(up=False)
    wire.assert_silent(wire.near)
    wire.assert_silent(wire.far)
    for client in net.hosts[0], net.hosts[2]:
        with pytest.raises(TimeoutError):
            connect(client, wire.server, SILENCE_S)
    with closing(Wire(net.hosts[0], net.hosts[2])) as bystander:
        bystander.assert_carries()
    net.hosts[1].link(up=True)
    wire.assert_carries()


def test_cut_separates_two_hosts_only(net: Network, wire: Wire) -> None:
    a, b, c = net.hosts
    net.cut(a, b)
    wire.assert_silent(wire.near)
    wire.assert_silent(wire.far)
    for client, server in ((a, b), (b, a)):
        with listen(server, server.address) as port, pytest.raises(TimeoutError):
            connect(client, port, SILENCE_S)
    for one in a, b:
        with closing(Wire(one, c)) as around:
            around.assert_carries()
    net.heal(a, b)
    wire.assert_carries()


def test_cut_may_be_one_way(net: Network, wire: Wire) -> None:
    net.cut(net.hosts[0], net.hosts[1], one_way=True)
    wire.assert_silent(wire.near)
    wire.far.sendall(b"arrives")
    assert wire.near.recv(100) == b"arrives"
    net.heal(net.hosts[0], net.hosts[1])
    wire.assert_carries()


def test_killed_host_resets_its_connections(net: Network) -> None:
    a, b, _ = net.hosts
    deaf = b.popen([sys.executable, "-c", DEAF, b.address], stdout=subprocess.PIPE)
    with deaf.stdout, until_listening(a, (b.address, 7000)) as client:
        assert deaf.stdout.readline() == b"\n"
        client.sendall(b"never read")
        b.kill_all()
        with pytest.raises(ConnectionResetError):
            client.recv(1)
        with pytest.raises(ConnectionRefusedError):
            a.call(lambda: socket.create_connection((b.address, 7000), DEADLINE_S))
    assert deaf.wait(DEADLINE_S) == -signal.SIGKILL
    assert not b.processes()


def until_listening(host: Host, address: tuple[str, int]) -> socket.socket:
    deadline = time.monotonic() + DEADLINE_S
    while True:
        try:
            return host.call(lambda: socket.create_connection(address, DEADLINE_S))
        except ConnectionRefusedError:
            assert time.monotonic() < deadline
            time.sleep(0.01)


def test_frozen_host_is_silent_until_thawed(net: Network) -> None:
    a, b, _ = net.hosts
    echo = (
        "import socket, sys; c = socket.create_server((sys.argv[1], 7000)).accept()[0]\nwhile w := c.recv(1): c.send(w)"
    )
    process = b.popen([sys.executable, "-c", echo, b.address])
    with until_listening(a, (b.address, 7000)) as client:
        client.sendall(b"1")
        assert client.recv(1) == b"1"
        b.freeze()
        client.settimeout(SILENCE_S)
        client.sendall(b"2")
        with pytest.raises(TimeoutError):
            client.recv(1)
        client.settimeout(DEADLINE_S)
        b.thaw()
        assert client.recv(1) == b"2"
    assert process.wait(DEADLINE_S) == 0


# 50 processes, each of which watches another one and tells when it sees it end.
WATCHERS = """
import os, select, time
watched = os.getpid()
for _ in range(50):
    fd = os.pidfd_open(watched)
    watched = os.fork()
    if watched == 0:
        select.select([fd], [], [])
        os.write(1, b"saw an end")
        os._exit(0)
os.write(1, b"ready")
time.sleep(600)
"""


def test_host_kill_is_atomic(net: Network) -> None:
    """Even where the one who kills gets the processor last of all."""
    node, cpu = net.hosts[0], min(os.sched_getaffinity(0))

    def kill_slowly() -> None:
        os.sched_setaffinity(0, {cpu})
        os.setpriority(os.PRIO_PROCESS, 0, 19)
        node.kill_all()

    watchers = node.popen(["taskset", "-c", str(cpu), sys.executable, "-c", WATCHERS], stdout=subprocess.PIPE)
    with watchers.stdout, ThreadPoolExecutor(1) as thread:
        assert watchers.stdout.read(5) == b"ready"
        assert len(node.processes()) == 51
        thread.submit(kill_slowly).result(DEADLINE_S)
        assert not node.processes()
        assert watchers.stdout.read() == b""


RUN = f"""
import os, sys, time
from tests.multihost.holder import network_of
from tests.multihost.net import Network
net = Network(hosts=2).__enter__()
net.hosts[0].popen([sys.executable, "-c", {DAEMON!r}]).wait()
print(network_of(net.hosts[0].pid), *(host.pid for host in net.hosts), flush=True)
time.sleep(600)
"""


@pytest.fixture
def run() -> Iterator[subprocess.Popen[str]]:
    """A test run of its own with a network of its own, to be killed."""
    with subprocess.Popen([sys.executable, "-c", RUN], cwd=REPOSITORY, stdout=subprocess.PIPE, text=True) as process:
        yield process
        process.kill()


def until_empty(network: int) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while left := processes_in(network, 0):
        assert time.monotonic() < deadline, left
        time.sleep(0.01)


def test_killed_test_run_leaves_nothing_behind(run: subprocess.Popen[str]) -> None:
    network, *_ = map(int, run.stdout.readline().split())
    assert len(processes_in(network, 0)) == 2  # the holder and the daemon
    run.kill()
    until_empty(network)


def test_leftovers_are_removed_at_the_next_start(run: subprocess.Popen[str]) -> None:
    """They were killed together with the processes that would have removed them."""
    network, *holders = map(int, run.stdout.readline().split())
    for pid in holders:
        os.kill(pid, signal.SIGKILL)
    deadline = time.monotonic() + DEADLINE_S
    while any(map(network_of, holders)):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    left = processes_in(network, 0)
    assert len(left) == 1  # the daemon
    assert not left & set(sweep())  # its test run lives
    run.kill()
    run.wait(DEADLINE_S)
    sweep()
    until_empty(network)
