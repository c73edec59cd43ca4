"""A hostile job of daemon_soak.py: it trains as the others do, and tries meanwhile what its user must not be able to.

    attacker.py SCRIPT ARGUMENTS…        # WORK/targets.json has the agents' directories and ports

Each new attempt is a line of WORK/attacks.jsonl: what it is, on what, and whether it worked. daemon_checker.py wants
that none worked and that each of ATTACKS was tried. Standard library only. What other users see of the effects, such as
a file of this job that became a link, is judged by their own logs.
"""

from __future__ import annotations

import base64
import contextlib
import ctypes
import fcntl
import json
import os
import pwd
import random
import runpy
import signal
import socket
import stat
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ATTACKS = (
    "read file",
    "change file",
    "inspect process",
    "signal process",
    "local socket",
    "port",
    "etcd",
    "own folder",
    "shared memory",
    "own slot",
    "disk",
)
NO_PID = 1 << 22
"""Above every pid: a directory of this one looks as if a killed agent had left it."""
DEPTH = 1500
"""Above Python's recursion limit."""
OUTLIVED_S = 90.0
"""After which nothing of a job may live whose runner was killed; the owner has 25 s, and the machine may be busy."""
SMALL_DISK = 1 << 30
"""Only a larger one is the machine's."""
FILLED_S = 4.0
_GETFD = 438
"""pidfd_getfd(2), of all architectures."""
_FORGED = {"version": "1.0", "job": "../../x", "number": 1, "exit_code": -(10**9), "outcome": "failed", "step": 1 << 62,
           "reason": "evil\n2026-01-01 elasticd: forged", "ended_at": -1e17, "kind": "round_published", "wall": 1e300,
           "mono": 4e9, "round": 1, "rounds": [{"number": 1, "world_size": 2, "reason": "x", "at": 1e300}]}  # fmt: skip
CHANGES: dict[str, Callable[[Path], object]] = {
    "a file in": lambda folder: (folder / "evil").touch(),
    "a link in": lambda folder: (folder / "evil").symlink_to("/"),
    "mode of": lambda folder: folder.chmod(0o777),
    "name of": lambda folder: folder.rename(folder.with_name("evil")),
    "owner of": lambda folder: os.chown(folder, os.geteuid(), -1),
}
USERS = ("nobody", "daemon")
_SECONDS = 3.0
_PAUSE_S = 0.3
_HOSTILE_JOB = b'{"command": ["/bin/true"], "workdir": "/", "no_python": true, "user": "root"}'
_REQUESTS = (
    ("POST", "/v1/jobs?id=evil", _HOSTILE_JOB),
    ("POST", "/v1/nodes/n1/drain", b""),
    ("POST", "/v1/jobs/j1/cancel", b""),
    ("GET", "/v1/jobs", b""),
    ("GET", "/v1/local/jobs/j1/logs?rank=0", b""),
    ("GET", "/v1/jobs/j1/logs?rank=0&stream=stderr", b""),
    ("GET", "/v1/jobs/..%2f..%2fnode.json/logs", b""),
)
_HEADERS = ("", "Authorization: Bearer 0123456789012345678901234567890\r\n", "Cookie: __Host-elasticd=guess\r\n")


