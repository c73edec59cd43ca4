"""The judgement on a group: every node's report -> NoHang | SuspectedHang(why) | Hang(culprits, cause, why).

**The invariant: a group that may still make progress is never ended.** A hang that is noticed late costs minutes. A
healthy job that is killed costs its training since the last save, and is killed again at the same place after the
restart. So every rule needs evidence for a hang, and a missing fact counts for the group: no stack, no learned
deadline, a group without a recorder, a node that has not answered.

The inputs are facts without judgement. Each agent reports its own ranks: ages by its own clock, in time that it
observed, so a suspended machine ages no rank; stacks and recordings of its helpers. The judge adds only what it
remembers: kills by place (they are in the Round, so another leader has them), and how long there was progress.
Neither duplicates nor the order of reports change the result; `judge` is pure, and recordings of real hangs are
replayed in tests.

`judge` tries RULES in this order, and the first answer counts. Each rule may assume that those before it had none.

1. Stopped processes, zombies and a stopped store. They do not resume whatever the others do, so they need no learned
   deadline. All ranks of a node stopped together are different: a scheduler did that, and will resume them. Were this
   rule later, a rank that holds the others' collective while it is stopped would be taken for a rank that is slow.
2. A script that was never seen to train has no hang. Being idle is normal for a server or a download, and there is no
   deadline to compare with.
3. A rank waits in a collective for many deadlines while the others train. This is before the next rule, which would
   see only their progress.
4. Progress within the deadline ends the judgement. From here on no rank has made progress for longer than the longest
   deadline of any node.
5. A wait for someone outside (a debugger, a reader of the output) is reported and never ended: a restart would meet
   the same wait.
6. A rank works outside of any wait, or bytes move in the collective that all wait in: slow, not hung, until the slow
   ceiling. This is before blame: blame compares ranks, and of a group in which one rank computes for ten minutes all
   others wait, which looks exactly like a hang of that rank.
7. Only then `blame` names the culprits, the cause and the kind of evidence, and `patience` says for how long that kind
   must last until the group is reported, and until it is ended. A proof (ranks that wait for each other) ends it after
   seconds. A difference that a lock, a download or an evaluation would show as well is only reported until the slow
   ceiling, unless a restart costs less than the wait has cost already.

Two conditions come after the rules. A Hang needs the evidence of every node, or the end of the time for it: without
this the leader would judge the ranks whose reports came first, and blame those that wait for a rank on a node that is
still silent. And a place in which a kill changed nothing is weak evidence from then on, so that a verdict that is
wrong is not repeated at every restart.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from types import MappingProxyType

from elasticd_agent.hangs.blame import Blame, blame, blame_overdue
from elasticd_agent.hangs.patience import LIMIT_RULES, LimitFacts, report_and_kill_limits
from elasticd_agent.hangs.rank import RankState, labels
from elasticd_agent.model.job import Policy
from elasticd_agent.model.phrases import count
from elasticd_agent.model.reports import HangReport, RankLocation

__all__ = ["Hang", "Judgement", "NoHang", "RankLocation", "SuspectedHang", "judge", "reason_to_suspect"]

GATHER_FROM_FRACTION = 0.6
"""Evidence is gathered from this part of a deadline on, so that it is on disk when the deadline comes."""
ZOMBIE_S = 1.0
"""A worker that has just ended is a zombie until it is reaped, some milliseconds later."""
DEFAULT_SLOW_CEILING_S = 1800.0
"""torch's own default for a process group. A longer timeout says that steps may take that long; a shorter one counts
where a rank waits in a collective, for torch ends it then."""
TIMEOUT_GRACE_S = 3.0
"""A wait that times out takes up to 2 s to report that if its store does not answer, and the script ends by it."""
MAX_PLACES = 8
"""The places of one hang that are remembered."""


@dataclass(frozen=True, slots=True)
class NoHang:
    """There is progress, or no way to tell that there is none."""

    why: str = ""


@dataclass(frozen=True, slots=True)
class SuspectedHang:
    """Wait, and judge again."""

    why: str
    repeated_places: tuple[str, ...] = ()
    """Places in which a group was killed, and in which its ranks wait again without a step in between."""


@dataclass(frozen=True, slots=True)
class Hang:
    """The group will not resume by itself, as far as that can be known. `culprits` may be empty."""

    culprits: tuple[RankLocation, ...]
    cause: str
    why: str
    places: tuple[str, ...] = ()  #: the places in which its ranks wait: the next rounds remember them
    kills_group: bool = True
    """The group is to be ended; else to be reported only, as the wait may be healthy and a kill costs more."""
    waited_s: float = 0.0
    repeated_places: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class KillCount:
    """The number of groups of this job that were killed while a rank waited in some place, the last one after which
    step."""

    times: int
    last_step: int


Judgement = NoHang | SuspectedHang | Hang
KillsByPlace = Mapping[str, KillCount]


def reason_to_suspect(report: HangReport, policy: Policy) -> str | None:
    """Why one node should gather evidence and ask the other nodes; None while it should not."""
    live = [rank for rank in _rank_states([report]) if not rank.report.exited]
    early_s = GATHER_FROM_FRACTION * policy.stopped_after_s
    for rank in live:
        if (rank.report.state == "T" and rank.report.stopped_s >= early_s) or _is_zombie(rank):
            return f"{rank.label()} {rank.activity()}"
    if report.store_state == "T" and report.store_stopped_s >= early_s:
        return _describe_stopped_store(report)
    if not live or report.deadline_s <= 0:
        return None
    deadline_s = _deadline_s(live, report.deadline_s, policy)
    idle_s = _idle_s(live)
    if idle_s >= max(GATHER_FROM_FRACTION * deadline_s, deadline_s - policy.evidence_timeout_s):
        return f"no rank on {report.node} has made progress for {idle_s:.1f} s; the deadline is {deadline_s:.1f} s"
    overdue_s = report_and_kill_limits("overdue", policy, LimitFacts(deadline_s)).report_s
    longest = max(live, key=lambda rank: rank.waiting_s)
    if longest.waiting_s < max(GATHER_FROM_FRACTION * overdue_s, overdue_s - policy.evidence_timeout_s):
        return None
    return f"{longest.label()} waits for other ranks for {longest.waiting_s:.1f} s; the limit is {overdue_s:g} s"


def describe_likely_culprit(report: HangReport) -> str:
    """The rank of this node that most likely holds up the others, and what it does."""
    live = [rank for rank in _rank_states([report]) if not rank.report.exited]
    rank = next((rank for rank in live if not rank.waits), live[0]) if live else None
    return f"{rank.label()} {rank.activity()}" if rank is not None else "no rank runs"


def judge(
    reports: Sequence[HangReport],
    nodes: Sequence[str],
    policy: Policy,
    *,
    deadline_passed: bool = False,
    kills: KillsByPlace = MappingProxyType({}),
    progress_s: float = math.inf,
    can_restart: bool = True,
) -> Judgement:
    """The judgement on the whole group, which runs on `nodes`.

    A Hang needs the evidence of all nodes, or `deadline_passed`: what has not been reported by now will not be.
    `progress_s`: for how long the group `has_progress`, without a break. `can_restart`: the job survives a kill.
    """
    case = _Case(_latest(reports), len(set(nodes)), policy, kills, progress_s, can_restart)
    if not case.live:
        return NoHang("no running rank has been reported")
    judgement = next(answer for rule in RULES if (answer := rule(case)) is not None)
    if not isinstance(judgement, Hang):
        return _stopped_recently(case.live, policy, GATHER_FROM_FRACTION * policy.stopped_after_s) or judgement
    missing = [node for node in sorted(set(nodes)) if node not in case.reports or not case.reports[node].gathered]
    if not missing:
        return judgement
    if not deadline_passed:
        return SuspectedHang(f"{judgement.why}; waiting for the evidence of {', '.join(missing)}")
    silent = ", ".join(node for node in missing if node not in case.reports)
    if not silent:
        return judgement
    if not judgement.culprits and judgement.cause == "network" and case.idle_s < (LIMIT_RULES["alike"].report_s or 0.0):
        return SuspectedHang(f"{judgement.why}; {silent} did not answer and may be the cause")
    return replace(judgement, why=f"{judgement.why}; {silent} did not answer")


def has_progress(reports: Sequence[HangReport], policy: Policy) -> bool:
    """A rank has made progress within its deadline, and none waits for someone outside."""
    case = _Case(_latest(reports), 0, policy, {})
    return bool(case.live) and case.idle_s < case.deadline_s and not any(rank.waits_outside_job for rank in case.live)


@dataclass(frozen=True)
class _Case:
    """The facts that the rules decide on, with those that several of them need."""

    reports: Mapping[str, HangReport]  #: every node's latest one
    node_count: int
    policy: Policy
    kills: KillsByPlace
    progress_s: float = math.inf
    can_restart: bool = True

    @cached_property
    def live(self) -> list[RankState]:
        return [rank for rank in _rank_states(self.reports.values()) if not rank.report.exited]

    @cached_property
    def idle_s(self) -> float:
        return _idle_s(self.live)

    @cached_property
    def learned_deadline_s(self) -> float:
        """The longest deadline that any node has learned; 0 if no node has seen this script train."""
        return max(self.reports[rank.node].deadline_s for rank in self.live)

    @cached_property
    def deadline_s(self) -> float:
        return _deadline_s(self.live, self.learned_deadline_s, self.policy)

    @cached_property
    def step(self) -> int:
        return max(rank.report.step for rank in self.live)

    @cached_property
    def ceiling_s(self) -> float:
        """The time for which a rank may be slow: where others wait for it in a collective, as long as torch lets
        them."""
        if self.policy.slow_ceiling_s is not None:
            return self.policy.slow_ceiling_s
        timeout_s = max(rank.report.timeout_s for rank in self.live)
        if timeout_s and any(rank.report.where == "collective" and rank.torch_ends_wait for rank in self.live):
            return timeout_s + TIMEOUT_GRACE_S
        return max(timeout_s, DEFAULT_SLOW_CEILING_S)

    @cached_property
    def ends_at_ceiling(self) -> bool:
        """True where torch ends the group at the ceiling, or --slow-ceiling is given.

        Else nothing but a kill would end it, and it may compute, as in a long evaluation: it is ended once, but not
        again without a step more, and not where that would be the end of the job.
        """
        torch_ends = any(rank.torch_ends_wait for rank in self.live)
        futile = any(self.step <= killed.last_step for killed in self.kills.values())
        return self.policy.slow_ceiling_s is not None or torch_ends or (self.can_restart and not futile)

    @cached_property
    def ranks_of_suspended_nodes(self) -> list[RankState]:
        """The ranks of nodes on which all ranks of the job are stopped: a scheduler did that, and will resume them.

        A single rank of a node may be stopped by itself, while those of other nodes run.
        """
        ranks = Counter(rank.node for rank in self.live)
        stopped = Counter(rank.node for rank in self.live if rank.report.state == "T")
        everywhere = ranks == stopped
        return [r for r in self.live if ranks[r.node] == stopped[r.node] and (everywhere or ranks[r.node] > 1)]

    @cached_property
    def blame(self) -> Blame:
        exited = [rank for rank in _rank_states(self.reports.values()) if rank.report.exited]
        return blame(self.live, exited, self.node_count)

    @cached_property
    def lost_by_restart_s(self) -> float:
        """The training that a restart would repeat: infinite where elasticd does not know the saves of every node."""
        costs = [self.reports[rank.node].restart_s for rank in self.live]
        return min(costs) if self.can_restart and min(costs) >= 0 else math.inf

    def kills_for(self, blamed: Blame) -> KillsByPlace:
        """The kills of groups that waited as this one does. A rank without a stack may be in any place."""
        return {place: killed for place, killed in self.kills.items() if not blamed.places or place in blamed.places}


# ---- the rules, in their order


def _stopped_process(case: _Case) -> Hang | None:
    """A process that is stopped while others run, or a zombie, does not resume whatever the others do."""
    limit_s = case.policy.stopped_after_s
    stopped = [rank for rank in case.live if rank.report.state == "T" and rank.report.stopped_s >= limit_s]
    stopped = [rank for rank in stopped if rank not in case.ranks_of_suspended_nodes]
    zombies = [rank for rank in case.live if _is_zombie(rank)]
    for cause, culprits in (("stopped", stopped), ("zombie", zombies)):
        if culprits:
            more = f"; so {'is' if len(culprits) == 2 else 'are'} {labels(culprits[1:])}" if culprits[1:] else ""
            why = f"{culprits[0].label()} {culprits[0].activity()}{more}"
            return Hang(tuple(rank.location for rank in culprits), cause, why)
    return None


def _stopped_store(case: _Case) -> Hang | None:
    """The process that hosts the round's store is stopped."""
    for report in case.reports.values():
        if report.store_state == "T" and report.store_stopped_s >= case.policy.stopped_after_s:
            return Hang((), "store", _describe_stopped_store(report))
    return None


