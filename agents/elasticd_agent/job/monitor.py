"""Observes this node's group, and reports to the other nodes what they need.

An observation reads heartbeats, worker events and /proc. Steps, checkpoints, pauses, wait counts and suspicions go to
the rendezvous, the observation to the listener, and a round's first step to the loop. It never waits.

Until the first step it observes often (`EAGER_INTERVAL_S`), since that step ends a recovery and allows the next one to
be prepared; afterwards four times a second. Another agent's probe makes it observe often again for a moment: a peer has
failed somewhere, and the exit report of a rank here may name the cause.

Local facts and the node record are two different things. Facts (`update_local_facts`) stay on this node: the leader
among the agents reads its own. The record (`update_node_record`) is written to the store for everybody, so only what
changes rarely belongs there: the first step, a pause, a checkpoint every ten seconds, the number of waits when a second
has passed.
"""

from __future__ import annotations

import time
from collections.abc import Collection
from dataclasses import dataclass, replace
from pathlib import Path

from elasticd.heartbeat.worker_events import WorkerEvent, WorkerEventReader
from elasticd_agent.hangs.deadlines import StepHistory
from elasticd_agent.hangs.detector import HangDetector
from elasticd_agent.hangs.evidence import EvidenceTarget
from elasticd_agent.hangs.observer import GroupObserver, Observation
from elasticd_agent.hangs.rank import RankState, describe_waits
from elasticd_agent.hangs.stragglers import WaitCounter
from elasticd_agent.job import exit_cause
from elasticd_agent.job.listener import JobListener
from elasticd_agent.model.messages import FirstStep, KillGroup
from elasticd_agent.model.phrases import listing, plural
from elasticd_agent.model.records import Round
from elasticd_agent.model.reports import RankReport
from elasticd_agent.rendezvous.member import RendezvousMember
from elasticd_agent.workers.events import GroupStarted, WorkersReleased
from elasticd_agent.workers.groups import KeepRequest
from elasticd_agent.workers.launcher.requests import WorkerSpec

EAGER_INTERVAL_S = 0.02
"""Until the first step, so that the next group is parked soon."""
EAGER_LIMIT_S = 60.0
"""A group without a step after this time will not make one in a moment, or never reports its steps."""
OBSERVATION_INTERVAL_S = 0.25
EAGER_AFTER_PROBE_S = 0.3
"""After another agent has probed this one, which is a sign of a failure."""
STATE_KEPT_EVENTS = ("attached", "resumed", "snapshot", "checkpoint_saved")
"""The next round continues from the state of that moment, or a newer one."""
PARK_S, MAX_PARK_S = 1.0, 10.0
"""The time that a worker has to leave a round: as long as its last step took, since it may be in the middle of one. And
to begin the next one, for which it waits: the longer time where it does anything, or waits for a processor."""
LOST_WAIT_S = 3.0
"""After a rank has exited: who then still waits for it, waits in vain. Ranks look for each other's messages every 0.25
s."""
CHECKPOINT_REPORT_INTERVAL_S = 10.0
"""The interval of reports of new checkpoints to other nodes: a Round records one, the ranks look for the newest."""


@dataclass(frozen=True, slots=True)
class GroupSetup:
    """The workers of a group, and how to observe them. The pids of `targets` follow when it has started."""

    workers: tuple[WorkerSpec, ...]
    observer: GroupObserver
    targets: tuple[EvidenceTarget, ...]
    evidence_dir: Path


def find_late_ranks(seen: Observation, kept: Collection[int]) -> list[RankReport]:
    """Those of the workers that were said to wait for the round which have not begun it in time."""
    waiting = [seen.ranks[at] for at in kept if not seen.heartbeats[at].started_ns]
    return [rank for rank in waiting if rank.quiet_s >= PARK_S or rank.idle_s >= MAX_PARK_S]


