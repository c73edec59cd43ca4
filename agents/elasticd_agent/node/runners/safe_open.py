"""Opens what lies in a folder that may be another user's: plain files that have one name, at once or not at all.

It exists so that a job's user can lead neither root's pen nor root's eyes elsewhere, nor have the agent wait: a link, a
second name of somebody else's file and a pipe that nobody writes to are errors. It looks at nothing above the file.
"""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path


def open_plain(path: Path | str, flags: int, *, dir_fd: int | None = None) -> int:
    """A file descriptor; a file that is made is 0600. `within`: the directory's. Raises OSError."""
    flags |= os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
    fd = os.open(path, flags, 0o600, dir_fd=dir_fd)
    try:
        found = os.fstat(fd)
        if not stat.S_ISREG(found.st_mode):
            raise OSError(errno.EINVAL, "it is no plain file", str(path))
        if found.st_nlink != 1:
            raise OSError(errno.EMLINK, "it has another name, too", str(path))
    except BaseException:
        os.close(fd)
        raise
    return fd


def read_plain(path: Path, max_bytes: int, *, own_only: bool = False) -> bytes:
    """All of it. `ours`: nobody else may have written it. Raises OSError, also for more than `most` bytes."""
    with open(open_plain(path, os.O_RDONLY), "rb") as file:
        found = os.fstat(file.fileno())
        if own_only and found.st_uid != os.geteuid():
            raise OSError(errno.EPERM, f"user {found.st_uid} has written it", str(path))
        if found.st_size > max_bytes:
            raise OSError(errno.EFBIG, f"it has more than {max_bytes} bytes", str(path))
        return file.read(max_bytes)
