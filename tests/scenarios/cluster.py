"""A job on several nodes without processes, sockets or time: real coordinators, planners and cores, one memory store.

Whoever drives it says what happens to which node. A group trains while every member of its round has started it and
can reach the others; a step takes 0.1 s; when a member's workers die, the others lose their peers 30 ms later, or never
where no connection is reset. The clock moves only when told, and stops at everything that is due on the way.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from elasticd.errors import StoreUnavailable
from elasticd.wire import NodeRecord, Round
from elasticd_agent import core
from elasticd_agent.config import Policy
from elasticd_agent.coordinator import Coordinator
from elasticd_agent.knock import Answered, Refused, Silent
from elasticd_agent.messages import (
    Action,
    Ended,
    Event,
    ExitStatus,
    FirstStep,
    GroupGone,
    Joining,
    KillGroup,
    LastWords,
    Leave,
    Phase,
    ReportDone,
    ReportFailure,
    ReportLeaving,
    RoundPublished,
    Rules,
    StartGroup,
    StopGroup,
    StopRequested,
    TimeCame,
    Wake,
    WorkerExited,
)
from elasticd_agent.news import Awaited, HoldAsked, MasterKnown, News, Rejected, StoreSeen
from elasticd_agent.planner import Facts, Keys, Planner
from elasticd_agent.store import Lease, Traffic, Versioned, Watch
from elasticd_agent.store.memory import MemoryStore
from elasticd_agent.view import Asked

STEP_S = 0.1
LOST_PEER_S = 0.03
START_S = 0.1
SILENT = Silent("no answer")


@dataclass(slots=True)
class Away:
    """What a node cannot reach now."""

    store: bool = False
    peers: bool = False


class NodesStore:
    """One node's way to the store: raises StoreUnavailable while it is cut."""

    def __init__(self, store: MemoryStore, reachable: Callable[[], bool]) -> None:
        self._store, self._reachable = store, reachable
        self.traffic = Traffic()

    def _reach(self) -> MemoryStore:
        self.traffic.requests += 1
        if not self._reachable():
            raise StoreUnavailable("the store does not answer")
        return self._store

    def read(self, key: str) -> Versioned | None:
        return self._reach().read(key)

    def list(self, prefix: str) -> dict[str, Versioned]:
        return self._reach().list(prefix)

    def compare_and_swap(
        self, key: str, expected: int | None, value: bytes, guard: tuple[str, int] | None = None
    ) -> bool:
        return self._reach().compare_and_swap(key, expected, value, guard)

    def delete(self, key: str) -> bool:
        return self._reach().delete(key)

    def announce(self, key: str, value: bytes, ttl_s: float) -> Lease | None:
        lease = self._reach().announce(key, value, ttl_s)
        return None if lease is None else NodesLease(self, lease)

    def watch(self, prefix: str, callback: Callable[[str], None]) -> Watch:
        return self._reach().watch(prefix, lambda key: callback(key) if self._reachable() else None)

    def close(self) -> None:
        """The store is everybody's."""


@dataclass(slots=True)
class NodesLease:
    """A lease that can be reached as its store can."""

    store: NodesStore
    lease: Lease

    @property
    def ttl_s(self) -> float:
        return self.lease.ttl_s

    def hold(self, key: str, value: bytes, expected: int | None = None) -> int | None:
        self.store._reach()
        return self.lease.hold(key, value, expected)

    def renew(self) -> bool:
        self.store._reach()
        return self.lease.renew()

    def withdraw(self) -> None:
        self.store._reach()
        self.lease.withdraw()


@dataclass(eq=False, slots=True)
class Node:
    """One agent and its group. `group`: the round whose workers live here; `joined`: they know where their store is."""

    name: str
    incarnation: str
    rules: Rules
    facts: Facts
    coordinator: Coordinator
    away: Away = field(default_factory=Away)
    phase: Phase = field(default_factory=Joining)
    group: Round | None = None
    joined: bool = False
    stepping: int = 0
    master: int = 0
    due: float | None = 0.0
    wakes: list[float] = field(default_factory=list)
    frozen: bool = False
    dead: bool = False
    left: Leave | None = None