class GroupMonitor:
    """The monitor of one group at a time. It belongs to the deciding thread.

    The life of a group: `begin` before it starts, `on_started` with its pids, `observe` as often as
    `next_observation_at` says, `on_ending` as soon as it is ended on purpose, `on_ended` when its last process is gone.
    """

    def __init__(
        self,
        rendezvous: RendezvousMember,
        history: StepHistory,
        detector: HangDetector,
        listener: JobListener,
        *,
        multi_node: bool,
    ) -> None:
        self.detector = detector
        self._rendezvous = rendezvous
        self._history = history
        self._listener = listener
        self._multi_node = multi_node
        self._wait_shares = WaitCounter()
        self._prepared: GroupSetup | None = None
        self._earlier: list[WorkerEventReader] = []
        self._at = self._eager_until = self._hastened_until = 0.0
        self._step_at: tuple[int, float] = (0, 0.0)
        self._step_s = 0.0
        self._kept: tuple[int, ...] = ()  # workers of this round that have kept their process of an earlier one
        self._late_reported = False  # that one of them has not begun it in time
        self._checkpoint_reported_at = float("-inf")
        self._pending_exception = ""  # reported of this round's ranks
        self._gone: set[int] = set()  # ranks of this round that have exited
        self._gone_at = 0.0  # when the last of them did
        self._stepped_round = 0  # the newest round with an observed step
        self.observation: Observation | None = None
        """The last observation of the running group; None while there is none. Safe from any thread."""

    @property
    def number(self) -> int | None:
        """The round of the observed group."""
        return self._prepared.observer.round if self._prepared is not None else None

    @property
    def next_observation_at(self) -> float | None:
        """The time of the next observation; None while there is no group."""
        return self._at if self._prepared is not None else None

    def observe_next_turn(self, now: float) -> None:
        self._at = now

    def observe_eagerly(self, now: float, seconds: float = EAGER_AFTER_PROBE_S) -> None:
        """Observe often for so long in this round: something is about to happen to a rank here."""
        self._at = now
        self._hastened_until = now + seconds

    def begin(self, round: Round, prepared: GroupSetup, now: float) -> None:
        """Called before the group of `round` is started."""
        self.forget_group()
        self._prepared = prepared
        prepared.observer.earlier_event_readers = self._earlier
        self.detector.group_expected(round.number)
        self._history.group_started()
        self._wait_shares.group_started()
        self._at = now + EAGER_INTERVAL_S
        self._step_at, self._step_s, self._kept, self._late_reported = (0, now), 0.0, (), False
        self._eager_until, self._hastened_until = now + EAGER_LIMIT_S, 0.0
        self._rendezvous.update_local_facts(next_step_due=now)
        self._pending_exception = ""
        self._gone = set()
        self._rendezvous.update_node_record(ready_round=round.number, wait_counts=(), pending_exception="")

    def on_started(self, started: GroupStarted) -> None:
        """Take over the pids of the group that has just started; from now on a hang can be found."""
        prepared = self._prepared
        if prepared is None or prepared.observer.round != started.number:
            return
        self._kept = started.kept_ranks
        prepared.observer.set_processes(started.pids, started.store_pid, started.held_ranks, started.store_port)
        targets = [replace(t, pid=pid) for t, pid in zip(prepared.targets, started.pids, strict=True)]
        self.detector.group_started(started.number, targets, prepared.evidence_dir)

    def on_released(self, released: WorkersReleased) -> None:
        if self.number == released.number and self._prepared is not None:
            self._prepared.observer.released(released.local_ranks)

    def on_exited(self, rank: int, ok: bool) -> None:
        """A worker has exited; `ok`: with code 0."""
        self._gone.add(rank)
        self._gone_at = time.monotonic()
        if ok and self._prepared is not None:
            self._prepared.observer.worker_exited(rank)

    def workers_to_keep(self, kill: KillGroup) -> KeepRequest:
        """All whose script can enter another round, but none that hangs or is stopped.

        A round that was changed in place and fails before its first step may have failed for that.
        """
        seen = self.observation
        if seen is None or seen.round != kill.round_number:
            return KeepRequest()
        if self._kept and self._stepped_round != kill.round_number:
            why = "it kept workers' processes, and has failed before its first step"
            self._listener.log(f"round {kill.round_number}: {why}: the next round has new processes")
            return KeepRequest()
        fit = (at for at, rank in enumerate(seen.ranks) if rank.slot not in kill.hung_slots and rank.state != "T")
        return KeepRequest(tuple(fit), min(max(PARK_S, self._step_s), MAX_PARK_S), kill.why)

    def on_ending(self) -> None:
        """While a group is ended, its silence is no sign of a hang."""
        self.detector.group_ended()

    def on_ended(self, number: int) -> FirstStep | None:
        """The group of round `number` has ended: read its last worker events, and stop."""
        self.on_ending()
        self._rendezvous.update_local_facts(next_step_due=None)
        first = self.observe(time.monotonic()) if self.number == number else None
        if self.number == number:
            self.forget_group()
        return first

    def forget_group(self) -> None:
        """Forget the group. The readers of its worker events stay for the next one: a rank may have written its last
        line as it was killed.
        """
        if self._prepared is not None:
            self._earlier = self._prepared.observer.event_readers
            self._prepared.observer.close()
            self._prepared = self.observation = None

    def observe(self, now: float) -> FirstStep | None:
        """Observe the group, if there is one; returns its first step, once."""
        if self._prepared is None:
            return None
        self.observation = seen = self._prepared.observer.observe(now)
        number, at = seen.round, seen.first_step_at
        first = FirstStep(number, at) if at is not None and number != self._stepped_round else None
        if first is not None:
            self._stepped_round = number
            self._rendezvous.update_node_record(stepped_round=number)
        for event in seen.worker_events:
            self._on_worker_event(event)
        self._report_pending_exception(seen)
        self._rendezvous.update_local_facts(high_water=self._history.update_high_water(seen))
        self._update_next_step_due(seen.step, now)
        if (counts := self._wait_shares.update(seen)) is not None:
            self._rendezvous.update_node_record(wait_counts=counts)
        learned = (
            self._history.learn_deadline_s(seen),
            now,
            self._history.longest_pause_s,
            self._history.lost_by_restart_s(seen),
        )
        self.detector.update(seen, *learned)
        self._listener.on(seen, now)
        calm = number == self._stepped_round or now > self._eager_until
        self._at = now + (OBSERVATION_INTERVAL_S if calm and now > self._hastened_until else EAGER_INTERVAL_S)
        return first

    def last_step(self, ranks: Collection[int]) -> int | None:
        """The last step that all of `ranks` have finished, or all ranks here; None if that is unknown."""
        seen = self.observation
        if seen is None:
            return None
        steps = {rank.rank: beat.step for rank, beat in zip(seen.ranks, seen.heartbeats, strict=True)}
        return min((steps[rank] for rank in steps.keys() & ranks or steps), default=None)

    def describe_lost_wait(self, now: float) -> str:
        """ "1 rank waits in session.step() after the exit of rank 0", if all ranks left here wait for such; or "".

        What the others have written before they exited is read within `LOST_WAIT_S` by a process that runs.
        """
        seen = self.observation
        if seen is None or not self._gone or now < self._gone_at + LOST_WAIT_S:
            return ""
        left = [RankState("", rank) for rank in seen.ranks if rank.rank not in self._gone]
        if not left or not all(rank.waits_for(self._gone) for rank in left):
            return ""
        gone = f"{plural(len(self._gone), 'rank')} {listing(sorted(self._gone))}"
        return f"{describe_waits(left)} after the exit of {gone}"

    def take_late_reason(self) -> str:
        """Return, once, why this round cannot go on: a process was said to wait for it, and has not begun it; or ""."""
        seen = self.observation
        if seen is None or self._late_reported or not (absent := find_late_ranks(seen, self._kept)):
            return ""
        self._late_reported = True
        ranks = f"{plural(len(absent), 'rank')} {listing(rank.rank for rank in absent)}"
        idle_s = min(rank.idle_s for rank in absent)
        return f"{ranks} said to wait for it, and did not begin it within {idle_s:.1f} s"

    def _report_pending_exception(self, seen: Observation) -> None:
        """A rank that raised may still write its last files: its peers fail before it exits, and the leader must not
        wait for it."""
        if self._pending_exception:
            return
        for rank, beat in zip(seen.ranks, seen.heartbeats, strict=True):
            if beat.exit_report is not None and (why := exit_cause.describe_primary_exception(beat.exit_report)):
                self._pending_exception = f"rank {rank.rank} {why}"
                self._rendezvous.update_node_record(pending_exception=self._pending_exception)
                return

    def _update_next_step_due(self, step: int, now: float) -> None:
        """Estimate when the next step is due: the leader uses it to find that training has stopped."""
        before, at = self._step_at
        if step > before:
            self._step_s = (now - at) / (step - before)
            self._step_at = step, now
            self._rendezvous.update_local_facts(next_step_due=now + 2 * self._step_s)

    def _on_worker_event(self, event: WorkerEvent) -> None:
        number, step = event.round, event.step
        if number == self.number and event.kind in STATE_KEPT_EVENTS:
            self._history.state_saved(event.mono)
        if number == self.number and "saves_at_faults" in event.extra:
            self._history.set_saves_at_faults(event.rank, event.extra["saves_at_faults"] is True)
        match event.kind:
            case "checkpoint_saved" if step is not None:
                # A save that is waited for takes as long as the disk, although the others block only for a copy.
                seconds = event.extra.get("written_seconds", event.extra.get("seconds", 0.0))
                self._history.checkpoint_saved(float(seconds))
                # What a rank resumed from is written beside newer saves, and may end after them.
                newest = max((number, step), self._rendezvous.facts.checkpoint or (0, 0))
                self._rendezvous.update_local_facts(checkpoint=newest)
                now = time.monotonic()
                if self._multi_node and now >= self._checkpoint_reported_at + CHECKPOINT_REPORT_INTERVAL_S:
                    self._checkpoint_reported_at = now
                    self._rendezvous.update_node_record(checkpoint=newest, high_water=self._rendezvous.facts.high_water)
            case "can_pause":
                self._rendezvous.update_node_record(can_pause=number)
            case "paused" if step is not None:
                saved = self._rendezvous.facts.checkpoint  # not this step, where processes hold it
                self._rendezvous.update_node_record(paused=number, checkpoint=saved, high_water=step)
            case "pause_ended" | "cannot_pause":
                self._rendezvous.update_node_record(paused=0, can_pause=0)
