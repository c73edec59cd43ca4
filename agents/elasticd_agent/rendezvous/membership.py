"""Pure: the nodes of a Round. Members lost from the current one, nodes that may join, the next members, their slots.

Every answer carries its reason. Failures of the script are `plan`'s subject.

Who is lost. A member is given up for one of three reasons, each with its own proof. It is gone for certain: its port
refuses twice, its name belongs to another incarnation, or its workers' end was reported. It cannot take part in time:
it has not seen the Round, or has not started it. Or it is silent, and then time alone decides: as long as workers make
steps, silence of an agent proves nothing about its workers, so nobody is lost for it; once steps have stopped, or a
failure was reported, the group has to be made anew anyway, and the wait for a silent member is short.

A partition is not two losses. When nodes cannot reach each other, removing both of each pair would empty the job; the
largest set of nodes that all reach each other continues, and of two equally large ones the one with the first node, so
that every leader would choose the same.

Who comes next. Survivors keep their order, so ranks keep their data, their copies in memory and, where they can, their
processes. Joiners follow by the time of their arrival. Nobody who is ready waits for one that is not, except where
there would be too few, or where only that node has the job's checkpoints. A node or a slot that keeps failing is left
out for a time that doubles, but never if the job could not run without it: a bad node is better than none.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from elasticd_agent.model.job import Policy
from elasticd_agent.model.phrases import count, is_are, listing, plural
from elasticd_agent.model.records import Exclusion, Member, NodeRecord, QuarantinedSlot, Round
from elasticd_agent.rendezvous.view import PresentNode, ProbeResult, View, Wait

STALL_GRACE_S = 0.5
"""Workers that train together stop within a step of a peer's end; only waiting tells that from a longer step."""
REREGISTRATION_S = 1.5
"""An agent that has lost the store, or its record in it, is back within a retry (0.8 s) once the store answers."""
START_LIMIT_S = 60.0
"""A member that has seen a Round starts its group within this time. The old group saves its state, stops or is
killed, and has 30 s to die with a GPU open."""
MAX_SEARCH_BRANCHES = 100
"""The bound of the search for the largest connected set: 0.3 s where 300 nodes are partitioned."""
EXCLUSION_EXPIRES_S = 600.0
"""A node that stayed for so long after its return is a node like any other."""
_Loss = tuple[str, float]
"""Why a member is lost, and since or from when."""
_NOT_LOST: _Loss = "", float("-inf")
AvoidedSlots = Mapping[tuple[str, int], float]
"""The slots (node, slot) that a Round leaves out where enough others are: quarantined ones with the cool-off that is
left, and those whose process starts with 0. Nobody waits for such a process while enough ranks keep theirs."""


# ---- lost members


@dataclass(frozen=True, slots=True)
class Losses:
    nodes: dict[str, str]  #: lost members, each with its reason
    until: float | None  #: when to evaluate again
    returning: tuple[str, ...] = ()  #: members whose record should be back soon


def losses(view: View, current: Round, policy: Policy, now: float) -> Losses:
    """The members of `current` that cannot continue: by the first rule that applies, or by a partition."""
    probes, absent, silent = dict(view.probe_results), dict(view.absent_since), dict(view.silent_since)
    gone = dict(view.leave_reasons)
    stalled = view.next_step_due is not None and now >= view.next_step_due + STALL_GRACE_S
    lost: dict[str, str] = {}
    until: list[float] = []
    returning: list[str] = []
    failed = {f.node for f in view.failures if f.round == current.number}
    left = [m.node for m in current.members if m.node not in view.done]
    none_left = all(view.record(node) is None and probes.get(node) in ("refused", "closed") for node in left)
    for member in current.members:
        node, record, probe = member.node, view.record(member.node), probes.get(member.node)
        if node in view.done:
            continue  # its workers have all ended with code 0
        if record is not None and record.incarnation != member.incarnation:
            loss = f"{node} was restarted", now
        elif probe == "refused":
            loss = f"{node} is lost: the port of its agent is closed", now
        elif record is None:
            loss = _loss_by_absence(view, policy, node, probe, absent.get(node, now), none_left)
        elif node in failed:
            loss = _NOT_LOST  # it has seen and started the round
        else:
            loss = _loss_by_delay(view, current, policy, member, record, probe, silent.get(node) if stalled else None)
        why, due = loss
        why = gone.get(node, why)
        if now < due:
            until.append(due)
            if record is None and view.failures:
                returning.append(node)
        elif why:
            lost[node] = why
    if stalled or view.failures:
        lost |= _losses_by_partition(view, current, lost)
    return Losses(lost, min(until, default=None), tuple(returning))


