"""A model of docs/adr/0011: the agents of a c10d job, whose store dies with its host, choose another host.

Time goes by in ticks. In each, every agent that runs takes a turn: it asks its store, or, without one, its peers. What
a message or a lease takes in reality is a tick or a few. A Round trains while all of its members hold it and reach each
other; agents that are frozen are counted in, because their workers may train on.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass, field

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

LEASE, SEEN, FRESH = 3, 1, 1
"""A store holds an agent's lease for LEASE ticks; who has not read a new Round within SEEN is left out of the next. A
refusal is fresh within FRESH of the store's last answer."""
SILENT = LEASE + 2
"""A store that only does not answer is given up after this: every lease in it has ended."""


@dataclass(frozen=True, order=True)
class Term:
    """One life of the job's store, and its host."""

    count: int
    host: str


@dataclass(frozen=True)
class Round:
    term: Term
    number: int
    members: tuple[str, ...]
    lineage: tuple[Round, ...] = field(default=(), repr=False, compare=False)

    @property
    def key(self) -> tuple[Term, int]:
        return self.term, self.number

    def deputies(self) -> list[str]:
        """The members in order, from the one after the host."""
        at = self.members.index(self.term.host) + 1 if self.term.host in self.members else 0
        return [m for m in (*self.members[at:], *self.members[:at]) if m != self.term.host]


@dataclass
class Store:
    term: Term
    round: Round
    host_was_gone: bool  #: the earlier host refused its deputy, whose store had answered until then
    waits_until: int  #: for members that have not read `round`
    leases: dict[str, int] = field(default_factory=dict)
    seen: dict[str, tuple[Term, int] | None] = field(default_factory=dict)
    poor_since: int | None = None  #: since when it has had no quorum


@dataclass
class Agent:
    name: str
    store: Term
    round: Round | None
    alive: bool = True
    frozen: bool = False
    answered_at: int = 0
    proved_at: int | None = None  #: when the host's machine refused, soon after an answer of its store


