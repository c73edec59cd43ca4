"""The planner's ear for hangs: collects what every node says of its ranks, asks `hang.judge`, and words the verdict.

It exists so that a hang is judged once, on the whole group, by whoever plans. All it keeps between turns are times of
its own clock and what it has said; the reports themselves are in the store, so another planner can take over. It ends
nothing: its verdict becomes a Failure, and what follows from that is `plan`'s.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from elasticd_agent.hangs import verdict as hang
from elasticd_agent.model.job import Policy
from elasticd_agent.model.records import Failure, Round
from elasticd_agent.model.reports import HangReport, HangVerdict, RankReport

JUDGE_INTERVAL_S = 0.25
"""How often reports are judged while there are some: as often as the ranks are looked at."""


@dataclass(slots=True)
class HangJudge:
    """One job's. Times are the planner's monotonic seconds."""

    policy: Policy
    suspected: bool = False
    new_verdicts: list[HangVerdict] = field(default_factory=list)
    _round: int = 0
    _since: float | None = None
    _last_verdict: tuple[object, ...] = ()
    _reporting_nodes: set[str] = field(default_factory=set)
    _last_hang: tuple[int, hang.PreviousHang] = (0, hang.PreviousHang())

    def reset(self) -> None:
        """Somebody else planned, or the store was away: who answers from now on, and how soon, is seen anew."""
        self._since, self._last_verdict = None, ()
        self._reporting_nodes.clear()

    def turn(self, round: Round, reports: Iterable[HangReport], done: frozenset[str], now: float) -> HangVerdict | None:
        """The verdict that ends the group, until it has; `judged` gets it once.

        `done`: nodes whose workers have all ended with code 0.
        """
        if round.number != self._round:
            self._round = round.number
            self.reset()
        told = {report.node: report for report in reports if report.round == round.number and round.member(report.node)}
        self.suspected = any(report.why for report in told.values())
        if not self.suspected:
            self.reset()
            return None
        self._reporting_nodes |= told.keys()
        if self._reporting_nodes - told.keys():
            return None  # who takes back what it said sees progress, or is lost: either way this is no hang any more
        self._since = now if self._since is None else self._since
        waited_s = now - self._since
        late = waited_s >= self.policy.evidence_s + self.policy.seen_timeout_s + self.policy.renewal_s
        heard = [*told.values(), *(_exited_report(round, node) for node in sorted(done - told.keys()))]
        last, before = self._last_hang
        before = before if last < round.number else hang.PreviousHang()
        nodes = [member.node for member in round.members]
        verdict = hang.judge(heard, nodes, self.policy, deadline_passed=late, previous=before)
        if not isinstance(verdict, hang.Hang):
            return None
        restarts = self.policy.on_hang == "restart"
        judged = HangVerdict(
            round.number,
            tuple((place.node, place.rank, place.slot) for place in verdict.culprits),
            verdict.cause,
            verdict.why,
            _idle_s(heard, verdict),
            restarts,
            tuple(heard),
        )
        if (judged.cause, judged.culprits) != self._last_verdict:
            self._last_verdict = judged.cause, judged.culprits
            self.new_verdicts.append(judged)
            self._last_hang = round.number, hang.previous_hang(heard)
        return judged if restarts else None  # again and again: the store may not have taken it

    def next_turn_at(self, now: float) -> float:
        """When to judge again, if nothing new is heard."""
        return now + JUDGE_INTERVAL_S


def failures(judged: HangVerdict, node: str, high_water: int, checkpoint: tuple[int, int] | None) -> list[Failure]:
    """The verdict as `plan` takes it: a Failure for every node that is to blame, else one of `node`, the planner's."""
    blamed: dict[str, list[tuple[int, int]]] = {}
    for culprit, rank, slot in judged.culprits:
        blamed.setdefault(culprit, []).append((rank, slot))
    return [
        Failure(
            judged.round,
            where,
            "hung",
            tuple(places),
            judged.why,
            high_water=high_water,
            checkpoint=checkpoint,
            cause=judged.cause,
        )
        for where, places in (blamed or {node: []}).items()
    ]


def _idle_s(reports: Iterable[HangReport], verdict: hang.Hang) -> float:
    """For how long nobody had made progress, or for how long those who are to blame had not, if that is longer."""
    culprits = {place.rank for place in verdict.culprits}
    live = [rank for report in reports for rank in report.ranks if not rank.exited]
    quiet_s = min((rank.idle_s for rank in live), default=0.0)
    return max([quiet_s, *(max(rank.idle_s, rank.stopped_s) for rank in live if rank.rank in culprits)])


def _exited_report(round: Round, node: str) -> HangReport:
    ranks = tuple(RankReport(rank, slot, exited=True) for rank, at, _, slot in round.assignments() if at == node)
    return HangReport(round.number, node, ranks, gathered=True)
