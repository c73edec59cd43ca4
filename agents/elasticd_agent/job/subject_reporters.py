"""Reports by subject: this node's workers, their progress, and hangs.

Each reporter handles the events of its subject, and has three outlets for each of them: a line in the event log (for
machines, with the seconds that the time was spent on), a sentence on the console (for the person at the terminal), and
numbers for the metrics. A subject's three outlets lie side by side in one method, so they cannot tell three different
stories.

The reporters share a `JobContext`: the newest Round, the last observation and the trackers of time. Only the deciding
thread changes it.

The time from a fault to the next step is measured by the node that saw the fault. Other nodes hear of it later and
would report a shorter time; a Round names its measuring node, and only this one writes `recovery_seconds`.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from elasticd.heartbeat.record import StepSource
from elasticd.heartbeat.worker_events import WorkerEvent
from elasticd_agent.hangs.observer import Observation
from elasticd_agent.job.listener import GroupEnding, JobEvent, SlotChanged
from elasticd_agent.model import log_events as events
from elasticd_agent.model.job import JobSpec, Policy
from elasticd_agent.model.log_events import LogEvent
from elasticd_agent.model.messages import FirstStep, GroupEnded, PeerLost, StoreExited, StragglersFound, WorkerExited
from elasticd_agent.model.phrases import count
from elasticd_agent.model.records import Round
from elasticd_agent.model.reports import HangVerdict
from elasticd_agent.telemetry.console import Console, ProgressView
from elasticd_agent.telemetry.event_log import EventSink
from elasticd_agent.telemetry.goodput import GoodputLedger, GoodputTracker, RecoveryTimer, StepRate
from elasticd_agent.telemetry.metrics import Metrics
from elasticd_agent.workers.events import GroupStarted, ProcessUnkillable, StartModeKnown, UnkillableProcessEnded
from elasticd_agent.workers.launcher.messages import STORE_RANK


@dataclass(slots=True)
class JobContext:
    """The common ground of a job's reporters: its settings, its sinks, and the facts of the running round."""

    spec: JobSpec
    policy: Policy
    node: str
    events: EventSink
    metrics: Metrics
    console: Console
    recovery: RecoveryTimer = field(default_factory=RecoveryTimer)
    goodput: GoodputTracker = field(init=False)
    round: Round | None = None  #: the newest Round, the terminal one included
    running_round: tuple[Round, float] | None = None  #: the newest Round that is not terminal, and when it arrived
    observation: Observation | None = None  #: the last observation of this node's workers
    step: int | None = None
    _most_workers: dict[str, int] = field(default_factory=dict)  #: that each node has had in a Round

    def __post_init__(self) -> None:
        self._most_workers[self.node] = self.spec.max_workers
        self.goodput = GoodputTracker(self.node, GoodputLedger(time.monotonic()), self.policy.backoff_s)

    @property
    def round_number(self) -> int:
        return self.round.number if self.round is not None else 0

    def write(self, event: LogEvent) -> None:
        """Write the event to the log, with the split of this node's time until then.

        Every line thus carries the totals of goodput, restarts and waiting: the last line of a log that was cut off is
        enough to know how the time was spent.
        """
        self.events.write(replace(event, spent=self.goodput.totals_for_log(event.mono)))

    def max_workers(self, round: Round) -> int:
        """The most workers that the job may have: of another node as many as it has had in a Round so far, and of one
        that is missing as many as of this one.
        """
        for member in round.members:
            self._most_workers[member.node] = max(self._most_workers.get(member.node, 0), len(member.slots))
        missing = max(0, self.spec.rendezvous.max_nodes - len(round.members))
        return sum(self._most_workers[m.node] for m in round.members) + missing * self.spec.max_workers