def _loss_by_absence(
    view: View, policy: Policy, node: str, probe: ProbeResult | None, since: float, none_left: bool
) -> _Loss:
    """The loss of a member without a record.

    After a failure, what matters is who can be in the next group: a short wait. While the group may still train, not
    before it has stopped, nor soon after a store outage, nor before `adopt_timeout_s` where that is unseen, unless
    `none_left`: no member is in the store, and every one's port is closed.
    """
    why = f"{node} is lost: its lease has expired"
    if view.failures:
        if probe in ("silent", "closed"):
            return f"{node} is lost: its lease has expired and it does not answer", since
        return why, max(since, view.store_up_since) + REREGISTRATION_S
    trusted = view.store_up_since + policy.lease_s + policy.renewal_s
    if none_left:
        return f"{why} and the port of its agent is closed", trusted
    at_last = since + policy.adopt_timeout_s
    if view.next_step_due is not None:
        at_last = min(at_last, max(since, view.next_step_due) + STALL_GRACE_S)
    return why, max(trusted, at_last)


def _loss_by_delay(
    view: View,
    current: Round,
    policy: Policy,
    member: Member,
    record: NodeRecord,
    probe: ProbeResult | None,
    silent_since: float | None,
) -> _Loss:
    """The loss of a member with a record, "" if it is not lost.

    `silent_since`: only while no worker advances.
    """
    node, number = member.node, current.number
    if record.seen_round < number:
        why = f"{node} has not seen round {number} within {policy.seen_timeout_s:g} s"
        # A store that was restored from a backup has older records, until their nodes write them again.
        seen_by = max(view.round_seen_at + policy.seen_timeout_s, view.store_up_since + REREGISTRATION_S)
        return "" if probe == "answered" else why, seen_by
    if silent_since is not None:
        return f"{node} is unreachable and no worker has made a step since", silent_since + policy.lease_s
    if record.ready_round < number and set(member.slots) <= set(record.slots):
        started_by = max(view.round_seen_at + START_LIMIT_S, view.store_up_since + REREGISTRATION_S)
        return f"{node} has not started round {number} within {START_LIMIT_S:g} s", started_by
    return _NOT_LOST


# ---- partitions


def _losses_by_partition(view: View, current: Round, lost: dict[str, str]) -> dict[str, str]:
    """Members outside the largest set of members that reach each other, of those that are in the store.

    A node that is done needs no peers.
    """
    here = [m.node for m in current.members if m.node not in lost and m.node not in view.done and view.record(m.node)]
    cuts = _unreachable_pairs(view, here, current.number)
    if not cuts:
        return {}
    connected = largest_connected(here, cuts)
    out = {}
    for node in here:
        if node not in connected:
            others = [n for n in connected if frozenset((node, n)) in cuts] or [
                n for n in here if frozenset((node, n)) in cuts
            ]
            out[node] = f"{node} and {', '.join(others)} cannot reach each other and no worker has made a step since"
    return out


def _unreachable_pairs(view: View, nodes: Collection[str], number: int) -> set[frozenset[str]]:
    """Pairs of these nodes of which one does not reach the other in round `number`."""
    records = [p.record for p in view.nodes if p.record.unreachable and p.record.seen_round == number]
    cuts = {frozenset((r.id, other)) for r in records for other in r.unreachable if other != r.id}
    here = set(nodes) if cuts else set()
    return {cut for cut in cuts if cut <= here}


