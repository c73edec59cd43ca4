"""Pure: `plan(view, policy, now) -> Round | Pause | Wait`, the job's next Round, if any, and the reason.

Membership, restarts, quarantined slots and the end of a job are decided here, from a view that can be written down.
The rules are tried in order, and the first one with an answer decides: see `_plan`, `_after_failure` and `_resize`.
Nothing is kept between calls: counters and cool-offs are in the Round, ages are taken on the caller's monotonic clock,
and the same view gives the same answer. So a leader may die after any line: its successor reads the same view and
comes to the same Round, or to the one that was published meanwhile.

**A Round** is one generation of the job: a number, the members in rank order with their slots, and the reason. What it
promises is the first invariant of docs/protocol.md: numbers only grow, a number names one Round, and an agent starts a
group only after its previous one is gone. Three fences keep that, each for a process that acts late:

1. *A late leader* cannot publish. A Round is written by compare-and-swap of the key's version, guarded by the version
   of the leader's key. A leader that was paused, and has been replaced, loses that race although it still believes to
   lead. Where a store can compare only one key at a time, a new leader first gives the Round another version.
2. *A late member* cannot train. It follows Rounds upwards only, and a member reports `ready_round` when every process
   of its old group has ended, or has been killed and can act no more. The workers' store of each Round is its own, so
   that an old worker meets nobody in the new one. Without this two groups would average their gradients into each
   other.
3. *A late writer of checkpoints* changes nothing. A Round names where it resumes, and before its first step it makes
   that checkpoint its own; what an older Round's rank 0 still writes is not in the lineage that any later Round loads.

**What has to be waited for** is in the answers: a `Wait` has its reason and the time at which the same view could have
another answer, so that the caller sleeps exactly as long as nothing can change. A failure waits for its root cause
(the first report is often of a rank that lost its peer), and for the probes that tell a dead node from a silent one. A
Round that grows waits for a decision point, so that nothing trained is lost; one that replaces a dead member does not.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from types import MappingProxyType

from elasticd_agent.model.job import TERMINATED_EXIT_CODE, Policy
from elasticd_agent.model.messages import StopRequested
from elasticd_agent.model.phrases import count, listing, plural
from elasticd_agent.model.records import (
    SHARED_ERROR_KINDS,
    BudgetState,
    Exclusion,
    Failure,
    Member,
    NodeRecord,
    Outcome,
    QuarantinedSlot,
    Round,
    same_error_wait_s,
)
from elasticd_agent.rendezvous.membership import (
    REREGISTRATION_S,
    Losses,
    ReturnedSlots,
    aged_quarantined_slots,
    assign_slots,
    avoided_slots,
    exclusions,
    has_enough_slots,
    joiners,
    losses,
    next_slot_cooloff_end,
    promoted_spares,
    returned_slots,
    select_members,
    slot_shortage_reasons,
)
from elasticd_agent.rendezvous.restart_budget import (
    carry_over,
    is_missed_call,
    is_refused_state,
    round_progressed,
    spend,
)
from elasticd_agent.rendezvous.view import Pause, PresentNode, View, Wait

ROOT_CAUSE_WAIT_S = 0.15
"""The wait for the root cause while all reported failures are of ranks that lost a peer."""

MAX_HANG_PLACES = 32
"""Kept in each Round; one takes some 60 bytes."""

Verdict = Round | Pause | Wait


@dataclass(frozen=True)
class _RunningRound:
    """A Round that runs, and what its rules look at."""

    view: View
    current: Round
    policy: Policy
    now: float

    @cached_property
    def failures(self) -> tuple[Failure, ...]:
        """The failures of members in this round."""
        here = {m.node for m in self.current.members}
        return tuple(f for f in self.view.failures if f.round == self.current.number and f.node in here)

    @cached_property
    def losses(self) -> Losses:
        return losses(self.view, self.current, self.policy, self.now)

    @cached_property
    def records(self) -> tuple[NodeRecord | None, ...]:
        """The members' records, in their order."""
        return tuple(self.view.record(m.node) for m in self.current.members)

    @property
    def rank_0_record(self) -> NodeRecord | None:
        """The record of rank 0's node."""
        return self.records[0]

    @property
    def likely_root_cause(self) -> Failure:
        """The first one that names a culprit, else one whose repetition would show an error of the script."""
        return next(
            (f for f in self.failures if f.culprits), next((f for f in self.failures if f.repeat_key), self.failures[0])
        )

    @property
    def all_secondary(self) -> bool:
        return all(f.kind == "crash" and not f.culprits for f in self.failures)

    @property
    def is_shared_error(self) -> bool:
        """All failures are of ranks that raised the same error before the first step."""
        return all(f.kind in SHARED_ERROR_KINDS for f in self.failures) and len({f.error for f in self.failures}) == 1

    @property
    def missing_failures(self) -> int:
        return len(self.current.members) - len({f.node for f in self.failures})

    @property
    def has_saved(self) -> bool:
        """This round has saved a checkpoint of a later step than that from which it began."""
        start = self.current.last_checkpoint[1] if self.current.last_checkpoint is not None else 0
        return any(f.checkpoint is not None and f.checkpoint[1] > start for f in self.failures)

    @property
    def has_stepped(self) -> bool:
        """This round has made a step."""
        return any(r is not None and r.stepped_round == self.current.number for r in self.records)

    @property
    def run_has_stepped(self) -> bool:
        """A round of this run has made a step."""
        return self.has_stepped or max(self.view.high_water, self.current.stepped_size) > 0

    @cached_property
    def leave_reasons(self) -> list[str]:
        """The reasons of the members that leave."""
        return [r.leaving for r in self.records if r is not None and r.leaving]

    @property
    def is_paused(self) -> bool:
        """True if the workers are paused at a checkpoint."""
        return self.rank_0_record is not None and self.rank_0_record.paused == self.current.number

    @cached_property
    def fitting_joiners(self) -> list[PresentNode]:
        """Joiners that fit."""
        if not self._may_grow:
            return []
        room = self.view.requirements.max_nodes - len(self.current.members) + len(self.leave_reasons)
        return joiners(self.view, self.current, self.policy, self.now)[: max(0, room)]

    @cached_property
    def returned_slots(self) -> list[ReturnedSlots]:
        """Slots of members that this round does not use and another one would."""
        return returned_slots(self.view, self.current, self.now) if self._may_grow else []

    @property
    def _may_grow(self) -> bool:
        """Rank 0 has made a step of this round: before it, a restart would lose the start-up."""
        stepped = self.rank_0_record is not None and self.rank_0_record.stepped_round == self.current.number
        return stepped and self.policy.grow != "never"

    @property
    def growth_reasons(self) -> list[str]:
        """The nodes and slots that a larger Round would have beside this one's."""
        return [
            *([f"{_names(self.fitting_joiners)} joined"] if self.fitting_joiners else []),
            *map(str, self.returned_slots),
        ]

    @property
    def resize_reason(self) -> str:
        return "; ".join([*self.leave_reasons, *self.growth_reasons])


