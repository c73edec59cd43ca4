"""The kinds and fields of the event log: what can happen to a job, and to a node's agent. Pure.

docs/events.md is generated from it (`make docs`) and a test keeps the two in step. The format is stable: kinds and
fields are added, never renamed or given another meaning, while FORMAT_VERSION is 1. `decode` reads a line back: every
program of elasticd that reads a log gets the same typed events as the one that wrote it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar, Literal

from elasticd.errors import WireError
from elasticd.heartbeat.worker_events import MAX_SCALARS, WorkerEvent
from elasticd_agent.model.codec import Record

FORMAT_VERSION = 1
MAX_LINE_BYTES = 64 * 1024

TimeState = Literal["useful", "lost", "idle"]


@dataclass(frozen=True, slots=True)
class TimeSplit(Record):
    """Seconds of one node's time in a job, by what became of them; and which of the three grows."""

    useful: float = 0.0
    lost: float = 0.0
    idle: float = 0.0
    state: TimeState = "idle"

    @property
    def total(self) -> float:
        return self.useful + self.lost + self.idle


def _field(meaning: str, **default: Any) -> Any:
    """A dataclass field with its sentence for docs/events.md."""
    return field(metadata={"meaning": meaning}, **default)


@dataclass(frozen=True, kw_only=True)
class LogEvent(Record):
    """The fields of every line, besides `v`, `kind`, `job`, `node` and `wall`, which the log adds."""

    kind: ClassVar[str]
    round: int = _field("the round's number; 0 before the first one")
    mono: float = _field("CLOCK_MONOTONIC of this node when it happened, in seconds; for one boot of one node only")
    reason: str = _field("one sentence: what happened and why")
    spent: TimeSplit | None = _field(  # noqa: RUF009
        "only in a job's log: this node's time in the job until then, in seconds, as `useful`, `lost` and `idle`, and "
        "the `state` that the time after it belongs to, unless a later line corrects that",
        default=None,
    )

    def __init_subclass__(cls, kind: str) -> None:
        cls.kind = kind


@dataclass(frozen=True, kw_only=True)
class RoundPublishedEvent(LogEvent, kind="round_published"):
    """A round was agreed on: its members from now on."""

    world_size: int = _field("workers in the round")
    nodes: tuple[str, ...] = _field("ids of the nodes, in rank order")
    restarts: int = _field("restarts of the job so far, this round included")
    cause: str = _field("why there is a new round; the `cause` label of `elasticd_restarts_total`, or start")
    lost: tuple[str, ...] = _field("ids of the nodes lost since the previous round", default=())
    leader: str = _field("the node that published it", default="")
    idle_seconds: float = _field("since the last progress of this node's workers, in seconds", default=0.0)


@dataclass(frozen=True, kw_only=True)
class GroupStartedEvent(LogEvent, kind="group_started"):
    """This node's workers of a round are running."""

    ranks: tuple[int, ...] = _field("global ranks of this node's workers, by local rank")
    pids: tuple[int, ...] = _field("their process ids, in the same order")
    warm: bool = _field("true when they were forked by the warm launcher")
    kept: int = _field("how many of them have kept their process of an earlier round", default=0)


@dataclass(frozen=True, kw_only=True)
class FirstStepEvent(LogEvent, kind="first_step"):
    """A worker of the round finished its first optimizer step: the job trains (again)."""

    step: int = _field("the step that was finished")
    rank: int = _field("the rank seen first")
    start_seconds: float = _field("from the start of the round's workers, in seconds")
    recovery_seconds: float | None = _field(
        "from the fault before it, in seconds, by the leader's clock; null on other nodes, and without a fault",
        default=None,
    )


@dataclass(frozen=True, kw_only=True)
class WorkRecoveredEvent(LogEvent, kind="work_recovered"):
    """After a fault, a pause or a change of nodes, a step beyond all earlier ones was finished: work is recovered."""

    step: int = _field("the step that was finished, as the agent counts them")
    seconds: float = _field(
        "what was lost, in seconds: from the last step before the fault, or before a wait that was reported as a "
        "hang, without waiting for nodes; 0 without either"
    )


