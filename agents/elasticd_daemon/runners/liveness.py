"""Proof that a process is alive: a lock that it holds, and an identity that no other process ever has.

Pids are assigned again, after a reboot all of them, so a process is identified by pid, start time and boot id; the lock
is released by the kernel. No other process is ever signalled by mistake. Only the file system of the lock is asked,
never one of a job.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import stat
from dataclasses import dataclass
from pathlib import Path

from elasticd_agent.system.files import open_plain
from elasticd_agent.system.processes import procfs
from elasticd_daemon.job_dir import JobFiles

IDENTITY_BYTES = 80
"""A constant length, so that one write replaces an identity, also on a full disk."""
MAX_REASON_BYTES = 2000
"""After the identity: why the agent stops the owner, in one line."""
ScanComplete = bool
"""False: we may not look at all processes of the user."""


@dataclass(frozen=True, slots=True)
class ProcessIdentity:
    """`start_ticks` count from `boot`."""

    pid: int
    start_ticks: int
    boot_id: str

    @classmethod
    def of(cls, pid: int) -> ProcessIdentity | None:
        """The process with this pid; None if there is none, or a zombie."""
        stat = procfs.stat(pid)
        return None if stat is None or stat.state in ("Z", "X") else cls(pid, stat.start_ticks, boot_id())

    @property
    def alive(self) -> bool:
        return ProcessIdentity.of(self.pid) == self

    def __str__(self) -> str:
        return f"{self.pid} {self.start_ticks} {self.boot_id}"

    @classmethod
    def parse(cls, text: str) -> ProcessIdentity | None:
        """Reads the output of `str`; further text is ignored."""
        words = text.split()
        if len(words) < 3 or not (words[0].isdecimal() and words[1].isdecimal()):
            return None
        return cls(int(words[0]), int(words[1]), words[2])


def boot_id() -> str:
    return procfs.read("/proc/sys/kernel/random/boot_id").decode("ascii", "replace").strip() or "unknown"


def take_lock(path: Path) -> int | None:
    """Lock `path` and write our identity into it. Returns its file descriptor; None: another process has the lock.

    The lock lasts until every copy of the descriptor is closed, also a child's. A child that runs as another user can
    only read it, so that it cannot name another process. Raises OSError.
    """
    fd = open_plain(path, os.O_RDONLY | os.O_CREAT)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        write_owner(path)
    except BlockingIOError:
        os.close(fd)
        return None
    except BaseException:
        os.close(fd)
        raise
    return fd


def write_owner(path: Path, pid: int | None = None) -> None:
    """Write the owner's identity into the locked file: this process, or `pid`."""
    named = ProcessIdentity.of(os.getpid() if pid is None else pid)
    with contextlib.suppress(OSError):  # a full disk: the lock is sufficient
        _write(path, f"{named}\n".ljust(IDENTITY_BYTES).encode(), 0)


def write_stop_reason(path: Path, why: str) -> None:
    """Write into the lock why its owner gets a SIGTERM; "": nobody wants it to end. Raises OSError."""
    line = " ".join(why.split()).encode(errors="backslashreplace")[: MAX_REASON_BYTES - 1] + b"\n"
    _write(path, line, IDENTITY_BYTES)


def read_stop_reason(lock: int) -> str:
    """The reason that `write_stop_reason` wrote; "" if there is none."""
    with contextlib.suppress(OSError):
        line, newline, _ = os.pread(lock, MAX_REASON_BYTES, IDENTITY_BYTES).partition(b"\n")
        return line.decode(errors="replace") if newline else ""
    return ""


def requested_stop(path: Path) -> str:
    """The reason why an agent has asked the owner of this lock to end; "" if none has."""
    with contextlib.suppress(OSError), open(open_plain(path, os.O_RDONLY), "rb") as file:
        return read_stop_reason(file.fileno())
    return ""


def _write(path: Path, data: bytes, offset: int) -> None:
    fd = open_plain(path, os.O_WRONLY)
    try:
        os.pwrite(fd, data, offset)
    finally:
        os.close(fd)


def is_locked(path: Path, *, or_shared: bool = False) -> bool:
    """True while a process has the lock, with `or_shared` also a shared one, or if that cannot be determined."""
    flags = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
    try:
        fd = os.open(path, flags | (os.O_RDWR if or_shared else os.O_RDONLY))
    except OSError as error:
        return error.errno not in (errno.ENOENT, errno.ELOOP, errno.ENXIO)
    try:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            return False
        fcntl.flock(fd, (fcntl.LOCK_EX if or_shared else fcntl.LOCK_SH) | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(fd)
    return False


def has_processes(files: JobFiles) -> bool:
    """True while a process of the run has one of its locks, or if that cannot be determined."""
    return is_locked(files.lock) or is_locked(files.keeper_lock)


def lock_owner(path: Path) -> ProcessIdentity | None:
    """The process named in the file, if it is alive."""
    try:
        with open(open_plain(path, os.O_RDONLY), "rb") as file:
            named = ProcessIdentity.parse(file.read(IDENTITY_BYTES).decode("ascii", "replace"))
    except OSError:
        return None
    return named if named is not None and named.alive else None


def find_unnamed_owner(path: Path, name: bytes, user: int) -> tuple[ProcessIdentity | None, ScanComplete]:
    """The owner of a lock without an identity: the oldest process of this name and user that has the lock."""
    pids, complete = processes_with_lock(path, user)
    candidates = [pid for pid in pids if procfs.read(f"/proc/{pid}/comm").strip() == name]
    named = [process for process in map(ProcessIdentity.of, candidates) if process is not None]
    return min(named, key=lambda process: process.start_ticks, default=None), complete


def process_uid(pid: int) -> int | None:
    """The user who started it, also for a setuid program. The files in /proc of a process with secrets are root's."""
    for line in procfs.read(f"/proc/{pid}/status").splitlines():
        if line.startswith(b"Uid:"):
            return int(line.split()[1])
    return None


def processes_with_lock(path: Path, user: int) -> tuple[list[int], ScanComplete]:
    """This user's processes with a copy of the lock's descriptor."""
    pids: list[int] = []
    complete = True
    locked = _kernel_file_id(path)
    if locked is None:
        return pids, False
    for pid in procfs.all_pids():
        if process_uid(pid) != user:
            continue
        try:
            if any(_locked_file_id(pid, fd, b"FLOCK") == locked for fd in os.listdir(f"/proc/{pid}/fd")):
                pids.append(pid)
        except PermissionError:
            complete = False
        except OSError:  # it has ended
            continue
    return pids, complete


def _kernel_file_id(path: Path) -> bytes | None:
    """The name of the file in /proc; None: it shows no locks. It may differ from the device of `stat`, as with
    btrfs.
    """
    try:
        fd = open_plain(path, os.O_RDONLY)
    except OSError:
        return None
    try:
        fcntl.lockf(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)  # nobody else uses this kind of lock
        return _locked_file_id(os.getpid(), fd, b"POSIX")
    except OSError:
        return None
    finally:
        os.close(fd)


def _locked_file_id(pid: int, fd: int | str, kind: bytes) -> bytes | None:
    """The file on which this descriptor has a lock. `stat` of it would wait for a file system that is dead."""
    for line in procfs.read(f"/proc/{pid}/fdinfo/{fd}").splitlines():
        match line.split():
            case [b"lock:", _, found, _, _, _, file, *_] if found == kind:
                return file
    return None
