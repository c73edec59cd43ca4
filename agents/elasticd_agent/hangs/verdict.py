"""Pure: what every node says of its ranks -> Healthy | Suspect(why) | Hung(culprits, cause, why).

It exists so that a hang is judged in one place, on facts that can be written down and replayed. It reads no clock: ages
are in the facts. It ends nothing and remembers nothing; duplicates and the order of reports change nothing. Who is to
blame is `blame`'s; here is decided whether there is anything to blame anybody for, and whether it is time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from elasticd_agent.hangs.blame import LONG_KERNEL_S, blame
from elasticd_agent.hangs.rank import FLOW_BYTES_PER_S, RankLocation, RankState, labels
from elasticd_agent.model.job import Policy
from elasticd_agent.model.reports import HangReport

__all__ = ["Hang", "Judgement", "NoHang", "RankLocation", "SuspectedHang", "judge", "reason_to_suspect"]

EARLY_FRACTION = 0.6
"""Evidence is gathered from this part of a deadline on, so that it is on disk when the deadline comes."""
ZOMBIE_S = 1.0
"""A worker that has just ended is a zombie until it is reaped, some milliseconds later."""
GROUP_TIMEOUT_S = 1800.0
"""torch's own default for a process group, where the group's is unknown."""
BARRIER_GRACE_S = 3.0
"""A barrier whose time is over takes up to 2 s to say so if its store does not answer, and the script ends by that."""


@dataclass(frozen=True, slots=True)
class NoHang:
    """There is progress, or no way to tell that there is none."""

    why: str = ""


@dataclass(frozen=True, slots=True)
class SuspectedHang:
    """Wait, and look again."""

    why: str


@dataclass(frozen=True, slots=True)
class Hang:
    """The group will not go on by itself. `culprits` may be empty: nobody in particular is to blame."""

    culprits: tuple[RankLocation, ...]
    cause: str
    why: str


Judgement = NoHang | SuspectedHang | Hang
StallScene = frozenset[tuple[int, str]]
"""Where those stood that wait for nobody, as (step, function)."""


@dataclass(frozen=True, slots=True)
class PreviousHang:
    """The last hang, in a round before this one: its scene, and for how long nobody made progress then."""

    scene: StallScene = frozenset()
    idle_s: float = 0.0


REPEAT_FACTOR = 2.0
"""Whoever stands at the same place again is given so many times as long: a pause that is meant is outlived at last."""


def reason_to_suspect(report: HangReport, policy: Policy) -> str | None:
    """Why one node's ranks are reason to gather evidence and to ask the others; None while they are not."""
    live = [rank for rank in _ranks([report]) if not rank.report.exited]
    early_s = EARLY_FRACTION * policy.stopped_after_s
    for rank in live:
        if (rank.report.state == "T" and rank.report.stopped_s >= early_s) or _zombie(rank):
            return f"{rank.label()} {rank.activity()}"
    if report.store_state == "T" and report.store_stopped_s >= early_s:
        return f"the round's store on {report.node} is stopped (state T) for {report.store_stopped_s:.1f} s"
    if not live or report.deadline_s <= 0:
        return None
    deadline_s, quiet_s = _deadline_s(live, report.deadline_s, policy), _idle_s(live)
    if quiet_s >= max(EARLY_FRACTION * deadline_s, deadline_s - policy.evidence_s):
        return f"no rank on {report.node} has made progress for {quiet_s:.1f} s; it is judged after {deadline_s:.1f} s"
    return None


def previous_hang(reports: Sequence[HangReport]) -> PreviousHang:
    """What the next round's verdict should know of this hang."""
    live = [rank for rank in _ranks(list(_latest(reports).values())) if not rank.report.exited]
    return PreviousHang(_scene(live), _idle_s(live)) if live else PreviousHang()


def _scene(live: Sequence[RankState]) -> StallScene:
    """Of ranks that have been seen to do something of their own; nothing where that is not known of all of them."""
    free = [rank.report for rank in live if not rank.waits]
    return (
        frozenset((seen.step, seen.function) for seen in free) if all(seen.function for seen in free) else StallScene()
    )


def judge(
    reports: Sequence[HangReport],
    nodes: Sequence[str],
    policy: Policy,
    *,
    deadline_passed: bool = False,
    previous: PreviousHang = PreviousHang(),
) -> Judgement:
    """The verdict on the whole group, which runs on `nodes`.

    It takes all nodes' reports with their evidence; `late`: who has not answered by now will not, judge without.
    """
    told = _latest(reports)
    ranks = _ranks(list(told.values()))
    live = [rank for rank in ranks if not rank.report.exited]
    if not live:
        return NoHang("no rank that runs has been reported")
    last_s = previous.idle_s if previous.scene and previous.scene == _scene(live) else 0.0
    verdict = (
        _stopped(live, policy) or _store(list(told.values()), policy) or _quiet(ranks, told, nodes, policy, last_s)
    )
    if not isinstance(verdict, Hang):
        return _stopping(live, policy) or verdict
    awaited = [node for node in sorted(set(nodes)) if node not in told or not told[node].gathered]
    if not awaited:
        return verdict
    if not deadline_passed:
        return SuspectedHang(f"{verdict.why}; waiting for the evidence of {', '.join(awaited)}")
    silent = [node for node in awaited if node not in told]
    if silent and not verdict.culprits and verdict.cause == "network" and _idle_s(live) < LONG_KERNEL_S:
        return SuspectedHang(f"{verdict.why}; {', '.join(silent)} did not answer, and may be what they wait for")
    if silent:
        return Hang(verdict.culprits, verdict.cause, f"{verdict.why}; {', '.join(silent)} did not answer")
    return verdict


