"""Pure: a group without progress -> the culprits, the cause, and how that is known.

`blame` tries RULES in their order, which is the order of what can be trusted: which ranks have exited, which have not
enqueued what NCCL's devices wait in, which have issued fewer collectives, which stacks are outside of any wait, which
ranks wait in something else than the others. Without a difference between ranks there is no culprit.

A hang has a victim for each culprit, and they look alike: both wait. What tells them apart is never how long a rank has
waited, since all began within a step, but what it has not done that others wait for. Each rule looks for one such
difference and answers with the ranks that lack it, the cause, a sentence with the numbers, and how strong that is as
evidence. `patience` turns the strength into the time that has to pass before anything is killed: proof is acted upon in
seconds, a likeness in minutes.

Why the order is by trust. An exit is a fact. NCCL's devices count what was enqueued, whatever the Python thread does.
So does NCCL's RAS where there is no recorder, of launches only. Counts of issued collectives are kept by the ranks
themselves and cover one group. A stack is a moment: a rank may be seen outside a wait that it enters a millisecond
later. Waiting in something else than the others is the weakest, as a script may let ranks do different things on
purpose.

A rank of which nothing is known (no stack, no heartbeat thread) is never blamed for being unknown, unless others wait
for it by name. Where ranks of a whole node are behind together, the network is named and not the ranks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from elasticd.heartbeat.record import INIT_PROCESS_GROUP_BARRIER
from elasticd_agent.hangs.patience import HangEvidence
from elasticd_agent.hangs.proofs import prove, wait_apart
from elasticd_agent.hangs.rank import RENDEZVOUS_FUNCTION, RankState, describe_waits, labels
from elasticd_agent.model.phrases import has_have

MAX_PLACES = 4
"""The most places in which ranks of one hang wait that it is recognised by."""
_CAUSES_WORST_FIRST = ("stopped", "zombie", "gil", "blocked", "spinning")
"""The worst of several culprits names the cause: one that works may still finish by itself."""


@dataclass(frozen=True, slots=True)
class Blame:
    """The answer of one rule."""

    culprits: tuple[RankState, ...]
    cause: str
    why: str
    evidence: HangEvidence = "alike"
    places: tuple[str, ...] = ()
    """The places in which those ranks wait whose wait no other rank could end, or all ranks if each waits for another.
    Empty: unknown."""


@dataclass(frozen=True, slots=True)
class _MissingCollective:
    """The device of `waiting` waits in collective `number` of an NCCL group; `late` has not enqueued it."""

    waiting: RankState
    late: RankState
    group: int
    number: int


@dataclass(frozen=True)
class _StalledRanks:
    """The ranks of a group without progress; `live` is not empty, `exited` have ended with code 0."""

    live: Sequence[RankState]
    exited: Sequence[RankState]
    node_count: int

    @property
    def all_nodes_reported(self) -> bool:
        """All nodes have reported."""
        return len({rank.node for rank in (*self.live, *self.exited)}) == self.node_count

    @cached_property
    def outside_wait(self) -> list[RankState]:
        """The live ranks that wait for no other rank; without one, those that may wait for anything."""
        stuck = [rank for rank in self.live if rank.holds_gil]
        if len(stuck) == len(self.live) > 1:  # that is the machine, or the heartbeat thread
            stuck = []
        outside = [rank for rank in self.live if rank in stuck or not (rank.waits or rank in self.at_unknown_place)]
        return outside or [rank for rank in self.live if rank.waits_for_unknown]

    @cached_property
    def at_unknown_place(self) -> list[RankState]:
        """The live ranks without a stack, of which nothing else says that the others wait for them.

        A heartbeat says so where the others wait at a barrier of the session, or make a process group. A stopped
        process, or one that holds the GIL, has no stack because of that.
        """
        if any(rank.waits_out_of_band or rank.is_joining for rank in self.live):
            return []
        return [rank for rank in self.live if rank.is_at_unknown_place]

    @cached_property
    def suspects(self) -> list[RankState]:
        """The ranks outside of any wait that the others wait for, as far as that can be told."""
        suspects = [rank for rank in self.outside_wait if rank.report.phase != "exit"] or self.outside_wait
        if suspects and any(rank.report.collectives >= 0 for rank in self.live):
            least = min(rank.report.collectives for rank in suspects)
            suspects = [rank for rank in suspects if rank.report.collectives == least]
        if len(suspects) == len(self.live) > 1:
            # No wait is visible: the script waits in its own way for ranks that save or evaluate.
            suspects = [rank for rank in suspects if rank.report.phase in ("checkpoint", "eval")] or suspects
        return suspects

    @cached_property
    def counts_differ_by_design(self) -> bool:
        """gloo counts sends and receives among the collectives, of which the stages of a pipeline have different
        numbers."""
        return any(rank.is_in_point_to_point and not rank.report.nccl_groups for rank in self.live)

    @cached_property
    def behind(self) -> list[RankState]:
        """The live ranks that have issued fewer collectives than others."""
        if self.counts_differ_by_design:
            return []
        most = max(rank.report.collectives for rank in self.live)
        return [rank for rank in self.live if rank.report.collectives < most]

    @cached_property
    def with_pending_collective(self) -> list[RankState]:
        """The live ranks whose device has not completed an NCCL collective, whatever their main thread does."""
        return [rank for rank in self.live if rank.has_pending_collective]

    @cached_property
    def missing_collectives(self) -> list[_MissingCollective]:
        """The collectives that devices wait in and that other ranks have not enqueued."""
        completed: dict[int, int] = {}
        for rank in self.with_pending_collective:
            for group, number in rank.last_completed_if_pending.items():
                completed[group] = max(number, completed.get(group, 0))
        # Nearly all ranks have enqueued everything: of a thousand ranks there are a million pairs.
        behind = [
            rank for rank in self.live if any(n <= completed.get(group, -1) for group, n, _ in rank.report.nccl_groups)
        ]
        pairs = [(waiting, late) for waiting in self.with_pending_collective for late in behind]
        return [
            _MissingCollective(w, late, *missing)
            for w, late in pairs
            if (missing := late.collective_missing_for(w)) is not None
        ]

    def others(self, ranks: Sequence[RankState]) -> list[RankState]:
        return [rank for rank in self.live if rank not in ranks]


def blame(live: Sequence[RankState], exited: Sequence[RankState], node_count: int) -> Blame:
    """Which of `live`, not empty, hold up the group on that many nodes. `exited`: ranks that ended with code 0."""
    group = _StalledRanks(live, exited, node_count)
    blamed = next(blamed for rule in RULES if (blamed := rule(group)) is not None)
    proof = (
        None if any(rank.is_busy for rank in live) else prove(live, exited, all_ranks_known=group.all_nodes_reported)
    )
    if proof is not None:
        named = blamed.culprits and blamed.cause in ("missed_collective", "mismatched_collectives")
        if named and not proof.culprits:
            blamed = replace(blamed, evidence="proven")
        else:
            blamed = Blame(proof.culprits, proof.cause, proof.why, "proven")
    culprits = [rank for rank in blamed.culprits if rank in live]
    evidence = "left" if exited and blamed.evidence == "idle" else blamed.evidence
    unrecorded = any(
        rank.has_unrecorded_group or rank.may_wait_for_other_program or rank.wait_is_guessed for rank in live
    )
    unrecorded = unrecorded or _thread_may_resolve(group, blamed)
    if evidence in ("alike", "device") and unrecorded:
        evidence = "unrecorded"
    return replace(blamed, evidence=evidence, places=_wait_places(culprits or group.outside_wait or live))


def _thread_may_resolve(group: _StalledRanks, found: Blame) -> bool:
    """Ranks wait for each other, and a thread of one runs code of the script: it may issue what others wait in.

    Counts do not show that they do where they wait in groups other than the default one: recorders do. Sends and
    receives are in none.
    """
    if group.exited or all(rank.report.alone for rank in group.live):
        return False
    apart = found.cause in ("missed_collective", "mismatched_collectives")
    unknown = any(rank.is_in_point_to_point for rank in group.live)
    return apart or (found.evidence == "alike" and (bool(group.behind) or unknown or wait_apart(group.live)))


def blame_overdue(waiting: Sequence[RankState], others: Sequence[RankState]) -> Blame:
    """Which of `others`, which make progress or work, `waiting` have waited for in vain."""
    most = max(rank.report.collectives for rank in waiting)
    behind = [rank for rank in others if 0 <= rank.report.collectives < most] or others
    cause = "missed_collective" if any(rank.report.collectives < most for rank in behind) else "spinning"
    waits = _held_up(waiting, behind) or f"; {labels(waiting)} {'waits' if len(waiting) == 1 else 'wait'} for others"
    waits += f" for {max(rank.waiting_s for rank in waiting):.1f} s"
    why = f"{labels(behind)} {_describe_lag(behind, waiting)}{_activity(behind)}{waits}"
    return Blame(tuple(behind), cause, why, "overdue", _wait_places(behind))


def _wait_places(ranks: Iterable[RankState]) -> tuple[str, ...]:
    """Return the places in which these ranks wait; none if the place of one is unknown."""
    places = {rank.wait_place for rank in ranks}
    return () if "" in places else tuple(sorted(places))[:MAX_PLACES]


# ---- rules: some ranks do not wait for others


def _exiting(group: _StalledRanks) -> Blame | None:
    """Training is done: every live rank is in its exit handlers, or did its last step and computes on."""
    done = max((rank.report.step for rank in group.exited), default=0)
    for rank in group.live:
        computes = rank in group.outside_wait or rank.report.where == "device"
        if rank.report.phase != "exit" and not (0 < done <= rank.report.step and computes):
            return None
    culprits = group.outside_wait or (list(group.live) if group.exited else [])
    if not culprits:
        why = f"all ranks wait for each other while they exit: {describe_waits(group.live)}"
        return Blame((), "exiting", why)
    gone = len(group.exited)
    others = f"; {gone} of the others ha{'s' if gone == 1 else 've'} exited" if gone else ""
    why = f"{labels(culprits)} {_activity(culprits)} after training is done{others}"
    return Blame(tuple(culprits), "exiting", why, _evidence_outside_wait(culprits, "exiting"))


def _all_idle(group: _StalledRanks) -> Blame | None:
    """No rank can be told from the others, and none waits for another."""
    if not len(group.suspects) == len(group.live) > 1:
        return None
    activities = "; ".join(f"{rank.label()} {rank.activity()}" for rank in group.live[:3])
    more = "; …" if len(group.live) > 3 else ""
    why = f"none of the {len(group.live)} ranks waits for another: {activities}{more}"
    evidence = _evidence_outside_wait(group.live, "everyone")
    return Blame((), "spinning" if evidence == "working" else "everyone", why, evidence)


def _not_joined(group: _StalledRanks) -> Blame | None:
    """Others make a process group, and the suspects have never been in one."""
    suspects = group.suspects or _at_rendezvous(group)
    joining = [rank for rank in group.others(suspects) if rank.is_joining]
    if not suspects or not joining or any(rank.report.collectives >= 0 for rank in suspects):
        return None
    call = min(rank.report.function or INIT_PROCESS_GROUP_BARRIER for rank in joining)
    why = f"{labels(suspects)} {has_have(suspects)} not reached {call}{_activity_lead(suspects)}{_activity(suspects)}"
    why += _held_up(group.others(suspects), suspects)
    return Blame(tuple(suspects), "never_joined", why, _evidence_outside_wait(suspects, "never_joined"))


def _at_rendezvous(group: _StalledRanks) -> list[RankState]:
    """The ranks that have not even reached the store, where all live ranks make the group."""
    early = [rank for rank in group.live if rank.is_joining and rank.report.function == RENDEZVOUS_FUNCTION]
    return early if all(rank.is_joining for rank in group.live) else []


def _missing_in_group(group: _StalledRanks) -> Blame | None:
    """NCCL's recorder: devices wait in a collective that other ranks of its group have not enqueued."""
    held_up = [gap.waiting for gap in group.missing_collectives]
    late = [rank for rank in group.live if any(rank is gap.late for gap in group.missing_collectives)]
    culprits = [rank for rank in late if rank not in group.with_pending_collective]
    if not late:
        return None
    if any(rank in group.with_pending_collective and rank not in held_up for rank in late):
        return None if group.exited else _no_culprit(group, "some of them in a group that all of its ranks wait in")
    if not culprits:
        why = f"ranks wait for each other in different NCCL groups: {_activity(late)}"
        return Blame((), "mismatched_collectives", why, _evidence_of_cycle(group, late))
    return _not_enqueued(group, culprits)


