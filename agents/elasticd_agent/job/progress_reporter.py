"""Reports the progress of this node's workers: steps, checkpoints, and work recovered after a fault."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from elasticd.heartbeat.worker_events import WorkerEvent
from elasticd_agent.hangs.observer import Observation
from elasticd_agent.job.listener import JobEvent
from elasticd_agent.job.report_context import JobContext
from elasticd_agent.model.records import Round
from elasticd_agent.telemetry import events, worker_notes
from elasticd_agent.telemetry.console import ProgressView
from elasticd_agent.telemetry.step_rate import StepRate
from elasticd_agent.workers.group import GroupStarted


@dataclass(slots=True)
class ProgressReporter:
    job: JobContext
    saved: tuple[int, int] | None = None
    """The newest checkpoint that a worker of this node has saved: round, step."""
    _saved_at: float | None = None
    _checkpoint_step: int = -1
    _rate: StepRate = field(default_factory=StepRate)

    def on(self, event: JobEvent, now: float) -> None:
        match event:
            case Observation():
                self._observation(event, now)
            case GroupStarted():
                self._rate.reset()

    def _observation(self, seen: Observation, now: float) -> None:
        job = self.job
        self._work_recovered(seen)  # before the worker events: a pause begins after the step at which it is reported
        for event in seen.worker_events:
            self._worker_event(event)
        before, job.observation = job.observation, seen
        if job.running_round is None or seen.round != job.running_round[0].number:
            return
        round = job.running_round[0]  # its workers may make steps until its group has ended
        if seen.first_step_at is not None:
            job.step = seen.step
        rate = self._rate.observe(seen.step, now, stepped=seen.first_step_at is not None)
        moved = before is None or before.round != seen.round or seen.progress_at != before.progress_at
        if moved and seen.progress_at is not None:
            steps = dict(zip(round.ranks(job.node), (beat.step for beat in seen.heartbeats), strict=False))
            job.metrics.progress(steps, rate, time.time() - (now - seen.progress_at))
        job.metrics.event_lines_lost(job.events.lost)
        self._show(round, rate)

    def _show(self, round: Round, rate: float | None) -> None:
        self.job.console.progress(
            ProgressView(
                round.number,
                round.world_size,
                target=self.job.max_workers(round),
                step=self.job.step,
                steps_per_second=rate,
                checkpoint_at=self._saved_at,
                restarts=round.restarts,
            )
        )

    def _work_recovered(self, seen: Observation) -> None:
        goodput = self.job.goodput
        cost_s = goodput.on_observation(seen)
        if cost_s is not None and seen.progress_at is not None:
            step = goodput.ledger.high_water
            reason = f"caught up at step {step}; " + (f"the fault cost {cost_s:.2f} s" if cost_s else "no work lost")
            self.job.events.write(
                events.WorkRecoveredEvent(
                    round=seen.round, mono=seen.progress_at, reason=reason, step=step, seconds=cost_s
                )
            )

    def _worker_event(self, reported: WorkerEvent) -> None:
        job = self.job
        if reported.kind == "attached" and isinstance(seconds := reported.extra.get("every_seconds"), (int, float)):
            job.metrics.checkpoint_interval(float(seconds))
        event = worker_notes.log_event(reported)
        if event is not None:
            job.events.write(event)
        match event:
            case events.ResumedEvent(step=step) if step > self._checkpoint_step:
                self._checkpoint_step = step
                job.metrics.checkpoint_resumed(step, reported.wall)
            case events.CheckpointSavedEvent(step=step, bytes=size, seconds=seconds):
                self._saved_at, self._checkpoint_step = reported.mono, step
                self.saved = reported.round, step
                job.metrics.checkpoint_saved(step, reported.wall, size, seconds)
            case events.PausedEvent():
                job.goodput.on_pause(reported.mono)
            case events.CheckpointFailedEvent():
                job.metrics.checkpoint_failed()
            case events.CheckpointSkippedEvent():
                job.metrics.checkpoint_skipped()
        if reported.kind not in worker_notes.QUIET_KINDS:
            job.console.log(reported.reason, "warning" if reported.kind in worker_notes.WARNING_KINDS else "info")
