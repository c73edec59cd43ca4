"""Pure: `place(view) -> placements to write`, which slots of which nodes each submitted job gets, or why it waits.

It exists so that who runs where is decided in one place, from a view that can be written down. It keeps nothing between
calls: the placements in the view are its memory, asking twice gives the same answer, and applying the answer leaves
nothing more to say. It never reads a store, starts nothing, and knows nothing of what a job runs.

The rules, in order:

1. What runs stays. A place is taken away only because its node is to be empty (drained, quarantined), is gone, has
   refused the job, or does not have those slots any more. Nobody else's job is ever a reason.
2. A job that is left with fewer nodes than its minimum gets others at once, before anybody who waits; if there are
   none, it gives back all of its places and waits at its old number.
3. Jobs that wait are looked at strictly in the order of their numbers. One that the present nodes could carry if they
   were empty holds up those behind it; one that they could not carry holds up nobody.
4. Jobs below their maximum get free nodes once nobody is left who waits for one.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from elasticd_agent.model.phrases import count, has_have, is_are, listing, plural, ranges
from elasticd_agent.node.records import Cordon, JobResult, NodeStatus, Placement, Refusal, SlotAssignment, Submission

BEHIND_OTHERS = "waits behind those that came first"
"""Of whoever is not at the head of the queue. It names nobody: each start would rewrite it for all who wait."""
BLOCKS_NOBODY = "it holds up nobody"


@dataclass(frozen=True, slots=True)
class ClusterView:
    """All that is known. `away`: the last cards of nodes that have none now, but not for long enough to be given up.

    `lost`: (job, node) where the job has already gone on without such a node.
    """

    nodes: tuple[NodeStatus, ...] = ()
    cordons: tuple[Cordon, ...] = ()
    submissions: tuple[Submission, ...] = ()
    placements: tuple[Placement, ...] = ()
    results: tuple[JobResult, ...] = ()
    absent: tuple[NodeStatus, ...] = ()
    left_behind: frozenset[tuple[str, str]] = frozenset()

    def result(self, job: str, number: int) -> JobResult | None:
        return next((e for e in self.results if (e.job, e.number) == (job, number)), None)

    def unfinished(self) -> tuple[Submission, ...]:
        """In the order in which they were handed in."""
        over = {e.job: e.number for e in self.results}
        left = [s for s in self.submissions if s.number > over.get(s.job, 0) and not s.removed]
        return tuple(sorted(left, key=lambda s: (s.number, s.job)))

    def orphaned(self) -> tuple[Placement, ...]:
        """Of jobs that nothing else is known of: whoever placed them may know more. They stay as they are."""
        known = {s.job for s in self.submissions}
        over = {e.job: e.number for e in self.results}
        found = [p for p in self.placements if p.job not in known and p.number > over.get(p.job, 0)]
        return tuple(sorted(found, key=lambda p: p.job))


def schedule(view: ClusterView) -> tuple[Placement, ...]:
    """The placements that differ from those in the view, in order of their numbers; () if all is as it shall be."""
    nodes = _nodes(view)
    written = {(p.job, p.number): p for p in view.placements}
    jobs = [_job(s, written.get((s.job, s.number)), view, nodes) for s in view.unfinished()]
    _refill(jobs, nodes)
    _start(jobs, nodes)
    _grow(jobs, nodes)
    decided = [job.placement() for job in jobs]
    return tuple(p for p in decided if p != written.get((p.job, p.number)))


def describe(reason: str, ahead: Submission | None) -> str:
    """A placement's reason as people read it: with the name of the job that the others wait behind."""
    if ahead is None or not reason.endswith(BEHIND_OTHERS):
        return reason
    return f"{reason.removesuffix(BEHIND_OTHERS)}waits behind {ahead.job}, which came first and {_wish(ahead)}"


