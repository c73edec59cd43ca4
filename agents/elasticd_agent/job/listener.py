"""The reports of a job's loop, beside the events and notices that it receives."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from elasticd_agent.hangs.observer import Observation
from elasticd_agent.model.messages import (
    Event,
    LeaderNotice,
    StateMachineRules,
    StopForced,
    StopRequested,
    StoreAvailability,
    StragglersFound,
)
from elasticd_agent.model.records import Failure, Round
from elasticd_agent.model.reports import HangVerdict
from elasticd_agent.workers.events import GroupStarted, ProcessUnkillable, StartModeKnown, UnkillableProcessEnded


@dataclass(frozen=True, slots=True)
class PhaseChanged:
    name: str


@dataclass(frozen=True, slots=True)
class GroupEnding:
    """The agent is about to signal the group of round `number`."""

    number: int


@dataclass(frozen=True, slots=True)
class StopStarted:
    """The node begins to leave, or the job to stop."""

    request: StopRequested | StopForced
    rules: StateMachineRules


@dataclass(frozen=True, slots=True)
class SlotChanged:
    """A process that survives SIGKILL has taken a slot out of use, or has ended."""

    cause: ProcessUnkillable | UnkillableProcessEnded
    sentence: str


@dataclass(frozen=True, slots=True)
class SparesChanged:
    """The slots here that would take a lost rank's place at once."""

    slots: tuple[int, ...] = ()
    at_entry: tuple[int, ...] = ()  #: those of them whose process is at its entry


@dataclass(frozen=True, slots=True)
class JobLeft:
    """The agent's work on this job is over. `round` is the last one it knew."""

    exit_code: int
    why: str
    round: Round | None


JobEvent = (
    Event
    | LeaderNotice
    | StoreAvailability
    | StragglersFound
    | HangVerdict
    | Failure
    | Observation
    | StartModeKnown
    | GroupStarted
    | GroupEnding
    | SlotChanged
    | SparesChanged
    | StopStarted
    | PhaseChanged
    | JobLeft
)


class JobListener(Protocol):
    def log(self, sentence: str) -> None: ...

    def on(self, event: JobEvent, now: float) -> None:
        """`now` is time.monotonic()."""
        ...
