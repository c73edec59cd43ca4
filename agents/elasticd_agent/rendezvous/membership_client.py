"""The parts of a rendezvous client: its record, the Round that it follows, its reports, and the leader key.

`member.RendezvousMember` takes their turns in this order, and each part relies on those before it:

1. `RoundFollower` reads the Round: one without this node ends its group, also where its name is another agent's now.
2. `NodeRegistration` keeps this node's record under a lease. Without a record a node is no candidate for a Round.
3. `Outbox` sends what this node reports of the Round. A report that is lost with the store is sent again.
4. `LeaderElection` takes the leader key under the same lease: an agent that has lost its record cannot lead, either.

Each part reads a key again only once a watch has named it, and everything every few seconds: a watch is a hint.
"""

from __future__ import annotations

import json
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from elasticd.errors import StoreRefused, StoreUnavailable, WireError
from elasticd_agent.model.job import Policy
from elasticd_agent.model.keys import Keys, decode_master_address, decode_record, encode_record
from elasticd_agent.model.messages import HangReportRequested, MasterKnown, Notice, PauseRequested, StartAheadRequested
from elasticd_agent.model.records import Failure, Identity, LeaderRecord, Member, MemberCache, NodeRecord, Round
from elasticd_agent.model.reports import HangReport
from elasticd_agent.rendezvous.peers import PeerObservations
from elasticd_agent.rendezvous.probe import ProbeAlive, ProbeAnswer, ProbeRefused
from elasticd_agent.rendezvous.spec_check import SpecAgreement, stopped_round
from elasticd_agent.rendezvous.view import Requirements
from elasticd_agent.store import JobStore, Lease, Store, Versioned
from elasticd_agent.store.lease import LeasedKey, RenewalListener

PROBE_LEADER_AFTER_S = 0.15
"""A leader that has not answered this node's report for so long is probed."""
SEEN_ROUND_DELAY_S = 0.2
"""The time in which a member writes that it has read a Round, together with what follows from it, if that is soon."""
MEMBERS_FIRST_S = 1.0
"""The members of a Round have a free leader key to themselves for this time."""


@dataclass(frozen=True, slots=True)
class JobTerms:
    """One job as this node takes part in it: its keys, its rules and what it asks for."""

    keys: Keys
    policy: Policy
    requirements: Requirements
    spec: bytes  #: must agree with the other nodes', see spec_check


# ---- this node's record


