"""Reports this node's workers: how they start, how they end, and which processes survive SIGKILL."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from elasticd_agent.job.listener import GroupEnding, JobEvent, SlotChanged
from elasticd_agent.job.report_context import JobContext
from elasticd_agent.model.messages import FirstStep, GroupEnded, StoreExited, WorkerExited
from elasticd_agent.telemetry import events
from elasticd_agent.workers.group import GroupStarted, LauncherReady, ProcessReaped, ProcessUnkillable
from elasticd_agent.workers.launcher.owned_group import STORE_RANK


@dataclass(slots=True)
class WorkerReporter:
    job: JobContext
    on_group_ended: Callable[[int], None]
    _pids: dict[int, int] = field(default_factory=dict)
    """By local rank, of the group that runs."""
    _started_at: float = 0.0
    _ending_since: float | None = None
    _end_requested: set[int] = field(default_factory=set)
    _unkillable: dict[int, int] = field(default_factory=dict)
    """Processes that survive SIGKILL, and their rounds."""

    def on(self, event: JobEvent, now: float) -> None:
        match event:
            case LauncherReady():
                self._launcher(event, now)
            case GroupStarted():
                self._started(event, now)
            case GroupEnding(number):
                self._end_requested.add(number)
                self.job.goodput.on_group_ending(number)
                if self._ending_since is None:
                    self._ending_since = now
            case WorkerExited():
                self._worker_exited(event)
            case StoreExited():
                self._store_exited(event)
            case FirstStep(number, at):
                self._first_step(number, at)
            case GroupEnded(number):
                self._ended(number, now)
            case SlotChanged(cause, sentence):
                self._slot_changed(cause, sentence, now)

    def _launcher(self, launcher: LauncherReady, now: float) -> None:
        number = self.job.round_number
        self.job.events.write(
            events.LauncherReadyEvent(
                round=number, mono=now, reason=launcher.reason, mode=launcher.mode, seconds=launcher.seconds
            )
        )
        if launcher.mode == "cold":
            self.job.console.log(launcher.reason, "warning")

    def _started(self, started: GroupStarted, now: float) -> None:
        job = self.job
        assert job.round is not None
        self._pids = {STORE_RANK: started.store_pid, **dict(enumerate(started.pids))}
        self._started_at, self._ending_since = now, None
        job.recovery.mark("start", now)
        job.metrics.group_started(len(started.pids), started.warm)
        how = "forked from the warm launcher" if started.warm else "started cold"
        job.events.write(
            events.GroupStartedEvent(
                round=started.number,
                mono=now,
                reason=f"{len(started.pids)} workers {how}",
                ranks=tuple(job.round.ranks(job.node)),
                pids=tuple(started.pids),
                warm=started.warm,
            )
        )

    def _worker_exited(self, exit: WorkerExited) -> None:
        job, status = self.job, exit.status
        requested = exit.number in self._end_requested
        if status.ok:
            job.goodput.on_exit(exit.at)
        elif not requested:
            self._fault(exit.number, exit.at)
        kind = "requested" if requested else "success" if status.ok else "signal" if status.signal else "exit_code"
        job.metrics.worker_exited(kind)
        pid = self._pids.pop(exit.local_rank, 0)
        beats = job.observation.heartbeats if job.observation is not None else ()
        job.events.write(
            events.WorkerExitedEvent(
                round=exit.number,
                mono=exit.at,
                reason=f"rank {exit.rank} (pid {pid}) {status.text}",
                rank=exit.rank,
                local_rank=exit.local_rank,
                pid=pid,
                exit_code=status.code,
                signal=status.signal,
                requested=requested,
                step=beats[exit.local_rank].step or None if exit.local_rank < len(beats) else None,
            )
        )

    def _store_exited(self, exit: StoreExited) -> None:
        """Only as the first sign of a fault: we end the store when every worker has exited, or the group is ended."""
        job = self.job
        workers_left = any(local_rank != STORE_RANK for local_rank in self._pids)
        if exit.number in self._end_requested or job.recovery.fault_at is not None or not workers_left:
            return
        self._fault(exit.number, exit.at)
        job.events.write(
            events.StoreExitedEvent(
                round=exit.number,
                mono=exit.at,
                reason=f"the workers' store {exit.why}",
                pid=self._pids.get(STORE_RANK, 0),
                exit_code=exit.status.code if exit.status is not None else None,
                signal=exit.status.signal if exit.status is not None else None,
            )
        )

    def _first_step(self, number: int, at: float) -> None:
        job = self.job
        recovery_s, parts = job.recovery.finish(at) or (None, {})
        beats = job.observation.heartbeats if job.observation is not None else ()
        first = min(range(len(beats)), key=lambda i: beats[i].first_step_ns or 1 << 63, default=0)
        start_s = at - self._started_at
        job.metrics.first_step(start_s, recovery_s)
        job.metrics.recovered(parts)
        reason = f"first step {start_s:.2f} s after the start"
        if recovery_s is not None:
            reason = f"training again {recovery_s:.2f} s after the fault"
        job.console.log(f"round {number}: {reason}")
        assert job.round is not None
        ranks = job.round.ranks(job.node)
        job.events.write(
            events.FirstStepEvent(
                round=number,
                mono=at,
                reason=reason,
                step=max(beats[first].step, 1) if beats else 1,
                rank=ranks[first] if first < len(ranks) else 0,
                start_seconds=start_s,
                recovery_seconds=recovery_s,
            )
        )

    def _ended(self, number: int, now: float) -> None:
        job = self.job
        if any(local_rank != STORE_RANK for local_rank in self._pids):
            self._fault(number, now)  # workers without an exit status: their owner was killed
        job.goodput.on_group_ended(number, now)
        job.recovery.mark("stop", now)
        job.metrics.group_ended()
        self.on_group_ended(number)
        survivors = tuple(pid for pid, round in self._unkillable.items() if round == number)
        but = f" except unkillable pids {', '.join(map(str, survivors))}" if survivors else ""
        job.events.write(
            events.GroupEndedEvent(
                round=number,
                mono=now,
                reason=f"round {number}: all processes reaped{but}",
                seconds=now - self._ending_since if self._ending_since is not None else 0.0,
                survivors=survivors,
            )
        )
        self._pids.clear()

    def _slot_changed(self, cause: ProcessUnkillable | ProcessReaped, sentence: str, now: float) -> None:
        job = self.job
        if isinstance(cause, ProcessReaped):
            self._unkillable.pop(cause.pid, None)
            job.console.log(sentence)
            job.events.write(
                events.ProcessReapedEvent(round=job.round_number, mono=now, reason=sentence, pid=cause.pid)
            )
        else:
            self._unkillable[cause.pid] = cause.number
            job.console.log(sentence, "warning")
            job.events.write(
                events.ProcessUnkillableEvent(
                    round=cause.number,
                    mono=now,
                    reason=sentence,
                    pid=cause.pid,
                    rank=cause.rank,
                    slot=cause.slot,
                    state=cause.state,
                    wchan=cause.wchan,
                )
            )
        job.metrics.unkillable_processes(len(self._unkillable))

    def _fault(self, number: int, at: float) -> None:
        self.job.recovery.start(at)
        self.job.goodput.on_fault(number, at)
