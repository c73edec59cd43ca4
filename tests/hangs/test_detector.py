"""HangDetector: evidence before the first report, nothing left after a suspicion, replies to dumps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from elasticd_agent.hangs.collector.record import RankEvidence
from elasticd_agent.hangs.detector import HangDetector
from elasticd_agent.hangs.evidence import EvidenceTarget, GatheredEvidence
from elasticd_agent.hangs.observer import Observation
from elasticd_agent.model.job import Policy
from elasticd_agent.model.reports import HangReport, HangVerdict, RankReport

POLICY = Policy(hang_floor_s=5.0)
TARGETS = (EvidenceTarget(0, 11), EvidenceTarget(1, 12))
HERE = Path("evidence")


@dataclass
class FakePeers:
    """Evidence, the planner and the story at once: keeps what it was asked and peers."""

    gathered: list[int] = field(default_factory=list)
    pipes: list[list[object]] = field(default_factory=list)
    dropped: int = 0
    written: list[str] = field(default_factory=list)
    reports: list[HangReport | None] = field(default_factory=list)
    log: list[str] = field(default_factory=list)

    def start_gathering(self, number: int, targets: Sequence[EvidenceTarget], final: Path, why: str) -> bool:
        self.gathered.append(number)
        self.pipes.append([target.pipe for target in targets])
        return True

    def write_later(self, number: int, name: str, text: str, final: Path) -> None:
        self.written.append(name)

    def directory_for(self, final: Path) -> Path:
        return final

    def discard_current(self) -> None:
        self.dropped += 1

    def close(self) -> None:
        pass

    def report(self, report: HangReport | None) -> None:
        self.reports.append(report)

    def hang_suspected(self, number: int, why: str) -> None:
        self.log.append("suspected")

    def suspicion_lasts(self, number: int, why: str) -> None:
        self.log.append("lasts")

    def hang_cleared(self, number: int, seconds: float) -> None:
        self.log.append("over")


def make_detector(peers: FakePeers, *, local: bool = True) -> HangDetector:
    detector = HangDetector("a", POLICY, peers, peers.report, peers, report_every_look=local)  # type: ignore[arg-type]
    detector.group_started(3, TARGETS, HERE)
    return detector


def observation(idle_s: float, number: int = 3) -> Observation:
    ranks = tuple(
        RankReport(rank, rank, phase="step", step=9, collectives=20, idle_s=idle_s, alive_s=0.1, state="S")
        for rank in (0, 1)
    )
    return Observation(number, (), (), idle_s, ranks)


def found(
    number: int = 3, *, trouble: str = "", state: str = "S", source: str | tuple[str, str] = "py-spy"
) -> GatheredEvidence:
    sources = (source, source) if isinstance(source, str) else source
    rank = RankEvidence(0, where="collective", function="all_reduce", stack="x", state=state)
    ranks = tuple(replace(rank, rank=n, source=each) for n, each in enumerate(sources))
    return GatheredEvidence(number, ranks, HERE, 0.2, trouble)


def test_gathered_only_after_evidence() -> None:
    peers = FakePeers()
    detector = make_detector(peers)
    detector.update(observation(0.1), 5.0, 100.0)
    assert (peers.gathered, peers.reports) == ([], [])
    detector.update(observation(4.0), 5.0, 104.0)
    detector.update(observation(4.2), 5.0, 104.2)
    assert peers.gathered == [3], "one at a time"
    assert [r.gathered for r in peers.reports if r] == [False, False]
    assert peers.log == ["suspected"]
    detector.evidence_gathered(found(), 104.3)
    detector.update(observation(4.4), 5.0, 104.4)
    last = peers.reports[-1]
    assert last.gathered
    assert {(rank.where, rank.evidence) for rank in last.ranks} == {("collective", True)}


def test_nccl_writes_its_dump_once_in_a_suspicion() -> None:
    """What it writes looks like work of the rank: with a dump every 15 s an idle one would be slow for ever."""
    peers = FakePeers()
    detector = make_detector(peers)
    detector.group_started(3, (EvidenceTarget(0, 11, pipe="p", dump="d"),), HERE)
    for at in (104.0, 120.0, 140.0, 142.0, 160.0):
        detector.update(observation(0.0 if at == 142.0 else at - 100.0), 5.0, at)
        detector.evidence_gathered(found(), at + 1)
    detector.dump(None, lambda _: None)
    assert peers.pipes == [["p"], [None], [None], ["p"], ["p"]], "the last ones: of another suspicion, and requested"


def test_progress_withdraws_report() -> None:
    peers = FakePeers()
    detector = make_detector(peers)
    detector.update(observation(4.0), 5.0, 104.0)
    detector.evidence_gathered(found(), 104.3)
    detector.update(observation(0.0), 5.0, 104.5)
    assert peers.reports[-1] is None
    assert peers.log == ["suspected", "over"]
    assert not detector.suspected
    detector.update(observation(4.0), 5.0, 110.0)
    last = peers.reports[-1]
    assert not last.gathered, "evidence of an older detector is none of this one"


def test_requested_report_without_suspicion() -> None:
    peers = FakePeers()
    detector = make_detector(peers)
    detector.report_requested(3, on=True)
    detector.update(observation(0.0), 5.0, 100.0)
    assert peers.gathered == [3]
    assert [r.why for r in peers.reports if r] == [""]
    assert peers.log == []
    detector.report_requested(3, on=False)
    detector.update(observation(0.0), 5.0, 101.0)
    assert peers.reports[-1] is None
    detector.report_requested(2, on=True)
    detector.update(observation(0.0), 5.0, 102.0)
    assert peers.reports[-1] is None, "another round's question"


@pytest.mark.parametrize(("state", "source"), [("", ""), ("S", ""), ("S", ("py-spy", ""))])
def test_late_helper_is_retried_once(state: str, source: str | tuple[str, str]) -> None:
    peers = FakePeers()
    detector = make_detector(peers)
    for at in (104.0, 106.0, 108.0):
        detector.update(observation(at - 100.0), 5.0, at)
        detector.evidence_gathered(found(trouble="it did not answer within 1.0 s", state=state, source=source), at + 1)
    assert peers.gathered[:2] == [3, 3]
    gathered = [r.gathered for r in peers.reports if r]
    assert gathered == [False, False, True], "but then it is judged without"


def test_remote_reports_get_rarer_but_meet_deadline() -> None:
    peers = FakePeers()
    detector = make_detector(peers, local=False)
    at = 103.0
    while at < 163.0:
        detector.update(observation(at - 100.0), 5.0, at)
        if len(peers.gathered) == 1 and at == 103.25:
            detector.evidence_gathered(found(), at)
        at += 0.25
    assert 10 <= len(peers.reports) <= 25
    assert any(r is not None and 5.0 <= r.ranks[0].idle_s <= 5.5 for r in peers.reports), (
        "as soon as the deadline has come"
    )


def test_end_writes_reports_and_verdict() -> None:
    peers = FakePeers()
    detector = make_detector(peers)
    detector.update(observation(4.0), 5.0, 104.0)
    detector.evidence_gathered(found(), 104.2)
    judged = HangVerdict(3, (("a", 1, 1),), "blocked", "rank 1", 5.0, True, ())
    assert detector.write_verdict(judged) == HERE
    assert detector.write_verdict(replace(judged, round=2)) is None, "what it was made of is of another group"
    detector.group_ended()
    assert peers.dropped == 1
    assert peers.written == ["verdict.json", "reports-a.jsonl"]
    assert detector.last_verdict_dir == HERE
    assert peers.reports[-1] is None
    assert "over" not in peers.log, "it does not go on"


@pytest.mark.parametrize("number", [3, 4])
def test_dump_reply_after_round_change(number: int) -> None:
    peers, answers = FakePeers(), []
    detector = make_detector(peers)
    detector.dump(None, answers.append)
    assert answers == []
    detector.group_started(number, TARGETS, HERE)
    detector.evidence_gathered(found(), 100.0)
    assert answers == [HERE]


def test_dump_without_workers() -> None:
    peers, answers = FakePeers(), []
    detector = make_detector(peers)
    detector.group_ended()
    detector.dump(None, answers.append)
    assert answers == ["no workers are running"]


def test_group_that_is_about_to_start_is_reported() -> None:
    """Other nodes' ranks wait for it, while a GPU's memory is not free for example. It is not idle."""
    peers = FakePeers()
    detector = make_detector(peers, local=False)
    detector.group_expected(4)
    detector.update(observation(0.0, 4), 2.0, 1.0)
    assert peers.reports == [], "no other node waits"
    detector.report_requested(4, True)
    detector.update(observation(0.0, 4), 2.0, 2.0)
    (report,) = peers.reports
    assert (report.round, report.why, [rank.idle_s for rank in report.ranks]) == (4, "", [0.0, 0.0])
    assert peers.gathered == []
    detector.group_started(4, TARGETS, HERE)
    assert peers.reports[-1] is None
    detector.update(observation(6.0, 4), 2.0, 8.0)
    assert peers.gathered == [4]
