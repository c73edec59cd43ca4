"""The reports of agents about their ranks while any of them suspects a hang: facts without judgement.

Hang verdicts read HangReports, recordings of real hangs are files of HangReports, and `elasticd explain` shows them.
All ages are attentive seconds of the reporting agent: time in which it did not observe (the machine was suspended, the
agent got no CPU) does not age a rank.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from elasticd_agent.model.codec import MAX_SECONDS, Document, Record

StackPlace = Literal["", "collective", "device", "init", "barrier", "debugger", "output", "elsewhere"]
"""A rank's main thread, by its stack: in (or waiting for) a collective, in a device synchronisation, creating the
process group, in `session.barrier`, at a debugger's prompt, in a write to its standard output or error that nobody
reads, somewhere else. "": no stack has been taken."""


DEFAULT_GROUP_NAME = "default group"


@dataclass(frozen=True, slots=True)
class GroupTail(Record):
    """The end of what one rank has issued in one process group, from its flight recorder."""

    group: str
    last: int  #: the number of the last collective issued
    pending: int = 0  #: of the first unfinished one; 0: none
    kinds: tuple[tuple[int, str], ...] = ()  #: the operation and size of the last ones, by number
    backend: str = ""  #: "gloo", "nccl", "nccl2"; "" unknown
    in_job: bool = False  #: all of its members are ranks of this job
    unrecorded: bool = False  #: no recorder has what is issued in this group, or none has what is completed
    members: int = 0  #: a checksum of its ranks: groups of different ranks may have one name; 0 unknown


@dataclass(frozen=True, slots=True)
class LaunchCount(Record):
    """The collectives of one kind that a rank has launched in a communicator of NCCL, by NCCL's RAS."""

    communicator: str  #: the same on all of its ranks
    operation: str  #: "AllReduce"; "collective" for all
    launched: int
    most: int  #: what the foremost of its ranks has launched


@dataclass(frozen=True, slots=True)
class RankReport(Record):
    """One rank, as its node's agent observes it."""

    FLOAT_RANGE: ClassVar[tuple[float, float]] = (-1.0, 1e300)  #: a script may choose any timeout
    rank: int
    slot: int
    # from its heartbeat record
    phase: str = "starting"
    step: int = 0
    collectives: int = -1  #: issued by the default process group; -1: not counted
    usual: int = -1  #: collectives of its last finished step; -1: not counted
    barrier: str = ""  #: the barrier it waits in
    barrier_s: float = 0.0  #: the timeout that the script gave that barrier; 0: none
    wait_call: str = ""  #: the session call in which it waits for other ranks, as "save()"
    wait_rank: int = -1  #: the first rank that has not made that call; -1: unknown
    timeout_s: float = 0.0  #: the longest timeout of its process groups; 0: unknown
    wait_timeout_s: float = 0.0  #: the timeout that the script gave the collective it waits in; 0: none of its own
    idle_s: float = 0.0  #: since any of the above last changed
    alive_s: float = -1.0  #: since its heartbeat thread last ran, which it cannot while the GIL is held; -1: never
    moved_s: float = -1.0  #: since that thread last saw the main thread's Python move; -1: never
    #: (group, collectives enqueued, completed), both -1 for a group of which no recorder has them; see its heartbeat
    nccl_groups: tuple[tuple[int, int, int], ...] = ()
    device_s: float = -1.0  #: since `nccl_groups` last changed; -1: unknown
    waiting_s: float = 0.0  #: for how long that thread has seen it wait for other ranks, without a break
    called_step: bool = False  #: it has called its session's `step()`, which counts the steps of the job
    # from /proc
    state: str = ""  #: "R", "S", "D", "T", "t" (traced), "Z", "X" (exiting); "" unknown
    stopped_s: float = 0.0  #: for how long it has been "T"
    cpu_s: float = 0.0  #: of its process tree over the last `window_s`
    io_bytes: int = 0  #: the same
    window_s: float = 0.0
    unsent: int = -1  #: bytes in the queues of its TCP sockets, unsent or unread; -1: unknown
    quiet_s: float = -1.0  #: since its process tree last used CPU, read, wrote, or started a process; -1: unknown
    sockets_s: float = -1.0  #: since bytes moved on its TCP sockets; -1: unknown
    shows_sockets: bool = True  #: the kernel shows its TCP sockets, if they were looked for
    # from its stack
    where: StackPlace = ""
    function: str = ""  #: the frame that `where` was concluded from
    place: str = ""  #: the innermost function of the script's own code, without a line number
    stack: str = ""  #: the same for equal stacks
    alone: bool = False  #: no other thread runs code of the script
    loading: bool = False  #: its main thread, or that with the GIL, imports a module or may wait for a file
    evidence: bool = False  #: its evidence is on disk
    # from its flight recorder
    groups: tuple[GroupTail, ...] = ()
    deviation: str = ""  #: from the usual order of its collectives: "skipped" (one was left out), "other"
    #: from NCCL's RAS, where ranks of a communicator differ: the same in two answers
    launches: tuple[LaunchCount, ...] = ()
    exited: bool = False  #: with code 0


@dataclass(frozen=True, slots=True)
class HangReport(Document):
    """One node's report about its ranks of `round` while it, or another node, suspects a hang."""

    MAX_BYTES: ClassVar[int] = 2 << 20
    FLOAT_RANGE: ClassVar[tuple[float, float]] = (-1.0, MAX_SECONDS)
    round: int
    node: str
    ranks: tuple[RankReport, ...]
    why: str = ""  #: its own suspicion; "": it has none, and reports on request
    deadline_s: float = 0.0  #: the learned time without progress after which it suspects a hang
    pause_s: float = 0.0  #: the longest idle pause that the job has survived on this node
    restart_s: float = -1.0  #: the training since its last save, which a restart repeats; -1: it saves by itself
    links_s: float = 0.0  #: for how long the job's links send again before they fail; 0: as usual
    gathered: bool = False  #: its evidence is on disk, or never will be
    store_state: str = ""  #: of the process that hosts the round's store, on rank 0's node
    store_stopped_s: float = 0.0  #: the same
    turn: int = 0  #: grows with every report


@dataclass(frozen=True, slots=True)
class RankLocation(Record):
    """A rank with its node and slot."""

    node: str
    rank: int
    slot: int = -1


@dataclass(frozen=True, slots=True)
class RecordedVerdict(Document):
    """verdict.json: the last verdict on a group, and the reports that it was made on."""

    MAX_BYTES: ClassVar[int] = 16 << 20
    round: int
    cause: str
    culprits: tuple[RankLocation, ...]
    why: str
    action: str  #: "restart": the group was ended; "report": it was only reported
    seen_after_s: float  #: without progress
    at_wall: float = 0.0  #: unix time
    reports: tuple[HangReport, ...] = ()


@dataclass(frozen=True, slots=True)
class HangVerdict:
    """A group was found hung: the reports, the verdict on them, and the consequence."""

    round: int
    culprits: tuple[tuple[str, int, int], ...]  #: (node, rank, slot), perhaps none
    cause: str
    why: str
    hung_s: float  #: for how long no rank had made progress
    kills_group: bool  #: the group is ended for it; else it is only reported: it may resume, or --on-hang report
    reports: tuple[HangReport, ...]
    places: tuple[str, ...] = ()  #: what its ranks wait in
    highest_step: int = 0  #: of its ranks
