"""What this node reports about a Round, and how it reaches the store although the store may be unavailable."""

from __future__ import annotations

from collections import deque

from elasticd_agent.model.keys import Keys
from elasticd_agent.model.reports import HangReport
from elasticd_agent.store import Lease, Store


class Outbox:
    """Write-once reports of a Round, rewritten after a store lost its data.

    `add` may be called from any thread, the rest belongs to one.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._waiting: deque[tuple[int, str, bytes]] = deque()
        self._sent: dict[str, tuple[int, bytes]] = {}

    def add(self, number: int, key: str, value: bytes) -> None:
        self._waiting.append((number, key, value))

    def send(self) -> None:
        """Raises StoreUnavailable; the rest is sent at the next call."""
        while self._waiting:
            number, key, value = self._waiting[0]
            if not self._store.compare_and_swap(key, None, value):
                found = self._store.read(key)  # sent before; or left there by an earlier run of this job
                if found is not None and found.value != value:
                    self._store.compare_and_swap(key, found.version, value)
            self._sent[key] = number, value
            self._waiting.popleft()

    def resend(self, number: int, without: str) -> None:
        """Send again at the next `send` what was sent of round `number`, except the key `without`.

        Not while reports wait: the store is unavailable, and every call would add the same ones.
        """
        self._sent = {key: sent for key, sent in self._sent.items() if sent[0] == number}
        if not self._waiting:
            self._waiting.extend((number, key, value) for key, (_, value) in self._sent.items() if key != without)


class HangReportPublisher:
    """This node's hang report, under its lease: the report of a lost node is not waited for.

    `report` may be set from any thread, `send` belongs to one.
    """

    def __init__(self, store: Store, keys: Keys, node: str) -> None:
        self._store = store
        self._keys = keys
        self._node = node
        self.report: HangReport | None = None  #: what to publish; None: nothing
        self._sent: HangReport | None = None
        self._version: int | None = None

    def send(self, lease: Lease) -> bool:
        """Write the report, or delete it. True if anything has changed. Raises StoreUnavailable."""
        report, sent = self.report, self._sent
        if report is sent:
            return False
        if sent is not None and (report is None or report.round != sent.round):
            self._store.delete(self._keys.hang_reports(sent.round) + self._node)
            self._version = None
        if report is not None:
            key, value = self._keys.hang_reports(report.round) + self._node, report.to_json()
            version = lease.put(key, value, self._version)
            if version is None:
                found = self._store.read(key)
                version = lease.put(key, value, None if found is None else found.version)
            self._version = version
        self._sent = report
        return True
