"""One node's suspicion: evidence before the first word that says so, nothing left when it is over, dumps answered."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from elasticd_agent.hangs.detector import Suspicion
from elasticd_agent.hangs.evidence import Gathered, RankEvidence, Target
from elasticd_agent.hangs.observer import Seen
from elasticd_agent.model.job import Policy
from elasticd_agent.model.reports import Judged, RankSeen, Report

POLICY = Policy(hang_floor_s=5.0)
TARGETS = (Target(0, 11), Target(1, 12))
HERE = Path("evidence")


@dataclass
class Told:
    """Evidence, the planner and the story at once: keeps what it was asked and told."""

    asked: list[int] = field(default_factory=list)
    dropped: int = 0
    written: list[str] = field(default_factory=list)
    reports: list[Report | None] = field(default_factory=list)
    said: list[str] = field(default_factory=list)

    def gather(self, number: int, targets: Sequence[Target], final: Path, why: str) -> bool:
        self.asked.append(number)
        return True

    def write(self, number: int, name: str, text: str, final: Path) -> None:
        self.written.append(name)

    def place(self, final: Path) -> Path:
        return final

    def drop(self) -> None:
        self.dropped += 1

    def close(self) -> None:
        pass

    def report(self, report: Report | None) -> None:
        self.reports.append(report)

    def suspected(self, number: int, why: str) -> None:
        self.said.append("suspected")

    def suspicion_over(self, number: int, seconds: float) -> None:
        self.said.append("over")


def made(told: Told, *, local: bool = True) -> Suspicion:
    suspicion = Suspicion("a", POLICY, told, told.report, told, local=local)  # type: ignore[arg-type]
    suspicion.begin(3, TARGETS, HERE)
    return suspicion


def look(idle_s: float, number: int = 3) -> Seen:
    ranks = tuple(
        RankSeen(rank, rank, phase="step", step=9, collectives=20, idle_s=idle_s, alive_s=0.1, state="S")
        for rank in (0, 1)
    )
    return Seen(number, (), (), idle_s, ranks)


def found(number: int = 3, *, trouble: str = "", state: str = "S", source: str = "py-spy") -> Gathered:
    ranks = tuple(RankEvidence(rank, "collective", "all_reduce", "x", state, "", source) for rank in (0, 1))
    return Gathered(number, ranks, HERE, 0.2, trouble)


def test_evidence_comes_before_a_report_says_so() -> None:
    told = Told()
    suspicion = made(told)
    suspicion.look(look(0.1), 5.0, 100.0)
    assert (told.asked, told.reports) == ([], [])
    suspicion.look(look(4.0), 5.0, 104.0)
    suspicion.look(look(4.2), 5.0, 104.2)
    assert told.asked == [3], "one at a time"
    assert [r.gathered for r in told.reports if r] == [False, False]
    assert told.said == ["suspected"]
    suspicion.gathered(found(), 104.3)
    suspicion.look(look(4.4), 5.0, 104.4)
    last = told.reports[-1]
    assert last is not None
    assert last.gathered
    assert {(rank.where, rank.evidence) for rank in last.ranks} == {("collective", True)}


def test_what_goes_on_is_taken_back() -> None:
    told = Told()
    suspicion = made(told)
    suspicion.look(look(4.0), 5.0, 104.0)
    suspicion.gathered(found(), 104.3)
    suspicion.look(look(0.0), 5.0, 104.5)
    assert told.reports[-1] is None
    assert told.said == ["suspected", "over"]
    assert not suspicion.open
    suspicion.look(look(4.0), 5.0, 110.0)
    last = told.reports[-1]
    assert last is not None
    assert not last.gathered, "evidence of an older suspicion is none of this one"


def test_who_is_asked_reports_without_a_suspicion_of_its_own() -> None:
    told = Told()
    suspicion = made(told)
    suspicion.asked(3, on=True)
    suspicion.look(look(0.0), 5.0, 100.0)
    assert told.asked == [3]
    assert [r.why for r in told.reports if r] == [""]
    assert told.said == []
    suspicion.asked(3, on=False)
    suspicion.look(look(0.0), 5.0, 101.0)
    assert told.reports[-1] is None
    suspicion.asked(2, on=True)
    suspicion.look(look(0.0), 5.0, 102.0)
    assert told.reports[-1] is None, "another round's question"


@pytest.mark.parametrize("state", ["", "S"])
def test_a_helper_that_came_too_late_for_stacks_is_asked_once_more(state: str) -> None:
    told = Told()
    suspicion = made(told)
    for at in (104.0, 106.0, 108.0):
        suspicion.look(look(at - 100.0), 5.0, at)
        suspicion.gathered(found(trouble="it did not answer within 1.0 s", state=state, source=""), at + 1)
    assert told.asked[:2] == [3, 3]
    gathered = [r.gathered for r in told.reports if r]
    assert gathered[0] is False
    assert gathered[-1] is True, "but then it is judged without"


def test_many_nodes_are_told_less_and_less_often_and_in_time() -> None:
    told = Told()
    suspicion = made(told, local=False)
    at = 103.0
    while at < 163.0:
        suspicion.look(look(at - 100.0), 5.0, at)
        if len(told.asked) == 1 and at == 103.25:
            suspicion.gathered(found(), at)
        at += 0.25
    assert 10 <= len(told.reports) <= 25
    assert any(r is not None and 5.0 <= r.ranks[0].idle_s <= 5.5 for r in told.reports), (
        "as soon as the deadline has come"
    )


def test_the_group_s_end_keeps_what_was_seen() -> None:
    told = Told()
    suspicion = made(told)
    suspicion.look(look(4.0), 5.0, 104.0)
    suspicion.gathered(found(), 104.2)
    judged = Judged(3, (("a", 1, 1),), "blocked", "rank 1", 5.0, True, ())
    assert suspicion.judged(judged) == HERE
    assert suspicion.judged(replace(judged, round=2)) is None, "what it was made of is of another group"
    suspicion.end()
    assert told.dropped == 1
    assert told.written == ["verdict.json", "judged.jsonl", "reports-a.jsonl"]
    assert suspicion.verdict_in == HERE
    assert told.reports[-1] is None
    assert "over" not in told.said, "it does not go on"


@pytest.mark.parametrize("number", [3, 4])
def test_a_dump_is_answered_whatever_became_of_the_round(number: int) -> None:
    told, answers = Told(), []
    suspicion = made(told)
    suspicion.dump(None, answers.append)
    assert answers == []
    suspicion.begin(number, TARGETS, HERE)
    suspicion.gathered(found(), 100.0)
    assert answers == [HERE]


def test_a_dump_of_nothing() -> None:
    told, answers = Told(), []
    suspicion = made(told)
    suspicion.end()
    suspicion.dump(None, answers.append)
    assert answers == ["no workers are running"]