@dataclass(slots=True)
class WorkerReporter:
    """The life of this node's groups: the launcher, starts, exits, first steps and ends.

    A fault begins with its first sign, whichever comes first: the exit of a worker that nobody asked for, a lost peer,
    the exit of the workers' store, or the end of a group whose workers have left no exit status. `recovery` and
    `goodput` keep the first one and ignore the others.
    """

    job: JobContext
    on_group_ended: Callable[[int], None]
    launch_mode_known: bool = False  #: it is known how workers start: before that, the first group waits for imports
    _pids: dict[int, int] = field(default_factory=dict)  #: the running group's pids by local rank
    _started_at: float = 0.0
    _kept_workers: int = 0  #: the running group's workers that have kept their process of an earlier round
    _ending_since: float | None = None
    _ending_rounds: set[int] = field(default_factory=set)
    _unkillable: dict[int, int] = field(default_factory=dict)  #: processes that survive SIGKILL, and their rounds

    def on(self, event: JobEvent, now: float) -> None:
        match event:
            case StartModeKnown():
                self._report_launcher(event, now)
            case GroupStarted():
                self._report_start(event, now)
            case GroupEnding(number):
                self._ending_rounds.add(number)
                self.job.goodput.on_group_ending(number)
                if self._ending_since is None:
                    self._ending_since = now
            case WorkerExited():
                self._report_exit(event)
            case PeerLost(exit):
                self._start_fault(exit.round_number, exit.at)
            case StoreExited():
                self._report_store_exit(event)
            case FirstStep(number, at):
                self._report_first_step(number, at)
            case GroupEnded(number, kept):
                for local_rank in kept:
                    self._pids.pop(local_rank, None)
                self._report_group_end(number, now, len(kept))
            case SlotChanged(cause, sentence):
                self._report_slot(cause, sentence, now)

    def _report_launcher(self, launcher: StartModeKnown, now: float) -> None:
        self.job.write(
            events.LauncherReadyEvent(
                round=self.job.round_number, mono=now, reason=launcher.reason, mode=launcher.mode,
                seconds=launcher.seconds,
            )
        )  # fmt: skip
        if launcher.mode == "cold":
            self.job.console.log(launcher.reason, "warning")
        elif self.job.round is not None and not self.launch_mode_known:
            self.job.console.log(f"starting: the imports took {launcher.seconds or 0.0:.1f} s")
        self.launch_mode_known = True
        self.job.console.starting("")

    def _report_start(self, started: GroupStarted, now: float) -> None:
        """Report the start of a group: how many of its workers are new, and how many have kept their process."""
        job = self.job
        assert job.round is not None
        self._pids = {STORE_RANK: started.store_pid, **dict(enumerate(started.pids))}
        self._started_at = now
        self._ending_since = None
        job.recovery.end_part("start", now)
        job.metrics.group_started(len(started.pids), started.warm)
        self._kept_workers = len(started.kept_ranks)
        how = "forked from the warm launcher" if started.warm else "started cold"
        new = len(started.pids) - self._kept_workers
        reason = (f"{count(new, 'worker')} {how}" if new else "no new process") + self._kept_phrase()
        job.write(
            events.GroupStartedEvent(
                round=started.number, mono=now, reason=reason, ranks=tuple(job.round.ranks(job.node)),
                pids=tuple(started.pids), warm=started.warm, kept=self._kept_workers,
            )
        )  # fmt: skip

    def _report_exit(self, exit: WorkerExited) -> None:
        """Report one exit. One that the agent requested is no fault, whatever its status."""
        job, status = self.job, exit.status
        requested = exit.round_number in self._ending_rounds
        if status.ok:
            job.goodput.on_exit(exit.at)
        elif not requested:
            self._start_fault(exit.round_number, exit.at)
        kind = "requested" if requested else "success" if status.ok else "signal" if status.signal else "exit_code"
        job.metrics.worker_exited(kind)
        pid = self._pids.pop(exit.local_rank, 0)
        beats = job.observation.heartbeats if job.observation is not None else ()
        job.write(
            events.WorkerExitedEvent(
                round=exit.round_number, mono=exit.at, reason=f"rank {exit.rank} (pid {pid}) {status.text}",
                rank=exit.rank, local_rank=exit.local_rank, pid=pid, exit_code=status.code, signal=status.signal,
                requested=requested,
                step=beats[exit.local_rank].step or None if exit.local_rank < len(beats) else None,
            )
        )  # fmt: skip

    def _report_store_exit(self, exit: StoreExited) -> None:
        """Report the exit as the first sign of a fault: the last worker's exit, or the group's end, ends it, too."""
        job = self.job
        workers_left = any(local_rank != STORE_RANK for local_rank in self._pids)
        if exit.round_number in self._ending_rounds or job.recovery.fault_at is not None or not workers_left:
            return
        self._start_fault(exit.round_number, exit.at)
        code, signum = (exit.status.code, exit.status.signal) if exit.status is not None else (None, None)
        job.write(
            events.StoreExitedEvent(
                round=exit.round_number, mono=exit.at, reason=f"the workers' store {exit.why}",
                pid=self._pids.get(STORE_RANK, 0), exit_code=code, signal=signum,
            )
        )  # fmt: skip

    def _report_first_step(self, number: int, at: float) -> None:
        """Report the first step of a round, which ends a recovery.

        The rank that made it first is named, as is the time since the group's start and, on the measuring node, since
        the fault. The parts of a recovery (detect, agree, stop, start) go to the metrics as a histogram each.
        """
        job = self.job
        assert job.round is not None
        recovery_s, parts = job.recovery.finish(at) or (None, {})
        if job.round.recovery_reporter != job.node:
            recovery_s, parts = None, {}
        beats = job.observation.heartbeats if job.observation is not None else ()
        first = min(range(len(beats)), key=lambda i: beats[i].first_step_ns or 1 << 63, default=0)
        start_s = at - self._started_at
        job.metrics.first_step(start_s, recovery_s)
        job.metrics.recovered(parts)
        reason = f"first step {start_s:.2f} s after the start"
        if recovery_s is not None:
            reason = f"training again {recovery_s:.2f} s after the fault"
        reason += self._kept_phrase()
        job.console.log(f"round {number}: {reason}")
        ranks = job.round.ranks(job.node)
        rank, step = ranks[first] if first < len(ranks) else 0, max(beats[first].step, 1) if beats else 1
        if beats and beats[first].source == StepSource.HOOK:
            step = 1  # it counts those of its process, and may have made more by now
        job.write(
            events.FirstStepEvent(
                round=number, mono=at, reason=reason, step=step, rank=rank, start_seconds=start_s,
                recovery_seconds=recovery_s,
            )
        )  # fmt: skip

    def _kept_phrase(self) -> str:
        return f", {count(self._kept_workers, 'worker')} here kept the process" if self._kept_workers else ""

    def _report_group_end(self, number: int, now: float, kept: int) -> None:
        """Report the end of a group, and name the processes that survive SIGKILL: they sleep in the kernel, and keep
        their slot.
        """
        job = self.job
        if any(local_rank != STORE_RANK for local_rank in self._pids):
            self._start_fault(number, now)  # workers without an exit status: their owner was killed
        job.goodput.on_group_ended(number, now)
        job.recovery.end_part("stop", now)
        job.metrics.group_ended()
        self.on_group_ended(number)
        survivors = tuple(pid for pid, round in self._unkillable.items() if round == number)
        but = f" except unkillable pids {', '.join(map(str, survivors))}" if survivors else ""
        seconds = now - self._ending_since if self._ending_since is not None else 0.0
        but += f", {count(kept, 'worker')} kept for the next round" if kept else ""
        reason = f"round {number}: all processes reaped{but}"
        job.write(events.GroupEndedEvent(round=number, mono=now, reason=reason, seconds=seconds, survivors=survivors))
        self._pids.clear()

    def _report_slot(self, cause: ProcessUnkillable | UnkillableProcessEnded, sentence: str, now: float) -> None:
        """Report a slot that is lost to an unkillable process, or that has come back since it was reaped at last."""
        job = self.job
        if isinstance(cause, UnkillableProcessEnded):
            self._unkillable.pop(cause.pid, None)
            job.console.log(sentence)
            job.write(events.ProcessReapedEvent(round=job.round_number, mono=now, reason=sentence, pid=cause.pid))
        else:
            self._unkillable[cause.pid] = cause.number
            job.console.log(sentence, "warning")
            job.write(
                events.ProcessUnkillableEvent(
                    round=cause.number, mono=now, reason=sentence, pid=cause.pid, rank=cause.rank, slot=cause.slot,
                    state=cause.state, wchan=cause.wchan,
                )
            )  # fmt: skip
        job.metrics.unkillable_processes(len(self._unkillable))

    def _start_fault(self, number: int, at: float) -> None:
        self.job.recovery.start(at)
        self.job.goodput.on_fault(number, at)


