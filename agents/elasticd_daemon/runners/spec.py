"""A runner's spec and its exit: a file in the agent's record of the run, and one in the job's folder.

A runner needs nothing else from the agent that started it, and the next agent reads both. They are 0600, because a
job's environment may be confidential; the store's credentials are in neither, see `StoreSecrets`.

Both files are written whole or not at all. The exit is written last, into space that was reserved when the runner
started, so a disk that is full at the end cannot turn a job that succeeded into one that crashed. A reader takes what
it knows from a file of another version and refuses what contradicts itself, since the folder belongs to the job's user.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar, Literal

from elasticd.errors import UsageError, WireError
from elasticd_agent.model.codec import Document
from elasticd_agent.model.job import Rendezvous, Tls, check_identifier
from elasticd_agent.system.files import open_plain, read_plain, rename_over, replace_file
from elasticd_agent.system.processes.process import PR_SET_DUMPABLE, prctl
from elasticd_daemon.job_dir import JobFiles
from elasticd_daemon.records import RoundSummary

MAX_SPEC_BYTES = 16 << 20
"""Far above what a job file makes, of which a spec has two copies, one of them quoted twice."""
MAX_EXIT_BYTES = 512 << 10
"""An exit becomes a record in etcd."""
MAX_REASON_CHARS = 2000
EXIT_RESERVE_FILE = "exit.spare"
EXIT_RESERVE_BYTES = 64 << 10
"""Space for the exit, reserved when the runner starts: a full disk costs logs, but not the result of a job."""
MAX_EXIT_ROUNDS = 100
"""The event log has all rounds."""

RunnerOutcome = Literal["succeeded", "failed", "refused", "left"]


@dataclass(frozen=True, slots=True)
class StoreSecrets(Document):
    """The credentials of the store: the password, and PEM texts. Passed to a runner in memory, and written to no file.

    A job's user can read all its files, and write access to the store is enough to run any program on every node.
    """

    password: str | None = None
    ca: str | None = None
    cert: str | None = None
    key: str | None = None

    def tls_files(self) -> Tls:
        """The texts as files that only this process can open, and that end with it."""
        ca, cert, key = (None if text is None else _unnamed_file(text) for text in (self.ca, self.cert, self.key))
        return Tls(ca, cert, key)

    def to_fd(self) -> int:
        """A file descriptor for a child process, which reads it with `from_fd`."""
        return _memory_file(self.to_json())

    @classmethod
    def from_fd(cls, fd: int) -> StoreSecrets:
        """The content of `to_fd`; no other process can inspect this one from now on. Raises WireError, OSError."""
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
    MAX_BYTES: ClassVar[int] = MAX_SPEC_BYTES
    job: str
    number: int
    node: str
    slots: tuple[int, ...]
    job_file: str
    submission: str = ""  #: the job's record in the store, to register the job again in a store that lost its data
    adopt_timeout_s: float = 60.0
    drain_timeout_s: float = 60.0
    backend: Literal["memory", "etcd"] = "memory"
    endpoints: tuple[tuple[str, int], ...] = ()
    tls: bool = False
    user: str | None = None
    local_addr: str | None = None
    job_user: str | None = None  #: the user of a job file that names none
    commands: tuple[str, ...] | None = None
    directories: tuple[str, ...] | None = None  #: [limits] of the node
    devices: tuple[str, ...] = ()
    control_group: str = ""  #: the directory of the job's, for the runner to join; "": it stays in the agent's
    min_nodes: int = 1
    max_nodes: int = 1

    def check(self) -> None:
        try:
            check_identifier("job id", self.job)
        except UsageError as error:
            raise WireError(f"runner spec: {error}") from None
        if self.number < 1 or not self.node or not self.slots:
            raise WireError(f"runner spec of {self.job!r}: it needs a number from 1, a node and slots")

    def rendezvous(self, secrets: StoreSecrets) -> Rendezvous:
        """The rendezvous of this job's runners, for this node."""
        if self.backend == "memory":
            return Rendezvous(node=self.node)
        return Rendezvous(
            backend=self.backend,
            endpoints=self.endpoints,
            tls=secrets.tls_files() if self.tls else None,
            user=self.user,
            password=secrets.password,
            local_addr=self.local_addr,
            node=self.node,
            min_nodes=self.min_nodes,
            max_nodes=self.max_nodes,
        )


@dataclass(frozen=True, slots=True)
class RunnerExit(Document):
    """The end of a runner. `refused`: this node cannot run the job at all. `left`: the job has not ended."""

    job: str
    number: int
    exit_code: int
    outcome: RunnerOutcome
    reason: str
    rounds: tuple[RoundSummary, ...] = ()
    step: int = 0
    ended_at: float = 0.0


def read_spec(files: JobFiles) -> RunnerSpec:
    """Raises WireError, OSError."""
    return RunnerSpec.from_json(read_plain(files.runner_spec, MAX_SPEC_BYTES))


def read_exit(files: JobFiles) -> RunnerExit | None:
    """The agent's refusal, or the runner's exit. None while the runner has not ended, or if it could not write it."""
    for path in (files.refusal, files.runner_exit):
        with contextlib.suppress(OSError, WireError):
            exit = RunnerExit.from_json(read_plain(path, MAX_EXIT_BYTES))
            return replace(exit, reason=exit.reason[:MAX_REASON_CHARS])  # it becomes a part of the node's status
    return None


def write_exit(files: JobFiles, exit: RunnerExit) -> None:
    """Atomic, also on a full disk if the space could be reserved at the start. Raises OSError."""
    spare = files.root / EXIT_RESERVE_FILE
    try:
        fd = open_plain(spare, os.O_WRONLY | os.O_CREAT)
    except OSError:  # the job's user has put something else there, in his own folder
        replace_file(files.runner_exit, exit.to_json())
        return
    with open(fd, "wb") as file:
        file.write(exit.to_json())
        file.truncate()
        os.fsync(file.fileno())
    rename_over(spare, files.runner_exit)


def reserve_exit_space(files: JobFiles) -> None:
    """Raises OSError on a disk that is already full."""
    with open(open_plain(files.root / EXIT_RESERVE_FILE, os.O_WRONLY | os.O_CREAT), "wb") as file:
        file.write(b" " * EXIT_RESERVE_BYTES)


def exit_for(spec: RunnerSpec, exit_code: int, reason: str, rounds: Sequence[RoundSummary], step: int) -> RunnerExit:
    outcomes: dict[int, RunnerOutcome] = {0: "succeeded", 1: "failed", 2: "refused"}
    outcome = outcomes.get(exit_code, "left")
    newest = tuple(rounds)[-MAX_EXIT_ROUNDS:]
    return RunnerExit(spec.job, spec.number, exit_code, outcome, reason, newest, step, time.time())
