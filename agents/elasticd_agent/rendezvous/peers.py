"""The other agents, as this one observes them: answered probes, members that it cannot reach, links that broke.

A store says when a lease has ended, and nothing else. Whether an agent is dead, stuck or cut off is observed here, on
this agent's own monotonic clock:

- `PeerNetwork` is the way to the other agents: probes, and standing connections (`PeerLinks`).
- `PeerObservations` holds what the probes have shown. Planner, leader election and the next two read it.
- `LivenessProber` decides when a leader probes: once while all is well, and at every new sign of trouble.
- `ReachabilityMonitor` decides when a member probes: while its workers are stalled.

A refused probe counts as a death only of an agent that has answered before, since a firewall refuses and drops, too. So
every rule here begins with a first probe: each member is probed once while all is well.
"""

from __future__ import annotations

import contextlib
import resource
import selectors
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from elasticd_agent.model.job import Policy
from elasticd_agent.model.records import Identity, Member, NodeRecord, Round, StoreLife
from elasticd_agent.rendezvous.membership import STALL_GRACE_S
from elasticd_agent.rendezvous.plan import ROOT_CAUSE_WAIT_S
from elasticd_agent.rendezvous.probe import (
    Address,
    ProbeAlive,
    ProbeAnswer,
    ProbeNoAnswer,
    ProbeRefused,
    ProbeServer,
    probe_nodes,
)
from elasticd_agent.rendezvous.view import ProbeResult, View
from elasticd_agent.system.network.addresses import try_parse_endpoint
from elasticd_agent.system.waker import Waker

PROBE_TIMEOUT_S = 0.2
"""An agent answers a probe within a millisecond; no answer in this time is silence."""
MIN_PROBE_INTERVAL_S = 1.0
MAX_PROBE_INTERVAL_S = 30.0
"""Between probes while no worker advances and every agent answers: it may be a long evaluation."""
NON_MEMBER_PROBE_INTERVAL_S = 5.0
"""Between probes of a node that waits to join, and between those that such a node makes."""
FIRST_PROBE_SPREAD_S = 5.0
FIRST_PROBE_INTERVAL_S = 0.02
"""The members of a round that trains probe each other for the first time, one after the other: each so long after the
one before it, and sooner in a large round, so that all have within FIRST_PROBE_SPREAD_S.
"""
FIRST_PROBE_TRIES = 3
RECONNECT_AFTER_S = 5.0
"""A broken or failed connection is tried again after this: probes have decided by then."""
MAIN_THREAD_CHECK_S = 1.0


class PeerNetwork:
    """The way to the other agents. A job on one node has none: this class reaches nobody."""

    def probe(self, nodes: Mapping[str, Address]) -> Mapping[str, ProbeAnswer]:
        """The answers of the agents at these addresses, all at once."""
        return {}

    def keep_links(self, nodes: Mapping[str, Address], broken: Callable[[str], None]) -> None:
        """Keep a connection to each of these nodes and to no other; `broken(node)` is called from any thread."""

    def reaches(self, address: Address) -> bool:
        """True if something listens there."""
        return False

    def set_probe_answer(self, store: StoreLife | None, lost: bool, leaving: bool) -> None:
        """Answer probes with this from now on, see ProbeAlive."""


class TcpPeerNetwork(PeerNetwork):
    """Agents on other machines. `server` answers their probes."""

    def __init__(self, server: ProbeServer, timeout_s: float = PROBE_TIMEOUT_S) -> None:
        self._server = server
        self._timeout_s = timeout_s
        self._links = PeerLinks()

    def probe(self, nodes: Mapping[str, Address]) -> Mapping[str, ProbeAnswer]:
        return probe_nodes(nodes, self._timeout_s)

    def reaches(self, address: Address) -> bool:
        with contextlib.suppress(OSError), socket.create_connection(address, self._timeout_s):
            return True
        return False

    def keep_links(self, nodes: Mapping[str, Address], broken: Callable[[str], None]) -> None:
        self._links.keep(nodes, broken)

    def set_probe_answer(self, store: StoreLife | None, lost: bool, leaving: bool) -> None:
        self._server.set_probe_answer(store, lost, leaving)

    def close(self) -> None:
        self._links.close()


