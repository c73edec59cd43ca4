"""The take-over of a store that one of the job's agents hosted: another member hosts the next one.

A c10d store ends with the agent that hosts it, and then nobody leads. All that matters in the store is the Round, and
every member has it in memory. So the members need only agree on who hosts an empty store, and write the Round there.

**This module finds a store; it promises nothing.** Two agents may host one at the same time, on two sides of a
partition. At most one side continues, and that is the subject of `succession`, which counts readers of a Round. Nothing
here may be relied on for it, and so probes, timeouts and guesses are enough here. Two things `succession` does rely on:
each store has a term, a later one a higher term, and an agent uses stores in the order of their terms (`pin`,
`follow_store_of`).

The order of a take-over:

1. *A store is lost* to a member when the port of its host's agent is closed, when the host itself uses another one, or
   when it has not answered for longer than a lease. Of a store that this agent hosts: when too few members use it. A
   host that is cut off would otherwise wait for members that have gone.
2. *The member says so* where it answers probes, and probes the others. It follows the latest store that any of them
   names and that it can connect to.
3. *If there is none*, the first of those that have lost theirs, in the Round's order after the host, hosts the next
   one: once they are more than half of the members. Without the majority each side of every short interruption would
   begin a store of its own; without an order all of a side would. A member asks its nearest deputies first, since a
   thousand members that probe a thousand others would be an outage of their own.
4. *The new leader publishes the Round again* with the new term, before any other Round (`succession.adoption`).
5. *Newcomers* know only the first address. The new host says there where the store is, once something answers there
   again (`store/c10d/signpost.py`).

**The way back.** A store in which no Round was published, nor will be, binds nobody. If its host finds that the store
before answers again, it returns, and its members follow. Without this a short interruption that moved three of five
members would leave two of them where no quorum can form. A host that has published a Round never returns.

docs/adr/0011 has the alternatives.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import TYPE_CHECKING

from elasticd.errors import StoreUnavailable
from elasticd_agent.model.job import Policy
from elasticd_agent.model.records import NodeRecord, Round, StoreLife, store_term
from elasticd_agent.rendezvous.peers import PeerNetwork
from elasticd_agent.rendezvous.probe import Address, ProbeAlive, ProbeRefused
from elasticd_agent.system.network.addresses import format_endpoint, parse_endpoint, try_parse_endpoint

if TYPE_CHECKING:
    from elasticd_agent.store.c10d.connection import C10dConnection

DEPUTIES_ASKED_FIRST = 8
"""The deputies that every member probes. Only if none of them is without its store does it probe all members."""
GO_BACK_AFTER_S = 2.0
"""Members that have said that they have lost their store are in the next one by then, unless theirs is back."""
_HOST_PROBE_NAME = "host of the store"


def deputies(round: Round) -> list[str]:
    """The members in order, from the one after the store's host."""
    agent = round.store.agent if round.store is not None else ""
    names = [m.node for m in round.members]
    at = next((i + 1 for i, m in enumerate(round.members) if m.address == agent), 0)
    return names[at:] + names[:at]


def choose_store(
    me: str,
    round: Round,
    life: StoreLife,
    hosts: bool,
    leaving: bool,
    answers: Mapping[str, ProbeAlive],
    reached: Collection[StoreLife],
) -> StoreLife | int | None:
    """The next act of an agent without its store: the life that it uses, the count of that it hosts, or None: wait.

    `life`: of the store it has lost, `hosts`: its own, which too few members use. `answers`: of other members,
    `reached`: the stores they named that this agent can connect to.
    """
    if later := [other for other in reached if other.term > life.term]:
        return max(later, key=lambda other: other.term)
    newest = max([life, *(a.store for a in answers.values() if a.store is not None)], key=lambda other: other.term)
    order = deputies(round)
    votes = {node for node, answer in answers.items() if answer.lost} | {me}.intersection(order)
    ready = {node for node in votes if not (leaving if node == me else answers[node].leaving)}
    if 2 * len(votes) <= len(order) or me != min(ready, key=order.index, default=None):
        return None
    return None if hosts and newest == life else newest.earlier_lives + 1


