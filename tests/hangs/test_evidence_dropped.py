"""Evidence whose processes are ended during gathering is dropped; earlier evidence stays."""

from __future__ import annotations

import os
import signal
from pathlib import Path

from elasticd_agent.hangs.evidence import EvidenceCollector, EvidenceTarget
from tests.hangs.stuck_worker import MakeEvidence, Posted, StartWorker
from tests.hangs.test_evidence import SLEEPS


def test_discard_keeps_complete_evidence(
    worker: StartWorker, evidence: EvidenceCollector, posted: Posted, tmp_path: Path
) -> None:
    pid = worker(SLEEPS)
    final, targets = tmp_path / "round-3" / "evidence", [EvidenceTarget(0, pid)]
    assert evidence.start_gathering(3, targets, final, "quiet")
    assert posted.get(timeout=20).ranks[0].source
    before = {path.name: path.stat().st_mtime_ns for path in final.iterdir()}
    assert evidence.start_gathering(3, targets, final, "still quiet")
    evidence.discard_current()
    os.kill(pid, signal.SIGKILL)
    assert posted.get(timeout=20).trouble == ""
    assert {path.name: path.stat().st_mtime_ns for path in final.iterdir()} == before
    assert evidence.start_gathering(3, [], final, "nothing is left to drop"), "and the next one is not"
    posted.get(timeout=20)


def test_discard_without_gathering(
    worker: StartWorker, evidence: EvidenceCollector, posted: Posted, tmp_path: Path
) -> None:
    pid = worker(SLEEPS)
    evidence.discard_current()
    assert evidence.start_gathering(3, [EvidenceTarget(0, pid)], tmp_path / "evidence", "quiet")
    assert posted.get(timeout=20).ranks[0].source, "a drop is of what is being taken, not of what comes"


def test_close_during_gathering_is_no_trouble(
    takes: MakeEvidence, worker: StartWorker, posted: Posted, tmp_path: Path
) -> None:
    """As when a job ends while one of its nodes was about to be suspicious."""
    evidence = takes(job="job", temporary=tmp_path)
    assert evidence.start_gathering(
        3, [EvidenceTarget(0, worker(SLEEPS))], tmp_path / "log" / "round-3" / "evidence", "quiet"
    )
    evidence.close()
    assert posted.get(timeout=20).trouble == ""
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith("elasticd-evidence")] == []