class World:
    """`fresh`, `quorum`: two of the rules, to be taken out."""

    def __init__(self, size: int, *, fresh: bool = True, quorum: bool = True) -> None:
        self.fresh, self.quorum = fresh, quorum
        self.now = 0
        names = tuple("abcde"[:size])
        first = Term(0, "a")
        round = Round(first, 1, names)
        self.agents = {name: Agent(name, first, round) for name in names}
        self.stores = {first: Store(first, round, False, LEASE)}
        self.cuts: set[frozenset[str]] = set()
        self.trained: list[Round] = []
        self.crashed = False
        self.tick()

    # ---- what happens

    def split(self, side: Iterable[str]) -> None:
        inside = set(side)
        self.cuts |= {frozenset((x, y)) for x in inside for y in self.agents if y not in inside}

    def heal(self) -> None:
        self.cuts.clear()

    def join(self, name: str) -> None:
        """A newcomer knows no Round. It asks every agent that it reaches for the store."""
        self.agents[name] = Agent(name, Term(-1, ""), None)

    def tick(self, order: Iterable[str] = ()) -> None:
        self.now += 1
        for name in [*order, *(n for n in sorted(self.agents) if n not in order)]:
            agent = self.agents.get(name)
            if agent is not None and agent.alive and not agent.frozen:
                self._turn(agent)
        self._train()

    # ---- an agent's turn

    def _turn(self, agent: Agent) -> None:
        store = self._answering(agent, agent.store)
        if store is None:
            self._without_store(agent)
            return
        agent.answered_at, agent.proved_at = self.now, None
        store.leases[agent.name] = self.now + LEASE
        if agent.round is not None and store.round.key < agent.round.key:
            store.round, store.waits_until = agent.round, self.now + LEASE  # members restore the last Round
        elif agent.round is None or agent.round.key < store.round.key:
            agent.round = store.round
        store.seen[agent.name] = agent.round.key
        if store.term.host == agent.name:
            self._lead(agent, store)

    def _answering(self, agent: Agent, term: Term) -> Store | None:
        host = self.agents.get(term.host)
        if term not in self.stores or host is None or not host.alive or host.frozen or host.store != term:
            return None
        return self.stores[term] if self._reaches(agent.name, term.host) else None

    def _lead(self, agent: Agent, store: Store) -> None:
        base = store.round
        live = {name for name, until in store.leases.items() if until >= self.now and not self._refuses(agent, name)}
        kept = [m for m in base.members if m in live and store.seen.get(m) == base.key]
        if self.now <= store.waits_until and not all(m in kept or self._refuses(agent, m) for m in base.members):
            return
        joiners = sorted(name for name in live if name not in base.members)
        if not self._may_go_on(agent, store, kept):
            store.poor_since = self.now if store.poor_since is None else store.poor_since
            if self.now > store.poor_since + LEASE:
                self._without_store(agent)
            return
        store.poor_since = None
        if (*kept, *joiners) != base.members or self.crashed:
            self.crashed = False
            store.round = Round(store.term, base.number + 1, (*kept, *joiners), (*base.lineage, base))
            store.waits_until = self.now + SEEN
            agent.round, store.seen[agent.name] = store.round, store.round.key

    def _may_go_on(self, agent: Agent, store: Store, kept: list[str]) -> bool:
        """The rule of a Round's successor: more than half of its members, or exactly half with a proof."""
        base = store.round
        size, mine = len(base.members), len(kept)
        if not self.quorum:
            return bool(kept)
        if 2 * mine > size:
            return True
        missing = [m for m in base.members if m not in kept]
        if base.term == store.term:  # its own Round: no other side has more than half, nor can prove that it is gone
            gone = [m for m in missing if self._refuses(agent, m) and store.leases.get(m, 0) >= self.now - FRESH]
            over = all(m in gone or store.leases.get(m, 0) < self.now for m in missing)
            return over and 2 * (mine + len(gone)) >= size
        return 2 * mine == size and store.host_was_gone and base.deputies()[0] in kept

    def _without_store(self, agent: Agent) -> None:
        """Follow a later store that a peer names, or host one."""
        answering = [p for p in self.agents.values() if p is not agent and self._answers(agent, p)]
        later = [p.store for p in answering if p.store > agent.store and self._answering(agent, p.store)]
        if later:
            agent.store = max(later)
            return
        round = agent.round
        if round is None or agent.name not in round.members:
            return
        if self._refuses(agent, agent.store.host) and (self.now <= agent.answered_at + FRESH or not self.fresh):
            agent.proved_at = self.now
        votes = {p.name for p in answering if p.name in round.members and self._is_without_store(p)} | {agent.name}
        gone = self._refuses(agent, agent.store.host)
        ready = gone or self.now > agent.answered_at + SILENT or agent.store.host == agent.name
        half = agent.proved_at is not None and 2 * len(votes) == len(round.members) and round.deputies()[0] in votes
        order = [*round.deputies(), *round.members]
        if ready and (2 * len(votes) > len(round.members) or half) and agent.name == min(votes, key=order.index):
            agent.store = Term(agent.store.count + 1, agent.name)
            self.stores[agent.store] = Store(agent.store, round, agent.proved_at is not None, self.now + LEASE)
            agent.answered_at = self.now

    def _is_without_store(self, agent: Agent) -> bool:
        store = self._answering(agent, agent.store)
        return store is None or (store.poor_since is not None and self.now > store.poor_since + LEASE)

    # ---- the network

    def _reaches(self, one: str, other: str) -> bool:
        return one == other or frozenset((one, other)) not in self.cuts

    def _answers(self, agent: Agent, peer: Agent) -> bool:
        return peer.alive and not peer.frozen and self._reaches(agent.name, peer.name)

    def _refuses(self, agent: Agent, name: str) -> bool:
        return name in self.agents and not self.agents[name].alive and self._reaches(agent.name, name)

    # ---- what must hold

    def training(self) -> list[Round]:
        rounds = {a.round.key: a.round for a in self.agents.values() if a.alive and a.round is not None}
        return [r for r in rounds.values() if self._trains(r)]

    def _trains(self, round: Round) -> bool:
        members = [self.agents[name] for name in round.members]
        held = all(m.alive and m.round is not None and m.round.key == round.key for m in members)
        return held and all(self._reaches(x, y) for x, y in itertools.combinations(round.members, 2))

    def _train(self) -> None:
        training = self.training()
        assert len(training) <= 1, f"two sides train: {training}"
        for round in training:
            if round in self.trained:
                continue
            if self.trained:
                assert self.trained[-1].key in {r.key for r in round.lineage}, f"{round} leaves out {self.trained[-1]}"
            self.trained.append(round)


# ---- single faults


def pass_time(world: World, ticks: int = 4 * SILENT) -> None:
    for _ in range(ticks):
        world.tick()


def goes_on(world: World) -> str:
    """The members of the Round that trains, and whether it is the first one."""
    (round,) = world.training()
    return "".join(round.members)


