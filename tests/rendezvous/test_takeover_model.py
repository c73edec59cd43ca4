"""A model of docs/adr/0011: the agents of a c10d job, whose store dies with its host, choose another host.

The decisions are the product's (`choose_store`, `Succession`); stores, network and time are the model's. In each tick
every agent that runs takes a turn: it asks its store or, without one, its peers. What a message or a lease takes in
reality is a tick or a few. A Round trains while all of its members hold it and reach each other; agents that are frozen
are counted in, because their workers may train on.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from elasticd_agent.model.records import Member, NodeRecord, Round, StoreLife, store_term
from elasticd_agent.rendezvous.probe import ProbeAlive
from elasticd_agent.rendezvous.succession import Succession
from elasticd_agent.rendezvous.takeover import choose_store

LEASE = 3
"""A store holds an agent's record for so many ticks."""
SILENT = LEASE + 2
"""A store that only does not answer is given up after this."""

Key = tuple[int, int]


def key(round: Round) -> Key:
    return round.store_term, round.number


def life_of(count: int, name: str) -> StoreLife:
    return StoreLife(store_term(count, name), f"{name}:1", f"{name}:2")


@dataclass
class Store:
    life: StoreLife
    round: Round
    leader: Succession
    records: dict[str, tuple[NodeRecord, int]] = field(default_factory=dict)  #: and until when


@dataclass
class Agent:
    name: str
    life: StoreLife | None
    round: Round | None
    alive: bool = True
    frozen: bool = False
    leaving: bool = False
    lost: bool = False
    answered_at: int = 0
    few_since: int | None = None
    before: StoreLife | None = None

    @property
    def record(self) -> NodeRecord:
        number, term = (self.round.number, self.round.store_term) if self.round is not None else (0, 0)
        leaving = "asked" if self.leaving else ""
        return NodeRecord(self.name, self.name, f"{self.name}:1", (0,), "", 0, number, term, leaving=leaving)