def largest_connected(nodes: Sequence[str], cuts: Collection[frozenset[str]]) -> list[str]:
    """The largest set of `nodes`, in order, without a pair of `cuts`; of equal ones, one with the first node.

    This is the largest independent set, which is NP-hard: with many cuts the search is bounded, and a large set is
    returned instead of the largest.
    """
    conflicts: dict[str, set[str]] = {node: set() for node in nodes}
    for node, other in cuts:
        if node in conflicts and other in conflicts:
            conflicts[node].add(other)
            conflicts[other].add(node)
    if not any(conflicts.values()):
        return list(nodes)
    first = nodes[0]
    compatible = [n for n in nodes[1:] if n not in conflicts[first]]
    with_first = {first} | _largest_independent(compatible, conflicts, [MAX_SEARCH_BRANCHES])
    without = _largest_independent(list(nodes[1:]), conflicts, [MAX_SEARCH_BRANCHES])
    largest = with_first if len(with_first) >= len(without) else without
    return [node for node in nodes if node in largest]


def _largest_independent(nodes: list[str], conflicts: dict[str, set[str]], budget: list[int]) -> set[str]:
    chosen: set[str] = set()
    while nodes:
        among = set(nodes)
        degrees = {node: len(conflicts[node] & among) for node in nodes}
        chosen |= {node for node in nodes if not degrees[node]}
        nodes = [node for node in nodes if degrees[node]]
        easy = next((node for node in nodes if degrees[node] == 1), None)
        if easy is not None:  # keeping it excludes one node only, so some largest set has it
            chosen.add(easy)
            nodes = [n for n in nodes if n != easy and n not in conflicts[easy]]
            continue
        if not nodes:
            break
        worst = max(reversed(nodes), key=lambda node: degrees[node])
        others = [n for n in nodes if n != worst]
        budget[0] -= 1
        if budget[0] > 0:
            compatible = [n for n in others if n not in conflicts[worst]]
            keeping = {worst} | _largest_independent(compatible, conflicts, budget)
            dropping = _largest_independent(others, conflicts, budget)
            return chosen | (keeping if len(keeping) > len(dropping) else dropping)
        nodes = others
    return chosen


# ---- excluded nodes and quarantined slots


def exclusions(view: View, current: Round, lost: dict[str, str], now: float) -> tuple[Exclusion, ...]:
    """The exclusions of the next Round: those of `current`, aged, and these losses."""
    elapsed_s = max(0.0, now - view.round_seen_at)
    ledger = {e.node: replace(e, age_s=e.age_s + elapsed_s) for e in current.excluded}
    ledger = {node: e for node, e in ledger.items() if e.age_s < EXCLUSION_EXPIRES_S}
    for node in lost:
        times = ledger[node].times + 1 if node in ledger else 1
        ledger[node] = Exclusion(node, times)
    return tuple(ledger[node] for node in sorted(ledger))


def cooloff_left_s(node: str, excluded: tuple[Exclusion, ...], policy: Policy) -> float:
    """Seconds for which a node is not taken again yet: 0 after its first loss, then doubled with each one."""
    for e in excluded:
        if e.node == node:
            cooloff_s = 0.0 if e.times == 1 else policy.node_cooloff_s * 2.0 ** (min(e.times, 16) - 2)
            return max(0.0, min(cooloff_s, EXCLUSION_EXPIRES_S) - e.age_s)
    return 0.0


def slot_shortage_reasons(view: View, current: Round) -> list[str]:
    """Reasons of members that cannot run the workers `current` gives them: a slot is not usable any more."""
    reasons = []
    for member in current.members:
        record = view.record(member.node)
        if record is None or record.incarnation != member.incarnation or member.node in view.done:
            continue
        if not set(member.slots) <= set(record.slots):
            reasons.append(record.unusable or f"{member.node} has only {count(len(record.slots), 'usable slot')}")
    return reasons