@dataclass(frozen=True, kw_only=True)
class WorkerExitedEvent(LogEvent, kind="worker_exited"):
    """A worker process of this node ended."""

    rank: int = _field("its global rank")
    local_rank: int = _field("its local rank")
    pid: int = _field("its process id")
    exit_code: int | None = _field("its exit code; null when a signal ended it", default=None)
    signal: int | None = _field("the signal that ended it; null when it exited", default=None)
    requested: bool = _field("true when the agent had stopped or killed it")
    step: int | None = _field("the last step it had finished; null when none is known", default=None)


@dataclass(frozen=True, kw_only=True)
class CheckpointSavedEvent(LogEvent, kind="checkpoint_saved"):
    """Rank 0 finished a checkpoint: it is on disk under its final name."""

    step: int = _field("the step it holds")
    path: str = _field("its directory", default="")
    bytes: int = _field("its size", default=0)
    seconds: float = _field("how long training paused for it, in seconds", default=0.0)
    written_seconds: float = _field("from its begin until it was on the disk, in seconds", default=0.0)


@dataclass(frozen=True, kw_only=True)
class CheckpointSkippedEvent(LogEvent, kind="checkpoint_skipped"):
    """A checkpoint failed its checks and was skipped in favor of an older one."""

    step: int | None = _field("the step in its name or manifest; null when neither can be read", default=None)
    path: str = _field("its directory", default="")


@dataclass(frozen=True, kw_only=True)
class CheckpointFailedEvent(LogEvent, kind="checkpoint_failed"):
    """A checkpoint could not be written; training continues and the next one is tried."""

    step: int | None = _field("the step it would have held", default=None)
    path: str = _field("the intended directory", default="")


@dataclass(frozen=True, kw_only=True)
class CheckpointDroppedEvent(LogEvent, kind="checkpoint_dropped"):
    """A save was in memory only: a newer one took its place there, such as where the disk is slower than the saves."""

    step: int | None = _field("the step it held", default=None)
    path: str = _field("the intended directory", default="")


@dataclass(frozen=True, kw_only=True)
class ScalarsEvent(LogEvent, kind="scalars"):
    """Numbers that the script has logged with `session.log`, sampled."""

    FLOAT_RANGE = (-1e300, 1e300)
    step: int = _field("the step at which they were logged")
    values: Mapping[str, float | None] = _field("the number of each name; null for one that is not finite")


@dataclass(frozen=True, kw_only=True)
class ResumedEvent(LogEvent, kind="resumed"):
    """The round's workers loaded a checkpoint and continue from it."""

    step: int = _field("the step from which training continues")
    from_round: int = _field("the round that wrote the checkpoint", default=0)
    path: str = _field("its directory", default="")
    donor: int | None = _field("the rank that saved the state after the fault; null for a save as usual", default=None)
    steps_saved: int = _field("how far such a state was ahead of the newest checkpoint on the disk", default=0)
    saved_at: float | None = _field(
        "unix time when the state was saved, by the clock of the node that saved it; null when unknown", default=None
    )
    in_processes: bool = _field(
        "true where the state is that of ranks which have kept their process: no checkpoint has it", default=False
    )


@dataclass(frozen=True, kw_only=True)
class PausedEvent(LogEvent, kind="paused"):
    """All workers are paused right after a checkpoint, since a round is expected soon."""

    step: int = _field("the step at which they paused; its checkpoint is on disk")


@dataclass(frozen=True, kw_only=True)
class PauseEndedEvent(LogEvent, kind="pause_ended"):
    """The workers continued by themselves; there is no such line when the next round ended the pause."""

    step: int = _field("the step at which they had paused")
    seconds: float = _field("how long they were paused, in seconds", default=0.0)


