"""What the agent sees of the group it runs: beats and notes, read at its own pace.

It turns shared memory and note files into facts: the step, the first step's time, the notes since the last look, and
how long nobody has made progress. Ages count attentive time only: a turn that took long (the machine was suspended, the
agent was starved) ages nobody. It never judges and never waits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from elasticd.beat import Beat, BeatReader, Source
from elasticd.errors import WireError
from elasticd.notes import Note, NoteReader

ATTENTIVE_S = 1.0
"""A gap between two looks counts as at most this much."""


@dataclass(frozen=True, slots=True)
class Seen:
    """One look at the group. `first_step_at` and `progress_at` are CLOCK_MONOTONIC seconds, None if there is none."""

    number: int
    beats: tuple[Beat, ...]
    notes: tuple[Note, ...]
    idle_s: float

    @property
    def step(self) -> int:
        return max((beat.step for beat in self.beats), default=0)

    @property
    def first_step_at(self) -> float | None:
        times = [beat.first_step_ns for beat in self.beats if beat.first_step_ns]
        return min(times) / 1e9 if times else None

    @property
    def progress_at(self) -> float | None:
        times = [beat.progress_ns for beat in self.beats if beat.progress_ns]
        return max(times) / 1e9 if times else None

    @property
    def has_session(self) -> bool:
        return any(beat.source == Source.SESSION for beat in self.beats)


@dataclass(slots=True)
class Watch:
    """Reads the beats and notes of one round's workers on this node."""

    number: int
    beats: Sequence[Path]
    notes: Sequence[Path]
    _readers: list[BeatReader] = field(default_factory=list)
    _note_readers: list[NoteReader] = field(default_factory=list)
    _last_look: float | None = None
    _last_progress: float | None = None
    _idle_s: float = 0.0

    def __post_init__(self) -> None:
        self._readers = [BeatReader(path) for path in self.beats]
        self._note_readers = [NoteReader(path) for path in self.notes]

    def look(self, now: float) -> Seen:
        """Read everything once. A beat that makes no sense counts as one that says nothing."""
        beats = tuple(read_beat(reader) for reader in self._readers)
        notes: list[Note] = []
        for note_reader in self._note_readers:
            notes += note_reader.read()[0]
        seen = Seen(self.number, beats, tuple(sorted(notes, key=lambda note: note.mono)), 0.0)
        if seen.progress_at != self._last_progress or self._last_look is None:
            self._idle_s, self._last_progress = 0.0, seen.progress_at
        else:
            self._idle_s += min(now - self._last_look, ATTENTIVE_S)
        self._last_look = now
        return Seen(self.number, beats, seen.notes, self._idle_s)

    def close(self) -> None:
        for reader in self._readers:
            reader.close()


def read_beat(reader: BeatReader) -> Beat:
    try:
        return reader.read()
    except (OSError, WireError):
        return Beat()