class NodeRegistration:
    """This node's record in the store. `turn` and `send` belong to one thread, `update` to any.

    A record that is lost is registered again. A record of the same name that belongs to another agent is never touched
    while that agent may be alive.
    """

    def __init__(
        self,
        store: Store,
        terms: JobTerms,
        record: NodeRecord,
        observations: PeerObservations,
        attentive: Callable[[], bool],
        renewed: RenewalListener,
    ) -> None:
        key, policy = terms.keys.node(record.id), terms.policy
        self.key = LeasedKey(store, key, policy.lease_s, policy.renewal_s, is_own=self._is_own, on_renewal=renewed)
        self._observations = observations
        self._attentive = attentive
        self._patience_s = policy.join_timeout_s
        self._taken_since: float | None = None
        self.waits_for = ""  #: why this node cannot be registered yet
        self._record = record
        self._sent: NodeRecord | None = None
        self._send_at = float("-inf")
        self._lock = threading.Lock()

    @property
    def lease(self) -> Lease | None:
        return self.key.lease

    @property
    def record(self) -> NodeRecord:
        return self._record

    @property
    def send_at(self) -> float | None:
        """When the record is to be written; None: it is in the store."""
        return None if self._record is self._sent else self._send_at

    def update(self, *, send_at: float = float("-inf"), **fields: Any) -> None:
        """Set fields of the record; `send` writes them, from `send_at` on or with the next update."""
        with self._lock:
            self._record, self._send_at = replace(self._record, **fields), send_at

    def turn(self, running: Round | None, now: float) -> bool:
        """Renew the lease, or register the node if it is not registered. False: another agent has the name.

        Raises StoreRefused if that agent is alive, or keeps the name for `join_timeout`; StoreUnavailable.
        """
        if self._attentive():
            self.key.renew(now)
        if self.lease is None:
            record = self._record
            member = running.member(record.id) if running is not None else None
            if member is not None and member.incarnation != record.incarnation:
                self._refuse_if_alive(member)  # it may train on without its record: cut off from the store alone
            if not self.key.create(record.to_json(), now, self._may_replace):
                self._taken_since = now if self._taken_since is None else self._taken_since
                if now - self._taken_since >= self._patience_s:
                    raise StoreRefused(f"{self.waits_for}; give this one another name with --node-id")
                return False
            self._taken_since, self.waits_for = None, ""
            self._sent = record
        return True

    def check(self) -> None:
        """Read the record: if the store has lost it, `turn` registers the node again; `send` replaces an older one."""
        self.key.withdraw_if_lost()
        self._sent = None

    def _may_replace(self, value: bytes) -> bool:
        """True if the record under our name may go: of this agent before it was killed, or of one that is gone."""
        other = decode_record(NodeRecord, self.key.key, value)
        if other.incarnation == self._record.incarnation:
            return True
        answer = self._refuse_if_alive(other)
        # The lease of an agent that does not answer decides.
        who = f"another agent is node {other.id!r} of this job, at {other.address}"
        self.waits_for = f"{who}; it does not answer, but has a record"
        return isinstance(answer, ProbeRefused)

    def _refuse_if_alive(self, other: NodeRecord | Member) -> ProbeAnswer | None:
        """The answer of the agent that has, or had, this node's name. Raises StoreRefused if it is that agent's own."""
        answer = self._observations.probe_node(other)
        if isinstance(answer, ProbeAlive) and answer.incarnation == other.incarnation:
            raise StoreRefused(
                f"another agent takes part in this job as node {self._record.id!r}, at {other.address}; "
                "give this one another name with --node-id"
            )
        return answer

    def send(self, now: float) -> bool:
        """Write the record if it has changed. False: the record or its lease is lost."""
        record, at = self._record, self.send_at
        if at is not None and now >= at and self.key.replace(record.to_json()):
            self._sent = record
        return self.lease is not None

    def _is_own(self, value: bytes) -> bool:
        return decode_record(NodeRecord, self.key.key, value).incarnation == self._record.incarnation


# ---- the Round


