"""A job on several nodes without processes, sockets or time: real members and state machines, one memory store.

Whoever drives it says what happens to which node. A group trains while every member of its round has started it and
can reach the others; a step takes 0.1 s; when a member's workers die, the others lose their peers 30 ms later, or never
where no connection is reset. The clock moves only when told, and stops at everything that is due on the way.

An agent's label tells it from others of the same node id; it is the node id unless two agents have one.
"""

from __future__ import annotations

import json
import signal
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

from benchmarks.history import AgentHistory, History, View
from elasticd_agent.hangs.detector import HangDetector
from elasticd_agent.hangs.evidence import EvidenceTarget
from elasticd_agent.job import state_machine as core
from elasticd_agent.job.slots import Slots
from elasticd_agent.model.codec import VERSION
from elasticd_agent.model.job import Policy
from elasticd_agent.model.keys import Keys
from elasticd_agent.model.messages import (
    Action,
    Event,
    ExitReport,
    ExitStatus,
    FaultDetected,
    FirstStep,
    Flush,
    Flushed,
    GroupEnded,
    HangReportRequested,
    Joining,
    JoinRejected,
    KillGroup,
    LeaderNotice,
    Leave,
    MasterKnown,
    Notice,
    PauseRequested,
    ReportDone,
    ReportFailure,
    ReportLeaving,
    RoundPublished,
    Running,
    SetTimer,
    StartAheadRequested,
    StartGroup,
    StateMachineRules,
    StopGroup,
    StopRequested,
    StoreAvailability,
    TimerExpired,
    WaitingFor,
    WorkerExited,
)
from elasticd_agent.model.phrases import listing
from elasticd_agent.model.records import NodeRecord, Round
from elasticd_agent.model.reports import HangVerdict
from elasticd_agent.rendezvous.member import RendezvousMember
from elasticd_agent.rendezvous.membership_client import JobTerms
from elasticd_agent.rendezvous.peers import PeerNetwork
from elasticd_agent.rendezvous.probe import Address, ProbeAlive, ProbeAnswer, ProbeNoAnswer, ProbeRefused
from elasticd_agent.rendezvous.takeover import TakeOver
from elasticd_agent.rendezvous.view import LocalFacts, Requirements
from elasticd_agent.store.memory import MemoryStore
from elasticd_agent.workers.manager import ProcessUnkillable, UnkillableProcessEnded
from tests.scenarios.hanging import FakeEvidence, observation
from tests.scenarios.node import Node, Partition
from tests.scenarios.waystore import Killed, NodeStore

STEP_S = 0.1
STUCK_S = 5.0
"""What does not die is waited for so long."""
LOOK_S = 0.25
DEADLINE_S = 5.0
LOST_PEER_S = 0.03
START_S = 0.1
SILENT = ProbeNoAnswer("no answer")
T = TypeVar("T")


@dataclass(slots=True)
class _HangListener:
    """Tells of suspicions."""

    cluster: Cluster
    label: str

    def hang_suspected(self, number: int, why: str) -> None:
        self.cluster.tell(self.label, f"suspects: {why}")

    def suspicion_lasts(self, number: int, why: str) -> None:
        self.cluster.tell(self.label, f"still suspects: {why}")

    def hang_cleared(self, number: int, seconds: float) -> None:
        self.cluster.tell(self.label, f"suspected it for {seconds:.1f} s, and it goes on")


class NodeNetwork(PeerNetwork):
    """One agent's way to the others of its cluster."""

    def __init__(self, cluster: Cluster, incarnation: str) -> None:
        self.cluster, self.incarnation = cluster, incarnation

    @property
    def node(self) -> Node:
        return self.cluster.agents[self.incarnation]

    def probe(self, nodes: Mapping[str, Address]) -> Mapping[str, ProbeAnswer]:
        agents = list(self.cluster.agents.values())
        return {name: self.cluster.answer(self.node, agents[port - 1]) for name, (_, port) in nodes.items()}


