"""The answers of the HTTP API as typed values with their JSON form; docs/http.md lists the same fields.

The answer of a runner or of another agent is checked here, once, where it comes in: a malformed one raises WireError
naming the field. Pages and tables then draw typed values only. Times are unix seconds.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import quote, unquote

from elasticd.errors import WireError
from elasticd_agent.model.codec import Record
from elasticd_agent.model.phrases import listing, plural
from elasticd_agent.telemetry.timeline import CheckpointStatus as CheckpointStatus
from elasticd_agent.telemetry.timeline import RoundStatus as RoundStatus
from elasticd_agent.telemetry.timeline import ScalarSeries as ScalarSeries
from elasticd_daemon.health.result import GpuUsage

Answer = dict[str, Any]
"""An answer as JSON has it: where it leaves an agent, and where it has just come in."""
StepSample = tuple[float, int, int]
"""Unix time, round, step."""


@dataclass(frozen=True, slots=True)
class RankProgress(Record):
    """One rank as the runner on its node sees it."""

    rank: int
    node: str = ""
    slot: int | None = None
    phase: str = ""
    step: int = 0
    idle_seconds: float = 0.0  #: since any counter of the rank advanced
    state: str = ""  #: the letter of the process state in /proc
    barrier: str = ""
    exited: bool = False  #: it ended with code 0


@dataclass(frozen=True, slots=True)
class MemberSlots(Record):
    """The slots of one node that take part."""

    node: str
    slots: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class JobProgress(Record):
    """The progress of a job, as one node or all of its nodes together know it."""

    node: str = ""  #: the node whose answer counts where two nodes disagree
    round: int | None = None
    phase: str | None = None
    world_size: int | None = None
    members: tuple[MemberSlots, ...] = ()
    spares: tuple[MemberSlots, ...] = ()  #: slots beside the members' that are ready to take a lost rank's place
    restarts: int | None = None
    step: int | None = None
    steps_per_second: float | None = None
    checkpoint: CheckpointStatus | None = None
    snapshot: CheckpointStatus | None = None  #: the last save that was whole in memory, on rank 0's node while it runs
    donor_resumes: int = 0  #: rounds that resumed from a state saved after the fault
    donor_steps: int = 0  #: the steps by which these states were ahead of the newest checkpoint on the disk, in all
    goodput: float | None = None
    started_at: float | None = None
    rounds: tuple[RoundStatus, ...] = ()
    ranks: tuple[RankProgress, ...] = ()
    step_samples: tuple[StepSample, ...] = ()
    scalars: tuple[ScalarSeries, ...] = ()
    gpus: tuple[GpuUsage, ...] = ()
    unreachable: Mapping[str, str] = field(default_factory=dict)  #: the nodes that did not answer, and why
    runner_problem: str = ""  #: why the runner on `node` did not answer

    @property
    def spare_names(self) -> list[str]:
        """Each spare in words: "gpu-9", or "slot 4 of gpu-1" where that node takes part."""
        members = {member.node for member in self.members}
        slots = [(one.node, f"{plural(len(one.slots), 'slot')} {listing(one.slots)} of ") for one in self.spares]
        return [f"{where if node in members else ''}{node}" for node, where in slots]

    @property
    def newest_round(self) -> RoundStatus | None:
        return self.rounds[-1] if self.rounds else None


@dataclass(frozen=True, slots=True)
class RequestedSize(Record):
    """Minimum and maximum."""

    nodes: tuple[int, int]
    slots: tuple[int, int]
    spares: int = 0


@dataclass(frozen=True, slots=True)
class JobSummary(Record):
    """A job in a list: its place, its state and the reason for it."""

    job: str
    number: int = 0
    state: str = ""
    nodes: tuple[str, ...] = ()
    slots: int = 0
    requested: RequestedSize | None = None
    submitted_at: float | None = None
    age_seconds: float | None = None
    submitted_by: str = ""
    priority: str = "normal"
    place: int | None = None  #: the place in the queue, from 1; None unless it is pending
    ended_at: float | None = None
    ended_seconds: float | None = None
    exit_code: int | None = None
    leaving: tuple[str, ...] = ()  #: nodes where workers of an ended job are still being stopped
    reason: str = ""
    step: int | None = None  #: the last one of an ended job

    @property
    def ended(self) -> bool:
        """True once the job has an end."""
        return self.ended_at is not None

    @property
    def max_workers(self) -> int | None:
        """The most workers that the job may have, None if that is not known."""
        return None if self.requested is None else self.requested.nodes[1] * self.requested.slots[1]


@dataclass(frozen=True, slots=True)
class AssignmentStatus(Record):
    """One node that the scheduler has given to a job, and how far the job is there."""

    node: str
    slots: tuple[int, ...] = ()
    state: str = ""
    reason: str = ""


@dataclass(frozen=True, slots=True)
class JobStatus(JobSummary):
    """A job with everything that its nodes know about it."""

    assignments: tuple[AssignmentStatus, ...] = ()
    progress: JobProgress | None = None  #: none while no node knows anything
    file: str = ""  #: the job file as JSON, without the values of `env`; "" once its records are removed

    @property
    def known(self) -> JobProgress:
        """The progress, empty while no node knows anything."""
        return self.progress or JobProgress()

    @property
    def failed_rank(self) -> int | None:
        """The rank that made the job fail: the reason names it first. None where none did."""
        named = re.search(r"\brank (\d{1,6})\b", self.reason) if self.state == "failed" else None
        return int(named[1]) if named else None


@dataclass(frozen=True, slots=True)
class NodeSummary(Record):
    """A node in a list: its slots, what runs there, and why it takes no work."""

    node: str
    state: str = ""
    slots: int = 0
    used: int = 0
    jobs: tuple[str, ...] = ()
    reason: str = ""
    address: str = ""
    gpus: tuple[str, ...] = ()
    cpus: int = 0
    memory_bytes: int = 0
    labels: tuple[str, ...] = ()
    versions: Mapping[str, str] = field(default_factory=dict)
    cordoned_by: str | None = None
    lost_at: float | None = None


_NUMBER_HEADERS = ("round", "start", "next", "size", "newest")


@dataclass(frozen=True, slots=True)
class LogChunk:
    """A piece of a log: the body of an answer, and the rest as its headers."""

    data: bytes
    node: str
    round: int
    start: int  #: the offset of `data` in the file
    next: int
    size: int
    newest: int = 0
    is_final: bool = False  #: nothing will be added any more

    def headers(self) -> tuple[tuple[str, str], ...]:
        return (
            ("Elasticd-Node", quote(self.node)),
            *((f"Elasticd-{name.capitalize()}", str(getattr(self, name))) for name in _NUMBER_HEADERS),
            ("Elasticd-Over", str(int(self.is_final))),
        )

    @classmethod
    def from_reply(cls, body: bytes, headers: Mapping[str, str]) -> LogChunk:
        """`headers`: by name in lower case. Raises WireError where one is missing."""
        try:
            numbers = {name: int(headers[f"elasticd-{name}"]) for name in _NUMBER_HEADERS}
            return cls(body, unquote(headers["elasticd-node"]), is_final=headers["elasticd-over"] == "1", **numbers)
        except (KeyError, ValueError):
            raise WireError("its answer is not a log") from None