def _stopped(live: Sequence[RankState], policy: Policy) -> Hang | None:
    """A process that is stopped, or a zombie, will not go on whatever the others do."""
    stopped = [rank for rank in live if rank.report.state == "T" and rank.report.stopped_s >= policy.stopped_after_s]
    zombies = [rank for rank in live if _zombie(rank)]
    for cause, culprits in (("stopped", stopped), ("zombie", zombies)):
        if culprits:
            more = f"; so {'is' if len(culprits) == 2 else 'are'} {labels(culprits[1:])}" if culprits[1:] else ""
            why = f"{culprits[0].label()} {culprits[0].activity()}{more}"
            return Hang(tuple(rank.location for rank in culprits), cause, why)
    return None


def _stopping(live: Sequence[RankState], policy: Policy, of: float = EARLY_FRACTION) -> SuspectedHang | None:
    for rank in live:
        if rank.report.state == "T" and rank.report.stopped_s >= of * policy.stopped_after_s:
            return SuspectedHang(f"{rank.label()} {rank.activity()}; it counts after {policy.stopped_after_s:g} s")
    return None


def _store(reports: Sequence[HangReport], policy: Policy) -> Hang | None:
    for report in reports:
        if report.store_state == "T" and report.store_stopped_s >= policy.stopped_after_s:
            why = f"the round's store on {report.node} is stopped (state T) for {report.store_stopped_s:.1f} s"
            return Hang((), "store", why)
    return None


def _quiet(
    ranks: Sequence[RankState], told: dict[str, HangReport], nodes: Sequence[str], policy: Policy, last_s: float
) -> Judgement:
    """No progress anywhere for longer than the longest deadline of any node, and nobody who may still be busy.

    `last_s`: for how long nobody made progress at the last hang, if that was at the same place of the same step.
    """
    live = [rank for rank in ranks if not rank.report.exited]
    ended = [rank for rank in ranks if rank.report.exited]
    quiet_s = _idle_s(live)
    deadline_s = max(told[rank.node].deadline_s for rank in live)
    if deadline_s <= 0:
        return NoHang("nobody has seen this script train: it is not judged for being quiet")
    deadline_s = _deadline_s(live, deadline_s, policy)
    if quiet_s < deadline_s:
        return NoHang(f"the last progress was {quiet_s:.1f} s ago; {deadline_s:.1f} s is the deadline")
    timeout_s = max(rank.report.timeout_s for rank in live) or GROUP_TIMEOUT_S
    ceiling_s = timeout_s if policy.slow_ceiling_s is None else policy.slow_ceiling_s
    busy = [rank for rank in live if rank.is_busy]
    if busy and quiet_s < ceiling_s:
        return SuspectedHang(f"slow, not hung: {busy[0].label()} {busy[0].activity()}; it may be for {ceiling_s:g} s")
    found = blame(live, ended, len(set(nodes)))
    if found.culprits and all(rank.report.state == "T" for rank in found.culprits):
        return _stopping(found.culprits, policy, of=0.0) or SuspectedHang(found.why)  # it has a time of its own
    sends = [rank for rank in live if rank.bytes_per_s > FLOW_BYTES_PER_S]
    if found.cause == "network" and sends and quiet_s < ceiling_s:
        moving = f"{sends[0].label()} moves {sends[0].bytes_per_s / 1e6:.0f} MB/s"
        return SuspectedHang(f"slow, not hung: {found.why}; but {moving}; it may take {ceiling_s:g} s")
    # Nobody waits for a rank whose peers are done: a last upload may be idle for as long as one without a checkpoint.
    # Nor does a restart help who waits at the same place of the same step again: perhaps the script means to.
    again = last_s > 0 and found.cause in ("blocked", "everyone", "exiting")
    patience_s = (
        policy.effective_hang_floor_s(attached=False) if again or found.cause == "exiting" else found.patience_s
    )
    patience_s = max(patience_s, REPEAT_FACTOR * last_s) if again else patience_s
    why = f"{found.why}, as at the last hang" if again else found.why
    if quiet_s < min(patience_s, ceiling_s):
        return SuspectedHang(f"{why}; it may take {min(patience_s, ceiling_s):g} s")
    return Hang(tuple(rank.location for rank in found.culprits), found.cause, why)


def _zombie(rank: RankState) -> bool:
    return rank.report.state == "Z" and rank.report.idle_s >= ZOMBIE_S


def _deadline_s(live: Sequence[RankState], learned_s: float, policy: Policy) -> float:
    """Ranks that were asked to wait for the next round do so for --hold-timeout; one at a barrier for as long as the
    script has told that, which then ends it, and says who is missing."""
    held_s = policy.hold_timeout_s if any(rank.is_paused for rank in live) else 0.0
    barrier_s = max((rank.report.barrier_s for rank in live if rank.at_barrier), default=0.0)
    return max(learned_s + held_s, barrier_s + BARRIER_GRACE_S if barrier_s else 0.0)


def _idle_s(live: Sequence[RankState]) -> float:
    return min(rank.report.idle_s for rank in live)


def _latest(reports: Sequence[HangReport]) -> dict[str, HangReport]:
    """Every node's newest report of the newest round. Equal turns cannot differ; if they do, the order decides not."""
    newest = max((report.round for report in reports), default=0)
    latest: dict[str, HangReport] = {}
    for report in sorted(reports, key=lambda report: (report.turn, report.to_json())):
        if report.round == newest:
            latest[report.node] = report
    return dict(sorted(latest.items()))


def _ranks(reports: Sequence[HangReport]) -> list[RankState]:
    return sorted((RankState(r.node, seen) for r in reports for seen in r.ranks), key=lambda rank: rank.report.rank)
