"""Detects a hang on one node: when to suspect one, to gather evidence, and to report to the leader.

While this node or another one suspects a hang, helpers gather evidence of this node's ranks and every observation is
reported; when progress resumes the report is withdrawn. It runs in the deciding thread and never waits. Only the leader
decides that a group is hung, on all nodes' reports.

Suspicion, evidence and verdict are three steps with three prices. A suspicion costs nothing: it follows from
observations that are made anyway. Evidence costs the ranks a stack each and the node a moment, so it is gathered ever
more rarely while a suspicion lasts. A verdict costs a restart, and therefore needs the reports of all nodes: a rank
that waits for another one looks exactly like a rank that hangs, and only the other node knows which it is.

A report carries what was observed and what was gathered; it contains no conclusion of this node beside its sentence.
The leader combines the newest ones. `gathered` says that the evidence is complete, so the leader knows whether a
missing stack is still to come.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Protocol

from elasticd_agent.hangs.causes import DUMP_REASON
from elasticd_agent.hangs.collector.request import VERDICT_FILE
from elasticd_agent.hangs.evidence import EvidenceCollector, EvidenceTarget, GatheredEvidence
from elasticd_agent.hangs.observer import Observation
from elasticd_agent.hangs.verdict import describe_likely_culprit, reason_to_suspect
from elasticd_agent.model.job import Policy
from elasticd_agent.model.reports import HangReport, HangVerdict, RankLocation, RecordedVerdict

REPORT_INTERVALS_S = (0.5, 0.5, 1.0, 2.0, 4.0, 5.0)
"""Between reports while a suspicion lasts, which may be an evaluation of an hour."""
GATHER_INTERVALS_S = (1.0, 2.0, 4.0, 8.0, 15.0)
"""Between gatherings of evidence then."""
SUSPICION_LOG_INTERVAL_S = 60.0
"""Between the log lines of a suspicion that lasts: a long upload, a person at a debugger."""
KEPT_REPORTS = 200

DumpReply = Callable[[Path | str], None]


class SuspicionListener(Protocol):
    """Receives this node's suspicions."""

    def hang_suspected(self, number: int, why: str) -> None: ...
    def suspicion_lasts(self, number: int, why: str) -> None: ...
    def hang_cleared(self, number: int, seconds: float) -> None: ...


