"""Whether a process is alive: a lock that it holds, and an identity that no other process ever has.

Pids are assigned again, after a reboot all of them, so a process is identified by pid, start time and boot id; the lock
is released by the kernel. No other process is ever signalled by mistake. No function waits.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import stat
from dataclasses import dataclass
from pathlib import Path

from elasticd_agent.system import procfs
from elasticd_agent.system.files import open_plain

OWNER_BYTES = 80
"""A constant length, so that one write replaces an identity, also on a full disk."""
REASON_BYTES = 2000
"""After the identity: why the agent stops the owner, in one line."""


@dataclass(frozen=True, slots=True)
class ProcessIdentity:
    """`started` is in ticks since `boot`."""

    pid: int
    started: int
    boot: str

    @classmethod
    def of(cls, pid: int) -> ProcessIdentity | None:
        """The process with this pid; None if there is none, or a zombie."""
        stat = procfs.stat(pid)
        return None if stat is None or stat.state in ("Z", "X") else cls(pid, stat.started, boot_id())

    @property
    def alive(self) -> bool:
        return ProcessIdentity.of(self.pid) == self

    def __str__(self) -> str:
        return f"{self.pid} {self.started} {self.boot}"

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
        _write(path, f"{named}\n".ljust(OWNER_BYTES).encode(), 0)


def write_reason(path: Path, why: str) -> None:
    """Write into the lock why its owner gets a SIGTERM; "": nobody wants it to end. Raises OSError."""
    line = " ".join(why.split()).encode()[: REASON_BYTES - 1] + b"\n"
    _write(path, line, OWNER_BYTES)


def read_reason(lock: int) -> str:
    """What `write_reason` wrote; "" if nothing."""
    with contextlib.suppress(OSError):
        line, newline, _ = os.pread(lock, REASON_BYTES, OWNER_BYTES).partition(b"\n")
        return line.decode(errors="replace") if newline else ""
    return ""


def _write(path: Path, data: bytes, offset: int) -> None:
    fd = open_plain(path, os.O_WRONLY)
    try:
        os.pwrite(fd, data, offset)
    finally:
        os.close(fd)


def is_locked(path: Path, *, exclusive: bool = False) -> bool:
    """True while a process has the lock, with `exclusive` also a shared one, or if that cannot be determined."""
    flags = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
    try:
        fd = os.open(path, flags | (os.O_RDWR if exclusive else os.O_RDONLY))
    except OSError as error:
        return error.errno not in (errno.ENOENT, errno.ELOOP, errno.ENXIO)
    try:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            return False
        fcntl.flock(fd, (fcntl.LOCK_EX if exclusive else fcntl.LOCK_SH) | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(fd)
    return False


def lock_owner(path: Path) -> ProcessIdentity | None:
    """The process named in the file, if it is alive."""
    try:
        with open(open_plain(path, os.O_RDONLY), "rb") as file:
            named = ProcessIdentity.parse(file.read(OWNER_BYTES).decode("ascii", "replace"))
    except OSError:
        return None
    return named if named is not None and named.alive else None


def find_unnamed_owner(path: Path, name: bytes, user: int) -> tuple[ProcessIdentity | None, bool]:
    """The owner of a lock without an identity: the oldest process of this name and user that has the file open.

    False: there may be one at which we may not look.
    """
    pids, complete = processes_with_open(path)
    found = [pid for pid in pids if process_user(pid) == user and procfs.read(f"/proc/{pid}/comm").strip() == name]
    named = [process for process in map(ProcessIdentity.of, found) if process is not None]
    return min(named, key=lambda process: process.started, default=None), complete


def process_user(pid: int) -> int | None:
    """A process's user: the files in /proc of a process with secrets belong to root."""
    for line in procfs.read(f"/proc/{pid}/status").splitlines():
        if line.startswith(b"Uid:"):
            return int(line.split()[2])
    return None


def processes_with_open(path: Path) -> tuple[list[int], bool]:
    """Every process that has the file open, the lock's owner among them; False: we may not look at all processes."""
    pids: list[int] = []
    complete = True
    try:
        locked = path.lstat()
    except OSError:
        return pids, False
    for pid in procfs.all_pids():
        try:
            with os.scandir(f"/proc/{pid}/fd") as entries:
                if any(_is_file(entry.path, locked) for entry in entries):
                    pids.append(pid)
        except PermissionError:
            complete = False
        except OSError:  # it has ended
            continue
    return pids, complete


def _is_file(fd: str, file: os.stat_result) -> bool:
    try:
        found = os.stat(fd)
    except OSError:  # closed meanwhile
        return False
    return (found.st_dev, found.st_ino) == (file.st_dev, file.st_ino)