class TakeOver:
    """One agent's. It belongs to the thread that talks to the store. Times are monotonic seconds."""

    def __init__(
        self,
        store: C10dConnection,
        record: NodeRecord,
        policy: Policy,
        network: PeerNetwork,
        show_way: Callable[[Round | None], None],
        log: Callable[[str], None],
    ) -> None:
        """`show_way` gets the Round that runs while this agent hosts its store instead of an earlier host, else None:
        newcomers look for the store at its first address."""
        self._store = store
        self._node, self._incarnation = record.identity
        self._address = record.address
        self._few_s, self._silent_s = policy.renewal_s, policy.lease_s + 2 * policy.renewal_s
        self._network = network
        self._show_way = show_way
        self._log = log
        self._life: StoreLife | None = None
        self._answered_at = float("-inf")
        self._few_since: float | None = None
        self._before: StoreLife | None = None  #: which this agent used before `_life`
        self._published: tuple[StoreLife | None, bool, bool] = None, False, False

    @property
    def hosted(self) -> StoreLife | None:
        """The life of the store that this agent hosts, if another agent may host the next one."""
        store = self._store
        if not store.hosts or not store.term:
            return None
        if self._life is None or self._life.term != store.term:
            self._life = self._own_life(store.term)
            store.pin(store.term)
        return self._life

    def _took_over(self, round: Round) -> bool:
        """True if `round` was published in a store that this agent hosts instead of an earlier host."""
        life = self._life
        return life is not None and life.earlier_lives > 0 and self._store.hosts and round.store_term == life.term

    def store_answered(self, now: float, too_few: bool) -> None:
        """The store has answered all requests of a turn. `too_few`: it is hosted here, and too few members use it."""
        self._answered_at = now
        self._few_since = None if not too_few else now if self._few_since is None else self._few_since

    def follow_store_of(self, round: Round, now: float) -> bool:
        """Follow the store that `round`, which was read in this agent's, names. True if that is another one."""
        life = round.store
        if life is None or round.terminal or life.term < self._store.term:
            return False
        if life.term == self._store.term:
            self._life = life
            self._store.pin(life.term)
            return False
        return self._follow(life, now, keep_own_server=True)

    def turn(self, round: Round | None, leaving: bool, published_term: int, now: float) -> bool:
        """Look for another store if this agent's is lost; True: there is one. Raises StoreUnavailable: none yet.

        `published_term`: the term of the last store in which this agent has published a Round, or may have.
        """
        life = self._life
        self._show_way(round if round is not None and self._took_over(round) else None)
        if life is None or round is None:
            return False
        why = self._loss_reason(life, now)
        self._set_probe_answer(bool(why), leaving)
        if (back := self._store_to_return_to(life, published_term == life.term, now)) is not None:
            moved = self._follow(back, now, keep_own_server=False)
            self._before = None
            return moved
        if not why:
            return False
        chosen = self._choose_by_probes(round, life, leaving)
        if isinstance(chosen, StoreLife):
            self._log(why)
            return self._follow(chosen, now, keep_own_server=False)
        if isinstance(chosen, int):
            self._log(f"{why}; this agent hosts the job's store now")
            term = store_term(chosen, self._incarnation)
            try:
                self._store.host(term)
            except OSError as error:
                raise StoreUnavailable(f"{why}; this agent cannot host one: {error.strerror or error}") from None
            self._life, self._before = self._own_life(term), life
            return self._note_move(now)
        if self._store.hosts:
            return False  # its own one answers it, at least
        raise StoreUnavailable(f"{why}; no member hosts another one, and too few have lost it for that")

    def _loss_reason(self, life: StoreLife, now: float) -> str:
        """Why the store counts as lost, in words, or ""."""
        where = f"the store at {life.endpoint}"
        if self._store.answers:
            few_s = 0.0 if self._few_since is None else now - self._few_since
            return f"too few members have used {where} for {few_s:.0f} s" if few_s > self._few_s else ""
        address = try_parse_endpoint(life.agent)
        if address is not None and life.agent != self._address:
            answer = self._network.probe({_HOST_PROBE_NAME: address}).get(_HOST_PROBE_NAME)
            if isinstance(answer, ProbeRefused):
                return f"{where} is lost: the port of its host's agent is closed"
            if isinstance(answer, ProbeAlive) and answer.store is not None and answer.store.term > life.term:
                return f"{where} is lost: its host uses another one"
        silent_s = now - self._answered_at
        return f"{where} has not answered for {silent_s:.0f} s" if silent_s > self._silent_s else ""

    def _store_to_return_to(self, life: StoreLife, used: bool, now: float) -> StoreLife | None:
        """The store before, if no Round was published in this one, nor will be: nobody's promise to it binds anybody.

        Its host goes back once the host before answers again; the others do once its agent says that it did.
        """
        before, hosts = self._before, self._store.hosts
        few_s = 0.0 if self._few_since is None else now - self._few_since
        if before is None or used or (few_s < GO_BACK_AFTER_S if hosts else self._store.answers):
            return None
        asked = before if hosts else life
        address = try_parse_endpoint(asked.agent)
        answer = self._network.probe({_HOST_PROBE_NAME: address}).get(_HOST_PROBE_NAME) if address is not None else None
        if not isinstance(answer, ProbeAlive) or answer.store is None:
            return None
        if store_term(asked.earlier_lives, answer.incarnation) != asked.term:
            return None  # another agent has that port now
        if hosts:
            back = answer.store == before and not answer.lost and self._reaches_store(before)
        else:
            back = answer.store.term < life.term
        return before if back else None

    def _choose_by_probes(self, round: Round, life: StoreLife, leaving: bool) -> StoreLife | int | None:
        """Probe the nearest deputies first: where one of them has lost the store, too, it decides."""
        addresses = {m.node: try_parse_endpoint(m.address) for m in round.members if m.node != self._node}
        others = {node: address for node, address in addresses.items() if address is not None}
        order = deputies(round)
        before = order[: order.index(self._node)] if self._node in order else order
        first = {node: others[node] for node in before[:DEPUTIES_ASKED_FIRST] if node in others}
        answers = self._probe_members(round, first)
        hosts, reached = self._store.hosts, self._reachable_stores(answers)
        chosen = choose_store(self._node, round, life, hosts, leaving, answers, reached)
        if chosen is None and not any(a.lost and not a.leaving for a in answers.values()):
            answers |= self._probe_members(round, {node: at for node, at in others.items() if node not in first})
            chosen = choose_store(self._node, round, life, hosts, leaving, answers, self._reachable_stores(answers))
        return chosen

    def _probe_members(self, round: Round, addresses: dict[str, Address]) -> dict[str, ProbeAlive]:
        incarnations = {m.node: m.incarnation for m in round.members}
        answers = self._network.probe(addresses) if addresses else {}
        return {n: a for n, a in answers.items() if isinstance(a, ProbeAlive) and a.incarnation == incarnations[n]}

    def _reachable_stores(self, answers: Mapping[str, ProbeAlive]) -> set[StoreLife]:
        return {life for life in {a.store for a in answers.values()} if life is not None and self._reaches_store(life)}

    def _reaches_store(self, life: StoreLife) -> bool:
        address = try_parse_endpoint(life.endpoint)
        return life == self._life or (address is not None and self._network.reaches(address))

    def _follow(self, life: StoreLife, now: float, *, keep_own_server: bool) -> bool:
        """`keep_own_server`: a store that is hosted here keeps saying where the job's is."""
        address = try_parse_endpoint(life.endpoint)
        if address is None:
            return False
        self._log(f"the job's store is at {life.endpoint} now")
        self._store.move(address, life.term, keep_own_server)
        self._life, self._before = life, self._life
        return self._note_move(now)

    def _note_move(self, now: float) -> bool:
        self._answered_at = now
        self._few_since = None
        self._set_probe_answer(False, False)
        return True

    def _own_life(self, term: int) -> StoreLife:
        host, _ = parse_endpoint(self._address)
        return StoreLife(term, self._address, format_endpoint(host, self._store.port))

    def _set_probe_answer(self, lost: bool, leaving: bool) -> None:
        answer = self._life, lost, leaving
        if answer != self._published:
            self._published = answer
            self._network.set_probe_answer(*answer)
