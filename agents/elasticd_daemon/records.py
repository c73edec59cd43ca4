"""Records that agents share through the store: jobs, placements, results, nodes, cordons.

Each record is the complete state of one subject, replaced by compare-and-swap or kept under a lease. Times of day are
for display only; no decision depends on them.

The life of a job: a client writes a Submission; the scheduler writes its Placement, at first with the reason why it is
pending; agents of the named nodes run it and say so in their NodeStatus; the first node with the end creates a
JobResult, which is final. Each record has one kind of writer, so two of them never fight over it. A job's number tells
its runs apart: a job that is submitted again under its id has a higher one, and whatever names the lower one is of the
past.

Names in records become paths and keys, and anyone who may write to the store chooses them. So every name is checked
when a record is decoded, and a record that fails is left out with a sentence instead of being used.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import ClassVar, Literal

from elasticd.errors import UsageError, WireError
from elasticd_agent.config.quantities import MAX_COUNT, MAX_SLOTS_PER_NODE
from elasticd_agent.model.codec import Document, Record
from elasticd_agent.model.job import check_identifier
from elasticd_agent.model.records import check_slots

JobOutcome = Literal["succeeded", "failed", "cancelled"]
NodeState = Literal["starting", "ready", "cordoned", "draining", "quarantined"]
RunnerState = Literal["starting", "running", "leaving", "refused"]
MAX_PREVIOUS_NODES = 8
"""Nodes that a job has left: they have its older rounds, and perhaps its checkpoints."""


PRIORITY_ORDER = {"high": -1, "normal": 0, "low": 1}


def submitter(submitted_by: str) -> str:
    """Whose jobs count together: the caller, from whatever host."""
    return submitted_by.partition(" at ")[0]


class _NamedDocument(Document):
    """A document about one job or node. Its name becomes paths and keys, and anyone who may write to the store chooses
    it.
    """

    __slots__ = ()

    def check(self) -> None:
        name = getattr(self, self.FIELD_IN_KEY)
        _check_name("job id" if self.FIELD_IN_KEY == "job" else self.FIELD_IN_KEY, name)
        if getattr(self, "number", 1) < 1:
            raise WireError(f"{type(self).__name__} of {name!r}: it needs a number from 1")


def _check_name(what: str, name: str) -> None:
    try:
        check_identifier(what, name)
    except UsageError as error:
        raise WireError(str(error)) from None


@dataclass(frozen=True, slots=True)
class Submission(_NamedDocument):
    MAX_BYTES: ClassVar[int] = 1 << 20
    FIELD_IN_KEY: ClassVar[str] = "job"

    job: str
    number: int  #: the position in the order of all submissions, and the token of its run
    spec: str  #: the job file as JSON, checked at submission
    min_nodes: int
    max_nodes: int
    min_slots: int
    max_slots: int
    submitted_by: str = ""
    submitted_at: float = 0.0
    token: str = ""  #: chosen by the client, which recognises by it a submission that was made before an outage
    grow: bool = True
    removed: bool = False
    labels: tuple[str, ...] = ()
    priority: str = "normal"  #: one of PRIORITY_ORDER; anything else, of a newer version, counts as normal
    spares: int = 0  #: nodes beyond `max_nodes`; of a job on one node, slots beyond `max_slots`

    @property
    def order(self) -> tuple[int, int, str]:
        """The place in the queue: class, then number; the id makes it total."""
        return PRIORITY_ORDER.get(self.priority, 0), self.number, self.job

    @property
    def submitter(self) -> str:
        return submitter(self.submitted_by)

    @property
    def max_nodes_with_spares(self) -> int:
        """The most nodes, spares included, as `max_slots_with_spares`."""
        return self.max_nodes + (self.spares if self.max_nodes > 1 else 0)

    @property
    def max_slots_with_spares(self) -> int:
        return self.max_slots + (self.spares if self.max_nodes == 1 else 0)

    def check(self) -> None:
        _NamedDocument.check(self)
        for low, high, what in ((self.min_nodes, self.max_nodes, "nodes"), (self.min_slots, self.max_slots, "slots")):
            if not 1 <= low <= high <= MAX_COUNT:
                raise WireError(f"submission of {self.job!r}: invalid range of {low}:{high} {what}")
        if not 0 <= self.spares <= MAX_COUNT:
            raise WireError(f"submission of {self.job!r}: {self.spares} spares")


@dataclass(frozen=True, slots=True)
class SlotAssignment(Record):
    node: str
    slots: tuple[int, ...]

    def check(self) -> None:
        _check_name("node", self.node)
        if not self.slots:
            raise WireError(f"assignment on {self.node!r}: it needs at least one slot")
        check_slots(f"assignment on {self.node!r}", self.slots)


@dataclass(frozen=True, slots=True)
class Refusal(Record):
    """A node whose runner refused the job, with the reason. The job is not scheduled there while it does."""

    node: str
    why: str = ""


@dataclass(frozen=True, slots=True)
class Placement(_NamedDocument):
    """The slots where a submitted job runs, or, without assignments, why it is pending. Only the scheduler writes
    it.
    """

    MAX_BYTES: ClassVar[int] = 2 << 20
    FIELD_IN_KEY: ClassVar[str] = "job"
    job: str
    number: int
    assignments: tuple[SlotAssignment, ...]
    reason: str
    refusals: tuple[Refusal, ...] = ()
    previous_nodes: tuple[str, ...] = ()  #: nodes that it ran on before, the newest first
    ended_s: float | None = None  #: when the scheduler first saw its result, by keys.SCHEDULER_CLOCK

    def assignment(self, node: str) -> SlotAssignment | None:
        return next((assignment for assignment in self.assignments if assignment.node == node), None)

    def previous_nodes_after(self, nodes: Collection[str]) -> tuple[str, ...]:
        """`previous_nodes` when the job runs on `nodes` next."""
        known = dict.fromkeys([*(assignment.node for assignment in self.assignments), *self.previous_nodes])
        return tuple(node for node in known if node not in nodes)[:MAX_PREVIOUS_NODES]


@dataclass(frozen=True, slots=True)
class RoundSummary(Record):
    """One round of a job's history, as `elasticd status` shows it."""

    number: int
    world_size: int
    reason: str
    at: float = 0.0


