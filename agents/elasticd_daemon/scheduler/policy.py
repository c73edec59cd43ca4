"""Pure: `schedule(view)` decides which slots of which nodes each submitted job gets, or why it is pending.

The placements in the view are its only memory: calling it twice gives the same answer, and once the answer is written
there is nothing left to change.

The rules, in order:

1. A running job stays. An assignment ends only because its node must be emptied (drained, quarantined), is gone, has
   refused the job, or no longer has those slots. No other job is ever a reason: there is no preemption. The checks of
   one kind empty at most a fifth of the nodes: where more fail, the cause is shared, and no other node is better.
2. A job left with fewer nodes than its minimum gets others at once, before any pending job; if there are none, it
   releases all of its slots and is pending under its old number.
3. Pending jobs start strictly in the order of `_turns`: by priority; then jobs that have run before; then the job of
   the submitter whose jobs use the fewest slots; then by number. A job that the present nodes could run if they were
   empty blocks the jobs behind it, and stays first of its priority until it starts, so that a large job is not starved
   by small ones; a job that they could not run blocks none.
4. Jobs below their maximum, spares included, grow onto free nodes once no pending job could use them.
"""

from __future__ import annotations

import heapq
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby

from elasticd_agent.model.phrases import count, has_have, is_are, listing, plural, ranges, with_reason
from elasticd_daemon.config.job_file import job_directories
from elasticd_daemon.health.result import EVERY_JOBS_DIRECTORY
from elasticd_daemon.records import ClusterView, Cordon, NodeStatus, Placement, Refusal, SlotAssignment, Submission

BEHIND_OTHERS_REASON = "pending behind other jobs"
"""The reason of every job behind the head of the queue. It names no job: each start would rewrite it for the whole
queue.
"""
BLOCKS_NOBODY_PHRASE = "it blocks no other job"
MAX_QUARANTINED_SHARE = 0.2
"""The share of the nodes that are emptied at once because the same check fails; one always may be."""


def schedule(view: ClusterView) -> tuple[Placement, ...]:
    """The placements that differ from those in the view, by priority and number of their jobs."""
    nodes = _nodes(view)
    written = {(p.job, p.number): p for p in view.placements}
    jobs = [_retain_assignments(s, written.get((s.job, s.number)), view, nodes) for s in view.unfinished()]
    _restore_minimum(jobs, nodes)
    _start_pending(_turns(jobs, head_of_queue(view)), nodes)
    _grow(jobs, nodes)
    decided = [job.placement() for job in jobs]
    return tuple(p for p in decided if p != written.get((p.job, p.number)))


def describe_reason(reason: str, head: Submission | None) -> str:
    """A placement's reason for people: with the name of the job that blocks the queue."""
    if head is None or not reason.endswith(BEHIND_OTHERS_REASON):
        return reason
    changes = reason.removesuffix(BEHIND_OTHERS_REASON)
    return f"{changes}pending behind {head.job}, which is next and {_describe_request(head)}"


def head_of_queue(view: ClusterView) -> Submission | None:
    """The pending job that blocks those behind it; None if no job is blocked."""
    return _blocking_job(_unfinished_with_placements(view))


def queue(view: ClusterView) -> tuple[Submission | None, tuple[Submission, ...]]:
    """`head_of_queue`, and the pending jobs in the order in which they start if every job gets its minimum and none
    ends. A queue of ten thousand jobs is put in order for each view of the dashboard.
    """
    unfinished = _unfinished_with_placements(view)
    head = _blocking_job(unfinished)
    jobs = []
    for submission, placement in unfinished:
        assignments = {a.node: a for a in placement.assignments} if placement is not None else {}
        jobs.append(_Job(submission, placement, assignments, {}, [], "" if placement is None else placement.reason))
    return head, tuple([job.submission for job in _turns(jobs, head)])


def _unfinished_with_placements(view: ClusterView) -> list[tuple[Submission, Placement | None]]:
    written = {(p.job, p.number): p for p in view.placements}
    return [(submission, written.get((submission.job, submission.number))) for submission in view.unfinished()]


def _blocking_job(unfinished: list[tuple[Submission, Placement | None]]) -> Submission | None:
    for submission, placement in unfinished:
        if placement is None or placement.assignments:
            continue
        if not placement.reason.endswith((BEHIND_OTHERS_REASON, BLOCKS_NOBODY_PHRASE)):
            return submission
    return None


