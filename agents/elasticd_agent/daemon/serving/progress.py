"""A job's event log on one node, line by line -> how the job does: rounds, steps, checkpoints, goodput.

It exists so that `elasticd status` can tell a job's history whatever has become of its agents: the log is on the disk.
It is fed each line once and keeps a bounded amount of it. Pure: it reads no file and no clock.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

MOST_ROUNDS = 1000
"""Of more only the newest are kept; what they add up to is kept of all."""


@dataclass(slots=True)
class RoundSeen:
    """One round, as this node's log tells it. Times are unix seconds; `ranks` are those on this node."""

    number: int
    world_size: int = 0
    nodes: tuple[str, ...] = ()
    reason: str = ""
    cause: str = ""
    restarts: int = 0
    at: float = 0.0
    ranks: tuple[int, ...] = ()
    first_at: float | None = None
    first_step: int = 0
    last_at: float | None = None
    last_step: int = 0
    resumed: int | None = None


@dataclass(frozen=True, slots=True)
class Cost:
    """From the last step of the round before to a round's first one; and how many steps were made again, if known."""

    seconds: float
    steps: int | None


@dataclass(slots=True)
class Progress:
    """What the lines so far add up to."""

    rounds: OrderedDict[int, RoundSeen] = field(default_factory=OrderedDict)
    began_at: float | None = None
    ended_at: float | None = None
    outcome: str = ""
    reason: str = ""
    restarts: int = 0
    step: int | None = None
    checkpoint_step: int | None = None
    checkpoint_round: int | None = None
    checkpoint_at: float | None = None
    _productive_s: float = 0.0
    _open: int | None = None  # the round whose steps are not in _productive_s yet

    def feed(self, line: Mapping[str, Any]) -> None:
        """One line of the log; what makes no sense is passed over."""
        at, number = _number(line.get("wall")), _whole(line.get("round"))
        if at is None or number is None:
            return
        if self.began_at is None:
            self.began_at = at
        match line.get("kind"):
            case "round_published":
                self._published(number, at, line)
            case "group_started":
                self._round(number, at).ranks = tuple(r for r in _listed(line.get("ranks")) if isinstance(r, int))
            case "resumed":
                self._round(number, at).resumed = _whole(line.get("step"))
            case "first_step":
                self._first_step(number, at, _whole(line.get("step")) or 1)
            case "checkpoint_saved":
                self.checkpoint_step, self.checkpoint_round, self.checkpoint_at = _whole(line.get("step")), number, at
                self._reached(number, at, self.checkpoint_step)
            case "hung":
                self._over(number, at - (_number(line.get("seconds")) or 0.0))
            case "worker_exited":
                self._reached(number, None, _whole(line.get("step")))
                self._over(number, at)
            case "hold_over" if number in self.rounds:
                self.rounds[number].last_at = None
            case "group_gone" | "holding":
                self._over(number, at)
            case "job_ended":
                self._ended(number, at, line)

    def goodput(self, now: float, step: int | None = None) -> float | None:
        """The part of the time since the start in which steps were made that count; None before the first step.

        Steps that had to be trained again do not count. `now` is unix seconds, `step` the newest known of the round
        that runs.
        """
        if self.began_at is None or not any(one.first_at is not None for one in self.rounds.values()):
            return None
        until = self.ended_at if self.ended_at is not None else now
        productive = self._productive_s
        running = self.rounds.get(self._open) if self._open is not None else None
        if running is not None and running.first_at is not None:
            productive += max(0.0, (running.last_at if running.last_at is not None else until) - running.first_at)
        whole = until - self.began_at
        return min(1.0, max(0.0, productive / whole)) if whole > 0 else None

    def costs(self, now: float) -> dict[int, Cost]:
        """What each round that followed another cost. `now` is unix seconds: until then the newest one still does."""
        found: dict[int, Cost] = {}
        before: RoundSeen | None = None
        newest = self.newest()
        for one in self.rounds.values():
            until = one.first_at
            if until is None and one is newest:
                until = self.ended_at if self.ended_at is not None else now
            if before is not None and before.last_at is not None and until is not None:
                # A script that counts its own steps from 1 in every process does not say what it went on from.
                went_on = one.resumed if one.resumed is not None else one.first_step - 1 or None
                steps = None if one.first_at is None or went_on is None else max(0, before.last_step - went_on)
                found[one.number] = Cost(max(0.0, until - before.last_at), steps)
            if one.first_at is not None:
                before = one
        return found

    def newest(self) -> RoundSeen | None:
        return next(reversed(self.rounds.values()), None)

    def _published(self, number: int, at: float, line: Mapping[str, Any]) -> None:
        self._over(self._open, at)
        self.ended_at, self.outcome = None, ""  # another runner of the same job went on
        one = self._round(number, at)
        one.at = at
        one.world_size = _whole(line.get("world_size")) or 0
        one.nodes = tuple(str(node) for node in _listed(line.get("nodes")))
        one.reason, one.cause = str(line.get("reason", "")), str(line.get("cause", ""))
        one.restarts = self.restarts = max(self.restarts, _whole(line.get("restarts")) or 0)

    def _first_step(self, number: int, at: float, step: int) -> None:
        one = self._round(number, at)
        if one.first_at is not None:
            return
        self._settle(one.resumed if one.resumed is not None else step - 1)
        one.first_at, one.first_step, one.last_step = at, step, step
        self.step, self._open = step, number

    def _reached(self, number: int, at: float | None, step: int | None) -> None:
        one = self.rounds.get(number)
        if one is not None and step is not None:
            one.last_step = max(one.last_step, step)
            self.step = step if self.step is None else max(step, self.step)

    def _over(self, number: int | None, at: float) -> None:
        """Whatever this round still does after `at` is no training."""
        one = self.rounds.get(number) if number is not None else None
        if one is not None and one.first_at is not None and (one.last_at is None or at < one.last_at):
            one.last_at = max(at, one.first_at)

    def _settle(self, resumed: int) -> None:
        """The round before is over, and training goes on from step `resumed`: later steps of it were for nothing."""
        before = self.rounds.get(self._open) if self._open is not None else None
        if before is None or before.first_at is None:
            return
        spent = max(0.0, (before.last_at or before.first_at) - before.first_at)
        made = before.last_step - before.first_step
        kept = min(made, max(0, resumed - before.first_step))
        self._productive_s += spent * (kept / made if made > 0 else float(resumed >= before.first_step))
        self._open = None

    def _ended(self, number: int, at: float, line: Mapping[str, Any]) -> None:
        step = _whole(line.get("step"))
        self._reached(number, at, step)
        self._over(self._open, at)
        self.ended_at, self.outcome = at, str(line.get("outcome", ""))
        self.reason = str(line.get("reason", ""))
        self.restarts = max(self.restarts, _whole(line.get("restarts")) or 0)

    def _round(self, number: int, at: float) -> RoundSeen:
        if number not in self.rounds:
            self.rounds[number] = RoundSeen(number, at=at)
            while len(self.rounds) > MOST_ROUNDS:
                self.rounds.popitem(last=False)
        return self.rounds[number]


def _number(value: object) -> float | None:
    good = isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value < 1e12
    return float(value) if good and isinstance(value, (int, float)) else None


def _whole(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 62 else None


def _listed(value: object) -> list[Any]:
    return value[:10_000] if isinstance(value, list) else []