def plan(view: View, policy: Policy, now: float) -> Verdict:
    """The next Round, numbered above the current one; or what must happen before it; or why there is none."""
    verdict = _plan(view, policy, now)
    if policy.grow == "never" and isinstance(verdict, Round):
        patient = _plan(view.with_starting_as_ready, policy, now)
        if isinstance(patient, Round) and patient.world_size > verdict.world_size:
            verdict = patient  # a Round without a slot that starts would stay without it
    if isinstance(verdict, Wait) and verdict.too_few_nodes and view.too_few_nodes_since is not None:
        return _bound_shortage(view, policy, verdict, view.too_few_nodes_since, now)
    return verdict


def _plan(view: View, policy: Policy, now: float) -> Verdict:
    current = view.current
    if current is None or (current.terminal and _begins_anew(view, current)):
        return _stop_round(view) or _first_round(view, policy, now)
    if current.terminal:
        return Wait(f"the job has {current.outcome}: {current.reason}", None)
    running = _RunningRound(view, current, policy, now)
    verdict = (
        _all_done(running)
        or _stop_round(view)
        or _round_conflict(running)
        or _await_returning(running)
        or _after_failure(running)
    )
    if verdict is not None:
        return verdict
    lost = running.losses.nodes
    if reasons := list(lost.values()) or slot_shortage_reasons(view, current):
        return _uncounted_round(running, "; ".join(reasons), lost)
    return _resize(running)


