"""The log directory: `round-<N>/rank-<R>/{stdout.log,stderr.log,error.json}`, one job at a time, nothing overwritten.

Round numbers only grow, within a job and, by `highest_round`, from one job to the next, so each restart gets its own
directory. Whole rounds are deleted, the oldest first, beyond KEEP_ROUNDS.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import re
import shutil
from pathlib import Path

from elasticd.errors import UsageError

# With two files of at most 128 MiB a rank this bounds the disk usage of a job that restarts for ever.
KEEP_ROUNDS = 100
LOCK = ".elasticd.lock"
_ROUND = re.compile(r"round-([1-9][0-9]*)")

_log = logging.getLogger("elasticd.logs")


class LogDirectory:
    """Locked by one job from construction to `close`. Several agents of the same job and run may share it."""

    def __init__(self, path: Path, job: str, run: str) -> None:
        """Creates `path` (0700). Raises UsageError if that fails, or another job writes there."""
        self.path = path
        self._fd = -1
        try:
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._fd = os.open(path / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except (OSError, ValueError) as error:
            why = error.strerror if isinstance(error, OSError) else str(error)
            raise UsageError(f"--log-dir {path}: logs cannot be written there: {why}") from error
        try:
            self._lock(job, run)
        except BaseException:
            self.close()
            raise

    def _lock(self, job: str, run: str) -> None:
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.pread(self._fd, 4096, 0).decode("utf-8", "replace").strip()
            if holder.rpartition(" pid ")[0] == _holder_name(job, run):
                return
            raise UsageError(
                f"--log-dir {self.path}: {holder or 'another job'} is writing its logs there; give each job its own"
            ) from None
        except OSError as error:
            if error.errno not in (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS):
                raise
            _log.warning("--log-dir %s: this file system has no locks; two jobs could mix their logs there", self.path)
            return
        os.ftruncate(self._fd, 0)
        os.pwrite(self._fd, f"{_holder_name(job, run)} pid {os.getpid()}\n".encode("utf-8", "replace"), 0)

    def rank_dir(self, number: int, rank: int) -> Path:
        return self.path / f"round-{number}" / f"rank-{rank}"

    def highest_round(self) -> int:
        return highest_round(self.path)

    def prune(self, keep: int, current: int) -> list[Path]:
        """Delete the oldest rounds beyond the newest `keep`, never `current` or newer. Returns the deleted paths."""
        old = [number for number in _rounds(self.path)[: -keep or None] if number < current]
        deleted = [self.path / f"round-{number}" for number in old]
        for path in deleted:
            shutil.rmtree(path, ignore_errors=True)
        return deleted

    def close(self) -> None:
        """Safe to call again."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def highest_round(path: Path) -> int:
    """The highest round with logs in `path`; 0 if there is none."""
    return max(_rounds(path), default=0)


def _rounds(path: Path) -> list[int]:
    try:
        names = os.listdir(path)
    except OSError:
        return []
    return sorted(int(found.group(1)) for found in map(_ROUND.fullmatch, names) if found)


def _holder_name(job: str, run: str) -> str:
    return f"job {job} run {run}"
