"""What the coordinator tells the deciding loop besides Events: words about the job that the pure core need not know."""

from __future__ import annotations

from dataclasses import dataclass

from elasticd_agent.model.messages import Event
from elasticd_agent.model.reports import HangVerdict


@dataclass(frozen=True, slots=True)
class MasterKnown:
    """Where the workers' store of round `number` listens."""

    number: int
    address: str
    port: int


@dataclass(frozen=True, slots=True)
class PauseRequested:
    """The planner wants round `number` held at a checkpoint (`on`), or wants that no more."""

    number: int
    on: bool


@dataclass(frozen=True, slots=True)
class HangReportRequested:
    """The planner wants to hear what every node sees of its ranks of round `number` (`on`), or has heard enough."""

    number: int
    on: bool


@dataclass(frozen=True, slots=True)
class StragglersFound:
    """The ranks of round `number` the others wait for, and how many times as long as theirs its own work takes."""

    number: int
    ranks: tuple[tuple[int, float], ...]


@dataclass(frozen=True, slots=True)
class LeaderNotice:
    """What only an agent that plans knows, or no longer does."""


@dataclass(frozen=True, slots=True)
class LeadershipChanged(LeaderNotice):
    """This agent plans for the job from now on (`on`), or does not any more."""

    on: bool


@dataclass(frozen=True, slots=True)
class FaultDetected(LeaderNotice):
    """A fault has broken round `number`: `cause` in a word, `culprit` the node at fault, "" where no single one is."""

    number: int
    cause: str
    culprit: str


@dataclass(frozen=True, slots=True)
class StoreAvailability:
    """The store has gone away (`away`), or has come back after `seconds`."""

    unavailable: bool
    why: str
    seconds: float


@dataclass(frozen=True, slots=True)
class WaitingFor(LeaderNotice):
    """What the job waits for, as a rule while nothing runs; `why` is for the person. `nodes`: for more of them."""

    why: str
    more_nodes: bool


@dataclass(frozen=True, slots=True)
class Rejected:
    """This agent cannot take part in this job; `why` says what to do."""

    why: str


@dataclass(frozen=True, slots=True)
class Probed:
    """Another agent has asked whether this one is here, as it does when it sees any sign of trouble."""


Notice = (
    Event
    | Probed
    | MasterKnown
    | PauseRequested
    | HangReportRequested
    | HangVerdict
    | StragglersFound
    | StoreAvailability
    | LeaderNotice
    | Rejected
)
