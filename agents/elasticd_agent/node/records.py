"""What daemons say to each other through the store: jobs, where they run, how they ended, nodes.

Every record is a whole truth about one thing, replaced by compare-and-swap or kept by a lease. Times of day are there
for people to read; nothing is ever decided by them. It decides nothing.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Literal

from elasticd.errors import WireError
from elasticd_agent.model.codec import Document, Record

JobOutcome = Literal["succeeded", "failed", "cancelled"]
NodeState = Literal["starting", "ready", "cordoned", "draining", "quarantined"]
RunnerState = Literal["starting", "running", "leaving", "refused"]
MAX_PREVIOUS_NODES = 8
"""Nodes that a job has left and that are remembered: they have its older rounds, and perhaps its checkpoints."""


@dataclass(frozen=True, slots=True)
class Submission(Document):
    """A job that was handed in. `number` is its place in the order of all submissions, and its run's token.

    `spec` is the job file as JSON, checked when it was handed in. Slots are those wanted on each node. By `token` a
    caller finds again what it handed in before an outage. Without `grow` it gets no more nodes once it runs. `removed`:
    it has ended, and is going this moment.
    """

    job: str
    number: int
    spec: str
    min_nodes: int
    max_nodes: int
    min_slots: int
    max_slots: int
    submitted_by: str = ""
    submitted_at: float = 0.0
    token: str = ""
    grow: bool = True
    removed: bool = False

    def check(self) -> None:
        if not self.job or self.number < 1:
            raise WireError(f"submission of {self.job!r}: it needs a name and a number from 1")
        if not 1 <= self.min_nodes <= self.max_nodes or not 1 <= self.min_slots <= self.max_slots:
            raise WireError(f"submission of {self.job!r}: wants {self.min_nodes}:{self.max_nodes} nodes")


@dataclass(frozen=True, slots=True)
class SlotAssignment(Record):
    """A job's slots on one node."""

    node: str
    slots: tuple[int, ...]

    def check(self) -> None:
        if not self.node or not self.slots or min(self.slots) < 0 or len(set(self.slots)) != len(self.slots):
            raise WireError(f"place on {self.node!r}: slots must be distinct and not negative, got {list(self.slots)}")


@dataclass(frozen=True, slots=True)
class Refusal(Record):
    """A node whose runner would not run the job, and its sentence. The job is not given to it again."""

    node: str
    why: str = ""


@dataclass(frozen=True, slots=True)
class Placement(Document):
    """Where a submitted job runs, or, without places, why it waits. Only the placer writes it.

    `last`: the nodes it ran on before and runs on no more, the newest first. `ended_s`: by the placers' clock
    (names.CLOCK), when its ending was first seen.
    """

    job: str
    number: int
    assignments: tuple[SlotAssignment, ...]
    reason: str
    refusals: tuple[Refusal, ...] = ()
    previous_nodes: tuple[str, ...] = ()
    ended_s: float | None = None

    def assignment(self, node: str) -> SlotAssignment | None:
        return next((place for place in self.assignments if place.node == node), None)

    def previous_nodes_after(self, nodes: Collection[str]) -> tuple[str, ...]:
        """`last` once it runs on `nodes`."""
        known = dict.fromkeys([*(place.node for place in self.assignments), *self.previous_nodes])
        return tuple(node for node in known if node not in nodes)[:MAX_PREVIOUS_NODES]


@dataclass(frozen=True, slots=True)
class RoundSummary(Record):
    """One round of a job's history, as `elasticd status` shows it."""

    number: int
    world_size: int
    reason: str
    at: float = 0.0


@dataclass(frozen=True, slots=True)
class JobResult(Document):
    """How a submitted job ended. It is created once, by whoever knows first; whoever still runs it then stops."""

    job: str
    number: int
    outcome: JobOutcome
    exit_code: int
    reason: str
    ended_at: float = 0.0
    nodes: tuple[str, ...] = ()
    rounds: tuple[RoundSummary, ...] = ()
    step: int = 0


@dataclass(frozen=True, slots=True)
class RunnerStatus(Record):
    """A runner on a node. `why` says it in a sentence; a refused job is not given to this node again."""

    job: str
    number: int
    slots: tuple[int, ...]
    state: RunnerState
    why: str = ""


@dataclass(frozen=True, slots=True)
class NodeStatus(Document):
    """What a daemon says of its node, under a lease. `address` is HOST:PORT of its HTTP server, "" if it has none."""

    node: str
    incarnation: str
    slots: int
    address: str = ""
    state: NodeState = "ready"
    why: str = ""
    gpus: tuple[str, ...] = ()
    cpus: int = 0
    memory_bytes: int = 0
    elasticd: str = ""
    python: str = ""
    torch: str = ""
    driver: str = ""
    labels: tuple[str, ...] = ()
    runners: tuple[RunnerStatus, ...] = ()

    def check(self) -> None:
        if not self.node or self.slots < 0:
            raise WireError(f"node {self.node!r} needs a name and a number of slots that is not negative")


@dataclass(frozen=True, slots=True)
class Cordon(Document):
    """No new work for a node; with `drain`, its jobs leave it, too. It outlives every agent."""

    node: str
    drain: bool
    reason: str
    cordoned_by: str = ""
    cordoned_at: float = 0.0

    @property
    def text(self) -> str:
        """Goes after "n2 is": "drained: a fan is broken", or, where nobody said why, "drained by ann"."""
        what = "drained" if self.drain else "cordoned"
        return (
            f"{what}: {self.reason}" if self.reason else f"{what} by {self.cordoned_by}" if self.cordoned_by else what
        )