def _bound_shortage(view: View, policy: Policy, wait: Wait, since: float, now: float) -> Round | Wait:
    """Too few nodes: the wait for more is bounded, and lasts until those can be back that an outage has sent away."""
    bound_s, name = (policy.join_timeout_s, "join_timeout")
    if view.current is not None and not view.current.terminal:
        bound_s, name = (policy.replace_timeout_s, "--replace-timeout")
    until = since + bound_s
    until = max(until, min(until, view.store_up_since) + REREGISTRATION_S)
    if now >= until:
        return _final_round(view, "failed", 1, f"{wait.why}, and no more joined within {bound_s:g} s ({name})")
    return replace(wait, until=min(until, wait.until) if wait.until is not None else until)


def _begins_anew(view: View, ended: Round) -> bool:
    """Another run of the job begins; or all nodes were asked to leave, as a scheduler does, and some are back."""
    back = ended.outcome == "stopped" and view.stop is None and any(not p.record.leaving for p in view.nodes)
    return ended.run != view.requirements.run or back


# ---- the rules of a running Round


def _all_done(running: _RunningRound) -> Round | None:
    """All workers ended with code 0. If all members were asked to leave, the same signal may have ended the workers."""
    view, current = running.view, running.current
    if running.failures or not all(m.node in view.done for m in current.members):
        return None
    why = f"{count(current.world_size, 'worker')} ended with code 0 in round {current.number}"
    if len(running.leave_reasons) == len(current.members):
        return _final_round(view, "stopped", _leaving_exit_code(view), f"{'; '.join(running.leave_reasons)}; {why}")
    return _final_round(view, "succeeded", 0, why)


def _round_conflict(running: _RunningRound) -> Round | Wait | None:
    """Nodes outside this round have started another one of its number; the next number ends both.

    They were the first in a store that came back empty, and numbered theirs like the one that runs.
    """
    current = running.current
    members = {m.identity for m in current.members}
    conflicting = [
        p for p in running.view.nodes if p.record.ready_round == current.number and p.record.identity not in members
    ]
    if not conflicting:
        return None
    why = f"{_names(conflicting)} started a conflicting round {current.number} after the store lost its data"
    return _uncounted_round(running, why)


def _await_returning(running: _RunningRound) -> Wait | None:
    """The group has failed while members' records are missing: they are due back before its successor is planned."""
    if not running.failures or not running.losses.returning:
        return None
    who = ", ".join(running.losses.returning)
    return Wait(f"{running.likely_root_cause.why}; waiting for {who} to register again", running.losses.until)


def _uncounted_round(running: _RunningRound, why: str, lost: Mapping[str, str] = MappingProxyType({})) -> Round | Wait:
    """A Round that costs nothing of the restart budget: nodes came or went."""
    view, current = running.view, running.current
    progress = round_progressed(current, view.failures, view.high_water)
    budget = carry_over(current.budget, progress=progress, high_water=view.high_water)
    quarantined, _ = _update_strikes(running, (), progress)
    return _next_round(running, budget, quarantined, why, dict(lost), cause="resize")


# ---- nodes that leave and join


