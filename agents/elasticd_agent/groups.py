"""What is remembered of a worker group on its way: parked ahead, asked for, running.

They are the deciding thread's: `workers.py` keeps them, nobody else sees them.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from elasticd.wire import Round
from elasticd_agent.launcher.commands import Worker

Master = tuple[str, int]
"""Where a round's store is: what MASTER_ADDR and MASTER_PORT say."""


@dataclass(slots=True)
class Start:
    """A Round on its way to running: asked for, not yet started. Without a `master` the round's store starts, too."""

    round: Round
    workers: tuple[Worker, ...]
    master: Master | None
    deadline: float


@dataclass(slots=True)
class Group:
    """A started group."""

    round: Round
    workers: tuple[Worker, ...]
    master: Master | None
    warm: bool
    pids: list[int] = field(default_factory=list)
    store_pid: int = 0
    stopping: bool = False


@dataclass(slots=True)
class Spare:
    """A parked group: forked ahead, waiting to be released."""

    name: int
    size: int
    with_store: bool
    ready: bool = False

    def fits(self, start: Start) -> bool:
        """What it has too much is ended at its release; what it lacks it cannot get."""
        return self.size >= len(start.workers) and (self.with_store or start.master is not None)


def joining(master: Master | None, workers: tuple[Worker, ...]) -> tuple[Worker, ...]:
    """The workers, told of a store that is elsewhere; of their own the owner tells them."""
    if master is None:
        return workers
    env = {"MASTER_ADDR": master[0], "MASTER_PORT": str(master[1])}
    return tuple(replace(worker, env={**worker.env, **env}) for worker in workers)


def keeps_store(round: Round) -> bool:
    """Whether a store outlives its own node's group: the workers of others may end later, as under torchrun."""
    return len(round.members) > 1