@dataclass(slots=True)
class Attacker:
    work: Path
    nodes: list[Path]
    ports: list[int]
    etcd: int
    token: Path
    canary: Path  #: a directory of root's that nothing may change
    job: str
    rng: random.Random = field(default_factory=random.Random)
    _known: set[tuple[str, str, bool]] = field(default_factory=set)
    _must_be_gone_at: float = float("inf")
    _filled: int = 0

    def run(self) -> None:
        """Until the job's processes are killed."""
        attacks: list[Callable[[], None]] = [
            self.read_files, self.change_files, self.processes, self.sockets, self.ports_, self.store, self.own_folder,
            self.shared_memory, self.disk, self.own_slot,
        ]  # fmt: skip
        while True:
            for attack in self.rng.sample(attacks, len(attacks)):  # a job may be killed before it has tried all
                with contextlib.suppress(OSError, ValueError):
                    attack()
                if time.monotonic() > self._must_be_gone_at:
                    self.tried("own slot", "outlives its runner", True)
                time.sleep(_PAUSE_S)

    def tried(self, what: str, on: object, worked: object) -> None:
        line = what, str(on), bool(worked)
        if line not in self._known:
            self._known.add(line)
            with (self.work / "attacks.jsonl").open("a") as file:
                now = time.monotonic()
                file.write(json.dumps({"mono": now, "what": what, "on": str(on), "worked": bool(worked)}) + "\n")

    # ---- files

    def _folders(self) -> Iterator[Path]:
        """Folders of agents, those with names that can be guessed as well."""
        for node in self.nodes:
            yield from (node / name for name in ("state", "state/jobs", "state/runners", "state/logs"))
            number = self.rng.randrange(1, 60)
            for job in range(7):
                yield from (node / "state" / kind / f"j{job}.{number}" for kind in ("jobs", "runners"))

    def read_files(self) -> None:
        files = [self.token, *(node / "state" / "node.json" for node in self.nodes)]
        for folder in self._folders():
            names = [folder / name for name in ("exit.json", "runner-spec.json", "lock", "events.jsonl", "node.json")]
            try:
                names += folder.iterdir()
                self.tried("read file", folder, folder.stat().st_uid != os.geteuid())
            except OSError:
                self.tried("read file", folder.name.partition(".")[0], False)
            files += names
        for path in files:
            try:
                fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW)  # other hostile jobs make links
            except OSError:
                self.tried("read file", path.name, False)
                continue
            found = os.fstat(fd)
            if stat.S_ISREG(found.st_mode) and found.st_uid != os.geteuid():
                self.tried("read file", path, True)
            os.close(fd)

    def change_files(self) -> None:
        for folder in [*self._folders(), *(node / "run" for node in self.nodes)]:
            with contextlib.suppress(OSError):
                if folder.stat().st_uid == os.geteuid():
                    continue
            for name, change in CHANGES.items():
                worked = True
                try:
                    change(folder)
                except OSError:
                    worked = False
                self.tried("change file", f"{name} {folder if worked else folder.name.partition('.')[0]}", worked)

    def own_folder(self) -> None:
        """What the agent reads and root lists is what this user makes of it."""
        for node in self.nodes:
            folder = node / "state" / "jobs" / f"{self.job}.{os.environ['ELASTICD_RUN']}"
            with contextlib.suppress(OSError):
                if folder.stat().st_uid == os.geteuid():
                    self._spoil(folder)

    def _spoil(self, folder: Path) -> None:
        name = self.rng.choice(("exit.json", "exit.spare", "events.jsonl", "runner.log", "run/evil", "logs/evil"))
        path = folder / name
        how = self.rng.choice(("link", "pipe", "folder", "garbage", "sparse", "forged", "hard link", "slow socket"))
        if path.exists() and not path.is_dir():
            path.rename(path.with_name(f"{path.name}.aside"))
        if how == "link":
            path.symlink_to(self.rng.choice((self.canary / "note", Path("/dev/zero"), folder / "loop")))
        elif how == "pipe":
            os.mkfifo(path)
        elif how == "folder":
            path.mkdir()
        elif how == "garbage":
            path.write_bytes(self.rng.randbytes(4096))
        elif how == "sparse":
            with path.open("wb") as file:
                file.truncate(1 << 40)
        elif how == "forged":
            path.write_text(json.dumps({**_FORGED, "number": self.rng.choice((1, -1))}) + "\n")
        elif how == "slow socket":
            run = folder / "run"
            run.rename(folder / f"run.{time.monotonic_ns()}")
            run.mkdir()
            server = socket.socket(socket.AF_UNIX)
            server.bind(str(run / "control"))
            server.listen()
            threading.Thread(target=_trickle, args=(server,), daemon=True).start()
        else:
            record = folder.parent.parent / "runners" / folder.name / "lock"
            os.link(record, folder / "lock2")
            self.tried("own folder", "hard link of the lock", True)
        self.tried("own folder", f"{how} {name}", False)

    def shared_memory(self) -> None:
        """Directories that another user's next job would remove as its own, too deep for it. That they end no job is
        seen in those jobs.
        """
        for user in (0, *(pwd.getpwnam(name).pw_uid for name in USERS)):
            path = f"/dev/shm/elasticd-{user}-{NO_PID}-{self.job}"
            if not os.path.lexists(path):
                os.mkdir(path, 0o777)
                above = os.open(path, os.O_RDONLY)
                for _ in range(DEPTH):
                    os.mkdir("d", 0o777, dir_fd=above)
                    below = os.open("d", os.O_RDONLY, dir_fd=above)
                    os.close(above)
                    above = below
                os.close(above)
            self.tried("shared memory", user, False)

    def own_slot(self) -> None:
        """Once: keep the slot; what runner and owner share is unlocked, the owner stopped and the runner killed."""
        mark = self.work / "own-slot"
        owner = os.getppid()
        while owner > 1 and _comm(owner) != "elasticd-owner":
            owner = _parent(owner)
        if mark.exists() or owner <= 1 or self.rng.random() < 0.8:
            return
        mark.touch()
        self.tried("own slot", "unlocks its lock and kills its runner", False)
        runner, libc, pidfd = _parent(owner), ctypes.CDLL(None), os.pidfd_open(owner)
        os.kill(owner, signal.SIGSTOP)
        for number in range(3, 64):
            with contextlib.suppress(OSError):
                if (fd := libc.syscall(_GETFD, pidfd, number, 0)) >= 0:
                    fcntl.flock(fd, fcntl.LOCK_UN)
        self._must_be_gone_at = time.monotonic() + OUTLIVED_S
        os.kill(runner, signal.SIGKILL)

    def disk(self) -> None:
        """All of a small disk that other users' jobs use, too; freed at the latest when this process is killed."""
        for node in self.nodes:
            folder = node / "state" / "jobs" / f"{self.job}.{os.environ['ELASTICD_RUN']}"
            with contextlib.suppress(OSError):
                room = os.statvfs(folder)
                if folder.stat().st_uid == os.geteuid() and room.f_blocks * room.f_frsize < SMALL_DISK:
                    fd = os.open(folder, os.O_TMPFILE | os.O_WRONLY, 0o600)
                    self._filled += 1
                    self.tried("disk", f"{node.name} {self._filled}", False)
                    try:
                        os.posix_fallocate(fd, 0, room.f_bavail * room.f_frsize)
                        time.sleep(FILLED_S)
                    finally:
                        os.close(fd)

    # ---- processes

    def processes(self) -> None:
        """Of the agents and of other users' jobs; and of this job's runner, which has had the store's password."""
        for pid in filter(str.isdecimal, os.listdir("/proc")):
            proc = Path("/proc", pid)
            with contextlib.suppress(OSError):
                if os.fsencode(self.nodes[0].parent) not in (proc / "cmdline").read_bytes():
                    continue
                runner = (proc / "comm").read_text().strip() == "elasticd-job"
                mine = f"\nUid:\t{os.geteuid()}\t" in (proc / "status").read_text()
                if mine and not runner:
                    continue
                what = (proc / "comm").read_text().strip()
                self.tried("inspect process", f"memory of {what}", _opens(proc / "mem"))
                self.tried("inspect process", f"environment of {what}", _opens(proc / "environ"))
                self.tried("inspect process", f"files of {what}", _lists(proc / "fd"))
                if not mine:
                    self.tried("signal process", what, _signals(int(pid)))

    # ---- requests

    def sockets(self) -> None:
        for node in self.nodes:
            for method, path, body in _REQUESTS:
                with socket.socket(socket.AF_UNIX) as sock:
                    sock.settimeout(_SECONDS)
                    try:
                        sock.connect(str(node / "run" / "agent.sock"))
                        worked = _request(sock, method, path, body, "") // 100 == 2
                    except OSError:
                        worked = False
                self.tried("local socket", f"{method} {path}", worked)

    def ports_(self) -> None:
        for port in self.ports:
            method, path, body = self.rng.choice(_REQUESTS)
            header = self.rng.choice(_HEADERS)
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), _SECONDS) as sock:
                self.tried("port", f"{method} {path}", _request(sock, method, path, body, header) // 100 == 2)
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), _SECONDS) as sock:
                sock.sendall(self.rng.randbytes(200) if self.rng.random() < 0.5 else b"GET / HTTP/1.1\r\nX-Slow: ")
                time.sleep(_PAUSE_S)

    def store(self) -> None:
        """etcd's HTTP gateway: without a user, and with guesses."""
        everything = base64.b64encode(b"/").decode()
        requests: tuple[tuple[str, dict[str, Any]], ...] = (
            ("kv/range", {"key": everything, "range_end": base64.b64encode(b"0").decode()}),
            ("kv/put", {"key": base64.b64encode(b"/elasticd/v1/evil").decode(), "value": everything}),
            ("auth/authenticate", {"name": "elasticd", "password": "elasticd"}),
        )
        direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        for path, body in requests:
            try:
                with direct.open(f"http://127.0.0.1:{self.etcd}/v3/{path}", json.dumps(body).encode(), 3.0) as answer:
                    self.tried("etcd", path, b"error" not in answer.read())
            except OSError:
                self.tried("etcd", path, False)