class Cluster:
    """All nodes of one job. `lines` is what happened since it was last looked at."""

    def __init__(self, asked: Asked, policy: Policy, slots: int = 1, holds: bool = False) -> None:
        self.now = 1000.0
        self.asked, self.policy, self.slots, self.holds = asked, policy, slots, holds
        self.store = MemoryStore(lambda: self.now)
        self.store_up = True
        self.keys = Keys("job")
        self.nodes: dict[str, Node] = {}
        self.later: list[tuple[float, Callable[[], None]]] = []
        self.step = 0
        self.lines: list[str] = []
        self.rounds: dict[int, Round] = {}
        self._incarnations = 0

    # ---- what happens

    def start(self, name: str) -> Node:
        self._incarnations += 1
        incarnation = f"{name}{self._incarnations}"
        facts = Facts()
        away = Away()
        store = NodesStore(self.store, lambda: self.store_up and not away.store)
        said = lambda sentence: self.tell(name, sentence)  # noqa: E731
        planner = Planner(
            store, self.keys, self.policy, self.asked, facts, lambda them: self._knock(name, them), name, said
        )
        record = NodeRecord(name, incarnation, f"{name}:1", tuple(range(self.slots)), directory="d")
        coordinator = Coordinator(store, self.keys, self.policy, record, planner, b"{}", lambda a, b: None)
        rules = Rules(name, incarnation=incarnation, shared=True)
        node = Node(name, incarnation, rules, facts, coordinator, away)
        coordinator.on_hint(lambda: self._hinted(node))
        self.nodes[name] = node
        return node

    def kill(self, name: str, *, silently: bool = False) -> None:
        """The machine's processes are gone; `silently`: and with them the machine, nothing resets a connection."""
        node = self.nodes[name]
        node.dead = True
        node.away.store = True
        if silently:
            node.away.peers = True
        elif node.group is not None:
            self._lose_peers(node.group, node)

    def exit(self, name: str, local_rank: int, status: ExitStatus, words: LastWords | None = None) -> None:
        node = self.nodes[name]
        assert node.group is not None, f"{name} has no group"
        member = node.group.member(name)
        assert member is not None
        rank = node.group.ranks(name)[local_rank]
        self._feed(
            node, WorkerExited(node.group.number, rank, local_rank, member.slots[local_rank], status, words, self.now)
        )
        if not status.ok:
            self._lose_peers(node.group, node)

    def finish(self) -> None:
        """Every worker of the round that trains comes to its end."""
        for node in self.nodes.values():
            if node.group is not None and not node.dead:
                for local_rank in range(self.slots):
                    self.exit(node.name, local_rank, ExitStatus(0))

    def stop(self, name: str) -> None:
        self._feed(self.nodes[name], StopRequested("SIGTERM", 143, self.now))

    def empty_store(self) -> None:
        """It came back without anything that was in it."""
        for key in list(self.store.list("")):
            self.store.delete(key)

    def wait(self, seconds: float) -> None:
        """Time passes; everything due on the way happens, in order."""
        until = self.now + seconds
        for _ in range(200_000):
            at = self._next_due()
            if at is None or at > until:
                break
            self.now = max(self.now, at)
            self._run_due()
        else:
            raise AssertionError(f"no end of turns at {self.now}")
        self.now = until

    # ---- time

    def _next_due(self) -> float | None:
        times = [at for at, _ in self.later]
        for node in self._alive():
            times += [at for at in (node.due, *node.wakes) if at is not None]
        return min(times, default=None)

    def _alive(self) -> list[Node]:
        return [node for node in self.nodes.values() if not (node.dead or node.frozen or node.left)]

    def _run_due(self) -> None:
        due = [entry for entry in self.later if entry[0] <= self.now]
        self.later = [entry for entry in self.later if entry[0] > self.now]
        for _, act in due:
            act()
        for node in self._alive():
            if any(at <= self.now for at in node.wakes):
                node.wakes = [at for at in node.wakes if at > self.now]
                self._feed(node, TimeCame(self.now))
            if node.due is not None and node.due <= self.now and node.left is None:
                self._turn(node)

    def _hinted(self, node: Node) -> None:
        node.due = self.now

    def _turn(self, node: Node) -> None:
        node.due = None
        news, until = node.coordinator.turn(self.now)
        if until is not None:  # a hint that came during the turn keeps its own time
            node.due = until if node.due is None else min(node.due, until)
            node.due = max(node.due, self.now + 1e-4)
        for said in news:
            self._hear(node, said)

    def _hear(self, node: Node, said: News) -> None:
        match said:
            case MasterKnown(number):
                node.master = number
                self._join(node)
            case HoldAsked(number, on):
                if on and self.holds:
                    self._at(STEP_S, lambda: self._hold(node, number))
            case StoreSeen(away, _, seconds):
                self.tell(node.name, "the store is away" if away else f"the store is back after {seconds:.1f} s")
            case Awaited(why):
                self.tell(node.name, f"waits: {why}")
            case Rejected(why):
                self.tell(node.name, f"rejected: {why}")
            case _:
                self._feed(node, said)

    # ---- the agent's loop

    def _feed(self, node: Node, event: Event) -> None:
        if isinstance(event, RoundPublished):
            self._published(event.round)
        before = node.phase
        node.phase, actions = core.step(before, event, node.rules)
        for action in actions:
            self._perform(node, action)

    def _published(self, round: Round) -> None:
        known = self.rounds.setdefault(round.number, round)
        assert known == round, f"two rounds are numbered {round.number}"
        if known is round:
            end = "" if round.outcome is None else f" ({round.outcome}, exit code {round.exit_code})"
            self.lines.append(f"round {round.number}{end}: {round.reason}")

    def _perform(self, node: Node, action: Action) -> None:
        match action:
            case StartGroup(round):
                assert node.group is None, f"{node.name} starts {round.number} while {node.group} lives"
                node.group, node.joined = round, False
                node.facts.advances_by = self.now
                node.coordinator.update(ready=round.number)
                if round.group_rank(node.name) == 0:
                    node.master = round.number
                    node.coordinator.master(round.number, node.name, 1)
                self._join(node)
            case KillGroup(number) | StopGroup(number):
                self._at(0.01, lambda: self._gone(node, number))
            case ReportFailure(failure):
                failure = replace(failure, high_water=self.step, checkpoint=node.facts.checkpoint)
                node.coordinator.failed(failure, self.now)
            case ReportDone(number):
                node.coordinator.done(number)
                self._at(0.01, lambda: self._gone(node, number))
            case ReportLeaving(why):
                node.coordinator.update(leaving=why)
            case Wake(at):
                node.wakes.append(at)
            case Leave(exit_code, why):
                node.left = action
                self.tell(node.name, f"leaves with {exit_code}: {why}")
                node.coordinator.close()
        node.due = self.now

    def _join(self, node: Node) -> None:
        """The workers find their store, and train once all of the round have."""
        round = node.group
        if round is None or node.joined or node.master != round.number:
            return
        node.joined = True
        if all(member.joined and member.group == round for member in self._members(round)):
            self._at(START_S, lambda: self._train(round))

    def _members(self, round: Round) -> list[Node]:
        return [self.nodes[m.node] for m in round.members]

    def _trains(self, round: Round) -> bool:
        members = self._members(round)
        cut = sum(node.away.peers for node in members)
        return all(node.group == round and not (node.dead or node.frozen) for node in members) and (
            not cut or len(members) == 1
        )

    def _train(self, round: Round) -> None:
        if not self._trains(round):
            return
        self.step += 1
        for node in self._members(round):
            node.facts.high_water = self.step
            node.facts.advances_by = self.now + 2 * STEP_S
            if node.stepping != round.number:
                node.stepping = round.number
                node.coordinator.update(stepped=round.number, can_hold=round.number if self.holds else 0)
                node.due = self.now
                self._feed(node, FirstStep(round.number, self.now))
        self._at(STEP_S, lambda: self._train(round))

    def _hold(self, node: Node, number: int) -> None:
        if node.group is not None and node.group.number == number and not node.dead:
            node.facts.checkpoint = (number, self.step)
            self.tell(node.name, f"holds round {number} at a checkpoint of its step")
            node.coordinator.update(held=number, checkpoint=(number, self.step), high_water=self.step)
            node.due = self.now

    def _gone(self, node: Node, number: int) -> None:
        if node.dead or node.group is None or node.group.number != number:
            return
        round, node.group = node.group, None
        node.facts.advances_by = None
        self._feed(node, GroupGone(number))
        if not isinstance(node.phase, Ended) and any(m.node != node.name for m in round.members):
            self._lose_peers(round, node)

    def _lose_peers(self, round: Round, dead: Node) -> None:
        """Connections to a dead process are reset, where there is a machine that resets them."""
        words = LastWords("exception", "RuntimeError", "Connection reset by peer", "")

        def lose(node: Node) -> None:
            training = node.group == round and not (node.dead or node.frozen or node.away.peers)
            if training and not isinstance(dead.phase, Ended) and not self._all_done(round):
                rank = round.ranks(node.name)[0]
                self._feed(node, WorkerExited(round.number, rank, 0, 0, ExitStatus(1), words, self.now))

        for node in self._members(round):
            if node is not dead:
                self._at(LOST_PEER_S, lambda node=node: lose(node))  # type: ignore[misc]

    def _all_done(self, round: Round) -> bool:
        done = self.store.list(self.keys.done(round.number))
        return any(key.endswith(f"/{m.node}") for m in round.members for key in done)

    def _at(self, seconds: float, act: Callable[[], None]) -> None:
        self.later.append((self.now + seconds, act))

    # ---- knocking, and words

    def _knock(self, who: str, them: Mapping[str, tuple[str, int]]) -> dict[str, Answered | Refused | Silent]:
        return {name: self._answer(self.nodes[who], self.nodes[name]) for name in them}

    def _answer(self, who: Node, whom: Node) -> Answered | Refused | Silent:
        if who.away.peers or whom.away.peers or whom.frozen:
            return SILENT
        return Refused() if whom.dead or whom.left else Answered(whom.name, whom.incarnation)

    def tell(self, name: str, sentence: str) -> None:
        self.lines.append(f"{name}: {sentence}")