def jobs_refused_everywhere(view: ClusterView) -> dict[tuple[str, int], str]:
    """(job, number) of the pending jobs that every node refuses which has the slots and labels, in whatever state it
    is; and the nodes' reasons. A job that needs more such nodes than there are waits for others.
    """
    nodes = _nodes(view)
    written = {(p.job, p.number): p for p in view.placements}
    refused = {}
    for submission in view.unfinished():
        key = (submission.job, submission.number)
        placement = written.get(key)
        if placement is None or placement.assignments or not placement.refusals:
            continue
        job = _Job(submission, placement, {}, _refusals(key, placement, view), [])
        able = {
            name
            for name, node in nodes.items()
            if node.status.slots >= submission.min_slots and not _missing_labels(job, node)
        }
        if len(able) >= submission.min_nodes and able <= job.refusals.keys():
            refused[key] = "; ".join(_obstacles(job, {name: nodes[name] for name in able}, [], free=False))
    return refused


@dataclass(slots=True)
class _Node:
    """One node while placements are decided: what it has, what is taken, and why it takes nothing."""

    status: NodeStatus
    absent: bool
    unschedulable_reason: str  #: why it takes no new jobs; "" if it does
    evict_reason: str  #: why no job may stay on it; "" if jobs may
    busy_slots: frozenset[int]  #: slots in which something still runs, whatever its placement says
    allocated_slots: dict[int, str] = field(default_factory=dict)

    @property
    def free_slots(self) -> tuple[int, ...]:
        """The slots that nothing runs in and nobody has been given."""
        return tuple(s for s in range(self.status.slots) if s not in self.busy_slots and s not in self.allocated_slots)

    def allocate(self, assignment: SlotAssignment, job: str) -> None:
        self.allocated_slots |= dict.fromkeys(assignment.slots, job)

    def release(self, assignment: SlotAssignment) -> None:
        for slot in assignment.slots:
            del self.allocated_slots[slot]


def _nodes(view: ClusterView) -> dict[str, _Node]:
    cordons = {cordon.node: cordon for cordon in view.cordons}
    nodes = {}
    keep = _nodes_not_emptied(view)
    for status, absent in [*((s, True) for s in view.absent_nodes), *((s, False) for s in view.nodes)]:
        cordon = cordons.get(status.node)
        evict = _evict_reason(status, cordon, status.node in keep)
        unschedulable = evict or _unschedulable_reason(status, cordon, absent)
        busy = frozenset(slot for runner in status.runners if runner.state != "refused" for slot in runner.slots)
        nodes[status.node] = _Node(status, absent, unschedulable, evict, busy)
    for placement in view.orphaned():
        for assignment in placement.assignments:
            if assignment.node in nodes:
                nodes[assignment.node].allocate(assignment, placement.job)
    return nodes


def _nodes_not_emptied(view: ClusterView) -> set[str]:
    """Quarantined nodes beyond the share. Nodes without jobs count first: the answer stays while nodes are emptied."""
    statuses = (*view.nodes, *view.absent_nodes)
    quarantined = [status for status in statuses if status.state == "quarantined"]
    in_use = {assignment.node for placement in view.placements for assignment in placement.assignments}
    by_check: dict[str, list[str]] = {}
    for status in sorted(quarantined, key=lambda status: (status.node in in_use, status.node)):
        for check in status.failing or ("",):  # none fails during a cool-off
            by_check.setdefault(check, []).append(status.node)
    most = max(1, int(MAX_QUARANTINED_SHARE * len(statuses)))
    return {status.node for status in quarantined}.difference(*(nodes[:most] for nodes in by_check.values()))


def _evict_reason(status: NodeStatus, cordon: Cordon | None, keeps_jobs: bool) -> str:
    if cordon is not None and cordon.drain:
        return f"{status.node} is {cordon.text}"
    if status.state == "draining" or (status.state == "quarantined" and not keeps_jobs):
        return with_reason(f"{status.node} is {status.state}", status.why)
    return ""


def _unschedulable_reason(status: NodeStatus, cordon: Cordon | None, absent: bool) -> str:
    """A quarantine counts above a cordon, whether or not it empties the node: the sentence stays while nodes empty."""
    if cordon is not None and status.state != "quarantined":
        return f"{status.node} is {cordon.text}"
    if status.state != "ready":
        return with_reason(f"{status.node} is {status.state}", status.why)
    return _absent_reason(status.node) if absent else ""


def _absent_reason(node: str) -> str:
    return f"{node} is absent"


