"""Pure: `plan(view, policy, now) -> Round | Wait`, which Round the job should have next, if any, and why.

It exists so that membership, restarts, slots set aside and the end of a job are decided in one place, from a view
that can be written down. It keeps nothing between calls: counters and cool-offs ride in the Round, ages are taken on
the caller's monotonic clock, and asking twice with the same view gives the same answer. It never publishes.
"""

from __future__ import annotations

from dataclasses import replace

from elasticd_agent.model.job import Policy
from elasticd_agent.model.messages import StopForced, StopRequested
from elasticd_agent.model.records import BudgetState, Exclusion, Failure, NodeRecord, Outcome, QuarantinedSlot, Round
from elasticd_agent.rendezvous.membership import (
    RETURN_S,
    Losses,
    assign_slots,
    count,
    current_quarantine,
    exclusions,
    has_enough_slots,
    joiners,
    losses,
    select_members,
    short_of_slots,
)
from elasticd_agent.rendezvous.restart_budget import RestartGranted, RestartRefused, carry_over, round_progressed, spend
from elasticd_agent.rendezvous.view import Pause, PresentNode, Requirements, View, Wait

__all__ = ["Pause", "PresentNode", "Requirements", "View", "Wait", "plan"]

ALL_LEFT_EXIT_CODE = 143
"""As a shell says it of SIGTERM, which is how schedulers ask; unless one other signal has asked all of them."""
ROOT_CAUSE_WAIT_S = 0.15
"""How long to wait for the one that failed first, when all that was heard are those who lost a peer by it."""

Verdict = Round | Pause | Wait


def plan(view: View, policy: Policy, now: float) -> Verdict:
    """The next Round, numbered above the current one; or what must happen before it; or why there is none."""
    verdict = _plan(view, policy, now)
    if isinstance(verdict, Wait) and verdict.too_few_nodes and view.short_since is not None:
        return _bound_shortage(view, policy, verdict, now)
    return verdict


def _plan(view: View, policy: Policy, now: float) -> Verdict:
    current = view.current
    if current is None or (current.terminal and (current.run != view.requirements.run or _may_continue(view, current))):
        if view.stop:
            return _final_round(view, "stopped", view.stop.exit_code, _stop_phrase(view.stop))
        return _first_round(view, policy, now)
    if current.terminal:
        return Wait(f"the job has {current.outcome}: {current.reason}", None)
    here = {m.node for m in current.members}
    failures = tuple(f for f in view.failures if f.round == current.number and f.node in here)
    if not failures and all(m.node in view.done for m in current.members):
        workers = count(current.world_size, "worker")
        if why := _all_leave_reasons(view, current):
            return _final_round(
                view,
                "stopped",
                _leaving_exit_code(view),
                f"{why}; {workers} ended with code 0 in round {current.number}",
            )
        return _final_round(view, "succeeded", 0, f"{workers} ended with code 0 in round {current.number}")
    if view.stop is not None:
        return _final_round(view, "stopped", view.stop.exit_code, _stop_phrase(view.stop))
    if twins := _conflicting_nodes(view, current):
        why = f"{_names(twins)} ran another round {current.number}, which an empty store did not know"
        return _uncounted_round(view, current, why, {}, policy, now)
    lost = losses(view, current, policy, now)
    if failures and lost.returning:
        first = next((f for f in failures if f.culprits), failures[0])
        return Wait(f"{first.why}; waiting for {', '.join(lost.returning)} to be back in the store", lost.until)
    if failures and not (lost.nodes and not any(f.culprits or f.kind == "user_error" for f in failures)):
        return _after_failure(view, current, failures, lost, policy, now)
    if lost.nodes:
        return _uncounted_round(view, current, "; ".join(lost.nodes.values()), lost.nodes, policy, now)
    if unusable := short_of_slots(view, current):
        return _uncounted_round(view, current, "; ".join(unusable), {}, policy, now)
    wanted = _resize(view, current, policy, now)
    if isinstance(wanted, Round):
        return wanted
    return replace(wanted, until=min((at for at in (lost.until, wanted.until) if at is not None), default=None))


def _uncounted_round(
    view: View, current: Round, why: str, lost: dict[str, str], policy: Policy, now: float
) -> Round | Wait:
    """A Round that costs nothing of the restart budget: nodes came or went."""
    progress = round_progressed(current, view.failures, view.high_water)
    budget = carry_over(current.budget, progress=progress, high_water=view.high_water)
    benched, _ = _update_strikes(view, current, (), policy, progress, now)
    return _next_round(view, current, budget, benched, why, lost, policy, now, cause="resize")