def head_of_queue(view: ClusterView) -> Submission | None:
    """The job at the head of the queue, which holds up those behind it; None if nobody is held up."""
    written = {(p.job, p.number): p for p in view.placements}
    for submission in view.unfinished():
        placement = written.get((submission.job, submission.number))
        if (
            placement is not None
            and not placement.assignments
            and not placement.reason.endswith((BEHIND_OTHERS, BLOCKS_NOBODY))
        ):
            return submission
    return None


# ---- nodes


@dataclass(slots=True)
class _Node:
    """What a node has to give. `why_not`: why it takes no new work; `leave`: why nothing may stay on it."""

    card: NodeStatus
    away: bool
    why_not: str
    leave: str
    busy: frozenset[int]
    given: dict[int, str] = field(default_factory=dict)

    @property
    def free(self) -> tuple[int, ...]:
        """Whatever it was told: a slot is free only once nothing runs in it any more."""
        return tuple(slot for slot in range(self.card.slots) if slot not in self.busy and slot not in self.given)

    def give(self, place: SlotAssignment, job: str) -> None:
        self.given |= dict.fromkeys(place.slots, job)

    def take_back(self, place: SlotAssignment) -> None:
        for slot in place.slots:
            del self.given[slot]


def _nodes(view: ClusterView) -> dict[str, _Node]:
    cordons = {cordon.node: cordon for cordon in view.cordons}
    found = {}
    for card, away in [*((c, True) for c in view.absent), *((c, False) for c in view.nodes)]:
        cordon = cordons.get(card.node)
        busy = frozenset(slot for running in card.runners if running.state != "refused" for slot in running.slots)
        found[card.node] = _Node(card, away, _why_not(card, cordon, away), _leave(card, cordon), busy)
    for placement in view.orphaned():
        for place in placement.assignments:
            if place.node in found:
                found[place.node].give(place, placement.job)
    return found


def _leave(card: NodeStatus, cordon: Cordon | None) -> str:
    if cordon is not None and cordon.drain:
        return f"{card.node} is {cordon.text}"
    if card.state in ("draining", "quarantined"):
        return _because(f"{card.node} is {card.state}", card.why)
    return ""


def _why_not(card: NodeStatus, cordon: Cordon | None, away: bool) -> str:
    if leave := _leave(card, cordon):
        return leave
    if cordon is not None:
        return f"{card.node} is {cordon.text}"
    if card.state != "ready":
        return _because(f"{card.node} is {card.state}", card.why)
    return f"{card.node} is away" if away else ""


def _because(what: str, why: str) -> str:
    return f"{what}: {why}" if why else what


# ---- jobs


@dataclass(slots=True)
class _Job:
    """One submission on its way to a placement. `said`: what has happened to its places in this turn."""

    wants: Submission
    written: Placement | None
    places: dict[str, SlotAssignment]
    refused: dict[str, str]
    said: list[str]
    waits: str = ""

    @property
    def runs(self) -> bool:
        return len(self.places) >= self.wants.min_nodes

    def placement(self) -> Placement:
        """What was written if nothing has changed, so that a reason goes on saying what once happened."""
        wants, written, places = self.wants, self.written, tuple(self.places.values())
        refused = tuple(Refusal(node, why) for node, why in sorted(self.refused.items()))
        same = written is not None and (places, refused) == (written.assignments, written.refusals)
        if written is not None and same and (places or written.reason.endswith(self.waits)):
            return written
        reason = f"runs on {listing(_slots(p) for p in places)}" if places else self.waits
        last = () if written is None else written.previous_nodes_after(self.places)
        # Who has refused it is what it waits for, too: once is enough.
        told = () if places else {_refused((node,), why) for node, why in self.refused.items()}
        said = [sentence for sentence in self.said if sentence not in told]
        return Placement(wants.job, wants.number, places, "; ".join([*said, reason]), refused, last)


