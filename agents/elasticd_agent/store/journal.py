"""A file of lines that were really written: appended and fsynced one by one, replaced as a whole, read after any crash.

It exists so that what is kept on this machine survives kill -9, a power cut, a full disk and bits that rot. Each line
carries a checksum. What a crash left half written at the end is cut off; what is damaged elsewhere is left out, and the
damaged file is set aside for people. It knows nothing of what its lines say.
"""

from __future__ import annotations

import fcntl
import os
import zlib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from elasticd.errors import StoreRefused, StoreUnavailable

_KIND = b"elasticd journal "
HEADER = _KIND + b"1"
MAX_DAMAGED_FILES = 9
"""So many damaged files are kept at most; the last one is replaced after that."""


@dataclass(frozen=True, slots=True)
class JournalContents:
    """What was in the file. `torn`: bytes of a line that was never finished; `bad`: lines that cannot be read."""

    lines: tuple[bytes, ...] = ()
    torn_bytes: int = 0
    bad_lines: int = 0


class Journal:
    """Thread-unsafe. One process at a time: `path`.lock is held for as long as this is open.

    Raises StoreRefused at opening (another process has it, another version wrote it, it cannot be opened at all), and
    StoreUnavailable when something cannot be written; the next try begins with a new file then.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = _lock(path.with_name(path.name + ".lock"))
        self._fd: int | None = None
        self.size = 0
        try:
            self.contents = _read(path)
        except BaseException:
            self.close()
            raise

    def append(self, line: bytes) -> bool:
        """True once the line is on the disk. False: there is no sound file to add to; `replace` makes one."""
        if self._fd is None:
            return False
        data = _frame(line)
        try:
            _write(self._fd, data)
            os.fdatasync(self._fd)
        except OSError as error:
            self._discard_unfinished_line()
            raise StoreUnavailable(f"{self._path} cannot be written: {error.strerror}") from error
        self.size += len(data)
        return True

    def replace(self, lines: Iterable[bytes]) -> None:
        """Make these lines the whole file, at once or not at all."""
        new = self._path.with_name(self._path.name + ".new")
        data = b"".join(map(_frame, (HEADER, *lines)))
        fd = -1
        try:
            fd = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND | os.O_CLOEXEC, 0o600)
            _write(fd, data)
            os.fsync(fd)
            os.replace(new, self._path)
            _sync_directory(self._path.parent)
        except OSError as error:
            if fd >= 0:
                os.close(fd)
            self._discard_unfinished_line()
            raise StoreUnavailable(f"{self._path} cannot be written: {error.strerror}") from error
        self._close_file()
        self._fd, self.size = fd, len(data)

    def keep_damaged_file(self) -> Path:
        """Keep the file as it is now, for people, under another name."""
        names = [
            self._path.with_name(f"{self._path.name}.damaged-{number}") for number in range(1, MAX_DAMAGED_FILES + 1)
        ]
        aside = next((name for name in names if not name.exists()), names[-1])
        try:
            os.replace(self._path, aside)
        except OSError as error:
            raise StoreRefused(f"{self._path} is damaged and cannot be set aside: {error.strerror}") from None
        return aside

    def close(self) -> None:
        self._close_file()
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    def _discard_unfinished_line(self) -> None:
        """Whether it was written is not known: the line must not come back by itself if that can be helped."""
        if self._fd is not None:
            try:
                os.ftruncate(self._fd, self.size)
            except OSError:
                pass  # the next `replace` makes a new file anyway
        self._close_file()

    def _close_file(self) -> None:
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None


def _lock(path: Path) -> int:
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise StoreRefused(f"{path} cannot be opened: {error.strerror}") from None
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(fd)
        raise StoreRefused(f"{path.parent} is in use by another agent; give each its own state_dir ({error})") from None
    return fd


def _read(path: Path) -> JournalContents:
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return JournalContents()
    except OSError as error:
        raise StoreRefused(f"{path} cannot be read: {error.strerror}") from None
    *whole, rest = data.split(b"\n")
    lines = [_unframe(line) for line in whole]
    first = lines[0] if lines else None
    if first is not None and first != HEADER and first.startswith(_KIND):
        raise StoreRefused(f"{path} was written by another version of elasticd: {first.decode(errors='replace')}")
    good = tuple(line for line in lines if line is not None and line != HEADER)
    # It always came into being whole, with its header: without one it is not ours any more.
    headless = bool(data) and first is not None and first != HEADER
    return JournalContents(good, len(rest), lines.count(None) + headless + (bool(data) and not lines))


def _frame(line: bytes) -> bytes:
    return b"%08x %s\n" % (zlib.crc32(line), line)


def _unframe(line: bytes) -> bytes | None:
    checksum, space, text = line[:8], line[8:9], line[9:]
    return text if space == b" " and checksum == b"%08x" % zlib.crc32(text) else None


def _write(fd: int, data: bytes) -> None:
    while data:
        data = data[os.write(fd, data) :]


def _sync_directory(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
