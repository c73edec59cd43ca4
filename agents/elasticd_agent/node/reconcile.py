"""Pure: `reconcile(known, node, ...) -> Plan`, what this node starts, stops and says so that it agrees with the store.

It exists so that the daemon's part in a job is decided in one place, from values. What it does not know it does not
act on: a runner is stopped only because the store says something about its job that excludes it, never because the
store says nothing. It reads no clock, starts nothing, and decides nothing about where jobs run.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from elasticd_agent.node.records import Ending, Placement, Running, Submission
from elasticd_agent.node.runners.spec import Exit, Order
from elasticd_agent.node.scheduler.policy import View

Key = tuple[str, int]

BACKOFF_S = (0.0, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 60.0)
"""Before the n-th start after a crash of a runner: its first one is most often somebody's kill -9."""
WELL_S = 600.0
"""A runner that lived so long did not crash because of how it starts."""
REQUEUE = 75


@dataclass(frozen=True, slots=True)
class Runs:
    """A runner that lives, or whose remains do."""

    order: Order
    state: Literal["starting", "running", "leaving"]
    why: str = ""

    @property
    def key(self) -> Key:
        return self.order.job, self.order.number


@dataclass(frozen=True, slots=True)
class Over:
    """A runner that has ended. `last` None: it could not say how. `asked`: this daemon had asked it to leave."""

    order: Order
    last: Exit | None
    asked: bool

    @property
    def key(self) -> Key:
        return self.order.job, self.order.number


@dataclass(frozen=True, slots=True)
class Again:
    """A runner that ended without an end of its job: how often in a row, and when it may be started again."""

    crashes: int
    at: float
    why: str


@dataclass(frozen=True, slots=True)
class Start:
    wants: Submission
    slots: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Stop:
    order: Order
    why: str


@dataclass(frozen=True, slots=True)
class Plan:
    """`endings` are to be written; `running` is what this node's card says. `until`: when to ask again."""

    start: tuple[Start, ...] = ()
    stop: tuple[Stop, ...] = ()
    endings: tuple[Ending, ...] = ()
    running: tuple[Running, ...] = ()
    forgotten: tuple[Order, ...] = ()
    until: float | None = None


@dataclass(slots=True)
class Ended:
    """How runners of this node ended, as far as it still matters; kept by the deciding thread between turns."""

    last: dict[Key, Exit] = field(default_factory=dict)
    again: dict[Key, Again] = field(default_factory=dict)

    def add(self, over: Over, lived_s: float, now: float) -> str:
        """One sentence on what that end means."""
        key, last, job = over.key, over.last, over.order.job
        if last is not None and last.outcome in ("succeeded", "failed", "refused"):
            self.again.pop(key, None)
            self.last[key] = last
            if last.outcome == "refused":
                return f"job {job} is refused by this node: {last.reason}"
            return f"job {job} has {last.outcome}: {last.reason}"
        if over.asked:
            self.again.pop(key, None)
            return f"job {job} has left this node" + (f": {last.reason}" if last is not None else "")
        before = self.again.get(key)
        crashes = 1 if before is None or lived_s >= WELL_S else before.crashes + 1
        wait_s = BACKOFF_S[min(crashes - 1, len(BACKOFF_S) - 1)]
        how = f"ended with code {last.exit_code} ({last.reason})" if last is not None else "was killed, or crashed"
        self.again[key] = Again(crashes, now + wait_s, f"its runner {how}")
        when = f"in {wait_s:g} s" if wait_s else "at once"
        return f"job {job}: its runner {how}; where it is still placed here, another one starts {when}"

    def forget(self, key: Key) -> None:
        self.last.pop(key, None)
        self.again.pop(key, None)

    def settle(self, known: View, node: str) -> None:
        """Forget what the store knows of; and what this node has refused, once somebody cordons it to mend that."""
        cordoned = any(cordon.node == node for cordon in known.cordons)
        there = {(s.job, s.number) for s in known.submissions} if self.last else set()
        for key, last in list(self.last.items()):
            mended = last.outcome == "refused" and cordoned
            if mended or key not in there or known.ending(*key) is not None:
                self.forget(key)