def _job(wants: Submission, written: Placement | None, view: ClusterView, nodes: dict[str, _Node]) -> _Job:
    """The job with the places it keeps; their slots are taken from now on."""
    mine = (wants.job, wants.number)
    cordoned = {cordon.node for cordon in view.cordons}
    refused = {} if written is None else {r.node: r.why for r in written.refusals if r.node not in cordoned}
    for card in view.nodes:
        for running in card.runners:
            if (running.job, running.number) == mine and running.state == "refused" and card.node not in cordoned:
                refused[card.node] = running.why
    job = _Job(wants, written, {}, refused, [])
    for place in _running(mine, view) if written is None else written.assignments:
        if gone := _gone(place, job, nodes.get(place.node), view):
            job.said.append(gone)
        else:
            job.places[place.node] = place
            nodes[place.node].give(place, wants.job)
    return job


def _running(mine: tuple[str, int], view: ClusterView) -> tuple[SlotAssignment, ...]:
    """Where a job runs that has no placement: the store has lost it, the nodes have not."""
    found = {
        card.node: SlotAssignment(card.node, running.slots)
        for card in view.nodes
        for running in card.runners
        if (running.job, running.number) == mine and running.slots and running.state in ("starting", "running")
    }
    return tuple(found.values())


def _gone(place: SlotAssignment, job: _Job, node: _Node | None, view: ClusterView) -> str:
    """Why a job cannot keep a place; "" if it can."""
    if node is None:
        return f"{place.node} is gone"
    if node.leave:
        return node.leave
    if place.node in job.refused:
        return _refused((place.node,), job.refused[place.node])
    if node.away and (job.wants.job, place.node) in view.left_behind:
        return f"{place.node} is away, and the job went on without it"
    if others := {node.given[slot] for slot in place.slots if slot in node.given}:
        return f"{place.node}'s slots are {listing(sorted(others))}'s"
    mine = (job.wants.job, job.wants.number)
    if (
        not node.away
        and max(place.slots) >= node.card.slots
        and not any((r.job, r.number) == mine for r in node.card.runners)
    ):
        return f"{place.node} has {count(node.card.slots, 'slot')} now"
    return ""


# ---- the rules


def _refill(jobs: list[_Job], nodes: dict[str, _Node]) -> None:
    """Rule 2. Of those that cannot be helped the youngest gives way first: what it frees may help the others."""
    while True:
        short = [job for job in jobs if job.places and not job.runs]
        for job in short:
            _take(job, nodes)
        stuck = [job for job in short if not job.runs]
        if not stuck:
            return
        _give_back(stuck[-1], nodes)


def _start(jobs: list[_Job], nodes: dict[str, _Node]) -> None:
    """Rule 3."""
    ahead: Submission | None = None
    for job in jobs:
        if job.runs:
            continue
        if ahead is None and _take(job, nodes):
            continue
        if not _possible(job, nodes):
            job.waits = f"waits: {_missing(job, nodes)}; {BLOCKS_NOBODY}"
        elif ahead is None:
            job.waits = f"waits: {_wish(job.wants)}; {_lack(job, nodes)}"
            ahead = job.wants
        else:
            job.waits = BEHIND_OTHERS


def _grow(jobs: list[_Job], nodes: dict[str, _Node]) -> None:
    """Rule 4."""
    if any(not job.runs and _possible(job, nodes) for job in jobs):
        return
    for job in jobs:
        if job.runs and job.wants.grow and len(job.places) < job.wants.max_nodes:
            before = set(job.places)
            _take(job, nodes)
            if came := sorted(job.places.keys() - before):
                job.said.append(f"{listing(came)} {'was' if len(came) == 1 else 'were'} free and nobody waits")


