"""One node's part in the rounds of a torchrun job: registers it under a lease, follows the job, proposes rounds.

torchrun's agent polls its handler every 0.1 s (`membership_change`) and must not wait for the store, so a thread of the
participant's own keeps the lease, reads the job after each change and stores what it read.

    /elasticd/v1/jobs/<id>/torchrun/nodes/<node>.<n>   Candidate, under the node's lease; n: its n-th registration
    /elasticd/v1/jobs/<id>/torchrun/round              TorchrunRound, by compare-and-swap only
    /elasticd/v1/jobs/<id>/torchrun/closed             JobClosed; it and the round go CLOSED_JOB_RETENTION_S later

There is no leader. Every candidate reads the same keys and computes the same next round; the first to swap it in wins,
and the others read it. A lost swap costs one read. So any node may die at any moment, and no take-over is needed.

A node registers under a name that was never used before (`<node>.<n>`). A request whose answer was lost may have made
the earlier registration; it expires with its lease, and the newest registration of a node is the one that counts.

Changes are read by one node only. A thousand nodes that join would each read a thousand records a thousand times, so
the first of the join queue follows every change, and the others read when a round is published, or seldom.

During an outage of the store nothing is known, so no membership change is reported and workers train on. After it, a
node counts as missing only when every live node has had the time to register again (`_are_registrations_settled`).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from elasticd.errors import ElasticdError, StoreRefused, StoreUnavailable, WireError
from elasticd_agent.model.codec import Document
from elasticd_agent.model.job import Policy
from elasticd_agent.store import Store, Versioned, Watch
from elasticd_agent.store.lease import LeasedKey
from elasticd_agent.torchrun_plugin.plan import (
    Candidate,
    LiveCandidate,
    MembershipChange,
    NoRoundYet,
    TorchrunMember,
    TorchrunRequirements,
    TorchrunRound,
    TorchrunView,
    join_queue,
    membership_change,
    next_round,
)

CLOSED_JOB_RETENTION_S = 600.0
"""Nodes that start late are refused until then, as for every ended job; afterwards the id can be used again."""
READ_DEBOUNCE_S = 0.05
"""Changes within this time are read together."""
RENEWALS_PER_READ = 5
"""Renewals between two reads without a change, because a watch is a hint and may miss something."""
MAX_OUTAGE_LEASES = 10
"""Leases for which a join tolerates a store outage (150 s by default): longer than a slow restart of etcd takes."""
MAX_LEASE_FACTOR = 8
"""The lease of a live node that was lost is doubled each time, up to so many times its first length."""


@dataclass(frozen=True, slots=True)
class JobClosed(Document):
    """The end of the job for all nodes, and the node that closed it."""

    closed_by: str


@dataclass(frozen=True, slots=True)
class JoinTimedOut:
    """The reason for which no round was formed in time."""

    why: str


class Participant:
    """Called from torchrun's main thread; its own thread starts with the first join and ends with `leave`."""

    def __init__(
        self,
        store: Store,
        job: str,
        node: str,
        requirements: TorchrunRequirements,
        policy: Policy,
        log: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._store = store
        self._node = node
        self._requirements = requirements
        self._policy = policy
        self._log = log
        self._clock = clock
        self._root = f"/elasticd/v1/jobs/{job}/torchrun/"
        self._round_key = f"{self._root}round"
        self._closed_key = f"{self._root}closed"
        # Shared with the thread, under this condition:
        self._changed = threading.Condition()
        self._candidate: Candidate | None = None
        self._own_round: TorchrunRound | None = None
        self._last_number = 0
        self._view: TorchrunView | None = None
        self._why = "the store has not answered yet"
        self._error: ElasticdError | None = None
        self._up_since: float | None = None
        self._down_since: float | None = None
        self._granted_s = policy.lease_s
        # Set from any thread; a watch's callback must not take a lock:
        self._wake = threading.Event()
        self._stopping = False
        self._dirty = True
        self._urgent = True
        # The thread's own:
        self._thread: threading.Thread | None = None
        self._watch: Watch | None = None
        self._registration: LeasedKey | None = None
        self._registrations = 0
        self._lease_s = policy.lease_s
        self._read_at = 0.0
        self._round_version: int | None = None
        self._since: dict[tuple[str, int, int], float] = {}
        self._undecodable: set[str] = set()

    # For torchrun's thread:

    def join(self, member: TorchrunMember, deadline: float) -> TorchrunRound | JobClosed | JoinTimedOut:
        """Wait for a round with this member. Raises StoreUnavailable after a long outage, StoreRefused, WireError.

        Unless it returns a round, this node is no candidate afterwards.
        """
        with self._changed:
            self._own_round = None
            self._candidate = Candidate(member, self._last_number)
            self._request_read()
            self._start_thread()
            try:
                while (outcome := self._join_outcome(member, deadline)) is None:
                    self._changed.wait(max(0.0, min(deadline - self._clock(), self._policy.renewal_s)))
            finally:
                if self._own_round is None:
                    self._candidate = None
                    self._request_read()
            return outcome

    def membership_change(self) -> MembershipChange:
        """The changes that need a new round; none during a store outage, when nothing is known."""
        with self._changed:
            if self._view is None or self._own_round is None or self._down_since is not None:
                return MembershipChange(0, "")
            now = self._clock()
            return membership_change(
                self._view,
                self._own_round,
                self._requirements,
                now,
                registrations_settled=self._are_registrations_settled(now),
            )

    @property
    def is_member(self) -> bool:
        """True from a successful join to the next join."""
        return self._own_round is not None

    def read_closed(self) -> JobClosed | None:
        """Raises StoreUnavailable, StoreRefused, WireError."""
        entry = self._store.read(self._closed_key)
        return None if entry is None else JobClosed.from_json(entry.value)

    def close_job(self) -> None:
        """End the job for all nodes. Raises StoreUnavailable, StoreRefused."""
        # The lease is never renewed: both keys expire by themselves, also when every node has left.
        lease = self._store.announce(self._closed_key, JobClosed(self._node).to_json(), CLOSED_JOB_RETENTION_S)
        current = self._store.read(self._round_key) if lease is not None else None
        if lease is not None and current is not None:
            lease.put(self._round_key, current.value, current.version)

    def wait_until_others_left(self, deadline: float) -> bool:
        """Wait until no other member of this node's round is registered. False: some still are."""
        with self._changed:
            while (own := self._own_round) is not None and self._view is not None and self._down_since is None:
                registered = {p.node for p in self._view.candidates} - {self._node}
                if not registered & {m.node for m in own.members}:
                    return True
                if self._clock() >= deadline:
                    return False
                self._changed.wait(max(0.0, deadline - self._clock()))
            return True

    def leave(self) -> None:
        """Withdraw from the job and end the thread. Leaving twice does nothing."""
        self._stopping = True
        self._wake.set()
        if self._thread is not None:
            self._thread.join()  # each request it may be in has its deadline
            self._thread = None

    def _start_thread(self) -> None:
        if self._thread is None:
            self._stopping = False
            self._thread = threading.Thread(target=self._run, name="elasticd-rendezvous", daemon=True)
            self._thread.start()

    def _join_outcome(self, member: TorchrunMember, deadline: float) -> TorchrunRound | JobClosed | JoinTimedOut | None:
        if self._error is not None:
            raise self._error
        view, now = self._view, self._clock()
        if view is not None and view.closed_by is not None:
            return JobClosed(view.closed_by)
        current = view.current if view is not None else None
        if current is not None and current.number > self._last_number:
            rank = current.rank(self._node)
            if rank is not None:
                self._last_number = current.number
                if current.members[rank] == member:
                    self._own_round = current
                    return current
                # The round was formed for an earlier join of this node that has timed out since.
                self._candidate = Candidate(member, self._last_number)
                self._request_read()
        if now >= deadline:
            return JoinTimedOut(self._why)
        if self._down_since is not None and now - self._down_since >= MAX_OUTAGE_LEASES * self._policy.lease_s:
            raise StoreUnavailable(self._why)
        return None

    def _are_registrations_settled(self, now: float) -> bool:
        """True once every live node has had the time to register again after an outage."""
        return self._up_since is not None and now - self._up_since >= self._granted_s + self._policy.renewal_s

    def _request_read(self) -> None:
        self._urgent = True
        self._wake.set()

    # The thread:

    def _run(self) -> None:
        """Take turns until the end, sooner after a change, and withdraw the registration then."""
        while not self._stopping:
            self._wake.clear()
            try:
                pause = self._turn()
            except StoreUnavailable as e:
                self._on_outage(e)
                pause = self._policy.renewal_s / 2
            except (StoreRefused, WireError) as e:
                with self._changed:
                    self._error = e
                    self._changed.notify_all()
                pause = self._policy.renewal_s
            self._wake.wait(pause)
        try:
            self._withdraw()
        except (StoreUnavailable, StoreRefused) as e:
            self._log(f"the registration stays until its lease ends: {e}")
        if self._watch is not None:
            self._watch.close()
            self._watch = None

    def _turn(self) -> float:
        """Do what is due. Returns the seconds until something else is. Raises what the store raises."""
        if self._watch is None:
            self._watch = self._store.watch(self._on_change, self._root)
        renewal_at = self._keep_registered()
        if self._next_read_in_s(self._clock()) <= 0:
            self._read_job()
        again_at = self._publish_if_due()
        now = self._clock()
        due = [self._next_read_in_s(now), *(at - now for at in (renewal_at, again_at) if at is not None)]
        return max(0.0, min(due))

    def _on_change(self, key: str) -> None:
        self._dirty = True
        if key in (self._round_key, self._closed_key):
            self._urgent = True
        self._wake.set()

    def _keep_registered(self) -> float | None:
        """Have the candidate in the store. Returns when its lease has to be renewed."""
        with self._changed:
            candidate = self._candidate
        if candidate is None:
            self._withdraw()
            return None
        now, value = self._clock(), candidate.to_json()
        registration = self._registration
        if registration is not None and not registration.renew(now):
            self._registration = registration = None
            if self._down_since is None:
                # The store answered all the time, so this node was late: the others restarted although it lives.
                self._lease_s = min(2 * self._lease_s, MAX_LEASE_FACTOR * self._policy.lease_s)
                self._log(f"the lease ended before it was renewed; the next one lasts {self._lease_s:g} s")
        if registration is None or not registration.replace(value):
            # A name never used before: an earlier registration may exist, made by a request whose answer was lost.
            self._registrations += 1
            key = f"{self._root}nodes/{self._node}.{self._registrations}"
            policy = self._policy
            registration = LeasedKey(self._store, key, self._lease_s, policy.renewal_s, is_own=lambda value: True)
            if not registration.create(value, now) or registration.lease is None:
                raise StoreUnavailable(f"{key} exists already")
            self._registration = registration
            with self._changed:
                self._granted_s = registration.lease.ttl_s
            self._urgent = True
        return registration.renew_at

    def _withdraw(self) -> None:
        registration, self._registration = self._registration, None
        if registration is not None:
            registration.withdraw()

    def _next_read_in_s(self, now: float) -> float:
        """Seconds until the next read. Only the first node in the join queue follows every change, or N joining nodes
        would each read N records N times. The others read when a round is published, or after a renewal.
        """
        with self._changed:
            view, joining, registrations_settled = (
                self._view,
                self._own_round is None,
                self._are_registrations_settled(now),
            )
        if view is None or self._urgent:
            return 0.0
        queue = join_queue(view) if joining else []
        if self._dirty and (not queue or queue[0].node == self._node):
            return self._read_at + READ_DEBOUNCE_S - now
        often = joining or not registrations_settled
        return self._read_at + self._policy.renewal_s * (1 if often else RENEWALS_PER_READ) - now

    def _read_job(self) -> None:
        self._dirty = False  # before the read: a change during it is read again
        self._urgent = False
        entries = self._store.list(self._root)
        now = self._read_at = self._clock()
        current, closed = entries.get(self._round_key), entries.get(self._closed_key)
        view = TorchrunView(
            current=None if current is None else TorchrunRound.from_json(current.value),
            candidates=self._decode_candidates(entries, now),
            closed_by=None if closed is None else JobClosed.from_json(closed.value).closed_by,
        )
        self._round_version = None if current is None else current.version
        with self._changed:
            if self._down_since is not None:
                self._log(f"the store answers again after {now - self._down_since:.1f} s")
            if self._down_since is not None or self._up_since is None:
                self._down_since = None
                self._up_since = now
            self._view = view
            self._error = None
            self._changed.notify_all()

    def _decode_candidates(self, found: dict[str, Versioned], now: float) -> tuple[LiveCandidate, ...]:
        newest: dict[str, tuple[int, Candidate]] = {}
        for key, item in found.items():
            if not key.startswith(f"{self._root}nodes/"):
                continue
            try:
                candidate = Candidate.from_json(item.value)
            except WireError as e:
                if key not in self._undecodable:
                    self._log(f"{key} cannot be decoded and is ignored: {e}")
                self._undecodable.add(key)
                continue
            node = candidate.member.node
            if node not in newest or newest[node][0] < item.version:
                newest[node] = (item.version, candidate)
        joins = {(c.member.node, c.after_round, c.member.port): c for _, c in newest.values()}
        self._since = {join: self._since.get(join, now) for join in joins}
        return tuple(LiveCandidate(candidate, self._since[join]) for join, candidate in joins.items())

    def _publish_if_due(self) -> float | None:
        """Publish the next round if it is due; publish ours again in a store that lost its data. Returns when to ask
        again.
        """
        now = self._clock()
        with self._changed:
            view, own, registrations_settled = self._view, self._own_round, self._are_registrations_settled(now)
            joining = self._candidate is not None and own is None
        if view is None or view.closed_by is not None:
            return None
        if own is not None and (view.current is None or view.current.number < own.number):
            self._publish(own)
        elif joining:
            verdict = next_round(view, self._requirements, now, registrations_settled=registrations_settled)
            if isinstance(verdict, NoRoundYet):
                with self._changed:
                    self._why = verdict.why
                return verdict.retry_at
            self._publish(verdict)
        return None

    def _publish(self, proposal: TorchrunRound) -> None:
        """If another node's round wins the race, the next read returns it."""
        self._urgent = True
        if self._store.compare_and_swap(self._round_key, self._round_version, proposal.to_json()):
            self._log(f"round {proposal.number}, {len(proposal.members)} node(s), rank 0 on {proposal.members[0].node}")

    def _on_outage(self, error: StoreUnavailable) -> None:
        """Note an outage with its reason, once."""
        with self._changed:
            if self._down_since is None:
                self._log(f"the store does not answer, which restarts nothing: {error}")
                self._down_since = self._clock()
            self._why = str(error)
            self._changed.notify_all()
        self._urgent = True
