"""Pure: `step(phase, event, rules) -> (phase, actions)`, the reaction of an agent to every event of its group.

Every transition is in this module, can be replayed, and is checked against TRANSITIONS. Membership is `plan`'s
decision. An event that is stale, repeated or about another round changes nothing: an event of a group counts only in
that group's round.

Three rules keep an agent safe in any order of events.
- One group at a time. Running is left for Stopping only by an action that ends the group, and Stopping is left by
  GroupEnded. So the group of the next Round is started when no process of the last one can still train (dead, or parked
  at its entry).
- Every wait has a deadline: Settling and Flushing have their own, a stop has the user's grace period, and GroupEnded
  follows every kill, since the owner answers with it or its loss does.
- The reason goes with the action. Each KillGroup, StopGroup, Failure and Leave carries the sentence that the log, the
  Round and the person will see.

Which failure is reported is decided in Settling. In a collective, one dying rank makes all others raise within
milliseconds, and their exits may be reaped first. An exit that may be secondary (a lost peer) therefore waits for one
that names the cause; ranks that fail with the same error before the first step are one shared failure of the script,
which no restart would mend.
"""

from __future__ import annotations

import math
from dataclasses import replace

from elasticd_agent.job.exit_cause import (
    describe_exit,
    describe_peer_loss,
    follows_peer_failure,
    has_external_cause,
    is_user_error,
    repeat_key,
    shareable_error,
)
from elasticd_agent.model.job import REQUEUE_EXIT_CODE
from elasticd_agent.model.messages import (
    Action,
    Ended,
    Event,
    FirstStep,
    Flush,
    Flushed,
    Flushing,
    FlushStarted,
    GroupEnded,
    Joining,
    KillGroup,
    Leave,
    PeerLost,
    PendingStop,
    Phase,
    ReportDone,
    ReportFailure,
    ReportLeaving,
    RoundPublished,
    Running,
    SetTimer,
    Settling,
    StartFailed,
    StartGroup,
    StateMachineRules,
    StopForced,
    StopGroup,
    Stopping,
    StopRequested,
    StoreAbandoned,
    StoreExited,
    TimerExpired,
    WorkerExited,
)
from elasticd_agent.model.records import SHARED_ERROR_KINDS, Failure, Round, same_error_wait_s

Transition = tuple[Phase, list[Action]]

ROOT_CAUSE_EXIT_WAIT_S = 3.0
"""A secondary failure may be reported so long before its root cause: a process closes its connections before it has
exited, and a Python that raised may have a last file to write."""
MULTI_NODE_EXIT_WAIT_S = 0.15
"""The same with several nodes: another node reports the root cause itself, or is dead and detected as such."""

PAUSE_BEFORE_LEAVE_S = 30.0
"""The job pauses for a checkpoint so long before the end of a node that leaves, where too few nodes would remain, but
no earlier than after half of that node's time. Rank 0 may see the request 10 s late, at its next decision point, and
has to write the checkpoint. A node alone that has no next round by then stops its group."""

LAST_WRITE_S, LAST_WRITE_S_PER_BYTE, LAST_WRITE_OF_STOP_S = 30.0, 20e-9, 6.0
"""The time that the end of a job waits for the checkpoint of its last step. A large state goes to a disk that takes
50 MB/s at least; a service manager gives a stop little time."""

# For each phase, the phases that may follow, and the event that ends it. docs/states.md is generated from this.
TRANSITIONS: dict[type[Phase], tuple[tuple[type[Phase], ...], str]] = {
    Joining: ((Running, Flushing), "a Round numbered above the last one; after a stop, its deadline"),
    Running: (
        (Settling, Stopping, Joining),
        "exits of its workers or its store, a stop, a newer Round (which also ends a hung group)",
    ),
    Settling: ((Stopping, Joining), "the other workers' exits, or its own deadline"),
    Stopping: ((Joining, Running, Flushing), "GroupEnded, which follows every KillGroup and StopGroup"),
    Flushing: ((Ended,), "the end of the write, its own deadline, or a stop"),
    Ended: ((), "nothing"),
}


