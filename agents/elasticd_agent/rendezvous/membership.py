"""Pure: which nodes are in a Round: who of the last one is lost, who must wait, who comes first, with which slots.

It exists so that everything about membership is in one place and each answer carries its reason. Nothing here looks at
failures of the script, and nothing keeps anything between calls.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from elasticd_agent.model.job import Policy
from elasticd_agent.model.records import Exclusion, Member, NodeRecord, QuarantinedSlot, Round
from elasticd_agent.rendezvous.view import PresentNode, View, Wait

STALLED_S = 0.5
"""Workers that train together stop within a step of a peer's end; a step that takes longer is told apart by waiting."""
RETURN_S = 1.5
"""An agent that has lost the store, or its record in it, is back within a retry (0.8 s) once the store answers."""
START_LIMIT_S = 30.0
"""What a node may take from seeing a Round to having started its group: the old one is killed, or stops for so long."""
WARM_UP_LIMIT_S = 60.0
"""A newcomer that takes longer than this to import what its workers need is taken all the same."""
MAX_BRANCHES = 100
"""How many times the search for the largest set that reaches itself may branch: 0.3 s where 300 nodes are cut up."""
EXCLUSION_EXPIRES_S = 600.0
"""A node that stayed for so long after it came back is a node like any other."""


@dataclass(frozen=True, slots=True)
class Losses:
    """Members that are lost, each with its reason, and when to look again. `awaited`: those who should be back soon."""

    nodes: dict[str, str]
    until: float | None
    returning: tuple[str, ...] = ()


def losses(view: View, current: Round, policy: Policy, now: float) -> Losses:
    """Who of `current` cannot go on. A node that is done cannot be lost."""
    lost: dict[str, str] = {}
    until: list[float] = []
    knocked = dict(view.probe_results)
    absent = dict(view.absent_since)
    silent = dict(view.silent_since)
    stuck = view.next_step_due is not None and now >= view.next_step_due + STALLED_S
    awaited = []
    heard_of = {f.node for f in view.failures if f.round == current.number}
    for member in current.members:
        node = member.node
        if node in view.done:
            continue
        record = view.record(node)
        if record is not None and record.incarnation != member.incarnation:
            lost[node] = f"{node} started anew"
        elif knocked.get(node) == "refused":
            lost[node] = f"{node} is lost: nothing of the job listens there any more"
        elif record is None and view.failures:
            # The group is broken: what matters is who can be in the next one.
            back_by = max(absent.get(node, now), view.store_up_since) + RETURN_S
            if knocked.get(node) == "silent":
                lost[node] = f"{node} is lost: it has no lease, and does not answer"
            elif now >= back_by:
                lost[node] = f"{node} is lost: its lease has ended"
            else:
                awaited.append(node)
                until.append(back_by)
        elif record is None:
            counts_at = _absence_proves_loss_at(view, policy, absent.get(node, now))
            if now >= counts_at:
                lost[node] = f"{node} is lost: its lease has ended"
            else:
                until.append(counts_at)
        elif node in heard_of:
            continue
        elif record.seen_round < current.number:
            due = view.round_at + policy.seen_timeout_s
            if now < due:
                until.append(due)
            elif knocked.get(node) != "answered":
                lost[node] = f"{node} has not seen round {current.number} within {policy.seen_timeout_s:g} s"
        elif stuck and node in silent:
            due = silent[node] + policy.lease_s
            if now >= due:
                lost[node] = f"{node} cannot be reached, and no worker has made a step meanwhile"
            else:
                until.append(due)
        elif record.ready_round < current.number and set(member.slots) <= set(record.slots):
            due = view.round_at + START_LIMIT_S
            if now < due:
                until.append(due)
            else:
                lost[node] = f"{node} has not started round {current.number} within {START_LIMIT_S:g} s"
    if stuck or view.failures:
        lost |= _partitioned(view, current, lost)
    return Losses(lost, min(until, default=None), tuple(awaited))