@dataclass(slots=True)
class ProgressReporter:
    """The progress of this node's workers: steps, rates, checkpoints, and the work that a fault has cost.

    A rank reports a step in its heartbeat, and checkpoints as worker events. Both are read by an observation several
    times a second; the metrics are only changed by an observation that has seen a new step, so an idle job costs
    nothing here.
    """

    job: JobContext
    newest_checkpoint: tuple[int, int] | None = None  #: that a worker of this node has saved: round, step
    _saved_at: float | None = None
    _checkpoint_step: int = -1
    _warned_of_stops: bool = False
    _logged_once: set[str] = field(default_factory=set)  #: the keys of sentences about the script
    _rate: StepRate = field(default_factory=StepRate)

    def on(self, event: JobEvent, now: float) -> None:
        match event:
            case Observation():
                self._report_observation(event, now)
            case GroupStarted():
                self._rate.reset()

    def _report_observation(self, seen: Observation, now: float) -> None:
        """Report an observation: recovered work, worker events, steps and their rate.

        Work recovers before the worker events are read. A pause begins after the step at which it is reported, and its
        time would otherwise count as lost.
        """
        job = self.job
        self._report_recovered_work(
            seen
        )  # before the worker events: a pause begins after the step at which it is reported
        for event in seen.worker_events:
            self._report_worker_event(event)
        before, job.observation = job.observation, seen
        if job.running_round is None or seen.round != job.running_round[0].number:
            return
        round = job.running_round[0]  # its workers may make steps until its group has ended
        stepped = seen.first_step_at is not None
        if stepped:
            job.step = seen.step
        rate = self._rate.observe(seen.step, now, stepped=stepped)
        moved = before is None or before.round != seen.round or seen.last_progress_at != before.last_progress_at
        if moved and seen.last_progress_at is not None:
            steps = dict(zip(round.ranks(job.node), (beat.step for beat in seen.heartbeats), strict=False))
            job.metrics.progress(steps, rate, time.time() - (now - seen.last_progress_at))
        job.metrics.event_lines_lost(job.events.lines_lost)
        job.console.progress(
            ProgressView(
                round.number, round.world_size, target_world_size=job.max_workers(round),
                step=job.step if stepped else None, steps_per_second=rate, checkpoint_at=self._saved_at,
                restarts=round.restarts,
            )
        )  # fmt: skip

    def _report_recovered_work(self, seen: Observation) -> None:
        """Write the event of a round that has caught up with the highest step of all rounds, with the seconds that the
        fault cost.
        """
        goodput = self.job.goodput
        cost_s = goodput.on_observation(seen)
        if cost_s is not None and seen.last_progress_at is not None:
            step = goodput.ledger.high_water
            reason = f"caught up at step {step}; " + (f"{cost_s:.2f} s were lost" if cost_s else "no work lost")
            self.job.write(
                events.WorkRecoveredEvent(
                    round=seen.round, mono=seen.last_progress_at, reason=reason, step=step, seconds=cost_s
                )
            )

    def _report_worker_event(self, reported: WorkerEvent) -> None:
        """Report one line that a worker's library has written: a save, a restore, a warning, the end of a pause.

        Kinds that come with every step or every save are quiet on the console; kinds that say that work may be lost are
        warnings.
        """
        job = self.job
        if reported.kind == "attached" and isinstance(seconds := reported.extra.get("every_seconds"), (int, float)):
            job.metrics.checkpoint_interval(float(seconds))
        if reported.kind == "snapshot" and reported.step is not None:
            job.metrics.snapshot(reported.step, reported.wall)
        if reported.kind == "paused":
            job.goodput.on_pause(reported.mono)
        event = events.from_worker(reported)
        if event is not None:
            job.write(event)
        if isinstance(event, events.ResumedEvent) and event.donor is not None:
            job.metrics.donor_resumed(event.steps_saved)
        match event:
            case events.ResumedEvent(step=step, in_processes=False) if step != self._checkpoint_step:
                self._checkpoint_step = step
                job.metrics.newest_checkpoint(step, reported.wall)
            case events.CheckpointSavedEvent(step=step, bytes=size, seconds=seconds, written_seconds=written_s):
                job.metrics.checkpoint_saved(size, seconds, written_s)
                # What a rank resumed from is written beside newer saves, and may end after them.
                if (saved := (reported.round, step)) >= (self.newest_checkpoint or saved):
                    self._saved_at = reported.mono
                    self._checkpoint_step = step
                    self.newest_checkpoint = saved
                    job.metrics.newest_checkpoint(step, reported.wall)
                self._warn_of_slow_save(step, written_s)
            case events.CheckpointFailedEvent():
                job.metrics.checkpoint_failed()
            case events.CheckpointDroppedEvent():
                job.metrics.checkpoint_dropped()
            case events.CheckpointSkippedEvent():
                job.metrics.checkpoint_skipped()
        if once := str(reported.extra.get("once", "")):
            if once in self._logged_once:
                return
            self._logged_once.add(once)
        if reported.kind not in events.QUIET_KINDS:
            job.console.log(reported.reason, "warning" if reported.kind in events.WARNING_KINDS else "info")

    def _warn_of_slow_save(self, step: int, written_s: float) -> None:
        """Once: what SIGTERM has the script save may not be written in time."""
        limit_s = self.job.policy.shutdown_timeout_s
        if written_s > limit_s and not self._warned_of_stops:
            self._warned_of_stops = True
            took = f"the checkpoint of step {step} took {written_s:.0f} s to reach the disk"
            has = f"a stop has {limit_s:g} s (--shutdown-timeout)"
            self.job.console.log(f"{took}, and {has}: raise it, or SIGTERM may cost steps", "warning")