def _not_enqueued(group: _StalledRanks, culprits: Sequence[RankState]) -> Blame:
    """No device of `culprits` waits, and other ranks' devices wait for them."""
    gaps = [gap for gap in group.missing_collectives if gap.late in culprits]
    first = next(gap for gap in gaps if gap.late is culprits[0])
    waiting = [rank for rank in group.with_pending_collective if any(rank is gap.waiting for gap in gaps)]
    why = f"{labels(culprits)} {has_have(culprits)} not enqueued collective {first.number:,} of the NCCL group of "
    why += f"{_members(group, first.group)}{_activity_lead(culprits)}{_activity(culprits)}{_held_up(waiting, culprits)}"
    if all(rank.report.phase == "exit" or rank.report.where in ("collective", "barrier") for rank in culprits):
        evidence: HangEvidence = "proven" if _only_wait(group, group.live) else "idle"
        return Blame(tuple(culprits), "missed_collective", why, evidence)
    cause = min((rank.likely_cause for rank in culprits), key=_CAUSES_WORST_FIRST.index)
    return Blame(tuple(culprits), cause, why, _evidence_outside_wait(culprits, cause))


def _evidence_of_cycle(group: _StalledRanks, ranks: Sequence[RankState]) -> HangEvidence:
    """Return the evidence against ranks whose devices wait for each other.

    One whose main thread waits in gloo may do so for a rank that is healthy.
    """
    if _only_wait(group, ranks):
        return "proven"
    return "unrecorded" if any(rank.report.where == "collective" for rank in ranks) else "device"


