"""What can happen to a job, as the event log tells it: the one table of kinds and fields.

docs/events.md is generated from it (`python -m elasticd_agent.telemetry.events`) and a test keeps the two in step.
The format is stable: kinds and fields are added, never renamed or given another meaning, while FORMAT is 1.
Nothing is written here.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any, ClassVar

FORMAT = 1
MAX_LINE = 64 * 1024


def _is(meaning: str, **default: Any) -> Any:
    """A dataclass field with its sentence for docs/events.md."""
    return field(metadata={"meaning": meaning}, **default)


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """What every line carries besides `v`, `kind`, `job`, `node` and `wall`, which the log adds."""

    kind: ClassVar[str]
    round: int = _is("the round's number; 0 before the first one")
    mono: float = _is("CLOCK_MONOTONIC of this node when it happened, in seconds; for one boot of one node only")
    reason: str = _is("one sentence for a person: what happened and why")


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundPublished(Record):
    """A round was agreed on: who takes part from now on."""

    kind: ClassVar[str] = "round_published"
    world_size: int = _is("workers in the round")
    nodes: tuple[str, ...] = _is("ids of the nodes, in rank order")
    restarts: int = _is("restarts of the job so far, this round included")
    cause: str = _is("why there is a new round; the `cause` label of `elasticd_restarts_total`, or start")
    lost: tuple[str, ...] = _is("ids of the nodes that the round before has lost; empty when none was", default=())


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupStarted(Record):
    """This node's workers of a round are running."""

    kind: ClassVar[str] = "group_started"
    ranks: tuple[int, ...] = _is("global ranks of this node's workers, by local rank")
    pids: tuple[int, ...] = _is("their process ids, in the same order")
    warm: bool = _is("true when they were forked by the warm launcher")


