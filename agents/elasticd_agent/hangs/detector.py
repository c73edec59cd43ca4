"""One node's part in finding a hang: when to be suspicious, to take evidence, and to tell the others what is seen.

It exists so that the loop only has to look. While this node or another one suspects a hang, evidence of this node's
ranks is taken by helper processes, and what is seen goes to the planner; when progress resumes all of it is taken back.
It belongs to the deciding thread, never waits, and never decides that a group is hung: the planner does, on all nodes'
reports.
"""

from __future__ import annotations

import json
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

from elasticd_agent.hangs import verdict as hang
from elasticd_agent.hangs.evidence import EvidenceCollector, EvidenceTarget, GatheredEvidence
from elasticd_agent.hangs.observer import Observation
from elasticd_agent.model.job import Policy
from elasticd_agent.model.reports import HangReport, HangVerdict

REPORT_INTERVALS_S = (0.5, 0.5, 1.0, 2.0, 4.0, 5.0)
"""How far apart reports get while a suspicion lasts: it may be an evaluation of an hour."""
GATHER_INTERVALS_S = (1.0, 2.0, 4.0, 8.0, 15.0)
"""How far apart stacks are taken then."""
KEPT_REPORTS = 200

DumpReply = Callable[[Path | str], None]


class HangListener(Protocol):
    """Who is told of a suspicion."""

    def hang_suspected(self, number: int, why: str) -> None: ...
    def hang_cleared(self, number: int, seconds: float) -> None: ...


