"""A MemoryStore whose contents survive its process, in SQLite: the store of a node without one on the network.

Every change of a key without a lease is on the disk before the call returns. Keys under a lease do not survive: this
process held their leases. While the disk is full or broken, a change is StoreUnavailable and is not made here.
SQLite's write-ahead log survives kill -9 and power cuts. Its lock keeps other processes out until this one ends.
"""

from __future__ import annotations

import os
import sqlite3
import time
from collections.abc import Callable
from pathlib import Path

from elasticd.errors import StoreRefused, StoreUnavailable
from elasticd_agent.store.memory import MemoryStore, _Entry, _MemoryLease

_OPEN_STATEMENTS = (
    "PRAGMA locking_mode = EXCLUSIVE",
    "PRAGMA journal_mode = WAL",
    "PRAGMA synchronous = FULL",
    "CREATE TABLE IF NOT EXISTS entries (key TEXT PRIMARY KEY, value BLOB, version INTEGER) WITHOUT ROWID",
)
_CHANGE_COUNT_BITS = 32
"""A version is how often the store was opened, and a count in these bits: versions of leased keys are not on the disk,
and must not be used again after a restart."""


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
        self._path = path
        try:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
        except OSError as error:
            raise StoreRefused(f"{path} cannot be opened: {error.strerror}") from None
        try:
            self._open()
        except sqlite3.OperationalError as error:
            self._database.close()
            if "locked" in str(error):
                raise StoreRefused(f"{path.parent} is in use by another agent; give each its own state_dir") from None
            raise StoreRefused(f"{path} cannot be opened: {error}") from None
        except sqlite3.DatabaseError as error:
            self._database.close()
            damaged = path.rename(path.with_name(f"{path.name}.damaged"))
            log(f"{path} is damaged ({error}); the store is empty now, and the file is kept as {damaged.name}")
            self._open()
        try:
            self._count_opening()
        except StoreUnavailable as error:
            log(f"{error}; nothing can be changed until that is repaired")

    def close(self) -> None:
        with self._lock:
            super().close()
            self._database.close()

    def _open(self) -> None:
        self._database = sqlite3.connect(self._path, timeout=0, isolation_level=None, check_same_thread=False)
        for statement in _OPEN_STATEMENTS:
            self._database.execute(statement)
        rows = self._database.execute("SELECT key, value, version FROM entries")
        self._entries = {key: _Entry(value, version, None) for key, value, version in rows}

    def _count_opening(self) -> None:
        (before,) = self._database.execute("PRAGMA user_version").fetchone()
        self._version = (before + 1) << _CHANGE_COUNT_BITS
        self._execute(f"PRAGMA user_version = {before + 1}")

    def _set(self, key: str, value: bytes, lease: _MemoryLease | None) -> int:
        if lease is None:
            self._execute("INSERT OR REPLACE INTO entries VALUES (?, ?, ?)", key, value, self._version + 1)
        else:
            self._delete_row(key)
        return super()._set(key, value, lease)

    def _drop(self, key: str) -> bool:
        self._delete_row(key)
        return super()._drop(key)

    def _delete_row(self, key: str) -> None:
        """Leased keys are not on the disk, so that they end also while it is broken."""
        entry = self._entries.get(key)
        if entry is not None and entry.lease is None:
            self._execute("DELETE FROM entries WHERE key = ?", key)

    def _execute(self, statement: str, *values: str | bytes | int) -> None:
        """One change: SQLite makes all of it or nothing."""
        try:
            self._database.execute(statement, values)
        except sqlite3.Error as error:
            raise StoreUnavailable(f"{self._path} cannot be written: {error}") from None