@dataclass(frozen=True, kw_only=True)
class StoreUnavailableEvent(LogEvent, kind="store_unavailable"):
    """The rendezvous store does not answer; training continues, and reports to other nodes are delayed."""


@dataclass(frozen=True, kw_only=True)
class StoreAvailableEvent(LogEvent, kind="store_available"):
    """The store answers again."""

    seconds: float = _field("how long it was unavailable, in seconds")


@dataclass(frozen=True, kw_only=True)
class HangSuspectedEvent(LogEvent, kind="hang_suspected"):
    """An agent suspects a hang of its ranks; all nodes gather evidence. Most suspicions clear by themselves."""


@dataclass(frozen=True, kw_only=True)
class HangClearedEvent(LogEvent, kind="hang_cleared"):
    """The suspected group makes progress again, or its workers on this node have ended."""

    seconds: float = _field("how long the suspicion lasted")


@dataclass(frozen=True, kw_only=True)
class HangDetectedEvent(LogEvent, kind="hang_detected"):
    """A hang was confirmed from the reports of all nodes; written by the leader node."""

    cause: str = _field("the `cause` label of `elasticd_hangs_total`")
    nodes: tuple[str, ...] = _field("nodes of the ranks at fault; empty when there is no single cause")
    ranks: tuple[int, ...] = _field("the ranks at fault, in the same order")
    slots: tuple[int, ...] = _field("their slots, in the same order")
    seconds: float = _field("time without progress of any rank")
    action: str = _field("restart; report where a kill may cost more than the wait, and with --on-hang report")


@dataclass(frozen=True, kw_only=True)
class StragglerEvent(LogEvent, kind="straggler"):
    """A rank has been computing longer than its peers for a while; it is only reported."""

    rank: int = _field("the rank that the others wait for")
    ratio: float = _field("duration of its own work, relative to its peers'")


@dataclass(frozen=True, kw_only=True)
class LauncherReadyEvent(LogEvent, kind="launcher_ready"):
    """The way in which this node starts its workers from now on; the reason where it is not the warm launcher."""

    mode: str = _field("warm: forked from a process that has imported torch; cold: each worker imports it")
    seconds: float | None = _field("how long the launcher took to start, in seconds; null when cold", default=None)


@dataclass(frozen=True, kw_only=True)
class StoreExitedEvent(LogEvent, kind="store_exited"):
    """The process that hosts a round's store ended while the round still needed it."""

    pid: int = _field("its process id")
    exit_code: int | None = _field("its exit code; null when a signal ended it", default=None)
    signal: int | None = _field("the signal that ended it; null when it exited", default=None)


@dataclass(frozen=True, kw_only=True)
class GroupEndedEvent(LogEvent, kind="group_ended"):
    """All of this node's processes of a round are gone; the next group may start."""

    seconds: float = _field("from the decision to stop the group, or the last exit, to its end, in seconds")
    survivors: tuple[int, ...] = _field("process ids that survived SIGKILL so far", default=())


@dataclass(frozen=True, kw_only=True)
class ProcessUnkillableEvent(LogEvent, kind="process_unkillable"):
    """A process survived SIGKILL; the agent continues without it and without its slot."""

    pid: int = _field("its process id")
    rank: int | None = _field("its worker's global rank; null for the store process, or when unknown", default=None)
    slot: int | None = _field("its worker's slot, excluded from the next rounds; null likewise", default=None)
    state: str = _field("its state in /proc, mostly D; empty when unknown")
    wchan: str = _field("the kernel function it waits in; empty when unknown")


@dataclass(frozen=True, kw_only=True)
class ProcessReapedEvent(LogEvent, kind="process_reaped"):
    """An unkillable process has ended; its slot is free again."""

    pid: int = _field("its process id")