def aged_quarantined_slots(view: View, current: Round, now: float) -> tuple[QuarantinedSlot, ...]:
    """The slots with strikes in `current`, with the cool-off that is left now."""
    elapsed_s = max(0.0, now - view.round_seen_at)
    return tuple(replace(slot, left_s=max(0.0, slot.left_s - elapsed_s)) for slot in current.quarantined_slots)


def avoided_slots(view: View, quarantined: Iterable[QuarantinedSlot]) -> AvoidedSlots:
    return dict.fromkeys(view.starting_slots, 0.0) | {(q.node, q.slot): q.left_s for q in quarantined if q.left_s}


def usable_slots(record: NodeRecord, avoided: AvoidedSlots) -> list[int]:
    return [slot for slot in record.slots if (record.id, slot) not in avoided]


def has_enough_slots(record: NodeRecord, view: View, avoided: AvoidedSlots) -> bool:
    return len(usable_slots(record, avoided)) >= max(1, _fewest_workers(record, view))


def _fewest_workers(record: NodeRecord, view: View) -> int:
    """The fewest workers of this node, by its own command line."""
    return min(record.min_workers or view.requirements.min_workers, len(record.slots))


# ---- the next members


@dataclass(frozen=True, slots=True)
class ReturnedSlots:
    """Slots of a member that can be used and that its Round does not use."""

    node: str
    slots: tuple[int, ...]
    since: float

    def __str__(self) -> str:
        return f"{plural(len(self.slots), 'slot')} {listing(self.slots)} of {self.node} {is_are(self.slots)} back"


def returned_slots(view: View, current: Round, now: float) -> list[ReturnedSlots]:
    """Those of the members of `current` that the next Round would give more workers."""
    avoided = avoided_slots(view, aged_quarantined_slots(view, current, now))
    returned = []
    for p in view.nodes:
        record, member = p.record, view.member(p.record.id)
        if member is None or member.identity != record.identity or record.leaving:
            continue
        slots = _best_slots(record, view, usable_slots(record, avoided))
        if len(slots) > len(member.slots) and has_enough_slots(record, view, avoided):
            ends = [at for at in _slot_cooloff_ends(view, current, member) if at <= now]
            back = tuple(sorted(set(slots) - set(member.slots)))
            returned.append(ReturnedSlots(member.node, back, max([p.slots_seen_at, *ends])))
    return returned


def next_slot_cooloff_end(view: View, current: Round, now: float) -> float | None:
    """When the next slot that `current` leaves out can be used again."""
    ends = [at for member in current.members for at in _slot_cooloff_ends(view, current, member) if at > now]
    return min(ends, default=None)


def _slot_cooloff_ends(view: View, current: Round, member: Member) -> list[float]:
    """When the cool-offs end of this node's slots that `current` leaves out."""
    slots = [q for q in current.quarantined_slots if q.node == member.node and q.slot not in member.slots]
    return [view.round_seen_at + q.left_s for q in slots]


def can_keep_processes(view: View, current: Round) -> bool:
    """True if the workers of `current` can leave it in their process."""
    first = view.record(current.members[0].node)
    return first is not None and first.entered == current.number


def joiners(view: View, current: Round, policy: Policy, now: float) -> list[PresentNode]:
    """Nodes outside `current` that may join it, the longest waiting first.

    Where workers keep their processes, those whose own are ready, or will not come ahead of their round.
    """
    avoided = avoided_slots(view, aged_quarantined_slots(view, current, now))
    is_asked = can_keep_processes(view, current)
    waiting = eligible_non_members(view, current, policy, now)
    return [
        p
        for p in waiting
        if has_enough_slots(p.record, view, avoided) and (not is_asked or p.record.ahead == current.number)
    ]


