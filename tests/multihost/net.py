"""A network of hosts on one machine, for tests of what happens between machines: cut, silence, death, return.

A host is a network, a host name, an /etc/hosts and a /dev/shm of its own (Linux namespaces); every other file, the
clock and the process ids are the machine's. All of them are plugged into a switch, a bridge in one more namespace. It
needs root and touches nothing of the machine's own network. A packet that does not arrive vanishes without a word, as
between real machines that do not share a wire: every host knows its neighbours' hardware addresses from the start, so
that no failed look-up turns into an error.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

from tests.multihost import holder

PATIENCE_S = 60.0
"""Bounds the waits for this machine's own commands; it measures nothing."""

_MARK = "ELASTICD_TEST_NETWORK"
_NOWHERE = "02:00:00:00:ff:ff"  # no host has it: the switch finds nobody to give the packet to
_CLONE_NEWNET = 0x40000000  # <linux/sched.h>

T = TypeVar("T")


@functools.cache  # asked before every test
def missing() -> str | None:
    """Why there can be no such network on this machine, in one sentence; None when there can."""
    if os.geteuid() != 0:
        return "hosts are made of network namespaces: that needs root"
    if absent := [tool for tool in ("ip", "nsenter", "unshare", "mount") if shutil.which(tool) is None]:
        return f"hosts are made of network namespaces: that needs {', '.join(absent)} (tests/install-servers)"
    try_it = "ip link add eth0 type veth peer name port0 && ip link add switch type bridge"
    tried = subprocess.run(
        ["unshare", "--net", "--uts", "--mount", "sh", "-c", try_it], capture_output=True, text=True, timeout=PATIENCE_S
    )
    if tried.returncode != 0:
        return f"hosts are made of network namespaces: not permitted here ({tried.stderr.strip()})"
    return None


def sweep() -> list[int]:
    """Kill what a test run left that was killed together with its holders; says which processes these were."""
    swept = []
    for pid in (int(entry) for entry in os.listdir("/proc") if entry.isdigit()):
        owner = _owner_of(pid)
        if owner and owner != _identity(int(owner.partition(".")[0])):
            holder.send(pid, signal.SIGKILL)
            swept.append(pid)
    return swept