@dataclass(frozen=True, kw_only=True)
class StopRequestedEvent(LogEvent, kind="stop_requested"):
    """A stop of the job, or of this node's part in it, was requested; `reason` has the given reason."""

    by: str = _field("the signal: SIGTERM, which is also the agent's, SIGINT, ...")
    grace_seconds: float = _field("time until remaining processes are killed, in seconds")


@dataclass(frozen=True, kw_only=True)
class WaitingEvent(LogEvent, kind="waiting"):
    """The job waits, as `reason` says; written by the leader node."""

    nodes: bool = _field("true when it waits for more nodes and nothing runs until they join")


@dataclass(frozen=True, kw_only=True)
class JobEndedEvent(LogEvent, kind="job_ended"):
    """The last line of a job on this node."""

    outcome: str = _field("succeeded, failed or stopped; or left: this node's part ended, the job may continue")
    exit_code: int = _field("exit code of elasticd")
    restarts: int = _field("restarts in all")
    step: int | None = _field("the last step finished; null when none is known", default=None)


@dataclass(frozen=True, kw_only=True)
class AgentStartedEvent(LogEvent, kind="agent_started"):
    """The agent of a node, `elasticd agent`, has started, or was replaced in place by a new version."""

    version: str = _field("elasticd's version")
    pid: int = _field("its process id")
    adopted: int = _field("running runners of an earlier agent")


@dataclass(frozen=True, kw_only=True)
class NodeRegisteredEvent(LogEvent, kind="node_registered"):
    """The node is registered in the store: jobs can be scheduled on it."""

    slots: int = _field("workers it takes at once")


@dataclass(frozen=True, kw_only=True)
class NodeStateEvent(LogEvent, kind="node_state"):
    """The node accepts work, or no longer does; `reason` says why."""

    state: str = _field("ready, cordoned, draining or quarantined")


@dataclass(frozen=True, kw_only=True)
class NodeUnhealthyEvent(LogEvent, kind="node_unhealthy"):
    """A health check fails, and the node gets no work; `reason` says which."""


@dataclass(frozen=True, kw_only=True)
class NodeQuarantinedEvent(LogEvent, kind="node_quarantined"):
    """The node recovered, or jobs failed because of it: it gets no work for a while."""

    seconds: float = _field("for how long, unless it fails again")


@dataclass(frozen=True, kw_only=True)
class NodeHealthyEvent(LogEvent, kind="node_healthy"):
    """The node is healthy (again)."""


@dataclass(frozen=True, kw_only=True)
class AgentReloadedEvent(LogEvent, kind="agent_reloaded"):
    """The agent has reloaded its configuration."""


@dataclass(frozen=True, kw_only=True)
class AgentEndedEvent(LogEvent, kind="agent_ended"):
    """The agent ends in an orderly way, or is about to replace itself. A killed agent writes no event."""

    exit_code: int | None = _field("its exit code; null when it replaces itself", default=None)


@dataclass(frozen=True, kw_only=True)
class RunnerStartedEvent(LogEvent, kind="runner_started"):
    """A job's runner was started on this node."""

    name: str = _field("the job's id")
    number: int = _field("which run of the job")
    slots: tuple[int, ...] = _field("the node's slots that it has")
    pid: int = _field("its process id, or that of its keeper (another user's job)")


@dataclass(frozen=True, kw_only=True)
class RunnerStopRequestedEvent(LogEvent, kind="runner_stop_requested"):
    """A job's runner was requested to stop on this node; `reason` says why."""

    name: str = _field("the job's id")
    number: int = _field("which run of the job")


@dataclass(frozen=True, kw_only=True)
class RunnerEndedEvent(LogEvent, kind="runner_ended"):
    """A job's runner has ended, with all its processes."""

    name: str = _field("the job's id")
    number: int = _field("which run of the job")
    outcome: str = _field("succeeded, failed or refused; left when the job continues elsewhere; lost when unknown")
    exit_code: int | None = _field("its exit code; null when unknown", default=None)