class Cluster:
    """All nodes of one job. `lines` is what happened since it was last looked at: when, to whom, what.

    `hints` is given every hint of a watch with its delivery, and may do with it what a bad network does.
    """

    def __init__(self, asked: Requirements, policy: Policy, slots: int = 1, holds: bool = False) -> None:
        self.now = 1000.0
        self.asked, self.policy, self.slots, self.can_pause = asked, policy, slots, holds
        self.store = MemoryStore(lambda: self.now)
        self.store_up = True
        self.deaf = False
        self.start_s = 0.0
        """What a new process needs to its entry, where workers keep theirs; 0: they do not."""
        self.twins = False
        self.compares_one_key = False
        self.host = ""
        self.keys = Keys("job")
        self.history = History(join_timeout_s=policy.join_timeout_s)
        self.store.watch(self._spec_written, self.keys.spec)
        self.store.watch(self._round_written, self.keys.round)
        self.nodes: dict[str, Node] = {}
        self.later: list[tuple[float, Callable[[], None]]] = []
        self.step = 0
        self.lines: list[tuple[float, str, str]] = []
        self.rounds: dict[int, Round] = {}
        self.trained: dict[int, float] = {}
        self.agents: dict[str, Node] = {}
        self.saved: tuple[int, int] | None = None
        self.highest: dict[str, int] = {}
        self.delays: dict[str, float] = {}
        self.hints: Callable[[Callable[[], None]], None] = lambda deliver: deliver()
        self._training: set[int] = set()

    # ---- what happens

    def start(self, label: str, name: str | None = None, role: str = "default", version: str = VERSION) -> Node:
        name = name or label
        if label == self.host:
            self.empty_store()
        if not self.alive() and self.store.read(self.keys.round) is None:
            self.rounds.clear()  # nobody remembers
        port = len(self.agents) + 1
        incarnation = f"{name}{port}"
        highest = self.highest.get(name, 0)
        away = Partition()
        store = self._node_store(label, incarnation, away, version)
        record = NodeRecord(name, incarnation, f"{label}:{port}", tuple(range(self.slots)), "d", highest, role=role)
        spec = {"role": role, "args": [], "min_nodes": self.asked.min_nodes, "max_nodes": self.asked.max_nodes}
        spec["run"] = self.asked.run

        mine = store.written(json.dumps({"version": VERSION, **spec}).encode())
        story = AgentHistory(record.identity, self.asked.run, self.now, mine)
        self.history.agents[record.identity] = story

        def log(sentence: str) -> None:
            story.spoke_at.append(self.now)
            self.tell(label, sentence)

        member = RendezvousMember(
            store,
            JobTerms(self.keys, self.policy, self.asked, mine),
            record,
            LocalFacts(first_round_number=1 + highest, checkpoint=self.saved),
            NodeNetwork(self, incarnation),
            log,
            take_over=self._take_over(store, record, log),
        )
        rules = StateMachineRules(name, 0.5, 30.0, incarnation=incarnation, multi_node=True, leave_on_stop=True)
        slots = Slots(name, record.slots, self.asked.min_workers)
        node = Node(label, name, incarnation, rules, member, store, away, slots, due=self.now)
        member.set_wake(lambda: self._hinted(node))
        evidence = FakeEvidence(node, self._at, lambda: self._clock(node))
        node.suspicion = HangDetector(
            name, self.policy, evidence, member.report_hang, _HangListener(self, label), report_every_look=False
        )
        store.held_up = lambda key: self._hold_up(node, key)
        self.nodes[label] = self.agents[incarnation] = node
        return node

    def _node_store(self, label: str, incarnation: str, away: Partition, version: str) -> NodeStore:
        store = NodeStore(
            self.store, lambda: self.is_store_up and not away.store, lambda deliver: self.hints(deliver), version
        )
        store.compares_one_key, store.standalone = self.compares_one_key, not self.host
        store.is_host = label == self.host
        return store

    def _take_over(self, store: NodeStore, record: NodeRecord, log: Callable[[str], None]) -> TakeOver | None:
        """No agent takes this store over."""
        return None

    def _reaches_store(self, node: Node) -> bool:
        return self.is_store_up and not node.partition.store

    @property
    def is_store_up(self) -> bool:
        """With a host, the store is a process of its agent."""
        host = self.nodes.get(self.host)
        return self.store_up and (not self.host or (host is not None and not host.dead and host.left is None))

    def kill(self, label: str) -> None:
        """The machine's processes are gone; the machine resets their connections."""
        node = self.nodes[label]
        node.dead = True
        if node.group is not None:
            self._lose_peers(node.group, node)

    def vanish(self, label: str) -> None:
        """The machine is gone: nothing resets a connection."""
        self.nodes[label].dead = self.nodes[label].partition.network = True

    def freeze(self, label: str) -> None:
        """Every process of the node is stopped; its kernel still takes connections."""
        self.nodes[label].frozen = True

    def thaw(self, label: str) -> None:
        self.nodes[label].frozen = False
        self._see_peers()

    def delay(self, label: str, seconds: float) -> None:
        """The node stands still for so long before it writes the Round next, after its look at the leader key."""
        self.delays[label] = seconds

    def _hold_up(self, node: Node, key: str) -> None:
        if key == self.keys.round and (delay_s := self.delays.pop(node.label, 0.0)):
            self.freeze(node.label)
            self.wait(delay_s)
            self.thaw(node.label)

    def hang(self, label: str, how: str) -> None:
        """The node's workers do not train any more: one of "sleeps", "burns", "stopped", "collective"; "" ends that."""
        node = self.nodes[label]
        node.stuck = how
        for one in self.alive():
            one.look_at = self.now + LOOK_S
        self._see_peers()

    def cling(self, label: str, slot: int) -> None:
        """The worker in this slot will not die of SIGKILL."""
        self.nodes[label].unkillable.add(slot)

    def let_go(self, label: str) -> None:
        """What clung to the node's slots has ended."""
        node = self.nodes[label]
        freed, node.unkillable = sorted(node.unkillable), set()
        for slot in freed:
            self._slot(node, UnkillableProcessEnded(100 + slot))

    def cut(self, label: str, *, store: bool = False, peers: bool = False, peer: str | None = None) -> None:
        away = self.nodes[label].partition
        away.store, away.network = away.store or store, away.network or peers
        if peer is not None:
            away.peers.add(peer)

    def heal(self, label: str) -> None:
        away = self.nodes[label].partition
        away.store, away.network, away.peers = False, False, set()
        for node in self.nodes.values():
            node.partition.peers.discard(label)
        self._see_peers()

    def exit(self, label: str, local_rank: int, status: ExitStatus, words: ExitReport | None = None) -> None:
        node = self.nodes[label]
        assert node.group is not None, f"{label} has no group"
        rank = node.group.ranks(node.name)[local_rank]
        slot = list(node.group.assignments())[rank][3]
        if words is None and not status.ok:  # others lose their peer, and keep their process
            self._start_ahead(node, {slot})
        self.feed(node, WorkerExited(node.group.number, rank, local_rank, slot, status, words, self._clock(node)))
        if not status.ok:
            self._lose_peers(node.group, node)

    def finish(self, *labels: str) -> None:
        """Every worker of these nodes, or of all, comes to its end; those that train together do so together."""
        ending = [n for n in self.alive() if n.group is not None and (not labels or n.label in labels)]
        for node in ending:
            node.done = node.group.number if node.group else 0
        for node in ending:
            for local_rank in range(_workers(node) if isinstance(node.phase, Running) else 0):
                self.exit(node.label, local_rank, ExitStatus(0))

    def stop(self, label: str, name: str = "SIGTERM") -> None:
        node = self.nodes[label]
        self.feed(node, StopRequested(name, 128 + signal.Signals[name], self._clock(node)))

    def jump(self, label: str, seconds: float) -> None:
        """The node's monotonic clock jumps ahead, as on a machine that was suspended."""
        node = self.nodes[label]
        node.ahead_s += seconds
        node.wakes = [at - seconds for at in node.wakes]
        node.due = None if node.due is None else node.due - seconds

    def empty_store(self) -> None:
        """It came back without anything that was in it."""
        for key in list(self.store.list("")):
            self.store.delete(key)

    def wait(self, seconds: float) -> None:
        """Time passes; everything due on the way happens, in order."""
        until = self.now + seconds
        self._note_hearing()
        for _ in range(200_000):
            at = self._next_due()
            if at is None or at > until:
                break
            self.now = max(self.now, at)
            self.run_due()
            self._note_hearing()
        else:
            raise AssertionError(f"no end of turns at {self.now}")
        self.now = self.history.ended_at = max(self.now, until)  # it is later where a node was held up
        self._note_hearing()

    # ---- the history

    def _note_hearing(self) -> None:
        """Who has reached the store from the last call of this until now."""
        for node in self.agents.values():
            hears = self.history.agents[node.name, node.incarnation].hears
            if node.hears:
                hears[-1] = hears[-1][0], self.now
            lives = not (node.dead or node.frozen or node.left)
            reaches = lives and self._reaches_store(node)
            if reaches and not node.hears:
                hears.append((self.now, self.now))
            node.hears = reaches

    def _spec_written(self, key: str) -> None:
        found = self.store.read(key)
        self.history.specs.append((self.now, None if found is None else found.value))

    def _round_written(self, key: str) -> None:
        if self.store.read(key) is None:
            self.history.forgotten.append(self.now)

    def _note_view(self, node: Node, round: Round) -> None:
        members = tuple(member.identity for member in round.members)
        identity = node.name, node.incarnation
        told = round.leader, round.reason, round.outcome or ""
        view = View(self.now, identity, round.run, round.number, members, *told)
        self.history.agents[identity].views.append(view)

    # ---- time

    def _clock(self, node: Node) -> float:
        """What the node's own monotonic clock says."""
        return self.now + node.ahead_s

    def _next_due(self) -> float | None:
        times = [at for at, _ in self.later]
        for node in self.alive():
            times += [at for at in (node.due, *node.wakes) if at is not None]
            times += [node.look_at] if node.look_at and node.group is not None else []
        return min(times, default=None)

    def alive(self) -> list[Node]:
        return [node for node in self.nodes.values() if not (node.dead or node.frozen or node.left)]

    def run_due(self) -> None:
        due = [entry for entry in self.later if entry[0] <= self.now]
        self.later = [entry for entry in self.later if entry[0] > self.now]
        for _, act in due:
            act()
        for node in self.alive():
            if any(at <= self.now for at in node.wakes):
                node.wakes = [at for at in node.wakes if at > self.now]
                self.feed(node, TimerExpired(self._clock(node)))
            if node.look_at and node.look_at <= self.now and node.group is not None:
                self._look(node, node.group)
            if node.due is not None and node.due <= self.now and node.left is None:
                self._turn(node)

    def _look(self, node: Node, round: Round) -> None:
        """Only once somebody has hung: a job that never does need not be looked at."""
        assert node.suspicion is not None
        stuck = any(member.stuck for member in self._members(round))
        node.look_at = self.now + LOOK_S if stuck or node.suspicion.suspected else 0.0
        idle_s = self.now - self.trained[round.number] if round.number in self.trained else 0.0
        node.suspicion.update(observation(node, round, self.step, idle_s, stuck), DEADLINE_S, self._clock(node))
        node.due = self.now

    def _hinted(self, node: Node) -> None:
        node.due = self.now

    def _turn(self, node: Node) -> None:
        node.due = None
        news, until = self._guarded(node, lambda: node.member.turn(self._clock(node))) or ([], None)
        if until is not None:
            until -= node.ahead_s  # a hint that came during the turn keeps its own time
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

    def _hear(self, node: Node, said: Notice) -> None:
        match said:
            case MasterKnown(number):
                node.master = number
                self._join(node)
            case PauseRequested(number, on):
                node.pause_round = number if on else 0
                if on and self.can_pause:
                    self._at(STEP_S, lambda: self._hold(node, number))
            case StartAheadRequested(number):
                self._start_ahead(node, set(node.slots.usable) - node.at_entry, number)
            case HangReportRequested(number, on):
                node.suspicion.report_requested(number, on)
                node.look_at = self.now
            case HangVerdict(_, _, cause, why):
                self.tell(node.label, f"finds the group hung ({cause}): {why}")
            case StoreAvailability(away, _, seconds):
                self.tell(node.label, "the store is away" if away else f"the store is back after {seconds:.1f} s")
            case WaitingFor(why, _):
                self.history.agents[node.name, node.incarnation].spoke_at.append(self.now)
                self.tell(node.label, f"waits: {why}")
            case FaultDetected(number, cause, culprit):
                whose = f", the fault of {culprit}" if culprit else ""
                self.tell(node.label, f"counts round {number} as ended by {cause}{whose}")
            case LeaderNotice():
                pass
            case JoinRejected(why):
                joining = isinstance(node.phase, Joining)
                self._perform(node, Leave(1, why)) if joining else self.tell(node.label, f"rejected: {why}")
            case _:
                self.feed(node, said)

    # ---- the agent's loop

    def feed(self, node: Node, event: Event) -> None:
        if isinstance(event, RoundPublished):
            self._note_view(node, event.round)
            self.published(event.round)
        before = node.phase
        node.phase, actions = core.step(before, event, node.rules)
        for action in actions:
            self._perform(node, action)

    def published(self, round: Round) -> None:
        new = round.number not in self.rounds
        # But for what the store alone has added to them: see WayStore.written.
        alike = replace(round, version=VERSION, unknown={}, store=None, electors=(), quorum=0)
        known = self.rounds.setdefault(round.number, alike)
        assert known == alike or self.twins, f"two rounds are numbered {round.number}"
        if known != alike:
            new, self.rounds[round.number] = True, alike
        if new:
            end = "" if round.outcome is None else f" ({round.outcome}, exit code {round.exit_code})"
            self.tell("", f"round {round.number}{end}: {round.reason}")

    def _perform(self, node: Node, action: Action) -> None:
        match action:
            case StartGroup(round):
                assert node.group is None, f"{node.name} starts {round.number} while {node.group} lives"
                if node.slots.remember_if_blocked(round):
                    node.blocked = round.number
                    return
                assert round.number > node.stepping, "numbers only grow"
                node.group, node.joined, node.at_entry = round, False, set()
                node.slots.mark_ready(node.slots.starting)
                self._announce_slots(node)
                self.highest[node.name] = round.number
                targets = [EvidenceTarget(rank, 1) for rank in round.ranks(node.name)]
                node.suspicion.group_started(round.number, targets, Path("evidence"))
                node.stuck = ""
                node.member.update_local_facts(next_step_due=self._clock(node))
                node.member.update_node_record(ready_round=round.number)
                if round.group_rank(node.name) == 0:
                    node.master = round.number
                    node.member.report_master(round.number, node.label, 1)
                self._join(node)
            case KillGroup(number) | StopGroup(number) if node.blocked == number:
                self._at(0.0, lambda: self._unblock(node, number))
            case KillGroup(number) | StopGroup(number):
                self._at(STUCK_S if self._clinging(node) else 0.01, lambda: self._gone(node, number))
            case ReportFailure(failure):
                self.tell(node.label, f"reports {failure.kind}: {failure.why}")
                failure = replace(failure, high_water=self.step, checkpoint=node.member.facts.checkpoint)
                node.member.report_failure(failure, self._clock(node))
            case ReportDone(number):
                self.tell(node.label, "is done")
                node.member.report_done(number)
                self._at(0.01, lambda: self._gone(node, number))
            case ReportLeaving(why, code, soon):
                node.member.update_node_record(leaving=why, leaving_code=code, leaving_soon=soon)
            case SetTimer(at):
                node.wakes.append(at - node.ahead_s)
            case Flush():
                self.feed(node, Flushed())
            case Leave(exit_code, why):
                node.left = action
                self.history.agents[node.name, node.incarnation].left_at = self.now
                self.tell(node.label, f"leaves with {exit_code}: {why}")
                self._guarded(node, node.member.close)
        node.due = self.now

    def _join(self, node: Node) -> None:
        """The workers find their store, and train once all of the round have."""
        round = node.group
        if round is None or node.joined or node.master != round.number:
            return
        node.joined = True
        if all(member.joined and member.group == round for member in self._members(round)):
            self._at(START_S, lambda: self.train(round))

    def _members(self, round: Round) -> list[Node]:
        return [self.agents[m.incarnation] for m in round.members]

    def _trains(self, round: Round) -> bool:
        members = self._members(round)
        if any(node.stuck for node in members):
            return False
        return all(self._lives(node, round) and node.joined and node.done != round.number for node in members) and (
            all(self._reaches(one, other) for one in members for other in members if one is not other)
        )

    @staticmethod
    def _lives(node: Node, round: Round) -> bool:
        return node.group == round and not (node.dead or node.frozen)

    @staticmethod
    def _reaches(one: Node, other: Node) -> bool:
        cut = one.partition.network or other.partition.network
        return not (cut or other.label in one.partition.peers or one.label in other.partition.peers)

    def train(self, round: Round) -> None:
        if not self._trains(round):
            self._training.discard(round.number)
            return
        self._training.add(round.number)
        self.step += 1
        if round.number not in self.trained:
            self.tell("", f"round {round.number} trains on {' '.join(m.node for m in round.members)}")
        self.trained[round.number] = self.now
        self.history.trained(round.run, round.number, tuple(m.identity for m in round.members), self.now)
        for node in self._members(round):
            node.member.update_local_facts(high_water=self.step)
            node.member.update_local_facts(next_step_due=self._clock(node) + 2 * STEP_S)
            if node.stepping != round.number:
                node.stepping = round.number
                node.member.update_node_record(
                    stepped_round=round.number,
                    can_pause=round.number if self.can_pause else 0,
                    entered=round.number if self.start_s else 0,
                )
                node.due = self.now
                self.feed(node, FirstStep(round.number, self._clock(node)))
        self._at(STEP_S, lambda: self.train(round))

    def _see_peers(self) -> None:
        """Somebody is back: what waited for it goes on, and whoever waited for the dead hears that they are."""
        groups = {node.group.number: node.group for node in self.alive() if node.group is not None}
        for round in groups.values():
            if self._trains(round) and round.number not in self._training:
                self._training.add(round.number)
                self._at(STEP_S, lambda round=round: self.train(round))  # type: ignore[misc]
            for gone in self._members(round):
                if gone.group != round or gone.dead:
                    self._lose_peers(round, gone)

    def _hold(self, node: Node, number: int) -> None:
        if node.group is not None and node.group.number == number == node.pause_round and not node.dead:
            node.pause_round = 0
            self.saved = (number, self.step)
            node.member.update_local_facts(checkpoint=self.saved)
            self.tell(node.label, f"holds round {number} at a checkpoint of its step {self.step}")
            node.member.update_node_record(paused=number, checkpoint=(number, self.step), high_water=self.step)
            node.due = self.now

    def _gone(self, node: Node, number: int) -> None:
        if node.dead or node.group is None or node.group.number != number:
            return
        if node.frozen:  # a stopped process does not hear of its children's end
            return self._at(0.01, lambda: self._gone(node, number))
        for rank, slot in self._clinging(node):
            self._slot(node, ProcessUnkillable(number, 100 + slot, rank, slot, "D", "rpc_wait"))
        round, node.group = node.group, None
        if node.suspicion is not None:
            node.suspicion.group_ended()
        node.member.update_local_facts(next_step_due=None)
        self.feed(node, GroupEnded(number))
        self._lose_peers(round, node)

    @staticmethod
    def _clinging(node: Node) -> list[tuple[int, int]]:
        """(rank, slot) of the group's workers that will not die."""
        places = node.group.assignments() if node.group is not None else ()
        return [(rank, slot) for rank, name, _, slot in places if name == node.name and slot in node.unkillable]

    def _slot(self, node: Node, news: ProcessUnkillable | UnkillableProcessEnded) -> None:
        self.tell(node.label, node.slots.handle(news) or "")
        if (round := node.slots.take_unblocked()) is not None:
            node.blocked = 0
            self._perform(node, StartGroup(round))
        self._announce_slots(node)
        node.due = self.now

    def _announce_slots(self, node: Node, **fields: int) -> None:
        slots = node.slots
        node.member.update_node_record(
            slots=slots.usable, unusable=slots.unusable_reason, starting=slots.starting, **fields
        )

    def _start_ahead(self, node: Node, slots: set[int], ahead: int | None = None) -> None:
        """New processes run to their entry, and are there after `start_s`."""
        if not self.start_s:
            return

        def enter() -> None:
            here = slots.intersection(node.slots.starting)
            if here and not node.dead and node.left is None:
                node.at_entry |= here
                node.slots.mark_ready(here)
                self.tell(node.label, f"slot {listing(sorted(here))} is at its entry")
                self._announce_slots(node)
                node.due = self.now

        node.slots.mark_starting(slots)
        self._announce_slots(node, **({} if ahead is None else {"ahead": ahead}))
        node.due = self.now
        self._at(self.start_s, enter)

    def _unblock(self, node: Node, number: int) -> None:
        node.blocked = 0
        node.slots.forget_blocked(number)
        self.feed(node, GroupEnded(number))

    def _lose_peers(self, round: Round, gone: Node) -> None:
        """Connections to a dead process are reset, where there is a machine that resets them."""
        if gone.done == round.number:
            return

        def lose(node: Node) -> None:
            waits = isinstance(node.phase, Running) and node.done != round.number
            if self._lives(node, round) and waits and self._reaches(node, gone):
                words = ExitReport("exception", "RuntimeError", "Connection reset by peer", "")
                for local_rank in range(_workers(node)):
                    if isinstance(node.phase, Running):
                        self.exit(node.label, local_rank, ExitStatus(1), words)

        for node in self._members(round):
            if node is not gone:
                self._at(LOST_PEER_S, lambda node=node: lose(node))  # type: ignore[misc]

    def _at(self, seconds: float, act: Callable[[], None]) -> None:
        self.later.append((self.now + seconds, act))

    # ---- probes, and words

    def answer(self, who: Node, whom: Node) -> ProbeAnswer:
        if not self._reaches(who, whom) or whom.frozen or self.deaf:
            return SILENT
        return ProbeRefused() if whom.dead or whom.left else ProbeAlive(whom.name, whom.incarnation, *whom.says)

    def tell(self, who: str, what: str) -> None:
        self.lines.append((self.now, who, what))


def _workers(node: Node) -> int:
    return len(node.group.ranks(node.name)) if node.group is not None else 0
