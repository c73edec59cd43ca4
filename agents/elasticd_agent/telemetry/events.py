"""What can happen to a job, as the event log tells it: the one table of kinds and fields.

docs/events.md is generated from it (`python -m elasticd_agent.telemetry.events`) and a test keeps the two in step.
The format is stable: kinds and fields are added, never renamed or given another meaning, while FORMAT is 1.
Nothing is written here.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

FORMAT_VERSION = 1
MAX_LINE_BYTES = 64 * 1024


def _field(meaning: str, **default: Any) -> Any:
    """A dataclass field with its sentence for docs/events.md."""
    return field(metadata={"meaning": meaning}, **default)


@dataclass(frozen=True, slots=True, kw_only=True)
class LogEvent:
    """What every line carries besides `v`, `kind`, `job`, `node` and `wall`, which the log adds."""

    kind: ClassVar[str]
    round: int = _field("the round's number; 0 before the first one")
    mono: float = _field("CLOCK_MONOTONIC of this node when it happened, in seconds; for one boot of one node only")
    reason: str = _field("one sentence for a person: what happened and why")


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundPublishedEvent(LogEvent):
    """A round was agreed on: who takes part from now on."""

    kind: ClassVar[str] = "round_published"
    world_size: int = _field("workers in the round")
    nodes: tuple[str, ...] = _field("ids of the nodes, in rank order")
    restarts: int = _field("restarts of the job so far, this round included")
    cause: str = _field("why there is a new round; the `cause` label of `elasticd_restarts_total`, or start")
    lost: tuple[str, ...] = _field("ids of the nodes that the round before has lost; empty when none was", default=())


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
    """After a fault, a hold or a change of nodes a step was finished that is beyond all before: the job goes on."""

    kind: ClassVar[str] = "caught_up"
    step: int = _field("the step that was finished, as the agent counts them")
    seconds: float = _field(
        "what the fault has cost, in seconds: from the last step before it, without waiting for nodes; 0 without one"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerExitedEvent(LogEvent):
    """A worker process of this node ended."""

    kind: ClassVar[str] = "worker_exited"
    rank: int = _field("its global rank")
    local_rank: int = _field("its local rank")
    pid: int = _field("its process id")
    exit_code: int | None = _field("what it exited with; null when a signal ended it", default=None)
    signal: int | None = _field("the signal that ended it; null when it exited", default=None)
    asked: bool = _field("true when the agent had told it to stop, or killed it")
    step: int | None = _field("the last step it had finished; null when none is known", default=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointSavedEvent(LogEvent):
    """Rank 0 finished writing a checkpoint: it is on disk under its final name."""

    kind: ClassVar[str] = "checkpoint_saved"
    step: int = _field("the step it holds")
    path: str = _field("its directory")
    bytes: int = _field("its size")
    seconds: float = _field("how long training stood still for it, in seconds")


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointSkippedEvent(LogEvent):
    """A checkpoint could not be trusted and was passed over on the way to an older one."""

    kind: ClassVar[str] = "checkpoint_skipped"
    step: int | None = _field("the step its name or manifest claims; null when neither can be read", default=None)
    path: str = _field("its directory")


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointFailedEvent(LogEvent):
    """A checkpoint could not be written; training goes on and it is tried again."""

    kind: ClassVar[str] = "checkpoint_failed"
    step: int | None = _field("the step it would have held", default=None)
    path: str = _field("where it was to go")


@dataclass(frozen=True, slots=True, kw_only=True)
class ResumedEvent(LogEvent):
    """The round's workers loaded a checkpoint and go on from it."""

    kind: ClassVar[str] = "resumed"
    step: int = _field("the step training goes on from")
    from_round: int = _field("the round that wrote the checkpoint")
    path: str = _field("its directory")