def eligible_non_members(view: View, current: Round, policy: Policy, now: float) -> list[PresentNode]:
    """Nodes outside `current` that could be in the next Round, the longest waiting first."""
    excluded = exclusions(view, current, {}, now)
    here = {m.identity for m in current.members}
    members = {m.node for m in current.members}
    waiting = [
        p
        for p in view.nodes
        if p.record.identity not in here
        and p.record.seen_round == current.number
        and p.record.warm  # or all members would wait while it imports torch
        and _can_take_part(p.record, view)
        and not members.intersection(p.record.unreachable)
        and not cooloff_left_s(p.record.id, excluded, policy)
    ]
    return sorted(waiting, key=lambda p: (p.joined_at, p.record.id))


def select_members(
    view: View,
    policy: Policy,
    now: float,
    lost: dict[str, str],
    excluded: tuple[Exclusion, ...],
    quarantined: tuple[QuarantinedSlot, ...] = (),
) -> list[NodeRecord] | Wait:
    """The nodes of the next Round in order: survivors of the current one as they were, then joiners by arrival.

    So rank 0 stays on its node if it can, and a survivor keeps its group rank if it can.
    """
    fewest = view.requirements.min_nodes
    running = view.current if view.current is not None and not view.current.terminal else None
    previous_order = {m.identity: i for i, m in enumerate(running.members)} if running else {}
    candidates = _candidates(view, lost, previous_order, running.number if running else 0)
    willing = _preferred_candidates(view, policy, candidates, excluded, quarantined)
    if len(willing) < fewest:
        why = f"{len(willing)} of at least {count(fewest, 'node')} present"
        return Wait(why, None, too_few_nodes=True)
    if any(p.record.identity in previous_order for p in candidates):
        # A survivor never waits while a joiner imports torch.
        warm = [p for p in willing if p.record.warm or p.record.identity in previous_order]
        willing = warm if len(warm) >= fewest else willing
    elif (wait := _last_call(view, willing, now)) is not None:
        return wait
    chosen = [p.record for p in willing[: view.requirements.max_nodes]]
    return chosen if running is None else _checkpoint_holder_first(chosen, running)


def _preferred_candidates(
    view: View,
    policy: Policy,
    candidates: list[PresentNode],
    excluded: tuple[Exclusion, ...],
    quarantined: tuple[QuarantinedSlot, ...],
) -> list[PresentNode]:
    """The candidates without those that cool off or lack slots, unless too few are left."""
    able = [p for p in candidates if not cooloff_left_s(p.record.id, excluded, policy)]
    avoided = avoided_slots(view.with_starting_as_ready, quarantined)
    able = [p for p in able if has_enough_slots(p.record, view, avoided)]
    avoided = avoided_slots(view, quarantined)
    ready = [p for p in able if has_enough_slots(p.record, view, avoided)]
    # A node that alone has the job's checkpoints is waited for, as is one without which there are too few.
    directory = view.current.directory if view.current is not None else ""
    alone = directory in {p.record.directory for p in able} - {p.record.directory for p in ready}
    willing = able if alone or len(ready) < view.requirements.min_nodes else ready
    # A node that keeps failing is better than none.
    return willing if len(willing) >= view.requirements.min_nodes else candidates


def _candidates(
    view: View, lost: dict[str, str], previous_order: dict[tuple[str, str], int], number: int
) -> list[PresentNode]:
    """Nodes that may be members and reach each other: survivors first, in their order, then the others by the rank that
    their user gave them, and by arrival."""
    candidates = sorted(
        (p for p in view.nodes if _is_candidate(p.record, view, lost, previous_order, number)),
        key=lambda p: (
            previous_order.get(p.record.identity, len(previous_order)),
            p.record.node_rank,
            p.joined_at,
            p.record.id,
        ),
    )
    survivors = sum(p.record.identity in previous_order for p in candidates)
    connected = set(_mutually_reachable(view, [p.record.id for p in candidates], survivors, number))
    return [p for p in candidates if p.record.id in connected]


def _can_take_part(record: NodeRecord, view: View) -> bool:
    return not record.leaving and bool(record.slots) and record.id not in view.unreachable_joiners


