"""A lock that says that a process lives, and a process's identity that no other process ever has again.

They exist so that nobody is signalled by mistake: process ids come again, after a reboot all of them do. A lock is the
kernel's word, a process is named by its id, when it started, and the boot in which it did. Nothing here waits.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from elasticd_agent.system import procfs
from elasticd_agent.system.files import open_plain

OWNER_BYTES = 80
"""Always as long, so that a name is replaced by one write, and on a full disk, too."""


@dataclass(frozen=True, slots=True)
class ProcessIdentity:
    """`started` is in ticks since `boot`."""

    pid: int
    started: int
    boot: str

    @classmethod
    def of(cls, pid: int) -> ProcessIdentity | None:
        """The process that has this id now; None if there is none, or it only waits to be reaped."""
        stat = procfs.stat(pid)
        return None if stat is None or stat.state in ("Z", "X") else cls(pid, stat.started, boot_id())

    @property
    def alive(self) -> bool:
        return ProcessIdentity.of(self.pid) == self

    def __str__(self) -> str:
        return f"{self.pid} {self.started} {self.boot}"

    @classmethod
    def parse(cls, text: str) -> ProcessIdentity | None:
        """What `str` made, whatever else there may be."""
        words = text.split()
        if len(words) < 3 or not (words[0].isdecimal() and words[1].isdecimal()):
            return None
        return cls(int(words[0]), int(words[1]), words[2])


def boot_id() -> str:
    return procfs.read("/proc/sys/kernel/random/boot_id").decode("ascii", "replace").strip() or "unknown"


def take_lock(path: Path) -> int | None:
    """Lock `path`, in which our name is then. Returns a file descriptor that holds it; None: somebody else does.

    The lock lasts until every copy of the descriptor is closed, also one that a child has. Raises OSError, also where
    `path` leads elsewhere: its folder may be another user's, who would like to be given what is there.
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
    """Write into the locked file who has it: this process, or `pid`."""
    named = ProcessIdentity.of(os.getpid() if pid is None else pid)
    with contextlib.suppress(OSError):  # a full disk: the lock is what counts
        os.pwrite(fd, f"{named}\n".ljust(OWNER_BYTES).encode(), 0)


def is_locked(path: Path) -> bool:
    """True while a process has the lock at `path`, or while that cannot be told."""
    try:
        fd = open_plain(path, os.O_RDONLY)
    except FileNotFoundError:
        return False
    except OSError:
        return True
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return True
    finally:
        os.close(fd)
    return False


def lock_owner(path: Path) -> ProcessIdentity | None:
    """Who wrote its name there, if it lives, and is of the user whose file it is: nobody can name another's process."""
    try:
        with open(open_plain(path, os.O_RDONLY), "rb") as file:
            named = ProcessIdentity.parse(file.read(OWNER_BYTES).decode("ascii", "replace"))
            user = os.fstat(file.fileno()).st_uid
    except OSError:
        return None
    return named if named is not None and process_user(named.pid) == user and named.alive else None


def find_unnamed_owner(path: Path, name: bytes) -> ProcessIdentity | None:
    """Who has a lock that does not say so: of the processes that go by this name and have the file, the oldest."""
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
    """Whose process it is: the files in /proc of one that keeps secrets look like root's."""
    for line in procfs.read(f"/proc/{pid}/status").splitlines():
        if line.startswith(b"Uid:"):
            return int(line.split()[2])
    return None


def processes_with_open(path: Path) -> Iterator[int]:
    """Every process that has the file open, as far as we may look: who holds its lock is among them.

    Nobody, where there is a link instead: its folder's owner could name /dev/null, which everybody has open.
    """
    try:
        wanted = path.lstat()
    except OSError:
        return
    if not stat.S_ISREG(wanted.st_mode) or wanted.st_nlink != 1:
        return
    for pid in procfs.all_pids():
        with contextlib.suppress(OSError), os.scandir(f"/proc/{pid}/fd") as entries:
            for entry in entries:
                found = os.stat(entry.path)
                if (found.st_dev, found.st_ino) == (wanted.st_dev, wanted.st_ino):
                    yield pid
                    break