def reconcile(known: View, node: str, runs: Iterable[Runs], ended: Ended, leaving: str, now: float) -> Plan:
    """`leaving`: why nothing may run here any more; "" while something may. `now` is monotonic seconds."""
    runs = tuple(runs)
    stop = tuple(Stop(one.order, why) for one in runs if (why := _must_stop(one.order, known, node, leaving)))
    stopped = {one.order.job for one in stop}
    busy = {slot: one.order.job for one in runs for slot in one.order.slots}
    start, until, waiting = [], None, []
    for placement in () if leaving else known.placements:
        # First what is quickly said: most placements are other nodes', or of jobs that ended long ago.
        place = placement.place(node)
        key = (placement.job, placement.number)
        if place is None or key in {one.key for one in runs} or key in ended.last:
            continue
        if (wants := _wanted(placement, known)) is None:
            continue
        again = ended.again.get(key)
        if holders := sorted({busy[slot] for slot in place.slots if slot in busy}):
            waiting.append(Running(*key, place.slots, "starting", f"waits for its slots: {', '.join(holders)} leaves"))
        elif again is not None and again.at > now:
            until = again.at if until is None else min(until, again.at)
            why = f"{again.why}; {again.crashes} times in a row, the next start is in {again.at - now:.0f} s"
            waiting.append(Running(*key, place.slots, "starting", why))
        else:
            start.append(Start(wants, place.slots))
            busy |= dict.fromkeys(place.slots, placement.job)
    card = [Running(*one.key, one.order.slots, _state(one, stopped), _why(one, stop)) for one in runs]
    refused = [
        Running(*key, (), "refused", last.reason) for key, last in ended.last.items() if last.outcome == "refused"
    ]
    return Plan(
        start=tuple(start),
        stop=stop,
        endings=tuple(_endings(known, ended)),
        running=tuple(sorted([*card, *waiting, *refused], key=lambda one: (one.number, one.job))),
        forgotten=tuple(one.order for one in runs if one.state != "leaving" and _unheard_of(one.order, known)),
        until=until,
    )


def _must_stop(order: Order, known: View, node: str, leaving: str) -> str:
    """Why the runner has to go; "" if it may stay."""
    if leaving:
        return leaving
    for ending in known.endings:
        if ending.job == order.job and ending.number >= order.number:
            return f"the job was {ending.reason}" if ending.outcome == "cancelled" else f"the job has {ending.outcome}"
    for placement in known.placements:
        if placement.job != order.job or placement.number < order.number:
            continue
        place = placement.place(node)
        if placement.number > order.number:
            return f"the job runs anew, as number {placement.number}"
        if place is None:
            # What moves the other nodes' places, and where they are now, is none of this node's.
            here = placement.reason if node in placement.reason else f"the job went on without it; {placement.reason}"
            return next((c.text for c in known.cordons if c.node == node and c.drain), here)
        if set(place.slots) != set(order.slots):
            return f"its slots here are {_listed(place.slots)} from now on"
    return ""


def _wanted(placement: Placement, known: View) -> Submission | None:
    """What is placed, if it is not over."""
    if known.ending(placement.job, placement.number) is not None:
        return None
    key = (placement.job, placement.number)
    return next((s for s in known.submissions if (s.job, s.number) == key), None)


def _endings(known: View, ended: Ended) -> Iterable[Ending]:
    """What this node knows first: whether a job has succeeded or failed."""
    placements: Mapping[Key, Placement] = {(p.job, p.number): p for p in known.placements}
    there = {(s.job, s.number) for s in known.submissions}
    for key, last in ended.last.items():
        if last.outcome == "refused" or key not in there or known.ending(*key) is not None:
            continue
        nodes = tuple(place.node for place in placements[key].places) if key in placements else ()
        outcome: Literal["succeeded", "failed"] = "succeeded" if last.outcome == "succeeded" else "failed"
        yield Ending(*key, outcome, last.exit_code, last.reason, last.at, nodes, last.rounds, last.step)


def _unheard_of(order: Order, known: View) -> bool:
    """True if the store knows nothing of the job: it came back empty, or the job was never in it."""
    told = [(one.job, one.number) for one in known.submissions]
    told += [(one.job, one.number) for one in known.placements]
    told += [(one.job, one.number) for one in known.endings]
    return not any(job == order.job and number >= order.number for job, number in told)


def _state(one: Runs, stopped: set[str]) -> Literal["starting", "running", "leaving"]:
    return "leaving" if one.order.job in stopped else one.state


def _why(one: Runs, stop: tuple[Stop, ...]) -> str:
    return one.why or next((s.why for s in stop if s.order is one.order), "")


def _listed(slots: Iterable[int]) -> str:
    return ", ".join(map(str, sorted(slots)))
