"""Did the agents agree? Every agent's view of the rounds of one job, checked against what the protocol promises.

As Jepsen does it: a history of what each agent read, trained and left with is recorded while faults happen, and checked
afterwards by rules that know nothing of how agreement is reached. The simulated cluster (tests/scenarios) records
histories of its own; `from_logs` makes one of the event logs of real agents. All times are of one clock.
"""

from __future__ import annotations

import bisect
import itertools
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from elasticd_agent.model.records import Identity, is_later_run

WINDOW_S = 3.0
"""Within this a node that reaches the store has read a Round and killed its old group: retries, a lost lease."""
REREAD_S = 15.0
"""Once an agent has read all its keys again: every 10 s."""
ENDED_JOB_TTL_S = 600.0
"""An ended job's Round stays so long for agents that come late."""
Interval = tuple[float, float]


@dataclass(frozen=True, slots=True)
class View:
    """One agent has read one Round."""

    at: float
    agent: Identity
    run: str  #: of the Round
    number: int
    members: tuple[Identity, ...]
    leader: str
    reason: str
    outcome: str = ""  #: of a terminal Round

    @property
    def round(self) -> tuple[str, int]:
        return self.run, self.number


@dataclass(slots=True)
class AgentHistory:
    """What one start of an agent went through."""

    identity: Identity
    run: str
    started_at: float
    spec: bytes = b""
    views: list[View] = field(default_factory=list)
    hears: list[Interval] = field(default_factory=list)  #: while it lived and reached the store
    spoke_at: list[float] = field(default_factory=list)  #: it said what it waits for, or was refused
    left_at: float | None = None

    def longest_hearing_s(self, begin: float, end: float) -> float:
        """The longest time without a break in which it reached the store."""
        return max((min(end, upto) - max(begin, since) for since, upto in self.hears), default=0.0)


@dataclass(slots=True)
class Training:
    """A Round made steps from `begin` to `end`; a pause in between counts."""

    run: str
    number: int
    members: tuple[Identity, ...]
    begin: float
    end: float


@dataclass(slots=True)
class History:
    """All that happened to one job. `specs`: when the spec in the store became which; None: it has none. `forgotten`:
    when the store lost the Round, by a fault or because an ended job's records expire."""

    agents: dict[Identity, AgentHistory] = field(default_factory=dict)
    trainings: list[Training] = field(default_factory=list)
    specs: list[tuple[float, bytes | None]] = field(default_factory=list)
    forgotten: list[float] = field(default_factory=list)
    ended_at: float = 0.0
    window_s: float = WINDOW_S  #: longer where watches are silent
    join_timeout_s: float = 600.0

    def views(self) -> list[View]:
        return sorted((view for agent in self.agents.values() for view in agent.views), key=lambda view: view.at)

    def trained(self, run: str, number: int, members: tuple[Identity, ...], at: float) -> None:
        """This Round made a step."""
        for training in reversed(self.trainings):
            if (training.run, training.number, training.members) == (run, number, members):
                training.end = at
                return
        self.trainings.append(Training(run, number, members, at, at))


def breaches(history: History) -> list[str]:
    """Every promise that was not kept; empty when all is well."""
    checks = (
        one_writer_per_round,
        views_only_grow,
        earlier_runs_are_over,
        ends_are_final,
        one_round_trains,
        spec_is_the_jobs,
        nobody_waits_in_silence,
    )
    return [f"{check.__name__.replace('_', ' ')}: {breach}" for check in checks for breach in check(history)]


def one_writer_per_round(history: History) -> Iterator[str]:
    """As long as the store keeps its data, a number is of one Round: the same members, leader and reason to all."""
    versions: dict[tuple[str, int, int], dict[tuple[Any, ...], View]] = defaultdict(dict)
    for view in history.views():
        life = bisect.bisect(history.forgotten, view.at)
        versions[view.run, view.number, life].setdefault((view.members, view.leader, view.reason), view)
    for (run, number, _), found in sorted(versions.items()):
        if len(found) > 1:
            told = "; ".join(f"to {view.agent[0]}, by {view.leader}: {view.reason!r}" for view in found.values())
            yield f"round {number} of run {run!r} is not the same to all: {told}"


def views_only_grow(history: History) -> Iterator[str]:
    """No agent reads an older Round of its run after a newer one."""
    for agent in history.agents.values():
        for before, after in itertools.pairwise(agent.views):
            if after.run == before.run and after.number <= before.number:
                yield f"{agent.identity[0]} read round {after.number} after round {before.number}"


def earlier_runs_are_over(history: History) -> Iterator[str]:
    """No agent takes a Round of an earlier run than its own for the job's, nor is ended by one."""
    for agent in history.agents.values():
        for view in agent.views:
            if is_later_run(agent.run, than=view.run):
                what = "ended by" if view.outcome else "follows"
                yield f"{agent.identity[0]} of run {agent.run} {what} a round of run {view.run}: {view.reason}"


