"""Notices from the rendezvous to the deciding loop beside Events: facts that the state machine does not need."""

from __future__ import annotations

from dataclasses import dataclass

from elasticd_agent.model.messages import Event
from elasticd_agent.model.reports import HangVerdict


@dataclass(frozen=True, slots=True)
class MasterKnown:
    """The workers' store of round `number` listens at this address."""

    number: int
    address: str
    port: int


@dataclass(frozen=True, slots=True)
class PauseRequested:
    """The leader requests that round `number` pauses at a checkpoint (`on`), or withdraws the request."""

    number: int
    on: bool


@dataclass(frozen=True, slots=True)
class AheadRequested:
    """The leader requests that this node, which is not in round `number`, starts its workers ahead of the next one."""

    number: int


@dataclass(frozen=True, slots=True)
class HangReportRequested:
    """The leader requests every node's hang report of round `number` (`on`), or withdraws the request."""

    number: int
    on: bool


@dataclass(frozen=True, slots=True)
class StragglersFound:
    """The ranks of round `number` that the others wait for."""

    number: int
    ranks: tuple[tuple[int, float], ...]  #: (rank, how many times as long as the others' its own work takes)


@dataclass(frozen=True, slots=True)
class LeaderNotice:
    """Base of what only the leader's agent knows."""


@dataclass(frozen=True, slots=True)
class LeadershipChanged(LeaderNotice):
    """This agent leads the job from now on (`on`), or does not any more."""

    on: bool


@dataclass(frozen=True, slots=True)
class FaultDetected(LeaderNotice):
    """A fault has broken round `number`."""

    number: int
    cause: str  #: in one word
    culprit: str  #: the node at fault, "" where no single one is
    reported_at: float | None = None
    """When the leader read the failure that its node reports at once; None: lost or hung nodes report none."""


@dataclass(frozen=True, slots=True)
class StoreAvailability:
    """The store became unavailable, or available again after `seconds`."""

    unavailable: bool
    why: str
    seconds: float


@dataclass(frozen=True, slots=True)
class WaitingFor(LeaderNotice):
    """The job waits for something, usually while nothing runs."""

    why: str
    more_nodes: bool  #: it waits for more nodes


@dataclass(frozen=True, slots=True)
class Rejected:
    """This agent cannot take part in this job; `why` names the remedy."""

    why: str


@dataclass(frozen=True, slots=True)
class Probed:
    """Another agent has probed this one, as it does at any sign of trouble."""


Notice = (
    Event
    | Probed
    | MasterKnown
    | PauseRequested
    | AheadRequested
    | HangReportRequested
    | HangVerdict
    | StragglersFound
    | StoreAvailability
    | LeaderNotice
    | Rejected
)