class RoundFollower:
    """The Round that this node follows, and the requests to its members.

    It belongs to the thread that talks to the store; `invalidate` may be called from any.
    """

    def __init__(self, store: JobStore, terms: JobTerms, me: Identity, agreement: SpecAgreement) -> None:
        self._agreement = agreement
        self._store = store
        self._keys = keys = terms.keys
        self._me = me
        self._run = terms.requirements.run
        # what every agent watches
        self.keys = (keys.round, keys.planner, keys.master(), keys.pause, keys.ahead, keys.hang_report_request)
        self._stale: set[str] = set()
        self.round: Round | None = None
        self.stored: Versioned | None = None  #: the round key as last read: what a planner's verdict builds on
        self._accepted: Versioned | None = None
        self._members = MemberCache()
        self._is_member = False  # of `round`; a Round may have thousands of members, and every turn asks
        self._hosts_rank_0 = False
        self.ended_before_joining = False  #: the first Round this node read was terminal
        self._replaced = False
        self._master_of = 0  # the newest round whose store a watch has named
        self._master_known = 0
        self._requested = {keys.pause: 0, keys.hang_report_request: 0}  # the round of which something is requested

    @property
    def running(self) -> Round | None:
        """The Round, unless it is terminal."""
        return self.round if self.round is not None and not self.round.terminal else None

    def is_run_replaced(self) -> bool:
        """True once a later run of the job has begun, in which this node has no part."""
        return self._replaced

    @property
    def is_non_member(self) -> bool:
        """True if a Round runs without this node."""
        return self.running is not None and not self._is_member

    def invalidate(self, key: str) -> None:
        """Read `key` again: a watch has named it."""
        master = self._keys.master()
        if (number := key.removeprefix(master)) != key and number.isdecimal():
            self._master_of = max(self._master_of, int(number))
        self._stale |= {master if key.startswith(master) else key} & set(self.keys)

    def invalidate_leader(self) -> None:
        """Read again who leads, and the Round."""
        self._stale |= {self._keys.planner, self._keys.round}

    def invalidate_all(self) -> None:
        """Read everything again, in case a watch missed something.

        A missed request for hang reports costs nothing: a node whose group stands still reports unasked. A missed end
        of that request does: the node would report for ever.
        """
        unasked = self._keys.hang_report_request
        self._stale |= set(self.keys) - (set() if self._requested[unasked] else {unasked})

    def take_invalidated(self, key: str) -> bool:
        """True once after `key` was invalidated."""
        if key not in self._stale:
            return False
        self._stale.discard(key)
        return True

    def read_round(self, *, is_registered: bool = True) -> Round | None:
        """The Round in the store, if it is news; once replaced, the end of this run. Raises StoreUnavailable.

        `is_registered`: this node has a record in the store.
        """
        if not self.take_invalidated(self._keys.round):
            return None
        try:
            self.stored = stored = self._store.read(self._keys.round)
        except StoreUnavailable:
            self._stale.add(self._keys.round)
            raise
        known = self.running
        if stored is not None and stored == self._accepted:
            return None  # read again in case a watch missed something; it did not
        if stored is None:
            if known is not None:
                self._restore(known, None)  # the store came back empty
            return None
        round = decode_record(Round, self._keys.round, stored.value, self._members.parse_round)
        if known is not None and round.precedes(known):
            self._restore(known, stored.version)
            return None
        self._accepted = stored
        if self.round is not None and not self.round.precedes(round):
            return None
        if self.round is not None and round.run != self.round.run == self._run:
            self._replaced = True
            why = f"a later run of this job, {round.run}, has begun"
            return stopped_round(replace(round, number=self.round.number + 1), why)
        # An agent's store ends with the run that it was hosted for: a node that comes after that begins another one.
        is_after_end = not is_registered and not self._store.standalone
        is_before_mine = self.round is None and (round.outcome == "stopped" or is_after_end)
        other_run = round.run != self._run or is_before_mine
        return None if round.terminal and other_run else round

    def follow(self, round: Round) -> None:
        """Take `round` for the current one."""
        self.ended_before_joining = self.round is None and round.terminal
        self.round = round
        self._is_member = any(m.identity == self._me for m in round.members)
        self._hosts_rank_0 = bool(round.members) and round.members[0].node == self._me[0]
        self._stale |= {self._keys.pause, self._keys.ahead}
        # The round's store usually starts later, and its watch names it then; it may also have started earlier.
        if self._master_of >= round.number:
            self._stale.add(self._keys.master())

    def follow_own(self, round: Round) -> None:
        """Follow this node's own Round, which has just been published."""
        self._accepted = None
        self._stale.add(self._keys.round)
        self.follow(round)

    def fence_former_leader(self) -> None:
        """Give the round key another version, its value unchanged.

        For a store that compares one key at a time: a former leader that read the leader key before it was taken, and
        was then held up, must find another version of the round than the one its verdict builds on.
        """
        if self.stored is not None:
            self._store.compare_and_swap(self._keys.round, self.stored.version, self.stored.value)
            self._stale.add(self._keys.round)  # lost or won, the version is another

    def read_requests(self) -> list[Notice]:
        """The leader's requests to this node, and where the workers' store is. Raises StoreUnavailable."""
        round, keys = self.running, self._keys
        if round is None:
            return []
        if not self._is_member:
            asked = self.take_invalidated(keys.ahead) and self._is_asked_ahead(round)
            return [StartAheadRequested(round.number)] if asked else []
        notices: list[Notice] = []
        if self.take_invalidated(keys.hang_report_request) and self._read_request(keys.hang_report_request, round):
            notices.append(HangReportRequested(round.number, bool(self._requested[keys.hang_report_request])))
        if self._hosts_rank_0:
            if self.take_invalidated(keys.pause) and self._read_request(keys.pause, round):
                on = bool(self._requested[keys.pause])
                notices.append(PauseRequested(round.number, on, all_stay=on and self._do_all_stay(round)))
        elif self._master_known != round.number and self.take_invalidated(keys.master()):
            key = keys.master(round.number)
            if (stored := self._store.read(key)) is not None:
                notices.append(MasterKnown(round.number, *decode_master_address(key, stored.value)))
                self._master_known = round.number
        return notices

    def _restore(self, round: Round, version: int | None) -> None:
        """Every member of a Round writes it again where the store has lost it, its spec first; the last Round wins."""
        self._agreement.restore_spec()
        self._store.compare_and_swap(self._keys.round, version, encode_record(round))
        self._stale.add(self._keys.round)

    def _is_asked_ahead(self, round: Round) -> bool:
        stored = self._store.read(self._keys.ahead)
        number, *nodes = stored.value.decode(errors="replace").split("\n") if stored is not None else [""]
        return number == str(round.number) and self._me[0] in nodes

    def _do_all_stay(self, round: Round) -> bool:
        """No member of the Round leaves; also False where a record cannot be read."""
        stored = self._store.list(self._keys.nodes)
        keys = [self._keys.node(member.node) for member in round.members]
        try:
            return not any(decode_record(NodeRecord, key, stored[key].value).leaving for key in keys)
        except (KeyError, WireError):
            return False

    def _read_request(self, key: str, round: Round) -> bool:
        """Read the request under `key`; True if it begins or ends."""
        stored, before = self._store.read(key), self._requested[key]
        requested = stored is not None and stored.value == str(round.number).encode()
        self._requested[key] = round.number if requested else 0
        return self._requested[key] != before