def _only_wait(group: _StalledRanks, ranks: Sequence[RankState]) -> bool:
    """True if these ranks, with all of their code, wait for ranks of the job: other code may enqueue what others wait
    in.

    These counts do not tell whether a rank waits in a collective of NCCL, or in one of gloo that makes progress:
    only recordings may prove that.
    """
    return group.all_nodes_reported and all(
        rank.has_only_job_groups
        and not rank.has_unrecorded_group
        and rank.report.alone
        and rank.report.phase != "exit"
        and (rank.waits_out_of_band or (rank.report.where == "device" and rank.has_pending_collective))
        for rank in ranks
    )


def _outside_a_wait(group: _StalledRanks) -> Blame | None:
    """The suspects are at work, blocked or ending while others wait."""
    suspects = group.suspects
    if not suspects:
        return None
    others = group.others(suspects)
    cause = min((rank.likely_cause for rank in suspects), key=_CAUSES_WORST_FIRST.index)
    if cause == "blocked" and all(rank.report.phase == "exit" for rank in suspects):
        cause = "missed_collective"
    why = f"{labels(suspects)} {_describe_lag(suspects, others)}{_activity(suspects)}{_held_up(others, suspects)}"
    return Blame(tuple(suspects), cause, why, _evidence_outside_wait(suspects, cause))


