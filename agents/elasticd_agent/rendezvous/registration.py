"""Being one of a job's nodes: the same job as the others', and a record in the store, kept alive under its lease.

It exists so that the coordinator need not know how a name is taken, kept, lost and taken again. A record that goes
behind our back is announced anew; one that is another agent's is never touched while that agent may live.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from elasticd.errors import StoreRefused
from elasticd_agent.model.job import Policy
from elasticd_agent.model.keys import Keys, decode_record
from elasticd_agent.model.records import NodeRecord, Round
from elasticd_agent.model.reports import HangReport
from elasticd_agent.rendezvous.probe import ProbeAlive, ProbeRefused
from elasticd_agent.rendezvous.spec_check import is_later_run
from elasticd_agent.store import Lease, Store

_ABANDONED_RUN = "a later run of this job has come, and nobody of this one is left"
STOPPED_EXIT_CODE = 143
"""As a shell says it of SIGTERM: somebody wanted it to end."""
RenewalListener = Callable[[float, float | None], None]
"""Hears how long a lease lives, and how long it was tried to renew it; None: it has just been granted."""


def renew(lease: Lease, tell: RenewalListener) -> bool:
    """Renew it, and tell how long that took, or was tried. Raises StoreUnavailable."""
    began = time.monotonic()
    try:
        return lease.renew()
    finally:
        tell(lease.ttl_s, time.monotonic() - began)


def agree_on_spec(store: Store, keys: Keys, agreed: bytes, differences: Callable[[bytes, bytes], str | None]) -> str:
    """The first agent of a job says what it is; every other one compares. Raises StoreRefused for another job.

    Returns who of an earlier run has to leave first, "" once nobody has. One of which nobody is left may never have
    said its end: all of its nodes were killed, or each of them left to another one to say so. Then it is said here.
    """
    found = store.read(keys.spec)
    if found is None:
        return (
            "" if store.compare_and_swap(keys.spec, None, agreed) else agree_on_spec(store, keys, agreed, differences)
        )
    if found.value == agreed or (why := differences(agreed, found.value)) is None:
        return ""
    stored = store.read(keys.round)
    last = None if stored is None else decode_record(Round, keys.round, stored.value)
    if last is None or not last.terminal:
        if not is_later_run(agreed, found.value):
            raise StoreRefused(f"job {keys.job!r} runs with another command: {why}")
        if left := sorted(key.removeprefix(keys.nodes) for key in store.list(keys.nodes)):
            return f"an earlier run of this job has not left {', '.join(left)}"
        if stored is not None and last is not None:
            over = stopped_round(replace(last, number=last.number + 1), _ABANDONED_RUN)
            if not store.compare_and_swap(keys.round, stored.version, over.to_json()):
                return agree_on_spec(store, keys, agreed, differences)
    done = store.compare_and_swap(keys.spec, found.version, agreed)
    return "" if done else agree_on_spec(store, keys, agreed, differences)


def stopped_round(round: Round, why: str) -> Round:
    """The same as a terminal one."""
    return replace(
        round, members=(), last_checkpoint=None, cause="", reason=why, outcome="stopped", exit_code=STOPPED_EXIT_CODE
    )


class SpecAgreement:
    """`reached` belongs to one thread. `ask` is `agree`; who waits for an earlier run does so for a bounded time."""

    def __init__(self, ask: Callable[[], str], within_s: float, say: Callable[[str], None]) -> None:
        self._ask, self._within_s, self._say = ask, within_s, say
        self._until: float | None = None
        self.done = False

    def is_reached(self, now: float) -> bool:
        """True once this node is of one mind with the others. Raises StoreRefused."""
        if self.done:
            return True
        if not (why := self._ask()):
            self.done = True
        elif self._until is None:
            self._until = now + self._within_s
            self._say(f"{why}; it is waited for")
        elif now >= self._until:
            raise StoreRefused(f"{why}, for {self._within_s:g} s (join_timeout)")
        return self.done


class NodeRegistration:
    """`turn` and `send` belong to one thread, `update` to any."""

    def __init__(
        self,
        store: Store,
        key: str,
        policy: Policy,
        record: NodeRecord,
        knock: Callable[[NodeRecord], object],
        attentive: Callable[[], bool],
        renewed: RenewalListener = lambda lives_s, renewal_s: None,
    ) -> None:
        self._store, self._key, self._policy = store, key, policy
        self._knock, self._attentive, self._tell = knock, attentive, renewed
        self._record, self._written, self._version = record, b"", 0
        self._sent: NodeRecord | None = None
        self._lock = threading.Lock()
        self.lease: Lease | None = None
        self.renew_at = 0.0

    @property
    def record(self) -> NodeRecord:
        return self._record

    def update(self, **fields: Any) -> None:
        """Set fields of the record; `send` writes them."""
        with self._lock:
            self._record = replace(self._record, **fields)

    def turn(self, now: float) -> bool:
        """Keep the record alive, announce it where it is not. False: somebody else has the name.

        Raises StoreRefused if that is a living agent, StoreUnavailable.
        """
        if self.lease is not None and now >= self.renew_at and self._attentive():
            if renew(self.lease, self._tell):
                self._renewed(now, self.lease)
            else:
                self.lease = None
        return self.lease is not None or self._register(now) or (self._free_name() and self._register(now))

    def _renewed(self, now: float, lease: Lease) -> None:
        self.renew_at = now + min(self._policy.renewal_s, lease.ttl_s / 3)

    def _register(self, now: float) -> bool:
        record = self._record
        value = record.to_json()
        self.lease = self._store.announce(self._key, value, self._policy.lease_s)
        if self.lease is None:
            return False
        self._written, self._version, self._sent = value, 0, record
        self._tell(self.lease.ttl_s, None)
        self._renewed(now, self.lease)
        return True

    def _free_name(self) -> bool:
        """Somebody has our name: another agent, or we before we were killed, whose record may go."""
        found = self._store.read(self._key)
        if found is None:
            return True
        other = decode_record(NodeRecord, self._key, found.value)
        if other.incarnation != self._record.incarnation:
            answer = self._knock(other)
            if isinstance(answer, ProbeAlive) and answer.incarnation == other.incarnation:
                raise StoreRefused(
                    f"another agent takes part in this job as node {other.id!r}, at {other.address}; "
                    "give this one another name with --node-id"
                )
            if not isinstance(answer, ProbeRefused):
                return False  # it does not speak: its lease decides
        self._store.delete(self._key)
        return True

    def send(self) -> bool:
        """Write the record if it has changed. False: the lease has ended behind our back, or the record is gone."""
        record, lease = self._record, self.lease
        if record is self._sent or lease is None:  # most turns
            return lease is not None
        value = record.to_json()
        if value == self._written:
            self._sent = record
            return True
        for _ in range(2):  # the second time with the version that a lost answer did not tell us
            if not self._version:
                found = self._store.read(self._key)
                if found is None or not self._mine(found.value):
                    break
                self._version = found.version
            version = lease.hold(self._key, value, self._version)
            if version is not None:
                self._version, self._written, self._sent = version, value, record
                return True
            self._version = 0
        self.lease = None
        return False

    def check(self) -> None:
        """Somebody may have deleted the record and left its lease alive: then both must come anew."""
        if self.lease is None:
            return
        found = self._store.read(self._key)
        if found is None or not self._mine(found.value):
            lease, self.lease = self.lease, None
            lease.withdraw()

    def _mine(self, value: bytes) -> bool:
        return decode_record(NodeRecord, self._key, value).incarnation == self._record.incarnation

    def withdraw(self) -> None:
        """Take the record away, and whatever else is held by its lease. Raises StoreUnavailable."""
        lease, self.lease = self.lease, None
        if lease is not None:
            lease.withdraw()


class Outbox:
    """What this node says of a Round, each thing once; and again, lest a store that came back empty does not know it.

    `add` may be called from any thread, the rest belongs to one.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._waiting: deque[tuple[int, str, bytes]] = deque()
        self._told: dict[str, tuple[int, bytes]] = {}

    def add(self, number: int, key: str, value: bytes) -> None:
        self._waiting.append((number, key, value))

    def send(self) -> None:
        """Raises StoreUnavailable; what was not sent then waits."""
        while self._waiting:
            number, key, value = self._waiting[0]
            if not self._store.compare_and_swap(key, None, value):
                found = self._store.read(key)  # told before; or what an earlier run of this job has left there
                if found is not None and found.value != value:
                    self._store.compare_and_swap(key, found.version, value)
            self._told[key] = number, value
            self._waiting.popleft()

    def resend(self, number: int, without: str) -> None:
        """Say again at the next `send` what was said of round `number`, but for the key `without`.

        While the store is away that is not said over and over: what is added here would wait with all the rest.
        """
        self._told = {key: told for key, told in self._told.items() if told[0] == number}
        if not self._waiting:
            self._waiting.extend((number, key, value) for key, (_, value) in self._told.items() if key != without)


class HangReportPublisher:
    """What this node sees of its ranks while a hang is suspected. Under its lease: a lost node's is not waited for.

    `seen` may be set from any thread, `send` belongs to one.
    """

    def __init__(self, store: Store, keys: Keys, node: str) -> None:
        self._store, self._keys, self._node = store, keys, node
        self.report: HangReport | None = None
        self._told: HangReport | None = None
        self._version: int | None = None

    def send(self, lease: Lease) -> bool:
        """Write what is seen, or take it back. True if anything has changed. Raises StoreUnavailable."""
        seen, told = self.report, self._told
        if seen is told:
            return False
        if told is not None and (seen is None or seen.round != told.round):
            self._store.delete(self._keys.hang_reports(told.round) + self._node)
            self._version = None
        if seen is not None:
            key, value = self._keys.hang_reports(seen.round) + self._node, seen.to_json()
            version = lease.hold(key, value, self._version)
            if version is None:
                found = self._store.read(key)
                version = lease.hold(key, value, None if found is None else found.version)
            self._version = version
        self._told = seen
        return True
