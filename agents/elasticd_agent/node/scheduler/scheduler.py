"""Who places jobs: the one daemon that holds the placer's key, for as long as its lease lives.

It exists so that one daemon at a time turns the view into placements. All it knows is in the store, but for the moments
at which it saw nodes go, which are its own clock's: any other daemon can take over at any moment, and waits a little
longer at worst. Each write compares the key's version, too: one that was paused and usurped loses there. What is placed
where is `placing`'s business.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TypeVar

from elasticd.errors import StoreUnavailable, WireError
from elasticd_agent.model.codec import Document
from elasticd_agent.model.keys import Keys, decode_record
from elasticd_agent.model.records import Round
from elasticd_agent.node import keys as names
from elasticd_agent.node.records import Cordon, JobResult, NodeStatus, Placement, Submission
from elasticd_agent.node.scheduler import policy as placing
from elasticd_agent.node.scheduler import retention as ended
from elasticd_agent.store import Lease, Store, Watch
from elasticd_agent.store.cache import StoreCache
from elasticd_agent.store.lease import LeasedKey

D = TypeVar("D", bound=Document)

REFRESH_S = 20.0
"""Everything is read again so often, in case a watch missed something."""
DROP_DECODED_S = 3600.0
"""What was understood of records is kept for so long, so that reading them all again costs little."""
RETRY_REMOVAL_S = 600.0
"""What an ended job has left and cannot be removed now is looked at again after so long."""


@dataclass(slots=True)
class Scheduler:
    """One daemon's. `turn` belongs to one thread and is to be called at least every `renewal_s`.

    Times are monotonic seconds. `changed` is called, from any thread, when something to look at has happened.
    `announce` takes the key, as `store.announce` would, which is what does it if none is given.
    """

    store: Store
    node: str
    incarnation: str
    lease_s: float = 3.0
    renewal_s: float = 1.0
    adopt_timeout_s: float = 60.0
    retention_s: float = ended.RETENTION_S
    max_results: int = ended.MAX_RESULTS
    changed: Callable[[], None] = lambda: None
    announce: Callable[[str, bytes, float], Lease | None] | None = None
    version: int | None = None  # the key's, while it is ours
    _key: LeasedKey = field(init=False)
    _try_at: float = 0.0  # while another daemon has the key
    _key_watch: Watch | None = None
    _read_at: float = float("-inf")
    _forget_at: float = float("-inf")
    _cards: dict[str, NodeStatus] = field(default_factory=dict)
    _away: dict[str, float] = field(default_factory=dict)
    _sentences: list[str] = field(default_factory=list)
    _stale: threading.Event = field(default_factory=threading.Event)
    _wrote: bool = False
    _spared: dict[tuple[str, int], float] = field(default_factory=dict)
    _copies: StoreCache = field(init=False)
    _clock: ended.SchedulerClock = field(init=False)
    _watch: Watch | None = None

    def __post_init__(self) -> None:
        self._clock = ended.SchedulerClock(self.store)
        self._copies = StoreCache(self.store, self._sentences.append)
        self._key = LeasedKey(
            self.store, names.SCHEDULER, self.lease_s, self.renewal_s, is_own=self._is_own, announce=self.announce
        )

    @property
    def is_leader(self) -> bool:
        """True while this daemon is the one."""
        return self.version is not None

    def turn(self, now: float) -> list[str]:
        """Take or keep the key; if it is ours, write what `placing` says. What was done, in sentences.

        Raises StoreUnavailable; what is known of absent nodes is forgotten then, because an outage ages nobody.
        """
        self._sentences.clear()
        try:
            if self._hold(now):
                self._place(now)
        except StoreUnavailable:
            self._copies.clear()
            self._stale.set()
            self._try_at = 0.0
            self._away.clear()
            raise
        return list(self._sentences)

    def close(self) -> None:
        """Let another daemon place. Raises StoreUnavailable."""
        self._lost()
        if self._key_watch is not None:
            self._key_watch.close()
            self._key_watch = None
        self._key.withdraw()

    # ---- the key

    def _hold(self, now: float) -> bool:
        if not self._key.renew(now):
            if now < self._try_at:
                return False
            if self._key_watch is None:
                self._key_watch = self.store.watch(names.SCHEDULER, self._freed)
            self._lost()
            value = json.dumps({"node": self.node, "incarnation": self.incarnation}).encode()
            # To ask every second would cost a large store more than all else; its watch says when the key is free, and
            # may say so while we ask.
            self._try_at = now + REFRESH_S
            if not self._key.create(value, now):
                return False
        if self.version is None:
            version = self._key.read_version()
            if version is None:
                self.close()
                return False
            self.version = version
            self._watch = self.store.watch(f"{names.ROOT}/", self._hint)
            self._sentences.append(f"{self.node} places jobs from now on")
        return True

    def _is_own(self, value: bytes) -> bool:
        try:
            said = json.loads(value)
        except ValueError:
            return False
        return isinstance(said, dict) and said.get("incarnation") == self.incarnation

    def _lost(self) -> None:
        if self._watch is not None:
            self._watch.close()
            self._watch = None
        self.version = None
        self._clock.reset()
        self._copies.clear()
        self._stale.set()
        self._cards.clear()
        self._away.clear()

    def _freed(self, key: str) -> None:
        """The placer's key has changed or gone."""
        self._try_at = 0.0
        self.changed()

    def _hint(self, key: str) -> None:
        if not key.startswith(f"{names.ROOT}/jobs/"):
            self._copies.invalidate(key)
            self._stale.set()
            self.changed()

    # ---- placing

    def _place(self, now: float) -> None:
        if now >= self._read_at + REFRESH_S:
            self._stale.set()
            self._copies.drop((names.ROOT,))
            self._read_at = now
        if now >= self._forget_at:
            self._copies.clear()
            self._forget_at = now + DROP_DECODED_S
        if not self._stale.is_set():
            return
        self._stale.clear()  # before the first look: what changes from now on is looked at in the next turn
        view = self._view(now)
        self._wrote = False
        if all(self._placed(placement) for placement in placing.schedule(view)):
            self._clean(view, now)
        if self._wrote:
            self._copies.invalidate(names.PLACEMENTS)  # a watch will say so, too; but perhaps not yet
            self._stale.set()
        if self._away:
            self._stale.set()  # they are given up at some moment, whether anything changes or not

    def _placed(self, placement: Placement) -> bool:
        if not self._write(placement):
            return False
        self._sentences.append(f"job {placement.job}: {placement.reason}")
        return True

    def _write(self, placement: Placement) -> bool:
        """False: somebody else has written, perhaps another placer; the next turn looks again."""
        key = names.PLACEMENTS + placement.job
        before = self._copies.list(names.PLACEMENTS).get(key)
        version = None if before is None else before.version
        if self.store.compare_and_swap(key, version, placement.to_json(), self._guard):
            self._wrote = True
            return True
        self._copies.clear()
        self._stale.set()
        found = self.store.read(names.SCHEDULER)
        if found is None or found.version != self.version:
            self._sentences.append("another daemon places jobs now")
            self._lost()
        return False

    def _clean(self, view: placing.ClusterView, now: float) -> None:
        """Remove what is left of jobs that ended long ago."""
        reached_s = max((p.ended_s for p in view.placements if p.ended_s is not None), default=0.0)
        clock_s = self._clock.now_s(now, self._guard, reached_s)
        for placement in ended.stamp_results(view, clock_s):
            if not self._write(placement):
                return
        outdated = ended.expired(view, clock_s, self.retention_s, self.max_results)
        keys = {(ending.job, ending.number) for ending in outdated}
        self._spared = {key: until for key, until in self._spared.items() if key in keys and now < until}
        for ending in [e for e in outdated if (e.job, e.number) not in self._spared][: ended.REMOVALS_PER_TURN]:
            self._copies.clear()
            self._stale.set()
            if ended.remove_records(self.store, ending, self.node, self.lease_s):
                self._sentences.append(f"the records of job {ending.job}, number {ending.number}, were removed")
            else:
                self._spared[ending.job, ending.number] = now + RETRY_REMOVAL_S

    @property
    def _guard(self) -> tuple[str, int]:
        assert self.version is not None
        return names.SCHEDULER, self.version

    def _view(self, now: float) -> placing.ClusterView:
        found, odd = self._copies.decoded(names.NODES, NodeStatus)
        cards = {card.node: card for card in found}
        placements = tuple(self._records(names.PLACEMENTS, Placement))
        for node in [key.removeprefix(names.NODES) for key in odd]:
            # One that another version wrote: what runs there stays, nothing new comes.
            slots = [slot for p in placements if (place := p.assignment(node)) is not None for slot in place.slots]
            card = self._cards.get(node, NodeStatus(node, "", max(slots, default=-1) + 1))
            cards[node] = replace(card, state="cordoned", why="its card cannot be understood")
        self._cards |= cards
        placed = {place.node for placement in placements for place in placement.assignments}
        absent = (self._cards.keys() | placed) - cards.keys()
        self._away = {node: self._away.get(node, now) for node in sorted(absent)}
        given_up = {node for node, since in self._away.items() if now >= since + self.adopt_timeout_s}
        for node in given_up - placed:
            self._cards.pop(node, None)
            del self._away[node]
        away = tuple(self._cards.get(node) or NodeStatus(node, "", 0) for node in self._away if node not in given_up)
        return placing.ClusterView(
            nodes=tuple(cards.values()),
            cordons=tuple(self._records(names.CORDONS, Cordon)),
            submissions=self._readable(),
            placements=placements,
            results=tuple(self._records(names.RESULTS, JobResult)),
            absent=away,
            left_behind=self._left_behind(placements),
        )

    def _readable(self) -> tuple[Submission, ...]:
        """Without those whose placement or ending cannot be understood: they are left as they are."""
        odd = {key.removeprefix(names.PLACEMENTS) for key in self._copies.decoded(names.PLACEMENTS, Placement)[1]}
        odd |= {key.removeprefix(names.RESULTS) for key in self._copies.decoded(names.RESULTS, JobResult)[1]}
        return tuple(s for s in self._records(names.SUBMISSIONS, Submission) if s.job not in odd)

    def _left_behind(self, placements: tuple[Placement, ...]) -> frozenset[tuple[str, str]]:
        """Places on absent nodes that their jobs have gone on without: the job's own Round does not have the node."""
        found = set()
        for placement in placements:
            absent = [place.node for place in placement.assignments if place.node in self._away]
            if absent and (round := self._round(placement)) is not None:
                found |= {(placement.job, node) for node in absent if round.member(node) is None}
        return frozenset(found)

    def _round(self, placement: Placement) -> Round | None:
        """The Round that this run of the job has now, if it is in this store."""
        key = Keys(placement.job).round
        found = self.store.read(key)
        try:
            round = None if found is None else decode_record(Round, key, found.value)
        except WireError:
            return None
        return round if round is not None and round.run == str(placement.number) and not round.terminal else None

    def _records(self, prefix: str, kind: type[D]) -> list[D]:
        return self._copies.records(prefix, kind)