def _suspended_nodes(case: _Case) -> Judgement | None:
    """All ranks of a node are stopped."""
    stopped_s = min((rank.report.stopped_s for rank in case.ranks_of_suspended_nodes), default=0.0)
    if stopped_s < case.policy.stopped_after_s:
        return None
    ranks = case.ranks_of_suspended_nodes
    why = f"{labels(ranks)} {'is' if len(ranks) == 1 else 'are'} stopped (state T) for "
    why += f"{stopped_s:.1f} s, as all ranks of their node"
    return _decide(case, Blame(tuple(ranks), "stopped", why, "outside"), stopped_s)


def _never_trained(case: _Case) -> NoHang | None:
    if case.learned_deadline_s > 0:
        return None
    return NoHang("this script has never been seen to train, so being idle is no evidence of a hang")


def _overdue(case: _Case) -> Judgement | None:
    """A rank waits in a collective for far longer than the group has been without progress.

    What the others do, retries without an end for example, may not resolve that; but they train. They must have done it
    for a whole deadline: of a group that resumes after a debugger, or a pause of the machine, one rank still waits for
    a moment. A rank that receives one message after the other in a group of its own moves.
    """
    if case.idle_s >= case.deadline_s or any(rank.waits_outside_job for rank in case.live):
        return None
    if case.progress_s < case.deadline_s:
        return None
    waiting = [rank for rank in case.live if rank.waiting_s >= case.deadline_s and rank.report.where != "elsewhere"]
    if not waiting or len(waiting) == len(case.live):
        return None
    overdue = blame_overdue(waiting, [rank for rank in case.live if rank not in waiting])
    decided = _decide(case, overdue, max(rank.waiting_s for rank in waiting))
    return decided if isinstance(decided, Hang) else None