@dataclass(slots=True)
class HangReporter:
    """Suspicions of a hang, verdicts, and ranks that are slow.

    A suspicion is written to the event log only. Most end by themselves, since a slow disk or a long evaluation looks
    like a hang for some seconds, and a line on the console for each would teach people to ignore them.
    """

    job: JobContext
    _suspected_at: float | None = None
    _stragglers: set[int] = field(default_factory=set)

    def on(self, event: JobEvent, now: float) -> None:
        match event:
            case HangVerdict():
                self._report_hang(event, now)
            case StragglersFound():
                self._report_stragglers(event, now)

    def hang_suspected(self, number: int, why: str) -> None:
        """This node suspects a hang. The console stays silent: most suspicions end by themselves."""
        now = self._suspected_at = time.monotonic()
        self.job.metrics.hang_suspected()
        self.job.write(events.HangSuspectedEvent(round=number, mono=now, reason=why))

    def suspicion_lasts(self, number: int, why: str) -> None:
        """Once a minute: a person may wonder, or have a debugger open."""
        self.job.console.log(f"round {number}: a hang is still suspected: {why}")

    def hang_cleared(self, number: int, seconds: float) -> None:
        reason = f"no hang is suspected any more, after {seconds:.1f} s"
        self._suspected_at = None
        self.job.write(events.HangClearedEvent(round=number, mono=time.monotonic(), reason=reason, seconds=seconds))

    def _report_hang(self, verdict: HangVerdict, now: float) -> None:
        """Report a verdict: its cause, the ranks to blame and whether the group restarts.

        The recovery began when progress ended, `hung_s` ago, and not with the verdict: the time until a hang is found
        is part of what it costs.
        """
        job, culprits = self.job, verdict.culprits
        nodes, ranks, slots = zip(*culprits, strict=True) if culprits else ((), (), ())
        job.metrics.hang_detected(verdict.cause, verdict.hung_s, nodes[0] if len(set(nodes)) == 1 else "")
        job.goodput.on_fault(verdict.round, now, ends=verdict.kills_group)
        if verdict.kills_group:
            job.recovery.start(now - verdict.hung_s)
            if self._suspected_at is not None:
                job.recovery.end_part("detect", self._suspected_at)
            job.recovery.end_part("evidence", now)
        job.write(
            events.HangDetectedEvent(
                round=verdict.round, mono=now, reason=verdict.why, cause=verdict.cause, nodes=nodes, ranks=ranks,
                slots=slots, seconds=verdict.hung_s, action="restart" if verdict.kills_group else "report",
            )
        )  # fmt: skip
        hangs = "hangs" if verdict.kills_group else "may hang (only reported)"
        job.console.log(f"round {verdict.round} {hangs}: {verdict.why}", "warning")

    def _report_stragglers(self, found: StragglersFound, now: float) -> None:
        """Each is logged once, when it becomes one, and measured for as long as it stays one."""
        self.job.metrics.stragglers(dict(found.ranks))
        for rank, ratio in found.ranks:
            if rank not in self._stragglers:
                reason = f"rank {rank} is slow: the others wait for it, its own work takes {ratio:.1f} times as long"
                self.job.write(
                    events.StragglerEvent(round=found.round_number, mono=now, reason=reason, rank=rank, ratio=ratio)
                )
                self.job.console.log(f"round {found.round_number}: {reason}", "warning")
        self._stragglers = {rank for rank, _ in found.ranks}
