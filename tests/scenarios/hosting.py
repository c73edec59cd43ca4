"""A Cluster whose store is a process of an agent: other agents may host the next one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from elasticd_agent.model.codec import VERSION
from elasticd_agent.model.job import Policy
from elasticd_agent.model.keys import decode_record
from elasticd_agent.model.records import NodeRecord, Round, StoreLife, store_term
from elasticd_agent.rendezvous.probe import Address
from elasticd_agent.rendezvous.takeover import TakeOver
from elasticd_agent.rendezvous.view import Requirements
from elasticd_agent.store import Watch
from elasticd_agent.store.memory import MemoryStore
from tests.scenarios.cluster import Cluster, NodeNetwork
from tests.scenarios.node import Node, Partition
from tests.scenarios.waystore import NodeStore

ENDPOINT = "a"
"""The label of the node at which every agent looks for the store first."""
SIGN_S = 1.0


@dataclass(slots=True)
class Hosted:
    """One life of the store."""

    label: str
    incarnation: str
    port: int
    term: int
    data: MemoryStore
    over: bool = False


class HostedStore(NodeStore):
    """One node's client of such a store."""

    def __init__(self, cluster: HostingCluster, label: str, incarnation: str, away: Partition, version: str) -> None:
        super().__init__(MemoryStore(), lambda: self.answers, lambda deliver: cluster.hints(deliver), version)
        self._cluster, self._label, self._incarnation, self._away = cluster, label, incarnation, away
        self._life: Hosted | None = None
        self._pinned = False
        self.followed: dict[tuple[str, ...], tuple[Callable[[str], None], list[Watch]]] = {}
        self.compares_one_key, self.standalone = True, False
        if label == ENDPOINT:
            self.host(store_term(0, incarnation))

    @property
    def term(self) -> int:
        return self._life.term if self._life is not None else 0

    @property
    def port(self) -> int:
        return self._life.port if self._life is not None else 0

    @property
    def hosts(self) -> bool:
        return self._life is not None and self._life.incarnation == self._incarnation

    @property
    def answers(self) -> bool:
        if not self._pinned and not self.hosts:
            self._switch(self._cluster.at_endpoint)
        life, away = self._life, self._away
        if life is None or life.over or not self._cluster.serves(life):
            return False
        return life.label == self._label or (not away.store and self._cluster.connects(self._label, life.label))

    def pin(self, term: int) -> None:
        assert term == self.term
        self._pinned = True

    def move(self, endpoint: tuple[str, int], term: int, keep_own_server: bool) -> None:
        if self.hosts and self._life is not None and not keep_own_server:
            self._life.over = True
        self._pinned = True
        self._switch(self._cluster.lives[term])

    def host(self, term: int) -> None:
        if self.hosts and self._life is not None:
            self._life.over = True
        self._pinned = True
        self._switch(self._cluster.begin_life(self._label, self._incarnation, term))

    def _switch(self, life: Hosted | None) -> None:
        if life is self._life:
            return
        self._life = life
        if life is not None:
            self.memory = life.data
            for prefixes, (callback, watches) in self.followed.items():
                watches[:] = [super().watch(callback, *prefixes)] if self.answers else []
                for prefix in prefixes:
                    callback(prefix)

    def watch(self, callback: Callable[[str], None], *prefixes: str) -> Watch:
        watches: list[Watch] = [super().watch(callback, *prefixes)]
        self.followed[prefixes] = callback, watches
        return _Followed(self, prefixes)


@dataclass
class _Followed:
    store: HostedStore
    prefixes: tuple[str, ...]

    def close(self) -> None:
        _, watches = self.store.followed.pop(self.prefixes)
        for watch in watches:
            watch.close()


class HostingNetwork(NodeNetwork):
    """One agent's way to the others, and to the stores that they host."""

    cluster: HostingCluster

    def reaches(self, address: Address) -> bool:
        life = next((life for life in self.cluster.lives.values() if life.port == address[1]), None)
        if life is None or life.over or not self.cluster.serves(life):
            return False
        return self.cluster.connects(self.node.label, life.label)

    def set_probe_answer(self, store: StoreLife | None, lost: bool, leaving: bool) -> None:
        self.node.says = store, lost, leaving

    def show_way(self, round: Round | None) -> None:
        self.node.hosted_round = round


class HostingCluster(Cluster):
    """Its agents take over; the endpoint's machine has a signpost."""

    def __init__(self, asked: Requirements, policy: Policy, slots: int = 1, holds: bool = False) -> None:
        super().__init__(asked, policy, slots, holds)
        self.lives: dict[int, Hosted] = {}
        self.at_endpoint: Hosted | None = None
        self._at(SIGN_S, self._show_the_way)

    def begin_life(self, label: str, incarnation: str, term: int) -> Hosted:
        life = Hosted(label, incarnation, 1000 + len(self.lives), term, MemoryStore(lambda: self.now))
        self.lives[term] = life
        if label == ENDPOINT:
            self.at_endpoint = life
        if not StoreLife(term, "", "").earlier_lives:  # an agent has started, and knows nothing
            self.history.forgotten.append(self.now)
        return life

    def serves(self, life: Hosted) -> bool:
        host = self.agents.get(life.incarnation)
        return self.store_up and host is not None and not (host.dead or host.frozen or host.left)

    def connects(self, one: str, other: str) -> bool:
        return one == other or self._reaches(self.nodes[one], self.nodes[other])

    def start(self, label: str, name: str | None = None, role: str = "default", version: str = VERSION) -> Node:
        self.highest.setdefault(name or label, 0)
        return super().start(label, name, role, version)

    def _node_store(self, label: str, incarnation: str, away: Partition, version: str) -> NodeStore:
        return HostedStore(self, label, incarnation, away, version)

    def _take_over(self, store: NodeStore, record: NodeRecord, log: Callable[[str], None]) -> TakeOver | None:
        assert isinstance(store, HostedStore)
        network = HostingNetwork(self, record.incarnation)
        return TakeOver(store, record, self.policy, network, network.show_way, log)

    def _reaches_store(self, node: Node) -> bool:
        return isinstance(node.store, HostedStore) and node.store.answers

    def _show_the_way(self) -> None:
        """What store/c10d/signpost.py does."""
        self._at(SIGN_S, self._show_the_way)
        life = self.at_endpoint
        for node in self.alive():
            round = node.hosted_round
            if round is None or life is None or life.over or not self.serves(life):
                continue
            if self.connects(node.label, life.label) and not node.partition.store:
                key = self.keys.round
                found = life.data.read(key)
                if found is None or decode_record(Round, key, found.value).precedes(round):
                    life.data.compare_and_swap(key, None if found is None else found.version, round.to_json())
