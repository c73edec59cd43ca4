"""The adversary of daemon_soak.py: jobs of two users, one in five of them hostile, and poisoned records in the store.

Hostile jobs run attacker.py. Poisoned records are of somebody who has the store's password: names that are paths, keys
that are another record's, and values that no version writes, some of them in place of a live record for a while. What
must not change is a canary directory; what must not leave the agents is their token, for which a forged node listens.
"""

from __future__ import annotations

import base64
import contextlib
import functools
import glob
import http.client
import json
import os
import pwd
import random
import socket
import subprocess
import sys
import threading
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from benchmarks.attacker import NO_PID, USERS
from elasticd_agent.model.codec import Document
from elasticd_daemon import keys as names
from elasticd_daemon.records import Cordon, JobResult, NodeStatus, Placement, SlotAssignment, Submission
from tests.etcd import EtcdServers

HOSTILE_EVERY = 5
ATTACKER = Path(__file__).with_name("attacker.py")
STORE_USER, PASSWORD = "elasticd", "store-word-7d41"
_PATHS = ("../../../../canary", "../canary", "/canary", ".", "..", "a/b", "x" * 300, " ", "\u2028", "%2e%2e")
_GARBAGE = (b"", b"{", b"[]", b"null", b"[" * 50_000, b"\xff\xfe", b'{"version": "999.0"}', b'{"version": "1.0"}',
            b'{"version": "1.0", "job": "\\ud800", "number": 1e999}', b"9" * 10_000, b"x\x9c\xed\xc1",
            zlib.compress(b" " * (64 << 20), 9), zlib.compress(b'{"version":"1.0","x":[' + b"[]," * (21 << 20), 9),
            b'{"version":"1.0","x":[' + b'{"":{}},' * 60_000 + b"0]}")  # fmt: skip
_REQUESTS = (
    ("/v1/jobs?id=evil", "application/toml", b"a." * 30_000 + b"a = 1"),
    ("/v1/jobs?id=evil", "application/json", b'{"x": [' + b"[]," * 20_000 + b"0]}"),
)  # fmt: skip
"""Small, and large once they are decoded. Of somebody who has a token."""


@functools.cache
def python_of_others() -> tuple[str, list[str]] | None:
    """An interpreter that USERS may execute, and the path to what this one has installed; None: there is none."""
    site = [path for path in sys.path if path.endswith("site-packages")]
    for python in (sys.executable, "/usr/bin/python3"):
        check = [python, "-c", "import sys, torch; print(sys.version_info[:2])"]
        with contextlib.suppress(OSError):
            done = subprocess.run(
                check, user=USERS[0], env={"PYTHONPATH": os.pathsep.join(site)}, capture_output=True, text=True, cwd="/"
            )
            if done.stdout.strip() == str(sys.version_info[:2]):
                return python, site
    return None


def missing() -> str:
    """Why there can be no adversary here; "" if there can."""
    if os.geteuid() != 0:
        return "only root runs jobs of other users"
    return "" if python_of_others() else f"no Python that {USERS[0]} may execute can import torch"


@dataclass(slots=True)
class Poison:
    """A record that somebody put into the store, and what was there before."""

    key: str
    value: bytes
    before: bytes | None