def step(phase: Phase, event: Event, rules: StateMachineRules) -> Transition:
    """The phase after `event`, and the actions that follow, in this order.

    Raises AssertionError for a transition that TRANSITIONS does not allow: a defect of this module, never of the input.
    """
    after, actions = _step(phase, event, rules)
    if type(after) is not type(phase) and type(after) not in TRANSITIONS[type(phase)][0]:
        raise AssertionError(f"illegal move from {phase} to {after} on {event}")
    return after, actions


def _step(phase: Phase, event: Event, rules: StateMachineRules) -> Transition:
    if isinstance(event, PeerLost):
        if not has_external_cause(event.exit):
            return phase, []  # its own failure: it ends after a while
        event = event.exit
    match phase:
        case Joining():
            return _joining(phase, event, rules)
        case Running():
            after, actions = _running(phase, event, rules)
            if phase.stop is not None and isinstance(after, Stopping) and after.stop is None:
                after = replace(after, stop=phase.stop)
            return after, actions
        case Settling():
            return _settling(phase, event, rules)
        case Stopping():
            return _stopping(phase, event, rules)
        case Flushing():
            return _flushing(phase, event)
        case Ended():
            return phase, []


def _joining(phase: Joining, event: Event, rules: StateMachineRules) -> Transition:
    """The agent has no group and waits for a Round above `phase.past_round`."""
    match event:
        case RoundPublished(r) if r.number > phase.past_round and r.terminal:
            return _leave_after_final_round(r)
        case RoundPublished(r) if r.number > phase.past_round and phase.stop is None:
            return _enter_round(r, rules)
        case StoreAbandoned(why):
            return _leave(phase.past_round, REQUEUE_EXIT_CODE, why)
        case StopRequested(_, code) if rules.leave_on_stop:
            return _leave(phase.past_round, code, _stop_reason(event))
        case StopRequested(signal, code, at, why) if phase.stop is None:
            # The leader answers with the terminal Round; without an answer this node leaves at the deadline.
            until = at + rules.shutdown_timeout_s
            return Joining(phase.past_round, PendingStop(signal, code, until, why)), [SetTimer(until)]
        case StopForced(signal, code):
            return _leave(phase.past_round, code, f"{signal} twice: leaving at once")
        case TimerExpired(at) if phase.stop is not None and at >= phase.stop.until:
            why = f"{phase.stop.signal}: leaving, no terminal round was published in time"
            return _leave(phase.past_round, phase.stop.exit_code, why)
        case _:
            return phase, []


def _running(phase: Running, event: Event, rules: StateMachineRules) -> Transition:
    """The group trains. It ends by itself (exits, its store, a lost owner), by a newer Round, or by a stop."""
    round_ = phase.round
    match event:
        case RoundPublished(r) if r.number > round_.number:
            return _end_superseded_group(round_, r, rules, phase.stop)
        case WorkerExited(number) if number == round_.number and not _already_exited(phase.exits, event):
            return _worker_exited(phase, event, rules)
        case StoreExited(number, why) if number == round_.number:
            return _fail(round_, rules, "store_lost", (), f"the workers' store {why}")
        case StartFailed(number, why) if number == round_.number:
            return _fail(round_, rules, "start_failed", (), f"the group could not be started: {why}")
        case FirstStep(number) if number == round_.number:
            return replace(phase, has_stepped=True), []
        case GroupEnded(number) if number == round_.number:
            return _group_lost(round_, phase.exits, rules)
        case StoreAbandoned(why, at, group_stuck=True):
            return Stopping(round_, stop=PendingStop("", REQUEUE_EXIT_CODE, at, why)), [KillGroup(round_.number, why)]
        case StopRequested() if rules.leave_on_stop:
            return _request_leave(phase, event, rules)
        case TimerExpired(at) if phase.stop is not None and at >= phase.stop.until:
            reason = phase.stop.why or phase.stop.signal
            kill = KillGroup(round_.number, f"{reason}: no round without {rules.node} was published in time")
            return Stopping(round_, stop=phase.stop), [kill]
        case TimerExpired(at) if phase.stop is not None and at >= phase.stop.report_soon_at:
            if len(round_.members) == 1:  # no other node has to agree; without the store this one cannot even ask
                stop, grace = phase.stop, phase.stop.until - at
                why = f"{stop.why or stop.signal}: no other round was published; workers have {grace:.0f} s to stop"
                return Stopping(round_, stop=stop), [StopGroup(round_.number, why, grace, stop.signal)]
            stop = replace(phase.stop, report_soon_at=math.inf)
            return replace(phase, stop=stop), [_report_leaving(stop, rules, soon=True)]
        case StopRequested() | StopForced():
            return _stop_group(round_, event, rules)
        case _:
            return phase, []