def _resize(running: _RunningRound) -> Verdict:
    """The last rules: nodes leave or join, once that costs no step."""
    verdict = _await_resize(running) or _all_leave(running) or _pause_or_resize(running)
    if isinstance(verdict, Round):
        return verdict
    if isinstance(verdict, Wait) and not verdict.notable:
        verdict = _await_absent_members(running) or verdict
    until = min((at for at in (running.losses.until, verdict.until) if at is not None), default=None)
    return replace(verdict, until=until)


def _await_absent_members(running: _RunningRound) -> Wait | None:
    """Members' leases have expired, and this node does not see whether their workers still train."""
    absent = [node for node, _ in running.view.absent_since if node not in running.view.done]
    if running.view.next_step_due is not None or running.losses.until is None or not absent:
        return None
    after = f"{running.policy.adopt_timeout_s:g} s"
    why = f"the leases of {', '.join(absent)} have expired; their workers may still train"
    return Wait(f"{why}, so they count as lost after {after} (adopt_timeout)", None, notable=True)


def _await_resize(running: _RunningRound) -> Wait | None:
    """Nothing leaves or comes; or workers end with code 0, so all others are about to; or more may come."""
    current, growth = running.current, running.growth_reasons
    if running.view.done or not (running.leave_reasons or growth):
        until = None if running.policy.grow == "never" else next_slot_cooloff_end(running.view, current, running.now)
        return replace(_wait_while_running(current), until=until)
    since = [*(p.joined_at for p in running.fitting_joiners), *(r.since for r in running.returned_slots)]
    settled = max(since, default=running.now) + running.policy.grow_debounce_s
    if running.leave_reasons or running.now >= settled:
        return None
    more = "nodes to join" if running.fitting_joiners else "slots"
    return Wait(f"{'; '.join(growth)}; waiting for more {more}", settled)


def _all_leave(running: _RunningRound) -> Pause | Round | None:
    """Every node was asked to leave, as a scheduler does: the job stops, at a checkpoint if it can pause."""
    view, current = running.view, running.current
    some_stay = running.fitting_joiners or any(not p.record.leaving for p in view.nodes)
    if len(running.leave_reasons) < len(current.members) or some_stay:
        return None
    if _can_pause(running):
        return Pause(current.number, running.resize_reason)
    return _final_round(view, "stopped", _leaving_exit_code(view), running.resize_reason)


def _pause_or_resize(running: _RunningRound) -> Verdict:
    """A pause at a checkpoint comes first, so that no step is lost; a joiner waits where that is not possible."""
    current, why = running.current, running.resize_reason
    if (
        len(current.members) - len(running.leave_reasons) + len(running.fitting_joiners)
        < running.view.requirements.min_nodes
    ):
        why = f"{why}; too few nodes would remain"
        if any(r is not None and r.leaving_soon for r in running.records) and (
            running.is_paused or _can_pause(running)
        ):
            return Pause(current.number, why)
        return Wait(why, None, notable=True)
    resized = _uncounted_round(running, "; ".join(running.leave_reasons))
    if isinstance(resized, Wait):  # a group that trains is never ended for it
        return replace(resized, too_few_nodes=False, notable=True)
    if not running.leave_reasons and resized.world_size <= current.world_size:
        return _wait_while_running(current)  # it would leave out as many quarantined slots, which this round had to use
    if _can_pause(running):
        return Pause(current.number, why)
    if running.leave_reasons or running.policy.grow == "always" or running.is_paused:
        return resized
    cannot = "the script cannot pause at a checkpoint, so this waits for the next restart"
    return Wait(f"{why}; {cannot}", None, notable=True)


def _wait_while_running(current: Round) -> Wait:
    return Wait(f"round {current.number} runs with {count(current.world_size, 'worker')}", None)