class PeerObservations:
    """The only writer of its fields. It belongs to the thread that talks to the store."""

    def __init__(self, node: str, network: PeerNetwork) -> None:
        self._node = node
        self._network = network
        self.store_up_since = 0.0  #: since when a missing record means something; infinity: the store is unavailable
        self.own_record_missing = False  #: in the last list of all nodes
        self.suspects: set[str] = set()  #: nodes whose agent may have died: reset connection, refused probe
        self.answered: set[Identity] = set()  #: have answered a probe: if one refuses the next, its process is gone
        self.results: dict[str, ProbeResult] = {}  #: members' answers since the last sign of trouble
        self.silent_since: dict[str, float] = {}  #: members that had answered before and do not now
        self.unreachable_joiners: frozenset[str] = (
            frozenset()
        )  #: nodes that want to join, had answered before and do not now
        self._links: tuple[Round | None, dict[str, Address]] = None, {}

    # ---- the store

    def store_unavailable(self) -> None:
        self.store_up_since = float("inf")

    def store_answers(self, now: float) -> None:
        if self.store_up_since == float("inf"):
            self.store_up_since = now

    def distrust_absences(self, now: float) -> None:
        """This agent did not listen, or the store lost a record: records that are missing now mean nothing yet."""
        self.store_up_since = now

    def nodes_listed(self, nodes: Iterable[str], now: float) -> None:
        """A list of all nodes was read; a store that lost this node's record may have lost others."""
        self.own_record_missing = self._node not in nodes
        if self.own_record_missing:
            self.store_up_since = max(self.store_up_since, now)

    def take_own_record_missing(self) -> bool:
        missing, self.own_record_missing = self.own_record_missing, False
        return missing

    # ---- the agents

    def suspect(self, node: str) -> None:
        self.suspects.add(node)

    def round_published(self) -> None:
        """It has no dead members."""
        self.suspects.clear()

    def forget_results(self) -> None:
        """All is well, or another node leads: earlier answers and silences mean nothing."""
        self.results.clear()
        self.silent_since.clear()

    def probe(self, agents: Iterable[NodeRecord | Member]) -> Mapping[str, ProbeAnswer]:
        """The answers of these agents by node, all at once; one without an address is left out."""
        parsed = ((agent.identity[0], try_parse_endpoint(agent.address)) for agent in agents)
        addresses = {node: address for node, address in parsed if address is not None}
        answers = self._network.probe(addresses) if addresses else {}
        alive = (answer for answer in answers.values() if isinstance(answer, ProbeAlive))
        self.answered.update((answer.node, answer.incarnation) for answer in alive)
        return answers

    def probe_node(self, agent: NodeRecord | Member) -> ProbeAnswer | None:
        """One agent's answer; None if it has no address."""
        return self.probe([agent]).get(agent.identity[0])

    def probe_members(self, known: Iterable[NodeRecord | Member], incarnations: Mapping[str, str], now: float) -> None:
        """Probe these incarnations; `results` and `silent_since` are of this probe. `known` names their addresses."""
        agents = {agent.identity: agent for agent in known if agent.address}
        answers = self.probe(agents[identity] for identity in incarnations.items() if identity in agents)
        self.results = {node: self._result((node, incarnations[node]), answer) for node, answer in answers.items()}
        self.suspects -= {node for node, result in self.results.items() if result == "answered"}
        silent = {n for n, i in incarnations.items() if (n, i) in self.answered and self.results.get(n) == "silent"}
        self.silent_since = {node: self.silent_since.get(node, now) for node in sorted(silent)}

    def _result(self, identity: Identity, answer: ProbeAnswer) -> ProbeResult:
        match answer:
            case ProbeAlive():
                return "answered" if (answer.node, answer.incarnation) == identity else "refused"
            case ProbeRefused():
                return "refused" if identity in self.answered else "closed"
            case ProbeNoAnswer():
                return "silent"

    def probe_joiners(self, records: Iterable[NodeRecord]) -> None:
        answers = self.probe(records)
        self.unreachable_joiners = frozenset(n for n, answer in answers.items() if isinstance(answer, ProbeNoAnswer))

    def member_addresses(self, round: Round) -> dict[str, Address]:
        """The agents of the other members, as far as their addresses are known."""
        if self._links[0] is not round:
            parsed = ((m.node, try_parse_endpoint(m.address)) for m in round.members if m.node != self._node)
            self._links = round, {node: address for node, address in parsed if address is not None}
        return self._links[1]