def _is_candidate(
    record: NodeRecord, view: View, lost: dict[str, str], previous_order: dict[tuple[str, str], int], number: int
) -> bool:
    """True for a survivor, and for another node that has seen round `number`.

    A dead node's record stays until its lease expires, but has not seen the Round. A restarted member is a candidate
    in its new incarnation.
    """
    survivor = record.identity in previous_order
    return (
        _can_take_part(record, view)
        and not (survivor and record.id in lost)
        and (survivor or record.seen_round >= number)
    )


def _mutually_reachable(view: View, nodes: list[str], survivors: int, number: int) -> list[str]:
    """Those of `nodes` that reach each other. Survivors come first: a joiner never displaces one."""
    cuts = _unreachable_pairs(view, nodes, number)
    if not cuts:
        return nodes
    connected = largest_connected(nodes[:survivors], cuts)
    for node in nodes[survivors:]:
        if not any(frozenset((node, other)) in cuts for other in connected):
            connected.append(node)
    return connected


def _last_call(view: View, willing: list[PresentNode], now: float) -> Wait | None:
    """The wait for more nodes than the fewest, where no survivor waits: for a bounded time after the newest."""
    requirements = view.requirements
    if len(willing) >= requirements.max_nodes:
        return None
    until = max(p.joined_at for p in willing) + requirements.last_call_timeout_s
    if now >= until:
        return None
    here = f"{len(willing)} of {requirements.max_nodes} nodes present"
    return Wait(f"{here}; waiting for more until {requirements.last_call_timeout_s:g} s after the newest", until)


def _checkpoint_holder_first(chosen: list[NodeRecord], running: Round) -> list[NodeRecord]:
    """Rank 0's node has the checkpoint directory that the job has used so far, if any node has."""
    reader = next((record for record in chosen if record.directory == running.directory), None)
    return sorted(chosen, key=lambda record: record is not reader)


def assign_slots(
    view: View, chosen: list[NodeRecord], quarantined: tuple[QuarantinedSlot, ...]
) -> tuple[Member, ...] | Wait:
    """The members with their slots. Each node's own command line bounds what it gets."""
    avoided = avoided_slots(view, quarantined)
    requirements = view.requirements
    members = []
    for node in chosen:
        fewest = _fewest_workers(node, view) if requirements.max_nodes > 1 else requirements.min_workers
        usable = usable_slots(node, avoided)
        if len(usable) < fewest:  # a Round that waits for one process waits for all
            usable = [s for s in node.slots if not avoided.get((node.id, s))]
        # Quarantined slots come last, those nearest their return first, and only up to the fewest workers needed.
        rest = sorted((s for s in node.slots if s not in usable), key=lambda s: avoided[node.id, s])
        missing = max(0, fewest - len(usable))
        slots = _best_slots(node, view, usable + rest[:missing])
        if len(slots) < fewest:
            workers = count(requirements.min_workers, "worker")
            return Wait(f"{node.id} has {count(len(slots), 'slot')}, the job needs {workers} on each node", None)
        members.append(Member(node.id, node.incarnation, tuple(slots), node.role, node.address))
    return tuple(members)


def _best_slots(record: NodeRecord, view: View, slots: list[int]) -> list[int]:
    """The slots that the node gets, of these: those in use before others, which are spares."""
    member = view.member(record.id)
    used = set(member.slots) if member is not None else set()
    most = len(record.slots) if view.requirements.max_nodes > 1 else view.requirements.max_workers
    return sorted(sorted(slots, key=lambda slot: slot not in used)[:most])


def promoted_spares(view: View, current: Round, members: Sequence[Member]) -> list[str]:
    """The nodes and slots among `members` that stood by while `current` had all that the job asks for."""
    asked = view.requirements
    if asked.max_nodes > 1:
        is_full = len(current.members) == asked.max_nodes
        records = [view.record(m.node) for m in members if is_full and view.member(m.node) is None]
        return [r.id for r in records if r is not None and r.ahead == current.number]
    used = {slot for m in current.members if len(m.slots) == asked.max_workers for slot in m.slots}
    return [f"slot {slot}" for m in members for slot in m.slots if used and slot not in used]
