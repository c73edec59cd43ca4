"""This node's seat at the table: announced under a lease, it hears of every Round, and plans if the key is its own.

It exists so that the deciding loop never waits for a store. Each turn re-reads what a watch has named, sends what the
loop has reported, and answers with messages for the loop; a store that is away is tried again later, and nothing is
lost meanwhile: reports wait. It knows nothing of processes.
"""

from __future__ import annotations

import json
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from elasticd.errors import StoreRefused, StoreUnavailable, UsageError, WireError
from elasticd.wire import Failure, NodeRecord, Round
from elasticd_agent.addresses import split
from elasticd_agent.config import Policy
from elasticd_agent.knock import Answered, Refused
from elasticd_agent.messages import RoundPublished, StoreAbandoned
from elasticd_agent.news import Awaited, HoldAsked, MasterKnown, News, Rejected, StoreSeen
from elasticd_agent.planner import Keys, Planner
from elasticd_agent.store import Lease, Store, Versioned, Watch
from elasticd_agent.view import Wait

USURP_AFTER_S = 0.15
"""A planner that has not answered our report for so long is asked whether it is still there."""
VACANT_S = 1.0
"""How long the members of a Round have the planner's key to themselves when it is free."""
CONFLICT_S = 0.5
FIRST_CONTACT_S = 60.0
"""A store that has never answered is a wrong endpoint, or starts later than everybody else: torchrun waits as long."""
RETRY_S = (0.05, 0.1, 0.2, 0.4, 0.8)


Turned = tuple[list[News], float | None]