# ---- what a leader probes


@dataclass(frozen=True, slots=True)
class Trouble:
    """Signs that a member may be gone, the first four as node names. A change of them makes a probe due at once."""

    round: int
    failed: tuple[str, ...]
    unseen_by: tuple[str, ...]  #: have not seen the Round in time
    absent: tuple[str, ...]  #: have no record
    suspects: tuple[str, ...]
    stalled: bool  #: the workers beside this agent are overdue with their next step
    failures_settled: (
        bool  #: all nodes had time to report: an agent that answered at the first report may have died since
    )

    @property
    def only_stalled(self) -> bool:
        return not (self.failed or self.unseen_by or self.absent or self.suspects)


class LivenessProber:
    """The probes of one job's leader: once while all is well, and at every new sign of trouble."""

    def __init__(self, node: str, policy: Policy, observations: PeerObservations) -> None:
        self._node = node
        self._policy = policy
        self._observations = observations
        self._probed_for: Trouble | None = None
        self._next_at = 0.0
        self._stalled_probes = 0
        self._joiners: set[str] = set()
        self._joiners_at = float("-inf")
        self._handed_over = 0

    def reset(self) -> None:
        """Any trouble is new."""
        self._probed_for = None

    def trouble(self, view: View, round: Round, now: float) -> Trouble | None:
        others = self._other_incarnations(round)
        late = now >= view.round_seen_at + self._policy.seen_timeout_s
        nodes = (member.node for member in round.members)  # this one, too: its record may be of a restored backup
        unseen_by = (n for n in nodes if (r := view.record(n)) is not None and r.seen_round < round.number)
        trouble = Trouble(
            round.number,
            failed=tuple(f.node for f in view.failures),
            unseen_by=tuple(unseen_by) if late else (),
            absent=tuple(node for node, _ in view.absent_since),
            suspects=tuple(sorted(self._observations.suspects & others.keys())),
            stalled=view.next_step_due is not None and now >= view.next_step_due + STALL_GRACE_S,
            failures_settled=bool(view.failures) and now >= view.failure_seen_at + ROOT_CAUSE_WAIT_S,
        )
        return None if trouble.only_stalled and not trouble.stalled else trouble

    def probe_unknown_members(self, view: View, round: Round, now: float) -> None:
        """All is well: probe members that have never been probed, so that their later silence means something."""
        self._observations.forget_results()
        self._stalled_probes = 0
        unknown = {
            n: i for n, i in self._other_incarnations(round).items() if (n, i) not in self._observations.answered
        }
        if unknown and now >= self._next_at:
            self._probe(view, unknown, now)
            self._observations.forget_results()

    def probe_if_due(self, view: View, round: Round, trouble: Trouble, now: float) -> bool:
        """Probe all members at a new sign of trouble, and again and again while there is any. True if it did."""
        if trouble == self._probed_for and now < self._next_at:
            return False
        self._probed_for = trouble
        self._probe(view, self._other_incarnations(round), now)
        if trouble.only_stalled and not self._observations.silent_since:
            self._stalled_probes += 1
            pause_s = MIN_PROBE_INTERVAL_S * 2.0 ** min(self._stalled_probes, 16)
            self._next_at = now + min(pause_s, MAX_PROBE_INTERVAL_S)
        return True

    def probe_joiners_if_due(self, view: View, round: Round, now: float) -> None:
        """A node that was lost because it is unreachable is not taken again before it is reachable."""
        members = {m.node for m in round.members}
        records = [p.record for p in view.nodes if p.record.id not in members]
        joiners = [record for record in records if record.identity in self._observations.answered]
        names = {record.id for record in joiners}
        if now >= self._joiners_at or names != self._joiners:
            self._joiners = names
            self._joiners_at = now + NON_MEMBER_PROBE_INTERVAL_S
            self._observations.probe_joiners(joiners)

    def take_unreachable_majority(self, view: View, round: Round, now: float) -> list[str]:
        """Members that do not answer this agent, if they are the majority: then this agent is cut off. Once a Round."""
        silent_s = self._policy.lease_s
        silent = [node for node, since in view.silent_since if now >= since + silent_s and view.record(node)]
        if len(silent) <= len(round.members) / 2 or self._handed_over >= round.number:
            return []
        self._handed_over = round.number
        return silent

    def _other_incarnations(self, round: Round) -> dict[str, str]:
        return {m.node: m.incarnation for m in round.members if m.node != self._node}

    def _probe(self, view: View, incarnations: dict[str, str], now: float) -> None:
        members = view.current.members if view.current is not None else ()
        self._observations.probe_members((*(p.record for p in view.nodes), *members), incarnations, now)
        self._next_at = now + MIN_PROBE_INTERVAL_S


