"""Thousands of agents in one process: the real member, planner and election over a simulated etcd and clock.

Simulated are etcd (simulated_etcd.py), probes, standing connections, and the processor time of what grows with the
number of nodes: decoding a Round, reading and planning for all nodes. Agents have no workers: a member reports that its
group trains as soon as it has read the Round, and that it has failed as soon as a member is dead, as gloo does. Members
that train probe each other once, which costs the store nothing and is left out.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from unittest import mock

from benchmarks.simulated_etcd import Clock, EtcdTimes, SimulatedEtcd, SimulatedStore
from elasticd_agent.model.job import Policy
from elasticd_agent.model.keys import Keys, decode_record
from elasticd_agent.model.messages import Notice, RoundPublished, StoreAvailability
from elasticd_agent.model.records import Failure, NodeRecord, Round
from elasticd_agent.rendezvous import membership_client
from elasticd_agent.rendezvous.member import MAX_LEADER_REST_S, RendezvousMember
from elasticd_agent.rendezvous.membership_client import JobTerms
from elasticd_agent.rendezvous.peers import PeerNetwork
from elasticd_agent.rendezvous.probe import Address, ProbeAlive, ProbeAnswer, ProbeRefused
from elasticd_agent.rendezvous.view import LocalFacts, Requirements
from elasticd_agent.system.network.addresses import format_endpoint

STEPS = "join", "lose one", "lose a tenth", "lose the leader", "store away 30 s"
AWAY_S = 30.0
SETTLED_S = 15.0
"""Between two steps: the records of the last round are deleted, and every node has read its keys again."""
LIMIT_S = 120.0
TURN_S = 0.0003
"""Processor time of any turn."""
DECODE_S = 8.5e-6
"""For each member of a Round that is read; decoding 4,096 took 35 ms."""
PLAN_S = 20e-6
"""For each node in a turn of the planner; a turn for 4,096 took 60 to 90 ms."""
RESET_S = 0.0003
"""A killed process's connections are reset."""
GLOO_S = 0.03
"""Workers that lose a peer fail, and their agent knows."""
PROBE_S, REFUSED_S = 0.0005, 0.05
RECONNECT_S = 0.8
"""Each client of a store that was away finds it again within this."""
IDLE_S = 10.0
LOOK_S = 0.02


@dataclass(slots=True)
class StepFigures:
    """Of all living nodes. Requests and bytes are of one node: the mean, and the leader's."""

    seconds: float  #: until each had read the last Round, or, after the outage, had renewed its lease
    rounds: int  #: published meanwhile
    requests: float
    sent: float
    received: float
    leader_requests: int
    leader_received: int


@dataclass(slots=True)
class SimulationResult:
    """One job of `nodes` agents."""

    nodes: int
    store: str = "simulated etcd"
    steps: dict[str, StepFigures] = field(default_factory=dict)
    idle_requests_a_second: float = 0.0
    trouble: str = ""


def incarnation(index: int) -> str:
    """As random as a real one: a Round's size depends on it."""
    return f"{random.Random(index).getrandbits(64):016x}"