def _take(job: _Job, nodes: dict[str, _Node]) -> bool:
    """Give the job nodes up to its maximum, if that makes at least its minimum. False: nothing was given."""
    wants = job.wants
    used = () if job.written is None else (*job.written.previous_nodes, *(p.node for p in job.written.assignments))
    fit = [n for name, n in nodes.items() if name not in job.places and _fits(job, n)]
    # Where it was before and may have checkpoints; then whoever gives most; then the tightest fit: whole nodes stay so.
    fit.sort(key=lambda n: (n.card.node not in used, -min(len(n.free), wants.max_slots), len(n.free), n.card.node))
    if len(job.places) + len(fit) < wants.min_nodes:
        return False
    for node in fit[: wants.max_nodes - len(job.places)]:
        slots = node.free[: wants.max_slots]
        job.places[node.card.node] = SlotAssignment(node.card.node, slots)
        node.give(job.places[node.card.node], wants.job)
    return True


def _give_back(job: _Job, nodes: dict[str, _Node]) -> None:
    left = list(job.places.values())
    job.places.clear()
    job.said.append(f"{listing(p.node for p in left)} alone {is_are(left)} too few")
    for place in left:
        nodes[place.node].take_back(place)


def _fits(job: _Job, node: _Node) -> bool:
    return not node.why_not and node.card.node not in job.refused and len(node.free) >= job.wants.min_slots


def _possible(job: _Job, nodes: dict[str, _Node]) -> bool:
    """True if these nodes, were they empty, could carry the job. One that is only away for a moment counts, too."""
    return sum(_could(job, node) for node in nodes.values()) >= job.wants.min_nodes


def _could(job: _Job, node: _Node) -> bool:
    usable = not node.why_not or (node.away and node.why_not == f"{node.card.node} is away")
    return usable and node.card.node not in job.refused and node.card.slots >= job.wants.min_slots


# ---- words


def _wish(wants: Submission) -> str:
    each = " each" if wants.min_nodes > 1 else ""
    return f"wants {count(wants.min_nodes, 'node')} with {count(wants.min_slots, 'free slot')}{each}"


def _lack(job: _Job, nodes: dict[str, _Node]) -> str:
    """What a job waits for that could run if others did not."""
    fit = [name for name, node in sorted(nodes.items()) if _fits(job, node)]
    others = _words(job, nodes, fit, free=True)
    has = f"{listing(fit)} {has_have(fit)} them, but " if fit else ""
    return has + listing(others)


def _missing(job: _Job, nodes: dict[str, _Node]) -> str:
    """What a job waits for that could never run on these nodes. It does not change as others come and go."""
    could = [name for name, node in sorted(nodes.items()) if _could(job, node)]
    others = _words(job, nodes, could, free=False)
    here = f"{len(could) or 'none'} of the {len(nodes)} nodes here could carry it: {listing(others)}"
    if not others:
        here = f"only {count(len(could), 'node')} {is_are(could)} here" if could else "none is here"
    elif len(nodes) == 1:
        here = f"the only node here cannot carry it: {listing(others)}"
    elif could:
        here = "only " + here
    return f"{_wish(job.wants)}, and {here}"


def _words(job: _Job, nodes: dict[str, _Node], but: list[str], *, free: bool) -> list[str]:
    """What is in the way on each of the others; nodes that refused it for the same reason are named together."""
    found: list[str] = []
    alike: dict[str, list[str]] = {}
    for name, node in sorted(nodes.items()):
        if name in but:
            continue
        if node.why_not:
            found.append(node.why_not)
        elif name in job.refused:
            alike.setdefault(job.refused[name], []).append(name)
        elif free and node.card.slots >= job.wants.min_slots:
            found.append(f"{name} has {len(node.free)} of {node.card.slots} free")
        else:
            found.append(f"{name} has {count(node.card.slots, 'slot')}" + (" in all" if free else ""))
    return [*found, *(_refused(names, why) for why, names in alike.items())]


def _refused(names: Iterable[str], why: str) -> str:
    return _because(f"{listing(names)} refused it", why)


def _slots(place: SlotAssignment) -> str:
    """`n1 (slots 0-3, 6)`."""
    runs = ", ".join(ranges(place.slots))
    return f"{place.node} ({plural(len(place.slots), 'slot')} {runs})"