def _evidence_outside_wait(culprits: Sequence[RankState], cause: str) -> HangEvidence:
    """The evidence against ranks outside of a wait: as weak as against the one that is most likely healthy."""
    if any(rank.is_busy for rank in culprits):
        return "working"
    if cause == "gil":
        slow = any(rank.report.loading or rank.report.state == "D" or not rank.report.where for rank in culprits)
        return "loading" if slow else "gil"
    if any(rank.report.where == "device" for rank in culprits):
        return "device"
    return "idle"


# ---- rules: all live ranks wait


def _skipped_session_call(group: _StalledRanks) -> Blame | None:
    """Ranks wait in a call of the session for one that has exited, or that waits in a collective beyond it.

    A rank in an earlier step than theirs waits for them, not they for it, unless it has never called `step()`.
    """
    waiting = [rank for rank in group.live if rank.report.wait_call]
    if not waiting:
        return None
    missing = {rank.report.wait_rank for rank in waiting}
    most = max(rank.report.collectives for rank in waiting)
    step = min(rank.report.step for rank in waiting)
    beyond = [rank for rank in group.live if rank.report.where == "collective" and rank.report.collectives > most]
    stepless = [rank for rank in beyond if not rank.report.called_step and waiting[0].report.called_step]
    gone = stepless or [*group.exited, *(rank for rank in beyond if rank.report.step >= step)]
    culprits = [rank for rank in gone if rank.report.rank in missing]
    if not culprits:
        return None
    call = "step()" if stepless else waiting[0].report.wait_call
    why = f"{labels(culprits)} {has_have(culprits)} not called {call}; all ranks must{_activity_lead(culprits)}"
    return Blame(tuple(culprits), "missed_collective", why + _activity(culprits), "idle")