class Agent(PeerNetwork):
    """One node: turns as MemberThread takes them."""

    def __init__(self, simulation: Simulation, index: int, requirements: Requirements, policy: Policy) -> None:
        self._simulation = simulation
        self._clock = simulation.clock
        self.name = f"n{index}"
        self.incarnation = incarnation(index)
        self.store = SimulatedStore(simulation.etcd)
        self.links: Mapping[str, Address] = {}
        self.round: Round | None = None
        self.read_at = 0.0
        self.away = False
        self.back_at = 0.0
        self._hinted = False
        self._waiting = 0
        record = NodeRecord(self.name, self.incarnation, format_endpoint("10.0.0.1", 1 + index), tuple(range(8)))
        self.member = RendezvousMember(
            self.store,
            JobTerms(simulation.keys, policy, requirements, b"{}"),
            record,
            LocalFacts(),
            self,
            lambda sentence: None,
        )
        self.member.set_wake(self._hint)
        self.task = self._clock.start(self._run)
        self.store.task = self.task

    def keep_links(self, nodes: Mapping[str, Address], broken: Callable[[str], None]) -> None:
        self.links = nodes

    def _hint(self) -> None:
        self._hinted = True
        if self._waiting:
            token = self._waiting
            self._clock.at(self._clock.now, lambda: self._wake(token))

    def _wake(self, token: int) -> None:
        if self._waiting == token:
            self._waiting = 0
            self.task.resume()

    def _run(self) -> None:
        turns = 0
        while True:
            turns += 1
            self._hinted = False
            began = self._clock.now
            notices, until = self.member.turn(began)
            self.task.sleep(TURN_S + (PLAN_S * len(self._simulation.agents) if self.member.leads else 0.0))
            took_s = self._clock.now - began
            for notice in notices:
                self._on_notice(notice)
            if not self._hinted:
                self._waiting = turns
                if until is not None:
                    self._clock.at(until, lambda token=turns: self._wake(token))  # type: ignore[misc]
                self.task.suspend()
            if self.member.leads:
                self.task.sleep(min(took_s, MAX_LEADER_REST_S))

    def _on_notice(self, notice: Notice) -> None:
        if isinstance(notice, StoreAvailability):
            self.away = notice.unavailable
            self.back_at = self._clock.now
        if not isinstance(notice, RoundPublished):
            return
        round = notice.round
        self.task.sleep(DECODE_S * len(round.members))
        self.round, self.read_at = round, self._clock.now
        self.member.update_node_record(ready_round=round.number, stepped_round=round.number)
        if self._simulation.dead & {m.node for m in round.members}:
            self._clock.at(self._clock.now + GLOO_S, self.lose_peers)

    def lose_peers(self) -> None:
        round = self.round
        if round is not None and self.name not in self._simulation.dead:
            self.member.report_failure(Failure(round.number, self.name, "crash", (), "lost its peers"), self._clock.now)

    def probe(self, nodes: Mapping[str, Address]) -> Mapping[str, ProbeAnswer]:
        dead = self._simulation.dead & nodes.keys()
        self.task.sleep(PROBE_S + (REFUSED_S if dead else 0.0))
        answers = self._simulation.answers
        return {node: ProbeRefused() if node in dead else answers[node] for node in nodes}


class Simulation:
    """One job of `nodes` agents."""

    def __init__(self, nodes: int, times: EtcdTimes) -> None:
        self.clock = Clock()
        self.etcd = SimulatedEtcd(self.clock, times)
        self.keys = Keys("job")
        self.dead: set[str] = set()
        self.answers = {f"n{i}": ProbeAlive(f"n{i}", incarnation(i)) for i in range(nodes)}
        requirements = Requirements(8, 8, 1, nodes, last_call_timeout_s=60.0)
        self.agents = {f"n{i}": Agent(self, i, requirements, Policy()) for i in range(nodes)}

    @property
    def living(self) -> list[Agent]:
        return [agent for agent in self.agents.values() if agent.name not in self.dead]

    def leader(self) -> Agent:
        return next(agent for agent in self.living if agent.member.leads)

    def kill(self, agents: Sequence[Agent]) -> None:
        """Processes end, their machines reset the connections, and the workers of the others fail."""
        self.dead |= {agent.name for agent in agents}
        for agent in agents:
            agent.task.kill()
            agent.store.close()
        for agent in self.living:
            for node in sorted(self.dead & agent.links.keys()):
                self.clock.at(self.clock.now + RESET_S, functools.partial(agent.member.peer_disconnected, node))
            self.clock.at(self.clock.now + GLOO_S, agent.lose_peers)

    def followers(self) -> list[Agent]:
        return [agent for agent in self.living if not agent.member.leads]

    def number(self) -> int:
        """Of the newest Round that a living node has read."""
        return max((agent.round.number for agent in self.living if agent.round is not None), default=0)

    def is_settled(self) -> bool:
        """Every living node reaches the store and has read one Round, whose members are all of them."""
        living = self.living
        first = living[0].round
        if first is None or len(first.members) != len(living):
            return False
        return all(not a.away and a.round is not None and a.round.number == first.number for a in living)

    def traffic(self) -> dict[str, tuple[int, int, int]]:
        """Requests, bytes sent and received so far, by node."""
        traffic = ((agent, agent.store.traffic) for agent in self.living)
        return {agent.name: (t.requests, t.sent_bytes, t.received_bytes) for agent, t in traffic}