@dataclass(slots=True)
class HangDetector:
    """The detector of one job, for one group at a time."""

    node: str
    policy: Policy
    evidence: EvidenceCollector
    publish: Callable[[HangReport | None], None]  #: to the leader; None withdraws the report
    listener: SuspicionListener
    report_every_look: bool  #: the leader is in this process, so that reports cost nothing
    retransmission_s: float = 0.0
    last_verdict: RecordedVerdict | None = None  #: the verdict that is in `last_verdict_dir`, or soon will be
    last_verdict_dir: Path = Path()
    _round: int = 0
    _targets: Sequence[EvidenceTarget] = ()
    _starting: bool = False
    _directory: Path = Path()
    _report_requested_round: int = 0
    _own_suspicion: str = ""
    _suspicious_since: float = 0.0
    _suspicion_logged_at: float = 0.0
    _reporting_since: float | None = None
    _gathered: GatheredEvidence | None = None
    _evidence_complete: bool = False
    _gathering: bool = False
    _next_gather_at: float = 0.0
    _gather_count: int = 0
    _next_report_at: float = 0.0
    _reports: deque[str] = field(default_factory=lambda: deque(maxlen=KEPT_REPORTS))
    _report_count: int = 0
    _dump_replies: list[DumpReply] = field(default_factory=list)

    def group_expected(self, number: int) -> None:
        """The group of round `number` is about to start: other nodes wait for its ranks, and shall know why."""
        self.group_ended()
        self._round = number
        self._starting = True

    def group_started(self, number: int, targets: Sequence[EvidenceTarget], directory: Path) -> None:
        """The group of round `number` runs; its evidence goes to `directory`."""
        self.group_ended()
        self._round = number
        self._targets = targets
        self._directory = directory
        self._reports.clear()

    def group_ended(self) -> None:
        """The group has ended."""
        if self._gathered is not None:
            self.evidence.discard_current()  # evidence of processes that are being ended is misleading
        if self._reporting_since is not None:
            self.publish(None)
        if self._reporting_since is not None and self._targets:
            self._write(f"reports-{self.node}.jsonl", "".join(line + "\n" for line in self._reports))
        self._reporting_since = None
        self._gathered = None
        self._evidence_complete = False
        self._own_suspicion = ""
        self._targets = ()
        self._starting = False

    def report_requested(self, number: int, on: bool) -> None:
        """The leader requests reports of round `number`, or withdraws the request."""
        self._report_requested_round = number if on else 0

    @property
    def suspected(self) -> bool:
        """This node or another one suspects a hang of the group that runs here."""
        return self._reporting_since is not None

    def update(
        self, seen: Observation, deadline_s: float, now: float, pause_s: float = 0.0, lost_by_restart_s: float = -1.0
    ) -> None:
        """Take one observation, and what has been learned of the job: gather evidence and report as is due."""
        if seen.round != self._round or not (self._targets or self._starting):
            return
        if seen.training_pids:
            self._targets = [
                replace(target, pid=pid) for target, pid in zip(self._targets, seen.training_pids, strict=True)
            ]
        report = replace(self._report_of(seen, deadline_s), pause_s=pause_s, restart_s=lost_by_restart_s)
        why = reason_to_suspect(report, self.policy) or ""
        if not why and self._report_requested_round != self._round:
            self._withdraw_report(now)
            return
        if self._reporting_since is None:
            self._reporting_since = self._next_gather_at = self._next_report_at = now
            self._gathered = None  # a dump from before says nothing about now
            self._evidence_complete = False
            self._gather_count = self._report_count = 0
        self._set_suspicion(why, now, report)
        if self._targets and now >= self._next_gather_at and not self._gathering:
            self._gather(why or "another node suspects a hang", self._directory)
        if self.report_every_look or now >= self._next_report_at:
            self._publish(replace(report, why=why, turn=self._report_count), now)

    def evidence_gathered(self, found: GatheredEvidence, now: float) -> None:
        """The evidence is on disk, or as much of it as there was time for."""
        self._gathering = False
        any_found = any(rank.state or rank.source for rank in found.ranks)
        for reply in self._dump_replies:
            reply(found.directory if any_found else found.trouble or "the workers were ended meanwhile")
        self._dump_replies.clear()
        if found.round != self._round:
            return
        self._gathered = _keep_earlier_stacks(found, self._gathered)
        missing = not all(rank.source for rank in self._gathered.ranks)
        if (found.lacked_time or found.trouble) and self._gather_count == 0 and missing:
            self._gather_count = 1  # the helper came too late for some stack, as on a busy machine: once more
            self._next_gather_at = now
            return
        self._evidence_complete = True
        self._next_gather_at = now + GATHER_INTERVALS_S[min(self._gather_count, len(GATHER_INTERVALS_S) - 1)]
        self._gather_count += 1
        self._next_report_at = now

    def write_verdict(self, hang: HangVerdict) -> Path | None:
        """Write the verdict with its reports beside the evidence. Returns that directory; None for another round's."""
        if hang.round != self._round:
            return None
        culprits = tuple(RankLocation(*culprit) for culprit in hang.culprits)
        action, hung_s = "restart" if hang.kills_group else "report", round(hang.hung_s, 3)
        verdict = RecordedVerdict(hang.round, hang.cause, culprits, hang.why, action, hung_s, time.time(), hang.reports)
        self.last_verdict, self.last_verdict_dir = verdict, self.evidence.directory_for(self._directory)
        self._write(VERDICT_FILE, verdict.to_json().decode() + "\n")
        return self.last_verdict_dir

    def dump(self, out: Path | None, reply: DumpReply) -> None:
        """Gather evidence without a suspicion; `reply` gets its directory, or why there is none."""
        if not self._targets:
            reply("no workers are running")
        elif self._gathering or self._gather(DUMP_REASON, out or self._directory.with_name("dump")):
            self._dump_replies.append(reply)
        else:
            reply("evidence is being gathered already; try again in a moment")

    # --- parts ------------------------------------------------------------------------------------------------------

    def _withdraw_report(self, now: float) -> None:
        """End the suspicion: withdraw the report, and forget evidence that described another moment."""
        if self._reporting_since is not None:
            self.publish(None)
        self._set_suspicion("", now)
        self._reporting_since = None
        self._gathered = None
        self._evidence_complete = False

    def _set_suspicion(self, why: str, now: float, report: HangReport | None = None) -> None:
        """This node's own suspicion begins, lasts, or ends. Its end is reported at once."""
        if why and not self._own_suspicion:
            self._suspicious_since = self._suspicion_logged_at = now
            self.listener.hang_suspected(self._round, why)
        elif why and now >= self._suspicion_logged_at + SUSPICION_LOG_INTERVAL_S:
            self._suspicion_logged_at = now
            self.listener.suspicion_lasts(
                self._round, why if report is None else f"{why}: {describe_likely_culprit(report)}"
            )
        if self._own_suspicion and not why:
            self._next_report_at = now
            self.listener.hang_cleared(self._round, now - self._suspicious_since)
        self._own_suspicion = why

    def _report_of(self, seen: Observation, deadline_s: float) -> HangReport:
        """Return the report: each rank's observation, with the evidence that was gathered of it."""
        facts = {evidence.rank: evidence for evidence in self._gathered.ranks} if self._gathered is not None else {}
        ranks = tuple(
            replace(
                rank,
                where=evidence.where,
                function=evidence.function,
                place=evidence.place,
                stack=evidence.stack,
                evidence=bool(evidence.source),
                alone=evidence.alone,
                loading=evidence.loading,
                groups=evidence.groups,
                deviation=evidence.deviation,
                launches=evidence.launches,
            )
            if (evidence := facts.get(rank.rank)) is not None
            else rank
            for rank in seen.ranks
        )
        return HangReport(
            seen.round,
            self.node,
            ranks,
            deadline_s=deadline_s,
            gathered=self._evidence_complete,
            store_state=seen.store_state,
            store_stopped_s=seen.store_stopped_s,
            links_s=self.retransmission_s,
        )

    def _gather(self, why: str, directory: Path) -> bool:
        targets = self._targets
        if self._gather_count and why != DUMP_REASON:
            # NCCL writes its own dump once in a suspicion: megabytes, which look like work of the rank.
            targets = [replace(target, pipe=None) for target in targets]
        self._gathering = self.evidence.start_gathering(self._round, targets, directory, why)
        return self._gathering

    def _publish(self, report: HangReport, now: float) -> None:
        """Send the report and keep it for the record. The next one comes sooner where a rank is
        about to reach a limit.
        """
        self._report_count += 1
        pause_s = REPORT_INTERVALS_S[min(self._report_count, len(REPORT_INTERVALS_S)) - 1]
        self._next_report_at = now + min([pause_s, *self._seconds_to_limits(report)])
        self._reports.append(report.to_json().decode())
        self.publish(report)

    def _seconds_to_limits(self, report: HangReport) -> list[float]:
        """The seconds until ranks reach the limits for being stopped and idle."""
        limits = [self.policy.stopped_after_s - r.stopped_s for r in report.ranks if r.stopped_s]
        limits.append(self.policy.stopped_after_s - report.store_stopped_s if report.store_stopped_s else 0.0)
        limits += [report.deadline_s - r.idle_s for r in report.ranks]
        return [max(0.05, limit) for limit in limits if limit > 0]

    def _write(self, name: str, text: str) -> None:
        self.evidence.write_later(self._round, name, text, self._directory)


def _keep_earlier_stacks(found: GatheredEvidence, earlier: GatheredEvidence | None) -> GatheredEvidence:
    """Each rank's newest stack: no stack says nothing of the rank, and does not replace what is known."""
    known = {rank.rank: rank for rank in earlier.ranks if rank.source} if earlier is not None else {}
    return replace(found, ranks=tuple(rank if rank.source else known.get(rank.rank, rank) for rank in found.ranks))
