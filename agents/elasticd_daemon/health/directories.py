"""Is this directory writable, with free space? It runs in a process of its own, since a dead mount may never answer.

The test file has no name and so leaves nothing behind; it has a name of its own on file systems without O_TMPFILE.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import time

from elasticd_daemon.health.result import CheckResult, directory_full, failed, passed

MIN_FREE_INODES = 1000
"""A round of a job makes a few dozen files. File systems without inodes report 0 of 0."""
LARGEST_JOB_TIMEOUT_S = 0.5
"""The time to find the job that has most of a full state directory: the check must end in time."""
TEST_DATA = b"\0" * 4096
"""One page, synced: a full file system may still accept data that fits into the inode."""


def check_directory(check: str, directory: str, free_min_bytes: float, may_be_missing: bool = False) -> CheckResult:
    """`may_be_missing`: its user creates it, so while it is missing its parent counts."""
    while may_be_missing and not os.path.lexists(directory) and os.path.dirname(directory) != directory:
        directory = os.path.dirname(directory)
    try:
        if not stat.S_ISDIR(os.stat(directory).st_mode):
            return failed(check, f"{directory} is not a directory")
        room = os.statvfs(directory)
    except OSError as error:
        return failed(check, f"{directory} cannot be read: {_os_error(error)}")
    free = room.f_bavail * room.f_frsize
    if room.f_flag & os.ST_RDONLY:
        return failed(
            check, f"{directory} is mounted read-only; the kernel also does that after disk errors: see dmesg"
        )
    if free < free_min_bytes:
        why = f"{directory} has {format_size(free)} free, less than {format_size(free_min_bytes)}"
        return directory_full(check, why + describe_largest_job(directory))
    if room.f_files > 0 and room.f_favail < min(MIN_FREE_INODES, room.f_files / 2):
        return directory_full(check, f"{directory} has {room.f_favail} of {room.f_files} inodes left: too many files")
    try:
        try_write(directory)
    except OSError as error:
        if error.errno in (errno.EACCES, errno.EPERM) and os.geteuid() == 0:  # only a file server denies root
            return passed(
                check, f"{format_size(free)} free; root cannot test whether users can write there (root_squash)"
            )
        why = f"{directory} is not writable: {_os_error(error)}"
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            return directory_full(check, why + describe_largest_job(directory))
        return failed(check, why)
    return passed(check, f"{format_size(free)} free, writable")


def describe_largest_job(directory: str) -> str:
    """Which job has most of the agent's state directory, and its user; "" of another directory. It takes at most
    LARGEST_JOB_TIMEOUT_S.
    """
    until = time.monotonic() + LARGEST_JOB_TIMEOUT_S
    most, which = 0, ""
    try:
        with os.scandir(os.path.join(directory, "jobs")) as jobs:
            for job in jobs:
                size, user = _tree_bytes(job.path, until), job.stat(follow_symlinks=False).st_uid
                if size > most:
                    most, which = size, f"; most of it, {format_size(size)}, has job {job.name} of uid {user}"
    except OSError:
        pass
    return which


def _tree_bytes(path: str, until: float) -> int:
    """The space of the files below `path`, as far as it can be added up in time: there may be a million folders."""
    size = 0
    for folder, _, names in os.walk(path):
        for name in ("", *names):
            if time.monotonic() > until:
                return size
            with contextlib.suppress(OSError):  # it has just been removed
                size += os.lstat(os.path.join(folder, name)).st_blocks * 512
    return size


def try_write(directory: str) -> None:
    """Raises OSError."""
    path = os.path.join(directory, f".elasticd-health-{os.uname().nodename}")
    try:
        fd = os.open(directory, os.O_TMPFILE | os.O_WRONLY | os.O_CLOEXEC, 0o600)
    except OSError as error:
        # NFS and FUSE answer EOPNOTSUPP; kernels without the flag for a file system EISDIR.
        if error.errno not in (errno.EOPNOTSUPP, errno.EISDIR, errno.EINVAL):
            raise
        _remove(path)  # of an interrupted check
        fd = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o600)
        _remove(path)
    try:
        if os.write(fd, TEST_DATA) < len(TEST_DATA):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        os.fsync(fd)
    finally:
        os.close(fd)


def format_size(count: float) -> str:
    """ "1.5 GiB"; 1G in configuration files is 1.0 GiB."""
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if count >= 10 or unit == "bytes" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"


def _remove(path: str) -> None:
    try:
        os.unlink(path)
    except FileNotFoundError:
        pass


def _os_error(error: OSError) -> str:
    return error.strerror or str(error)