@dataclass(slots=True)
class Adversary:
    work: Path
    etcd: EtcdServers
    rng: random.Random
    overheard: list[str] = field(default_factory=list)
    taken: list[str] = field(default_factory=list)
    """Requests that no agent should take."""
    _agents: list[int] = field(default_factory=list)
    _poisons: list[Poison] = field(default_factory=list)
    """Those that are in the store."""
    _token: str = ""
    canary: Path = field(init=False)
    _before: Mapping[str, object] = field(init=False)
    _listener: socket.socket = field(init=False)
    _thread: threading.Thread = field(init=False)

    def __post_init__(self) -> None:
        self.canary = self.work / "canary"
        self.canary.mkdir(0o751)
        (self.canary / "note").write_text("nobody changes this\n")
        self._before = self._canary()
        self.etcd.ask_for_passwords(STORE_USER, PASSWORD, names.ROOT + "/")
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._thread = threading.Thread(target=self._listen, name="forged node", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)  # wakes its accept(), which close() does not
        self._listener.close()
        self._thread.join()
        # With rm, as they are too deep for Python.
        subprocess.run(["rm", "-rf", *glob.glob(f"/dev/shm/elasticd-*-{NO_PID}-*")], check=True)

    # ---- jobs

    def user(self, seq: int) -> str:
        return USERS[seq % len(USERS)]

    def is_hostile(self, seq: int) -> bool:
        return seq % HOSTILE_EVERY == 1

    def arm(self, folder: Path, job: str, nodes: list[Path], ports: list[int], token: Path) -> None:
        """What attacker.py needs to know."""
        targets: dict[str, Any] = {"nodes": [str(node) for node in nodes], "ports": ports, "etcd": self.etcd.port}
        targets |= {"token": str(token), "canary": str(self.canary), "job": job}
        (folder / "targets.json").write_text(json.dumps(targets))
        self._agents, self._token = ports, token.read_text().strip()

    # ---- records

    def poison(self) -> Poison | None:
        """Put a record into the store; None where the store does not answer. Beside it goes a request to an agent."""
        if self._agents:
            port, (path, kind, body) = self.rng.choice(self._agents), self.rng.choice(_REQUESTS)
            head = {"Content-Type": kind, "Authorization": f"Bearer {self._token}"}
            with contextlib.suppress(OSError, http.client.HTTPException):
                connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5.0)
                with contextlib.closing(connection):
                    connection.request("POST", path, body, head)
                    self.taken += [path] if connection.getresponse().status // 100 == 2 else []
        poison = self.rng.choice((self._beside, self._beside, self._instead))()
        self._poisons += [poison] if poison is not None else []
        return poison

    def _beside(self) -> Poison | None:
        """A new record: a path as its name, another record's key, or nonsense."""
        port = self._listener.getsockname()[1]
        job, name = f"evil{self.rng.randrange(99)}", self.rng.choice(_PATHS)
        records: tuple[tuple[str, Document], ...] = (
            (names.SUBMISSIONS, Submission(job, 99_999, '{"command": ["x"], "workdir": "/"}', 1, 1, 1, 1)),
            (names.PLACEMENTS, Placement(job, 99_999, (SlotAssignment("n1", (0,)),), "evil")),
            (names.RESULTS, JobResult(job, 99_999, "succeeded", 0, "evil", self.rng.choice((0.0, -1e17, 1e300)))),
            (names.NODES, NodeStatus(job, "i", 0, f"127.0.0.1:{port}", memory_bytes=self.rng.choice((0, -(10**9))))),
            (names.CORDONS, Cordon("n1", True, "evil")),
        )
        prefix, record = self.rng.choice(records)
        how = self.rng.choice(("path", "another", "garbage", "forged"))
        if how == "forged":
            prefix, record = records[3]
            return self._put(prefix + job, record.to_json())
        if how == "path":
            named: dict[str, Any] = {record.FIELD_IN_KEY: name}
            return self._put(prefix + name, replace(record, **named).to_json())
        return self._put(f"{prefix}evil", record.to_json() if how == "another" else self.rng.choice(_GARBAGE))

    def _instead(self) -> Poison | None:
        """Nonsense in place of a live record."""
        keys = self._ctl("get", "--prefix", "--keys-only", names.ROOT + "/")
        found = sorted({*(keys.split() if keys else ())} - {poison.key for poison in self._poisons})
        if not found:
            return None
        key = self.rng.choice(found)
        try:
            before = self._read(key)
        except OSError:
            return None
        if before is None:
            return None
        cut = before[: self.rng.randrange(len(before))] if before else b""
        return self._put(key, self.rng.choice((*_GARBAGE, cut)), before)

    def cure(self, poison: Poison) -> bool:
        """Put back what was there before, unless the poison has been replaced. False: the store does not answer."""
        try:
            now = self._read(poison.key)
        except OSError:
            return False
        cured: object = True
        if now == poison.value and poison.before is None:
            cured = self._ctl("del", "--", poison.key)
        elif now == poison.value and poison.before is not None:
            cured = self._put(poison.key, poison.before, poison.before)
        if cured is not None:
            self._poisons.remove(poison)
        return cured is not None

    def _put(self, key: str, value: bytes, before: bytes | None = None) -> Poison | None:
        """A live key keeps its lease."""
        lease = ("--ignore-lease",) if before is not None else ()
        # etcdctl takes an empty value as an argument only, and no long one.
        done = self._ctl("put", *lease, "--", key, *(() if value else ("",)), value=value)
        return Poison(key, value, before) if done is not None else None

    def _read(self, key: str) -> bytes | None:
        """None: there is no such key. Raises OSError where the store does not answer."""
        if (answer := self._ctl("get", "--write-out=json", "--", key)) is None:
            raise OSError("no answer")
        found = json.loads(answer).get("kvs", [])
        return base64.b64decode(found[0].get("value", "")) if found else None

    def _ctl(self, *arguments: str, value: bytes = b"") -> str | None:
        try:
            return self.etcd.ctl(*arguments, user=f"{STORE_USER}:{PASSWORD}", value=value)
        except (AssertionError, subprocess.TimeoutExpired):
            return None

    # ---- what was seen

    def left(self, token: str) -> list[str]:
        """What changed that must not, and the secrets that a forged node received."""
        found = [f"the canary is {self._canary()}, it was {self._before}"] if self._canary() != self._before else []
        found += [f"an agent took {path}, which is far larger than it seems" for path in self.taken]
        found += [f"a forged node received {what!r}" for what in self.overheard if token in what or PASSWORD in what]
        return found

    def _canary(self) -> Mapping[str, object]:
        def look(path: Path) -> object:
            at = path.lstat()
            return oct(at.st_mode), pwd.getpwuid(at.st_uid).pw_name, at.st_nlink, at.st_mtime

        return {str(path): look(path) for path in (self.canary, *self.canary.iterdir())} | {
            "text": (self.canary / "note").read_text(),
            "beside": sorted(path.name for path in self.canary.parent.glob("canary*")),
        }

    def _listen(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, _ = self._listener.accept()
                with connection, contextlib.suppress(OSError):
                    connection.settimeout(1.0)
                    self.overheard.append(connection.recv(65536).decode("latin-1"))
                    connection.sendall(b"HTTP/1.1 302 Found\r\nLocation: /\r\nContent-Length: 0\r\n\r\n")