def _recent_progress(case: _Case) -> NoHang | None:
    if case.idle_s >= case.deadline_s:
        return None
    return NoHang(f"the last progress was {case.idle_s:.1f} s ago; the deadline is {case.deadline_s:.1f} s")


def _waits_outside_job(case: _Case) -> Judgement | None:
    """A person at a debugger may take any time. A group that nobody reads would write in vain after a restart, too."""
    rank = next((rank for rank in case.live if rank.waits_outside_job), None)
    if rank is None:
        return None
    return _decide(case, Blame((rank,), "blocked", f"{rank.label()} {rank.activity()}", "outside"), case.idle_s)


def _slow_rank(case: _Case) -> SuspectedHang | None:
    """A rank works outside of any wait."""
    busy = next((rank for rank in case.live if rank.is_busy), None)
    if busy is None or case.idle_s >= case.ceiling_s:
        return None
    return SuspectedHang(f"slow, not hung: {busy.label()} {busy.activity()}; the limit is {case.ceiling_s:g} s")


def _stopped_culprits(case: _Case) -> SuspectedHang | None:
    """Stopped processes have a limit of their own, however short the floor is."""
    culprits = case.blame.culprits
    if not culprits or any(rank.report.state != "T" for rank in culprits):
        return None
    return _stopped_recently(culprits, case.policy, 0.0)