@dataclass(frozen=True, slots=True, kw_only=True)
class PausedEvent(LogEvent):
    """All workers wait right after a checkpoint, for a round that is expected soon."""

    kind: ClassVar[str] = "holding"
    step: int = _field("the step they wait at; its checkpoint is on disk")


@dataclass(frozen=True, slots=True, kw_only=True)
class PauseEndedEvent(LogEvent):
    """The workers stopped waiting by themselves; when the next round ends the wait there is no such line."""

    kind: ClassVar[str] = "hold_over"
    step: int = _field("the step they waited at")
    seconds: float = _field("how long they waited, in seconds")


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreUnavailableEvent(LogEvent):
    """The store in which agents meet does not answer; training goes on, and what there is to say to others waits."""

    kind: ClassVar[str] = "store_away"


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreAvailableEvent(LogEvent):
    """The store answers again."""

    kind: ClassVar[str] = "store_back"
    seconds: float = _field("how long it was away, in seconds")


@dataclass(frozen=True, slots=True, kw_only=True)
class HangSuspectedEvent(LogEvent):
    """An agent suspects that its ranks hang: evidence is taken, the others are asked. Most go on by themselves."""

    kind: ClassVar[str] = "suspected"


@dataclass(frozen=True, slots=True, kw_only=True)
class HangClearedEvent(LogEvent):
    """The suspected group goes on."""

    kind: ClassVar[str] = "suspicion_over"
    seconds: float = _field("how long the suspicion lasted")


@dataclass(frozen=True, slots=True, kw_only=True)
class HangDetectedEvent(LogEvent):
    """The group was found hung; written by the node whose agent judged, on what all nodes see."""

    kind: ClassVar[str] = "hung"
    cause: str = _field("the `cause` label of `elasticd_hangs_total`")
    nodes: tuple[str, ...] = _field("nodes of the ranks that are to blame; empty when no single one is")
    ranks: tuple[int, ...] = _field("the ranks that are to blame, in the same order")
    slots: tuple[int, ...] = _field("their slots, in the same order")
    seconds: float = _field("for how long no rank had made progress")
    action: str = _field("restart, or report where --on-hang says so")


@dataclass(frozen=True, slots=True, kw_only=True)
class StragglerEvent(LogEvent):
    """A rank has been computing longer than its peers for a while; nothing is done about it."""

    kind: ClassVar[str] = "slow_rank"
    rank: int = _field("the rank the others wait for")
    ratio: float = _field("how many times as long as its peers' its own work takes")


