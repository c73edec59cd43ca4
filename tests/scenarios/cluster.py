"""A job on several nodes without processes, sockets or time: real coordinators, planners and cores, one memory store.

Whoever drives it says what happens to which node. A group trains while every member of its round has started it and
can reach the others; a step takes 0.1 s; when a member's workers die, the others lose their peers 30 ms later, or never
where no connection is reset. The clock moves only when told, and stops at everything that is due on the way.

An agent's label tells it from others of the same node id; it is the node id unless two agents have one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TypeVar

from elasticd.wire import NodeRecord, Round
from elasticd_agent import core
from elasticd_agent.config import Policy
from elasticd_agent.coordinator import Coordinator
from elasticd_agent.knock import Answered, Refused, Silent
from elasticd_agent.messages import (
    Action,
    Event,
    ExitStatus,
    FirstStep,
    GroupGone,
    Joining,
    KillGroup,
    LastWords,
    Leave,
    ReportDone,
    ReportFailure,
    ReportLeaving,
    RoundPublished,
    Rules,
    Running,
    StartGroup,
    StopGroup,
    StopRequested,
    TimeCame,
    Wake,
    WorkerExited,
)
from elasticd_agent.news import Awaited, HoldAsked, MasterKnown, News, Rejected, StoreSeen
from elasticd_agent.planner import Facts, Keys, Planner
from elasticd_agent.store.memory import MemoryStore
from elasticd_agent.view import Asked
from tests.scenarios.node import Away, Node
from tests.scenarios.waystore import Killed, WayStore

STEP_S = 0.1
LOST_PEER_S = 0.03
START_S = 0.1
SILENT = Silent("no answer")
T = TypeVar("T")


class Cluster:
    """All nodes of one job. `lines` is what happened since it was last looked at: when, to whom, what.

    `hints` is given every hint of a watch with its delivery, and may do with it what a bad network does.
    """

    def __init__(self, asked: Asked, policy: Policy, slots: int = 1, holds: bool = False) -> None:
        self.now = 1000.0
        self.asked, self.policy, self.slots, self.holds = asked, policy, slots, holds
        self.store = MemoryStore(lambda: self.now)
        self.store_up = True
        self.keys = Keys("job")
        self.nodes: dict[str, Node] = {}
        self.later: list[tuple[float, Callable[[], None]]] = []
        self.step = 0
        self.lines: list[tuple[float, str, str]] = []
        self.rounds: dict[int, Round] = {}
        self.trained: dict[int, float] = {}
        self.agents: dict[str, Node] = {}
        self.saved: tuple[int, int] | None = None
        self.highest: dict[str, int] = {}
        self.hints: Callable[[Callable[[], None]], None] = lambda deliver: deliver()
        self._training: set[int] = set()

    # ---- what happens

    def start(self, label: str, name: str | None = None) -> Node:
        name = name or label
        if not self._alive() and self.store.read(self.keys.round) is None:
            self.rounds.clear()  # nobody remembers
        port = len(self.agents) + 1
        incarnation = f"{name}{port}"
        highest = self.highest.get(name, 0)
        facts, away = Facts(first_number=1 + highest, checkpoint=self.saved), Away()
        way = WayStore(self.store, lambda: self.store_up and not away.store, lambda deliver: self.hints(deliver))
        planner = Planner(
            way,
            self.keys,
            self.policy,
            self.asked,
            facts,
            lambda them: self._knock(node, them),
            name,
            lambda sentence: self.tell(label, sentence),
        )
        record = NodeRecord(name, incarnation, f"{label}:{port}", tuple(range(self.slots)), "d", highest)
        coordinator = Coordinator(way, self.keys, self.policy, record, planner, b"{}", lambda a, b: None)
        rules = Rules(name, incarnation=incarnation, shared=True)
        node = Node(label, name, incarnation, rules, facts, coordinator, way, away, due=self.now)
        coordinator.on_hint(lambda: self._hinted(node))
        self.nodes[label] = self.agents[incarnation] = node
        return node

    def kill(self, label: str) -> None:
        """The machine's processes are gone; the machine resets their connections."""
        node = self.nodes[label]
        node.dead = True
        if node.group is not None:
            self._lose_peers(node.group, node)

    def vanish(self, label: str) -> None:
        """The machine is gone: nothing resets a connection."""
        self.nodes[label].dead = self.nodes[label].away.network = True

    def freeze(self, label: str) -> None:
        """Every process of the node is stopped; its kernel still takes connections."""
        self.nodes[label].frozen = True

    def thaw(self, label: str) -> None:
        self.nodes[label].frozen = False
        self._see_peers()

    def cut(self, label: str, *, store: bool = False, peers: bool = False, peer: str | None = None) -> None:
        away = self.nodes[label].away
        away.store, away.network = away.store or store, away.network or peers
        if peer is not None:
            away.peers.add(peer)

    def heal(self, label: str) -> None:
        away = self.nodes[label].away
        away.store, away.network, away.peers = False, False, set()
        for node in self.nodes.values():
            node.away.peers.discard(label)
        self._see_peers()

    def exit(self, label: str, local_rank: int, status: ExitStatus, words: LastWords | None = None) -> None:
        node = self.nodes[label]
        assert node.group is not None, f"{label} has no group"
        rank = node.group.ranks(node.name)[local_rank]
        slot = list(node.group.places())[rank][3]
        self._feed(node, WorkerExited(node.group.number, rank, local_rank, slot, status, words, self.now))
        if not status.ok:
            self._lose_peers(node.group, node)

    def finish(self, *labels: str) -> None:
        """Every worker of these nodes, or of all, comes to its end; those that train together do so together."""
        ending = [n for n in self._alive() if n.group is not None and (not labels or n.label in labels)]
        for node in ending:
            node.done = node.group.number if node.group else 0
        for node in ending:
            for local_rank in range(self.slots if isinstance(node.phase, Running) else 0):
                self.exit(node.label, local_rank, ExitStatus(0))

    def stop(self, label: str) -> None:
        self._feed(self.nodes[label], StopRequested("SIGTERM", 143, self.now))

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
        news, until = self._guarded(node, lambda: node.coordinator.turn(self.now)) or ([], None)
        if until is not None:  # a hint that came during the turn keeps its own time
            node.due = until if node.due is None else min(node.due, until)
            node.due = max(node.due, self.now + 1e-4)
        for said in news:
            self._hear(node, said)

    def _guarded(self, node: Node, call: Callable[[], T]) -> T | None:
        try:
            return call()
        except Killed:
            self.tell(node.label, "is killed in the middle of a turn")
            return self.kill(node.label)

    def _hear(self, node: Node, said: News) -> None:
        match said:
            case MasterKnown(number):
                node.master = number
                self._join(node)
            case HoldAsked(number, on):
                node.hold = number if on else 0
                if on and self.holds:
                    self._at(STEP_S, lambda: self._hold(node, number))
            case StoreSeen(away, _, seconds):
                self.tell(node.label, "the store is away" if away else f"the store is back after {seconds:.1f} s")
            case Awaited(why):
                self.tell(node.label, f"waits: {why}")
            case Rejected(why):
                joining = isinstance(node.phase, Joining)
                self._perform(node, Leave(1, why)) if joining else self.tell(node.label, f"rejected: {why}")
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
            self.tell("", f"round {round.number}{end}: {round.reason}")

    def _perform(self, node: Node, action: Action) -> None:
        match action:
            case StartGroup(round):
                assert node.group is None, f"{node.name} starts {round.number} while {node.group} lives"
                assert round.number > node.stepping, "numbers only grow"
                node.group, node.joined = round, False
                self.highest[node.name] = round.number
                node.facts.advances_by = self.now
                node.coordinator.update(ready=round.number)
                if round.group_rank(node.name) == 0:
                    node.master = round.number
                    node.coordinator.master(round.number, node.label, 1)
                self._join(node)
            case KillGroup(number) | StopGroup(number):
                self._at(0.01, lambda: self._gone(node, number))
            case ReportFailure(failure):
                self.tell(node.label, f"reports {failure.kind}: {failure.why}")
                failure = replace(failure, high_water=self.step, checkpoint=node.facts.checkpoint)
                node.coordinator.failed(failure, self.now)
            case ReportDone(number):
                self.tell(node.label, "is done")
                node.coordinator.done(number)
                self._at(0.01, lambda: self._gone(node, number))
            case ReportLeaving(why):
                node.coordinator.update(leaving=why)
            case Wake(at):
                node.wakes.append(at)
            case Leave(exit_code, why):
                node.left = action
                self.tell(node.label, f"leaves with {exit_code}: {why}")
                self._guarded(node, node.coordinator.close)
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
        return [self.agents[m.incarnation] for m in round.members]

    def _trains(self, round: Round) -> bool:
        members = self._members(round)
        return all(self._lives(node, round) and node.joined and node.done != round.number for node in members) and (
            all(self._reaches(one, other) for one in members for other in members if one is not other)
        )

    @staticmethod
    def _lives(node: Node, round: Round) -> bool:
        return node.group == round and not (node.dead or node.frozen)

    @staticmethod
    def _reaches(one: Node, other: Node) -> bool:
        cut = one.away.network or other.away.network
        return not (cut or other.label in one.away.peers or one.label in other.away.peers)

    def _train(self, round: Round) -> None:
        if not self._trains(round):
            self._training.discard(round.number)
            return
        self._training.add(round.number)
        self.step += 1
        if round.number not in self.trained:
            self.tell("", f"round {round.number} trains on {' '.join(m.node for m in round.members)}")
        self.trained[round.number] = self.now
        for node in self._members(round):
            node.facts.high_water = self.step
            node.facts.advances_by = self.now + 2 * STEP_S
            if node.stepping != round.number:
                node.stepping = round.number
                node.coordinator.update(stepped=round.number, can_hold=round.number if self.holds else 0)
                node.due = self.now
                self._feed(node, FirstStep(round.number, self.now))
        self._at(STEP_S, lambda: self._train(round))

    def _see_peers(self) -> None:
        """Somebody is back: what waited for it goes on, and whoever waited for the dead hears that they are."""
        groups = {node.group.number: node.group for node in self._alive() if node.group is not None}
        for round in groups.values():
            if self._trains(round) and round.number not in self._training:
                self._training.add(round.number)
                self._at(STEP_S, lambda round=round: self._train(round))  # type: ignore[misc]
            for gone in self._members(round):
                if gone.group != round or gone.dead:
                    self._lose_peers(round, gone)

    def _hold(self, node: Node, number: int) -> None:
        if node.group is not None and node.group.number == number == node.hold and not node.dead:
            node.hold = 0
            node.facts.checkpoint = self.saved = (number, self.step)
            self.tell(node.label, f"holds round {number} at a checkpoint of its step {self.step}")
            node.coordinator.update(held=number, checkpoint=(number, self.step), high_water=self.step)
            node.due = self.now

    def _gone(self, node: Node, number: int) -> None:
        if node.dead or node.group is None or node.group.number != number:
            return
        if node.frozen:  # a stopped process does not hear of its children's end
            return self._at(0.01, lambda: self._gone(node, number))
        round, node.group = node.group, None
        node.facts.advances_by = None
        self._feed(node, GroupGone(number))
        self._lose_peers(round, node)

    def _lose_peers(self, round: Round, gone: Node) -> None:
        """Connections to a dead process are reset, where there is a machine that resets them."""
        if gone.done == round.number:
            return

        def lose(node: Node) -> None:
            waits = isinstance(node.phase, Running) and node.done != round.number
            if self._lives(node, round) and waits and self._reaches(node, gone):
                words = LastWords("exception", "RuntimeError", "Connection reset by peer", "")
                for local_rank in range(self.slots):
                    if isinstance(node.phase, Running):
                        self.exit(node.label, local_rank, ExitStatus(1), words)

        for node in self._members(round):
            if node is not gone:
                self._at(LOST_PEER_S, lambda node=node: lose(node))  # type: ignore[misc]

    def _at(self, seconds: float, act: Callable[[], None]) -> None:
        self.later.append((self.now + seconds, act))

    # ---- knocking, and words

    def _knock(self, who: Node, them: Mapping[str, tuple[str, int]]) -> dict[str, Answered | Refused | Silent]:
        agents = list(self.agents.values())
        return {name: self._answer(who, agents[port - 1]) for name, (_, port) in them.items()}

    def _answer(self, who: Node, whom: Node) -> Answered | Refused | Silent:
        if not self._reaches(who, whom) or whom.frozen:
            return SILENT
        return Refused() if whom.dead or whom.left else Answered(whom.name, whom.incarnation)

    def tell(self, who: str, what: str) -> None:
        self.lines.append((self.now, who, what))