# ---- its reports


class Outbox:
    """This node's reports of a Round, which reach the store although it may be unavailable for a while.

    Reports are written once, and again after a store lost its data. The hang report changes, and is under this node's
    lease: the report of a lost node is not waited for. `add…` and `hang_report` may be used from any thread.
    """

    def __init__(self, store: Store, keys: Keys, node: str) -> None:
        self._store = store
        self._keys = keys
        self._node = node
        self._waiting: deque[tuple[int, str, bytes]] = deque()
        self._sent: dict[str, tuple[int, bytes]] = {}
        self.hang_report: HangReport | None = None  #: what to publish; None: nothing
        self._sent_hang_report: HangReport | None = None
        self._version: int | None = None

    def add_failure(self, failure: Failure) -> None:
        self._waiting.append((failure.round, self._keys.failures(failure.round) + self._node, failure.to_json()))

    def add_done(self, number: int) -> None:
        self._waiting.append((number, self._keys.done(number) + self._node, b"done"))

    def add_master(self, number: int, address: str, port: int) -> None:
        self._waiting.append((number, self._keys.master(number), json.dumps([address, port]).encode()))

    def send(self) -> None:
        """Raises StoreUnavailable; the rest is sent at the next call."""
        while self._waiting:
            number, key, value = self._waiting[0]
            if not self._store.compare_and_swap(key, None, value):
                stored = self._store.read(key)  # sent before; or left there by an earlier run of this job
                if stored is not None and stored.value != value:
                    self._store.compare_and_swap(key, stored.version, value)
            self._sent[key] = number, value
            self._waiting.popleft()

    def queue_again(self, number: int, without_master_of: int) -> None:
        """Let the next `send` send again what was sent of round `number`, except where its workers' store is.

        Not while reports wait: the store is unavailable, and every call would add the same ones.
        """
        self._sent = {key: sent for key, sent in self._sent.items() if sent[0] == number}
        without = self._keys.master(without_master_of)
        if not self._waiting:
            self._waiting.extend((number, key, value) for key, (_, value) in self._sent.items() if key != without)

    def send_hang_report(self, lease: Lease) -> bool:
        """Write the hang report, or delete it. True if anything has changed. Raises StoreUnavailable."""
        report, sent = self.hang_report, self._sent_hang_report
        if report is sent:
            return False
        if sent is not None and (report is None or report.round != sent.round):
            self._store.delete(self._keys.hang_reports(sent.round) + self._node)
            self._version = None
        if report is not None:
            key, value = self._keys.hang_reports(report.round) + self._node, report.to_json()
            version = lease.put(key, value, self._version)
            if version is None:
                stored = self._store.read(key)
                version = lease.put(key, value, None if stored is None else stored.version)
            self._version = version
        self._sent_hang_report = report
        return True


# ---- the leader key