def _partitioned(view: View, current: Round, lost: dict[str, str]) -> dict[str, str]:
    """Those whom the largest set of members that reach each other leaves out; a node that is done needs nobody."""
    here = [m.node for m in current.members if m.node not in lost and m.node not in view.done]
    cuts = _unreachable_pairs(view, here, current.number)
    kept = largest_connected(here, cuts)
    out = {}
    for node in here:
        if node not in kept:
            others = [n for n in kept if frozenset((node, n)) in cuts] or [
                n for n in here if frozenset((node, n)) in cuts
            ]
            out[node] = (
                f"{node} and {', '.join(others)} do not reach each other, and no worker has made a step meanwhile"
            )
    return out


def _unreachable_pairs(view: View, nodes: Collection[str], number: int) -> set[frozenset[str]]:
    """Pairs of these nodes of which one has not reached the other in round `number`."""
    records = [p.record for p in view.nodes if p.record.id in nodes and p.record.seen_round == number]
    return {frozenset((r.id, other)) for r in records for other in r.unreachable if other in nodes and other != r.id}


def largest_connected(nodes: Sequence[str], cuts: Collection[frozenset[str]]) -> list[str]:
    """The largest set of `nodes`, in order, no two of which are cut from each other; of equal ones, one with the first.

    With many cuts all over it is a large one, found in bounded time: no more can be asked (largest independent set).
    """
    foes: dict[str, set[str]] = {node: set() for node in nodes}
    for one, other in cuts:
        if one in foes and other in foes:
            foes[one].add(other)
            foes[other].add(one)
    if not any(foes.values()):
        return list(nodes)
    budget = [MAX_BRANCHES]
    first = nodes[0]
    with_first = {first} | _largest_independent([n for n in nodes[1:] if n not in foes[first]], foes, budget)
    budget = [MAX_BRANCHES]
    without = _largest_independent(list(nodes[1:]), foes, budget)
    kept = with_first if len(with_first) >= len(without) else without
    return [node for node in nodes if node in kept]


def _largest_independent(nodes: list[str], foes: dict[str, set[str]], budget: list[int]) -> set[str]:
    kept: set[str] = set()
    while nodes:
        among = set(nodes)
        degrees = {node: len(foes[node] & among) for node in nodes}
        kept |= {node for node in nodes if not degrees[node]}
        nodes = [node for node in nodes if degrees[node]]
        easy = next((node for node in nodes if degrees[node] == 1), None)
        if easy is not None:  # nothing is lost by keeping it
            kept.add(easy)
            nodes = [n for n in nodes if n != easy and n not in foes[easy]]
            continue
        if not nodes:
            break
        worst = max(reversed(nodes), key=lambda node: degrees[node])
        others = [n for n in nodes if n != worst]
        budget[0] -= 1
        if budget[0] > 0:
            keeping = {worst} | _largest_independent([n for n in others if n not in foes[worst]], foes, budget)
            dropping = _largest_independent(others, foes, budget)
            return kept | (keeping if len(keeping) > len(dropping) else dropping)
        nodes = others
    return kept


def _absence_proves_loss_at(view: View, policy: Policy, since: float) -> float:
    """When a missing lease is a lost node: not while the job trains on, nor soon after the store was away."""
    trusted = view.store_up_since + policy.lease_s + policy.renewal_s
    at_last = since + policy.adopt_timeout_s
    if view.next_step_due is None:
        return max(trusted, at_last)
    return max(trusted, min(at_last, max(since, view.next_step_due) + STALLED_S))


