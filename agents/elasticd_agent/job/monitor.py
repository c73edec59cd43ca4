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

from elasticd.heartbeat.worker_events import Note
from elasticd_agent.hangs.detector import Suspicion
from elasticd_agent.hangs.evidence import Target
from elasticd_agent.hangs.observer import Seen, Watch
from elasticd_agent.hangs.step_history import History
from elasticd_agent.hangs.wait_share import Paces
from elasticd_agent.job import exit_cause as lastwords
from elasticd_agent.model.messages import FirstStep
from elasticd_agent.model.records import Round
from elasticd_agent.rendezvous.driver import Meeting
from elasticd_agent.workers.heartbeat import understood
from elasticd_agent.workers.launcher.requests import Worker
from elasticd_agent.workers.manager import Started

EAGER_LOOK_S = 0.02
"""How often a group is looked at until its first step, so that the next one is parked soon."""
EAGER_S = 60.0
"""For so long; a group that has not stepped by then is not about to at any moment, or never notes its steps."""
LOOK_S = 0.25
HASTY_S = 0.3
"""How long a group is looked at as eagerly once another agent has asked whether we are here: something may be wrong."""
TELL_CHECKPOINT_S = 10.0
"""How often other nodes hear of a new checkpoint: what a Round says it resumes from is a proposal, and rank 0 looks."""


class Listener(Protocol):
    """Who is told of every look."""

    def seen(self, seen: Seen, now: float) -> None: ...


@dataclass(frozen=True, slots=True)
class Prepared:
    """What a group of this node needs to be started and watched. `targets` are its workers, pids not yet known."""

    workers: tuple[Worker, ...]
    watch: Watch
    targets: tuple[Target, ...]
    evidence: Path


class Looking:
    """One job's, one group at a time. It belongs to the deciding thread."""

    def __init__(
        self, meeting: Meeting, history: History, suspicion: Suspicion, listener: Listener, *, shared: bool
    ) -> None:
        self.suspicion = suspicion
        self._meeting, self._history, self._listener, self._shared = meeting, history, listener, shared
        self._paces = Paces()
        self._prepared: Prepared | None = None
        self._at = self._eager_until = self._hasty_until = 0.0
        self._step_at: tuple[int, float] = (0, 0.0)
        self._told_at = float("-inf")
        self._raised = ""  # what has been said of this round's ranks
        self._stepped = 0  # the newest round that was seen to step
        self._seen: Seen | None = None

    @property
    def seen(self) -> Seen | None:
        """The last look at the group that runs; None while there is none. Safe from any thread."""
        return self._seen

    @property
    def number(self) -> int | None:
        """The round of the group that is looked at."""
        return self._prepared.watch.number if self._prepared is not None else None

    @property
    def at(self) -> float | None:
        """When to look again; None while there is no group."""
        return self._at if self._prepared is not None else None

    def soon(self, now: float) -> None:
        """Look at once: something else has been heard of the group."""
        self._at = now

    def hasten(self, now: float) -> None:
        """Another agent has knocked: a rank of ours may have raised what the others fell by."""
        self._at, self._hasty_until = now, now + HASTY_S

    def begin(self, round: Round, prepared: Prepared, now: float) -> None:
        """The group of `round` is about to be started."""
        self.drop()
        self._prepared = prepared
        self._history.begin()
        self._paces.begin()
        self._at, self._step_at = now + EAGER_LOOK_S, (0, now)
        self._eager_until = now + EAGER_S
        self._meeting.facts.advances_by = now
        self._raised = ""
        self._meeting.update(ready=round.number, pace=(), raised="")

    def started(self, started: Started) -> None:
        """Its processes are there."""
        prepared = self._prepared
        if prepared is None or prepared.watch.number != started.number:
            return
        prepared.watch.started(started.pids, started.store_pid)
        targets = [replace(t, pid=pid) for t, pid in zip(prepared.targets, started.pids, strict=True)]
        self.suspicion.begin(started.number, targets, prepared.evidence)

    def exited(self, rank: int) -> None:
        """A worker has ended with code 0."""
        if self._prepared is not None:
            self._prepared.watch.exited(rank)

    def ending(self) -> None:
        """The group is being ended: what it does now is no sign of anything."""
        self.suspicion.end()

    def end(self, number: int) -> FirstStep | None:
        """The group of round `number` is gone: read what its workers noted last, and look no more."""
        self.ending()
        self._meeting.facts.advances_by = None
        first = self.look(time.monotonic()) if self.number == number else None
        if self.number == number:
            self.drop()
        return first

    def drop(self) -> None:
        """Look no more."""
        if self._prepared is not None:
            self._prepared.watch.close()
            self._prepared = self._seen = None

    def look(self, now: float) -> FirstStep | None:
        """Look once, if there is a group; its first step, if that was seen for the first time."""
        if self._prepared is None:
            return None
        self._seen = seen = self._prepared.watch.look(now)
        number, at = seen.number, seen.first_step_at
        first = FirstStep(number, at) if at is not None and number != self._stepped else None
        if first is not None:
            self._stepped = number
            self._meeting.update(stepped=number)
        for note in seen.notes:
            self._noted(note)
        self._who_raised(seen)
        self._meeting.facts.high_water = self._history.high_water(seen)
        self._advanced(seen.step, now)
        if (counts := self._paces.look(seen)) is not None:
            self._meeting.update(pace=counts)
        self.suspicion.look(seen, self._history.deadline_s(seen), now)
        self._listener.seen(seen, now)
        calm = number == self._stepped or now > self._eager_until
        self._at = now + (LOOK_S if calm and now > self._hasty_until else EAGER_LOOK_S)
        return first

    def _who_raised(self, seen: Seen) -> None:
        """A rank that raised has last files to write; its peers fall before it ends, and nobody may wait for it."""
        if self._raised:
            return
        for rank, beat in zip(seen.ranks, seen.beats, strict=True):
            if beat.last_words is not None and (why := lastwords.raised(understood(beat.last_words))):
                self._raised = f"rank {rank.rank} {why}"
                self._meeting.update(raised=self._raised)
                return

    def _advanced(self, step: int, now: float) -> None:
        """Work out when the next step should be done: what the planner may rely on to see that nobody trains."""
        before, at = self._step_at
        if step > before:
            step_s = (now - at) / (step - before)
            self._step_at = step, now
            self._meeting.facts.advances_by = now + 2 * step_s

    def _noted(self, note: Note) -> None:
        """What a Session said that other agents must know."""
        number, step = note.round, note.step
        match note.kind:
            case "checkpoint_saved" if step is not None:
                self._history.saved(float(note.more.get("seconds", 0.0)))
                self._meeting.facts.checkpoint = (number, step)
                now = time.monotonic()
                if self._shared and now >= self._told_at + TELL_CHECKPOINT_S:
                    self._told_at = now
                    self._meeting.update(checkpoint=(number, step), high_water=self._meeting.facts.high_water)
            case "attached":
                self._history.attached = True
            case "can_hold":
                self._meeting.update(can_hold=number)
            case "holding" if step is not None:
                self._meeting.update(held=number, checkpoint=(number, step), high_water=step)
            case "hold_over" | "cannot_hold":
                self._meeting.update(held=0, can_hold=0)
