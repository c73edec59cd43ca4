"""Builds the planner's View: the records in the store, and when this agent first saw each of them."""

from __future__ import annotations

from elasticd_agent.model.keys import Keys
from elasticd_agent.model.records import Failure, Identity, NodeRecord, Round
from elasticd_agent.rendezvous.observations import PeerObservations
from elasticd_agent.rendezvous.view import LocalFacts, PresentNode, Requirements, View
from elasticd_agent.store.cache import StoreCache


class ViewReader:
    """One job's. Reading may raise StoreUnavailable."""

    def __init__(
        self, cache: StoreCache, keys: Keys, requirements: Requirements, observations: PeerObservations
    ) -> None:
        self._cache = cache
        self._keys = keys
        self._requirements = requirements
        self._observations = observations
        self._round_at: dict[int, float] = {}
        self._failed_at: dict[int, float] = {}
        self._joined_at: dict[Identity, float] = {}
        self._absent_since: dict[str, float] = {}
        self._short_since: float | None = None
        self.too_few_nodes = False  #: by the last verdict; `short_since` counts from the first one

    def reset(self) -> None:
        """Another node led, or the store was away: what was absent then may have come back unseen."""
        self._absent_since.clear()
        self._short_since = None

    def forget_before(self, number: int) -> None:
        """Round `number` was published."""
        for times in (self._round_at, self._failed_at):
            for old in [known for known in times if known < number]:
                del times[old]
        self._short_since = None

    def read(self, current: Round | None, facts: LocalFacts, now: float) -> View:
        number = current.number if current is not None else 0
        records = self._cache.records(self._keys.nodes, NodeRecord)
        failures = self._cache.records(self._keys.failures(number), Failure)
        done = self._cache.list(self._keys.done(number))
        if failures:
            self._failed_at.setdefault(number, now)
        present = {r.id for r in records}
        self._observations.listed(present, now)
        members = {m.node for m in current.members} if current is not None else set()
        self._absent_since = {node: self._absent_since.get(node, now) for node in sorted(members - present)}
        self._forget_departed(records, current)
        return View(
            current=current,
            nodes=tuple(PresentNode(r, self._joined_at.setdefault(r.identity, now)) for r in records),
            requirements=self._requirements,
            failures=tuple(failures),
            done=frozenset(key.rpartition("/")[2] for key in done),
            stop=facts.stop,
            first_number=facts.first_number,
            checkpoint=_newest_checkpoint(records, facts, current),
            high_water=max([facts.high_water, *(r.high_water for r in records)]),
            round_at=self._round_at.setdefault(number, now),
            failed_at=self._failed_at.get(number, now),
            absent_since=tuple(self._absent_since.items()),
            store_up_since=self._observations.store_up_since,
            next_step_due=facts.next_step_due,
            short_since=self._update_short_since(records, now),
            silent_since=tuple(self._observations.silent_since.items()),
        )

    def _update_short_since(self, records: list[NodeRecord], now: float) -> float | None:
        available = sum(1 for r in records if r.slots and not r.leaving)
        if not self.too_few_nodes and available >= self._requirements.min_nodes:
            self._short_since = None
        elif self._short_since is None:
            self._short_since = now
        return self._short_since

    def _forget_departed(self, records: list[NodeRecord], current: Round | None) -> None:
        """A node that comes back joins anew: once it has a record again and, if it was left out, can be taken again."""
        here = {r.identity for r in records}
        if current is not None and not current.terminal:
            out = {e.node for e in current.excluded} - {m.node for m in current.members}
            unreachable = self._observations.unreachable
            here -= {
                r.identity for r in records if r.id in out and (r.seen_round != current.number or r.id in unreachable)
            }
        self._joined_at = {identity: at for identity, at in self._joined_at.items() if identity in here}


def _newest_checkpoint(records: list[NodeRecord], facts: LocalFacts, current: Round | None) -> tuple[int, int] | None:
    proposed = [*(r.checkpoint for r in records), facts.checkpoint, current.last_checkpoint if current else None]
    return max((c for c in proposed if c is not None), default=None)
