"""Pure: `plan(view, policy, now) -> Round | Wait`, which Round the job should have next, if any, and why.

It exists so that membership, restarts, slots set aside and the end of a job are decided in one place, from a view
that can be written down. It keeps nothing between calls: counters and cool-offs ride in the Round, ages are taken on
the caller's monotonic clock, and asking twice with the same view gives the same answer. It never publishes.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from elasticd.wire import Bench, BudgetState, Failure, Member, NodeRecord, Outcome, Round
from elasticd_agent.budget import Granted, Refused, carry, progressed, spend
from elasticd_agent.config import Policy
from elasticd_agent.messages import StopForced, StopRequested


@dataclass(frozen=True, slots=True)
class Asked:
    """How much the job asked for: workers on each node, nodes, and how long to wait for more nodes than the fewest."""

    min_workers: int
    max_workers: int
    min_nodes: int = 1
    max_nodes: int = 1
    last_call_s: float = 5.0


@dataclass(frozen=True, slots=True)
class Present:
    """A node whose record is in the store, and when the planner first saw this incarnation of it."""

    record: NodeRecord
    joined_at: float


@dataclass(frozen=True, slots=True)
class View:
    """All the planner knows. Times are the planner's own monotonic seconds.

    `round_at`: when it first saw `current`; `failed_at`: when it first saw a failure of it, meaningless without one.
    `done`: members whose workers of `current` have all ended with code 0. `first_number`: what the first Round must be
    numbered, above all that the checkpoint and log directories hold. `checkpoint`: newest usable (round, step).
    `high_water`: the highest step seen in any round.
    """

    current: Round | None
    nodes: tuple[Present, ...]
    asked: Asked
    failures: tuple[Failure, ...] = ()
    done: frozenset[str] = frozenset()
    stop: StopRequested | StopForced | None = None
    first_number: int = 1
    checkpoint: tuple[int, int] | None = None
    high_water: int = 0
    round_at: float = 0.0
    failed_at: float = 0.0


@dataclass(frozen=True, slots=True)
class Wait:
    """Nothing to publish now. Ask again when the view changes, and at `until` unless it is None."""

    why: str
    until: float | None


def plan(view: View, policy: Policy, now: float) -> Round | Wait:
    """The next Round, numbered above the current one, or why there is none yet."""
    current = view.current
    if current is None:
        return _end(view, "stopped", view.stop.exit_code, _asked_to(view.stop)) if view.stop else _first(view, now)
    if current.terminal:
        return Wait(f"the job has {current.outcome}: {current.reason}", None)
    failures = tuple(f for f in view.failures if f.round == current.number and current.member(f.node))
    if not failures and all(m.node in view.done for m in current.members):
        workers = _count(current.world_size, "worker")
        return _end(view, "succeeded", 0, f"{workers} ended with code 0 in round {current.number}")
    if view.stop is not None:
        return _end(view, "stopped", view.stop.exit_code, _asked_to(view.stop))
    if failures:
        return _after_failure(view, current, failures, policy, now)
    here = {(p.record.id, p.record.incarnation) for p in view.nodes}
    lost = [m.node for m in current.members if (m.node, m.incarnation) not in here and m.node not in view.done]
    if lost:
        progress = progressed(current, (), view.high_water)
        budget = carry(current.budget, progress=progress, high_water=view.high_water)
        benched, _ = _judge(view, current, (), policy, progress, now)
        return _next(view, current, budget, benched, f"lost {', '.join(lost)}", now)
    return Wait(f"round {current.number} runs with {_count(current.world_size, 'worker')}", None)


# ---- what a failure leads to


def _after_failure(
    view: View, current: Round, failures: tuple[Failure, ...], policy: Policy, now: float
) -> Round | Wait:
    first = failures[0]
    mistakes = [f for f in failures if f.kind == "user_error"]
    if len(mistakes) == len(failures) and len({f.error for f in mistakes}) == 1:
        missing = len(current.members) - len({f.node for f in mistakes})
        if not missing:
            return _end(view, "failed", 1, f"an error in the script, not restarted: {first.why}")
        settled = view.failed_at + policy.user_error_wait_s
        if now < settled:
            return Wait(f"{first.why}; waiting whether {_count(missing, 'more node')} will say the same", settled)
    high_water = max(view.high_water, *(f.high_water for f in failures))
    progress = progressed(current, failures, high_water)
    benched, set_aside = _judge(view, current, failures, policy, progress, now)
    elapsed_s = now - view.round_at
    verdict = spend(
        current.budget,
        policy,
        progress=progress,
        high_water=high_water,
        elapsed_s=elapsed_s,
        forgiven=bool(set_aside),
    )
    match verdict:
        case Refused(why):
            return _end(view, "failed", 1, f"{why}: {first.why}")
        case Granted(state, delay_s):
            until = view.failed_at + delay_s
            if now < until:
                return Wait(f"{first.why}; restarting {delay_s:g} s after it (backoff)", until)
            why = "; ".join([first.why, *(_aside(b) for b in set_aside)])
            return _next(view, current, state, benched, why, now)


def _judge(
    view: View, current: Round, failures: tuple[Failure, ...], policy: Policy, progress: bool, now: float
) -> tuple[tuple[Bench, ...], list[Bench]]:
    """What is held against each slot after these failures, and which of them are set aside because of them."""
    used = {(node, slot) for _, node, _, slot in current.places()}
    ledger = {(b.node, b.slot): b for b in _cooled(view, current, now)}
    if progress:  # who took part in it has shown that it works
        ledger = {place: b for place, b in ledger.items() if place not in used}
    set_aside: list[Bench] = []
    for place in sorted({(f.node, slot) for f in failures for _, slot in f.culprits} & used):
        held = ledger.get(place, Bench(*place, strikes=0))
        held = replace(held, strikes=held.strikes + 1)
        if held.strikes >= policy.slot_strikes and _spare(view, ledger, place):
            times = held.times + 1
            held = replace(held, times=times, left_s=policy.cooloff_s(times))
            set_aside.append(held)
        ledger[place] = held
    return tuple(ledger[place] for place in sorted(ledger)), set_aside


def _spare(view: View, ledger: dict[tuple[str, int], Bench], place: tuple[str, int]) -> bool:
    """True if the node has enough slots without this one."""
    node, slot = place
    slots = next((p.record.slots for p in view.nodes if p.record.id == node), ())
    left = [s for s in slots if s != slot and not _out(ledger.get((node, s)))]
    return len(left) >= view.asked.min_workers


def _cooled(view: View, current: Round, now: float) -> tuple[Bench, ...]:
    elapsed_s = max(0.0, now - view.round_at)
    return tuple(replace(b, left_s=max(0.0, b.left_s - elapsed_s)) for b in current.benched)


def _out(bench: Bench | None) -> bool:
    return bench is not None and bench.left_s > 0


def _aside(bench: Bench) -> str:
    where = f"slot {bench.slot} of {bench.node}"
    return f"{where} set aside for {bench.left_s:g} s after {bench.strikes} failures without progress"


# ---- who is in


def _first(view: View, now: float) -> Round | Wait:
    cast = _cast(view, now)
    if isinstance(cast, Wait):
        return cast
    members = _members(view, cast, ())
    if isinstance(members, Wait):
        return members
    return Round(view.first_number, members, view.checkpoint, reason=f"first round: {_with(view, members)}")


def _next(
    view: View, current: Round, budget: BudgetState, benched: tuple[Bench, ...], why: str, now: float
) -> Round | Wait:
    cast = _cast(view, now)
    if isinstance(cast, Wait):
        return cast
    members = _members(view, cast, benched)
    if isinstance(members, Wait):
        return members
    restarts = current.restarts + 1
    return replace(
        current,
        number=max(current.number + 1, view.first_number),
        members=members,
        resume=view.checkpoint,
        restarts=restarts,
        budget=budget,
        benched=benched,
        reason=f"{why}; restart {restarts}: {_with(view, members)}",
    )


def _cast(view: View, now: float) -> list[NodeRecord] | Wait:
    """The nodes of the next Round in order: survivors of the current one as they were, then newcomers by arrival.

    So rank 0 stays where it was if it can, and what a survivor knows of its place stays true if it can.
    """
    old = {(m.node, m.incarnation): i for i, m in enumerate(view.current.members)} if view.current else {}
    placed = [(old.get((p.record.id, p.record.incarnation), len(old)), p.joined_at, p.record.id, p) for p in view.nodes]
    cast = [p for *_, p in sorted(placed, key=lambda entry: entry[:3])]
    asked = view.asked
    if len(cast) < asked.min_nodes:
        return Wait(f"{len(cast)} of at least {_count(asked.min_nodes, 'node')} here", None)
    if len(cast) < asked.max_nodes and not any(first < len(old) for first, *_ in placed):
        newest = max(p.joined_at for p in cast)
        if now < newest + asked.last_call_s:
            why = f"{len(cast)} of {asked.max_nodes} nodes here; last call, {asked.last_call_s:g} s after the newest"
            return Wait(why, newest + asked.last_call_s)
    return [p.record for p in cast[: asked.max_nodes]]


def _members(view: View, cast: list[NodeRecord], benched: tuple[Bench, ...]) -> tuple[Member, ...] | Wait:
    left_s = {(b.node, b.slot): b.left_s for b in benched}
    members = []
    for node in cast:
        # Slots set aside come last, those nearest their return first, and only to reach the fewest workers asked for.
        ready = [s for s in node.slots if not left_s.get((node.id, s))]
        rest = sorted((s for s in node.slots if s not in ready), key=lambda s: left_s[node.id, s])
        missing = max(0, view.asked.min_workers - len(ready))
        slots = sorted((ready + rest[:missing])[: view.asked.max_workers])
        if len(slots) < view.asked.min_workers:
            workers = _count(view.asked.min_workers, "worker")
            return Wait(f"{node.id} has {_count(len(slots), 'slot')}, the job needs {workers} on each node", None)
        members.append(Member(node.id, node.incarnation, tuple(slots)))
    return tuple(members)


# ---- the end, and words


def _end(view: View, outcome: Outcome, exit_code: int, why: str) -> Round:
    """The terminal Round. It has no members: nobody runs anything in it."""
    current = view.current
    if current is None:
        return Round(view.first_number, (), reason=why, outcome=outcome, exit_code=exit_code)
    return replace(
        current, number=current.number + 1, members=(), resume=None, reason=why, outcome=outcome, exit_code=exit_code
    )


def _asked_to(stop: StopRequested | StopForced) -> str:
    return f"stopped by {stop.signal}"


def _with(view: View, members: tuple[Member, ...]) -> str:
    workers = _count(sum(len(m.slots) for m in members), "worker")
    nodes = members[0].node if len(members) == 1 else _count(len(members), "node")
    start = "from the beginning" if view.checkpoint is None else "from checkpoint r{}-s{}".format(*view.checkpoint)
    return f"{workers} on {nodes}, {start}"


def _count(n: int, noun: str) -> str:
    return f"{n} {noun}" if n == 1 else f"{n} {noun}s"