def exclusions(view: View, current: Round, lost: dict[str, str], now: float) -> tuple[Exclusion, ...]:
    """What is held against nodes that were left out, these losses included."""
    elapsed_s = max(0.0, now - view.round_at)
    ledger = {e.node: replace(e, age_s=e.age_s + elapsed_s) for e in current.excluded}
    ledger = {node: e for node, e in ledger.items() if e.age_s < EXCLUSION_EXPIRES_S}
    for node in lost:
        times = ledger[node].times + 1 if node in ledger else 1
        ledger[node] = Exclusion(node, times)
    return tuple(ledger[node] for node in sorted(ledger))


def cooloff_left_s(node: str, excluded: tuple[Exclusion, ...], policy: Policy) -> float:
    """For how much longer a node is not taken again: nothing the first time, then twice as long each time."""
    for e in excluded:
        if e.node == node:
            cooloff_s = 0.0 if e.times == 1 else policy.node_cooloff_s * 2.0 ** (min(e.times, 16) - 2)
            return max(0.0, min(cooloff_s, EXCLUSION_EXPIRES_S) - e.age_s)
    return 0.0


def short_of_slots(view: View, current: Round) -> list[str]:
    """Why members cannot run the workers that `current` gives them: a slot of theirs cannot be used (any more)."""
    found = []
    for member in current.members:
        record = view.record(member.node)
        if record is None or record.incarnation != member.incarnation or member.node in view.done:
            continue
        if not set(member.slots) <= set(record.slots):
            found.append(record.unusable or f"{member.node} has only {count(len(record.slots), 'slot')} to use")
    return found


def current_quarantine(view: View, current: Round, now: float) -> tuple[QuarantinedSlot, ...]:
    """What is held against slots, with the cool-off that is left by now."""
    elapsed_s = max(0.0, now - view.round_at)
    return tuple(replace(b, left_s=max(0.0, b.left_s - elapsed_s)) for b in current.quarantined_slots)


def usable_slots(record: NodeRecord, benched: tuple[QuarantinedSlot, ...]) -> list[int]:
    """The node's slots that are not set aside."""
    out = {b.slot for b in benched if b.node == record.id and b.left_s}
    return [slot for slot in record.slots if slot not in out]


def has_enough_slots(record: NodeRecord, view: View, benched: tuple[QuarantinedSlot, ...]) -> bool:
    """True if the node has enough slots that are not set aside."""
    return len(usable_slots(record, benched)) >= max(1, min(view.requirements.min_workers, len(record.slots)))


def joiners(view: View, current: Round, policy: Policy, now: float) -> list[PresentNode]:
    """Nodes that are here, not in `current`, and may be taken, the longest waiting first."""
    excluded = exclusions(view, current, {}, now)
    benched = current_quarantine(view, current, now)
    here = {(m.node, m.incarnation) for m in current.members}
    members = {m.node for m in current.members}
    found = [
        p
        for p in view.nodes
        if (p.record.id, p.record.incarnation) not in here
        and p.record.seen_round == current.number
        and (p.record.warm or now >= p.joined_at + WARM_UP_LIMIT_S)  # or everybody would wait while it imports torch
        and not p.record.leaving
        and p.record.slots
        and p.record.id not in view.unreachable
        and not members.intersection(p.record.unreachable)
        and not cooloff_left_s(p.record.id, excluded, policy)
        and has_enough_slots(p.record, view, benched)
    ]
    return sorted(found, key=lambda p: (p.joined_at, p.record.id))


