"""A MemoryStore whose contents survive its process: what one node keeps when there is no store on the network.

It exists so that an agent on one machine needs nothing installed beside it. Everything but what is announced under a
lease is on the disk before a call returns. Leases do not survive: their owners were this process. It never talks to
anyone; a disk that is full or broken is StoreUnavailable, and nothing has changed then as far as can be helped.
"""

from __future__ import annotations

import base64
import json
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from elasticd.errors import StoreUnavailable
from elasticd_agent.store.journal import Journal
from elasticd_agent.store.memory import MemoryStore, _Entry, _MemoryLease

RESERVED_VERSIONS = 10_000
"""Versions are reserved by so many: a leased key's are not on the disk, and yet must not come again after a restart."""
COMPACTION_SLACK_BYTES = 256 * 1024
"""The journal is written anew once it is so much longer than twice what it has to say."""


def _ignore(sentence: str) -> None:
    """For those who do not want to hear what was damaged."""


class FileStore(MemoryStore):
    """Thread-safe. `say` hears one sentence if what was found is damaged. Raises StoreRefused; then it is not open."""

    def __init__(
        self,
        path: Path,
        clock: Callable[[], float] = time.monotonic,
        *,
        log: Callable[[str], None] = _ignore,
    ) -> None:
        super().__init__(clock)
        self._journal = Journal(path)
        self._closed = False
        self._reserved = self._written = 0
        try:
            self._restore(path, log)
            self._rewrite(self._entries)
        except StoreUnavailable as error:
            log(f"{error}; nothing can be changed until that is mended")
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
            self._persist(_versions_line(version + RESERVED_VERSIONS), self._entries)
            self._reserved = version + RESERVED_VERSIONS
        if lease is None:
            entry = _Entry(value, version, None)
            self._persist(_set_line(key, entry), {**self._entries, key: entry})
        elif self._is_persistent(key):
            self._persist(_drop_line(key), {k: e for k, e in self._entries.items() if k != key})
        return super()._set(key, value, lease)

    def _drop(self, key: str) -> bool:
        if self._is_persistent(key):
            self._persist(_drop_line(key), {k: e for k, e in self._entries.items() if k != key})
        return super()._drop(key)

    def _is_persistent(self, key: str) -> bool:
        entry = self._entries.get(key)
        return entry is not None and entry.lease is None

    def _persist(self, line: bytes, afterwards: Mapping[str, _Entry]) -> None:
        """Have one change on the disk, which leads to `afterwards`. Raises StoreUnavailable."""
        if self._closed:
            raise StoreUnavailable("the store has been closed")
        if not self._journal.append(line):
            self._rewrite(afterwards)
        elif self._journal.size > 2 * self._written + COMPACTION_SLACK_BYTES:
            try:
                self._rewrite(afterwards)
            except StoreUnavailable:
                pass  # the change is on the disk; the next one says that there is trouble

    def _rewrite(self, entries: Mapping[str, _Entry]) -> None:
        reserved = self._version + 1 + RESERVED_VERSIONS
        kept = [_set_line(key, entry) for key, entry in sorted(entries.items()) if entry.lease is None]
        self._journal.replace([_versions_line(reserved), *kept])
        self._reserved, self._written = reserved, self._journal.size

    def _restore(self, path: Path, say: Callable[[str], None]) -> None:
        found = self._journal.contents
        bad = found.bad_lines
        for line in found.lines:
            try:
                self._replay(json.loads(line))
            except (ValueError, TypeError, KeyError, RecursionError):
                bad += 1
        if bad:
            aside = self._journal.keep_damaged_file()
            say(
                f"{path} is damaged: {bad} of its lines cannot be read and {len(self._entries)} records are left; "
                f"the file is kept as {aside.name}"
            )

    def _replay(self, said: Any) -> None:
        match said:
            case ["set", str(key), int(version), value]:
                self._entries[key] = _Entry(_bytes(value), version, None)
                self._version = max(self._version, version)
            case ["drop", str(key)]:
                self._entries.pop(key, None)
            case ["versions", int(version)]:
                self._version = max(self._version, version)
            case _:
                raise ValueError(f"not a line of a journal: {said!r}")


def _set_line(key: str, entry: _Entry) -> bytes:
    try:
        value: object = entry.value.decode()
    except UnicodeDecodeError:
        value = {"base64": base64.b64encode(entry.value).decode()}
    return _line("set", key, entry.version, value)


def _drop_line(key: str) -> bytes:
    return _line("drop", key)


def _versions_line(until: int) -> bytes:
    """No version up to this one may be used again."""
    return _line("versions", until)


def _line(*said: object) -> bytes:
    return json.dumps(said, separators=(",", ":")).encode()


def _bytes(value: Any) -> bytes:
    if isinstance(value, str):
        return value.encode()
    return base64.b64decode(value["base64"], validate=True)
