"""The planner's knowledge of a job (View), and its answers beside a Round (Wait, Pause).

`plan` and `membership` are functions of one frozen value that can be written down.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Literal

from elasticd_agent.model.messages import StopForced, StopRequested
from elasticd_agent.model.records import Failure, Member, NodeRecord, Round

ProbeResult = Literal["answered", "refused", "closed", "silent"]
"""`refused`: the process that had answered is gone. `closed`: the port refuses and had never answered this agent, which
could be a firewall's doing."""


@dataclass(frozen=True, slots=True)
class Requirements:
    """The workers and nodes that the job asks for."""

    min_workers: int  #: on each node
    max_workers: int
    min_nodes: int = 1
    max_nodes: int = 1
    last_call_timeout_s: float = 5.0  #: how long to wait for more than `min_nodes` nodes after the newest one
    run: str = ""  #: tells two runs of one job id apart
    spares: int = 0  #: nodes beyond `max_nodes` that start their workers ahead


@dataclass(frozen=True, slots=True)
class PresentNode:
    """A node whose record is in the store."""

    record: NodeRecord
    joined_at: float  #: when the planner first saw this incarnation
    slots_seen_at: float = 0.0  #: when the planner first saw it with these slots, ready


@dataclass(frozen=True, slots=True)
class LocalFacts:
    """Facts of this node's deciding loop, for a planner here. Replaced whole, so that any thread may read them."""

    first_round_number: int = 1
    checkpoint: tuple[int, int] | None = None
    high_water: int = 0
    stop: StopRequested | StopForced | None = None
    next_step_due: float | None = None


@dataclass(frozen=True, slots=True)
class View:
    """All the planner knows. Times are the planner's own monotonic seconds."""

    current: Round | None
    nodes: tuple[PresentNode, ...]
    requirements: Requirements
    failures: tuple[Failure, ...] = ()
    done: frozenset[str] = frozenset()  #: members whose workers of `current` have all ended with code 0
    stop: StopRequested | StopForced | None = None
    first_round_number: int = 1  #: of the first Round: above all that the checkpoint and log directories hold
    checkpoint: tuple[int, int] | None = None  #: newest usable (round, step)
    high_water: int = 0  #: the highest step seen in any round
    round_seen_at: float = 0.0  #: when the planner first saw `current`
    failure_seen_at: float = 0.0  #: when the planner first saw a failure of `current`; meaningless without one
    probe_results: tuple[tuple[str, ProbeResult], ...] = ()  #: members' answers since the last sign of trouble
    absent_since: tuple[tuple[str, float], ...] = ()  #: members without a record
    leave_reasons: tuple[tuple[str, str], ...] = ()  #: of those of them that had announced that they leave
    store_up_since: float = 0.0  #: since when the store has answered without a break
    next_step_due: float | None = None  #: of the workers beside the planner; None: it has none
    too_few_nodes_since: float | None = None  #: since when there have been fewer nodes than the job needs
    silent_since: tuple[tuple[str, float], ...] = ()  #: members that had answered before and answer no probe now
    unreachable_joiners: frozenset[str] = frozenset()  #: nodes that want to join, had answered before and do not now
    counts_starting_as_ready: bool = False  #: `starting_slots` is empty then
    _records: dict[str, NodeRecord] = field(init=False, repr=False, compare=False)
    _members: dict[str, Member] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        # A turn asks for each of a thousand nodes.
        object.__setattr__(self, "_records", {p.record.id: p.record for p in reversed(self.nodes)})
        members = self.current.members if self.current is not None else ()
        object.__setattr__(self, "_members", {m.node: m for m in members})

    @property
    def with_starting_as_ready(self) -> View:
        """The same, as if no process were starting."""
        return replace(self, counts_starting_as_ready=True)

    @property
    def starting_slots(self) -> set[tuple[str, int]]:
        """(node, slot) of new processes that are not ready while others stay, and of ranks to be killed for a hang."""
        if self.counts_starting_as_ready:
            return set()
        starting = {(p.record.id, slot) for p in self.nodes for slot in p.record.starting}
        hung = (f for f in self.failures if f.kind == "hung" and self._keep_processes(f.node, f.round))
        return starting | {(f.node, slot) for f in hung for _, slot in f.culprits}

    def _keep_processes(self, node: str, round: int) -> bool:
        """The workers of `round` there stay in their processes."""
        record = self.record(node)
        return record is not None and record.entered == record.stepped_round == round

    def record(self, node: str) -> NodeRecord | None:
        return self._records.get(node)

    def member(self, node: str) -> Member | None:
        """The node's part in `current`."""
        return self._members.get(node)


@dataclass(frozen=True, slots=True)
class Wait:
    """Nothing to publish now. Ask again when the view changes, and at `until` unless it is None."""

    why: str
    until: float | None
    too_few_nodes: bool = False
    notable: bool = False  #: a person may wonder why, so `why` is reported once


@dataclass(frozen=True, slots=True)
class Pause:
    """All ranks of round `number` are to save and wait for a Round with other nodes."""

    number: int
    why: str
    until: float | None = None