def _trickle(server: socket.socket) -> None:
    """Answers the agent byte by byte, as slowly as it lets us."""
    while True:
        connection, _ = server.accept()
        with connection, contextlib.suppress(OSError):
            for _ in range(100):
                connection.sendall(b" ")
                time.sleep(0.2)


def _request(sock: socket.socket, method: str, path: str, body: bytes, header: str) -> int:
    head = f"{method} {path} HTTP/1.1\r\nHost: 127.0.0.1\r\n{header}Content-Type: application/json\r\n"
    sock.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
    status = sock.recv(4096).split(b" ", 2)
    return int(status[1]) if len(status) > 2 else 0


def _comm(pid: int) -> str:
    return Path(f"/proc/{pid}/comm").read_text().strip()


def _parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def _opens(path: Path) -> bool:
    try:
        with path.open("rb"):
            return True
    except OSError:
        return False


def _lists(path: Path) -> bool:
    try:
        return bool(os.listdir(path))
    except OSError:
        return False


def _signals(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except OSError:
        return False
    return True


def attack(work: Path) -> None:
    """One attacker a job, in a session of its own, that no SIGTERM ends."""
    with (work / "attacker.lock").open("a") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        found = json.loads((work / "targets.json").read_text())
        nodes, token, canary = [Path(node) for node in found["nodes"]], Path(found["token"]), Path(found["canary"])
        Attacker(work, nodes, found["ports"], found["etcd"], token, canary, found["job"]).run()


if __name__ == "__main__":
    if sys.argv[1:] == ["--attack"]:
        attack(Path(os.environ["WORK"]))
    else:
        if os.environ.get("LOCAL_RANK") == "0":
            subprocess.Popen([sys.executable, "-I", "-S", __file__, "--attack"], start_new_session=True)
        del sys.argv[0]
        sys.path.insert(0, str(Path(sys.argv[0]).parent))
        runpy.run_path(sys.argv[0], run_name="__main__")
