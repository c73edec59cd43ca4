"""One node's connection to the shared store: it can be cut, an answer can be lost, the agent can die in a request.

It exists so that a coordinator meets every kind of trouble at every request it makes. The store itself never fails.
Whatever goes through it may be rewritten to read as if another version of elasticd had written it.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Literal, TypeVar

from elasticd.errors import StoreUnavailable
from elasticd_agent.model.codec import VERSION
from elasticd_agent.store import Watch
from elasticd_agent.store.memory import MemoryStore
from tests.daemon.stores import InterruptedStore

T = TypeVar("T")
Fate = Literal["answer lost", "dies before", "dies after"]


class Killed(BaseException):
    """The agent has died in the middle of a turn. No handler in the agent's code may see it."""


class NodeStore(InterruptedStore):
    """A Store. `fates`: what becomes of the n-th request from now on, counted from 1; each happens once.

    `hints(deliver)` is given every hint and delivers it when, as often and if it likes. `version`: what its agent's
    records say they are; a newer one's have a field more. `compares_one_key`: as c10d, it reads a guard in a
    request before the swap.
    """

    def __init__(
        self,
        store: MemoryStore,
        reachable: Callable[[], bool],
        hints: Callable[[Callable[[], None]], None],
        version: str = VERSION,
    ) -> None:
        super().__init__(store)
        self._reachable, self._hints, self._version = reachable, hints, version
        self.compares_one_key, self.standalone, self.is_host = False, True, False
        self.fates: dict[int, Fate] = {}
        self.held_up: Callable[[str], None] = lambda key: None
        """Called with the key before a swap, where the guard has been read already: time may pass."""

    @property
    def hosts(self) -> bool:
        return self.is_host

    def written(self, value: bytes) -> bytes:
        """As an agent of this version writes it; what it read and passes on keeps the higher minor."""
        record = json.loads(value) if value.startswith(b"{") else None
        if self._version == VERSION or record is None or "version" not in record:
            return value
        if record["version"] <= VERSION:
            record |= {"version": self._version, f"news_of_{self._version}": {"why": [1, None]}}
        return json.dumps(record, sort_keys=True).encode()

    def ask(self, verb: str, key: str, call: Callable[[], T]) -> T:
        self.fates = {at - 1: fate for at, fate in self.fates.items()}
        fate = self.fates.pop(0, None)
        if fate == "dies before":
            raise Killed

        def reached() -> T:
            if not self._reachable():
                raise StoreUnavailable("the store does not answer")
            return call()

        answer = super().ask(verb, key, reached)
        if fate == "dies after":
            raise Killed
        if fate == "answer lost":
            raise StoreUnavailable("the store's answer was lost")
        return answer

    def compare_and_swap(
        self, key: str, expected: int | None, value: bytes, guard: tuple[str, int] | None = None
    ) -> bool:
        if self.compares_one_key and guard is not None:
            found = self.read(guard[0])
            if found is None or found.version != guard[1]:
                return False
            guard = None
        self.held_up(key)
        return super().compare_and_swap(key, expected, value, guard)

    def watch(self, callback: Callable[[str], None], *prefixes: str) -> Watch:
        def changed(key: str) -> None:
            if self._reachable():
                self._hints(lambda: callback(key))

        return self.ask("watch", prefixes[0], lambda: self.memory.watch(changed, *prefixes))

    def close(self) -> None:
        """The store is everybody's."""