def _can_pause(running: _RunningRound) -> bool:
    """True if rank 0's workers can be asked to pause, and have not paused yet.

    Where nodes leave, also if an earlier round could pause and no step of this one is reported yet: rank 0 may have
    made some, and reads the request at its first. A node that leaves waits no longer than its own stop may take, and
    not for ranks that have not begun to train: they may wait for a new process, and what they hold is saved.
    """
    rank_0, number = running.rank_0_record, running.current.number
    if rank_0 is None or running.is_paused:
        return False
    if rank_0.can_pause == number:
        return True
    records = [record for record in running.records if record is not None]
    may_step = rank_0.stepped_round != number and all(record.entered in (0, number) for record in records)
    return bool(running.leave_reasons) and may_step and any(record.can_pause for record in records)


def _leaving_exit_code(view: View) -> int:
    codes = {p.record.leaving_code for p in view.nodes} - {0}
    return codes.pop() if len(codes) == 1 else TERMINATED_EXIT_CODE


def _names(nodes: list[PresentNode]) -> str:
    return ", ".join(p.record.id for p in nodes)


# ---- after a failure


def _after_failure(running: _RunningRound) -> Round | Wait | None:
    """The group failed. Where nodes are lost and no failure names a cause of its own, the loss is the cause."""
    failures = running.failures
    if not failures or (running.losses.nodes and not any(f.culprits for f in failures)):
        return None
    return (
        _await_root_cause(running)
        or _shared_error(running)
        or _refused_state(running)
        or _repeated_error(running)
        or _restart(running)
    )


def _await_root_cause(running: _RunningRound) -> Wait | None:
    """All failures so far are of ranks that lost a peer: the peer's node is about to report."""
    until = running.view.failure_seen_at + ROOT_CAUSE_WAIT_S
    if running.all_secondary and len(running.failures) < len(running.current.members) and running.now < until:
        return Wait(f"{running.likely_root_cause.why}; waiting for the root cause", until)
    return None


def _shared_error(running: _RunningRound) -> Round | Wait | None:
    """The script's error on all ranks of all nodes before the first step: it refuses this world size, or cannot run."""
    current, first = running.current, running.likely_root_cause
    if not running.is_shared_error:
        return None
    if running.missing_failures:
        view, least_s = running.view, running.policy.user_error_wait_s
        ran_s, is_user_error = view.failure_seen_at - view.round_seen_at, first.kind == "user_error"
        settled = view.failure_seen_at + same_error_wait_s(least_s, ran_s, first.error, is_user_error=is_user_error)
        why = f"{first.why}; waiting for the same error from {count(running.missing_failures, 'more node')}"
        return Wait(why, settled) if running.now < settled else None
    if current.world_size < current.stepped_size:
        refused = replace(running, current=replace(current, required_size=current.stepped_size))
        return _uncounted_round(refused, first.why, running.losses.nodes)
    if running.policy.max_restarts is None and first.kind == "user_error" and not running.run_has_stepped:
        return _final_round(running.view, "failed", 1, f"an error in the script, not restarted: {first.why}")
    return None


def _refused_state(running: _RunningRound) -> Round | None:
    """The job's first save has refused what the script attaches: every start comes to it again.

    Whether states differ between ranks may be another time's chance: that has to come twice. Where there is a
    checkpoint, a restart may go back to one from which the script comes further.
    """
    first, before = running.likely_root_cause, running.current.budget
    saved = running.view.checkpoint is not None or running.has_saved
    if saved or running.policy.max_restarts is not None or not is_refused_state(first.repeat_key):
        return None
    again = first.repeat_key == before.repeat_key
    if not again and first.repeat_key.rpartition(".")[2] != "CheckpointRefused":
        return None
    how = "twice" if again else "not restarted"
    return _final_round(running.view, "failed", 1, f"an error in the script, {how}: {first.why}")


