"""One node's part in a torchrun job's rounds: it is announced under a lease, sees the others, and helps to form rounds.

It exists so that torchrun's agent, which only asks now and then, has an answer at once: a thread keeps the lease, looks
at the job and remembers it. What the agent asks every 0.1 s (`waiting`) never talks to the store. It never restarts
anything, and never reads another machine's clock.

    /elasticd/v1/jobs/<id>/torchrun/nodes/<node>.<n>   Candidate, under the node's lease; n: its n-th announcement
    /elasticd/v1/jobs/<id>/torchrun/round              TorchrunRound, by compare-and-swap only
    /elasticd/v1/jobs/<id>/torchrun/closed             Closed; it and the round go CLOSED_S later
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from elasticd.errors import ElasticdError, StoreRefused, StoreUnavailable, WireError
from elasticd_agent.model.codec import Document
from elasticd_agent.store import Lease, Store, Versioned, Watch
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

RETENTION_S = 600.0
"""As any ended job's records: late nodes are told, then the id may be used again."""
DEBOUNCE_S = 0.05
"""Changes that come together are looked at together."""
REREAD_RENEWALS = 5
"""A watch is a hint: in peace the job is looked at every so many renewals anyway."""
OUTAGE_LEASES = 10
"""How long a join bears with a store that is away, in leases (30 s by default): as long as a slow restart of etcd."""


@dataclass(frozen=True, slots=True)
class JobClosed(Document):
    """The job has ended, for all nodes; `by` is the one that said so."""

    closed_by: str


@dataclass(frozen=True, slots=True)
class JoinTimedOut:
    why: str


@dataclass(frozen=True, slots=True)
class LeaseTimes:
    """Seconds. `lease_s` is asked for; what the store grants counts."""

    lease_s: float
    renewal_s: float


