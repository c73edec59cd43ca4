"""Collects the nodes' hang reports at the leader and turns a hang into one verdict and its Failures.

A hang is judged once, on the whole group. Only times of this node's clock and the last verdict are kept between turns;
the reports and the kills by place (in the Round) are in the store, so that another leader can take over.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field

from elasticd_agent.hangs.verdict import Hang, KillCount, NoHang, has_progress, judge
from elasticd_agent.model.job import Policy
from elasticd_agent.model.records import Failure, Round
from elasticd_agent.model.reports import HangReport, HangVerdict, RankReport

JUDGE_INTERVAL_S = 0.25
"""Reports are judged as often as the ranks are observed, also if none comes."""


@dataclass(slots=True)
class HangJudge:
    """The judge of one job. Times are this node's monotonic seconds."""

    policy: Policy
    suspected: bool = False
    new_verdicts: list[HangVerdict] = field(default_factory=list)
    _round: int = 0
    _suspected_since: float | None = None
    _progress_since: float | None = None
    _last_verdict: tuple[object, ...] = ()
    _reporting_nodes: set[str] = field(default_factory=set)
    _futile_kill_places: set[str] = field(default_factory=set)
    """Places in which a kill did not help: a wait there is weak evidence from then on, whatever the step."""

    def reset(self) -> None:
        """Another node was leader, or the store was unavailable: every node gets its time to answer again."""
        self._suspected_since = None
        self._progress_since = None
        self._last_verdict = ()
        self._reporting_nodes.clear()

    def turn(
        self,
        round: Round,
        reports: Iterable[HangReport],
        done: frozenset[str],
        now: float,
        ending: Collection[str] = (),
        *,
        can_restart: bool = True,
    ) -> HangVerdict | None:
        """The verdict that ends the group, at every turn until it has; `new_verdicts` gets it once.

        `done`: nodes whose workers have all exited with code 0. `ending`: members that still end an earlier group,
        with a worker that is slow to die for example. The others wait for them, and nothing is judged. `can_restart`:
        the restart budget allows one more.
        """
        if round.number != self._round:
            self._round = round.number
            self.reset()
        members = {member.node for member in round.members}
        current = {r.node: r for r in reports if r.round == round.number and r.node in members}
        self.suspected = any(report.why for report in current.values())
        if not self.suspected:
            self.reset()
            return None
        if ending:
            self._suspected_since = None
            return None
        self._reporting_nodes |= current.keys()
        if self._reporting_nodes - current.keys() - done:
            return None  # a node that withdraws its report sees progress, or is lost: either way this hang is over
        self._suspected_since = now if self._suspected_since is None else self._suspected_since
        time_for_evidence_s = self.policy.evidence_timeout_s + self.policy.seen_timeout_s + self.policy.renewal_s
        all_reports = [*current.values(), *(_exited_report(round, node) for node in sorted(done - current.keys()))]
        nodes = [member.node for member in round.members]
        passed = now - self._suspected_since >= time_for_evidence_s
        if not has_progress(all_reports, self.policy):
            self._progress_since = None
        elif self._progress_since is None:
            self._progress_since = now
        progress_s = 0.0 if self._progress_since is None else now - self._progress_since
        after_steps = dict(round.hang_steps)
        after_steps.update((place, sys.maxsize) for place in self._futile_kill_places)
        kills = {place: KillCount(times, after_steps.get(place, -1)) for place, times in round.hang_places}
        judgement = judge(
            all_reports,
            nodes,
            self.policy,
            deadline_passed=passed,
            kills=kills,
            progress_s=progress_s,
            can_restart=can_restart,
        )
        if not isinstance(judgement, NoHang):
            self._futile_kill_places.update(judgement.repeated_places)
        if not isinstance(judgement, Hang):
            return None
        restarts = self.policy.on_hang == "restart" and judgement.kills_group
        verdict = HangVerdict(
            round.number,
            tuple((place.node, place.rank, place.slot) for place in judgement.culprits),
            judgement.cause,
            judgement.why,
            _hung_s(all_reports, judgement),
            restarts,
            tuple(all_reports),
            judgement.places,
            max((rank.step for report in all_reports for rank in report.ranks if not rank.exited), default=0),
        )
        if (verdict.cause, verdict.culprits, restarts) != self._last_verdict:
            self._last_verdict = verdict.cause, verdict.culprits, restarts
            self.new_verdicts.append(verdict)
        return verdict if restarts else None  # at every turn: the store may not have taken it


def failures(verdict: HangVerdict, node: str, high_water: int, checkpoint: tuple[int, int] | None) -> list[Failure]:
    """The verdict as `plan` takes it: a Failure for every blamed node, else one of `node`, the leader."""
    blamed: dict[str, list[tuple[int, int]]] = {}
    for culprit, rank, slot in verdict.culprits:
        blamed.setdefault(culprit, []).append((rank, slot))
    return [
        Failure(
            verdict.round,
            where,
            "hung",
            tuple(places),
            verdict.why,
            high_water=high_water,
            checkpoint=checkpoint,
            cause=verdict.cause,
            places=verdict.places,
            hang_step=verdict.highest_step,
        )
        for where, places in (blamed or {node: []}).items()
    ]


def _hung_s(reports: Iterable[HangReport], verdict: Hang) -> float:
    """The time for which no rank had made progress, or a culprit had not, or others waited for it."""
    culprits = {place.rank for place in verdict.culprits}
    live = [rank for report in reports for rank in report.ranks if not rank.exited]
    idle_s = min((rank.idle_s for rank in live), default=0.0)
    stood_s = (max(rank.idle_s, rank.stopped_s) for rank in live if rank.rank in culprits)
    return max([idle_s, verdict.waited_s, *stood_s])


def _exited_report(round: Round, node: str) -> HangReport:
    ranks = tuple(RankReport(rank, slot, exited=True) for rank, at, _, slot in round.assignments() if at == node)
    return HangReport(round.number, node, ranks, gathered=True)
