"""Files of the helper: evidence is written whole and 0600, logs are read without waiting.

A log may be a FIFO, a terminal or a device: only plain files are read, and opening one never blocks. A file system that
does not answer blocks its caller, which is why all this runs in a process that can be killed.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Sequence
from contextlib import suppress

from elasticd_agent.hangs.collector.request import FilePath

PART = ".part"
LOG_LINES = 200
LOG_BYTES = 256 << 10
"""Of a log's end: 200 lines of 1,300 characters."""
LINE_LIMIT = 2000


def write(path: str, content: bytes) -> None:
    """Make or replace the file atomically. Raises OSError, and leaves no part of it on a disk that is full."""
    part = f"{path}{PART}"
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


def read(path: FilePath, most: int, *, tail: bool = False) -> bytes:
    """The first or last `most` bytes of a plain file. Raises OSError, also for what is no plain file."""
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY)
    try:
        found = os.fstat(fd)
        if not stat.S_ISREG(found.st_mode):
            raise OSError(f"{path} is no plain file")
        return os.pread(fd, most, max(0, found.st_size - most) if tail else 0)
    finally:
        os.close(fd)


def last_lines(paths: Sequence[FilePath]) -> bytes:
    """The end of each log, behind its name if several have content."""
    parts = []
    for path in dict.fromkeys(paths):
        try:
            data = read(path, LOG_BYTES, tail=True)
        except OSError as error:
            data = f"[elasticd: not read: {error.strerror or error}]\n".encode()
        lines = data.splitlines()[-LOG_LINES:]
        if lines:
            parts.append((path, b"".join(line[:LINE_LIMIT] + b"\n" for line in lines)))
    if len(parts) == 1:
        return parts[0][1]
    return b"".join(f"==> {path} <==\n".encode("utf-8", "surrogateescape") + text for path, text in parts)
