"""Being one of a job's nodes: the same job as the others', and a record in the store, kept alive under its lease.

It exists so that the coordinator need not know how a name is taken, kept, lost and taken again. A record that goes
behind our back is announced anew; one that is another agent's is never touched while that agent may live.
"""

from __future__ import annotations

import threading
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
from elasticd_agent.store.lease import LeasedKey, RenewalListener, ignore_renewals

_ABANDONED_RUN = "a later run of this job has come, and nobody of this one is left"
STOPPED_EXIT_CODE = 143
"""As a shell says it of SIGTERM: somebody wanted it to end."""


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
    """This node's record in the store. `turn` and `send` belong to one thread, `update` to any."""

    def __init__(
        self,
        store: Store,
        key: str,
        policy: Policy,
        record: NodeRecord,
        knock: Callable[[NodeRecord], object],
        attentive: Callable[[], bool],
        renewed: RenewalListener = ignore_renewals,
    ) -> None:
        self.key = LeasedKey(store, key, policy.lease_s, policy.renewal_s, is_own=self._is_own, on_renewal=renewed)
        self._knock = knock
        self._attentive = attentive
        self._record = record
        self._sent: NodeRecord | None = None
        self._lock = threading.Lock()

    @property
    def lease(self) -> Lease | None:
        return self.key.lease

    @property
    def record(self) -> NodeRecord:
        return self._record

    def update(self, **fields: Any) -> None:
        """Set fields of the record; `send` writes them."""
        with self._lock:
            self._record = replace(self._record, **fields)

    def turn(self, now: float) -> bool:
        """Renew the lease, or register the node if it is not registered. False: another agent has the name.

        Raises StoreRefused if that agent is alive, StoreUnavailable.
        """
        if self._attentive():
            self.key.renew(now)
        if self.lease is None:
            record = self._record
            if not self.key.create(record.to_json(), now, self._may_replace):
                return False
            self._sent = record
        return True

    def _may_replace(self, value: bytes) -> bool:
        """Whether the record under our name may go: of this agent before it was killed, or of an agent that is gone."""
        other = decode_record(NodeRecord, self.key.key, value)
        if other.incarnation == self._record.incarnation:
            return True
        answer = self._knock(other)
        if isinstance(answer, ProbeAlive) and answer.incarnation == other.incarnation:
            raise StoreRefused(
                f"another agent takes part in this job as node {other.id!r}, at {other.address}; "
                "give this one another name with --node-id"
            )
        return isinstance(answer, ProbeRefused)  # the lease of an agent that does not answer decides

    def send(self) -> bool:
        """Write the record if it has changed. False: the record or its lease is lost."""
        record = self._record
        if record is not self._sent and self.key.replace(record.to_json()):  # it is the same in most turns
            self._sent = record
        return self.lease is not None

    def check(self) -> None:
        """Give the lease up if the record was deleted or replaced; the next turn registers the node again."""
        self.key.check()

    def withdraw(self) -> None:
        """Delete the record and every key under its lease. Raises StoreUnavailable."""
        self.key.withdraw()

    def _is_own(self, value: bytes) -> bool:
        return decode_record(NodeRecord, self.key.key, value).incarnation == self._record.incarnation


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
            version = lease.put(key, value, self._version)
            if version is None:
                found = self._store.read(key)
                version = lease.put(key, value, None if found is None else found.version)
            self._version = version
        self._told = seen
        return True