def _request_leave(phase: Running, event: StopRequested, rules: StateMachineRules) -> Transition:
    """The other nodes continue without this one, from a checkpoint if they can pause at one.

    Where too few would remain they train on, since a replacement may come, and pause before this node's end.
    """
    if phase.stop is not None:
        return phase, []
    until = event.at + rules.stop_limit_s
    soon_at = until - min(rules.stop_limit_s / 2, PAUSE_BEFORE_LEAVE_S)
    stop = PendingStop(event.signal, event.exit_code, until, event.why, soon_at)
    return replace(phase, stop=stop), [_report_leaving(stop, rules), SetTimer(soon_at), SetTimer(until)]


def _report_leaving(stop: PendingStop, rules: StateMachineRules, soon: bool = False) -> ReportLeaving:
    return ReportLeaving(f"{rules.node} leaves: {stop.why or stop.signal}", stop.exit_code, soon)


def _worker_exited(phase: Running, exit: WorkerExited, rules: StateMachineRules) -> Transition:
    round_, exits = phase.round, (*phase.exits, exit)
    if follows_peer_failure(exit) and phase.stop is None:
        wait_s = MULTI_NODE_EXIT_WAIT_S if len(round_.members) > 1 else ROOT_CAUSE_EXIT_WAIT_S
        until = exit.at + wait_s
        return _await_root_cause(Settling(round_, exits, until), rules, [SetTimer(until)])
    if not exit.status.ok:
        error = shareable_error(exit)
        if phase.has_stepped or phase.exits or phase.stop or error is None:
            return _crash(round_, exit, rules, ended=phase.exits)
        wait_s = same_error_wait_s(rules.user_error_wait_s, exit.ran_s, error, is_user_error=is_user_error(exit))
        until = exit.at + wait_s
        return _await_shared_error(Settling(round_, exits, until), rules, [SetTimer(until)])
    if len(exits) < _local_world_size(round_, rules):
        return replace(phase, exits=exits), []
    return Stopping(round_), [ReportDone(round_.number)]


def _settling(phase: Settling, event: Event, rules: StateMachineRules) -> Transition:
    """Workers have failed; the root cause, or the same error of all others, may still come."""
    round_, first = phase.round, next(e for e in phase.exits if not e.status.ok)
    match event:
        case RoundPublished(r) if r.number > round_.number:
            return _end_superseded_group(round_, r, rules)
        case WorkerExited(number) if number == round_.number and not _already_exited(phase.exits, event):
            after = Settling(round_, (*phase.exits, event), phase.until)
            if follows_peer_failure(first):
                return _await_root_cause(after, rules, [])
            if shareable_error(event) != shareable_error(first):
                return _crash(round_, _root_cause(first, event), rules)
            return _await_shared_error(after, rules, [])
        case TimerExpired(at) if at >= phase.until:
            return _crash(round_, first, rules, phase.exits)
        case FirstStep(number) if number == round_.number and not follows_peer_failure(first):
            return _crash(round_, first, rules)  # another rank trains: the script as such works
        case StoreExited(number, why) if number == round_.number:
            return _fail(round_, rules, "store_lost", (), f"the workers' store {why}")
        case GroupEnded(number) if number == round_.number:
            return _group_lost(round_, phase.exits, rules)
        case StopRequested() | StopForced():
            return _stop_group(round_, event, rules)
        case _:
            return phase, []


def _await_shared_error(phase: Settling, rules: StateMachineRules, actions: list[Action]) -> Transition:
    """A shared error once every worker of this node has raised the same one."""
    workers = _local_world_size(phase.round, rules)
    if len(phase.exits) < workers:
        return phase, actions
    first = phase.exits[0]
    who = f"rank {first.rank}" if workers == 1 else f"all {workers} ranks on {rules.node}"
    why = f"{who} failed by themselves before the first step: rank {first.rank} {describe_exit(first)}"
    kind = "user_error" if is_user_error(first) else "shared_error"
    return _fail(phase.round, rules, kind, (first,), why.replace("themselves", "itself", workers == 1))