def ends_are_final(history: History) -> Iterator[str]:
    """Nobody who could know of a run's end is in a later Round of it, and every agent that hears of the end leaves.

    A run that was stopped may be started again, by new agents.
    """
    ends: dict[str, View] = {}
    for view in history.views():
        end = ends.get(view.run)
        if end is not None and not view.outcome and view.number > end.number:
            knows = [m for m in view.members if m in history.agents and history.agents[m].started_at < end.at]
            again = end.outcome == "stopped" or view.at > end.at + ENDED_JOB_TTL_S
            if knows or not again:
                why = f"{knows[0][0]} took part in both" if knows else f"it had {end.outcome}"
                yield f"round {view.number} of run {view.run!r} came after its end, round {end.number}: {why}"
        if view.outcome and "a later run" not in view.reason:
            ends[view.run] = view
    for run, end in ends.items():
        for agent in history.agents.values():
            if agent.run != run or agent.left_at is not None or agent.started_at > end.at:
                continue
            if agent.longest_hearing_s(end.at, history.ended_at) > REREAD_S:
                yield f"{agent.identity[0]} has not left, although the job ended with round {end.number}"


def one_round_trains(history: History) -> Iterator[str]:
    """Two Rounds train at once only while a member of the one cannot hear of the other, and for a moment more. A Round
    trains with all of its members: one that has read a newer Round ends its group, even if another one is cut off.
    """
    for training in history.trainings:
        for agent in _agents(history, training):
            newer = [view for view in agent.views if view.run == training.run and view.number > training.number]
            for view in newer[:1]:
                if (still_s := agent.longest_hearing_s(view.at, training.end)) > history.window_s:
                    yield (
                        f"round {training.number} of run {training.run!r} trained for {still_s:.1f} s after its member "
                        f"{agent.identity[0]} had read round {view.number}"
                    )
    for one, other in itertools.combinations(history.trainings, 2):
        begin, end = max(one.begin, other.begin), min(one.end, other.end)
        if end - begin <= history.window_s:
            continue
        agents = {agent.identity: agent for agent in (*_agents(history, one), *_agents(history, other))}.values()
        together = min((agent.longest_hearing_s(begin, end) for agent in agents), default=0.0)
        if together > history.window_s:
            yield (
                f"round {one.number} of run {one.run!r} and round {other.number} of run {other.run!r} trained together "
                f"for {end - begin:.1f} s, and all of their nodes reached the store for {together:.1f} s of it"
            )


def _agents(history: History, training: Training) -> list[AgentHistory]:
    return [history.agents[identity] for identity in training.members if identity in history.agents]


def spec_is_the_jobs(history: History) -> Iterator[str]:
    """While a Round trains and its members reach the store, the spec there is one with which they joined."""
    for (at, spec), (until, _) in itertools.pairwise([*history.specs, (history.ended_at, None)]):
        for training in history.trainings:
            begin, end = max(at, training.begin), min(until, training.end)
            members = _agents(history, training)
            if not members or spec in {agent.spec for agent in history.agents.values() if agent.run == training.run}:
                continue
            if min(agent.longest_hearing_s(begin, end) for agent in members) > history.window_s:
                what = "no spec" if spec is None else "another job's spec"
                yield f"round {training.number} trained for {end - begin:.1f} s while the store had {what}"


def nobody_waits_in_silence(history: History) -> Iterator[str]:
    """An agent that reaches the store follows a Round, says what it waits for and then gives up, or leaves."""
    for agent in history.agents.values():
        end = min(filter(None, (agent.left_at, *(v.at for v in agent.views[:1]))), default=history.ended_at)
        silent_from = max((at for at in agent.spoke_at if at < end), default=agent.started_at)
        if (heard_s := agent.longest_hearing_s(silent_from, end)) > history.join_timeout_s + REREAD_S:
            yield f"{agent.identity[0]} reached the store for {heard_s:.0f} s without a round and without a word"


# ---- from the event logs of real agents


def from_logs(
    logs: Iterable[tuple[str, str, Sequence[Mapping[str, Any]]]], record: Iterable[Mapping[str, Any]]
) -> History:
    """`logs`: (name, node, events) of each start of an agent. `record`: a line for each step of each rank.

    A log names nodes, not incarnations: a member is the agent of that node whose log holds the Round.
    """
    history = History()
    for name, node, events in logs:
        if not events:
            continue
        identity = node, name
        agent = AgentHistory(identity, "", float(events[0]["mono"]))
        history.agents[identity] = agent
        away_since: float | None = None
        heard_from = agent.started_at
        for event in events:
            at = float(event["mono"])
            match event["kind"]:
                case "round_published":
                    members = tuple((node, "") for node in event["nodes"])
                    view = View(at, identity, "", event["round"], members, event.get("leader", ""), event["reason"])
                    agent.views.append(view)
                case "store_unavailable" if away_since is None:
                    away_since = at
                    agent.hears.append((heard_from, at))
                case "store_available":
                    away_since, heard_from = None, at
                case "job_ended":
                    agent.left_at = at
        last = float(events[-1]["mono"])
        if away_since is None:
            agent.hears.append((heard_from, last))
        history.ended_at = max(history.ended_at, last)
    _trainings_of(history, record)
    return history


def _trainings_of(history: History, record: Iterable[Mapping[str, Any]]) -> None:
    followers: dict[tuple[int, str], Identity] = {}
    for agent in history.agents.values():
        for view in agent.views:
            followers[view.number, agent.identity[0]] = agent.identity
    nodes: dict[int, set[str]] = defaultdict(set)
    steps = sorted((line for line in record if "step" in line), key=lambda line: float(line["mono"]))
    for line in steps:
        nodes[line["round"]].add(line["node"])
    for line in steps:
        number = line["round"]
        members = tuple(sorted(followers.get((number, node), (node, "")) for node in nodes[number]))
        history.trained("", number, members, float(line["mono"]))