def _bound_shortage(view: View, policy: Policy, wait: Wait, now: float) -> Round | Wait:
    """Too few nodes: for how long that goes on is bounded."""
    assert view.short_since is not None
    started = view.current is not None
    bound_s, name = (
        (policy.replace_timeout_s, "--replace-timeout") if started else (policy.join_timeout_s, "join_timeout")
    )
    until = view.short_since + bound_s
    if now >= until:
        return _final_round(view, "failed", 1, f"{wait.why}, and no more came within {bound_s:g} s ({name})")
    return replace(wait, until=min(until, wait.until) if wait.until is not None else until)


# ---- who comes and who leaves


def _resize(view: View, current: Round, policy: Policy, now: float) -> Verdict:
    """A Round with other nodes because some want to leave or have come, once it costs no step."""
    runs = Wait(f"round {current.number} runs with {count(current.world_size, 'worker')}", None)
    if view.done:
        return runs
    leaving = [r.leaving for m in current.members if (r := view.record(m.node)) is not None and r.leaving]
    first = view.record(current.members[0].node)
    stepped = first is not None and first.stepped_round == current.number
    room = view.requirements.max_nodes - len(current.members) + len(leaving)
    came = joiners(view, current, policy, now)[: max(0, room)] if stepped and policy.grow != "never" else []
    if came:
        settled = max(p.joined_at for p in came) + policy.grow_debounce_s
        if now < settled and not leaving:
            return Wait(f"{_names(came)} joined; waiting whether more come", settled)
    if not (leaving or came):
        return runs
    why = "; ".join([*leaving, *([f"{_names(came)} joined"] if came else [])])
    if len(leaving) == len(current.members) and not came and all(p.record.leaving for p in view.nodes):
        if _can_pause(first, current) or _will_be_able_to_pause(view, first, current):
            return Pause(current.number, why)
        return _final_round(view, "stopped", _leaving_exit_code(view), why)
    if len(current.members) - len(leaving) + len(came) < view.requirements.min_nodes:
        return Wait(f"{why}; too few nodes would be left", None, notable=True)
    if _can_pause(first, current) or (leaving and _will_be_able_to_pause(view, first, current)):
        return Pause(current.number, why)
    if leaving or policy.grow == "always" or (first is not None and first.paused == current.number):
        return _uncounted_round(view, current, "; ".join(leaving), {}, policy, now)
    cannot = "the script cannot be held at a checkpoint, so that waits for the next restart"
    return Wait(f"{why}; {cannot}", None, notable=True)


def _all_leave_reasons(view: View, current: Round) -> str:
    """Who asked, if all members were asked to leave: workers that the same signal reached may have ended well by it."""
    records = [view.record(m.node) for m in current.members]
    return "; ".join(r.leaving for r in records if r) if all(r is not None and r.leaving for r in records) else ""


def _leaving_exit_code(view: View) -> int:
    codes = {p.record.leaving_code for p in view.nodes} - {0}
    return codes.pop() if len(codes) == 1 else ALL_LEFT_EXIT_CODE


def _can_pause(first: NodeRecord | None, current: Round) -> bool:
    """True if rank 0's workers can still be asked to hold, and do not yet."""
    return first is not None and first.can_pause == current.number and first.paused != current.number


def _will_be_able_to_pause(view: View, first: NodeRecord | None, current: Round) -> bool:
    """True if an earlier round could be held, and nobody has told of a step of this one yet, though it may have taken
    some: rank 0 hears of the request at its first. Who leaves does not wait for it longer than its own stop may take.
    """
    if first is None or first.stepped_round == current.number or first.paused == current.number:
        return False
    records = (view.record(m.node) for m in current.members)
    return any(record is not None and record.can_pause for record in records)


def _may_continue(view: View, ended: Round) -> bool:
    """A job whose nodes were all asked to leave, as a scheduler does, goes on when they are started again."""
    return ended.outcome == "stopped" and view.stop is None and any(not p.record.leaving for p in view.nodes)


def _names(came: list[PresentNode]) -> str:
    return ", ".join(p.record.id for p in came)