def _await_root_cause(phase: Settling, rules: StateMachineRules, actions: list[Action]) -> Transition:
    """Some workers have lost a peer, whose own exit names the root cause: wait for it, or for the last exit."""
    failed = [exit for exit in phase.exits if not exit.status.ok]
    cause = next((exit for exit in failed if not follows_peer_failure(exit)), None)
    if cause is None and len(phase.exits) < _local_world_size(phase.round, rules):
        return phase, actions
    return _crash(phase.round, cause or failed[0], rules, phase.exits)


def _stopping(phase: Stopping, event: Event, rules: StateMachineRules) -> Transition:
    """The group is being ended. What follows is known already (`then`, `stop`), or is decided by the next Round."""
    match event:
        case RoundPublished(r) if r.number > (phase.next_round or phase.round).number:
            if phase.stop is not None and not r.terminal:
                return phase, []
            return Stopping(phase.round, r, phase.stop), []
        case GroupEnded(number) if number == phase.round.number:
            return _after_group_ended(phase, rules)
        case StopRequested(signal, code, at, why) if phase.stop is None:
            return Stopping(phase.round, _if_terminal(phase.next_round), PendingStop(signal, code, at, why)), []
        case StopForced(signal, code, at):
            stop = phase.stop or PendingStop(signal, code, at)
            kill = KillGroup(phase.round.number, f"{signal} twice: killed without grace", save=False)
            return Stopping(phase.round, _if_terminal(phase.next_round), stop), [kill]
        case _:
            return phase, []


def _after_group_ended(phase: Stopping, rules: StateMachineRules) -> Transition:
    """The group is gone: enter the Round that is known already, leave after a stop, or wait for the next Round."""
    if phase.next_round is not None:
        return (
            _leave_after_final_round(phase.next_round)
            if phase.next_round.terminal
            else _enter_round(phase.next_round, rules)
        )
    if phase.stop is not None:
        return _leave(phase.round.number, phase.stop.exit_code, _stop_reason(phase.stop))
    return Joining(phase.round.number), []


def _enter_round(r: Round, rules: StateMachineRules) -> Transition:
    """Start the group of the Round, if this incarnation of this node is in it."""
    member = r.member(rules.node)
    if member is None or rules.incarnation not in (None, member.incarnation):
        return Joining(r.number), []  # not our round, or that of an earlier agent on this node
    return Running(r), [StartGroup(r)]


def _leave_after_final_round(r: Round) -> Transition:
    assert r.exit_code is not None
    return _leave(r.number, r.exit_code, r.reason, failed=r.outcome == "failed")


def _leave(round: int, exit_code: int, why: str, *, failed: bool = False) -> Transition:
    return Flushing(round, exit_code, why, failed), [Flush(failed)]


def _flushing(phase: Flushing, event: Event) -> Transition:
    """The job is over for this node; the newest state in memory is written to the disk before it leaves."""
    match event:
        case FlushStarted(size, at):
            wait_s = LAST_WRITE_S + size * LAST_WRITE_S_PER_BYTE if phase.job_failed else LAST_WRITE_OF_STOP_S
            until = at + wait_s
            return replace(phase, until=until), [SetTimer(until)] if until != phase.until else []
        case RoundPublished(r) if r.number > phase.round and r.terminal:
            assert r.exit_code is not None
            return replace(phase, round=r.number, exit_code=r.exit_code, why=r.reason), []
        case Flushed(step):
            return Ended(phase.round, phase.exit_code), [Leave(phase.exit_code, phase.why, step)]
        case TimerExpired(at) if at < phase.until:
            return phase, []
        case TimerExpired() | StopRequested() | StopForced():
            return Ended(phase.round, phase.exit_code), [Leave(phase.exit_code, phase.why)]
        case _:
            return phase, []


def _stop_reason(stop: PendingStop | StopRequested) -> str:
    return stop.why or f"stopped by {stop.signal}"


def _end_superseded_group(
    old: Round, new: Round, rules: StateMachineRules, stop: PendingStop | None = None
) -> Transition:
    """The old group gets time only from a stop; the survivors of a failure have no use for it."""
    why = f"round {new.number}: {new.reason}"
    if stop is not None and not new.terminal:
        return Stopping(old, stop=stop), [KillGroup(old.number, why, save=False)]
    if new.outcome == "stopped":
        return Stopping(old, new), [StopGroup(old.number, why, rules.shutdown_timeout_s, "SIGTERM")]
    member = new.member(rules.node)
    hung = tuple(q.slot for q in new.quarantined_slots if q.hung and q.node == rules.node and new.cause == "hung")
    save = new.outcome in (None, "failed")
    return Stopping(old, new), [KillGroup(old.number, why, save=save, keep=member is not None, hung_slots=hung)]


