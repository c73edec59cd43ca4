"""What a runner is told to do, and how it says that it has ended: two files in the job's folder.

They exist so that a runner needs nothing from the daemon that started it, which may be gone a moment later, and so that
the next daemon learns from the disk what this one began. Both are 0600, as a job's environment may be nobody else's
business; the store's own credentials are in neither (see `Secrets`). An order stays its daemon's where the runner is
another user's, who may only read it: the next daemon goes by it.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from elasticd.errors import WireError
from elasticd_agent.model.codec import Document
from elasticd_agent.model.job import Rendezvous, Tls
from elasticd_agent.model.job_dir import JobFiles
from elasticd_agent.node.records import RoundSummary
from elasticd_agent.system.files import open_plain, read_plain
from elasticd_agent.system.process import prctl

PR_SET_DUMPABLE = 4
MAX_SPEC_BYTES, MAX_EXIT_BYTES = 16 << 20, 512 << 10
"""A job file has at most 1 MiB, and is in an order twice, once quoted twice. A last word becomes a record for etcd."""
MAX_REASON_CHARS = 2000
RESERVED_FILE = "exit.spare"
RESERVED_BYTES = 64 << 10
"""Room for the last word, taken when the runner starts: a full disk then costs logs, but not the way a job ended."""
MAX_WHY_CHARS = 500
MAX_EXIT_ROUNDS = 100
"""More rounds than this are the event log's to tell."""


Outcome = Literal["succeeded", "failed", "refused", "left"]


@dataclass(frozen=True, slots=True)
class StoreSecrets(Document):
    """What opens the store: the password, and PEM texts. It is handed to a runner in memory, and is in no file.

    A job's user can read whatever lies in files of its own; and who can write the store can run anything on every node.
    """

    password: str | None = None
    ca: str | None = None
    cert: str | None = None
    key: str | None = None

    def files(self) -> Tls:
        """The texts as files that only this process can open, and that go with it."""
        ca, cert, key = (None if text is None else _unnamed_file(text) for text in (self.ca, self.cert, self.key))
        return Tls(ca, cert, key)

    def to_fd(self) -> int:
        """A file descriptor for the child that it is passed to, from which `taken` reads it."""
        return _memory_file(self.to_json())

    @classmethod
    def from_fd(cls, fd: int) -> StoreSecrets:
        """What `handed` made; nobody else can look into this process from now on. Raises WireError, OSError."""
        prctl(PR_SET_DUMPABLE, 0)
        with open(fd, "rb") as file:
            file.seek(0)
            return cls.from_json(file.read())


def _memory_file(data: bytes) -> int:
    fd = os.memfd_create("elasticd", os.MFD_CLOEXEC)
    os.write(fd, data)
    os.lseek(fd, 0, os.SEEK_SET)
    return fd


def _unnamed_file(text: str) -> Path:
    return Path(f"/proc/self/fd/{_memory_file(text.encode())}")


@dataclass(frozen=True, slots=True)
class RunnerSpec(Document):
    """One run of one job on one node. `spec` is the job file as JSON, `slots` are the node's.

    `submission` is the job's record as the store had it, so that a store that has forgotten the job can be told again.
    `devices` is what all slots of the node stand for, `job_user` who a job that names nobody runs as.
    """

    job: str
    number: int
    node: str
    slots: tuple[int, ...]
    job_file: str
    submission: str = ""
    adopt_timeout_s: float = 60.0
    drain_timeout_s: float = 60.0
    backend: Literal["memory", "etcd"] = "memory"
    endpoints: tuple[tuple[str, int], ...] = ()
    tls: bool = False
    user: str | None = None
    local_addr: str | None = None
    job_user: str | None = None
    devices: tuple[str, ...] = ()
    min_nodes: int = 1
    max_nodes: int = 1

    def check(self) -> None:
        if not self.job or self.number < 1 or not self.node or not self.slots:
            raise WireError(f"order for {self.job!r}: it needs a job, a number from 1, a node and slots")

    def rendezvous(self, secrets: StoreSecrets) -> Rendezvous:
        """Where the runners of this job meet, as this node."""
        if self.backend == "memory":
            return Rendezvous(node=self.node)
        return Rendezvous(
            backend=self.backend,
            endpoints=self.endpoints,
            tls=secrets.files() if self.tls else None,
            user=self.user,
            password=secrets.password,
            local_addr=self.local_addr,
            node=self.node,
            min_nodes=self.min_nodes,
            max_nodes=self.max_nodes,
        )


@dataclass(frozen=True, slots=True)
class RunnerExit(Document):
    """How a runner ended. `refused`: this node cannot run the job at all. `left`: the job is not over."""

    job: str
    number: int
    exit_code: int
    outcome: Outcome
    reason: str
    rounds: tuple[RoundSummary, ...] = ()
    step: int = 0
    ended_at: float = 0.0


def read_spec(files: JobFiles, *, own_only: bool = False) -> RunnerSpec:
    """`ours`: only one that this very user has written. Raises WireError in a whole sentence, OSError."""
    return RunnerSpec.from_json(read_plain(files.runner_spec, MAX_SPEC_BYTES, own_only=own_only))


def read_exit(files: JobFiles) -> RunnerExit | None:
    """None while the runner has not ended, or where it could not say how."""
    try:
        last = RunnerExit.from_json(read_plain(files.runner_exit, MAX_EXIT_BYTES))
        return replace(last, reason=last.reason[:MAX_REASON_CHARS])  # it goes on into the node's card
    except (OSError, WireError):
        return None


def write_exit(files: JobFiles, last: RunnerExit) -> None:
    """The runner's last word, whole or not at all, also on a full disk if there was room at the start."""
    spare = files.root / RESERVED_FILE
    with open(open_plain(spare, os.O_WRONLY | os.O_CREAT), "wb") as file:
        file.write(last.to_json())
        file.truncate()
        os.fsync(file.fileno())
    os.rename(spare, files.runner_exit)


def leave_reason(files: JobFiles) -> str:
    """What the daemon wrote before its SIGTERM, in one line; "" where it wrote nothing, or somebody else sent that."""
    try:
        with open(files.leave_reason, "rb") as file:
            return " ".join(file.read(4 * MAX_WHY_CHARS).decode(errors="replace").split())[:MAX_WHY_CHARS]
    except OSError:
        return ""


def reserve_exit_space(files: JobFiles) -> None:
    """Take the room for the last word now. Raises OSError on a disk that is full already."""
    with open(open_plain(files.root / RESERVED_FILE, os.O_WRONLY | os.O_CREAT), "wb") as file:
        file.write(b" " * RESERVED_BYTES)


def exit_for(spec: RunnerSpec, exit_code: int, reason: str, rounds: Sequence[RoundSummary], step: int) -> RunnerExit:
    """What this exit code means to the daemon."""
    outcomes: dict[int, Outcome] = {0: "succeeded", 1: "failed", 2: "refused"}
    outcome = outcomes.get(exit_code, "left")
    kept = tuple(rounds)[-MAX_EXIT_ROUNDS:]
    return RunnerExit(spec.job, spec.number, exit_code, outcome, reason, kept, step, time.time())