class Coordinator:
    """One agent's part in one job. `turn` belongs to one thread; the reports may come from another."""

    def __init__(
        self,
        store: Store,
        keys: Keys,
        policy: Policy,
        record: NodeRecord,
        planner: Planner,
        agreed: bytes,
        differences: Callable[[bytes, bytes], str | None],
        *,
        may_plan: bool = True,
        attentive: Callable[[], bool] = lambda: True,
    ) -> None:
        self._store, self._keys, self._policy, self._planner = store, keys, policy, planner
        self._agreed, self._differences = agreed, differences
        self._may_plan, self._attentive = may_plan, attentive
        self._record, self._written = record, b""
        self._record_lock = threading.Lock()
        self._outbox: deque[tuple[str, bytes]] = deque()
        self._stale: set[str] = {keys.round, keys.planner, keys.hold, keys.master()}
        self._lease: Lease | None = None
        self._record_version = 0
        self._renew_at = 0.0
        self._watches: list[Watch] = []
        self._round: Round | None = None
        self._stored: Versioned | None = None
        self._master_for = 0
        self._held_for = 0
        self._mine: int | None = None  # the version of the planner's key, if it is ours
        self._planned_by: tuple[NodeRecord, int] | None = None
        self._planner_answered: str | None = None
        self._vacant_since: float | None = None
        self._trouble_since: float | None = None
        self._usurp_at: float | None = None
        self._away_since: float | None = None
        self._tries = 0
        self._last_turn = float("-inf")
        self._agreed_on = False
        self._news: list[News] = []
        self._rejected = self._awaited = ""
        self._hinted: Callable[[], None] = lambda: None

    def on_hint(self, call: Callable[[], None]) -> None:
        """`call` after every hint, from whatever thread it came."""
        self._hinted = call

    # --- reports, from the deciding thread --------------------------------------------------------------------------

    def update(self, **fields: Any) -> None:
        """Set fields of this node's record."""
        with self._record_lock:
            self._record = replace(self._record, **fields)

    def failed(self, failure: Failure, now: float) -> None:
        self._outbox.append((self._keys.failures(failure.round) + self._record.id, failure.to_json()))
        self._trouble_since = now

    def done(self, number: int) -> None:
        self._outbox.append((self._keys.done(number) + self._record.id, b"done"))

    def master(self, number: int, address: str, port: int) -> None:
        self._outbox.append((self._keys.master(number), json.dumps([address, port]).encode()))

    def hint(self, key: str) -> None:
        """A watch has named `key`."""
        for stale in (self._keys.round, self._keys.planner, self._keys.hold):
            if key == stale:
                self._stale.add(stale)
        if key.startswith(self._keys.master()):
            self._stale.add(self._keys.master())
        self._planner.hint(key)
        self._hinted()

    @property
    def plans(self) -> bool:
        """True while this agent is the job's planner."""
        return self._mine is not None

    # --- turns ------------------------------------------------------------------------------------------------------

    def turn(self, now: float) -> Turned:
        """Do what is to be done. Returns what the loop must hear, and when to come back at the latest."""
        self._news = []
        if now > self._last_turn + 2 * self._policy.renewal_s:
            self._planner.store_up_since = now  # nobody listened: what was not heard means nothing
        self._last_turn = now
        try:
            until = self._turn(now)
        except StoreUnavailable as error:
            until = self._away(str(error), now)
        except (StoreRefused, WireError) as error:
            if str(error) != self._rejected:
                self._rejected = str(error)
                self._news.append(Rejected(self._rejected))
            until = now + self._policy.renewal_s
        return self._news, until

    def _turn(self, now: float) -> float | None:
        self._agree()
        if not self._announced(now):
            return now + CONFLICT_S
        self._send()
        self._hear_rounds()
        self._hear_details()
        self._send()
        until = self._lead(now)
        if self._away_since is not None:
            self._news.append(StoreSeen(False, "the store answers again", now - self._away_since))
            self._away_since, self._tries = None, 0
        times = (self._renew_at, until, self._usurp_at)
        return min(at for at in times if at is not None)

    def _away(self, why: str, now: float) -> float:
        if self._away_since is None:
            self._away_since = now
            self._news.append(StoreSeen(True, why, 0.0))
            self._planner.forget()
        self._planner.store_up_since = float("inf")
        self._stale |= {self._keys.round, self._keys.planner, self._keys.hold, self._keys.master()}
        self._renew_at = now
        away_s = now - self._away_since
        if not self._agreed_on and away_s >= min(FIRST_CONTACT_S, self._policy.join_timeout_s):
            self._news.append(Rejected(f"no answer from the store within {away_s:.0f} s: {why}"))
        elif away_s >= self._policy.store_away_s:
            self._news.append(StoreAbandoned(f"the store has been away for {away_s:.0f} s: {why}", now))
        retry_s = RETRY_S[min(self._tries, len(RETRY_S) - 1)]
        self._tries += 1
        return now + min(retry_s, self._policy.lease_s / 3)

    # --- being here -------------------------------------------------------------------------------------------------

    def _agree(self) -> None:
        """The first agent of a job says what it is; every other one compares."""
        if self._agreed_on:
            return
        found = self._store.read(self._keys.spec)
        if found is None:
            if not self._store.compare_and_swap(self._keys.spec, None, self._agreed):
                return self._agree()
        elif found.value != self._agreed and (why := self._differences(self._agreed, found.value)) is not None:
            stored = self._store.read(self._keys.round)
            over = stored is not None and Round.from_json(stored.value).terminal
            if not over:
                raise StoreRefused(f"job {self._keys.job!r} runs with another command: {why}")
            if not self._store.compare_and_swap(self._keys.spec, found.version, self._agreed):
                return self._agree()
        self._agreed_on = True
        prefixes = [self._keys.round, self._keys.planner, self._keys.master(), self._keys.hold]
        self._watches = [self._store.watch(prefix, self.hint) for prefix in prefixes]

    def _announced(self, now: float) -> bool:
        """Keep the node's record alive; announce it anew if its lease has ended."""
        if self._lease is not None and now >= self._renew_at and self._attentive():
            if self._lease.renew():
                self._renew_at = now + min(self._policy.renewal_s, self._lease.ttl_s / 3)
                return True
            self._lease = None
            self._lost_key()
        if self._lease is not None:
            return True
        key, value = self._keys.node(self._record.id), self._record.to_json()
        lease = self._store.announce(key, value, self._policy.lease_s)
        if lease is None:
            self._conflict(key)
            return False
        self._lease, self._written = lease, value
        self._record_version = 0
        self._renew_at = now + min(self._policy.renewal_s, lease.ttl_s / 3)
        return True

    def _conflict(self, key: str) -> None:
        """Somebody has our name: another agent, or we before we were killed."""
        found = self._store.read(key)
        if found is None:
            return
        other = NodeRecord.from_json(found.value)
        if other.incarnation != self._record.incarnation:
            answer = self._planner.knock({other.id: split(other.address)}).get(other.id) if other.address else None
            if isinstance(answer, Answered) and answer.incarnation == other.incarnation:
                raise StoreRefused(
                    f"another agent takes part in job {self._keys.job!r} as node {other.id!r}, at {other.address}; "
                    "give this one another name with --node-id"
                )
            if not isinstance(answer, Refused):
                return  # it does not speak: its lease decides
        self._store.delete(key)

    def _send(self) -> None:
        while self._outbox:
            self._store.compare_and_swap(*_create(self._outbox[0]))
            self._outbox.popleft()
        value = self._record.to_json()
        if value == self._written or self._lease is None:
            return
        key = self._keys.node(self._record.id)
        if not self._record_version:
            found = self._store.read(key)
            self._record_version = found.version if found is not None else 0
        version = self._lease.hold(key, value, self._record_version or None)
        if version is None:  # the lease has ended behind our back, or somebody deleted the record
            self._lease, self._record_version = None, 0
            self._lost_key()
            return
        self._record_version, self._written = version, value

    # --- hearing ----------------------------------------------------------------------------------------------------

    def _hear_rounds(self) -> None:
        if self._keys.round not in self._stale:
            return
        self._stale.discard(self._keys.round)
        try:
            self._stored = found = self._store.read(self._keys.round)
        except StoreUnavailable:
            self._stale.add(self._keys.round)
            raise
        known = self._round
        if found is None:
            if known is not None and not known.terminal:
                # A store that came back empty: whoever runs a Round says which.
                self._store.compare_and_swap(self._keys.round, None, known.to_json())
                self._stale.add(self._keys.round)
            return
        round = Round.from_json(found.value)
        if known is not None and not known.terminal and round.number < known.number:
            self._store.compare_and_swap(self._keys.round, found.version, known.to_json())
            self._stale.add(self._keys.round)
            return
        another_run = round.terminal and round.run != self._planner.asked.run
        if (known is None or round.number > known.number) and not another_run:
            self._published(round)

    def _published(self, round: Round) -> None:
        self._round = round
        self._trouble_since = self._usurp_at = None
        self._stale |= {self._keys.master(), self._keys.hold}
        self.update(seen=round.number, held=0)
        self._news.append(RoundPublished(round))

    def _hear_details(self) -> None:
        """Where the workers' store is, and whether rank 0 shall hold: each for those it concerns."""
        round = self._round
        if round is None or round.terminal or round.member(self._record.id) is None:
            return
        first = round.group_rank(self._record.id) == 0
        if not first and self._master_for != round.number and self._keys.master() in self._stale:
            self._stale.discard(self._keys.master())
            found = self._store.read(self._keys.master(round.number))
            if found is not None:
                address, port = json.loads(found.value)
                self._master_for = round.number
                self._news.append(MasterKnown(round.number, address, port))
        if first and self._keys.hold in self._stale:
            self._stale.discard(self._keys.hold)
            found = self._store.read(self._keys.hold)
            wanted = round.number if found is not None and found.value == str(round.number).encode() else 0
            if wanted != self._held_for:
                self._held_for = wanted
                self._news.append(HoldAsked(round.number, bool(wanted)))

    # --- planning ---------------------------------------------------------------------------------------------------

    def _lead(self, now: float) -> float | None:
        if not self._may_plan:
            return None
        if self._keys.planner in self._stale:
            self._see_planner(now)
        if self._mine is None:
            return self._claim(now)
        if self._planner.store_up_since == float("inf"):
            self._planner.store_up_since = now
        verdict = self._planner.turn(self._stored, now, (self._keys.planner, self._mine))
        if isinstance(verdict, Round):
            self._stale.add(self._keys.round)
            self._published(verdict)
            return now
        if isinstance(verdict, Wait) and verdict.until == now:
            self._stale |= {self._keys.round, self._keys.planner}
        if isinstance(verdict, Wait) and verdict.short and verdict.why != self._awaited:
            self._awaited = verdict.why
            self._news.append(Awaited(verdict.why))
        return verdict.until

    def _see_planner(self, now: float) -> None:
        self._stale.discard(self._keys.planner)
        found = self._store.read(self._keys.planner)
        if found is None:
            self._lost_key()
            if self._vacant_since is None:
                self._vacant_since = now
            return
        self._vacant_since = None
        record = NodeRecord.from_json(found.value)
        if record.incarnation == self._record.incarnation:
            self._mine = found.version
            return
        self._lost_key()
        self._planned_by = (record, found.version)
        if self._planner_answered != record.incarnation and isinstance(self._knock(record), Answered):
            self._planner_answered = record.incarnation
            self._planner.trust(record)

    def _claim(self, now: float) -> float | None:
        """Take the planner's key where it is free, or where the planner is gone."""
        assert self._lease is not None or self._record_version == 0
        if self._lease is None:
            return now
        if self._vacant_since is not None:
            round = self._round
            outsider = round is not None and not round.terminal and round.member(self._record.id) is None
            if outsider and now < self._vacant_since + VACANT_S:
                return self._vacant_since + VACANT_S
            return self._take(None, now)
        if self._trouble_since is None or self._planned_by is None:
            return None
        self._usurp_at = max(self._usurp_at or 0.0, self._trouble_since + USURP_AFTER_S)
        if now < self._usurp_at:
            return self._usurp_at
        record, version = self._planned_by
        self._usurp_at = now + self._policy.renewal_s
        if self._planner_answered == record.incarnation and isinstance(self._knock(record), Refused):
            return self._take(version, now)
        return self._usurp_at

    def _take(self, expected: int | None, now: float) -> float:
        assert self._lease is not None
        self._mine = self._lease.hold(self._keys.planner, self._record.to_json(), expected)
        self._stale |= {self._keys.planner, self._keys.round}
        self._usurp_at = None
        if self._mine is not None:
            self._vacant_since = None
            self._planner.forget()
            prefixes = [self._keys.nodes, self._keys.failures(), self._keys.done()]
            self._watches[4:] = [self._store.watch(prefix, self.hint) for prefix in prefixes]
        return now

    def _lost_key(self) -> None:
        if self._mine is not None:
            self._mine = None
            self._planner.forget()
            for watch in self._watches[4:]:
                watch.close()
            del self._watches[4:]
            self._stale.add(self._keys.planner)

    def _knock(self, record: NodeRecord) -> object:
        return self._planner.knock({record.id: split(record.address)}).get(record.id) if record.address else None

    def others_gone(self) -> bool:
        """True once every other node has left: whoever hosts the store must not go before. Raises StoreUnavailable."""
        return set(self._store.list(self._keys.nodes)) <= {self._keys.node(self._record.id)}

    def close(self) -> None:
        """Leave the table: the record and the planner's key go at once. Raises nothing."""
        for watch in self._watches:
            watch.close()
        if self._lease is not None:
            try:
                self._lease.withdraw()
            except (StoreUnavailable, UsageError):
                pass  # it runs out by itself


def _create(entry: tuple[str, bytes]) -> tuple[str, None, bytes]:
    key, value = entry
    return key, None, value
