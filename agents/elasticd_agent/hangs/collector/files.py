"""Files of the helper: written whole and 0600, published to the log directory, and rotated there.

Logs are read without waiting: a log may be a FIFO, a terminal or a device, so only plain files are read, and opening
one never blocks. A file system that does not answer blocks its caller, which is why all this runs in a process that can
be killed. Whole `round-N/evidence` directories beyond the newest ones are removed, and nothing else.
"""

from __future__ import annotations

import errno
import os
import re
import shutil
import stat
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from elasticd_agent.hangs.collector.request import FilePath, PublishRequest

PART_SUFFIX = ".part"
MAX_LOG_LINES = 200
MAX_LOG_BYTES = 64 << 10
"""The part of a log's end that is read: 200 lines of 320 characters."""
MAX_LINE_BYTES = 2000
_ROUND_NAME = re.compile(r"round-([1-9][0-9]*)")
_MAX_FILE_BYTES = 1 << 30


def write_atomically(path: str, content: bytes) -> None:
    """Make or replace the file atomically. Raises OSError, and leaves no part of it on a disk that is full."""
    part = f"{path}{PART_SUFFIX}"
    fd = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        left = memoryview(content)
        while left:
            left = left[os.write(fd, left) :]
        os.replace(part, path)
    except OSError:
        with suppress(OSError):
            os.unlink(part)
        raise
    finally:
        os.close(fd)


def read_plain_file(path: FilePath, most: int, *, tail: bool = False) -> bytes:
    """The first or last `most` bytes of a plain file. Raises OSError, also for what is no plain file."""
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY)
    try:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            raise OSError(f"{path} is no plain file")
        return os.pread(fd, most, max(0, status.st_size - most) if tail else 0)
    finally:
        os.close(fd)


def last_lines(paths: Sequence[FilePath]) -> list[str]:
    """The end of each log, behind its name if several have content."""
    parts = []
    for path in dict.fromkeys(paths):
        try:
            data = read_plain_file(path, MAX_LOG_BYTES, tail=True)
        except OSError as error:
            data = f"[elasticd: not read: {error.strerror or error}]".encode()
        lines = [line[:MAX_LINE_BYTES].decode("utf-8", "replace") for line in data.splitlines()[-MAX_LOG_LINES:]]
        parts += [(path, lines)] if lines else []
    return parts[0][1] if len(parts) == 1 else [line for path, lines in parts for line in (f"==> {path} <==", *lines)]


def publish(request: PublishRequest) -> None:
    """Raises OSError."""
    final = Path(request.final)
    make_private_directory(final)
    if request.source:
        for path in _complete_files(Path(request.source)):
            write_atomically(str(final / path.name), read_plain_file(str(path), _MAX_FILE_BYTES))
    if request.file is not None:
        name, text = request.file
        write_atomically(str(final / name), text.encode("utf-8", "surrogateescape"))
    if request.rounds > 0:
        remove_old_rounds(final, request.rounds)


def _complete_files(source: Path) -> list[Path]:
    """Complete files, the small ones first: there may be no time for a flight recording."""
    with os.scandir(source) as listing:
        entries = [e for e in listing if e.is_file(follow_symlinks=False) and not e.name.endswith(PART_SUFFIX)]
        return [Path(entry.path) for entry in sorted(entries, key=lambda entry: entry.stat().st_size)]


def make_private_directory(directory: Path) -> None:
    """The directory and those above it, 0700. Raises OSError.

    In a directory that all users may write to, such as /tmp, a directory or link of another user is refused.
    """
    for path in (*reversed(directory.parents), directory):
        try:
            path.mkdir(mode=0o700)
        except FileExistsError:
            status = os.lstat(path)
            if os.stat(path.parent).st_mode & stat.S_IWOTH and (
                status.st_uid not in (os.geteuid(), 0) or stat.S_ISLNK(status.st_mode)
            ):
                raise PermissionError(errno.EPERM, f"{path} belongs to another user, or is a link") from None
        except OSError:  # read-only, for example
            if not path.exists():
                raise
    if not directory.is_dir():
        raise NotADirectoryError(errno.ENOTDIR, f"{directory} is no directory")


def remove_old_rounds(final: Path, rounds: int) -> list[Path]:
    """Remove the directories of `final`'s name of all but the newest `rounds` rounds that have one. Returns those."""
    if _ROUND_NAME.fullmatch(final.parent.name) is None:
        return []
    have = {}
    for name in os.listdir(final.parent.parent):
        round_name = _ROUND_NAME.fullmatch(name)
        path = final.parent.parent / name / final.name
        if round_name is not None and path.is_dir() and not path.is_symlink():
            have[int(round_name[1])] = path
    old = [have[number] for number in sorted(have)[:-rounds] if have[number] != final]
    for path in old:
        shutil.rmtree(path, ignore_errors=True)
    return old
