"""One directory, one job: a POSIX record lock on `.lock` in the checkpoint directory, which names (job, run).

Every process of one run shares it, so that a zombie never locks out its successor; another run is refused while any of
them holds it. The kernel releases it when its holder dies. POSIX locks belong to a process and end when it closes any
descriptor of the file: use one DirectoryLock per directory and process. The file is never deleted.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import logging
import os
import socket
import time
from pathlib import Path

from elasticd.checkpointing.storage.atomic_write import make_durable_directory
from elasticd.checkpointing.storage.object_store import store_of
from elasticd.errors import DirectoryInUse

logger = logging.getLogger("elasticd")

LOCK_NAME = ".lock"
_BUSY_ERRNOS = (errno.EACCES, errno.EAGAIN)  # POSIX allows either
_UNSUPPORTED_ERRNOS = (errno.ENOLCK, errno.ENOSYS, errno.EINVAL, errno.EOPNOTSUPP)
# A new holder locks exclusively only while it writes its name, for microseconds.
_TIMEOUT_S = 0.5
_PAUSE_S = 0.02
_MAX_LOCK_FILE_BYTES = 1 << 16


class DirectoryLock:
    """The lock of one directory. `unlocked` is the reason why the file system gave none, else None."""

    def __init__(self, directory: str | os.PathLike[str], job: str, run: str, claims: bool = True) -> None:
        """`claims`: an object store, too; the agent does that in a process of its own."""
        self._claims = claims
        self._path = Path(directory) / LOCK_NAME
        self._own = {"job": job, "run": run}
        self._fd: int | None = None
        self.unlocked: str | None = None

    def acquire(self) -> None:
        """Take the lock; DirectoryInUse names another run's holder. Without locks on the file system it only warns.

        Of an object store also claim it, which takes it from a run that has not released it. Raises OSError.
        """
        if self._fd is not None:
            return
        make_durable_directory(self._path.parent)
        # Not through a link: root may prune the directory of a user, who could point it at a file of others.
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        try:
            fd = os.open(self._path, flags | os.O_EXCL, 0o600)
            is_new = True
        except FileExistsError:
            fd, is_new = os.open(self._path, flags, 0o600), False
        try:
            if is_new and os.geteuid() == 0:  # the jobs of the directory's user have to open it, too
                owner = os.stat(self._path.parent)
                with contextlib.suppress(OSError):  # root of another machine or container
                    os.fchown(fd, owner.st_uid, owner.st_gid)
            self._lock(fd)
        except BaseException:
            os.close(fd)
            raise
        self._fd = fd
        if self._claims and (store := store_of(self._path.parent)) is not None:
            try:
                taken = store.claim(self._own["job"], self._own["run"])
            except BaseException:
                self.release()
                raise
            if taken:
                logger.warning(taken)

    def release(self) -> None:
        """Release it; the name stays in the file and means nothing without the lock."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None

    def release_store(self) -> None:
        """The run has ended: the next one takes the object store without a warning."""
        store = store_of(self._path.parent)
        if store is not None and self._fd is not None:
            with contextlib.suppress(OSError):
                store.release(self._own["job"], self._own["run"])

    def _lock(self, fd: int) -> None:
        deadline = time.monotonic() + _TIMEOUT_S
        try:
            while not self._try_lock(fd):
                if time.monotonic() >= deadline:
                    raise self._in_use_error(fd)
                time.sleep(_PAUSE_S)
        except OSError as error:
            if error.errno not in _UNSUPPORTED_ERRNOS:
                raise
            self.unlocked = (
                f"{self._path.parent}: this file system has no locks ({error.strerror}); nothing keeps a second job "
                "out of the directory, so make sure that only one uses it"
            )
            logger.warning(self.unlocked)

    def _try_lock(self, fd: int) -> bool:
        """One attempt. The exclusive lock means that the directory is free: write our name, then share the lock."""
        if _try_lockf(fd, fcntl.LOCK_EX):
            host, pid = socket.gethostname(), os.getpid()
            line = json.dumps({"version": "1.0", **self._own, "host": host, "pid": pid}).encode() + b"\n"
            os.pwrite(fd, line, 0)
            os.ftruncate(fd, len(line))
            # The change of an exclusive lock into a shared one is atomic.
            return _try_lockf(fd, fcntl.LOCK_SH)
        if not _try_lockf(fd, fcntl.LOCK_SH):
            return False
        # While any process shares the lock the name does not change.
        holder = _read_holder(fd)
        if all(holder.get(key) == value for key, value in self._own.items()):
            return True
        fcntl.lockf(fd, fcntl.LOCK_UN)
        return False

    def _in_use_error(self, fd: int) -> DirectoryInUse:
        holder = _read_holder(fd)
        who = "run {run!r} of job {job!r} (first process {pid} on {host})" if holder else "another run"
        error = DirectoryInUse(
            f"checkpoint directory {self._path.parent} is held by {who.format(**holder)}; this is run "
            f"{self._own['run']!r} of job {self._own['job']!r}. Wait for it to end, stop it, or use another directory"
        )
        error.holder = holder
        return error


def _try_lockf(fd: int, kind: int) -> bool:
    try:
        fcntl.lockf(fd, kind | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in _BUSY_ERRNOS:
            return False
        raise
    return True


def _read_holder(fd: int) -> dict[str, str]:
    try:
        claim = json.loads(os.pread(fd, _MAX_LOCK_FILE_BYTES, 0))
        return {key: str(claim[key]) for key in ("job", "run", "host", "pid")}
    except (ValueError, KeyError, TypeError):
        return {}