def _slow_collective(case: _Case) -> SuspectedHang | None:
    """All ranks wait in one collective, or those that the others wait for do, and data flows, or may flow unseen."""
    culprits = [rank for rank in case.blame.culprits if rank.report.where == "collective"]
    ranks = case.live if case.blame.evidence == "alike" else culprits if case.blame.evidence == "idle" else []
    if not ranks or case.idle_s >= case.ceiling_s:
        return None
    if (hidden := next((rank for rank in ranks if not rank.report.shows_sockets), None)) is not None:
        unknown = f"the kernel does not show the sockets of {hidden.label()}"
        return SuspectedHang(f"slow or hung: {case.blame.why}; but {unknown}; the limit is {case.ceiling_s:g} s")
    moved_s, sender = min(((rank.sockets_idle_s, rank) for rank in ranks), key=lambda one: one[0])
    if moved_s >= (LIMIT_RULES["alike"].report_s or 0.0) or moved_s >= case.idle_s / 2:
        return None
    flow = f"{sender.label()} has moved data {moved_s:.1f} s ago"
    return SuspectedHang(f"slow, not hung: {case.blame.why}; but {flow}; the limit is {case.ceiling_s:g} s")


RULES: tuple[Callable[[_Case], Judgement | None], ...] = (
    _stopped_process,
    _stopped_store,
    _suspended_nodes,
    _never_trained,
    _overdue,
    _recent_progress,
    _waits_outside_job,
    # From here on no rank has made progress for longer than the longest deadline of any node.
    _slow_rank,
    _stopped_culprits,
    _slow_collective,
    lambda case: _decide(case, case.blame, case.idle_s),
)
"""The first one that answers decides; the last one always does."""


