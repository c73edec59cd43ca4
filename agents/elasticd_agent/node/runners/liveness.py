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
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from elasticd_agent.system import procfs
from elasticd_agent.system.files import open_plain

OWNER_BYTES = 80
"""A constant length, so that one write replaces an identity, also on a full disk."""


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

    The lock lasts until every copy of the descriptor is closed, also a child's. Raises OSError, also for a link: the
    folder may belong to another user, who could point it at a file of ours.
    """
    fd = open_plain(path, os.O_RDWR | os.O_CREAT)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        write_owner(fd)
    except BlockingIOError:
        os.close(fd)
        return None
    except BaseException:
        os.close(fd)
        raise
    return fd


def write_owner(fd: int, pid: int | None = None) -> None:
    """Write the owner's identity into the locked file: this process, or `pid`."""
    named = ProcessIdentity.of(os.getpid() if pid is None else pid)
    with contextlib.suppress(OSError):  # a full disk: the lock is sufficient
        os.pwrite(fd, f"{named}\n".ljust(OWNER_BYTES).encode(), 0)


def is_locked(path: Path, *, exclusive: bool = False) -> bool:
    """True while a process has the lock, with `exclusive` also a shared one, or if that cannot be determined.

    Something else in the lock's place is no lock: a job's user may put it there, to keep the job's slots for ever.
    """
    flags = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
    try:
        fd = os.open(path, flags | (os.O_RDWR if exclusive else os.O_RDONLY))
    except OSError as error:
        return error.errno not in (errno.ENOENT, errno.ELOOP, errno.ENXIO)
    try:
        found = os.fstat(fd)
        if not stat.S_ISREG(found.st_mode) or found.st_uid != path.parent.stat().st_uid:
            return False
        fcntl.flock(fd, (fcntl.LOCK_EX if exclusive else fcntl.LOCK_SH) | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(fd)
    return False


def lock_owner(path: Path) -> ProcessIdentity | None:
    """The process named in the file, if it is alive and of the file's owner: nobody can name another user's process."""
    try:
        with open(open_plain(path, os.O_RDONLY), "rb") as file:
            named = ProcessIdentity.parse(file.read(OWNER_BYTES).decode("ascii", "replace"))
            user = os.fstat(file.fileno()).st_uid
    except OSError:
        return None
    return named if named is not None and process_user(named.pid) == user and named.alive else None


def find_unnamed_owner(path: Path, name: bytes) -> ProcessIdentity | None:
    """The owner of a lock without an identity: the oldest process of this name that has the file open."""
    try:
        owner = path.stat().st_uid
    except OSError:
        return None
    found = [
        pid
        for pid in processes_with_open(path)
        if process_user(pid) == owner and procfs.read(f"/proc/{pid}/comm").strip() == name
    ]
    named = [process for process in map(ProcessIdentity.of, found) if process is not None]
    return min(named, key=lambda process: process.started, default=None)


def process_user(pid: int) -> int | None:
    """A process's user: the files in /proc of a process with secrets belong to root."""
    for line in procfs.read(f"/proc/{pid}/status").splitlines():
        if line.startswith(b"Uid:"):
            return int(line.split()[2])
    return None


def processes_with_open(path: Path) -> Iterator[int]:
    """Every process that has the file open, as far as we may look; the lock's owner is among them.

    None for a link: the folder's owner could link to /dev/null, which every process has open. A second name of the file
    hides none of them.
    """
    try:
        locked = path.lstat()
    except OSError:
        return
    if not stat.S_ISREG(locked.st_mode):
        return
    for pid in procfs.all_pids():
        with contextlib.suppress(OSError), os.scandir(f"/proc/{pid}/fd") as entries:
            for entry in entries:
                found = os.stat(entry.path)
                if (found.st_dev, found.st_ino) == (locked.st_dev, locked.st_ino):
                    yield pid
                    break