class World:
    def __init__(self, size: int) -> None:
        self.now = 0
        names = tuple("abcde"[:size])
        first = life_of(0, "a")
        round = Round(1, tuple(self.member(name) for name in names), store=first, leader="a")
        self.agents = {name: Agent(name, first, round) for name in names}
        self.stores = {first: Store(first, round, Succession("a"))}
        self.cuts: set[frozenset[str]] = set()
        self.parents: dict[Key, Key] = {}
        self.copies: dict[Key, Key] = {}
        self.trained: list[Key] = []
        self.crashed = False
        self.stores[first].records = {name: (agent.record, LEASE) for name, agent in self.agents.items()}
        self.tick()

    @staticmethod
    def member(name: str) -> Member:
        return Member(name, name, (0,), address=f"{name}:1")

    # ---- what happens

    def split(self, side: Iterable[str]) -> None:
        inside = set(side)
        self.cuts |= {frozenset((x, y)) for x in inside for y in self.agents if y not in inside}

    def heal(self) -> None:
        self.cuts.clear()

    def join(self, name: str) -> None:
        """A newcomer knows no Round. It asks every agent that it reaches for the store."""
        self.agents[name] = Agent(name, None, None)

    def tick(self, order: Iterable[str] = ()) -> None:
        self.now += 1
        for name in [*order, *(n for n in sorted(self.agents) if n not in order)]:
            agent = self.agents.get(name)
            if agent is not None and agent.alive and not agent.frozen:
                self._turn(agent)
        self._train()

    # ---- an agent's turn

    def _turn(self, agent: Agent) -> None:
        store = self._answering(agent, agent.life)
        if (back := self._way_back(agent, store)) is not None:
            agent.life, agent.before, agent.few_since, agent.answered_at = back, None, None, self.now
            store = self._answering(agent, agent.life)
        agent.lost = self._has_lost(agent, store)
        if agent.lost and self._find_store(agent):
            store = self._answering(agent, agent.life)
        if store is None:
            return
        agent.answered_at = self.now
        if agent.round is not None and store.round.precedes(agent.round):
            store.round = agent.round
        elif agent.round is None or agent.round.precedes(store.round):
            agent.round = store.round
        store.records[agent.name] = agent.record, self.now + LEASE
        if store.life.agent == f"{agent.name}:1":
            self._lead(agent, store)

    def _way_back(self, agent: Agent, store: Store | None) -> StoreLife | None:
        """As TakeOver's."""
        if agent.before is None or agent.life is None:
            return None
        if agent.life.agent == f"{agent.name}:1":
            host = self.agents[agent.before.agent[0]]
            used = store.leader.published_term == store.life.term
            if agent.few_since is None or self.now <= agent.few_since or used or host.lost:
                return None
            return agent.before if self._answering(agent, agent.before) else None
        host = self.agents[agent.life.agent[0]]
        gone_back = self._answers(agent, host) and host.life is not None and host.life.term < agent.life.term
        return agent.before if store is None and gone_back else None

    def _has_lost(self, agent: Agent, store: Store | None) -> bool:
        if agent.life is None:
            return True
        if store is not None:
            return agent.few_since is not None and self.now > agent.few_since + LEASE
        host = self.agents[agent.life.agent[0]]
        left = self._answers(agent, host) and host.life is not None and host.life.term > agent.life.term
        return self._refuses(agent, host.name) or left or self.now > agent.answered_at + SILENT

    def _find_store(self, agent: Agent) -> bool:
        others = [p for p in self.agents.values() if p is not agent and self._answers(agent, p)]
        if agent.life is None or agent.round is None:
            lives = [p.life for p in others if p.life is not None and self._answering(agent, p.life)]
            chosen: StoreLife | int | None = max(lives, key=lambda life: life.term, default=None)
        else:
            peers = [p for p in others if agent.round.member(p.name)]
            answers = {p.name: ProbeAlive(p.name, p.name, p.life, p.lost, p.leaving) for p in peers}
            reached = {p.life for p in peers if p.life is not None and self._answering(agent, p.life)}
            hosts = agent.life.agent == f"{agent.name}:1"
            chosen = choose_store(agent.name, agent.round, agent.life, hosts, agent.leaving, answers, reached)
        if chosen is None:
            return False
        if isinstance(chosen, int):
            assert agent.round is not None
            chosen = life_of(chosen, agent.name)
            self.stores[chosen] = Store(chosen, agent.round, Succession(agent.name))
        assert agent.life is None or chosen.term > agent.life.term, "an agent never goes back"
        agent.before, agent.life = agent.life, chosen
        agent.few_since, agent.lost, agent.answered_at = None, False, self.now
        return True

    def _answering(self, agent: Agent, life: StoreLife | None) -> Store | None:
        """A store ends when its host uses another one."""
        host = self.agents[life.agent[0]] if life is not None else None
        if life is None or host is None or not host.alive or host.frozen or host.life != life:
            return None
        return self.stores[life] if self._reaches(agent.name, host.name) else None

    def _lead(self, agent: Agent, store: Store) -> None:
        base = store.round
        records = {name: record for name, (record, until) in store.records.items() if until >= self.now}
        store.leader.look(base, store.life, records.values())
        following = store.leader.adoption(self.now) or self._next(agent, base, records)
        if following is base:
            pass
        elif isinstance(following, Round):
            following = following if following.number == base.number else store.leader.approve(following, self.now)
        if isinstance(following, Round) and following is not base:
            self._publish(agent, store, following)
        few = store.leader.lacks_quorum
        agent.few_since = None if not few else self.now if agent.few_since is None else agent.few_since

    def _next(self, agent: Agent, base: Round, records: dict[str, NodeRecord]) -> Round:
        """What a planner wants: the members whose records are there, then the joiners."""
        kept = [m.node for m in base.members if m.node in records and not self._refuses(agent, m.node)]
        joiners = sorted(n for n, r in records.items() if not base.member(n) and r.seen_round == base.number)
        wanted = [n for n in (*kept, *joiners) if not records[n].leaving]
        if not wanted or (wanted == [m.node for m in base.members] and not self.crashed):
            return base
        return replace(base, number=base.number + 1, members=tuple(map(self.member, wanted)), leader=agent.name)

    def _publish(self, agent: Agent, store: Store, round: Round) -> None:
        before, store.round, agent.round = store.round, round, round
        store.records[agent.name] = agent.record, self.now + LEASE
        if round.number == before.number:
            self.copies[key(round)] = self.origin(before)
        else:
            self.parents[key(round)] = self.origin(before)
            self.crashed = False

    # ---- the network

    def _reaches(self, one: str, other: str) -> bool:
        return one == other or frozenset((one, other)) not in self.cuts

    def _answers(self, agent: Agent, peer: Agent) -> bool:
        return peer.alive and not peer.frozen and self._reaches(agent.name, peer.name)

    def _refuses(self, agent: Agent, name: str) -> bool:
        return name in self.agents and not self.agents[name].alive and self._reaches(agent.name, name)

    # ---- what must hold

    def origin(self, round: Round) -> Key:
        """A Round that is published once more in another store is the same one."""
        return self.copies.get(key(round), key(round))

    def training(self) -> list[Round]:
        rounds = {self.origin(a.round): a.round for a in self.agents.values() if a.alive and a.round is not None}
        return [r for r in rounds.values() if self._trains(r)]

    def _trains(self, round: Round) -> bool:
        members = [self.agents[m.node] for m in round.members]
        held = all(m.alive and m.round is not None and self.origin(m.round) == self.origin(round) for m in members)
        return held and all(self._reaches(x.name, y.name) for x, y in itertools.combinations(members, 2))

    def _train(self) -> None:
        training = self.training()
        assert len(training) <= 1, f"two sides train: {[names(r) for r in training]}"
        for round in map(self.origin, training):
            if self.trained and round != self.trained[-1]:
                lineage = [round]
                while lineage[-1] in self.parents:
                    lineage.append(self.parents[lineage[-1]])
                assert self.trained[-1] in lineage, f"{round} leaves out {self.trained[-1]}"
            if not self.trained or round != self.trained[-1]:
                self.trained.append(round)


