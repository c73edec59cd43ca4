"""What the store says of jobs and cordons, as this node needs it: read when a watch names it, and now and then anyway.

It exists so that a turn in which nothing has changed costs the store nothing. It writes nothing and decides nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from elasticd_agent.model.codec import Document
from elasticd_agent.node import keys as names
from elasticd_agent.node.records import Cordon, JobResult, Placement, Submission
from elasticd_agent.node.scheduler.policy import ClusterView
from elasticd_agent.store import Store, Watch
from elasticd_agent.store.cache import StoreCache

D = TypeVar("D", bound=Document)

REREAD_S = 10.0
"""Everything is read again so often, in case a watch missed something."""
WATCHED = (names.SUBMISSIONS, names.PLACEMENTS, names.RESULTS, names.CORDONS)


class JobCache:
    """`turn` and `view` belong to one thread; they raise StoreUnavailable. `changed` is called from any."""

    def __init__(self, store: Store, say: Callable[[str], None], changed: Callable[[], None]) -> None:
        self._store, self._changed = store, changed
        self._copies = StoreCache(store, say)
        self._watches: list[Watch] = []
        self._reread_at = float("-inf")

    def turn(self, now: float) -> bool:
        """Listen. True when everything is about to be read again."""
        if not self._watches:
            self._watches = [self._store.watch(prefix, self._hinted) for prefix in WATCHED]
        again = now >= self._reread_at
        if again:
            self._reread_at = now + REREAD_S
            self._copies.clear()
        return again

    def view(self) -> ClusterView:
        """Without the nodes' cards, which are the placer's business."""
        return ClusterView(
            cordons=self._all(names.CORDONS, Cordon),
            submissions=self._all(names.SUBMISSIONS, Submission),
            placements=self._all(names.PLACEMENTS, Placement),
            results=self._all(names.RESULTS, JobResult),
        )

    def _all(self, prefix: str, kind: type[D]) -> tuple[D, ...]:
        return tuple(self._copies.records(prefix, kind))

    def invalidate(self, key: str) -> None:
        """We have written `key` ourselves: a watch will say so, too, but perhaps not yet."""
        self._copies.invalidate(key)

    def clear(self) -> None:
        self._copies.clear()

    def _hinted(self, key: str) -> None:
        self._copies.invalidate(key)
        self._changed()

    def close(self) -> None:
        for watch in self._watches:
            watch.close()
