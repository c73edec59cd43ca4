"""What is remembered of a worker group on its way (parked ahead, asked for, running), and what is told of it.

What is remembered is the deciding thread's: `manager.py` keeps it, nobody else sees it. What is told beside Events are
words for the person, the metrics and the loop, which the core does not need.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from elasticd_agent.model.records import Round
from elasticd_agent.workers.launcher.requests import WorkerSpec

Master = tuple[str, int]
"""Where a round's store is: what MASTER_ADDR and MASTER_PORT say."""


@dataclass(frozen=True, slots=True)
class GroupStarted:
    """What the person and the metrics want to know of a start; not an Event, the core does not need it."""

    number: int
    pids: list[int]
    store_pid: int
    """0: the round's store is on another node."""
    warm: bool


@dataclass(frozen=True, slots=True)
class StoreReady:
    """The store of round `number` accepts connections on `port`: other nodes' workers may be started.

    It comes before Started, at most once for a group, and only for one that was started without a master.
    """

    number: int
    port: int


@dataclass(frozen=True, slots=True)
class ProcessUnkillable:
    """A process of round `number`'s group was sent SIGKILL and does not die; GroupGone comes all the same.

    It runs no code any more, but may hold its device. `rank` and `slot` are its worker's, None for the round's store
    and for what is no worker's as far as can be told; `state` and `wchan` are /proc's words, "" where unknown.
    """

    number: int
    pid: int
    rank: int | None
    slot: int | None
    state: str
    wchan: str


@dataclass(frozen=True, slots=True)
class ProcessReaped:
    """A process that was stuck has ended at last."""

    pid: int


@dataclass(slots=True)
class PendingStart:
    """A Round on its way to running: asked for, not yet started. Without a `master` the round's store starts, too."""

    round: Round
    workers: tuple[WorkerSpec, ...]
    master: Master | None
    deadline: float


@dataclass(slots=True)
class WorkerGroup:
    """A started group."""

    round: Round
    workers: tuple[WorkerSpec, ...]
    master: Master | None
    warm: bool
    pids: list[int] = field(default_factory=list)
    store_pid: int = 0
    stopping: bool = False


@dataclass(slots=True)
class ParkedGroup:
    """A parked group: forked ahead, waiting to be released."""

    name: int
    size: int
    with_store: bool
    ready: bool = False

    def fits(self, start: PendingStart) -> bool:
        """What it has too much is ended at its release; what it lacks it cannot get."""
        return self.size >= len(start.workers) and (self.with_store or start.master is not None)


def with_master(master: Master | None, workers: tuple[WorkerSpec, ...]) -> tuple[WorkerSpec, ...]:
    """The workers, told of a store that is elsewhere; of their own the owner tells them."""
    if master is None:
        return workers
    env = {"MASTER_ADDR": master[0], "MASTER_PORT": str(master[1])}
    return tuple(replace(worker, env={**worker.env, **env}) for worker in workers)


def keeps_store(round: Round) -> bool:
    """Whether a store outlives its own node's group: the workers of others may end later, as under torchrun."""
    return len(round.members) > 1
