"""Copies of what the store holds, read again once a watch has named a key: what the planner reads every turn.

They exist so that a planner's turn costs the store nothing while nothing changes. A hint that comes while a list is
being read makes the next turn read it again. What cannot be understood is said once and left alone.
"""

from __future__ import annotations

import builtins
from collections.abc import Callable
from typing import TypeVar

from elasticd.errors import WireError
from elasticd_agent.model.codec import Document
from elasticd_agent.model.keys import decode_record
from elasticd_agent.store import Store, Versioned

D = TypeVar("D", bound=Document)


class StoreCache:
    """By prefix. `hint` may be called from any thread, the rest belongs to one; reading may raise StoreUnavailable."""

    def __init__(self, store: Store, log: Callable[[str], None]) -> None:
        self._store, self._log = store, log
        self._lists: dict[str, dict[str, Versioned]] = {}
        self._parsed: dict[str, tuple[Versioned, Document]] = {}
        self._reported: set[str] = set()

    def invalidate(self, key: str) -> None:
        """`key` may have changed."""
        for prefix in list(self._lists):
            if key.startswith(prefix) or prefix.startswith(key):  # a watch that may have missed some names its prefix
                self._lists.pop(prefix, None)

    def clear(self) -> None:
        self._lists.clear()
        self._parsed.clear()

    def drop(self, prefixes: tuple[str, ...]) -> builtins.list[str]:
        """Forget the lists below these prefixes; the keys that were in them."""
        return [key for at in [p for p in self._lists if p.startswith(prefixes)] for key in self._lists.pop(at)]

    def list(self, prefix: str) -> dict[str, Versioned]:
        """Every key that begins with `prefix`."""
        copy = self._lists.get(prefix)
        if copy is None:
            # In this order: what changes while it is being read makes the next turn read it again.
            self._lists[prefix] = copy = {}
            try:
                copy.update(self._store.list(prefix))
            except BaseException:
                self._lists.pop(prefix, None)
                raise
        return copy

    def records(self, prefix: str, kind: type[D]) -> builtins.list[D]:
        """The records below `prefix` that can be understood."""
        return self.decoded(prefix, kind)[0]

    def decoded(self, prefix: str, kind: type[D]) -> tuple[builtins.list[D], builtins.list[str]]:
        """The same, and the keys of the others: of one list, as the next one may have others."""
        found: builtins.list[D] = []
        odd = []
        for key, item in self.list(prefix).items():
            known = self._parsed.get(key)
            if known is not None and known[0] == item and isinstance(known[1], kind):
                found.append(known[1])
                continue
            try:
                record = decode_record(kind, key, item.value)
                self._parsed[key] = item, record
                found.append(record)
            except WireError as error:
                odd.append(key)
                if key not in self._reported:
                    self._reported.add(key)
                    self._log(str(error))
        return found, odd
