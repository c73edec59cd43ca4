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
from elasticd_agent.hangs.evidence import Evidence, Gathered, Target
from elasticd_agent.hangs.observer import Seen
from elasticd_agent.model.job import Policy
from elasticd_agent.model.reports import Judged, Report

TELL_S = (0.5, 0.5, 1.0, 2.0, 4.0, 5.0)
"""How far apart reports get while a suspicion lasts: it may be an evaluation of an hour."""
GATHER_S = (1.0, 2.0, 4.0, 8.0, 15.0)
"""How far apart stacks are taken then."""
REPORTS_KEPT = 200

Reply = Callable[[Path | str], None]


class Listener(Protocol):
    """Who is told of a suspicion."""

    def suspected(self, number: int, why: str) -> None: ...
    def suspicion_over(self, number: int, seconds: float) -> None: ...


@dataclass(slots=True)
class Suspicion:
    """One job's, of one group at a time. `report` reaches the planner; `local`: that costs nothing.

    `verdict` is the last one of this job, as verdict.json has it; `verdict_in`: where that is, or soon will be.
    """

    node: str
    policy: Policy
    evidence: Evidence
    report: Callable[[Report | None], None]
    listener: Listener
    local: bool
    verdict: Mapping[str, Any] | None = None
    verdict_in: Path = Path()
    _number: int = 0
    _targets: Sequence[Target] = ()
    _directory: Path = Path()
    _asked: int = 0
    _why: str = ""
    _suspicious_since: float = 0.0
    _since: float | None = None
    _found: Gathered | None = None
    _gathering: bool = False
    _gather_at: float = 0.0
    _gathers: int = 0
    _tell_at: float = 0.0
    _told: deque[str] = field(default_factory=lambda: deque(maxlen=REPORTS_KEPT))
    _judged: list[str] = field(default_factory=list)
    _turns: int = 0
    _wanted_by: list[Reply] = field(default_factory=list)

    def begin(self, number: int, targets: Sequence[Target], directory: Path) -> None:
        """The group of round `number` runs; its evidence belongs into `directory`."""
        self.end()
        self._number, self._targets, self._directory = number, targets, directory
        self._told.clear()
        self._judged.clear()

    def end(self) -> None:
        """No group runs any more."""
        if self._found is not None:
            self.evidence.drop()  # or it would be of the dead
        if self._since is not None:
            self.report(None)
            self._write(f"reports-{self.node}.jsonl", "".join(line + "\n" for line in self._told))
        self._since, self._found, self._why, self._targets = None, None, "", ()

    def asked(self, number: int, on: bool) -> None:
        """The planner wants to hear of our ranks of round `number`, or wants that no more."""
        self._asked = number if on else 0

    @property
    def open(self) -> bool:
        """True while this node or another one suspects a hang of the group that runs here."""
        return self._since is not None

    def look(self, seen: Seen, deadline_s: float, now: float) -> None:
        """What the ranks do now. Gathers and reports as is due."""
        if seen.number != self._number or not self._targets:
            return
        if seen.pids:
            self._targets = [replace(one, pid=pid) for one, pid in zip(self._targets, seen.pids, strict=True)]
        report = self._of(seen, deadline_s)
        why = hang.suspect(report, self.policy) or ""
        if not why and self._asked != self._number:
            self._calm(now)
            return
        if self._since is None:
            self._since, self._gather_at, self._tell_at = now, now, now
            self._found = None  # what a dump took before says nothing of now
            self._gathers = self._turns = 0
        self._mind(why, now)
        if now >= self._gather_at and not self._gathering:
            self._gather(why or "another node suspects a hang", self._directory)
        if self.local or now >= self._tell_at:
            self._tell(replace(report, why=why, turn=self._turns), now)

    def gathered(self, found: Gathered, now: float) -> None:
        """The evidence is on disk, or as much of it as there was time for."""
        self._gathering = False
        any_found = any(rank.state or rank.source for rank in found.ranks)
        for reply in self._wanted_by:
            reply(found.path if any_found else found.trouble or "the workers were ended meanwhile")
        self._wanted_by.clear()
        if found.number != self._number:
            return
        if found.trouble and self._gathers == 0 and not any(rank.source for rank in found.ranks):
            self._gathers, self._gather_at = 1, now  # the helper came too late for stacks: a busy machine, once more
            return
        self._found = found
        self._gather_at = now + GATHER_S[min(self._gathers, len(GATHER_S) - 1)]
        self._gathers += 1
        self._tell_at = now

    def judged(self, judged: Judged) -> Path | None:
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
        self._judged.append(json.dumps({"verdict": verdict, "reports": reports}))
        if judged.round != self._number:
            return None
        self.verdict, self.verdict_in = verdict, self.evidence.place(self._directory)
        self._write("verdict.json", json.dumps(verdict, indent=1) + "\n")
        self._write("judged.jsonl", "".join(line + "\n" for line in self._judged))
        return self.verdict_in

    def dump(self, out: Path | None, reply: Reply) -> None:
        """Take evidence of a group that nobody suspects; `reply` gets where it is, or why there is none."""
        if not self._targets:
            reply("no workers are running")
        elif self._gathering or self._gather("asked for by elasticd dump", out or self._directory.with_name("dump")):
            self._wanted_by.append(reply)
        else:
            reply("evidence is being taken already; try again in a moment")

    # --- parts ------------------------------------------------------------------------------------------------------

    def _calm(self, now: float) -> None:
        if self._since is not None:
            self.report(None)
        self._mind("", now)
        self._since, self._found = None, None

    def _mind(self, why: str, now: float) -> None:
        """Our own suspicion begins, lasts, or ends: the planner hears of its end at once, and asks nobody any more."""
        if why and not self._why:
            self._suspicious_since = now
            self.listener.suspected(self._number, why)
        if self._why and not why:
            self._tell_at = now
            self.listener.suspicion_over(self._number, now - self._suspicious_since)
        self._why = why

    def _of(self, seen: Seen, deadline_s: float) -> Report:
        facts = {one.rank: one for one in self._found.ranks} if self._found is not None else {}
        ranks = tuple(
            replace(rank, where=one.where, function=one.function, stack=one.stack, evidence=bool(one.source))
            if (one := facts.get(rank.rank)) is not None
            else rank
            for rank in seen.ranks
        )
        return Report(
            seen.number,
            self.node,
            ranks,
            deadline_s=deadline_s,
            gathered=self._found is not None,
            store_state=seen.store_state,
            store_stopped_s=seen.store_stopped_s,
        )

    def _gather(self, why: str, directory: Path) -> bool:
        self._gathering = self.evidence.gather(self._number, self._targets, directory, why)
        return self._gathering

    def _tell(self, report: Report, now: float) -> None:
        self._turns += 1
        pause_s = TELL_S[min(self._turns, len(TELL_S)) - 1]
        self._tell_at = now + min([pause_s, *self._due(report)])
        self._told.append(report.to_json().decode())
        self.report(report)

    def _due(self, report: Report) -> list[float]:
        """In how long a rank will have been stopped, or idle, for as long as counts."""
        limits = [self.policy.stopped_after_s - r.stopped_s for r in report.ranks if r.stopped_s]
        limits.append(self.policy.stopped_after_s - report.store_stopped_s if report.store_stopped_s else 0.0)
        limits += [report.deadline_s - r.idle_s for r in report.ranks]
        return [max(0.05, limit) for limit in limits if limit > 0]

    def _write(self, name: str, text: str) -> None:
        self.evidence.write(self._number, name, text, self._directory)