def select_members(
    view: View,
    policy: Policy,
    now: float,
    lost: dict[str, str],
    excluded: tuple[Exclusion, ...],
    benched: tuple[QuarantinedSlot, ...] = (),
) -> list[NodeRecord] | Wait:
    """The nodes of the next Round in order: survivors of the current one as they were, then newcomers by arrival.

    So rank 0 stays where it was if it can, and what a survivor knows of its place stays true if it can. The first one
    has the checkpoint directory that the job has used so far, if anyone has.
    """
    current, asked = view.current, view.requirements
    running = current is not None and not current.terminal
    old = {(m.node, m.incarnation): i for i, m in enumerate(current.members)} if current and running else {}
    # A newcomer has seen the Round that runs; the record of a dead one has not, and stays until its lease ends.
    number = current.number if current is not None and running else 0
    here = [
        p
        for p in view.nodes
        if not p.record.leaving
        and p.record.slots
        and p.record.id not in view.unreachable
        and _not_lost(p.record, lost, old)
        and (p.record.seen_round >= number or (p.record.id, p.record.incarnation) in old)
    ]
    placed = sorted((old.get((p.record.id, p.record.incarnation), len(old)), p.joined_at, p.record.id) for p in here)
    reaching = _mutually_reachable(
        view, [node for _, _, node in placed], len([p for p in placed if p[0] < len(old)]), number
    )
    placed = [p for p in placed if p[2] in reaching]
    by_id = {p.record.id: p for p in here}
    willing = [by_id[node] for _, _, node in placed if not cooloff_left_s(node, excluded, policy)]
    willing = [p for p in willing if has_enough_slots(p.record, view, benched)]
    if len(willing) < asked.min_nodes:  # better one that keeps failing than none
        willing = [by_id[node] for _, _, node in placed]
    if len(willing) < asked.min_nodes:
        return Wait(f"{len(willing)} of at least {count(asked.min_nodes, 'node')} here", None, too_few_nodes=True)
    survivors = any(first < len(old) for first, *_ in placed)
    if len(willing) < asked.max_nodes and not survivors:
        newest = max(p.joined_at for p in willing)
        if now < newest + asked.last_call_s:
            why = f"{len(willing)} of {asked.max_nodes} nodes here; last call, {asked.last_call_s:g} s after the newest"
            return Wait(why, newest + asked.last_call_s)
    chosen = [p.record for p in willing[: asked.max_nodes]]
    if current is not None and running:
        reader = next((record for record in chosen if record.directory == current.directory), None)
        chosen.sort(key=lambda record: record is not reader)
    return chosen


def _mutually_reachable(view: View, nodes: list[str], survivors: int, number: int) -> list[str]:
    """Of these, those that reach each other: survivors come first, and nobody new takes one's place."""
    cuts = _unreachable_pairs(view, nodes, number)
    found = largest_connected(nodes[:survivors], cuts)
    for node in nodes[survivors:]:
        if not any(frozenset((node, other)) in cuts for other in found):
            found.append(node)
    return found


def _not_lost(record: NodeRecord, lost: dict[str, str], old: dict[tuple[str, str], int]) -> bool:
    """A node that was lost because it started anew is here anew."""
    return record.id not in lost or (record.id, record.incarnation) not in old


def assign_slots(
    view: View, chosen: list[NodeRecord], benched: tuple[QuarantinedSlot, ...]
) -> tuple[Member, ...] | Wait:
    """Their slots. What each node's own command line gave it is the most it may have."""
    left_s = {(b.node, b.slot): b.left_s for b in benched}
    found = []
    for node in chosen:
        # Slots set aside come last, those nearest their return first, and only to reach the fewest workers asked for.
        fewest = (
            min(view.requirements.min_workers, len(node.slots)) if len(chosen) > 1 else view.requirements.min_workers
        )
        usable = usable_slots(node, benched)
        rest = sorted((s for s in node.slots if s not in usable), key=lambda s: left_s[node.id, s])
        missing = max(0, fewest - len(usable))
        most = len(node.slots) if view.requirements.max_nodes > 1 else view.requirements.max_workers
        slots = sorted((usable + rest[:missing])[:most])
        if len(slots) < fewest:
            workers = count(view.requirements.min_workers, "worker")
            return Wait(f"{node.id} has {count(len(slots), 'slot')}, the job needs {workers} on each node", None)
        found.append(Member(node.id, node.incarnation, tuple(slots), node.role))
    return tuple(found)


def count(n: int, noun: str) -> str:
    return f"{n} {noun}" if n == 1 else f"{n} {noun}s"
