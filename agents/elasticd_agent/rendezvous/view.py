"""What the planner knows of a job (View), and what it may answer besides a Round (Wait, Hold).

They exist so that `plan` and `membership` are functions of one frozen value that can be written down. Nothing here
decides.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from elasticd_agent.model.messages import StopForced, StopRequested
from elasticd_agent.model.records import Failure, NodeRecord, Round

ProbeResult = Literal["answered", "refused", "silent"]


@dataclass(frozen=True, slots=True)
class Requirements:
    """How much the job asked for: workers on each node, nodes, and how long to wait for more nodes than the fewest.

    `run` tells two runs of one job id apart.
    """

    min_workers: int
    max_workers: int
    min_nodes: int = 1
    max_nodes: int = 1
    last_call_s: float = 5.0
    run: str = ""


@dataclass(frozen=True, slots=True)
class PresentNode:
    """A node whose record is in the store, and when the planner first saw this incarnation of it."""

    record: NodeRecord
    joined_at: float


@dataclass(frozen=True, slots=True)
class View:
    """All the planner knows. Times are the planner's own monotonic seconds.

    `round_at`: when it first saw `current`; `failed_at`: when it first saw a failure of it, meaningless without one.
    `done`: members whose workers of `current` have all ended with code 0. `first_number`: what the first Round must be
    numbered, above all that the checkpoint and log directories hold. `checkpoint`: newest usable (round, step).
    `high_water`: the highest step seen in any round.

    `knocked`: what members' agents answered since the last sign of trouble; "refused" counts for an incarnation that
    had answered before. `silent`: since when one that had answered before has not answered any knock; `unreachable`:
    who wants to join, had answered before and does not now. `absent`: since when a member has had no record;
    `store_up_since`: since when the store has answered without a break. `advances_by`: when the workers beside the
    planner should have made their next step, None if it has none. `short_since`: since when there have been fewer
    nodes than the job needs.
    """

    current: Round | None
    nodes: tuple[PresentNode, ...]
    requirements: Requirements
    failures: tuple[Failure, ...] = ()
    done: frozenset[str] = frozenset()
    stop: StopRequested | StopForced | None = None
    first_number: int = 1
    checkpoint: tuple[int, int] | None = None
    high_water: int = 0
    round_at: float = 0.0
    failed_at: float = 0.0
    probe_results: tuple[tuple[str, ProbeResult], ...] = ()
    absent_since: tuple[tuple[str, float], ...] = ()
    store_up_since: float = 0.0
    next_step_due: float | None = None
    short_since: float | None = None
    silent_since: tuple[tuple[str, float], ...] = ()
    unreachable: frozenset[str] = frozenset()
    _records: dict[str, NodeRecord] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_records", {p.record.id: p.record for p in reversed(self.nodes)})

    def record(self, node: str) -> NodeRecord | None:
        return self._records.get(node)


@dataclass(frozen=True, slots=True)
class Wait:
    """Nothing to publish now. Ask again when the view changes, and at `until` unless it is None.

    `short`: there are too few nodes to go on with. `told`: a person may wonder, and shall be told why once.
    """

    why: str
    until: float | None
    too_few_nodes: bool = False
    notable: bool = False


@dataclass(frozen=True, slots=True)
class Pause:
    """All ranks of round `number` shall save and wait, because a Round with other nodes is about to come."""

    number: int
    why: str
    until: float | None = None