@dataclass(slots=True)
class HangDetector:
    """One job's, of one group at a time. `report` reaches the planner; `local`: that costs nothing.

    `verdict` is the last one of this job, as verdict.json has it; `verdict_in`: where that is, or soon will be.
    """

    node: str
    policy: Policy
    evidence: EvidenceCollector
    publish: Callable[[HangReport | None], None]
    listener: HangListener
    report_every_look: bool
    last_verdict: Mapping[str, Any] | None = None
    last_verdict_dir: Path = Path()
    _round: int = 0
    _targets: Sequence[EvidenceTarget] = ()
    _directory: Path = Path()
    _requested_round: int = 0
    _why: str = ""
    _suspicious_since: float = 0.0
    _open_since: float | None = None
    _evidence_found: GatheredEvidence | None = None
    _gathering: bool = False
    _gather_at: float = 0.0
    _gather_count: int = 0
    _report_at: float = 0.0
    _reports: deque[str] = field(default_factory=lambda: deque(maxlen=KEPT_REPORTS))
    _verdicts: list[str] = field(default_factory=list)
    _report_count: int = 0
    _dump_replies: list[DumpReply] = field(default_factory=list)

    def begin(self, number: int, targets: Sequence[EvidenceTarget], directory: Path) -> None:
        """The group of round `number` runs; its evidence belongs into `directory`."""
        self.end()
        self._round, self._targets, self._directory = number, targets, directory
        self._reports.clear()
        self._verdicts.clear()

    def end(self) -> None:
        """No group runs any more."""
        if self._evidence_found is not None:
            self.evidence.discard()  # or it would be of the dead
        if self._open_since is not None:
            self.publish(None)
            self._write(f"reports-{self.node}.jsonl", "".join(line + "\n" for line in self._reports))
        self._open_since, self._evidence_found, self._why, self._targets = None, None, "", ()

    def report_requested(self, number: int, on: bool) -> None:
        """The planner wants to hear of our ranks of round `number`, or wants that no more."""
        self._requested_round = number if on else 0

    @property
    def suspected(self) -> bool:
        """True while this node or another one suspects a hang of the group that runs here."""
        return self._open_since is not None

    def update(self, seen: Observation, deadline_s: float, now: float) -> None:
        """What the ranks do now. Gathers and reports as is due."""
        if seen.round != self._round or not self._targets:
            return
        if seen.pids:
            self._targets = [replace(one, pid=pid) for one, pid in zip(self._targets, seen.pids, strict=True)]
        report = self._report_of(seen, deadline_s)
        why = hang.reason_to_suspect(report, self.policy) or ""
        if not why and self._requested_round != self._round:
            self._clear(now)
            return
        if self._open_since is None:
            self._open_since, self._gather_at, self._report_at = now, now, now
            self._evidence_found = None  # what a dump took before says nothing of now
            self._gather_count = self._report_count = 0
        self._set_suspicion(why, now)
        if now >= self._gather_at and not self._gathering:
            self._gather(why or "another node suspects a hang", self._directory)
        if self.report_every_look or now >= self._report_at:
            self._publish(replace(report, why=why, turn=self._report_count), now)

    def evidence_gathered(self, found: GatheredEvidence, now: float) -> None:
        """The evidence is on disk, or as much of it as there was time for."""
        self._gathering = False
        any_found = any(rank.state or rank.source for rank in found.ranks)
        for reply in self._dump_replies:
            reply(found.path if any_found else found.trouble or "the workers were ended meanwhile")
        self._dump_replies.clear()
        if found.round != self._round:
            return
        if found.trouble and self._gather_count == 0 and not any(rank.source for rank in found.ranks):
            self._gather_count, self._gather_at = (
                1,
                now,
            )  # the helper came too late for stacks: a busy machine, once more
            return
        self._evidence_found = found
        self._gather_at = now + GATHER_INTERVALS_S[min(self._gather_count, len(GATHER_INTERVALS_S) - 1)]
        self._gather_count += 1
        self._report_at = now

    def hang_found(self, judged: HangVerdict) -> Path | None:
        """Keep what was decided, and on what, beside the evidence, which is where the answer says; None: not here."""
        verdict = {
            "version": "1.0",
            "round": judged.round,
            "cause": judged.cause,
            "culprits": [{"node": node, "rank": rank, "slot": slot} for node, rank, slot in judged.culprits],
            "why": judged.why,
            "action": "restart" if judged.restarts else "report",
            "seen_after_s": round(judged.hung_s, 3),
            "at_wall": time.time(),
        }
        reports = [report.to_dict() for report in judged.reports]
        self._verdicts.append(json.dumps({"verdict": verdict, "reports": reports}))
        if judged.round != self._round:
            return None
        self.last_verdict, self.last_verdict_dir = verdict, self.evidence.directory_for(self._directory)
        self._write("verdict.json", json.dumps(verdict, indent=1) + "\n")
        self._write("judged.jsonl", "".join(line + "\n" for line in self._verdicts))
        return self.last_verdict_dir

    def dump(self, out: Path | None, reply: DumpReply) -> None:
        """Take evidence of a group that nobody suspects; `reply` gets where it is, or why there is none."""
        if not self._targets:
            reply("no workers are running")
        elif self._gathering or self._gather("requested by elasticd dump", out or self._directory.with_name("dump")):
            self._dump_replies.append(reply)
        else:
            reply("evidence is being taken already; try again in a moment")

    # --- parts ------------------------------------------------------------------------------------------------------

    def _clear(self, now: float) -> None:
        if self._open_since is not None:
            self.publish(None)
        self._set_suspicion("", now)
        self._open_since, self._evidence_found = None, None

    def _set_suspicion(self, why: str, now: float) -> None:
        """Our own suspicion begins, lasts, or ends: the planner hears of its end at once, and asks nobody any more."""
        if why and not self._why:
            self._suspicious_since = now
            self.listener.hang_suspected(self._round, why)
        if self._why and not why:
            self._report_at = now
            self.listener.hang_cleared(self._round, now - self._suspicious_since)
        self._why = why

    def _report_of(self, seen: Observation, deadline_s: float) -> HangReport:
        facts = {one.rank: one for one in self._evidence_found.ranks} if self._evidence_found is not None else {}
        ranks = tuple(
            replace(rank, where=one.where, function=one.function, stack=one.stack, evidence=bool(one.source))
            if (one := facts.get(rank.rank)) is not None
            else rank
            for rank in seen.ranks
        )
        return HangReport(
            seen.round,
            self.node,
            ranks,
            deadline_s=deadline_s,
            gathered=self._evidence_found is not None,
            store_state=seen.store_state,
            store_stopped_s=seen.store_stopped_s,
        )

    def _gather(self, why: str, directory: Path) -> bool:
        self._gathering = self.evidence.gather(self._round, self._targets, directory, why)
        return self._gathering

    def _publish(self, report: HangReport, now: float) -> None:
        self._report_count += 1
        pause_s = REPORT_INTERVALS_S[min(self._report_count, len(REPORT_INTERVALS_S)) - 1]
        self._report_at = now + min([pause_s, *self._due_in(report)])
        self._reports.append(report.to_json().decode())
        self.publish(report)

    def _due_in(self, report: HangReport) -> list[float]:
        """In how long a rank will have been stopped, or idle, for as long as counts."""
        limits = [self.policy.stopped_after_s - r.stopped_s for r in report.ranks if r.stopped_s]
        limits.append(self.policy.stopped_after_s - report.store_stopped_s if report.store_stopped_s else 0.0)
        limits += [report.deadline_s - r.idle_s for r in report.ranks]
        return [max(0.05, limit) for limit in limits if limit > 0]

    def _write(self, name: str, text: str) -> None:
        self.evidence.write(self._round, name, text, self._directory)