def _conflicting_nodes(view: View, current: Round) -> list[PresentNode]:
    """Who has started a round of this number and is no member of it.

    Strangers were the first in a store that came back empty, and numbered theirs as the one that runs. The next one
    ends both.
    """
    members = {(m.node, m.incarnation) for m in current.members}
    return [
        p
        for p in view.nodes
        if p.record.ready_round == current.number and (p.record.id, p.record.incarnation) not in members
    ]


# ---- what a failure leads to


def _after_failure(
    view: View, current: Round, failures: tuple[Failure, ...], lost: Losses, policy: Policy, now: float
) -> Round | Wait:
    first = next((f for f in failures if f.culprits), failures[0])
    victims = all(f.kind == "crash" and not f.culprits for f in failures)
    if victims and len(failures) < len(current.members) and now < view.failed_at + ROOT_CAUSE_WAIT_S:
        return Wait(f"{first.why}; waiting for word of what it lost them by", view.failed_at + ROOT_CAUSE_WAIT_S)
    raised = _pending_exception(view, current) if victims else ""
    if raised and not first.why.startswith(raised.partition("raised ")[0]):  # who raised has ended since, and says so
        first = replace(first, why=f"{raised}, and then {first.why}")
    mistakes = [f for f in failures if f.kind == "user_error"]
    if len(mistakes) == len(failures) and len({f.error for f in mistakes}) == 1:
        missing = len(current.members) - len({f.node for f in mistakes})
        if not missing:
            return _final_round(view, "failed", 1, f"an error in the script, not restarted: {first.why}")
        settled = view.failed_at + policy.user_error_wait_s
        if now < settled:
            return Wait(f"{first.why}; waiting whether {count(missing, 'more node')} will say the same", settled)
    high_water = max(view.high_water, *(f.high_water for f in failures))
    progress = round_progressed(current, failures, high_water)
    benched, set_aside = _update_strikes(view, current, failures, policy, progress, now)
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
        case RestartRefused(why):
            return _final_round(view, "failed", 1, f"{why}: {first.why}")
        case RestartGranted(state, delay_s):
            until = view.failed_at + delay_s
            if now < until:
                return Wait(f"{first.why}; restarting {delay_s:g} s after it (backoff)", until, notable=True)
            why = "; ".join([first.why, *(_quarantine_phrase(b) for b in set_aside), *lost.nodes.values()])
            return _next_round(view, current, state, benched, why, lost.nodes, policy, now, cause=first.kind)


def _pending_exception(view: View, current: Round) -> str:
    """What a rank that takes its time to end has ended its peers by, if its node has said so."""
    records = (view.record(member.node) for member in current.members)
    return next(
        (
            r.pending_exception
            for r in records
            if r is not None and r.pending_exception and r.ready_round == current.number
        ),
        "",
    )


def _update_strikes(
    view: View, current: Round, failures: tuple[Failure, ...], policy: Policy, progress: bool, now: float
) -> tuple[tuple[QuarantinedSlot, ...], list[QuarantinedSlot]]:
    """What is held against each slot after these failures, and which of them are set aside because of them.

    Progress shows that a slot works, but not that it will not hang again: that is held against it until somebody else
    is to blame.
    """
    used = {(node, slot) for _, node, _, slot in current.assignments()}
    ledger = {(b.node, b.slot): b for b in current_quarantine(view, current, now)}
    blamed = {(f.node, slot) for f in failures for _, slot in f.culprits} & used
    hung = {(f.node, slot) for f in failures if f.kind == "hung" for _, slot in f.culprits}
    if progress:  # who took part in it has shown that it works
        again = hung or used if not blamed - hung else set()
        ledger = {place: b for place, b in ledger.items() if place not in used or (b.hung and place in again)}
    set_aside: list[QuarantinedSlot] = []
    for place in sorted(blamed):
        held = ledger.get(place, QuarantinedSlot(*place, strikes=0))
        held = replace(held, strikes=held.strikes + 1, hung=place in hung)
        if held.strikes >= policy.slot_strikes and _can_spare(view, ledger, place):
            times = held.times + 1
            held = replace(held, times=times, left_s=policy.cooloff_s(times))
            set_aside.append(held)
        ledger[place] = held
    return tuple(ledger[place] for place in sorted(ledger)), set_aside