def simulate(nodes: int, times: EtcdTimes | None = None, seed: int = 1) -> SimulationResult:
    """Join, idle, lose one, a tenth, the leader, and the store for 30 s. The same figures for the same arguments."""

    @functools.lru_cache(maxsize=4)
    def decode_once(kind: type[Round], key: str, value: bytes) -> Round:
        return decode_record(kind, key, value)

    # In one process, thousands of agents would decode the same bytes: DECODE_S stands for the time that each takes.
    with mock.patch.object(
        membership_client, "decode_record", lambda kind, key, value, *_: decode_once(kind, key, value)
    ):
        simulation = Simulation(nodes, times or EtcdTimes())
        try:
            return _measure(simulation, SimulationResult(nodes), random.Random(seed))
        finally:
            simulation.clock.end()


def _measure(simulation: Simulation, result: SimulationResult, chance: random.Random) -> SimulationResult:
    clock = simulation.clock
    for name in STEPS:
        before, number, began = simulation.traffic(), simulation.number(), clock.now
        match name:
            case "join":
                before.clear()
            case "lose one":
                simulation.kill(simulation.followers()[-1:])
            case "lose a tenth":
                simulation.kill(simulation.followers()[-max(1, result.nodes // 10) :])
            case "lose the leader":
                simulation.kill([simulation.leader()])
            case _:
                simulation.etcd.stop()
                clock.run(lambda: False, AWAY_S)
                simulation.etcd.restart(lambda: chance.uniform(0.0, RECONNECT_S))
                began = clock.now
        if not clock.run(_now_and_then(clock, simulation.is_settled), LIMIT_S):
            result.trouble = f"{name}: the nodes are not in one Round {LIMIT_S:g} s later"
            return result
        living = simulation.living
        seconds = max(agent.back_at if name == STEPS[-1] else agent.read_at for agent in living) - began
        used = simulation.traffic()
        if name == "lose the leader" or name == STEPS[-1]:
            clock.run(lambda: False, 1.0)
        result.steps[name] = _figures(simulation, before, used, simulation.number() - number, seconds)
        clock.run(lambda: False, SETTLED_S)
        if name == "join":
            idle = simulation.traffic()
            clock.run(lambda: False, IDLE_S)
            after = simulation.traffic()
            result.idle_requests_a_second = sum(after[n][0] - idle[n][0] for n in after) / len(after) / IDLE_S
    return result


def _now_and_then(clock: Clock, is_true: Callable[[], bool]) -> Callable[[], bool]:
    """`is_true`, asked every LOOK_S: it looks at all nodes."""
    next_at = clock.now + LOOK_S

    def ask() -> bool:
        nonlocal next_at
        if clock.now < next_at:
            return False
        next_at = clock.now + LOOK_S
        return is_true()

    return ask


def _figures(
    simulation: Simulation,
    before: Mapping[str, tuple[int, int, int]],
    after: Mapping[str, tuple[int, int, int]],
    rounds: int,
    seconds: float,
) -> StepFigures:
    used = {
        name: tuple(b - a for a, b in zip(before.get(name, (0, 0, 0)), now, strict=True)) for name, now in after.items()
    }
    requests, sent, received = (sum(column) / len(used) for column in zip(*used.values(), strict=True))
    leader = used[simulation.leader().name]
    return StepFigures(seconds, rounds, requests, sent, received, leader[0], leader[2])


def table(results: Sequence[SimulationResult]) -> str:
    lines = [
        "| nodes | step | s | rounds | requests a node | kB a node | the leader's requests, kB |",
        "|" + "---|" * 7,
    ]
    for result in results:
        for name, f in result.steps.items():
            size = (f.sent + f.received) / 1000
            leader = f"{f.leader_requests}, {f.leader_received / 1000:.0f}"
            lines.append(
                f"| {result.nodes} | {name} | {f.seconds:.2f} | {f.rounds} | {f.requests:.1f} | {size:.1f} | {leader} |"
            )
        lines.append(f"| {result.nodes} | idle, a second | | | {result.idle_requests_a_second:.2f} | | |")
    return "\n".join(lines)
