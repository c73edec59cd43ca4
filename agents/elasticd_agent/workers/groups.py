"""The groups of one job on this node as its manager knows them: to be started, running, parked; their heartbeats.

They say what a start waits for, which processes a group has, and which of them are kept for the next round. The manager
moves them; the owner, in another process, has the processes themselves.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from elasticd.errors import WireError
from elasticd.heartbeat.exit_report import ExitReport
from elasticd.heartbeat.record import HeartbeatReader
from elasticd_agent.model.records import Round
from elasticd_agent.workers.launcher.requests import WorkerSpec

MasterAddress = tuple[str, int]
"""The address of a round's store: MASTER_ADDR and MASTER_PORT."""


@dataclass(slots=True)
class PendingStart:
    """A Round whose group is to be started. Without a `master` the round's store starts as well.

    `kept_pids`: by local rank the pid of a process at its entry that becomes this worker, 0: a new one.
    """

    round: Round
    workers: tuple[WorkerSpec, ...]
    master: MasterAddress | None
    kept_pids: list[int]
    cold_start_at: float | None = None
    """When it starts cold instead of being forked; None while it waits for GPU memory."""


@dataclass(slots=True)
class WorkerGroup:
    """A started group."""

    round: Round
    workers: tuple[WorkerSpec, ...]
    master: MasterAddress | None
    warm: bool
    pids: list[int] = field(default_factory=list)
    store_pid: int = 0
    started_at: float = 0.0
    stop_requested: bool = False
    is_signalled: bool = False  #: its end was asked for, perhaps before it has started
    held_ranks: tuple[int, ...] = ()  #: local ranks whose GPU's memory is not free yet
    store_port: int = 0
    kept_pids: list[int] = field(default_factory=list)  #: by local rank, as in PendingStart
    entered: set[int] = field(default_factory=set)
    """Local ranks of workers that could leave the round in their process."""
    ever_entered: set[int] = field(default_factory=set)  #: also those that have left their training since
    exited: set[int] = field(default_factory=set)
    failed: set[int] = field(default_factory=set)  #: by themselves, before some were to be kept
    ranks_to_keep: tuple[int, ...] = ()  #: local ranks that are to be kept at its end


@dataclass(slots=True)
class ParkedGroup:
    """A group forked ahead that waits for its release."""

    name: int
    size: int
    with_store: bool
    ready: bool = False

    def fits(self, start: PendingStart) -> bool:
        """A release ends surplus processes and cannot add any."""
        return self.size >= len(start.workers) and (self.with_store or start.master is not None)


@dataclass(frozen=True, slots=True)
class KeepRequest:
    """Workers that keep their process at the end of a group, if they come to their entry within `park_s`."""

    local_ranks: tuple[int, ...] = ()
    park_s: float = 0.0
    why: str = ""  #: the group ends


@dataclass(slots=True)
class Newcomers:
    """Workers that are released ahead of their round, by slot: requested, released, on their way."""

    wanted: dict[int, WorkerSpec] = field(default_factory=dict)
    released: dict[int, dict[int, WorkerSpec]] = field(default_factory=dict)  #: by the name of the group
    by_pid: dict[int, tuple[int, WorkerSpec]] = field(default_factory=dict)
    asked_to_end: set[int] = field(default_factory=set)  #: pids and names of groups that we have ended
    entry_due_at: dict[int, float] = field(default_factory=dict)  #: when each has to be at its entry, by pid
    ended_late: dict[int, float] = field(default_factory=dict)
    """Those that we have ended for that, with the time they had."""

    @property
    def slots(self) -> set[int]:
        released = (slot for workers in self.released.values() for slot in workers)
        return {*self.wanted, *released, *(slot for slot, _ in self.by_pid.values())}

    def mark_ended(self, slots: set[int]) -> None:
        """The owner is asked to end those of these slots, and all of which it has not told the pids yet."""
        self.wanted = {slot: worker for slot, worker in self.wanted.items() if slot not in slots}
        self.asked_to_end |= self.released.keys() | {pid for pid, (slot, _) in self.by_pid.items() if slot in slots}


@dataclass(frozen=True, slots=True)
class KeptWorker:
    """A worker that waits at its entry for another round: its process, and how it was started last."""

    pid: int
    who: str
    spec: WorkerSpec
    is_new: bool = False  #: it has not been in a round yet

    def can_become(self, worker: WorkerSpec) -> bool:
        """CUDA has chosen the process' device when it was initialised: there it must be that of `worker`."""
        before, after = ([w.env.get(name) for name in _DEVICE_VARIABLES] for w in (self.spec, worker))
        return before == after or after[0] is None


_DEVICE_VARIABLES = ("CUDA_VISIBLE_DEVICES", "LOCAL_RANK")


def with_master(master: MasterAddress | None, workers: tuple[WorkerSpec, ...]) -> tuple[WorkerSpec, ...]:
    """The workers with the address of a store on another node; the owner adds that of its own store."""
    if master is None:
        return workers
    env = {"MASTER_ADDR": master[0], "MASTER_PORT": str(master[1])}
    return tuple(replace(worker, env={**worker.env, **env}) for worker in workers)


def store_outlives_group(round: Round) -> bool:
    """True if a store outlives its own node's group: workers of other nodes may end later, as under torchrun."""
    return len(round.members) > 1


def write_request(path: str, request: int) -> None:
    """Write STOP, PAUSE or 0."""
    try:
        with HeartbeatReader(path) as reader:
            reader.write_request(request)
    except (OSError, WireError):
        pass  # the signal that follows STOP is enough


def read_exit_report(path: str) -> ExitReport | None:
    try:
        with HeartbeatReader(path) as reader:
            return reader.read().exit_report
    except (OSError, WireError):
        return None
