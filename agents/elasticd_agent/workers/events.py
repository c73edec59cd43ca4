"""Reports of the manager of a job's workers, besides the state machine's events."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from elasticd_agent.model.messages import Event


@dataclass(frozen=True, slots=True)
class StartModeKnown:
    """It is known how workers start from now on."""

    mode: Literal["warm", "cold"]
    reason: str
    seconds: float | None = None  #: the time that the template took to get ready


@dataclass(frozen=True, slots=True)
class GroupStarted:
    """The workers of round `number` run."""

    number: int
    pids: list[int]
    store_pid: int  #: 0: the round's store is on another node
    warm: bool
    held_ranks: tuple[int, ...] = ()  #: local ranks that wait until their GPU's memory is free: WorkersReleased follows
    store_port: int = 0  #: the port of the round's store; 0: unknown
    kept_ranks: tuple[int, ...] = ()  #: local ranks of workers that have kept their process of an earlier round


@dataclass(frozen=True, slots=True)
class WorkersReleased:
    """Workers of round `number` that were held run, by local rank."""

    number: int
    local_ranks: list[int]


@dataclass(frozen=True, slots=True)
class StoreReady:
    """The store of round `number` accepts connections on `port`: other nodes' workers may be started.

    It precedes GroupStarted, at most once for a group, and only for one that was started without a master.
    """

    number: int
    port: int


@dataclass(frozen=True, slots=True)
class ProcessUnkillable:
    """A process of round `number`'s group has survived SIGKILL; GroupEnded follows all the same.

    It runs no code any more, but may hold its device.
    """

    number: int
    pid: int
    rank: int | None
    """The rank of its worker; None for the round's store, and for a process of no known worker. So is `slot`."""
    slot: int | None
    state: str  #: the state letter of /proc, "" if unknown. So is `wchan`.
    wchan: str


@dataclass(frozen=True, slots=True)
class GroupEntered:
    """All workers of round `number` here can leave it in their process."""

    number: int


@dataclass(frozen=True, slots=True)
class NewcomerReady:
    """The process that was released ahead on `slot` waits at its entry for a round."""

    slot: int


@dataclass(frozen=True, slots=True)
class NewcomerEnded:
    """The process that was released ahead on `slot` has ended before its entry."""

    slot: int
    why: str  #: "" where the agent has no use for it any more
    is_late: bool = False  #: it was killed, since it did not come there in time
    is_refused: bool = False  #: the script's use of the library, which another process would repeat


@dataclass(frozen=True, slots=True)
class NewcomerLost:
    """The process that waited at its entry on `slot` for its first round has died."""

    slot: int


@dataclass(frozen=True, slots=True)
class UnkillableProcessEnded:
    """An unkillable process has ended."""

    pid: int


OwnerEvent = (
    Event | GroupStarted | WorkersReleased | StoreReady | ProcessUnkillable | UnkillableProcessEnded
    | GroupEntered | NewcomerReady | NewcomerEnded | NewcomerLost
)  # fmt: skip