def names(round: Round) -> str:
    return "".join(m.node for m in round.members)


# ---- a fault that costs a rule its proof


def pass_time(world: World, ticks: int = 4 * SILENT, order: Sequence[str] = ()) -> None:
    for _ in range(ticks):
        world.tick(order)


def goes_on(world: World) -> str:
    """The members of the Round that trains."""
    (round,) = world.training()
    return names(round)


def second_cut(world: World) -> None:
    """a leaves d and e out and counts c, which it reaches no more before c has read that: c moves to the other side."""
    world.split("abc")
    pass_time(world, 3)
    world.cuts = {frozenset((x, y)) for x in "ab" for y in "cde"}
    pass_time(world, order="dceab")


def test_a_member_that_moves_before_it_reads_a_round() -> None:
    world = World(5)
    second_cut(world)
    assert goes_on(world) == "cde"


def test_without_readers_two_sides_train(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Succession, "_is_read_by_quorum", property(lambda self: True))
    with pytest.raises(AssertionError, match="two sides train"):
        second_cut(World(5))


# ---- any faults

NAMES = "abcdevwxyz"


class TakeOver(RuleBasedStateMachine):
    """Faults in any order, turns in any order."""

    @initialize(size=st.integers(2, 5))
    def begin(self, size: int) -> None:
        self.world = World(size)
        self.newcomers = iter("vwxyz")

    @rule(order=st.permutations(NAMES), ticks=st.integers(1, 7))
    def pass_time(self, order: list[str], ticks: int) -> None:
        pass_time(self.world, ticks, order)

    @rule(side=st.sets(st.sampled_from(NAMES), min_size=1))
    def split(self, side: set[str]) -> None:
        self.world.split(side & self.world.agents.keys())

    @rule(one=st.sampled_from(NAMES), other=st.sampled_from(NAMES), cut=st.booleans())
    def cut_or_mend(self, one: str, other: str, cut: bool) -> None:
        if one != other and cut:
            self.world.cuts.add(frozenset((one, other)))
        else:
            self.world.cuts.discard(frozenset((one, other)))

    @rule(one=st.sampled_from(NAMES), side=st.sets(st.sampled_from(NAMES)))
    def change_sides(self, one: str, side: set[str]) -> None:
        """`one` reaches `side` and nobody else."""
        self.world.cuts -= {cut for cut in self.world.cuts if one in cut}
        self.world.cuts |= {frozenset((one, n)) for n in self.world.agents if n not in side and n != one}

    @rule()
    def heal(self) -> None:
        self.world.heal()

    @rule(who=st.sampled_from(NAMES))
    def kill(self, who: str) -> None:
        if who in self.world.agents:
            self.world.agents[who].alive = False

    @rule(who=st.sampled_from(NAMES))
    def ask_to_leave(self, who: str) -> None:
        if who in self.world.agents:
            self.world.agents[who].leaving = True

    @rule(who=st.sampled_from(NAMES), frozen=st.booleans())
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
        """All is healed: where every Round that is held has most of its members, one of them goes on."""
        if not hasattr(self, "world"):
            return
        world = self.world
        world.heal()
        for agent in world.agents.values():
            agent.frozen = False
        stays = {a.name for a in world.agents.values() if a.alive and not a.leaving}
        held = [a.round for a in world.agents.values() if a.alive and a.round is not None]
        if held and all(2 * sum(m.node in stays for m in r.members) > len(r.members) for r in held):
            pass_time(world, 60)
            assert world.training(), f"{sorted(stays)} do not go on"


TestTakeOver = TakeOver.TestCase
TestTakeOver.settings = settings(
    max_examples=60, stateful_step_count=20, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck)
)