def _repeated_error(running: _RunningRound) -> Round | None:
    """The error that ended the round before: out of GPU memory, or one that all ranks share, after the same step; or,
    after any step, a session call that one rank makes and another one never will."""
    before, first = running.current.budget, running.likely_root_cause
    missed_call = is_missed_call(first.repeat_key)
    again = first.repeat_key and first.repeat_key == before.repeat_key and (missed_call or first.step == before.step)
    shared = running.is_shared_error and not running.missing_failures
    known = first.repeat_key == first.error  # by its type alone an error of the script
    if not again or not (shared or known) or running.policy.max_restarts is not None:
        return None
    if is_refused_state(first.repeat_key):
        return None
    where = "" if missed_call else f" after step {first.step}" if first.step else " before the first step"
    return _final_round(running.view, "failed", 1, f"an error in the script, twice{where}: {first.why}")


def _restart(running: _RunningRound) -> Round | Wait:
    """One restart of the budget, after its backoff; or the end, if none is left."""
    view, current, failures = running.view, running.current, running.failures
    first = _with_pending_exception(running)
    high_water = max(view.high_water, *(f.high_water for f in failures))
    progress = round_progressed(current, failures, high_water, first)
    quarantined, new = _update_strikes(running, failures, progress)
    verdict = spend(
        current.budget,
        running.policy,
        progress=progress,
        high_water=high_water,
        elapsed_s=running.now - view.round_seen_at,
        forgiven=bool(new),
        failure=first,
    )
    if isinstance(verdict, str):
        return _final_round(view, "failed", 1, f"{verdict}: {first.why}")
    state, delay_s = verdict
    until = view.failure_seen_at + delay_s
    if running.now < until:
        return Wait(f"{first.why}; restart {delay_s:g} s after the failure (backoff)", until, notable=True)
    lost = running.losses.nodes
    why = "; ".join([first.why, *map(_quarantine_phrase, new), *lost.values()])
    return _next_round(
        running, state, quarantined, why, lost, cause="crash" if first.kind in SHARED_ERROR_KINDS else first.kind
    )


def _with_pending_exception(running: _RunningRound) -> Failure:
    """The first failure; a rank that has raised and not exited yet explains secondary ones.

    Once it has exited, its node's failure names it, so it is not added again.
    """
    first = running.likely_root_cause
    if not running.all_secondary:
        return first
    number = running.current.number
    raised = next(
        (r.pending_exception for r in running.records if r and r.pending_exception and r.ready_round == number), ""
    )
    if raised and not first.why.startswith(raised.partition("raised ")[0]):
        return replace(first, why=f"{raised}, and then {first.why}")
    return first


def _update_strikes(
    running: _RunningRound, failures: tuple[Failure, ...], progress: bool
) -> tuple[tuple[QuarantinedSlot, ...], list[QuarantinedSlot]]:
    """The strikes of each slot after these failures, and the slots quarantined because of them.

    Progress shows that a slot works, but not that it will not hang again: a hang's strike stays until another slot is
    the culprit.
    """
    current, policy = running.current, running.policy
    used = {(node, slot) for _, node, _, slot in current.assignments()}
    ledger = {(q.node, q.slot): q for q in aged_quarantined_slots(running.view, current, running.now)}
    blamed = {(f.node, slot) for f in failures for _, slot in f.culprits} & used
    hung = {(f.node, slot) for f in failures if f.kind == "hung" for _, slot in f.culprits}
    if progress:  # a slot that took part in it has shown that it works
        repeated = hung or used if not blamed - hung else set()
        ledger = {at: q for at, q in ledger.items() if at not in used or (q.hung and at in repeated)}
    new: list[QuarantinedSlot] = []
    for at in sorted(blamed):
        slot = ledger.get(at, QuarantinedSlot(*at, strikes=0))
        slot = replace(slot, strikes=slot.strikes + 1, hung=at in hung)
        if slot.strikes >= policy.slot_strikes and _can_spare(running.view, ledger, at):
            times = slot.times + 1
            slot = replace(slot, times=times, left_s=policy.slot_quarantine_s(times))
            new.append(slot)
        ledger[at] = slot
    return tuple(ledger[at] for at in sorted(ledger)), new