def _identity(pid: int) -> str:
    """Process ids come again; together with its start it is one process's alone. Empty for one that has ended."""
    try:
        fields = Path("/proc", str(pid), "stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ""
    return "" if fields[0] in "ZX" else f"{pid}.{fields[19]}"


def _owner_of(pid: int) -> str:
    try:
        environ = Path("/proc", str(pid), "environ").read_bytes()
    except OSError:  # it has ended
        return ""
    found = [item for item in environ.split(b"\0") if item.startswith(_MARK.encode() + b"=")]
    return found[0].partition(b"=")[2].decode() if found else ""


class Namespace:
    """One machine's network, name, /etc/hosts and /dev/shm, and every process in them."""

    def __init__(self, name: str, hosts: Path) -> None:
        self.name = name
        self._started: list[subprocess.Popen[Any]] = []
        self._holder = subprocess.Popen(
            # isolated and without site-packages: it starts in 15 ms
            ["unshare", "--net", "--uts", "--mount", sys.executable, "-IS", holder.__file__, name, str(hosts)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=_marked({}),
            start_new_session=True,  # a Ctrl-C at the terminal is the test run's to answer
        )
        self._network = 0

    @property
    def pid(self) -> int:
        """Of the process that holds it."""
        return self._holder.pid

    @property
    def shared_memory(self) -> Path:
        """Its /dev/shm, seen from outside."""
        return Path("/proc", str(self.pid), "root/dev/shm")

    def ready(self) -> None:
        """Wait until it is a machine of its own; its links come later."""
        assert self._holder.stdout is not None
        came, _, _ = select.select([self._holder.stdout], [], [], PATIENCE_S)
        assert came, f"host {self.name} did not start within {PATIENCE_S:g} s"
        assert self._holder.stdout.readline() == b"ready\n", f"host {self.name} did not start"
        self._network = holder.network_of(self.pid)

    def popen(
        self, argv: Sequence[str | Path], env: Mapping[str, str] | None = None, **how: Any
    ) -> subprocess.Popen[Any]:
        """Start a process on this host; `env` is added to the test run's own, the rest is as for subprocess.Popen.

        It is there when this returns; it dies with the host, at the latest with the test run.
        """
        cwd = how.pop("cwd", os.getcwd())
        enter = ["nsenter", f"--target={self.pid}", "--net", "--uts", "--mount", "env", f"--chdir={cwd}"]
        process = subprocess.Popen([*enter, *map(str, argv)], env=_marked(env or {}), **how)
        self._started.append(process)
        deadline = time.monotonic() + PATIENCE_S
        while holder.network_of(process.pid) != self._network and process.poll() is None:
            assert time.monotonic() < deadline, f"{argv[0]} is not on {self.name} after {PATIENCE_S:g} s"
            time.sleep(0.001)
        return process

    def run(self, argv: Sequence[str | Path], env: Mapping[str, str] | None = None, **how: Any) -> str:
        """What a command says that succeeds on this host."""
        process = self.popen(argv, env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, **how)
        said, _ = process.communicate(timeout=PATIENCE_S)
        assert process.returncode == 0, f"{list(map(str, argv))} on {self.name}: {said}"
        return str(said)

    def call(self, what: Callable[[], T]) -> T:
        """What it returns, called on this host: sockets it opens belong to this host for good, also outside the call.

        In a thread of its own, as the caller's other threads may open sockets meanwhile.
        """

        def there() -> T:
            with self.entered():
                return what()

        with ThreadPoolExecutor(1) as pool:
            return pool.submit(there).result()

    @contextlib.contextmanager
    def entered(self) -> Iterator[None]:
        """This thread is on this host's network, with the threads and processes that it starts meanwhile."""
        libc = ctypes.CDLL(None, use_errno=True)
        with open("/proc/thread-self/ns/net", "rb") as before, open(f"/proc/{self.pid}/ns/net", "rb") as network:
            if libc.setns(network.fileno(), _CLONE_NEWNET) != 0:
                raise OSError(ctypes.get_errno(), f"cannot enter {self.name}'s network")
            try:
                yield
            finally:
                libc.setns(before.fileno(), _CLONE_NEWNET)

    def processes(self) -> set[int]:
        """All that live here, whoever started them; zombies do not count."""
        return holder.processes_in(self._network, self.pid)

    def kill_all(self) -> None:
        """SIGKILL every process at once: the node is dead, but its machine still answers, by resetting connections."""
        holder.kill(self._network, self.pid)

    def freeze(self) -> None:
        """SIGSTOP them all: the machine acknowledges what comes, nobody reads it."""
        holder.freeze(self._network, self.pid)

    def thaw(self) -> None:
        """They go on."""
        for pid in self.processes():
            holder.send(pid, signal.SIGCONT)

    def close(self) -> None:
        """Nothing of it is left after this."""
        if self._network:
            self.kill_all()
        assert self._holder.stdin is not None and self._holder.stdout is not None
        self._holder.stdin.close()
        try:
            self._holder.wait(PATIENCE_S)
        finally:
            self._holder.kill()
            self._holder.wait()
            self._holder.stdout.close()
        for process in self._started:
            process.wait(PATIENCE_S)


class Host(Namespace):
    """A machine with one network card, plugged into the switch."""

    def __init__(self, name: str, number: int, hosts: Path, switch: Namespace) -> None:
        super().__init__(name, hosts)
        self.number = number
        self.address, self.address6 = _address(number), _address6(number)
        self._switch = switch

    def only_ipv6(self) -> None:
        """No IPv4 address but loopback's, as in a pod of a cluster of IPv6 alone."""
        _ip(self, [f"addr del {self.address}/16 dev eth0"])
        self.address = self.address6

    def link(self, *, up: bool) -> None:
        """Pull the cable out of the switch, or put it back: what is sent either way meanwhile vanishes."""
        _ip(self._switch, [f"link set port{self.number} {'up' if up else 'down'}"])

    def cut(self, other: Host) -> None:
        """What this host sends to the other one vanishes from now on."""
        _ip(self, _neighbour(other.number, _NOWHERE))

    def heal(self, other: Host) -> None:
        """It arrives again."""
        _ip(self, _neighbour(other.number, _hardware(other.number)))


class Network:
    """`with Network(hosts=3, others=("store",)) as net`: net.hosts are node0 … node2, net["store"] is one more.

    With `names` every host resolves every host's name, as with a DNS; without, no name, not even its own.
    """

    def __init__(self, hosts: int, others: Sequence[str] = (), names: bool = True) -> None:
        self._names = [*(f"node{number}" for number in range(hosts)), *others]
        self._count = hosts
        self._resolvable = names
        self._all: list[Host] = []
        self._ending = contextlib.ExitStack()

    @property
    def hosts(self) -> list[Host]:
        return self._all[: self._count]

    def __getitem__(self, name: str) -> Host:
        return self._all[self._names.index(name)]

    def cut(self, a: Host, b: Host, *, one_way: bool = False) -> None:
        """What `a` sends to `b` vanishes, and unless it is only one way, what `b` sends to `a`."""
        a.cut(b)
        if not one_way:
            b.cut(a)

    def heal(self, a: Host, b: Host) -> None:
        """Both ways, whatever was cut."""
        a.heal(b)
        b.heal(a)

    def __enter__(self) -> Network:
        sweep()
        with contextlib.ExitStack() as ending, tempfile.TemporaryDirectory() as directory:
            hosts = Path(directory, "hosts")
            hosts.write_text(self._etc_hosts())
            switch = Namespace("switch", hosts)
            ending.callback(switch.close)
            for number, name in enumerate(self._names):
                self._all.append(Host(name, number, hosts, switch))
                ending.callback(self._all[-1].close)
            for one in (switch, *self._all):
                one.ready()
            self._plug_in(switch)
            self._ending = ending.pop_all()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._ending.close()

    def _etc_hosts(self) -> str:
        known = enumerate(self._names) if self._resolvable else ()
        lines = [f"{address(number)} {name}\n" for number, name in known for address in (_address, _address6)]
        return "127.0.0.1 localhost\n::1 localhost\n" + "".join(lines)

    def _plug_in(self, switch: Namespace) -> None:
        lines = ["link add switch type bridge forward_delay 0 mcast_snooping 0", "link set switch up"]
        for host in self._all:
            port = f"port{host.number}"
            lines += [
                f"link add {port} type veth peer name eth0 address {_hardware(host.number)} netns {host.pid}",
                f"link set {port} master switch up",
            ]
        _ip(switch, lines)
        for host in self._all:
            lines = [
                "link set lo up",
                f"addr add {_address(host.number)}/16 dev eth0",
                f"addr add {_address6(host.number)}/64 dev eth0 nodad",
                "link set eth0 up",
            ]
            for other in self._all:
                if other is not host:
                    lines += _neighbour(other.number, _hardware(other.number))
            _ip(host, lines)


def _address(number: int) -> str:
    return f"10.77.0.{number + 1}"


def _address6(number: int) -> str:
    return f"fd00::{number + 1:x}"


def _hardware(number: int) -> str:
    return f"02:00:00:00:00:{number + 1:02x}"


def _neighbour(number: int, hardware: str) -> list[str]:
    """Where packets to that host go, both families; permanent, so that nothing is ever looked up."""
    return [
        f"neigh replace {a} lladdr {hardware} dev eth0 nud permanent" for a in (_address(number), _address6(number))
    ]


def _ip(where: Namespace, lines: Sequence[str]) -> None:
    """Commands of ip(8), all or an error."""
    done = subprocess.run(
        ["nsenter", f"--target={where.pid}", "--net", "ip", "-batch", "-"],
        input="".join(f"{line}\n" for line in lines),
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )
    assert done.returncode == 0, f"on {where.name}: {done.stderr.strip()}"


def _marked(env: Mapping[str, str]) -> dict[str, str]:
    return {**os.environ, **env, _MARK: _identity(os.getpid())}