class LeaderElection:
    """One agent's view of one job's leader key. Times are monotonic seconds; everything may raise StoreUnavailable.

    The key lives under this node's lease. A free key goes to a member of the Round first; a leader whose agent refuses
    a probe is preempted at once; a leader that is merely silent keeps the key until its lease ends.
    """

    def __init__(
        self,
        store: Store,
        terms: JobTerms,
        registration: NodeRegistration,
        observations: PeerObservations,
        follower: RoundFollower,
    ) -> None:
        self._store = store
        self._key = terms.keys.planner
        self._renewal_s = terms.policy.renewal_s
        self._registration = registration
        self._observations = observations
        self._follower = follower
        self.key_version: int | None = None  #: while this agent holds the key
        self.probe_leader_at: float | None = None  #: when the leader is probed next
        self.free_since: float | None = None  #: since when no agent holds the key, as far as this one has read it
        self._other: tuple[NodeRecord, int] | None = None
        self._answered: str | None = None  # the incarnation of the leader that has answered a probe
        self._unanswered_since: float | None = None
        self._abstain_until = float("-inf")

    @property
    def other_leader(self) -> NodeRecord | None:
        """The other agent that leads, if one does."""
        return self._other[0] if self._other is not None else None

    def expect_round(self, since: float) -> None:
        """This node reported a failure at `since`: a living leader publishes a Round soon after."""
        self._unanswered_since = since

    def leader_disconnected(self, now: float) -> None:
        """The leader's agent has broken the standing connection: probe it at once."""
        self._unanswered_since = now - PROBE_LEADER_AFTER_S
        self.probe_leader_at = None

    def round_published(self) -> None:
        """A leader is alive."""
        self._unanswered_since = None
        self.probe_leader_at = None

    def refresh_leader(self, now: float) -> None:
        stored = self._store.read(self._key)
        if stored is None:
            self.key_version = None
            self.free_since = now if self.free_since is None else self.free_since
            return
        self.free_since = None
        record = decode_record(LeaderRecord, self._key, stored.value)
        if record.incarnation == self._registration.record.incarnation:
            self._key_won(stored.version)
            return
        self.key_version = None
        self._other = (record, stored.version)
        if self._answered != record.incarnation and isinstance(self._observations.probe_node(record), ProbeAlive):
            self._answered = record.incarnation

    def claim(self, now: float, *, non_member: bool) -> float | None:
        """Take the key if it is free or its holder is gone; returns when to try again.

        `non_member`: a Round runs without this node.
        """
        if now < self._abstain_until:
            return self._abstain_until
        if self.free_since is not None:
            if non_member and now < self.free_since + MEMBERS_FIRST_S:
                return self.free_since + MEMBERS_FIRST_S
            return self._take_key(None, now)
        if self._other is None:
            return None
        record, version = self._other
        if record.id == self._registration.record.id:
            return self._take_key(version, now)  # this node's earlier incarnation: the name is ours, so it is dead
        if self._unanswered_since is None:
            return None
        self.probe_leader_at = max(self.probe_leader_at or 0.0, self._unanswered_since + PROBE_LEADER_AFTER_S)
        if now < self.probe_leader_at:
            return self.probe_leader_at
        self.probe_leader_at = now + self._renewal_s
        # Only where a probe was answered before is a refusal proof: a firewall refuses, too.
        if self._answered == record.incarnation and isinstance(self._observations.probe_node(record), ProbeRefused):
            self._observations.suspect(record.id)
            return self._take_key(version, now)
        return self.probe_leader_at

    def resign(self, now: float, abstain_s: float) -> float:
        """Leave the key to a member that can lead better."""
        self._store.delete(self._key)
        self.key_lost()
        self._abstain_until = now + abstain_s
        return now

    def key_lost(self) -> None:
        """This agent does not hold the key, or not any more: read it again."""
        self.key_version = None
        self._follower.invalidate_leader()

    def _take_key(self, expected: int | None, now: float) -> float:
        lease = self._registration.lease
        assert lease is not None
        self._follower.invalidate_leader()
        self.probe_leader_at = None
        version = lease.put(self._key, self._registration.record.to_json(), expected)
        if version is not None:
            self._key_won(version)
        return now

    def _key_won(self, version: int) -> None:
        self.key_version = version
        self.free_since = None
        self._other = None