def _can_spare(view: View, ledger: dict[tuple[str, int], QuarantinedSlot], at: tuple[str, int]) -> bool:
    """True if the node has enough slots without this one, or the job enough nodes without the node."""
    quarantined = (*(q for other, q in ledger.items() if other != at), QuarantinedSlot(*at, strikes=0, left_s=1.0))
    avoided = avoided_slots(view.with_starting_as_ready, quarantined)
    here = [p.record for p in view.nodes if not p.record.leaving and has_enough_slots(p.record, view, avoided)]
    return at[0] in {record.id for record in here} or len(here) >= view.requirements.min_nodes


def _quarantine_phrase(slot: QuarantinedSlot) -> str:
    where = f"slot {slot.slot} of {slot.node}"
    what = "hangs or failures" if slot.hung else "failures without progress"
    return f"{where} quarantined for {slot.left_s:g} s after {slot.strikes} {what}"


# ---- the next Round


def _first_round(view: View, policy: Policy, now: float) -> Round | Wait:
    runs = [
        p
        for p in view.nodes
        if p.record.ready_round and (view.current is None or p.record.ready_round > view.current.number)
    ]
    if runs and now < (until := max(p.joined_at for p in runs) + REREGISTRATION_S):
        return Wait(f"waiting for {_names(runs)} to restore a round that is missing from the store", until)
    number = max([view.first_round_number, *(max(p.record.highest_round, p.record.seen_round) + 1 for p in view.nodes)])
    if view.current is not None:
        number = max(number, view.current.number + 1)
    chosen = select_members(view, policy, now, {}, ())
    if isinstance(chosen, Wait):
        return chosen
    members = assign_slots(view, chosen, ())
    if isinstance(members, Wait):
        return members
    # A job that is submitted again, or whose agent was killed where no store remembers it, has had other rounds.
    begins = "first round" if number == 1 else f"new start after round {number - 1}"
    return Round(
        number,
        members,
        view.checkpoint,
        directory=chosen[0].directory,
        reason=f"{begins}: {_size_phrase(view, members)}",
        cause="start",
        run=view.requirements.run,
    )


def _next_round(
    running: _RunningRound,
    budget: BudgetState,
    quarantined: tuple[QuarantinedSlot, ...],
    why: str,
    lost: dict[str, str],
    *,
    cause: str,
) -> Round | Wait:
    view, current = running.view, running.current
    excluded = exclusions(view, current, lost, running.now)
    members = _members(running, lost, excluded, quarantined)
    if (
        not isinstance(members, Wait) and _world_size(members) < current.required_size
    ):  # what failed before is better than none
        members = _members(replace(running, view=view.with_starting_as_ready), lost, (), ())
    if isinstance(members, Wait):
        return replace(members, why="; ".join(filter(None, [why, members.why])))
    if _world_size(members) < current.required_size:
        refused = f"the script has refused to start with less than {count(current.required_size, 'worker')}"
        return Wait(
            f"{why}; {refused}, and there is room for {_world_size(members)}", None, too_few_nodes=True, notable=True
        )
    records = [record for member in members if (record := view.record(member.node)) is not None]
    first = records[0]
    # A node that joined may have checkpoints and logs of an earlier job in directories of its own.
    number = max(current.number, view.first_round_number - 1, *(record.highest_round for record in records)) + 1
    restarts = current.restarts + 1
    promoted = promoted_spares(view, current, members)
    came = ", ".join(m.node for m in members if view.member(m.node) is None and m.node not in promoted)
    here = {m.node for m in members}
    back = [str(slots) for slots in returned_slots(view, current, running.now) if slots.node in here]
    said = [
        why,
        _promotion_phrase(promoted),
        came and f"{came} joined",
        *back,
        *_starting_phrases(view, current, members),
    ]
    why = "; ".join(filter(None, said))
    reason = f"{why}; restart with {_size_phrase(view, members)}"
    if first.directory != current.directory:
        reason += f"; {first.id} has its own checkpoint directory and starts from the checkpoints in it"
    hang_places, hang_steps = _update_hang_places(running)
    return replace(
        current,
        number=number,
        members=members,
        last_checkpoint=view.checkpoint,
        restarts=restarts,
        budget=budget,
        quarantined_slots=quarantined,
        excluded=excluded,
        directory=first.directory,
        stepped_size=_smallest_stepped_size(running),
        hang_places=hang_places,
        hang_steps=hang_steps,
        reason=reason,
        cause=cause,
    )