@dataclass(frozen=True, slots=True, kw_only=True)
class LauncherReadyEvent(LogEvent):
    """How this node starts its workers from now on, and why when that is not the warm launcher."""

    kind: ClassVar[str] = "launcher"
    mode: str = _field("warm: forked from a process that has torch imported; cold: each worker imports by itself")
    seconds: float | None = _field("how long the launcher took to get ready, in seconds; null when cold", default=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreExitedEvent(LogEvent):
    """The process that hosts a round's store ended while the round still needed it."""

    kind: ClassVar[str] = "store_exited"
    pid: int = _field("its process id")
    exit_code: int | None = _field("what it exited with; null when a signal ended it", default=None)
    signal: int | None = _field("the signal that ended it; null when it exited", default=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupEndedEvent(LogEvent):
    """Nothing is left of this node's workers of a round; the next group may start."""

    kind: ClassVar[str] = "group_gone"
    seconds: float = _field("from the decision to stop the group, or the last exit, to its end, in seconds")
    survivors: tuple[int, ...] = _field("process ids that would not die in time; empty as a rule", default=())


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessUnkillableEvent(LogEvent):
    """A process of a round was sent SIGKILL and does not die; the agent goes on without it, and without its slot."""

    kind: ClassVar[str] = "process_stuck"
    pid: int = _field("its process id")
    rank: int | None = _field("its worker's global rank; null for the store, or where it cannot be told", default=None)
    slot: int | None = _field("its worker's slot, left out of the next rounds; null likewise", default=None)
    state: str = _field("its state in /proc, mostly D; empty when unknown")
    wchan: str = _field("where in the kernel it waits; empty when unknown")


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessReapedEvent(LogEvent):
    """A process that was stuck has ended; its slot can be used again."""

    kind: ClassVar[str] = "process_freed"
    pid: int = _field("its process id")


@dataclass(frozen=True, slots=True, kw_only=True)
class StopRequestedEvent(LogEvent):
    """Somebody asked the job to stop, or this node to leave it; `reason` has what was said of why."""

    kind: ClassVar[str] = "stop_requested"
    by: str = _field("the signal: SIGTERM, which is also the agent's, SIGINT, ...")
    grace_seconds: float = _field("after how long what is left is killed, in seconds")


@dataclass(frozen=True, slots=True, kw_only=True)
class JobEndedEvent(LogEvent):
    """The last line of a job on this node."""

    kind: ClassVar[str] = "job_ended"
    outcome: str = _field("succeeded, failed or stopped; or left: only this node's part is over, the job may go on")
    exit_code: int = _field("what elasticd exits with")
    restarts: int = _field("restarts in all")
    step: int | None = _field("the last step finished; null when none is known", default=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class WaitingEvent(LogEvent):
    """What the job waits for; told by the node whose agent plans."""

    kind: ClassVar[str] = "waiting"
    nodes: bool = _field("for more nodes: nothing runs until they come")


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentStartedEvent(LogEvent):
    """The agent of a node, `elasticd agent`, has started, or has been replaced by a new version in place."""

    kind: ClassVar[str] = "agent_started"
    version: str = _field("elasticd's version")
    pid: int = _field("its process id")
    adopted: int = _field("runners that an earlier one had started, and that go on")


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeRegisteredEvent(LogEvent):
    """The node's card is in the store: jobs can be placed on it."""

    kind: ClassVar[str] = "agent_joined"
    slots: int = _field("workers it takes at once")


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeStateEvent(LogEvent):
    """The node takes work, or does not any more, and why."""

    kind: ClassVar[str] = "agent_state"
    state: str = _field("ready, cordoned, draining or quarantined")


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeUnhealthyEvent(LogEvent):
    """Something is wrong with the node, and it is given no work; the reason says what."""

    kind: ClassVar[str] = "node_unhealthy"


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeQuarantinedEvent(LogEvent):
    """What was wrong is over, or jobs failed by this node's doing: it is left out for a while."""

    kind: ClassVar[str] = "node_quarantined"
    seconds: float = _field("for how long, if nothing else happens")


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeHealthyEvent(LogEvent):
    """Nothing is held against the node (any more)."""

    kind: ClassVar[str] = "node_healthy"


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentReloadedEvent(LogEvent):
    """The agent has read its configuration again."""

    kind: ClassVar[str] = "agent_reloaded"


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentEndedEvent(LogEvent):
    """The agent has ended by itself, or is about to replace itself. One that was killed writes nothing."""

    kind: ClassVar[str] = "agent_ended"
    exit_code: int | None = _field("what it exits with; null when it replaces itself", default=None)


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
    """A job's runner was asked to leave this node, and why."""

    kind: ClassVar[str] = "runner_asked"
    name: str = _field("the job's id")
    number: int = _field("which run of the job")


@dataclass(frozen=True, slots=True, kw_only=True)
class RunnerEndedEvent(LogEvent):
    """A job's runner has ended, and nothing of it is left."""

    kind: ClassVar[str] = "runner_ended"
    name: str = _field("the job's id")
    number: int = _field("which run of the job")
    outcome: str = _field("succeeded, failed or refused; left when the job is not over; lost when it could not say")
    exit_code: int | None = _field("what it exited with; null when it could not say", default=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class JobScheduledEvent(LogEvent):
    """This node's agent, which places jobs at the time, has decided where a job runs, or why it waits."""

    kind: ClassVar[str] = "placed"


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
