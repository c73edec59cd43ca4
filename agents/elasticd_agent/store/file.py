"""A MemoryStore whose contents survive its process: the store of a node without a store on the network.

Every change of a key without a lease is on the disk before the call returns. Keys under a lease do not survive: this
process held their leases. A disk that is full or broken is StoreUnavailable, and nothing has changed then.

The file is a journal of lines, each with a checksum, appended and synced one by one and replaced as a whole. After kill
-9, a power cut or a full disk an unfinished line at its end is cut off; damaged lines elsewhere are left out, and the
damaged file is kept for people.
"""

from __future__ import annotations

import base64
import fcntl
import json
import os
import time
import zlib
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from elasticd.errors import StoreRefused, StoreUnavailable
from elasticd_agent.store.memory import MemoryStore, _Entry, _MemoryLease

RESERVED_VERSIONS = 10_000
"""Reserved at once: versions of leased keys are not on the disk, but must not be used again after a restart."""
COMPACTION_SLACK_BYTES = 256 * 1024
"""The journal is rewritten once it is this much longer than twice its contents."""
MAX_DAMAGED_FILES = 9
"""Damaged files that are kept; the last one is replaced after that."""
_KIND = b"elasticd journal "
HEADER = _KIND + b"1"


class FileStore(MemoryStore):
    """Thread-safe. `log` receives one sentence if the file is damaged. Raises StoreRefused if it cannot be used."""

    def __init__(
        self,
        path: Path,
        clock: Callable[[], float] = time.monotonic,
        *,
        log: Callable[[str], None] = lambda sentence: None,
    ) -> None:
        super().__init__(clock)
        self._journal = Journal(path)
        self._closed = False
        self._reserved = 0
        self._written = 0
        try:
            self._restore(path, log)
            self._rewrite(self._entries)
        except StoreUnavailable as error:
            log(f"{error}; nothing can be changed until that is repaired")
        except BaseException:
            self._journal.close()
            raise

    def close(self) -> None:
        with self._lock:
            super().close()
            self._closed = True
            self._journal.close()

    def _set(self, key: str, value: bytes, lease: _MemoryLease | None) -> int:
        version = self._version + 1
        if version > self._reserved:
            self._persist(_line("versions", version + RESERVED_VERSIONS), self._entries)
            self._reserved = version + RESERVED_VERSIONS
        if lease is None:
            entry = _Entry(value, version, None)
            self._persist(_set_line(key, entry), {**self._entries, key: entry})
        else:
            self._persist_removal(key)
        return super()._set(key, value, lease)

    def _drop(self, key: str) -> bool:
        self._persist_removal(key)
        return super()._drop(key)

    def _persist_removal(self, key: str) -> None:
        entry = self._entries.get(key)
        if entry is not None and entry.lease is None:
            self._persist(_line("drop", key), {k: e for k, e in self._entries.items() if k != key})

    def _persist(self, line: bytes, afterwards: Mapping[str, _Entry]) -> None:
        """Write one change, which leads to `afterwards`. Raises StoreUnavailable."""
        if self._closed:
            raise StoreUnavailable("the store has been closed")
        if not self._journal.append(line):
            self._rewrite(afterwards)
        elif self._journal.size > 2 * self._written + COMPACTION_SLACK_BYTES:
            try:
                self._rewrite(afterwards)
            except StoreUnavailable:
                pass  # the change is on the disk; the next one reports the failure

    def _rewrite(self, entries: Mapping[str, _Entry]) -> None:
        reserved = self._version + 1 + RESERVED_VERSIONS
        lines = [_set_line(key, entry) for key, entry in sorted(entries.items()) if entry.lease is None]
        self._journal.replace([_line("versions", reserved), *lines])
        self._reserved = reserved
        self._written = self._journal.size

    def _restore(self, path: Path, log: Callable[[str], None]) -> None:
        bad = self._journal.bad_lines
        for line in self._journal.lines:
            try:
                self._replay(json.loads(line))
            except (ValueError, TypeError, KeyError, RecursionError):
                bad += 1
        if bad:
            damaged = self._journal.keep_damaged_file()
            log(
                f"{path} is damaged: {bad} of its lines cannot be read and {len(self._entries)} records are left; "
                f"the file is kept as {damaged.name}"
            )

    def _replay(self, change: Any) -> None:
        match change:
            case ["set", str(key), int(version), value]:
                raw = value.encode() if isinstance(value, str) else base64.b64decode(value["base64"], validate=True)
                self._entries[key] = _Entry(raw, version, None)
                self._version = max(self._version, version)
            case ["drop", str(key)]:
                self._entries.pop(key, None)
            case ["versions", int(version)]:  # no version up to this one may be used again
                self._version = max(self._version, version)
            case _:
                raise ValueError(f"not a line of a journal: {change!r}")


def _set_line(key: str, entry: _Entry) -> bytes:
    try:
        value: object = entry.value.decode()
    except UnicodeDecodeError:
        value = {"base64": base64.b64encode(entry.value).decode()}
    return _line("set", key, entry.version, value)


def _line(*change: object) -> bytes:
    return json.dumps(change, separators=(",", ":")).encode()


class Journal:
    """The file. Not thread-safe. One process at a time: `path`.lock is locked while this is open.

    Opening raises StoreRefused: another process has the file, another version wrote it, or it cannot be opened. Writing
    raises StoreUnavailable; the next attempt begins with a new file then.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = _lock(path.with_name(path.name + ".lock"))
        self._fd: int | None = None
        self.size = 0
        self.lines: list[bytes] = []
        """The intact lines at opening."""
        self.bad_lines = 0
        try:
            self._read()
        except BaseException:
            self.close()
            raise

    def append(self, line: bytes) -> bool:
        """True once the line is on the disk. False: there is no intact file to append to; `replace` creates one."""
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
        """Make these lines the whole file, atomically."""
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
        self._fd = fd
        self.size = len(data)

    def keep_damaged_file(self) -> Path:
        """Rename the file, for people."""
        names = [self._path.with_name(f"{self._path.name}.damaged-{n}") for n in range(1, MAX_DAMAGED_FILES + 1)]
        name = next((name for name in names if not name.exists()), names[-1])
        try:
            os.replace(self._path, name)
        except OSError as error:
            raise StoreRefused(f"{self._path} is damaged and cannot be renamed: {error.strerror}") from None
        return name

    def close(self) -> None:
        self._close_file()
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    def _read(self) -> None:
        try:
            data = self._path.read_bytes()
        except FileNotFoundError:
            return
        except OSError as error:
            raise StoreRefused(f"{self._path} cannot be read: {error.strerror}") from None
        if not data:
            return
        lines = [_unframe(line) for line in data.split(b"\n")[:-1]]  # without an unfinished line at the end
        first = lines[0] if lines else b""
        if first is not None and first != HEADER and first.startswith(_KIND):
            version = first.decode(errors="replace")
            raise StoreRefused(f"{self._path} was written by another version of elasticd: {version}")
        self.lines = [line for line in lines if line is not None and line != HEADER]
        # A file is created whole, with its header: without one it is foreign.
        self.bad_lines = lines.count(None) + (first is not None and first != HEADER)

    def _discard_unfinished_line(self) -> None:
        """Cut off a line of which nobody knows if it was written: it must not reappear."""
        if self._fd is not None:
            try:
                os.ftruncate(self._fd, self.size)
            except OSError:
                pass  # the next `replace` creates a new file anyway
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


def _frame(line: bytes) -> bytes:
    return b"%08x %s\n" % (zlib.crc32(line), line)


def _unframe(line: bytes) -> bytes | None:
    """None: the line is damaged."""
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