@dataclass(slots=True)
class _Job:
    """One submission on its way to a placement."""

    submission: Submission
    written_placement: Placement | None
    assignments: dict[str, SlotAssignment]
    refusals: dict[str, str]
    changes: list[str]
    pending_reason: str = ""

    @property
    def has_min_nodes(self) -> bool:
        """True if the job has its minimum of nodes."""
        return len(self.assignments) >= self.submission.min_nodes

    @property
    def has_run(self) -> bool:
        return self.written_placement is not None and bool(
            self.written_placement.assignments or self.written_placement.previous_nodes
        )

    @property
    def slot_demand(self) -> int:
        """The slots in use, or needed to start; none of a job that cannot start."""
        if self.pending_reason.endswith(BLOCKS_NOBODY_PHRASE):
            return 0
        if self.assignments:
            return sum(len(assignment.slots) for assignment in self.assignments.values())
        return self.submission.min_nodes * self.submission.min_slots

    def placement(self) -> Placement:
        """The placement as written if nothing has changed, so that its reason keeps what happened in earlier turns."""
        assignments = tuple(self.assignments.values())
        refusals = tuple(Refusal(node, why) for node, why in sorted(self.refusals.items()))
        written = self.written_placement
        same = written is not None and (assignments, refusals) == (written.assignments, written.refusals)
        if written is not None and same and (assignments or written.reason.endswith(self.pending_reason)):
            return written
        state = (
            f"runs on {listing(_describe_assignment(a) for a in assignments)}" if assignments else self.pending_reason
        )
        previous = () if written is None else written.previous_nodes_after(self.assignments)
        # The reason of a pending job names the nodes that refused it already.
        named = () if assignments else {_describe_refusal((node,), why) for node, why in self.refusals.items()}
        reason = "; ".join([*(sentence for sentence in self.changes if sentence not in named), state])
        return Placement(self.submission.job, self.submission.number, assignments, reason, refusals, previous)


def _retain_assignments(
    submission: Submission, written: Placement | None, view: ClusterView, nodes: dict[str, _Node]
) -> _Job:
    """The job with the assignments it keeps; their slots are allocated from now on."""
    key = (submission.job, submission.number)
    job = _Job(submission, written, {}, _refusals(key, written, view), [])
    for assignment in _running_assignments(key, view) if written is None else written.assignments:
        node = nodes.get(assignment.node)
        if node is None:
            job.changes.append(f"{assignment.node} is gone")
        elif lost := _lost_reason(assignment, job, node, view):
            job.changes.append(lost)
        else:
            job.assignments[assignment.node] = assignment
            node.allocate(assignment, submission.job)
    return job


def _refusals(key: tuple[str, int], written: Placement | None, view: ClusterView) -> dict[str, str]:
    """The nodes that refuse the job, and why: as they report, or as they did before they were absent. A cordon ends a
    refusal: its node was repaired, or will be.
    """
    cordoned, present = {cordon.node for cordon in view.cordons}, {status.node for status in view.nodes}
    refusals = {} if written is None else {r.node: r.why for r in written.refusals if r.node not in present}
    for status in view.nodes:
        for runner in status.runners:
            if (runner.job, runner.number) == key and runner.state == "refused":
                refusals[status.node] = runner.why
    return {node: why for node, why in refusals.items() if node not in cordoned}


def _running_assignments(key: tuple[str, int], view: ClusterView) -> tuple[SlotAssignment, ...]:
    """The assignments of a job without a placement: the store has lost its data, the nodes still run the job."""
    assignments = {
        status.node: SlotAssignment(status.node, runner.slots)
        for status in view.nodes
        for runner in status.runners
        if (runner.job, runner.number) == key and runner.slots and runner.state in ("starting", "running")
    }
    return tuple(assignments.values())


def _lost_reason(assignment: SlotAssignment, job: _Job, node: _Node, view: ClusterView) -> str:
    """Why a job cannot keep an assignment; "" if it can."""
    name = assignment.node
    if node.evict_reason:
        return node.evict_reason
    if name in job.refusals:
        return _describe_refusal((name,), job.refusals[name])
    if node.absent and (job.submission.job, name) in view.left_behind:
        return f"{_absent_reason(name)}, and the job continued without it"
    key = (job.submission.job, job.submission.number)
    runs_here = any((runner.job, runner.number) == key for runner in node.status.runners)
    others = {node.allocated_slots[slot] for slot in assignment.slots if slot in node.allocated_slots}
    if runs_here:  # a placement of an unknown job, perhaps a forged one, ends no job
        others -= {placement.job for placement in view.orphaned()} if others else set()
    if others:
        return f"{name}'s slots are in use by {listing(sorted(others))}"
    if runs_here or node.absent or max(assignment.slots) < node.status.slots:
        return ""
    return f"{name} has {count(node.status.slots, 'slot')} now"


