"""Evidence whose processes are ended during gathering is dropped; earlier evidence stays."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from elasticd_agent.hangs.evidence import EvidenceCollector, EvidenceTarget
from elasticd_agent.system.installation import program
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


@pytest.mark.system
def test_slow_helper_writes_while_the_job_ends(
    takes: MakeEvidence, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a busy machine it takes some seconds to start, and its directory is not dead."""
    slow = tmp_path / "slow.py"
    run = f"runpy.run_path({program('evidence_collector')!r}, run_name='__main__')"
    slow.write_text(f"import runpy, time\ntime.sleep(4)\n{run}\n")
    monkeypatch.setattr("elasticd_agent.hangs.evidence.program", lambda name: str(slow))
    evidence = takes(job="job", temporary=tmp_path)
    evidence.write_later(3, "reports-a.jsonl", "{}", tmp_path / "log" / "round-3" / "evidence")
    evidence.close()
    assert (tmp_path / "log" / "round-3" / "evidence" / "reports-a.jsonl").read_text() == "{}"


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