# ---- what a member probes


class ReachabilityMonitor:
    """Detects members that this node cannot reach. The leader sees its own connections and no others.

    Two members that the leader reaches may not reach each other. So each node publishes in its record the members that
    it does not reach, and `membership` chooses among them.

    - A member probes once its workers have not advanced for a lease's time, and counts another one as unreachable that
      has been silent for as long again. A node that was left out of the Round probes before it can join again.
    - Silence counts after an earlier answer. Before a round's first step it counts where other members answer.
      Otherwise a firewall between agents would separate nodes that train together.
    - A refusal is left to the leader. Members that have answered are remembered, in case this node leads next.
    """

    def __init__(self, policy: Policy, me: Identity, observations: PeerObservations) -> None:
        self._policy = policy
        self._me = me
        self._observations = observations
        self._number = 0
        self._is_member = False
        self._missed: set[Identity] = set()  #: counted as unreachable once, so their silence counts again
        self._silent_since: dict[str, float] = {}
        self._interval_s = MIN_PROBE_INTERVAL_S
        self._next_at = float("-inf")
        self._first_probe_at: float | None = None
        self._first_probe_tries = 0
        self.unreachable: tuple[str, ...] = ()  #: members of the current Round that this node does not reach

    def turn(self, round: Round | None, stepped: int, next_step_due: float | None, now: float) -> float | None:
        """Probe if it is due, and update `unreachable`. Returns when to come back.

        `stepped`: the last round that made a step here. `next_step_due`: when the workers here should have made their
        next one, None if there are none.
        """
        if round is None or round.terminal:
            self._reset()
            return None
        if round.number != self._number:
            self._begin_round(round)
        if self._is_member:
            if next_step_due is None:
                return None  # its workers have ended: the result so far is final
            if now < next_step_due + self._policy.lease_s:
                self._reset()
                if stepped == round.number:
                    self._probe_unknown_members(round, now)
                return None
        elif self._me[0] not in {e.node for e in round.excluded}:
            self._reset()
            return None
        if now >= self._next_at:
            self._probe_members(round, stepped == round.number, now)
        return self._next_at

    def _begin_round(self, round: Round) -> None:
        self._number = round.number
        self._is_member = any(m.identity == self._me for m in round.members)
        self._first_probe_at = None
        self._first_probe_tries = 0
        self._reset()

    def _reset(self) -> None:
        self._interval_s = MIN_PROBE_INTERVAL_S
        self._next_at = float("-inf")
        self._silent_since.clear()
        self.unreachable = ()

    def _probe_unknown_members(self, round: Round, now: float) -> None:
        """Probe members that have never been probed, while all is well. It is not worth a turn of its own."""
        if self._first_probe_tries >= FIRST_PROBE_TRIES:
            return
        if self._first_probe_at is None:
            interval_s = min(FIRST_PROBE_INTERVAL_S, FIRST_PROBE_SPREAD_S / len(round.members))
            self._first_probe_at = now + interval_s * round.group_rank(self._me[0])
        if now < self._first_probe_at:
            return
        unknown = {m.identity for m in round.members} - self._observations.answered - {self._me}
        self._first_probe_tries = self._first_probe_tries + 1 if unknown else FIRST_PROBE_TRIES
        self._first_probe_at = now + MAX_PROBE_INTERVAL_S
        self._observations.probe(m for m in round.members if m.identity in unknown)

    def _probe_members(self, round: Round, stepped: bool, now: float) -> None:
        answers = self._observations.probe(m for m in round.members if m.identity != self._me)
        silent = sorted(node for node, answer in answers.items() if isinstance(answer, ProbeNoAnswer))
        self._silent_since = {node: self._silent_since.get(node, now) for node in silent}
        any_silence_counts = not stepped and len(silent) < len(answers)
        silence_s = self._policy.lease_s if self._is_member else 0.0
        identities = {m.node: m.identity for m in round.members}
        self.unreachable = tuple(
            node
            for node, since in self._silent_since.items()
            if now >= since + silence_s and (any_silence_counts or self._silence_counts(identities[node]))
        )
        self._missed |= {identities[node] for node in self.unreachable}
        if not self._is_member:
            self._interval_s = NON_MEMBER_PROBE_INTERVAL_S
        elif self._silent_since:
            self._interval_s = MIN_PROBE_INTERVAL_S
        self._next_at = now + self._interval_s
        self._interval_s = min(2 * self._interval_s, MAX_PROBE_INTERVAL_S)

    def _silence_counts(self, identity: Identity) -> bool:
        return identity in self._observations.answered | self._missed