def _exited_early(group: _StalledRanks) -> Blame | None:
    """The rule for ranks that exited while others still wait: the minority is to blame."""
    live, exited = group.live, group.exited
    if not exited:
        return None
    fewer = _describe_lag(exited, live)
    if len(exited) > len(live):
        why = f"{labels(live)} {_activity(live)} for ranks that have all exited with code 0"
        return Blame(tuple(live), "missed_collective", why)
    done = f"{fewer}{_activity(exited)}" if fewer else f"{has_have(exited)} exited with code 0"
    return Blame(tuple(exited), "missed_collective", f"{labels(exited)} {done}{_held_up(live, exited)}")


def _single_rank(group: _StalledRanks) -> Blame | None:
    """The rule for a single live rank: it waits for something outside the job."""
    if len(group.live) > 1:
        return None
    rank = group.live[0]
    why = f"{rank.label()} {rank.activity()}, and there is no other rank"
    return Blame((rank,), "blocked", why, "no_stack" if group.at_unknown_place else "device")


def _behind_in_ras(group: _StalledRanks) -> Blame | None:
    """NCCL's RAS, where no recorder counts: ranks have launched fewer collectives of a communicator than others.

    It does not tell what is completed, so it names ranks and does not shorten any patience.
    """
    if any(rank.report.nccl_groups for rank in group.live):
        return None
    late = [rank for rank in group.live if rank.is_behind_in_ras]
    ahead = [rank for rank in group.live if any(count.launched == count.most for count in rank.report.launches)]
    culprits = [rank for rank in late if rank not in ahead]
    if not late or len(culprits) == len(group.live):
        return None
    if not culprits:
        why = f"ranks wait for each other in different NCCL communicators: {_activity(late)}"
        return Blame((), "mismatched_collectives", why, _evidence_of_waiting(late))
    first = culprits[0].report.launches[0]
    others = group.others(culprits)
    why = (
        f"{labels(culprits)} {has_have(culprits)} launched {first.launched:,} {first.operation} operations of an NCCL "
    )
    why += f"communicator ({first.communicator[:16]}), the foremost rank {first.most:,}, unchanged in two answers of "
    why += f"NCCL's RAS{_activity_lead(culprits)}{_activity(culprits)}{_held_up(others, culprits)}"
    evidence = _evidence_of_waiting(culprits)
    return Blame(tuple(culprits), "missed_collective" if evidence == "alike" else "blocked", why, evidence)


def _evidence_of_waiting(ranks: Sequence[RankState]) -> HangEvidence:
    """The evidence against ranks that nothing else tells apart: weak where one is at an unknown place."""
    if not all(rank.waits for rank in ranks):
        return "idle"
    return "device" if any(rank.report.where == "device" for rank in ranks) else "alike"


def _pending_alike(group: _StalledRanks) -> Blame | None:
    """NCCL's recorder: all devices wait in collectives that all ranks have enqueued, however far some run ahead."""
    if len(group.with_pending_collective) < len(group.live) or group.missing_collectives:
        return None
    return _no_culprit(group, "and every rank has enqueued what the others wait in")


def _different_broadcast_sources(group: _StalledRanks) -> Blame | None:
    """All have issued the broadcast that some wait in, and no byte is under way: the recorder keeps no sources."""
    live = group.live
    if not group.all_nodes_reported or not all(rank.has_no_data_in_flight for rank in live):
        return None
    tails = [(rank, tail) for rank in live for tail in rank.report.groups]
    broadcasts = {
        (broadcast.group, broadcast.members): (waiting, broadcast)
        for waiting, broadcast in tails
        if waiting.wait_is_recorded and _is_broadcast(dict(broadcast.kinds).get(broadcast.pending, ""))
    }
    for waiting, broadcast in broadcasts.values():
        group_of = broadcast.group, broadcast.members
        same = [(rank, tail) for rank, tail in tails if (tail.group, tail.members) == group_of]
        issued = [dict(tail.kinds).get(broadcast.pending, "broadcast") for _, tail in same]
        if any(tail.last < broadcast.pending for _, tail in same) or not all(map(_is_broadcast, issued)):
            continue
        done = [rank for rank, tail in same if not 0 < tail.pending <= broadcast.pending]
        which = f"{labels(done)} {has_have(done)} finished" if done else "all of its ranks wait in"
        why = f"{waiting.label()} waits in broadcast #{broadcast.pending} of the {broadcast.group}, which {which}; "
        why += "no byte of it is under way: its ranks may have named different sources"
        return Blame((), "mismatched_collectives", why)
    return None