def _restore_minimum(jobs: list[_Job], nodes: dict[str, _Node]) -> None:
    """Rule 2. The youngest job short of nodes releases its slots first: what it frees may help the others."""
    while True:
        short = [job for job in jobs if job.assignments and not job.has_min_nodes]
        for job in short:
            _assign_nodes(job, nodes)
        stuck = [job for job in short if not job.has_min_nodes]
        if not stuck:
            return
        _evict(stuck[-1], nodes)


def _turns(jobs: Sequence[_Job], head: Submission | None) -> Iterator[_Job]:
    """Yield the jobs that do not run, each when its turn comes; what the caller does with one counts for the next.

    `jobs` are sorted by priority and number. `head` is the job that blocks the queue already. Within a class, jobs that
    have run before come first, since they hold work that would be lost; then submitters take turns by the slots that
    they use, so one who submits a thousand jobs waits behind one who submits one.
    """
    used = Counter[str]()
    waiting = []
    for job in jobs:
        if job.has_min_nodes:
            used[job.submission.submitter] += job.slot_demand
        else:
            waiting.append(job)
    for _, of_priority in groupby(waiting, key=lambda job: job.submission.order[0]):
        first: list[_Job] = []
        queues: dict[str, deque[_Job]] = {}
        for job in of_priority:
            if job.has_run or job.submission is head:
                first.append(job)
            else:
                queues.setdefault(job.submission.submitter, deque()).append(job)
        for job in sorted(first, key=lambda job: not job.has_run):
            yield job
            used[job.submission.submitter] += job.slot_demand
        turns = [(used[name], own[0].submission.number, name) for name, own in queues.items()]
        heapq.heapify(turns)
        while turns:
            name = heapq.heappop(turns)[2]
            job = queues[name].popleft()
            yield job
            used[name] += job.slot_demand
            if own := queues[name]:
                heapq.heappush(turns, (used[name], own[0].submission.number, name))


def _start_pending(turns: Iterable[_Job], nodes: dict[str, _Node]) -> None:
    """Rule 3."""
    blocked = False
    for job in turns:
        if not blocked and _assign_nodes(job, nodes):
            continue
        if not _feasible(job, nodes):
            job.pending_reason = f"pending: {_infeasible_reason(job, nodes)}; {BLOCKS_NOBODY_PHRASE}"
        elif not blocked:
            job.pending_reason = f"pending: {_describe_request(job.submission)}; {_shortage(job, nodes)}"
            blocked = True
        else:
            job.pending_reason = BEHIND_OTHERS_REASON


def _grow(jobs: list[_Job], nodes: dict[str, _Node]) -> None:
    """Rule 4."""
    if any(not job.has_min_nodes and _feasible(job, nodes) for job in jobs):
        return
    for job in jobs:
        if job.has_min_nodes and job.submission.grow and len(job.assignments) < job.submission.max_nodes_with_spares:
            before = set(job.assignments)
            _assign_nodes(job, nodes)
            if added := sorted(job.assignments.keys() - before):
                verb = "was" if len(added) == 1 else "were"
                job.changes.append(f"{listing(added)} {verb} free and no job is pending")


def _assign_nodes(job: _Job, nodes: dict[str, _Node]) -> bool:
    """Assign nodes to the job, up to its maximum, if that reaches its minimum. False: nothing was assigned.

    Nodes that it has run on come first, since they may have its checkpoints in memory or on a local disk; then those
    with the most slots for it; then the tightest fit, so that large nodes stay whole for large jobs.
    """
    submission = job.submission
    known = (
        ()
        if job.written_placement is None
        else (*job.written_placement.previous_nodes, *(a.node for a in job.written_placement.assignments))
    )
    fit = [node for name, node in nodes.items() if name not in job.assignments and _fits(job, node)]

    def preference(node: _Node) -> tuple[bool, int, int, str]:
        # Nodes it ran on may have its checkpoints; then the most slots; then the tightest fit: others stay whole.
        free, name = len(node.free_slots), node.status.node
        return name not in known, -min(free, submission.max_slots_with_spares), free, name

    if len(job.assignments) + len(fit) < submission.min_nodes:
        return False
    for node in sorted(fit, key=preference)[: submission.max_nodes_with_spares - len(job.assignments)]:
        assignment = SlotAssignment(node.status.node, node.free_slots[: submission.max_slots_with_spares])
        job.assignments[assignment.node] = assignment
        node.allocate(assignment, submission.job)
    return True


def _evict(job: _Job, nodes: dict[str, _Node]) -> None:
    """Release all nodes of a job that has too few, and say so."""
    job.changes.append(f"{listing(job.assignments)} alone {is_are(job.assignments)} too few")
    for name, assignment in job.assignments.items():
        nodes[name].release(assignment)
    job.assignments.clear()


