"""What gets told of a job: one sentence to the person, one line to the event log, one number to the metrics.

It exists so that the loop says what happened once. It keeps only what a sentence needs (which pid a rank has, when the
fault was) and never changes what happens next.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from elasticd.heartbeat.worker_events import WorkerEvent
from elasticd_agent.hangs.observer import Observation
from elasticd_agent.model.job import JobSpec, Policy
from elasticd_agent.model.messages import (
    Event,
    FirstStep,
    GroupEnded,
    StepRules,
    StopForced,
    StopRequested,
    StoreExited,
    WorkerExited,
)
from elasticd_agent.model.notices import (
    FaultDetected,
    LeaderNotice,
    LeadershipChanged,
    StoreAvailability,
    StragglersFound,
    WaitingFor,
)
from elasticd_agent.model.records import Failure, Round
from elasticd_agent.model.reports import HangVerdict
from elasticd_agent.rendezvous import restart_budget as budget
from elasticd_agent.telemetry import events as happened
from elasticd_agent.telemetry import worker_notes as noted
from elasticd_agent.telemetry.console import Console, ProgressView
from elasticd_agent.telemetry.event_log import EventSink
from elasticd_agent.telemetry.goodput import GoodputLedger, TimeSplit
from elasticd_agent.telemetry.goodput_tracker import GoodputTracker, follows_fault, lost_nodes
from elasticd_agent.telemetry.lasting_conditions import ConditionLog
from elasticd_agent.telemetry.metrics import MetricsRecorder
from elasticd_agent.telemetry.recovery_time import RecoveryTimer
from elasticd_agent.telemetry.step_rate import StepRate
from elasticd_agent.workers.manager import STORE_RANK, GroupStarted, ProcessReaped, ProcessUnkillable


@dataclass(slots=True)
class JobReporter:
    """Tells one job's story on one node. All `now` and `at` are monotonic seconds."""

    spec: JobSpec
    policy: Policy
    node: str
    events: EventSink
    metrics: MetricsRecorder
    console: Console
    on_group_ended: Callable[[int], None]
    round: Round | None = None
    step: int | None = None
    first_step_seen: bool = False
    _observation: Observation | None = None
    _pids: dict[int, int] = field(default_factory=dict)  # local rank -> pid, of the group that runs
    _started_at: float = 0.0
    _recovery: RecoveryTimer = field(default_factory=RecoveryTimer)
    _failure: Failure | None = None
    _suspected_at: float | None = None
    _end_requested: set[int] = field(default_factory=set)
    _ending_since: float | None = None
    _running_round: tuple[Round, float] | None = None  # the newest round, and when it was heard of
    _saved: tuple[int, int] | None = None  # the newest checkpoint of this node's: round, step
    _checkpoint_at: float | None = None
    _checkpoint_step: int = -1
    _rate: StepRate = field(default_factory=StepRate)
    _lasting: ConditionLog = field(init=False)
    _goodput: GoodputTracker = field(init=False)

    def __post_init__(self) -> None:
        self._lasting = ConditionLog(self.events, self.metrics, self.console)
        self._goodput = GoodputTracker(self.node, GoodputLedger(time.monotonic()), self.policy.backoff_s)
        self.metrics.set_time_source(self.spent)
        self.metrics.set_budget_source(self.restarts_left)
        self.metrics.phase("joining")

    def spent(self) -> TimeSplit:
        """What became of this node's time so far. Safe from any thread."""
        return self._goodput.totals_at(time.monotonic())

    def restarts_left(self) -> int | None:
        """Before the job is given up, should nothing get further; None before the first round. Safe from any thread."""
        if self._running_round is None:
            return None
        round, at = self._running_round
        progress = budget.is_progress(round, self._saved, self._goodput.ledger.high_water)
        return budget.restarts_left(round.budget, self.policy, progress=progress, elapsed_s=time.monotonic() - at)

    def phase(self, name: str) -> None:
        self.metrics.phase(name)

    def planning(self, news: LeaderNotice, now: float) -> None:
        """What the planner knows, where it is this node's agent."""
        match news:
            case LeadershipChanged(on):
                self.metrics.leading(on)
            case FaultDetected(number, cause, culprit):
                self.metrics.fault(cause, culprit)
                self._goodput.on_fault(number, now)
            case WaitingFor(why, nodes):
                self.console.log(why)
                number = self.round.number if self.round is not None else 0
                self.events.write(happened.WaitingEvent(round=number, mono=now, reason=why, nodes=nodes))
                if nodes:
                    self._goodput.on_waiting(now)

    def log(self, sentence: str) -> None:
        self.console.log(sentence)

    def launcher_ready(self, mode: str, reason: str, seconds: float | None) -> None:
        """How workers start from now on: warm, or cold and why."""
        number = self.round.number if self.round is not None else 0
        self.events.write(
            happened.LauncherReadyEvent(round=number, mono=time.monotonic(), reason=reason, mode=mode, seconds=seconds)
        )
        if mode == "cold":
            self.console.log(reason, "warning")

    def round_published(self, round: Round, now: float) -> None:
        self._goodput.on_round(round, now)
        self.metrics.round_info(round.number, round.outcome or round.cause, round.reason, time.time())
        if round.terminal:
            self.round = round
            return
        cause = round.cause or "resize"
        if follows_fault(round) and self._observation is not None:
            self._recovery.start(now - self._observation.idle_s)  # where this node has not seen it by itself
        self._recovery.mark("agree", now)
        ranks = round.ranks(self.node)
        self.metrics.round_published(
            round.number,
            round.world_size,
            self._max_workers(round),
            ranks,
            None if self.round is None else cause,
        )
        self._running_round = round, now
        self.metrics.store_available(up=True)  # it has just told us
        self.events.write(
            happened.RoundPublishedEvent(
                round=round.number,
                mono=now,
                reason=round.reason,
                world_size=round.world_size,
                nodes=tuple(member.node for member in round.members),
                restarts=round.restarts,
                cause=cause,
                lost=lost_nodes(round),
            )
        )
        self.console.log(f"round {round.number}: {round.reason}")
        self.round, self._failure = round, None

    def _max_workers(self, round: Round) -> int:
        """What the job may have on as many nodes as it may have; other nodes can have more slots than this one."""
        return max(self.spec.max_workers * self.spec.rendezvous.max_nodes, round.world_size)

    def store_seen(self, seen: StoreAvailability, now: float) -> None:
        """The store went away, or came back; to the person the store has said so itself."""
        number = self.round.number if self.round is not None else 0
        self.metrics.store_available(up=not seen.unavailable)
        if seen.unavailable:
            self.events.write(happened.StoreUnavailableEvent(round=number, mono=now, reason=seen.why))
        else:
            reason = f"the store answers again after {seen.seconds:.1f} s"
            self.events.write(happened.StoreAvailableEvent(round=number, mono=now, reason=reason, seconds=seen.seconds))

    def started(self, started: GroupStarted, now: float) -> None:
        assert self.round is not None
        self._pids = {STORE_RANK: started.store_pid, **dict(enumerate(started.pids))}
        self._started_at, self._ending_since, self.first_step_seen = now, None, False
        self._recovery.mark("start", now)
        self._rate.reset()
        self.metrics.group_started(len(started.pids), started.warm)
        how = "forked from the warm launcher" if started.warm else "started cold"
        self.events.write(
            happened.GroupStartedEvent(
                round=started.number,
                mono=now,
                reason=f"{len(started.pids)} workers {how}",
                ranks=tuple(self.round.ranks(self.node)),
                pids=tuple(started.pids),
                warm=started.warm,
            )
        )

    def asked_to_end(self, number: int) -> None:
        self._end_requested.add(number)
        self._goodput.on_group_ending(number)
        if self._ending_since is None:
            self._ending_since = time.monotonic()

    def happened(self, event: Event) -> None:
        match event:
            case WorkerExited():
                self._worker_exited(event)
            case StoreExited(number) if number not in self._end_requested and self._no_fault and self._pids:
                self._store_exited(event)
            case FirstStep(number, at):
                self._first_step(number, at)
            case GroupEnded(number):
                self._group_gone(number)

    def asked_to_stop(self, event: StopRequested | StopForced, rules: StepRules) -> None:
        """Where others may go on, only this node leaves; they, or the checkpoint, have the time that it may take."""
        name, grace = event.signal, rules.stop_limit_s
        if isinstance(event, StopForced):
            reason, grace = f"{name} again: what runs is killed", 0.0
        elif rules.leave_on_stop:
            reason = f"{self.node} leaves within {grace:g} s: {event.why or f'{name} received'}"
        else:
            reason = f"{name} received: workers have {grace:g} s to stop"
        number = self.round.number if self.round is not None else 0
        self.events.write(
            happened.StopRequestedEvent(round=number, mono=event.at, reason=reason, by=name, grace_seconds=grace)
        )

    @property
    def _no_fault(self) -> bool:
        return self._recovery.fault_at is None

    def _worker_exited(self, event: WorkerExited) -> None:
        asked = event.number in self._end_requested
        status = event.status
        if status.ok:
            self._goodput.on_exit(event.at)
        elif not asked:
            self._recovery.start(event.at)
            self._goodput.on_fault(event.number, event.at)
        kind = "asked" if asked else "success" if status.ok else "signal" if status.signal else "exit_code"
        self.metrics.worker_exited(kind)
        pid = self._pids.pop(event.local_rank, 0)
        self.events.write(
            happened.WorkerExitedEvent(
                round=event.number,
                mono=event.at,
                reason=f"rank {event.rank} (pid {pid}) {status.text}",
                rank=event.rank,
                local_rank=event.local_rank,
                pid=pid,
                exit_code=status.code,
                signal=status.signal,
                asked=asked,
                step=self._step_of(event.local_rank),
            )
        )

    def _store_exited(self, event: StoreExited) -> None:
        if all(local_rank == STORE_RANK for local_rank in self._pids):
            return  # every worker is done: its end is ours
        self._recovery.start(event.at)
        self._goodput.on_fault(event.number, event.at)
        self.events.write(
            happened.StoreExitedEvent(
                round=event.number,
                mono=event.at,
                reason=f"the workers' store {event.why}",
                pid=self._pids.get(STORE_RANK, 0),
                exit_code=event.status.code if event.status is not None else None,
                signal=event.status.signal if event.status is not None else None,
            )
        )

    def _step_of(self, local_rank: int) -> int | None:
        beats = self._observation.heartbeats if self._observation is not None else ()
        return beats[local_rank].step or None if local_rank < len(beats) else None

    def _first_step(self, number: int, at: float) -> None:
        self.first_step_seen = True
        recovered = self._recovery.finish(at)
        recovery, parts = recovered if recovered is not None else (None, {})
        beats = self._observation.heartbeats if self._observation is not None else ()
        first = min(range(len(beats)), key=lambda i: beats[i].first_step_ns or 1 << 63, default=0)
        start = at - self._started_at
        self.metrics.first_step(start, recovery)
        self.metrics.recovered(parts)
        reason = f"first step {start:.2f} s after the start"
        if recovery is not None:
            reason = f"training again {recovery:.2f} s after the fault"
        self.console.log(f"round {number}: {reason}")
        assert self.round is not None
        ranks = self.round.ranks(self.node)
        self.events.write(
            happened.FirstStepEvent(
                round=number,
                mono=at,
                reason=reason,
                step=max(beats[first].step, 1) if beats else 1,
                rank=ranks[first] if first < len(ranks) else 0,
                start_seconds=start,
                recovery_seconds=recovery,
            )
        )

    def _group_gone(self, number: int) -> None:
        now = time.monotonic()
        seconds = now - self._ending_since if self._ending_since is not None else 0.0
        if any(local_rank != STORE_RANK for local_rank in self._pids):
            self._recovery.start(now)  # the workers went without a word, as when their owner is killed
            self._goodput.on_fault(number, now)
        self._goodput.on_group_ended(number, now)
        self._recovery.mark("stop", now)
        survivors = self._lasting.unkillable(number)
        self.metrics.group_ended()
        self.on_group_ended(number)
        self.events.write(
            happened.GroupEndedEvent(
                round=number,
                mono=now,
                reason=f"nothing is left of round {number}" + (" but what does not die" if survivors else ""),
                seconds=seconds,
                survivors=survivors,
            )
        )
        self._pids.clear()

    def stuck(self, heard: ProcessUnkillable | ProcessReaped, sentence: str, now: float) -> None:
        """A process does not die of SIGKILL, or has died of it at last."""
        self._lasting.on_unkillable(heard, sentence, now, self.round.number if self.round is not None else 0)

    def failed(self, failure: Failure) -> None:
        self._failure = failure
        self.console.log(f"round {failure.round}: {failure.why}", "warning")

    def hang_suspected(self, number: int, why: str) -> None:
        """This node suspects a hang. Only the log hears of it: most go on by themselves."""
        now = time.monotonic()
        self._suspected_at = now
        self.metrics.hang_suspected()
        self.events.write(happened.HangSuspectedEvent(round=number, mono=now, reason=why))

    def hang_cleared(self, number: int, seconds: float) -> None:
        reason = f"the workers go on; they had been suspected of hanging for {seconds:.1f} s"
        self._suspected_at = None
        self.events.write(
            happened.HangClearedEvent(round=number, mono=time.monotonic(), reason=reason, seconds=seconds)
        )

    def judged(self, judged: HangVerdict) -> None:
        """The group is hung, by what all nodes see; this node's agent has judged."""
        now = time.monotonic()
        places = judged.culprits
        self.metrics.hang_detected(judged.cause, judged.hung_s, places[0][0] if places else "")
        self._goodput.on_fault(judged.round, now, ends=judged.restarts)
        if judged.restarts:
            self._recovery.start(now - judged.hung_s)
            if self._suspected_at is not None:
                self._recovery.mark("detect", self._suspected_at)
            self._recovery.mark("evidence", now)
        self.events.write(
            happened.HangDetectedEvent(
                round=judged.round,
                mono=now,
                reason=judged.why,
                cause=judged.cause,
                nodes=tuple(node for node, _, _ in places),
                ranks=tuple(rank for _, rank, _ in places),
                slots=tuple(slot for _, _, slot in places),
                seconds=judged.hung_s,
                action="restart" if judged.restarts else "report",
            )
        )
        what = "" if judged.restarts else " (only reported: --on-hang report)"
        self.console.log(f"round {judged.round} hangs{what}: {judged.why}", "warning")

    def slow(self, seen: StragglersFound) -> None:
        """The ranks the others wait for."""
        self._lasting.on_stragglers(seen)

    def observed(self, seen: Observation, now: float) -> None:
        """One look at the workers: numbers for the metrics, the live line, and what they noted."""
        self._work_recovered(seen)  # a hold begins after the step it is noted at
        for note in seen.worker_events:
            self._worker_event(note)
        before, self._observation = self._observation, seen
        if self._running_round is None or seen.round != self._running_round[0].number:
            return
        round = self._running_round[0]  # the newest that was no end: until it is gone, its workers may make steps
        if seen.first_step_at is not None:
            self.step = seen.step
        rate = self._rate.observe(seen.step, now, stepped=seen.first_step_at is not None)
        moved = before is None or before.round != seen.round or seen.progress_at != before.progress_at
        if moved and seen.progress_at is not None:
            steps = dict(zip(round.ranks(self.node), (beat.step for beat in seen.heartbeats), strict=False))
            self.metrics.progress(steps, rate, time.time() - (now - seen.progress_at))
        self.metrics.event_lines_lost(self.events.lost)
        self.console.progress(
            ProgressView(
                round.number,
                round.world_size,
                target=self._max_workers(round),
                step=self.step,
                steps_per_second=rate,
                checkpoint_at=self._checkpoint_at,
                restarts=round.restarts,
            )
        )

    def _work_recovered(self, seen: Observation) -> None:
        cost_s = self._goodput.on_observation(seen)
        if cost_s is not None and seen.progress_at is not None:
            step = self._goodput.ledger.high_water
            what = f"the fault before has cost {cost_s:.2f} s" if cost_s else "nothing was lost"
            reason = f"step {step} is beyond all before: {what}"
            self.events.write(
                happened.WorkRecoveredEvent(
                    round=seen.round, mono=seen.progress_at, reason=reason, step=step, seconds=cost_s
                )
            )

    def _worker_event(self, note: WorkerEvent) -> None:
        """What a worker said: into the log as it was said, to the person where it matters."""
        if note.kind == "attached" and isinstance(seconds := note.extra.get("every_seconds"), (int, float)):
            self.metrics.checkpoint_interval(float(seconds))
        event = noted.log_event(note)
        if event is not None:
            self.events.write(event)
        match event:
            case happened.ResumedEvent(step=step) if step > self._checkpoint_step:
                self._checkpoint_step = step
                self.metrics.checkpoint_resumed(step, note.wall)
            case happened.CheckpointSavedEvent(step=step, bytes=size, seconds=seconds):
                self._checkpoint_at, self._checkpoint_step, self._saved = note.mono, step, (note.round, step)
                self.metrics.checkpoint_saved(step, note.wall, size, seconds)
            case happened.PausedEvent():
                self._goodput.on_pause(note.mono)
            case happened.CheckpointFailedEvent():
                self.metrics.checkpoint_failed()
            case happened.CheckpointSkippedEvent():
                self.metrics.checkpoint_skipped()
        if note.kind not in noted.QUIET_KINDS:
            self.console.log(note.reason, "warning" if note.kind in noted.WARNING_KINDS else "info")

    def ended(self, exit_code: int, why: str, round: Round | None) -> None:
        """The last words: how the job ended, and the traceback where a script's own mistake ended it."""
        outcome = "stopped" if exit_code else "succeeded"
        if round is not None and round.outcome:
            outcome = round.outcome
        elif self.spec.rendezvous.max_nodes > 1:
            outcome = "left"  # nobody has ended it: the others may go on, or it goes on when its nodes are back
        if self._failure is not None and self._failure.detail:
            self.console.log(f"the traceback of the rank that failed first:\n{self._failure.detail.rstrip()}", "error")
        what = (
            f"{self.node} has left job {self.spec.job_id}"
            if outcome == "left"
            else f"job {self.spec.job_id} has {outcome}"
        )
        self.console.log(f"{what}: {why}", "info" if exit_code == 0 else "error")
        self.events.write(
            happened.JobEndedEvent(
                round=round.number if round is not None else 0,
                mono=time.monotonic(),
                reason=why,
                outcome=outcome,
                exit_code=exit_code,
                restarts=round.restarts if round is not None else 0,
                step=self.step,
            )
        )
