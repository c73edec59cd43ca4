"""What the planner knows of a job (View), and its answers beside a Round (Wait, Pause).

`plan` and `membership` are functions of one frozen value that can be written down.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from elasticd_agent.model.messages import StopForced, StopRequested
from elasticd_agent.model.records import Failure, NodeRecord, Round

ProbeResult = Literal["answered", "refused", "silent"]


@dataclass(frozen=True, slots=True)
class Requirements:
    """What the job asks for."""

    min_workers: int
    """Workers on each node, at least."""
    max_workers: int
    min_nodes: int = 1
    max_nodes: int = 1
    last_call_s: float = 5.0
    """How long to wait for more than `min_nodes` nodes after the newest one."""
    run: str = ""
    """Tells two runs of one job id apart."""


@dataclass(frozen=True, slots=True)
class PresentNode:
    """A node whose record is in the store."""

    record: NodeRecord
    joined_at: float
    """When the planner first saw this incarnation."""


@dataclass(frozen=True, slots=True)
class LocalFacts:
    """What this node's deciding loop knows and a planner here uses. Replaced whole, so that any thread may read it."""

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
    done: frozenset[str] = frozenset()
    """Members whose workers of `current` have all ended with code 0."""
    stop: StopRequested | StopForced | None = None
    first_number: int = 1
    """The first Round's number: above all that the checkpoint and log directories hold."""
    checkpoint: tuple[int, int] | None = None
    """Newest usable (round, step)."""
    high_water: int = 0
    """The highest step seen in any round."""
    round_at: float = 0.0
    """When the planner first saw `current`."""
    failed_at: float = 0.0
    """When the planner first saw a failure of `current`; meaningless without one."""
    probe_results: tuple[tuple[str, ProbeResult], ...] = ()
    """The answers of members' agents since the last sign of trouble.

    "refused" only for an incarnation that had answered before: a firewall may refuse, too.
    """
    absent_since: tuple[tuple[str, float], ...] = ()
    """Since when a member has had no record."""
    store_up_since: float = 0.0
    """Since when the store has answered without a break."""
    next_step_due: float | None = None
    """When the workers beside the planner should have made their next step; None: it has none."""
    short_since: float | None = None
    """Since when there have been fewer nodes than the job needs."""
    silent_since: tuple[tuple[str, float], ...] = ()
    """Since when a member that had answered before has answered no probe."""
    unreachable: frozenset[str] = frozenset()
    """Nodes that want to join, had answered before and do not now."""
    _records: dict[str, NodeRecord] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_records", {p.record.id: p.record for p in reversed(self.nodes)})

    def record(self, node: str) -> NodeRecord | None:
        return self._records.get(node)


@dataclass(frozen=True, slots=True)
class Wait:
    """Nothing to publish now. Ask again when the view changes, and at `until` unless it is None."""

    why: str
    until: float | None
    too_few_nodes: bool = False
    notable: bool = False
    """A person may wonder why, so `why` is reported once."""


@dataclass(frozen=True, slots=True)
class Pause:
    """All ranks of round `number` shall save and wait, because a Round with other nodes is about to come."""

    number: int
    why: str
    until: float | None = None
