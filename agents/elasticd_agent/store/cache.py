"""A thread-safe cache of what the store holds, kept current by watches: while nothing changes, a turn costs no request.

A list is read again after a watch has named one of its keys; a change during the read makes the next use read it again.
A value is decoded once for each version, also one that is no record, because decoding hundreds of records costs ten
times what reading them does.
"""

from __future__ import annotations

import builtins
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TypeVar, cast

from elasticd.errors import WireError
from elasticd_agent.model.codec import Document
from elasticd_agent.model.keys import decode_record
from elasticd_agent.store import Store, Versioned, Watch

DocumentT = TypeVar("DocumentT", bound=Document)


@dataclass(frozen=True, slots=True)
class _DecodedList:
    items: dict[str, Versioned]  #: what was decoded; never changed
    records: dict[str, Document]
    errors: dict[str, str]
    all: tuple[Document, ...]  #: the records: the same object while nothing changes


class StoreCache:
    """`list`, `read_records`, `invalidate` and `clear` may be called from any thread, the rest belongs to one.

    Reading may raise StoreUnavailable. `log` receives one sentence for each key whose record cannot be decoded.
    `changed` is called from a watch's thread.
    """

    def __init__(self, store: Store, log: Callable[[str], None], changed: Callable[[], None] = lambda: None) -> None:
        self._store = store
        self._log = log
        self._changed = changed
        self._lock = threading.Lock()  # guards what follows, never held during a request
        self.generation = 0
        """Grows whenever something may have changed; equal numbers mean that there is nothing new to look at."""
        self._lists: dict[str, dict[str, Versioned]] = {}
        self._reading: dict[str, object] = {}
        self._decoded: dict[str, _DecodedList] = {}
        self._reported: set[str] = set()
        self._watches: dict[str, Watch] = {}
        self._users: dict[str, set[object]] = {}
        self._refreshed_at = float("-inf")

    # ---- keeping it current

    def watch(self, user: object, prefixes: Iterable[str]) -> None:
        """Follow these prefixes until `unwatch`. Repeating it does nothing."""
        for prefix in prefixes:
            if prefix not in self._watches:
                self._watches[prefix] = self._store.watch(self._on_change, prefix)
            self._users.setdefault(prefix, set()).add(user)

    def unwatch(self, user: object) -> None:
        """Follow what `user` watched no longer, unless somebody else watches it."""
        for prefix, users in self._users.items():
            users.discard(user)
            if not users and prefix in self._watches:
                self._watches.pop(prefix).close()

    def _on_change(self, key: str) -> None:
        self.invalidate(key)
        self._changed()

    def invalidate(self, key: str) -> None:
        """`key` may have changed; a watch that may have missed changes names its whole prefix."""
        with self._lock:
            self.generation += 1
            for known in (self._lists, self._reading):
                for prefix in [p for p in known if key.startswith(p) or p.startswith(key)]:
                    del known[prefix]

    def clear(self) -> None:
        """Read everything again at its next use."""
        with self._lock:
            self.generation += 1
            self._decoded = {prefix: self._decoded[prefix] for prefix in self._lists if prefix in self._decoded}
            self._lists.clear()
            self._reading.clear()

    def clear_if_due(self, now: float, every_s: float) -> bool:
        """Clear the cache every `every_s`, because a watch is a hint and may miss something. True: it was cleared."""
        due = now >= self._refreshed_at + every_s
        if due:
            self._refreshed_at = now
            self.clear()
        return due

    def drop_lists(self, prefixes: tuple[str, ...]) -> builtins.list[str]:
        """Drop the lists below these prefixes. Returns the prefixes of those that had keys."""
        with self._lock:
            self._reading = {at: mark for at, mark in self._reading.items() if not at.startswith(prefixes)}
            return [at for at in [p for p in self._lists if p.startswith(prefixes)] if self._lists.pop(at)]

    # ---- reading

    def list(self, prefix: str) -> dict[str, Versioned]:
        """Every key that begins with `prefix`. Callers must not change it."""
        with self._lock:
            known = self._lists.get(prefix)
            if known is not None:
                return known
            # Before the read: a change during it removes this mark, so that the next use reads it once more.
            mark = self._reading[prefix] = object()
            before = self._decoded.get(prefix)
        read = self._store.list(prefix, before.items if before is not None else None)
        with self._lock:
            if self._reading.get(prefix) is mark:
                del self._reading[prefix]
                self._lists[prefix] = read
        return read

    def records(self, prefix: str, kind: type[DocumentT]) -> tuple[DocumentT, ...]:
        """The records below `prefix` that can be decoded, and final ones that could be decoded before."""
        return self.records_and_undecodable(prefix, kind)[0]

    def records_and_undecodable(
        self, prefix: str, kind: type[DocumentT]
    ) -> tuple[tuple[DocumentT, ...], builtins.list[str]]:
        """The records below `prefix`, and the keys of those that cannot be decoded: both of the same list."""
        records, errors = self._decode(prefix, self.list(prefix), kind)
        with self._lock:
            new = [key for key in errors if key not in self._reported]
            self._reported.update(new)
        for key in new:
            self._log(errors[key])
        return records, [*errors]

    def read_records(
        self, prefix: str, kind: type[DocumentT], log: Callable[[str], None], *, cached_if_watched: bool = False
    ) -> tuple[DocumentT, ...]:
        """The records that the store holds at this moment, for people; `cached_if_watched`: what a watch has kept
        current will do. `log` receives every decoding error.
        """
        if cached_if_watched and prefix in self._watches:
            items = self.list(prefix)
        else:
            items = self._store.list(prefix, self._lists.get(prefix))
        records, errors = self._decode(prefix, items, kind)
        for error in errors.values():
            log(error)
        return records

    def _decode(
        self, prefix: str, items: dict[str, Versioned], kind: type[DocumentT]
    ) -> tuple[tuple[DocumentT, ...], dict[str, str]]:
        with self._lock:
            before = self._decoded.get(prefix) or _DecodedList({}, {}, {}, ())
        if before.items is not items:
            records: dict[str, Document] = {}
            errors: dict[str, str] = {}
            for key, item in items.items():
                same = before.items.get(key) == item
                known, error = before.records.get(key), before.errors.get(key) if same else None
                if error is None and not (same and known is not None):
                    try:
                        known = decode_record(kind, key, item.value)
                    except WireError as raised:
                        error = str(raised)
                if error is not None:
                    errors[key] = error
                if known is not None and (error is None or kind.NEVER_CHANGES):
                    records[key] = known
            before = _DecodedList(items, records, errors, tuple(records.values()))
            with self._lock:
                self._decoded[prefix] = before
        return cast(tuple[DocumentT, ...], before.all), before.errors
