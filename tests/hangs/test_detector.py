"""One node's suspicion: evidence before the first word that says so, nothing left when it is over, dumps answered."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from elasticd_agent.hangs.detector import HangDetector
from elasticd_agent.hangs.evidence import EvidenceTarget, GatheredEvidence, RankEvidence
from elasticd_agent.hangs.observer import Observation
from elasticd_agent.model.job import Policy
from elasticd_agent.model.reports import HangReport, HangVerdict, RankReport

POLICY = Policy(hang_floor_s=5.0)
TARGETS = (EvidenceTarget(0, 11), EvidenceTarget(1, 12))
HERE = Path("evidence")


@dataclass
class FakePeers:
    """Evidence, the planner and the story at once: keeps what it was asked and told."""

    gathered: list[int] = field(default_factory=list)
    dropped: int = 0
    written: list[str] = field(default_factory=list)
    reports: list[HangReport | None] = field(default_factory=list)
    log: list[str] = field(default_factory=list)

    def gather(self, number: int, targets: Sequence[EvidenceTarget], final: Path, why: str) -> bool:
        self.gathered.append(number)
        return True

    def write(self, number: int, name: str, text: str, final: Path) -> None:
        self.written.append(name)

    def directory_for(self, final: Path) -> Path:
        return final

    def discard(self) -> None:
        self.dropped += 1

    def close(self) -> None:
        pass

    def report(self, report: HangReport | None) -> None:
        self.reports.append(report)

    def hang_suspected(self, number: int, why: str) -> None:
        self.log.append("suspected")

    def hang_cleared(self, number: int, seconds: float) -> None:
        self.log.append("over")


def make_detector(told: FakePeers, *, local: bool = True) -> HangDetector:
    suspicion = HangDetector("a", POLICY, told, told.report, told, report_every_look=local)  # type: ignore[arg-type]
    suspicion.begin(3, TARGETS, HERE)
    return suspicion


def observation(idle_s: float, number: int = 3) -> Observation:
    ranks = tuple(
        RankReport(rank, rank, phase="step", step=9, collectives=20, idle_s=idle_s, alive_s=0.1, state="S")
        for rank in (0, 1)
    )
    return Observation(number, (), (), idle_s, ranks)


def found(number: int = 3, *, trouble: str = "", state: str = "S", source: str = "py-spy") -> GatheredEvidence:
    ranks = tuple(RankEvidence(rank, "collective", "all_reduce", "x", state, "", source) for rank in (0, 1))
    return GatheredEvidence(number, ranks, HERE, 0.2, trouble)


def test_evidence_comes_before_a_report_says_so() -> None:
    told = FakePeers()
    suspicion = make_detector(told)
    suspicion.update(observation(0.1), 5.0, 100.0)
    assert (told.gathered, told.reports) == ([], [])
    suspicion.update(observation(4.0), 5.0, 104.0)
    suspicion.update(observation(4.2), 5.0, 104.2)
    assert told.gathered == [3], "one at a time"
    assert [r.gathered for r in told.reports if r] == [False, False]
    assert told.log == ["suspected"]
    suspicion.evidence_gathered(found(), 104.3)
    suspicion.update(observation(4.4), 5.0, 104.4)
    last = told.reports[-1]
    assert last is not None
    assert last.gathered
    assert {(rank.where, rank.evidence) for rank in last.ranks} == {("collective", True)}


def test_what_goes_on_is_taken_back() -> None:
    told = FakePeers()
    suspicion = make_detector(told)
    suspicion.update(observation(4.0), 5.0, 104.0)
    suspicion.evidence_gathered(found(), 104.3)
    suspicion.update(observation(0.0), 5.0, 104.5)
    assert told.reports[-1] is None
    assert told.log == ["suspected", "over"]
    assert not suspicion.suspected
    suspicion.update(observation(4.0), 5.0, 110.0)
    last = told.reports[-1]
    assert last is not None
    assert not last.gathered, "evidence of an older suspicion is none of this one"


def test_who_is_asked_reports_without_a_suspicion_of_its_own() -> None:
    told = FakePeers()
    suspicion = make_detector(told)
    suspicion.report_requested(3, on=True)
    suspicion.update(observation(0.0), 5.0, 100.0)
    assert told.gathered == [3]
    assert [r.why for r in told.reports if r] == [""]
    assert told.log == []
    suspicion.report_requested(3, on=False)
    suspicion.update(observation(0.0), 5.0, 101.0)
    assert told.reports[-1] is None
    suspicion.report_requested(2, on=True)
    suspicion.update(observation(0.0), 5.0, 102.0)
    assert told.reports[-1] is None, "another round's question"


@pytest.mark.parametrize("state", ["", "S"])
def test_a_helper_that_came_too_late_for_stacks_is_asked_once_more(state: str) -> None:
    told = FakePeers()
    suspicion = make_detector(told)
    for at in (104.0, 106.0, 108.0):
        suspicion.update(observation(at - 100.0), 5.0, at)
        suspicion.evidence_gathered(found(trouble="it did not answer within 1.0 s", state=state, source=""), at + 1)
    assert told.gathered[:2] == [3, 3]
    gathered = [r.gathered for r in told.reports if r]
    assert gathered[0] is False
    assert gathered[-1] is True, "but then it is judged without"


def test_many_nodes_are_told_less_and_less_often_and_in_time() -> None:
    told = FakePeers()
    suspicion = make_detector(told, local=False)
    at = 103.0
    while at < 163.0:
        suspicion.update(observation(at - 100.0), 5.0, at)
        if len(told.gathered) == 1 and at == 103.25:
            suspicion.evidence_gathered(found(), at)
        at += 0.25
    assert 10 <= len(told.reports) <= 25
    assert any(r is not None and 5.0 <= r.ranks[0].idle_s <= 5.5 for r in told.reports), (
        "as soon as the deadline has come"
    )


def test_the_group_s_end_keeps_what_was_seen() -> None:
    told = FakePeers()
    suspicion = make_detector(told)
    suspicion.update(observation(4.0), 5.0, 104.0)
    suspicion.evidence_gathered(found(), 104.2)
    judged = HangVerdict(3, (("a", 1, 1),), "blocked", "rank 1", 5.0, True, ())
    assert suspicion.hang_found(judged) == HERE
    assert suspicion.hang_found(replace(judged, round=2)) is None, "what it was made of is of another group"
    suspicion.end()
    assert told.dropped == 1
    assert told.written == ["verdict.json", "judged.jsonl", "reports-a.jsonl"]
    assert suspicion.last_verdict_dir == HERE
    assert told.reports[-1] is None
    assert "over" not in told.log, "it does not go on"


@pytest.mark.parametrize("number", [3, 4])
def test_a_dump_is_answered_whatever_became_of_the_round(number: int) -> None:
    told, answers = FakePeers(), []
    suspicion = make_detector(told)
    suspicion.dump(None, answers.append)
    assert answers == []
    suspicion.begin(number, TARGETS, HERE)
    suspicion.evidence_gathered(found(), 100.0)
    assert answers == [HERE]


def test_a_dump_of_nothing() -> None:
    told, answers = FakePeers(), []
    suspicion = make_detector(told)
    suspicion.end()
    suspicion.dump(None, answers.append)
    assert answers == ["no workers are running"]
