"""The kinds and fields of the event log: what can happen to a job, and to a node's agent.

docs/events.md is generated from it (`python -m elasticd_agent.telemetry.events`) and a test keeps the two in step.
The format is stable: kinds and fields are added, never renamed or given another meaning, while FORMAT is 1.
Nothing is written here.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

from elasticd.heartbeat.worker_events import WorkerEvent

FORMAT_VERSION = 1
MAX_LINE_BYTES = 64 * 1024


def _field(meaning: str, **default: Any) -> Any:
    """A dataclass field with its sentence for docs/events.md."""
    return field(metadata={"meaning": meaning}, **default)


@dataclass(frozen=True, slots=True, kw_only=True)
class LogEvent:
    """The fields of every line, besides `v`, `kind`, `job`, `node` and `wall`, which the log adds."""

    kind: ClassVar[str]
    round: int = _field("the round's number; 0 before the first one")
    mono: float = _field("CLOCK_MONOTONIC of this node when it happened, in seconds; for one boot of one node only")
    reason: str = _field("one sentence: what happened and why")


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundPublishedEvent(LogEvent):
    """A round was agreed on: its members from now on."""

    kind: ClassVar[str] = "round_published"
    world_size: int = _field("workers in the round")
    nodes: tuple[str, ...] = _field("ids of the nodes, in rank order")
    restarts: int = _field("restarts of the job so far, this round included")
    cause: str = _field("why there is a new round; the `cause` label of `elasticd_restarts_total`, or start")
    lost: tuple[str, ...] = _field("ids of the nodes lost since the previous round", default=())


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupStartedEvent(LogEvent):
    """This node's workers of a round are running."""

    kind: ClassVar[str] = "group_started"
    ranks: tuple[int, ...] = _field("global ranks of this node's workers, by local rank")
    pids: tuple[int, ...] = _field("their process ids, in the same order")
    warm: bool = _field("true when they were forked by the warm launcher")


