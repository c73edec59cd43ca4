"""Pure: readings and what came before -> may this node be given work, and if not, why and for how long.

A check fails once it was bad `strikes` times among its last looks, so that a hiccup costs nothing; before the node has
joined there is nothing to lose, and once is enough. While a check fails the node is unhealthy. From when it is over,
the node stays quarantined for a cool-off that doubles each time, so that one that fails again and again does not take a
job down each time; a long good time forgives. A node that was to blame for `strikes` failures of jobs within an hour is
quarantined likewise, whatever its checks say. Times are seconds on one monotonic clock, given as arguments.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from elasticd_agent.node.health.result import Reading

FORGIVEN_S = 86400.0
"""After so long without trouble the next cool-off is a short one again."""
BLAMED_WITHIN_S = 3600.0
UNSEEN = "its health has not been looked at yet"
_LONGEST_WHY = 300


@dataclass(frozen=True, slots=True)
class Rules:
    strikes: int = 2
    cooloff_s: float = 60.0
    cooloff_max_s: float = 3600.0
    forgiven_s: float = FORGIVEN_S
    blamed_within_s: float = BLAMED_WITHIN_S

    def cooloff(self, times: int) -> float:
        """How long after trouble for the `times`th time."""
        return min(self.cooloff_s * 2.0 ** min(max(times, 1) - 1, 64), max(self.cooloff_max_s, self.cooloff_s))


@dataclass(frozen=True, slots=True)
class Row:
    """The last looks at one check, newest last: True is bad. `why` is of the newest one."""

    check: str
    looks: tuple[bool, ...]
    failing: bool
    why: str


@dataclass(frozen=True, slots=True)
class Past:
    """What a verdict needs to know. `times`: how often in a row there was trouble; `until`: when the cool-off ends.

    `joined`: it has been found fit since this machine was started.
    """

    rows: tuple[Row, ...] = ()
    joined: bool = False
    times: int = 0
    until: float = float("-inf")
    troubled: float = float("-inf")
    why: str = ""
    blames: tuple[float, ...] = ()

    @property
    def doubtful(self) -> bool:
        """The newest look found something that is not believed yet."""
        return any(row.looks[-1] and not row.failing for row in self.rows)

    @property
    def failing(self) -> tuple[Row, ...]:
        return tuple(row for row in self.rows if row.failing)


@dataclass(frozen=True, slots=True)
class Healthy:
    why: str = ""


@dataclass(frozen=True, slots=True)
class Unhealthy:
    """Something is wrong now."""

    why: str


@dataclass(frozen=True, slots=True)
class Quarantined:
    """Nothing is wrong now, but it was; `left_s` until the node is taken again if nothing else happens."""

    why: str
    left_s: float


Verdict = Healthy | Unhealthy | Quarantined


def verdict(past: Past, now: float) -> Verdict:
    failing = past.failing
    if failing:
        return Unhealthy(_sentence(failing))
    if now < past.until:
        return Quarantined(past.why, past.until - now)
    if not past.joined:
        return Unhealthy(UNSEEN)
    return Healthy()


def looked(past: Past, readings: Sequence[Reading], now: float, rules: Rules) -> Past:
    """After a look. A check that was skipped, or is not there any more, is forgotten."""
    before = {row.check: row for row in past.rows}
    rows = tuple(
        _row(before.get(reading.check), reading, past.joined, rules)
        for reading in readings
        if reading.outcome != "skipped"
    )
    failing = tuple(row for row in rows if row.failing)
    past = replace(past, rows=rows)
    if not failing:
        over = past.joined and any(row.failing for row in before.values())
        until = max(past.until, now + rules.cooloff(past.times)) if over else past.until
        return _forgiven(replace(past, joined=True, until=until), now, rules)
    if not past.joined:  # it has done no harm yet: fit as soon as nothing is wrong any more
        return past
    anew = not any(row.failing for row in before.values())
    past = _forgiven(past, now, rules) if anew else past
    times = max(1, past.times + anew)
    left_s = rules.cooloff(times)
    return replace(
        past,
        times=times,
        until=max(past.until, now + left_s),
        troubled=now,
        why=f"this is over, but leaves the node out for {left_s:.0f} s ({_ordinal(times)}): {_sentence(failing)}",
    )


def blamed(past: Past, why: str, now: float, rules: Rules) -> Past:
    """A job failed or hung, and this node, among others, was the culprit."""
    past = _forgiven(past, now, rules)
    blames = (*(at for at in past.blames if now - at < rules.blamed_within_s), now)
    if len(blames) < rules.strikes:
        return replace(past, blames=blames, troubled=now)
    times = past.times + 1
    left_s = rules.cooloff(times)
    often = f"{f'{len(blames)} times' if len(blames) > 1 else 'once'} within {rules.blamed_within_s / 60:.0f} minutes"
    return replace(
        past,
        blames=(),
        times=times,
        until=max(past.until, now + left_s),
        troubled=now,
        why=f"it was to blame {often} and is left out for {left_s:.0f} s ({_ordinal(times)}); last: {_cut(why)}",
    )


def forgiven(past: Past) -> Past:
    """A person says so: only what is wrong now counts."""
    return Past(rows=past.rows, joined=past.joined)


def rebooted(past: Past) -> Past:
    """What still counts after the machine was started again: how often, but no cool-off, since that heals most."""
    return replace(past, rows=(), joined=False, until=float("-inf"), blames=(), why="")


def _row(before: Row | None, reading: Reading, joined: bool, rules: Rules) -> Row:
    is_bad = reading.outcome == "bad"
    looks = (*(before.looks if before is not None else ()), is_bad)[-2 * rules.strikes :]
    failing = is_bad and (
        not joined or reading.certain or (before is not None and before.failing) or sum(looks) >= rules.strikes
    )
    return Row(reading.check, looks, failing, reading.why)


def _forgiven(past: Past, now: float, rules: Rules) -> Past:
    return replace(past, times=0, blames=()) if now - past.troubled >= rules.forgiven_s else past


def _sentence(rows: Sequence[Row]) -> str:
    return _cut("; ".join(f"{row.check}: {row.why}" for row in rows))


def _cut(text: str) -> str:
    return text if len(text) <= _LONGEST_WHY else text[: _LONGEST_WHY - 1] + "…"


def _ordinal(times: int) -> str:
    return "the first time" if times == 1 else f"time {times} in a row"