def _stop_group(round_: Round, event: StopRequested | StopForced, rules: StateMachineRules) -> Transition:
    """End the group for a stop: with the grace period for the first signal, at once for the second."""
    if isinstance(event, StopForced):
        stop = PendingStop(event.signal, event.exit_code, event.at)
        return Stopping(round_, stop=stop), [
            KillGroup(round_.number, f"{event.signal} twice: killed without grace", save=False)
        ]
    stop = PendingStop(event.signal, event.exit_code, event.at, event.why)
    grace = rules.shutdown_timeout_s
    again = "; Ctrl-C again kills them at once" if event.signal == "SIGINT" and grace else ""
    why = f"{event.why or event.signal}: workers have {grace:g} s to stop{again}"
    return Stopping(round_, stop=stop), [StopGroup(round_.number, why, grace, event.signal)]


def _crash(
    round_: Round, exit: WorkerExited, rules: StateMachineRules, ended: tuple[WorkerExited, ...] = ()
) -> Transition:
    """A worker failed on its own, or lost a peer whose own exit names no cause.

    `ended` are the other exits; a rank that exited with code 0 may be the lost peer.
    """
    if has_external_cause(exit):
        ranks = sorted(e.rank for e in ended if e.status.ok)
        left = (
            f" after rank{'s' if ranks[1:] else ''} {', '.join(map(str, ranks))} had ended with code 0" if ranks else ""
        )
        how = describe_peer_loss(exit)
        why = (
            f"rank {exit.rank} {how}{left}: it {describe_exit(exit)}"
            if how
            else f"rank {exit.rank} {describe_exit(exit)}"
        )
        return _fail(round_, rules, "crash", (), why, exit)
    return _fail(round_, rules, "crash", (exit,), f"rank {exit.rank} {describe_exit(exit)}")


def _fail(
    round_: Round,
    rules: StateMachineRules,
    kind: str,
    culprits: tuple[WorkerExited, ...],
    why: str,
    witness: WorkerExited | None = None,
) -> Transition:
    """Kill the rest and report. `witness` is the exit whose traceback is shown where there is no culprit."""
    exit = next((e for e in (*culprits, witness) if e is not None), None)
    report = exit.exit_report if exit is not None else None
    failure = Failure(
        round=round_.number,
        node=rules.node,
        kind=kind,
        culprits=tuple((e.rank, e.slot) for e in culprits),
        why=why,
        error=report.type if report else None,
        detail=report.traceback if report else None,
        repeat_key=repeat_key(exit, shared=kind in SHARED_ERROR_KINDS) if exit is not None else "",
    )
    return Stopping(round_), [KillGroup(round_.number, why, keep=True), ReportFailure(failure)]


def _group_lost(round_: Round, exits: tuple[WorkerExited, ...], rules: StateMachineRules) -> Transition:
    """The group ended without exits: its owner lost the processes, so there is none to kill."""
    lost = _local_world_size(round_, rules) - len(exits)
    why = f"the group ended and {lost} of its workers left no exit status"
    _, actions = _fail(round_, rules, "crash", (), why)
    return Joining(round_.number), [a for a in actions if isinstance(a, ReportFailure)]


def _root_cause(first: WorkerExited, last: WorkerExited) -> WorkerExited:
    """The first failure, unless the last one shows that the first is secondary.

    Ranks that raise are sometimes reaped before the one whose death made them raise: a death without an exit report is
    never secondary, an exception may be.
    """
    died = not last.status.ok and last.exit_report is None
    return last if died else first


def _already_exited(exits: tuple[WorkerExited, ...], exit: WorkerExited) -> bool:
    return any(e.rank == exit.rank for e in exits)


def _if_terminal(r: Round | None) -> Round | None:
    return r if r is not None and r.terminal else None


def _local_world_size(round_: Round, rules: StateMachineRules) -> int:
    return len(round_.ranks(rules.node))