def _members(
    running: _RunningRound,
    lost: dict[str, str],
    excluded: tuple[Exclusion, ...],
    quarantined: tuple[QuarantinedSlot, ...],
) -> tuple[Member, ...] | Wait:
    chosen = select_members(running.view, running.policy, running.now, lost, excluded, quarantined)
    return chosen if isinstance(chosen, Wait) else assign_slots(running.view, chosen, quarantined)


def _world_size(members: tuple[Member, ...]) -> int:
    return sum(len(m.slots) for m in members)


def _smallest_stepped_size(running: _RunningRound) -> int:
    known, size = running.current.stepped_size, running.current.world_size
    return known if not running.has_stepped else min(known or size, size)


def _promotion_phrase(spares: list[str]) -> str:
    if not spares:
        return ""
    place = "its place" if len(spares) == 1 else "their places"
    return f"{place} went to {plural(len(spares), 'spare')} {listing(spares)}"


def _starting_phrases(view: View, current: Round, members: tuple[Member, ...]) -> list[str]:
    """A sentence for each node with slots that these members, unlike those of `current`, do without."""
    used = {(m.node, slot) for m in members for slot in m.slots}
    before = {(m.node, slot) for m in current.members for slot in m.slots}
    left: dict[str, list[int]] = {}
    for node, slot in sorted(view.starting_slots & before - used):
        left.setdefault(node, []).append(slot)
    return [
        f"{plural(len(slots), 'slot')} {listing(slots)} of {node} {'starts' if len(slots) == 1 else 'start'}"
        for node, slots in left.items()
    ]


def _update_hang_places(running: _RunningRound) -> tuple[tuple[tuple[str, int], ...], tuple[tuple[str, int], ...]]:
    """Counts of groups killed for each wait, and the steps after which; the newest ones are last."""
    times, steps = dict(running.current.hang_places), dict(running.current.hang_steps)
    new_steps = {place: failure.hang_step for failure in running.failures for place in failure.places}
    for place in sorted(new_steps):
        times[place] = times.pop(place, 0) + 1
        steps[place] = new_steps[place]
    newest = tuple(times.items())[-MAX_HANG_PLACES:]
    return newest, tuple((place, steps[place]) for place, _ in newest if place in steps)


def _size_phrase(view: View, members: tuple[Member, ...]) -> str:
    world_size = _world_size(members)
    where = members[0].node if len(members) == 1 else count(len(members), "node")
    # Survivors save their state after this is decided, and nodes may hold one in memory.
    last = view.checkpoint
    # A script without a session may have saved by itself.
    start = "no elasticd checkpoint yet" if last is None else f"from checkpoint r{last[0]}-s{last[1]} or later"
    return f"{count(world_size, 'worker')} on {where}, {start}"


# ---- the end


def _stop_round(view: View) -> Round | None:
    """The end of a job that was asked to stop."""
    stop = view.stop
    if stop is None:
        return None
    why = stop.why if isinstance(stop, StopRequested) else ""
    return _final_round(view, "stopped", stop.exit_code, why or f"stopped by {stop.signal}")


def _final_round(view: View, outcome: Outcome, exit_code: int, why: str) -> Round:
    """The terminal Round. It has no members: nothing runs in it."""
    current = view.current
    if current is None:
        return Round(
            view.first_round_number, (), reason=why, outcome=outcome, exit_code=exit_code, run=view.requirements.run
        )
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