@dataclass(frozen=True, slots=True, kw_only=True)
class FirstStepEvent(LogEvent):
    """A worker of the round finished its first optimizer step: the job trains (again)."""

    kind: ClassVar[str] = "first_step"
    step: int = _field("the step that was finished")
    rank: int = _field("the rank seen first")
    start_seconds: float = _field("from the start of the round's workers, in seconds")
    recovery_seconds: float | None = _field(
        "from the fault before it, in seconds; null when there was none", default=None
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkRecoveredEvent(LogEvent):
    """After a fault, a pause or a change of nodes, a step beyond all earlier ones was finished: work is recovered."""

    kind: ClassVar[str] = "work_recovered"
    step: int = _field("the step that was finished, as the agent counts them")
    seconds: float = _field(
        "what the fault cost, in seconds: from the last step before it, without waiting for nodes; 0 without a fault"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerExitedEvent(LogEvent):
    """A worker process of this node ended."""

    kind: ClassVar[str] = "worker_exited"
    rank: int = _field("its global rank")
    local_rank: int = _field("its local rank")
    pid: int = _field("its process id")
    exit_code: int | None = _field("its exit code; null when a signal ended it", default=None)
    signal: int | None = _field("the signal that ended it; null when it exited", default=None)
    requested: bool = _field("true when the agent had stopped or killed it")
    step: int | None = _field("the last step it had finished; null when none is known", default=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointSavedEvent(LogEvent):
    """Rank 0 finished a checkpoint: it is on disk under its final name."""

    kind: ClassVar[str] = "checkpoint_saved"
    step: int = _field("the step it holds")
    path: str = _field("its directory")
    bytes: int = _field("its size")
    seconds: float = _field("how long training paused for it, in seconds")


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointSkippedEvent(LogEvent):
    """A checkpoint failed its checks and was skipped in favor of an older one."""

    kind: ClassVar[str] = "checkpoint_skipped"
    step: int | None = _field("the step in its name or manifest; null when neither can be read", default=None)
    path: str = _field("its directory")


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointFailedEvent(LogEvent):
    """A checkpoint could not be written; training continues and the next one is tried."""

    kind: ClassVar[str] = "checkpoint_failed"
    step: int | None = _field("the step it would have held", default=None)
    path: str = _field("the intended directory")


@dataclass(frozen=True, slots=True, kw_only=True)
class ResumedEvent(LogEvent):
    """The round's workers loaded a checkpoint and continue from it."""

    kind: ClassVar[str] = "resumed"
    step: int = _field("the step from which training continues")
    from_round: int = _field("the round that wrote the checkpoint")
    path: str = _field("its directory")


@dataclass(frozen=True, slots=True, kw_only=True)
class PausedEvent(LogEvent):
    """All workers are paused right after a checkpoint, since a round is expected soon."""

    kind: ClassVar[str] = "paused"
    step: int = _field("the step at which they paused; its checkpoint is on disk")


@dataclass(frozen=True, slots=True, kw_only=True)
class PauseEndedEvent(LogEvent):
    """The workers continued by themselves; there is no such line when the next round ended the pause."""

    kind: ClassVar[str] = "pause_ended"
    step: int = _field("the step at which they had paused")
    seconds: float = _field("how long they were paused, in seconds")


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreUnavailableEvent(LogEvent):
    """The rendezvous store does not answer; training continues, and reports to other nodes are delayed."""

    kind: ClassVar[str] = "store_unavailable"


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreAvailableEvent(LogEvent):
    """The store answers again."""

    kind: ClassVar[str] = "store_available"
    seconds: float = _field("how long it was unavailable, in seconds")


@dataclass(frozen=True, slots=True, kw_only=True)
class HangSuspectedEvent(LogEvent):
    """An agent suspects a hang of its ranks; all nodes gather evidence. Most suspicions clear by themselves."""

    kind: ClassVar[str] = "hang_suspected"


@dataclass(frozen=True, slots=True, kw_only=True)
class HangClearedEvent(LogEvent):
    """The suspected group makes progress again."""

    kind: ClassVar[str] = "hang_cleared"
    seconds: float = _field("how long the suspicion lasted")


@dataclass(frozen=True, slots=True, kw_only=True)
class HangDetectedEvent(LogEvent):
    """A hang was confirmed from the reports of all nodes; written by the leader node."""

    kind: ClassVar[str] = "hang_detected"
    cause: str = _field("the `cause` label of `elasticd_hangs_total`")
    nodes: tuple[str, ...] = _field("nodes of the ranks at fault; empty when there is no single cause")
    ranks: tuple[int, ...] = _field("the ranks at fault, in the same order")
    slots: tuple[int, ...] = _field("their slots, in the same order")
    seconds: float = _field("time without progress of any rank")
    action: str = _field("restart, or report with --on-hang report")


@dataclass(frozen=True, slots=True, kw_only=True)
class StragglerEvent(LogEvent):
    """A rank has been computing longer than its peers for a while; it is only reported."""

    kind: ClassVar[str] = "straggler"
    rank: int = _field("the rank that the others wait for")
    ratio: float = _field("duration of its own work, relative to its peers'")


@dataclass(frozen=True, slots=True, kw_only=True)
class LauncherReadyEvent(LogEvent):
    """How this node starts its workers from now on, and the reason where that is not the warm launcher."""

    kind: ClassVar[str] = "launcher_ready"
    mode: str = _field("warm: forked from a process that has imported torch; cold: each worker imports it")
    seconds: float | None = _field("how long the launcher took to start, in seconds; null when cold", default=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreExitedEvent(LogEvent):
    """The process that hosts a round's store ended while the round still needed it."""

    kind: ClassVar[str] = "store_exited"
    pid: int = _field("its process id")
    exit_code: int | None = _field("its exit code; null when a signal ended it", default=None)
    signal: int | None = _field("the signal that ended it; null when it exited", default=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupEndedEvent(LogEvent):
    """All of this node's processes of a round are gone; the next group may start."""

    kind: ClassVar[str] = "group_ended"
    seconds: float = _field("from the decision to stop the group, or the last exit, to its end, in seconds")
    survivors: tuple[int, ...] = _field("process ids that survived SIGKILL so far", default=())


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessUnkillableEvent(LogEvent):
    """A process survived SIGKILL; the agent continues without it and without its slot."""

    kind: ClassVar[str] = "process_unkillable"
    pid: int = _field("its process id")
    rank: int | None = _field("its worker's global rank; null for the store process, or when unknown", default=None)
    slot: int | None = _field("its worker's slot, excluded from the next rounds; null likewise", default=None)
    state: str = _field("its state in /proc, mostly D; empty when unknown")
    wchan: str = _field("the kernel function it waits in; empty when unknown")


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessReapedEvent(LogEvent):
    """An unkillable process has ended; its slot is free again."""

    kind: ClassVar[str] = "process_reaped"
    pid: int = _field("its process id")


@dataclass(frozen=True, slots=True, kw_only=True)
class StopRequestedEvent(LogEvent):
    """A stop of the job, or of this node's part in it, was requested; `reason` has the given reason."""

    kind: ClassVar[str] = "stop_requested"
    by: str = _field("the signal: SIGTERM, which is also the agent's, SIGINT, ...")
    grace_seconds: float = _field("time until remaining processes are killed, in seconds")


@dataclass(frozen=True, slots=True, kw_only=True)
class JobEndedEvent(LogEvent):
    """The last line of a job on this node."""

    kind: ClassVar[str] = "job_ended"
    outcome: str = _field("succeeded, failed or stopped; or left: this node's part ended, the job may continue")
    exit_code: int = _field("exit code of elasticd")
    restarts: int = _field("restarts in all")
    step: int | None = _field("the last step finished; null when none is known", default=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class WaitingEvent(LogEvent):
    """The job waits, as `reason` says; written by the leader node."""

    kind: ClassVar[str] = "waiting"
    nodes: bool = _field("true when it waits for more nodes and nothing runs until they join")


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentStartedEvent(LogEvent):
    """The agent of a node, `elasticd agent`, has started, or was replaced in place by a new version."""

    kind: ClassVar[str] = "agent_started"
    version: str = _field("elasticd's version")
    pid: int = _field("its process id")
    adopted: int = _field("running runners of an earlier agent")


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeRegisteredEvent(LogEvent):
    """The node is registered in the store: jobs can be scheduled on it."""

    kind: ClassVar[str] = "node_registered"
    slots: int = _field("workers it takes at once")


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeStateEvent(LogEvent):
    """The node accepts work, or no longer does; `reason` says why."""

    kind: ClassVar[str] = "node_state"
    state: str = _field("ready, cordoned, draining or quarantined")


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeUnhealthyEvent(LogEvent):
    """A health check fails, and the node gets no work; `reason` says which."""

    kind: ClassVar[str] = "node_unhealthy"


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeQuarantinedEvent(LogEvent):
    """The node recovered, or jobs failed because of it: it gets no work for a while."""

    kind: ClassVar[str] = "node_quarantined"
    seconds: float = _field("for how long, unless it fails again")


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeHealthyEvent(LogEvent):
    """The node is healthy (again)."""

    kind: ClassVar[str] = "node_healthy"


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentReloadedEvent(LogEvent):
    """The agent has reloaded its configuration."""

    kind: ClassVar[str] = "agent_reloaded"


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentEndedEvent(LogEvent):
    """The agent ends in an orderly way, or is about to replace itself. A killed agent writes no event."""

    kind: ClassVar[str] = "agent_ended"
    exit_code: int | None = _field("its exit code; null when it replaces itself", default=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunnerStartedEvent(LogEvent):
    """A job's runner was started on this node."""

    kind: ClassVar[str] = "runner_started"
    name: str = _field("the job's id")
    number: int = _field("which run of the job")
    slots: tuple[int, ...] = _field("the node's slots that it has")
    pid: int = _field("its process id")


@dataclass(frozen=True, slots=True, kw_only=True)
class RunnerStopRequestedEvent(LogEvent):
    """A job's runner was requested to stop on this node; `reason` says why."""

    kind: ClassVar[str] = "runner_stop_requested"
    name: str = _field("the job's id")
    number: int = _field("which run of the job")


@dataclass(frozen=True, slots=True, kw_only=True)
class RunnerEndedEvent(LogEvent):
    """A job's runner has ended, with all its processes."""

    kind: ClassVar[str] = "runner_ended"
    name: str = _field("the job's id")
    number: int = _field("which run of the job")
    outcome: str = _field("succeeded, failed or refused; left when the job continues elsewhere; lost when unknown")
    exit_code: int | None = _field("its exit code; null when unknown", default=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class JobScheduledEvent(LogEvent):
    """The scheduler, which runs on this node, decided where a job runs, or why it is pending."""

    kind: ClassVar[str] = "scheduled"


EVENT_TYPES: tuple[type[LogEvent], ...] = (
    RoundPublishedEvent, GroupStartedEvent, FirstStepEvent, WorkRecoveredEvent, WorkerExitedEvent,
    CheckpointSavedEvent, CheckpointSkippedEvent,
    CheckpointFailedEvent, ResumedEvent, PausedEvent, PauseEndedEvent, StoreUnavailableEvent, StoreAvailableEvent,
    HangSuspectedEvent, HangClearedEvent, HangDetectedEvent, StragglerEvent,
    LauncherReadyEvent, StoreExitedEvent, GroupEndedEvent, ProcessUnkillableEvent, ProcessReapedEvent,
    StopRequestedEvent, WaitingEvent, JobEndedEvent, AgentStartedEvent,
    NodeRegisteredEvent, NodeStateEvent, NodeUnhealthyEvent, NodeQuarantinedEvent, NodeHealthyEvent,
    AgentReloadedEvent, AgentEndedEvent, RunnerStartedEvent,
    RunnerStopRequestedEvent, RunnerEndedEvent, JobScheduledEvent,
)  # fmt: skip

QUIET_KINDS = ("checkpoint_saved", "attached", "can_pause")
"""Too frequent or too small for the console."""
WARNING_KINDS = ("checkpoint_failed", "checkpoint_skipped")


def from_worker(note: WorkerEvent) -> LogEvent | None:
    """The event of a worker's Session as a line of the log; None for kinds that the log has not."""
    known: dict[str, Any] = {"round": note.round, "mono": note.mono, "reason": note.reason}
    path, seconds = str(note.extra.get("path", "")), float(note.extra.get("seconds", 0.0))
    match note.kind:
        case "checkpoint_saved" if note.step is not None:
            size = int(note.extra.get("bytes", 0))
            return CheckpointSavedEvent(**known, step=note.step, path=path, bytes=size, seconds=seconds)
        case "checkpoint_failed":
            return CheckpointFailedEvent(**known, step=note.step, path=path)
        case "checkpoint_skipped":
            return CheckpointSkippedEvent(**known, step=note.step, path=path)
        case "resumed" if note.step is not None:
            origin = int(note.extra.get("from_round", 0))
            return ResumedEvent(**known, step=note.step, from_round=origin, path=path)
        case "paused" if note.step is not None:
            return PausedEvent(**known, step=note.step)
        case "pause_ended" if note.step is not None:
            return PauseEndedEvent(**known, step=note.step, seconds=seconds)
    return None