def _decide(case: _Case, found: Blame, waited_s: float) -> SuspectedHang | Hang:
    """Wait, report, or end the group, as the table of patience says."""
    before = case.kills_for(found)
    repeated_places = tuple(place for place, killed in before.items() if case.step <= killed.last_step)
    facts = LimitFacts(
        case.deadline_s,
        pause_s=max(report.pause_s for report in case.reports.values()),
        ceiling_s=case.ceiling_s,
        ends_at_ceiling=case.ends_at_ceiling,
        restart_is_cheap=case.lost_by_restart_s < waited_s,
        kills_for_wait=max((killed.times for killed in before.values()), default=0),
        retransmission_s=max(report.links_s for report in case.reports.values()),
        repeats_after_kill=bool(repeated_places),
    )
    limit = report_and_kill_limits(found.evidence, case.policy, facts)
    why = (
        f"{found.why}, as in {count(facts.kills_for_wait, 'hang')} before"
        if facts.kills_for_wait and found.places
        else found.why
    )
    if waited_s < limit.report_s:
        return SuspectedHang(f"{why}; the limit is {limit.report_s:g} s", repeated_places)
    ends = waited_s >= limit.kill_s
    if not ends:
        why += "; it may still resume" + (f": the limit is {limit.kill_s:g} s" if limit.kill_s < math.inf else "")
    places = [*found.places, *sorted({rank.wait_place for rank in case.live} - {"", *found.places})]
    culprits = tuple(rank.location for rank in found.culprits)
    return Hang(culprits, found.cause, why, tuple(places[:MAX_PLACES]), ends, waited_s, repeated_places)


def _stopped_recently(ranks: Sequence[RankState], policy: Policy, from_s: float) -> SuspectedHang | None:
    for rank in ranks:
        if rank.report.state == "T" and rank.report.stopped_s >= from_s:
            return SuspectedHang(f"{rank.label()} {rank.activity()}; the limit is {policy.stopped_after_s:g} s")
    return None


def _describe_stopped_store(report: HangReport) -> str:
    return f"the round's store on {report.node} is stopped (state T) for {report.store_stopped_s:.1f} s"


def _is_zombie(rank: RankState) -> bool:
    return rank.report.state == "Z" and rank.report.idle_s >= ZOMBIE_S


def _deadline_s(live: Sequence[RankState], learned_s: float, policy: Policy) -> float:
    """The learned deadline, and more for ranks that wait with a time limit of their own.

    A rank that pauses for the next round does so for up to --hold-timeout. A wait with a timeout of the script's own
    ends by itself; the error of a barrier names the missing ranks.
    """
    pause_s = policy.hold_timeout_s if any(rank.is_paused for rank in live) else 0.0
    barrier_s = max((rank.report.barrier_s for rank in live if rank.waits_out_of_band), default=0.0)
    timeout_s = max(barrier_s, *(rank.report.wait_timeout_s for rank in live))
    return max(learned_s + pause_s, timeout_s + TIMEOUT_GRACE_S if timeout_s else 0.0)


def _idle_s(live: Sequence[RankState]) -> float:
    return min(rank.report.idle_s for rank in live)


def _latest(reports: Sequence[HangReport]) -> dict[str, HangReport]:
    """The newest report of the newest round by node, sorted.

    Reports of one turn are equal; the whole text breaks ties, so that the order of arrival never decides.
    """
    newest = max((report.round for report in reports), default=0)
    current = [report for report in reports if report.round == newest]
    latest = {report.node: report for report in sorted(current, key=lambda one: (one.turn, one.to_json()))}
    return dict(sorted(latest.items()))


def _rank_states(reports: Iterable[HangReport]) -> list[RankState]:
    return sorted((RankState(r.node, rank) for r in reports for rank in r.ranks), key=lambda one: one.report.rank)