def _can_spare(view: View, ledger: dict[tuple[str, int], QuarantinedSlot], place: tuple[str, int]) -> bool:
    """True if the node has enough slots without this one, or the job enough nodes without it."""
    benched = (*(b for at, b in ledger.items() if at != place), QuarantinedSlot(*place, strikes=0, left_s=1.0))
    here = [p.record for p in view.nodes if not p.record.leaving and has_enough_slots(p.record, view, benched)]
    return place[0] in {record.id for record in here} or len(here) >= view.requirements.min_nodes


def _quarantine_phrase(bench: QuarantinedSlot) -> str:
    where = f"slot {bench.slot} of {bench.node}"
    what = "hangs or failures" if bench.hung else "failures without progress"
    return f"{where} set aside for {bench.left_s:g} s after {bench.strikes} {what}"


# ---- the next Round


def _first_round(view: View, policy: Policy, now: float) -> Round | Wait:
    runs = [
        p
        for p in view.nodes
        if p.record.ready_round and (view.current is None or p.record.ready_round > view.current.number)
    ]
    if runs and now < (until := max(p.joined_at for p in runs) + RETURN_S):
        return Wait(f"{_names(runs)} came from a round that the store does not know, and will write it down", until)
    number = max([view.first_number, *(max(p.record.highest_round, p.record.seen_round) + 1 for p in view.nodes)])
    if view.current is not None:
        number = max(number, view.current.number + 1)
    chosen = select_members(view, policy, now, {}, ())
    if isinstance(chosen, Wait):
        return chosen
    found = assign_slots(view, chosen, ())
    if isinstance(found, Wait):
        return found
    workers = sum(len(m.slots) for m in found)
    # A job that is handed in again, or whose agent was killed where no store remembers it, has had others.
    begins = "first round" if number == 1 else f"begun anew after round {number - 1}"
    reason = f"{begins}: {_size_phrase(view, workers, [m.node for m in found])}"
    run = view.requirements.run
    return Round(number, found, view.checkpoint, directory=chosen[0].directory, reason=reason, cause="start", run=run)


def _next_round(
    view: View,
    current: Round,
    budget: BudgetState,
    benched: tuple[QuarantinedSlot, ...],
    why: str,
    lost: dict[str, str],
    policy: Policy,
    now: float,
    *,
    cause: str,
) -> Round | Wait:
    excluded: tuple[Exclusion, ...] = exclusions(view, current, lost, now)
    chosen = select_members(view, policy, now, lost, excluded, benched)
    if isinstance(chosen, Wait):
        return replace(chosen, why="; ".join(filter(None, [why, chosen.why])))
    found = assign_slots(view, chosen, benched)
    if isinstance(found, Wait):
        return found
    restarts = current.restarts + 1
    workers = sum(len(m.slots) for m in found)
    before = {m.node for m in current.members}
    came = [m.node for m in found if m.node not in before]
    why = "; ".join([*filter(None, [why]), *([f"{', '.join(came)} joined"] if came else [])])
    reason = f"{why}; restart {restarts}: {_size_phrase(view, workers, [m.node for m in found])}"
    if chosen[0].directory != current.directory:
        reason += f"; {chosen[0].id} has a checkpoint directory of its own and starts from what is in there"
    return replace(
        current,
        number=max(current.number + 1, view.first_number),
        members=found,
        last_checkpoint=view.checkpoint,
        restarts=restarts,
        budget=budget,
        quarantined_slots=benched,
        excluded=excluded,
        directory=chosen[0].directory,
        reason=reason,
        cause=cause,
    )


# ---- the end, and words


def _final_round(view: View, outcome: Outcome, exit_code: int, why: str) -> Round:
    """The terminal Round. It has no members: nobody runs anything in it."""
    current = view.current
    if current is None:
        return Round(view.first_number, (), reason=why, outcome=outcome, exit_code=exit_code, run=view.requirements.run)
    return replace(
        current,
        number=current.number + 1,
        members=(),
        last_checkpoint=None,
        run=view.requirements.run,
        reason=why,
        cause="",
        outcome=outcome,
        exit_code=exit_code,
    )


def _stop_phrase(stop: StopRequested | StopForced) -> str:
    return f"stopped by {stop.signal}"


def _size_phrase(view: View, world_size: int, nodes: list[str]) -> str:
    where = nodes[0] if len(nodes) == 1 else count(len(nodes), "node")
    start = "from the beginning" if view.checkpoint is None else "from checkpoint r{}-s{}".format(*view.checkpoint)
    return f"{count(world_size, 'worker')} on {where}, {start}"
