"""What this node sees of the group it runs, and what it tells the other nodes of that.

It exists so that the loop only has to say when a group begins, has ended, and when it is time to look. A look reads
beats, notes and /proc; what follows from it goes to the planner (steps, checkpoints, holds, paces, suspicions), to the
story, and, of a round's first step, back to the loop. It decides nothing about the group and never waits.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

from elasticd.heartbeat.worker_events import WorkerEvent
from elasticd_agent.hangs.deadlines import StepHistory
from elasticd_agent.hangs.detector import HangDetector
from elasticd_agent.hangs.evidence import EvidenceTarget
from elasticd_agent.hangs.observer import GroupObserver, Observation
from elasticd_agent.hangs.stragglers import WaitCounter
from elasticd_agent.job import exit_cause as lastwords
from elasticd_agent.model.messages import FirstStep
from elasticd_agent.model.records import Round
from elasticd_agent.rendezvous.member import RendezvousMember
from elasticd_agent.workers.group import GroupStarted
from elasticd_agent.workers.launcher.requests import WorkerSpec

EAGER_INTERVAL_S = 0.02
"""How often a group is looked at until its first step, so that the next one is parked soon."""
EAGER_S = 60.0
"""For so long; a group that has not stepped by then is not about to at any moment, or never notes its steps."""
INTERVAL_S = 0.25
HASTENED_S = 0.3
"""How long a group is looked at as eagerly once another agent has asked whether we are here: something may be wrong."""
REPORT_CHECKPOINT_S = 10.0
"""How often other nodes hear of a new checkpoint: what a Round says it resumes from is a proposal, and rank 0 looks."""


class ObservationListener(Protocol):
    def on(self, event: Observation, now: float) -> None: ...


@dataclass(frozen=True, slots=True)
class PreparedGroup:
    """What a group of this node needs to be started and watched. `targets` are its workers, pids not yet known."""

    workers: tuple[WorkerSpec, ...]
    observer: GroupObserver
    targets: tuple[EvidenceTarget, ...]
    evidence_dir: Path


class GroupMonitor:
    """One job's, one group at a time. It belongs to the deciding thread."""

    def __init__(
        self,
        rendezvous: RendezvousMember,
        history: StepHistory,
        detector: HangDetector,
        listener: ObservationListener,
        *,
        shared: bool,
    ) -> None:
        self.detector = detector
        self._rendezvous, self._history, self._listener, self._shared = rendezvous, history, listener, shared
        self._wait_shares = WaitCounter()
        self._prepared: PreparedGroup | None = None
        self._at = self._eager_until = self._hasty_until = 0.0
        self._step_at: tuple[int, float] = (0, 0.0)
        self._checkpoint_reported_at = float("-inf")
        self._pending_exception = ""  # what has been said of this round's ranks
        self._stepped_round = 0  # the newest round that was seen to step
        self._observation: Observation | None = None

    @property
    def observation(self) -> Observation | None:
        """The last look at the group that runs; None while there is none. Safe from any thread."""
        return self._observation

    @property
    def number(self) -> int | None:
        """The round of the group that is looked at."""
        return self._prepared.observer.round if self._prepared is not None else None

    @property
    def at(self) -> float | None:
        """When to look again; None while there is no group."""
        return self._at if self._prepared is not None else None

    def soon(self, now: float) -> None:
        """Look at once: something else has been heard of the group."""
        self._at = now

    def hasten(self, now: float) -> None:
        """Another agent has knocked: a rank of ours may have raised what the others fell by."""
        self._at, self._hasty_until = now, now + HASTENED_S

    def begin(self, round: Round, prepared: PreparedGroup, now: float) -> None:
        """The group of `round` is about to be started."""
        self.drop()
        self._prepared = prepared
        self._history.begin()
        self._wait_shares.begin()
        self._at, self._step_at = now + EAGER_INTERVAL_S, (0, now)
        self._eager_until = now + EAGER_S
        self._rendezvous.update_facts(next_step_due=now)
        self._pending_exception = ""
        self._rendezvous.update_record(ready_round=round.number, wait_counts=(), pending_exception="")

    def started(self, started: GroupStarted) -> None:
        """Its processes are there."""
        prepared = self._prepared
        if prepared is None or prepared.observer.round != started.number:
            return
        prepared.observer.set_processes(started.pids, started.store_pid)
        targets = [replace(t, pid=pid) for t, pid in zip(prepared.targets, started.pids, strict=True)]
        self.detector.begin(started.number, targets, prepared.evidence_dir)

    def exited(self, rank: int) -> None:
        """A worker has ended with code 0."""
        if self._prepared is not None:
            self._prepared.observer.worker_exited(rank)

    def ending(self) -> None:
        """The group is being ended: what it does now is no sign of anything."""
        self.detector.end()

    def end(self, number: int) -> FirstStep | None:
        """The group of round `number` is gone: read what its workers noted last, and look no more."""
        self.ending()
        self._rendezvous.update_facts(next_step_due=None)
        first = self.observe(time.monotonic()) if self.number == number else None
        if self.number == number:
            self.drop()
        return first

    def drop(self) -> None:
        """Look no more."""
        if self._prepared is not None:
            self._prepared.observer.close()
            self._prepared = self._observation = None

    def observe(self, now: float) -> FirstStep | None:
        """Look once, if there is a group; its first step, if that was seen for the first time."""
        if self._prepared is None:
            return None
        self._observation = seen = self._prepared.observer.observe(now)
        number, at = seen.round, seen.first_step_at
        first = FirstStep(number, at) if at is not None and number != self._stepped_round else None
        if first is not None:
            self._stepped_round = number
            self._rendezvous.update_record(stepped_round=number)
        for note in seen.worker_events:
            self._worker_event(note)
        self._find_pending_exception(seen)
        self._rendezvous.update_facts(high_water=self._history.high_water(seen))
        self._advanced(seen.step, now)
        if (counts := self._wait_shares.update(seen)) is not None:
            self._rendezvous.update_record(wait_counts=counts)
        self.detector.update(seen, self._history.deadline_s(seen), now)
        self._listener.on(seen, now)
        calm = number == self._stepped_round or now > self._eager_until
        self._at = now + (INTERVAL_S if calm and now > self._hasty_until else EAGER_INTERVAL_S)
        return first

    def _find_pending_exception(self, seen: Observation) -> None:
        """A rank that raised has last files to write; its peers fall before it ends, and nobody may wait for it."""
        if self._pending_exception:
            return
        for rank, beat in zip(seen.ranks, seen.heartbeats, strict=True):
            if beat.exit_report is not None and (why := lastwords.describe_exception(beat.exit_report)):
                self._pending_exception = f"rank {rank.rank} {why}"
                self._rendezvous.update_record(pending_exception=self._pending_exception)
                return

    def _advanced(self, step: int, now: float) -> None:
        """Work out when the next step should be done: what the planner may rely on to see that nobody trains."""
        before, at = self._step_at
        if step > before:
            step_s = (now - at) / (step - before)
            self._step_at = step, now
            self._rendezvous.update_facts(next_step_due=now + 2 * step_s)

    def _worker_event(self, note: WorkerEvent) -> None:
        """What a Session said that other agents must know."""
        number, step = note.round, note.step
        match note.kind:
            case "checkpoint_saved" if step is not None:
                self._history.checkpoint_saved(float(note.extra.get("seconds", 0.0)))
                self._rendezvous.update_facts(checkpoint=(number, step))
                now = time.monotonic()
                if self._shared and now >= self._checkpoint_reported_at + REPORT_CHECKPOINT_S:
                    self._checkpoint_reported_at = now
                    self._rendezvous.update_record(
                        checkpoint=(number, step), high_water=self._rendezvous.facts.high_water
                    )
            case "attached":
                self._history.has_checkpoint = True
            case "can_pause":
                self._rendezvous.update_record(can_pause=number)
            case "paused" if step is not None:
                self._rendezvous.update_record(paused=number, checkpoint=(number, step), high_water=step)
            case "pause_ended" | "cannot_pause":
                self._rendezvous.update_record(paused=0, can_pause=0)