@dataclass(frozen=True, slots=True)
class JobResult(_NamedDocument):
    """The end of a submitted job. The first node with the result creates it; then all other nodes stop the job."""

    FIELD_IN_KEY: ClassVar[str] = "job"
    NEVER_CHANGES: ClassVar[bool] = True
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
    """A runner on a node. `why` explains the state; a refused job is not scheduled on this node."""

    job: str
    number: int
    slots: tuple[int, ...]
    state: RunnerState
    why: str = ""

    def check(self) -> None:
        _check_name("job id", self.job)
        check_slots(f"runner of {self.job!r}", self.slots)


@dataclass(frozen=True, slots=True)
class NodeStatus(_NamedDocument):
    """An agent's report about its node, under a lease."""

    MAX_BYTES: ClassVar[int] = 2 << 20
    FIELD_IN_KEY: ClassVar[str] = "node"
    node: str
    incarnation: str
    slots: int
    address: str = ""  #: HOST:PORT of the agent's HTTP server, "" if it has none
    state: NodeState = "ready"
    why: str = ""
    gpus: tuple[str, ...] = ()
    cpus: int = 0
    memory_bytes: int = 0
    elasticd: str = ""  #: versions, "" where unknown
    python: str = ""
    torch: str = ""
    driver: str = ""
    labels: tuple[str, ...] = ()
    runners: tuple[RunnerStatus, ...] = ()
    failing: tuple[str, ...] = ()
    unusable: tuple[str, ...] = ()  #: shared directories whose check fails; `why` has the reason

    def check(self) -> None:
        """Raise WireError for a name or a number of slots that no node can have."""
        _NamedDocument.check(self)
        if not 0 <= self.slots <= MAX_SLOTS_PER_NODE:
            raise WireError(f"node {self.node!r}: {self.slots} slots are not in 0..{MAX_SLOTS_PER_NODE}")


@dataclass(frozen=True, slots=True)
class KnownNode(_NamedDocument):
    """A node whose agent has registered and has not left. Under no lease; the scheduler notes in it its loss."""

    FIELD_IN_KEY: ClassVar[str] = "node"
    node: str
    address: str = ""
    lost_s: float | None = None
    """When the scheduler first saw it without a status, by keys.SCHEDULER_CLOCK; None: it has one."""
    lost_at: float = 0.0  #: the same by the time of day
    jobs: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Cordon(_NamedDocument):
    """No new jobs for a node; with `drain`, its jobs leave it, too. It outlives every agent."""

    FIELD_IN_KEY: ClassVar[str] = "node"
    node: str
    drain: bool
    reason: str
    cordoned_by: str = ""
    cordoned_at: float = 0.0

    @property
    def text(self) -> str:
        """Follows "n2 is": "drained: a fan is broken", or without a reason "drained by ann"."""
        what = "drained" if self.drain else "cordoned"
        if self.reason:
            return f"{what}: {self.reason}"
        return f"{what} by {self.cordoned_by}" if self.cordoned_by else what


@dataclass(frozen=True, slots=True)
class ClusterView:
    """All records that the agents share, at one moment."""

    nodes: tuple[NodeStatus, ...] = ()
    cordons: tuple[Cordon, ...] = ()
    submissions: tuple[Submission, ...] = ()
    placements: tuple[Placement, ...] = ()
    results: tuple[JobResult, ...] = ()
    absent_nodes: tuple[NodeStatus, ...] = ()
    """The last status of each node that has none now, but not for long enough to be given up."""
    left_behind: frozenset[tuple[str, str]] = frozenset()
    """(job, node) where the node is absent and the job's own rendezvous has continued without it."""
    known_nodes: tuple[KnownNode, ...] = ()  #: the nodes, lost ones included; for people only

    def result(self, job: str, number: int) -> JobResult | None:
        """Return the end of this run of the job, None while it has none."""
        return next((r for r in self.results if (r.job, r.number) == (job, number)), None)

    def unfinished(self) -> tuple[Submission, ...]:
        """Return the jobs that have not ended, in the order of the queue."""
        finished = {r.job: r.number for r in self.results}
        submissions = [s for s in self.submissions if s.number > finished.get(s.job, 0) and not s.removed]
        return tuple(sorted(submissions, key=lambda s: s.order))

    def orphaned(self) -> tuple[Placement, ...]:
        """Placements without a submission known here, e.g. of a newer version: they keep their slots."""
        submitted = {s.job for s in self.submissions}
        finished = {r.job: r.number for r in self.results}
        placements = [p for p in self.placements if p.job not in submitted and p.number > finished.get(p.job, 0)]
        return tuple(sorted(placements, key=lambda p: p.job))