class Participant:
    """Called from torchrun's main thread; its own thread starts with the first join and ends with `leave`."""

    def __init__(
        self,
        store: Store,
        job: str,
        node: str,
        asked: TorchrunRequirements,
        times: LeaseTimes,
        say: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._store, self._node, self._asked, self._times, self._say, self._clock = (
            *(store, node, asked, times),
            *(say, clock),
        )
        self._root = f"/elasticd/v1/jobs/{job}/torchrun/"
        self._round_key, self._closed_key = f"{self._root}round", f"{self._root}closed"
        # Shared with the thread, under this condition:
        self._changed = threading.Condition()
        self._candidate: Candidate | None = None
        self._mine: TorchrunRound | None = None
        self._past = 0
        self._view: TorchrunView | None = None
        self._why = "the store has not been reached yet"
        self._fault: ElasticdError | None = None
        self._up_since: float | None = None
        self._down_since: float | None = None
        self._granted_s = times.lease_s
        # Set from anywhere; a watch's callback must not take a lock:
        self._wake = threading.Event()
        self._stopping = False
        self._dirty = self._urgent = True
        # The thread's own:
        self._thread: threading.Thread | None = None
        self._watch: Watch | None = None
        self._lease: Lease | None = None
        self._announced: tuple[Candidate, str, int] | None = None
        self._announcements = 0
        self._renewed_at = self._looked_at = 0.0
        self._round_version: int | None = None
        self._since: dict[tuple[str, int, int], float] = {}
        self._garbage: set[str] = set()

    # ---- for torchrun's thread

    def join(self, seat: TorchrunMember, deadline: float) -> TorchrunRound | JobClosed | JoinTimedOut:
        """Wait for a round with this seat in it. Raises StoreUnavailable after a long outage, StoreRefused, WireError.

        Whatever comes of it but a round, this node is no candidate any more.
        """
        with self._changed:
            self._mine = None
            self._candidate = Candidate(seat, self._past)
            self._nudge()
            self._start()
            try:
                while (outcome := self._joined(seat, deadline)) is None:
                    self._changed.wait(max(0.0, min(deadline - self._clock(), self._times.renewal_s)))
            finally:
                if self._mine is None:
                    self._candidate = None
                    self._nudge()
            return outcome

    def membership_change(self) -> MembershipChange:
        """Whose coming or going calls for a new round. Nobody's while the store is away: nothing is known then."""
        with self._changed:
            if self._view is None or self._mine is None or self._down_since is not None:
                return MembershipChange(0, "")
            now = self._clock()
            return membership_change(self._view, self._mine, self._asked, now, settled=self._settled(now))

    @property
    def is_member(self) -> bool:
        """True from a successful join to the next one."""
        return self._mine is not None

    def closed(self) -> JobClosed | None:
        """Raises StoreUnavailable, StoreRefused, WireError."""
        found = self._store.read(self._closed_key)
        return None if found is None else JobClosed.from_json(found.value)

    def close(self) -> None:
        """End the job for all nodes. Raises StoreUnavailable, StoreRefused."""
        # Never renewed: both keys go by themselves, also when everybody has left.
        lease = self._store.announce(self._closed_key, JobClosed(self._node).to_json(), RETENTION_S)
        found = self._store.read(self._round_key) if lease is not None else None
        if lease is not None and found is not None:
            lease.hold(self._round_key, found.value, found.version)

    def wait_for_others(self, deadline: float) -> bool:
        """Wait until no other member of this node's round is there any more. False: they are still."""
        with self._changed:
            while (members := self._mine) is not None and self._view is not None and self._down_since is None:
                there = {p.node for p in self._view.candidates} - {self._node}
                if not there & {m.node for m in members.members}:
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

    def _start(self) -> None:
        if self._thread is None:
            self._stopping = False
            self._thread = threading.Thread(target=self._keep, name="elasticd-rendezvous", daemon=True)
            self._thread.start()

    def _joined(self, seat: TorchrunMember, deadline: float) -> TorchrunRound | JobClosed | JoinTimedOut | None:
        if self._fault is not None:
            raise self._fault
        view, now = self._view, self._clock()
        if view is not None and view.closed_by is not None:
            return JobClosed(view.closed_by)
        current = view.current if view is not None else None
        if current is not None and current.number > self._past and (rank := current.rank(self._node)) is not None:
            self._past = current.number
            if current.members[rank] == seat:
                self._mine = current
                return current
            # A round formed for an earlier join of this node, which has given up since.
            self._candidate = Candidate(seat, self._past)
            self._nudge()
        if now >= deadline:
            return JoinTimedOut(self._why)
        if self._down_since is not None and now - self._down_since >= OUTAGE_LEASES * self._times.lease_s:
            raise StoreUnavailable(self._why)
        return None

    def _settled(self, now: float) -> bool:
        """True once every node that lives has had the time to be announced again after an outage."""
        return self._up_since is not None and now - self._up_since >= self._granted_s + self._times.renewal_s

    def _nudge(self) -> None:
        self._urgent = True
        self._wake.set()

    # ---- the thread

    def _keep(self) -> None:
        while not self._stopping:
            self._wake.clear()
            try:
                pause = self._turn()
            except StoreUnavailable as e:
                self._away(e)
                pause = self._times.renewal_s / 2
            except (StoreRefused, WireError) as e:
                with self._changed:
                    self._fault = e
                    self._changed.notify_all()
                pause = self._times.renewal_s
            self._wake.wait(pause)
        try:
            self._withdraw()
        except (StoreUnavailable, StoreRefused) as e:
            self._say(f"the announcement runs out by itself: {e}")
        if self._watch is not None:
            self._watch.close()
            self._watch = None

    def _turn(self) -> float:
        """One look at everything that is due. Returns how long nothing else will be. Raises what the store raises."""
        if self._watch is None:
            self._watch = self._store.watch(self._root, self._told)
        self._announce()
        if self._look_in(self._clock()) <= 0:
            self._look()
        until = self._decide()
        now = self._clock()
        due = [self._renewed_at + self._times.renewal_s - now, self._look_in(now)]
        if until is not None:
            due.append(until - now)
        return max(0.0, min(due))

    def _told(self, key: str) -> None:
        self._dirty = True
        if key in (self._round_key, self._closed_key):
            self._urgent = True
        self._wake.set()

    def _announce(self) -> None:
        with self._changed:
            candidate = self._candidate
        if candidate is None:
            self._withdraw()
            return
        now = self._clock()
        if self._lease is not None and now >= self._renewed_at + self._times.renewal_s:
            if self._lease.renew():
                self._renewed_at = now
            else:
                self._lease = None
        if self._lease is not None and self._announced is not None and self._announced[0] != candidate:
            _, key, version = self._announced
            now_version = self._lease.hold(key, candidate.to_json(), version)
            if now_version is None:
                self._lease = None
            else:
                self._announced = (candidate, key, now_version)
        if self._lease is None:
            self._announce_anew(candidate)

    def _announce_anew(self, candidate: Candidate) -> None:
        # A name never used before: an earlier announcement may still be there, of a request whose answer got lost.
        self._announcements += 1
        key = f"{self._root}nodes/{self._node}.{self._announcements}"
        now = self._clock()
        lease = self._store.announce(key, candidate.to_json(), self._times.lease_s)
        found = None if lease is None else self._store.read(key)
        if lease is None or found is None:
            raise StoreUnavailable(f"{key} was announced and is gone")
        self._lease, self._announced, self._renewed_at = lease, (candidate, key, found.version), now
        with self._changed:
            self._granted_s = lease.ttl_s
        self._urgent = True

    def _withdraw(self) -> None:
        if self._lease is not None:
            lease, self._lease, self._announced = self._lease, None, None
            lease.withdraw()

    def _look_in(self, now: float) -> float:
        """Seconds until the next look. Of those that wait, only the first in line follows every change: else N nodes
        that join would each read N records N times. The others see the round, or after a renewal that it does not come.
        """
        with self._changed:
            view, joining, settled = self._view, self._mine is None, self._settled(now)
        if view is None or self._urgent:
            return 0.0
        queue = join_queue(view) if joining else []
        if self._dirty and (not queue or queue[0].node == self._node):
            return self._looked_at + DEBOUNCE_S - now
        often = joining or not settled
        return self._looked_at + self._times.renewal_s * (1 if often else REREAD_RENEWALS) - now

    def _look(self) -> None:
        self._dirty = self._urgent = False  # before reading: what changes meanwhile is looked at again
        found = self._store.list(self._root)
        now = self._looked_at = self._clock()
        current, closed = found.get(self._round_key), found.get(self._closed_key)
        view = TorchrunView(
            current=None if current is None else TorchrunRound.from_json(current.value),
            candidates=self._here(found, now),
            closed_by=None if closed is None else JobClosed.from_json(closed.value).closed_by,
        )
        self._round_version = None if current is None else current.version
        with self._changed:
            if self._down_since is not None:
                self._say(f"the store answers again after {now - self._down_since:.1f} s")
            if self._down_since is not None or self._up_since is None:
                self._down_since, self._up_since = None, now
            self._view, self._fault = view, None
            self._changed.notify_all()

    def _here(self, found: dict[str, Versioned], now: float) -> tuple[LiveCandidate, ...]:
        newest: dict[str, tuple[int, Candidate]] = {}
        for key, item in found.items():
            if not key.startswith(f"{self._root}nodes/"):
                continue
            try:
                candidate = Candidate.from_json(item.value)
            except WireError as e:
                if key not in self._garbage:
                    self._say(f"{key} is not understood and ignored: {e}")
                self._garbage.add(key)
                continue
            node = candidate.member.node
            if node not in newest or newest[node][0] < item.version:
                newest[node] = (item.version, candidate)
        names = {(c.member.node, c.after_round, c.member.port): c for _, c in newest.values()}
        self._since = {name: self._since.get(name, now) for name in names}
        return tuple(LiveCandidate(candidate, self._since[name]) for name, candidate in names.items())

    def _decide(self) -> float | None:
        """Form the next round if it is time; give an emptied store its round back. Returns when to ask again."""
        now = self._clock()
        with self._changed:
            view, mine, settled = self._view, self._mine, self._settled(now)
            joining = self._candidate is not None and mine is None
        if view is None or view.closed_by is not None:
            return None
        if mine is not None and (view.current is None or view.current.number < mine.number):
            self._publish(mine)
        elif joining:
            verdict = next_round(view, self._asked, now, settled=settled)
            if isinstance(verdict, NoRoundYet):
                with self._changed:
                    self._why = verdict.why
                return verdict.until
            self._publish(verdict)
        return None

    def _publish(self, proposal: TorchrunRound) -> None:
        """A lost race is no news: the round that won is seen next."""
        self._urgent = True
        if self._store.compare_and_swap(self._round_key, self._round_version, proposal.to_json()):
            self._say(f"round {proposal.number}, {len(proposal.members)} node(s), rank 0 on {proposal.members[0].node}")

    def _away(self, error: StoreUnavailable) -> None:
        with self._changed:
            if self._down_since is None:
                self._say(f"the store is away, which restarts nothing: {error}")
                self._down_since = self._clock()
            self._why = str(error)
            self._changed.notify_all()
        self._urgent = True