@dataclass(frozen=True, kw_only=True)
class JobScheduledEvent(LogEvent, kind="scheduled"):
    """The scheduler, which runs on this node, decided where a job runs, or why it is pending."""


@dataclass(frozen=True, kw_only=True)
class AuditEvent(LogEvent, kind="audit"):
    """A line of `audit.jsonl` in the agent's logs: a request that changed something, read logs, or was denied."""

    by: str = _field(
        "the caller: a user of the local socket, or a token and its address; an address without a right token"
    )
    action: str = _field("submit, cancel, dump, cordon, drain, uncordon, login, read or denied")
    target: str = _field("the job or node; the request that was denied")
    status: int = _field("the status of the answer")


EVENT_TYPES = tuple(LogEvent.__subclasses__())
"""The kinds in the order of docs/events.md."""

QUIET_KINDS = ("checkpoint_saved", "snapshot", "attached", "can_pause", "scalars")
"""Too frequent or too small for the console."""
WARNING_KINDS = ("checkpoint_failed", "checkpoint_skipped")
"""The reports of workers that the console shows as warnings; the others are information."""


_TYPES_BY_KIND: Mapping[str, type[LogEvent]] = {event_type.kind: event_type for event_type in EVENT_TYPES}
_WORKER_TYPES_BY_KIND = {
    event_type.kind: event_type
    for event_type in (
        CheckpointSavedEvent,
        CheckpointSkippedEvent,
        CheckpointFailedEvent,
        CheckpointDroppedEvent,
        ScalarsEvent,
        ResumedEvent,
        PausedEvent,
        PauseEndedEvent,
    )
}
"""The kinds whose fields are those of the worker event of the same kind, which is checked where it is read."""
_STEP_MAY_BE_UNKNOWN = (CheckpointSkippedEvent, CheckpointFailedEvent, CheckpointDroppedEvent)


def from_worker(reported: WorkerEvent) -> LogEvent | None:
    """The event of a worker's Session as a line of the log; None for kinds that the log has not."""
    event_type = _WORKER_TYPES_BY_KIND.get(reported.kind)
    if event_type is None or (reported.step is None and event_type not in _STEP_MAY_BE_UNKNOWN):
        return None
    own = {"round": reported.round, "mono": reported.mono, "reason": reported.reason, "step": reported.step}
    given = {"written_seconds": reported.extra.get("seconds", 0.0), **reported.extra, **own}
    if event_type is ResumedEvent:
        given["saved_at"] = given.get("saved_at") or None
    if event_type is ScalarsEvent:
        numbers = [(name, value) for name, value in given.get("values", {}).items() if _is_number(value)]
        given["values"] = dict(numbers[:MAX_SCALARS])
    return event_type(**{f.name: given[f.name] for f in fields(event_type) if f.name in given})


def _is_number(value: object) -> bool:
    return value is None or (isinstance(value, (int, float)) and not isinstance(value, bool))


@dataclass(frozen=True, slots=True, kw_only=True)
class _LineHead(Record):
    kind: str
    wall: float
    job: str = ""
    node: str = ""


@dataclass(frozen=True, slots=True)
class LogLine:
    """An event as a reader of the log has it. `wall` is unix time by the clock of `node`."""

    event: LogEvent
    wall: float
    job: str = ""
    node: str = ""


def decode(line: Mapping[str, Any]) -> LogLine | None:
    """One line of a log; None for a kind that this version does not know, and for values that make no sense."""
    try:
        head = _LineHead.from_dict({name: _printable(value) for name, value in line.items()})
        event_type = _TYPES_BY_KIND.get(head.kind)
        if event_type is None:
            return None
        return LogLine(event_type.from_dict(head.unknown), head.wall, head.job, head.node)
    except WireError:
        return None


def _printable(value: object) -> object:
    """Texts without the halves of surrogate pairs that stand for bytes which are not UTF-8."""
    if not isinstance(value, str) or value.isascii():
        return value
    return value.encode("utf-8", "replace").decode()