def _fits(job: _Job, node: _Node) -> bool:
    """True if the node can take a part of the job now."""
    usable = not node.unschedulable_reason and node.status.node not in job.refusals
    fits = usable and len(node.free_slots) >= job.submission.min_slots and not _missing_labels(job, node)
    return fits and not _unusable_directory(job, node)


def _feasible(job: _Job, nodes: dict[str, _Node]) -> bool:
    """True if these nodes could run the job if they were empty. One that is absent for a moment counts, too."""
    return sum(_fits_empty(job, node) for node in nodes.values()) >= job.submission.min_nodes


def _fits_empty(job: _Job, node: _Node) -> bool:
    name = node.status.node
    usable = not node.unschedulable_reason or (node.absent and node.unschedulable_reason == _absent_reason(name))
    fits = usable and name not in job.refusals and node.status.slots >= job.submission.min_slots
    return fits and not _missing_labels(job, node) and not _unusable_directory(job, node)


def _unusable_directory(job: _Job, node: _Node) -> str:
    """A shared directory that the job uses and the node cannot; "" if there is none."""
    if not node.status.unusable:
        return ""
    used = job_directories(job.submission.spec)
    return next(
        (directory for directory in node.status.unusable if any(path.is_relative_to(directory) for path in used)), ""
    )


def _missing_labels(job: _Job, node: _Node) -> list[str]:
    return [label for label in job.submission.labels if label not in node.status.labels]


def _describe_request(submission: Submission) -> str:
    each_node = " each" if submission.min_nodes > 1 else ""
    return f"needs {count(submission.min_nodes, 'node')} with {count(submission.min_slots, 'free slot')}{each_node}"


def _shortage(job: _Job, nodes: dict[str, _Node]) -> str:
    """The nodes or slots that a pending job waits for which could run if other jobs did not."""
    fit = [name for name, node in sorted(nodes.items()) if _fits(job, node)]
    has = f"{listing(fit)} {has_have(fit)} them, but " if fit else ""
    return has + listing(_obstacles(job, nodes, fit, free=True))


def _infeasible_reason(job: _Job, nodes: dict[str, _Node]) -> str:
    """Why these nodes could never run the job. It does not change as other jobs start and end."""
    fit = [name for name, node in sorted(nodes.items()) if _fits_empty(job, node)]
    obstacles = _obstacles(job, nodes, fit, free=False)
    if not obstacles:
        why = f"there {is_are(fit)} only {count(len(fit), 'node')}" if fit else "there is no node"
    elif len(nodes) == 1:
        why = f"the only node cannot run it: {listing(obstacles)}"
    else:
        number = f"only {len(fit)}" if fit else "none"
        why = f"{number} of the {len(nodes)} nodes can run it: {listing(obstacles)}"
    return f"{_describe_request(job.submission)}, and {why}"


def _obstacles(job: _Job, nodes: dict[str, _Node], except_nodes: list[str], *, free: bool) -> list[str]:
    """The obstacle on each of the other nodes; those that refused the job for one reason are named together."""
    obstacles: list[str] = []
    refused: dict[str, list[str]] = {}
    for name, node in sorted(nodes.items()):
        slots = node.status.slots
        if name in except_nodes:
            continue
        if node.unschedulable_reason:
            obstacles.append(node.unschedulable_reason)
        elif name in job.refusals:
            refused.setdefault(job.refusals[name], []).append(name)
        elif missing := _missing_labels(job, node):
            obstacles.append(f"{name} has no label {listing(missing)}")
        elif directory := _unusable_directory(job, node):
            cannot = "start a job" if directory == EVERY_JOBS_DIRECTORY else f"use {directory}"
            obstacles.append(with_reason(f"{name} cannot {cannot}", node.status.why))
        elif free and slots >= job.submission.min_slots:
            obstacles.append(f"{name} has {len(node.free_slots)} of {slots} free")
        else:
            obstacles.append(f"{name} has {count(slots, 'slot')}" + (" in all" if free else ""))
    return [*obstacles, *(_describe_refusal(names, why) for why, names in refused.items())]


def _describe_refusal(names: Iterable[str], why: str) -> str:
    return with_reason(f"{listing(names)} refused it", why)


def _describe_assignment(assignment: SlotAssignment) -> str:
    """`n1 (slots 0-3, 6)`."""
    return f"{assignment.node} ({plural(len(assignment.slots), 'slot')} {', '.join(ranges(assignment.slots))})"