def _is_broadcast(kind: str) -> bool:
    return kind.startswith("broadcast")


def _behind_without_stack(group: _StalledRanks) -> Blame | None:
    """All that is known of the ranks that are behind is that they are."""
    behind = group.behind
    if not behind or any(rank not in group.at_unknown_place for rank in behind):
        return None
    others = group.others(behind)
    why = f"{labels(behind)} {_describe_lag(behind, others)}{_activity(behind)}{_held_up(others, behind)}"
    return Blame(tuple(behind), "blocked", why, "idle" if any(rank.waits for rank in others) else "no_stack")


def _skipped_in_last_step(group: _StalledRanks) -> Blame | None:
    """A minority issued fewer collectives in its last step than the others in theirs, and is not behind them."""
    live = group.live
    if group.counts_differ_by_design:
        return None
    minority = _minority(live, [rank.report.usual for rank in live], max)
    step = max(rank.report.step for rank in live)
    odd = tuple(rank for rank, common in minority if -1 < rank.report.usual < common and rank.report.step == step)
    if not odd:
        return None
    _, common = minority[0]
    its = "its" if len(odd) == 1 else "their"
    issued = f"{odd[0].report.usual:,} collectives in {its} last step, the others {common:,} in theirs"
    return Blame(odd, "missed_collective", f"{labels(odd)} issued {issued}: {describe_waits(live)}")


def _split_by_node(group: _StalledRanks) -> Blame | None:
    """Some are behind, and all ranks of each node are at the same place: a fault of one rank looks different.

    The ranks ahead were done with what the others wait in: the root of a broadcast does not wait for its receivers.
    """
    at: dict[str, set[tuple[int, str]]] = {}
    for rank in group.live:
        at.setdefault(rank.node, set()).add((rank.report.collectives, _wait_kind(rank)))
    if not group.behind or len(at) < 2 or any(len(places) > 1 for places in at.values()):
        return None
    return _no_culprit(group, f"ranks on {' and '.join(sorted({rank.node for rank in group.behind}))} are behind")


def _mismatched(group: _StalledRanks) -> Blame | None:
    """Ranks wait in different collectives or barriers, and so for each other."""
    live = group.live
    known = [rank for rank in live if rank.report.where != "device" and rank not in group.at_unknown_place]
    kinds = Counter(map(_wait_kind, known))
    if len(kinds) < 2:
        return None
    at_barriers = [rank for rank in live if rank.waits_out_of_band]
    others = group.others(at_barriers)
    if at_barriers and len(at_barriers) <= len(others) and (fewer := _describe_lag(at_barriers, others)):
        why = f"{labels(at_barriers)} {fewer}{_activity(at_barriers)}"
        return Blame(tuple(at_barriers), "missed_collective", why + _held_up(others, at_barriers), "idle")
    (common, most), (_, next_most) = kinds.most_common(2)
    why = f"ranks wait in different collectives: {describe_waits(live)}"
    if most == next_most:
        return Blame((), "mismatched_collectives", why)
    odd = tuple(rank for rank in known if _wait_kind(rank) != common)
    differ = "differs" if len(odd) == 1 else "differ"
    return Blame(odd, "mismatched_collectives", f"{why}; {labels(odd)} {differ} from the others")


def _minority_behind(group: _StalledRanks) -> Blame | None:
    """Fewer than half of the ranks are behind."""
    behind = group.behind
    if not behind or 2 * len(behind) >= len(group.live):
        return None
    others = group.others(behind)
    why = f"{labels(behind)} {_describe_lag(behind, others)}{_activity(behind)}{_held_up(others, behind)}"
    if behind[0].report.where == "device":
        return Blame(tuple(behind), "blocked", why, "device")
    return Blame(tuple(behind), "missed_collective", why)


def _ahead_in_steps(group: _StalledRanks) -> Blame | None:
    """All have issued as many collectives, and a minority has made more steps with them."""
    if group.behind or group.counts_differ_by_design:
        return None
    odd = tuple(rank for rank, _ in _minority(group.live, [rank.report.step for rank in group.live], min))
    if not odd:
        return None
    why = f"{labels(odd)} issued {odd[0].report.collectives:,} collectives, as many as others in another step"
    return Blame(odd, "missed_collective", f"{why}: {describe_waits(group.live)}")