@dataclass(frozen=True, slots=True, kw_only=True)
class FirstStep(Record):
    """A worker of the round finished its first optimizer step: the job trains (again)."""

    kind: ClassVar[str] = "first_step"
    step: int = _is("the step that was finished")
    rank: int = _is("the rank seen first")
    start_seconds: float = _is("from the start of the round's workers, in seconds")
    recovery_seconds: float | None = _is("from the fault before it, in seconds; null when there was none", default=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class CaughtUp(Record):
    """After a fault, a hold or a change of nodes a step was finished that is beyond all before: the job goes on."""

    kind: ClassVar[str] = "caught_up"
    step: int = _is("the step that was finished, as the agent counts them")
    seconds: float = _is(
        "what the fault has cost, in seconds: from the last step before it, without waiting for nodes; 0 without one"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerExited(Record):
    """A worker process of this node ended."""

    kind: ClassVar[str] = "worker_exited"
    rank: int = _is("its global rank")
    local_rank: int = _is("its local rank")
    pid: int = _is("its process id")
    exit_code: int | None = _is("what it exited with; null when a signal ended it", default=None)
    signal: int | None = _is("the signal that ended it; null when it exited", default=None)
    asked: bool = _is("true when the agent had told it to stop, or killed it")
    step: int | None = _is("the last step it had finished; null when none is known", default=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointSaved(Record):
    """Rank 0 finished writing a checkpoint: it is on disk under its final name."""

    kind: ClassVar[str] = "checkpoint_saved"
    step: int = _is("the step it holds")
    path: str = _is("its directory")
    bytes: int = _is("its size")
    seconds: float = _is("how long training stood still for it, in seconds")


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointSkipped(Record):
    """A checkpoint could not be trusted and was passed over on the way to an older one."""

    kind: ClassVar[str] = "checkpoint_skipped"
    step: int | None = _is("the step its name or manifest claims; null when neither can be read", default=None)
    path: str = _is("its directory")


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointFailed(Record):
    """A checkpoint could not be written; training goes on and it is tried again."""

    kind: ClassVar[str] = "checkpoint_failed"
    step: int | None = _is("the step it would have held", default=None)
    path: str = _is("where it was to go")


@dataclass(frozen=True, slots=True, kw_only=True)
class Resumed(Record):
    """The round's workers loaded a checkpoint and go on from it."""

    kind: ClassVar[str] = "resumed"
    step: int = _is("the step training goes on from")
    from_round: int = _is("the round that wrote the checkpoint")
    path: str = _is("its directory")


@dataclass(frozen=True, slots=True, kw_only=True)
class Holding(Record):
    """All workers wait right after a checkpoint, for a round that is expected soon."""

    kind: ClassVar[str] = "holding"
    step: int = _is("the step they wait at; its checkpoint is on disk")


@dataclass(frozen=True, slots=True, kw_only=True)
class HoldOver(Record):
    """The workers stopped waiting by themselves; when the next round ends the wait there is no such line."""

    kind: ClassVar[str] = "hold_over"
    step: int = _is("the step they waited at")
    seconds: float = _is("how long they waited, in seconds")


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreAway(Record):
    """The store in which agents meet does not answer; training goes on, and what there is to say to others waits."""

    kind: ClassVar[str] = "store_away"


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreBack(Record):
    """The store answers again."""

    kind: ClassVar[str] = "store_back"
    seconds: float = _is("how long it was away, in seconds")


@dataclass(frozen=True, slots=True, kw_only=True)
class Suspected(Record):
    """An agent suspects that its ranks hang: evidence is taken, the others are asked. Most go on by themselves."""

    kind: ClassVar[str] = "suspected"


@dataclass(frozen=True, slots=True, kw_only=True)
class SuspicionOver(Record):
    """The suspected group goes on."""

    kind: ClassVar[str] = "suspicion_over"
    seconds: float = _is("how long the suspicion lasted")


@dataclass(frozen=True, slots=True, kw_only=True)
class Hung(Record):
    """The group was found hung; written by the node whose agent judged, on what all nodes see."""

    kind: ClassVar[str] = "hung"
    cause: str = _is("the `cause` label of `elasticd_hangs_total`")
    nodes: tuple[str, ...] = _is("nodes of the ranks that are to blame; empty when no single one is")
    ranks: tuple[int, ...] = _is("the ranks that are to blame, in the same order")
    slots: tuple[int, ...] = _is("their slots, in the same order")
    seconds: float = _is("for how long no rank had made progress")
    action: str = _is("restart, or report where --on-hang says so")


@dataclass(frozen=True, slots=True, kw_only=True)
class SlowRank(Record):
    """A rank has been computing longer than its peers for a while; nothing is done about it."""

    kind: ClassVar[str] = "slow_rank"
    rank: int = _is("the rank the others wait for")
    ratio: float = _is("how many times as long as its peers' its own work takes")


@dataclass(frozen=True, slots=True, kw_only=True)
class Launcher(Record):
    """How this node starts its workers from now on, and why when that is not the warm launcher."""

    kind: ClassVar[str] = "launcher"
    mode: str = _is("warm: forked from a process that has torch imported; cold: each worker imports by itself")
    seconds: float | None = _is("how long the launcher took to get ready, in seconds; null when cold", default=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreExited(Record):
    """The process that hosts a round's store ended while the round still needed it."""

    kind: ClassVar[str] = "store_exited"
    pid: int = _is("its process id")
    exit_code: int | None = _is("what it exited with; null when a signal ended it", default=None)
    signal: int | None = _is("the signal that ended it; null when it exited", default=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupGone(Record):
    """Nothing is left of this node's workers of a round; the next group may start."""

    kind: ClassVar[str] = "group_gone"
    seconds: float = _is("from the decision to stop the group, or the last exit, to its end, in seconds")
    survivors: tuple[int, ...] = _is("process ids that would not die in time; empty as a rule", default=())


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessStuck(Record):
    """A process of a round was sent SIGKILL and does not die; the agent goes on without it, and without its slot."""

    kind: ClassVar[str] = "process_stuck"
    pid: int = _is("its process id")
    rank: int | None = _is("its worker's global rank; null for the store, or where it cannot be told", default=None)
    slot: int | None = _is("its worker's slot, left out of the next rounds; null likewise", default=None)
    state: str = _is("its state in /proc, mostly D; empty when unknown")
    wchan: str = _is("where in the kernel it waits; empty when unknown")


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessFreed(Record):
    """A process that was stuck has ended; its slot can be used again."""

    kind: ClassVar[str] = "process_freed"
    pid: int = _is("its process id")


@dataclass(frozen=True, slots=True, kw_only=True)
class StopRequested(Record):
    """Somebody asked the job to stop, or this node to leave it; `reason` has what was said of why."""

    kind: ClassVar[str] = "stop_requested"
    by: str = _is("the signal: SIGTERM, which is also the agent's, SIGINT, ...")
    grace_seconds: float = _is("after how long what is left is killed, in seconds")


@dataclass(frozen=True, slots=True, kw_only=True)
class JobEnded(Record):
    """The last line of a job on this node."""

    kind: ClassVar[str] = "job_ended"
    outcome: str = _is("succeeded, failed or stopped; or left: only this node's part is over, the job may go on")
    exit_code: int = _is("what elasticd exits with")
    restarts: int = _is("restarts in all")
    step: int | None = _is("the last step finished; null when none is known", default=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Waiting(Record):
    """What the job waits for; told by the node whose agent plans."""

    kind: ClassVar[str] = "waiting"
    nodes: bool = _is("for more nodes: nothing runs until they come")


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentStarted(Record):
    """The agent of a node, `elasticd agent`, has started, or has been replaced by a new version in place."""

    kind: ClassVar[str] = "agent_started"
    version: str = _is("elasticd's version")
    pid: int = _is("its process id")
    adopted: int = _is("runners that an earlier one had started, and that go on")


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentJoined(Record):
    """The node's card is in the store: jobs can be placed on it."""

    kind: ClassVar[str] = "agent_joined"
    slots: int = _is("workers it takes at once")


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentState(Record):
    """The node takes work, or does not any more, and why."""

    kind: ClassVar[str] = "agent_state"
    state: str = _is("ready, cordoned, draining or quarantined")


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeUnhealthy(Record):
    """Something is wrong with the node, and it is given no work; the reason says what."""

    kind: ClassVar[str] = "node_unhealthy"


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeQuarantined(Record):
    """What was wrong is over, or jobs failed by this node's doing: it is left out for a while."""

    kind: ClassVar[str] = "node_quarantined"
    seconds: float = _is("for how long, if nothing else happens")


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeHealthy(Record):
    """Nothing is held against the node (any more)."""

    kind: ClassVar[str] = "node_healthy"


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentReloaded(Record):
    """The agent has read its configuration again."""

    kind: ClassVar[str] = "agent_reloaded"


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentEnded(Record):
    """The agent has ended by itself, or is about to replace itself. One that was killed writes nothing."""

    kind: ClassVar[str] = "agent_ended"
    exit_code: int | None = _is("what it exits with; null when it replaces itself", default=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunnerStarted(Record):
    """A job's runner was started on this node."""

    kind: ClassVar[str] = "runner_started"
    name: str = _is("the job's id")
    number: int = _is("which run of the job")
    slots: tuple[int, ...] = _is("the node's slots that it has")
    pid: int = _is("its process id")


@dataclass(frozen=True, slots=True, kw_only=True)
class RunnerAsked(Record):
    """A job's runner was asked to leave this node, and why."""

    kind: ClassVar[str] = "runner_asked"
    name: str = _is("the job's id")
    number: int = _is("which run of the job")


@dataclass(frozen=True, slots=True, kw_only=True)
class RunnerEnded(Record):
    """A job's runner has ended, and nothing of it is left."""

    kind: ClassVar[str] = "runner_ended"
    name: str = _is("the job's id")
    number: int = _is("which run of the job")
    outcome: str = _is("succeeded, failed or refused; left when the job is not over; lost when it could not say")
    exit_code: int | None = _is("what it exited with; null when it could not say", default=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Placed(Record):
    """This node's agent, which places jobs at the time, has decided where a job runs, or why it waits."""

    kind: ClassVar[str] = "placed"


RECORDS: tuple[type[Record], ...] = (
    RoundPublished, GroupStarted, FirstStep, CaughtUp, WorkerExited, CheckpointSaved, CheckpointSkipped,
    CheckpointFailed, Resumed, Holding, HoldOver, StoreAway, StoreBack, Suspected, SuspicionOver, Hung, SlowRank,
    Launcher, StoreExited, GroupGone, ProcessStuck, ProcessFreed, StopRequested, Waiting, JobEnded, AgentStarted,
    AgentJoined, AgentState, NodeUnhealthy, NodeQuarantined, NodeHealthy, AgentReloaded, AgentEnded, RunnerStarted,
    RunnerAsked, RunnerEnded, Placed,
)  # fmt: skip


def document() -> str:
    """docs/events.md, whole."""
    rows = [
        "| field | type | meaning |", "|---|---|---|",
        f"| `v` | int | version of the format: {FORMAT} |",
        "| `kind` | str | what happened: one of the kinds below |",
        "| `job` | str | the job's id |",
        "| `node` | str | the id of the node whose agent wrote the line |",
        "| `wall` | float | unix time when it happened, in seconds, by this node's clock |",
        *(_row(f) for f in fields(Record)),
        f"| `cut` | bool | only there, and true, when something was shortened to stay below {MAX_LINE // 1024} KiB |",
    ]  # fmt: skip
    parts = [_INTRODUCTION, "## Every line", "\n".join(rows), "## Kinds"]
    common = {f.name for f in fields(Record)}
    for kind in RECORDS:
        own = [_row(f) for f in fields(kind) if f.name not in common]
        parts += [f"### {kind.kind}", (kind.__doc__ or "").strip()]
        parts += ["\n".join(["| field | type | meaning |", "|---|---|---|", *own])]
    return "\n\n".join(parts) + "\n"


def _row(f: Any) -> str:
    kind = str(f.type).replace("tuple[", "list[").replace(", ...]", "]").replace(" | None", " or null")
    return f"| `{f.name}` | {kind} | {f.metadata['meaning']} |"


_INTRODUCTION = """# The event log

<!-- Written by `make docs`: change agents/elasticd_agent/telemetry/events.py. -->

`elasticd run --event-log FILE ...` appends one JSON object a line to FILE (UTF-8, mode 0600 when elasticd creates it).
Each line is written when the thing happens, by one write to a file opened for appending, so a reader may follow the
file while the job runs.

- The format follows semantic versioning: kinds and fields may be added, so ignore those you do not know. `v` changes
  when the meaning of an existing one does.
- Measure durations with `mono`, between lines of one node; `wall` may jump when the machine's clock is set.
- A full disk never stops the job: lines that cannot be written are counted (`elasticd_event_log_lines_lost_total`), one
  warning goes to stderr, and a line cut short by the full disk is followed by a newline, so skip lines that are not
  JSON.
- FILE may be a named pipe with a reader; a reader that stalls loses lines, not the job's time."""


if __name__ == "__main__":
    print(document(), end="")