# ---- standing connections


class PeerLinks:
    """Standing connections to other agents: the connection of a killed process is reset at once.

    The kernel closes a dead process's connections within a millisecond; its workers' peers may need a second to fail,
    and its lease expires after three. A broken connection proves nothing (the network may have broken it), so it leads
    to a probe; a standing one proves nothing either. No data is sent. Each is a file descriptor: above an eighth of the
    limit the other nodes have none, and their death is noticed later. One thread keeps them all.
    """

    def __init__(self) -> None:
        soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        self._most = sys.maxsize if soft == resource.RLIM_INFINITY else soft // 8  # the rest is for other uses
        self._nodes: dict[str, Address] = {}
        self._broken: Callable[[str], None] = lambda node: None
        self._lock = threading.Lock()
        self._waker = Waker()
        self._closing = False
        self._thread: threading.Thread | None = None

    def keep(self, nodes: Mapping[str, Address], broken: Callable[[str], None]) -> None:
        """Keep a connection to each of these nodes (literal address, port) and to no other. Safe from any thread.

        `broken(node)` is called from the links' thread, must return at once and must not call back.
        """
        with self._lock:
            self._broken = broken
            if self._closing or nodes == self._nodes:
                return
            self._nodes = dict(nodes)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="elasticd-links", daemon=False)
                self._thread.start()
        self._waker.wake()

    def close(self) -> None:
        """Close all connections. May be called again."""
        with self._lock:
            self._closing = True
        self._waker.wake()
        if self._thread is not None:
            self._thread.join()
        self._waker.close()

    def _run(self) -> None:
        links: dict[str, tuple[Address, socket.socket]] = {}
        tried: dict[str, float] = {}
        with selectors.DefaultSelector() as selector:
            selector.register(self._waker, selectors.EVENT_READ, None)
            while not self._closing and threading.main_thread().is_alive():
                with self._lock:
                    nodes = dict(self._nodes)
                for node in [node for node, (address, _) in links.items() if nodes.get(node) != address]:
                    _disconnect(selector, links.pop(node)[1])
                now = time.monotonic()
                for node, address in nodes.items():
                    if (
                        node not in links
                        and now >= tried.get(node, 0.0) + RECONNECT_AFTER_S
                        and len(links) < self._most
                    ):
                        tried[node] = now
                        sock = _connect(address)
                        if sock is not None:
                            links[node] = address, sock
                            selector.register(sock, selectors.EVENT_READ, node)
                for key, _ in selector.select(MAIN_THREAD_CHECK_S):
                    if key.data is None:
                        self._waker.drain()
                    elif _has_ended(links[key.data][1]):
                        _disconnect(selector, links.pop(key.data)[1])
                        if key.data in nodes:
                            self._broken(key.data)
            for _, sock in links.values():
                _disconnect(selector, sock)


def _connect(address: Address) -> socket.socket | None:
    """A connection being made; a failure shows as its end."""
    family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
    try:
        sock = socket.socket(family, socket.SOCK_STREAM)
    except OSError:
        return None
    sock.setblocking(False)
    try:
        sock.connect_ex(address)
    except OSError:
        sock.close()
        return None
    return sock


def _has_ended(sock: socket.socket) -> bool:
    try:
        return not sock.recv(4096)
    except BlockingIOError:
        return False
    except OSError:
        return True


def _disconnect(selector: selectors.BaseSelector, sock: socket.socket) -> None:
    selector.unregister(sock)
    sock.close()
