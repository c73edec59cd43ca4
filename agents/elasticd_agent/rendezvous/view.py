"""The planner's knowledge of a job (View), and its answers beside a Round (Wait, Pause).

`plan` and `membership` are functions of one frozen value that can be written down.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Literal

from elasticd_agent.model.messages import StopForced, StopRequested
from elasticd_agent.model.records import Failure, NodeRecord, Round

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


@dataclass(frozen=True, slots=True)
class PresentNode:
    """A node whose record is in the store."""

    record: NodeRecord
    joined_at: float  #: when the planner first saw this incarnation
    slots_at: float = 0.0  #: when the planner first saw it with these slots, ready


@dataclass(frozen=True, slots=True)
class LocalFacts:
    """Facts of this node's deciding loop, for a planner here. Replaced whole, so that any thread may read them."""

    first_number: int = 1
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
    first_number: int = 1  #: of the first Round: above all that the checkpoint and log directories hold
    checkpoint: tuple[int, int] | None = None  #: newest usable (round, step)
    high_water: int = 0  #: the highest step seen in any round
    round_at: float = 0.0  #: when the planner first saw `current`
    failed_at: float = 0.0  #: when the planner first saw a failure of `current`; meaningless without one
    probe_results: tuple[tuple[str, ProbeResult], ...] = ()  #: members' answers since the last sign of trouble
    absent_since: tuple[tuple[str, float], ...] = ()  #: members without a record
    left: tuple[tuple[str, str], ...] = ()  #: those of them that had announced it, with reasons
    store_up_since: float = 0.0  #: since when the store has answered without a break
    next_step_due: float | None = None  #: of the workers beside the planner; None: it has none
    short_since: float | None = None  #: since when there have been fewer nodes than the job needs
    silent_since: tuple[tuple[str, float], ...] = ()  #: members that had answered before and answer no probe now
    unreachable: frozenset[str] = frozenset()  #: nodes that want to join, had answered before and do not now
    _records: dict[str, NodeRecord] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_records", {p.record.id: p.record for p in reversed(self.nodes)})

    @property
    def with_all_ready(self) -> View:
        """The same, without a process that starts."""
        if not any(p.record.starting for p in self.nodes):
            return self
        return replace(self, nodes=tuple(replace(p, record=replace(p.record, starting=())) for p in self.nodes))

    def record(self, node: str) -> NodeRecord | None:
        return self._records.get(node)


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