@pytest.mark.parametrize(
    ("size", "side", "expected"),
    [
        (2, "a", "a"),  # the host has half, and nobody can prove that it is gone
        (3, "a", "bc"),
        (3, "ab", "ab"),
        (4, "ab", "ab"),
        (4, "a", "bcd"),
        (5, "ab", "cde"),
        (5, "abe", "abe"),
    ],
)
def test_one_side_of_a_split_goes_on(size: int, side: str, expected: str) -> None:
    world = World(size)
    world.split(side)
    pass_time(world)
    assert goes_on(world) == expected
    world.heal()
    pass_time(world)
    assert sorted(goes_on(world)) == sorted("abcde"[:size]), "the other side joins again"


@pytest.mark.parametrize("size", [2, 3, 4, 5])
def test_host_is_killed(size: int) -> None:
    world = World(size)
    world.agents["a"].alive = False
    pass_time(world, 4)
    assert goes_on(world) == "bcde"[: size - 1]
    world.join("v")  # the old host is back, under a new incarnation
    pass_time(world, 4)
    assert goes_on(world) == "bcde"[: size - 1] + "v"


def test_host_vanishes_and_nothing_refuses() -> None:
    world = World(4)
    world.split("a")
    world.agents["a"].alive = False
    pass_time(world)
    assert goes_on(world) == "bcd"


def test_half_without_a_proof_waits() -> None:
    world = World(4)
    world.split("ab")
    world.agents["a"].alive = False
    world.agents["b"].alive = False
    pass_time(world)
    assert world.training() == [], "the others may go on for all that c and d know"


def half_that_sees_an_old_death(world: World) -> None:
    """a and c go on without b and d; then a dies, and c goes on alone. b hears of the death as the network is back."""
    world.split("ac")
    pass_time(world)
    assert goes_on(world) == "ac"
    world.agents["a"].alive = False
    pass_time(world, 4)
    world.cuts -= {frozenset("ab"), frozenset("ad")}
    pass_time(world)


def test_old_death_is_no_proof() -> None:
    world = World(4)
    half_that_sees_an_old_death(world)
    assert goes_on(world) == "c"


def test_without_fresh_proofs_two_sides_train() -> None:
    with pytest.raises(AssertionError, match="two sides train"):
        half_that_sees_an_old_death(World(4, fresh=False))


def test_without_a_quorum_two_sides_train() -> None:
    world = World(3, quorum=False)
    world.split("a")
    with pytest.raises(AssertionError, match="two sides train"):
        pass_time(world)


# ---- any faults


class TakeOver(RuleBasedStateMachine):
    """Faults in any order, turns in any order."""

    @initialize(size=st.integers(2, 5))
    def begin(self, size: int) -> None:
        self.world = World(size)
        self.newcomers = iter("vwxyz")

    @rule(order=st.permutations("abcdevwxyz"), ticks=st.integers(1, 7))
    def pass_time(self, order: list[str], ticks: int) -> None:
        for _ in range(ticks):
            self.world.tick(order)

    @rule(side=st.sets(st.sampled_from("abcdevwxyz"), min_size=1))
    def split(self, side: set[str]) -> None:
        self.world.split(side & self.world.agents.keys())

    @rule(one=st.sampled_from("abcdevwxyz"), other=st.sampled_from("abcdevwxyz"))
    def cut(self, one: str, other: str) -> None:
        if one != other:
            self.world.cuts.add(frozenset((one, other)))

    @rule()
    def heal(self) -> None:
        self.world.heal()

    @rule(who=st.sampled_from("abcdevwxyz"))
    def kill(self, who: str) -> None:
        if who in self.world.agents:
            self.world.agents[who].alive = False

    @rule(who=st.sampled_from("abcdevwxyz"), frozen=st.booleans())
    def freeze_or_thaw(self, who: str, frozen: bool) -> None:
        if who in self.world.agents:
            self.world.agents[who].frozen = frozen

    @rule()
    def join(self) -> None:
        name = next(self.newcomers, None)
        if name is not None:
            self.world.join(name)

    @rule()
    def crash_a_worker(self) -> None:
        self.world.crashed = True

    @invariant()
    def one_side(self) -> None:
        if hasattr(self, "world"):
            assert len(self.world.training()) <= 1

    def teardown(self) -> None:
        """All is healed: a majority of the last Round that trained goes on."""
        if not hasattr(self, "world"):
            return
        world = self.world
        last = world.trained[-1]
        world.heal()
        for agent in world.agents.values():
            agent.frozen = False
        alive = [m for m in last.members if world.agents[m].alive]
        if 2 * len(alive) > len(last.members):
            for _ in range(60):
                world.tick()
            assert world.training(), f"{alive} of {last} do not go on"


TestTakeOver = TakeOver.TestCase
TestTakeOver.settings = settings(
    max_examples=60, stateful_step_count=20, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck)
)
