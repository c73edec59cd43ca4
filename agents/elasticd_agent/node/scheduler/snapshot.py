"""Everything that daemons have said, for people to look at: read from the store each time, understood once.

It exists because understanding hundreds of records costs ten times what reading them does, and between two looks hardly
any has changed. What it shows is what the store holds now, never a copy. It writes nothing and decides nothing.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

from elasticd.errors import WireError
from elasticd_agent.model.codec import Document
from elasticd_agent.model.keys import decode_record
from elasticd_agent.node import keys as names
from elasticd_agent.node.records import Cordon, JobResult, NodeStatus, Placement, Submission
from elasticd_agent.node.scheduler.policy import ClusterView
from elasticd_agent.store import Store, Versioned

D = TypeVar("D", bound=Document)


class StoreSnapshot:
    """Safe from any thread. Each look raises StoreUnavailable, and says what cannot be understood and is left out."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._lock = threading.Lock()
        self._known: dict[str, dict[str, tuple[Versioned, Document]]] = {}

    def view(self, say: Callable[[str], None] = lambda sentence: None) -> ClusterView:
        return ClusterView(
            nodes=self._all(NodeStatus, names.NODES, say),
            cordons=self._all(Cordon, names.CORDONS, say),
            submissions=self._all(Submission, names.SUBMISSIONS, say),
            placements=self._all(Placement, names.PLACEMENTS, say),
            results=self._all(JobResult, names.RESULTS, say),
        )

    def submissions(self) -> tuple[Submission, ...]:
        return self._all(Submission, names.SUBMISSIONS, lambda sentence: None)

    def _all(self, kind: type[D], prefix: str, say: Callable[[str], None]) -> tuple[D, ...]:
        with self._lock:
            known = self._known.get(prefix, {})
        now: dict[str, tuple[Versioned, Document]] = {}
        found: list[D] = []
        for key, item in self._store.list(prefix).items():
            before = known.get(key)
            try:
                record = before[1] if before is not None and before[0] == item else decode_record(kind, key, item.value)
            except WireError as error:
                say(str(error))
                continue
            assert isinstance(record, kind)
            now[key] = item, record
            found.append(record)
        with self._lock:
            self._known[prefix] = now
        return tuple(found)