def _network(group: _StalledRanks) -> Blame:
    """Nothing tells the ranks apart."""
    if group.behind or group.counts_differ_by_design:
        return _no_culprit(group, "no rank stands out")
    issued = group.live[0].report.collectives
    return _no_culprit(group, "none is behind" + (f" after {issued:,} collectives" if issued >= 0 else ""))


def _no_culprit(group: _StalledRanks, finding: str) -> Blame:
    idle = f"for {min(rank.report.idle_s for rank in group.live):.1f} s"
    size = "a world_size that is not the job's" if all(rank.is_joining for rank in group.live) else ""
    what = f"the backend, or {size or 'tensors that differ'}"
    if group.node_count > 1:
        what = f"{size and size + ', '}the network between {group.node_count} nodes, or the backend"
    device = any(rank.report.where == "device" or rank.has_pending_collective for rank in group.live)
    waits = describe_waits(group.live) or f"{len(group.live)} ranks make no progress"
    evidence: HangEvidence = "no_stack" if group.at_unknown_place else "device" if device else "alike"
    return Blame((), "network", f"{waits} {idle}, {finding}: {what}", evidence)


RULES: tuple[Callable[[_StalledRanks], Blame | None], ...] = (
    _exiting,
    _all_idle,
    _not_joined,
    _missing_in_group,
    _outside_a_wait,
    # From here on all live ranks of which a stack is known wait.
    _skipped_session_call,
    _exited_early,
    _single_rank,
    _behind_in_ras,
    _pending_alike,
    _different_broadcast_sources,
    _behind_without_stack,
    _skipped_in_last_step,
    _split_by_node,
    _mismatched,
    _minority_behind,
    _ahead_in_steps,
    _network,
)
"""The first one that answers decides; the last one always does."""


def _wait_kind(rank: RankState) -> str:
    return f"barrier {rank.report.barrier!r}" if rank.waits_out_of_band else rank.report.function or rank.report.where


def _minority(
    live: Sequence[RankState], values: Sequence[int], of_two: Callable[[Iterable[int]], int]
) -> list[tuple[RankState, int]]:
    """Ranks whose value differs from the majority's, with the latter. Of two ranks `of_two` chooses the usual one."""
    (common, most), *_ = Counter(values).most_common(1)
    if len(live) == 2:
        common = of_two(values)
    elif 2 * most <= len(live):
        return []
    return [(rank, common) for rank, value in zip(live, values, strict=True) if value != common]


# ---- words


def _describe_lag(ranks: Sequence[RankState], others: Sequence[RankState]) -> str:
    """The collectives that `ranks` are behind, in words; "" if they are not."""
    issued = [rank.report.collectives for rank in ranks]
    mine, most = max(issued), "up to " if min(issued) < max(issued) else ""
    counts = [rank.report.collectives for rank in others]
    if not counts or mine < 0 or max(counts) <= mine:
        return ""
    theirs = f"{max(counts):,}" if min(counts) == max(counts) else f"up to {max(counts):,}"
    return f"{has_have(ranks)} issued {most}{mine:,} collectives, the others {theirs}{_activity_lead(ranks)}"


def _activity(ranks: Sequence[RankState]) -> str:
    """Say what these ranks do, each of the first three."""
    if len(ranks) == 1:
        return ranks[0].activity()
    more = "; …" if len(ranks) > 3 else ""
    return f"({'; '.join(f'rank {rank.report.rank} {rank.activity()}' for rank in ranks[:3])}{more})"


def _members(group: _StalledRanks, nccl_group: int) -> str:
    numbers = [
        rank.report.rank for rank in group.live if any(number == nccl_group for number, _, _ in rank.report.nccl_groups)
    ]
    return f"ranks {', '.join(map(str, numbers[:8]))}{', …' if len(numbers) > 8 else ''}"


def _held_up(waiting: Sequence[RankState], culprits: Sequence[RankState]) -> str:
    """Say who waits for the culprits, and in what."""
    waits = describe_waits(waiting)
    return f"; {waits} for {'it' if len(culprits) == 1 else 'them'}" if waits else ""


def _activity_lead(ranks: Sequence[RankState]) -> str:
    return ": it " if len(ranks) == 1 else " "
