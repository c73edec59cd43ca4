"""Evidence in bounded time: a py-spy, a directory or a helper that does not answer costs what it would have told."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from elasticd_agent.hangs import evidence as module
from elasticd_agent.hangs.causes import DUMP_REASON
from elasticd_agent.hangs.collector import files as disk
from elasticd_agent.hangs.evidence import EvidenceTarget
from elasticd_agent.system.processes import procfs
from tests.hangs.stuck_worker import MakeEvidence, Posted, StartWorker, Until, published

SLEEPS = "import time; print('ready', flush=True); time.sleep(1e6)"
MARGIN_S = 10.0
"""What killing, reaping and a crowded machine may take beyond the budget."""


@pytest.fixture
def dead_spy(tmp_path: Path) -> str:
    """A py-spy that never answers, nor does what it has started."""
    path = tmp_path / "py-spy"
    path.write_text("#!/bin/sh\nsleep 1000 &\nwait\n")
    path.chmod(0o700)
    return str(path)


def blocked(final: Path) -> Path:
    """A directory in which one file cannot be opened: who tries waits for ever, as on a dead NFS mount."""
    final.mkdir(parents=True)
    for name in ("evidence-a.json", "verdict.json"):
        os.mkfifo(final / f"{name}.part")
    return final


def helpers(*but_for: int) -> set[int]:
    """The children of this process that lead a session, but for those."""
    me = os.getpid()
    return {pid for pid, one in procfs.scan().items() if one.parent == me and one.session == pid} - set(but_for)


def test_budget_when_py_spy_hangs(
    takes: MakeEvidence, worker: StartWorker, posted: Posted, tmp_path: Path, dead_spy: str
) -> None:
    evidence = takes(1.5, spy=dead_spy)
    pids = [worker(SLEEPS), worker(SLEEPS)]
    began = time.monotonic()
    assert evidence.start_gathering(
        1, [EvidenceTarget(rank, pid) for rank, pid in enumerate(pids)], tmp_path / "log", ""
    )
    assert time.monotonic() - began < MARGIN_S
    found = posted.get(timeout=30)
    assert found.took_s < 1.5 + MARGIN_S
    for rank in found.ranks:
        assert (rank.state, rank.source) == ("S", "")
        assert rank.trouble
    evidence.close()
    assert helpers(*pids) == set()


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A directory's second attempt is short."""
    monkeypatch.setattr(module, "PUBLISH_RETRY_TIMEOUT_S", 1.0)


def test_dead_log_directory_redirects_evidence(
    takes: MakeEvidence,
    worker: StartWorker,
    posted: Posted,
    tmp_path: Path,
    impatient: None,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The result does not wait for the second attempt, and one message names the place."""
    elsewhere = tmp_path / f"elasticd-evidence-{os.getuid()}" / "job"
    evidence = takes(5.0, job="job", temporary=tmp_path)
    final, pid = blocked(tmp_path / "log" / "round-7" / "evidence"), worker(SLEEPS)
    assert evidence.start_gathering(7, [EvidenceTarget(0, pid)], final, "")
    found = posted.get(timeout=30)
    assert found.took_s < 5.0 + MARGIN_S
    assert found.ranks[0].source == "py-spy"
    assert (found.directory, found.trouble, found.lacked_time) == (final, "", False)
    evidence.write_later(7, "verdict.json", "{}\n", final)
    evidence.close()
    place = elsewhere / "round-7" / "evidence"
    assert evidence.directory_for(final) == place
    assert sorted(path.name for path in place.iterdir()) == ["evidence-a.json", "verdict.json"]
    said = f"the evidence of round 7 is in {place}: {final} cannot be written: it did not answer within 1.0 s"
    assert caplog.messages == [said]
    assert elsewhere.parent.stat().st_mode & 0o777 == 0o700
    assert list((tmp_path / "scratch" / "evidence").iterdir()) == []
    assert helpers(pid) == set()


@pytest.mark.parametrize("left", [True, False])
def test_publishing_after_budget_is_spent(
    left: bool,
    takes: MakeEvidence,
    worker: StartWorker,
    posted: Posted,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A helper needs a moment to start, more on a busy machine, which does not make the directory a dead one."""
    monkeypatch.setattr(module, "GATHER_PART", 9.0)
    monkeypatch.setattr(module, "KILL_PART", 1.0)  # it would go on, and nothing of the budget is left for the way
    if not left:
        monkeypatch.setattr(module, "MIN_PUBLISH_S", 0.0)
    spy = tmp_path / "py-spy"
    spy.write_text("#!/bin/sh\nsleep 1000\n")
    spy.chmod(0o700)
    evidence = takes(0.5, spy=str(spy), temporary=tmp_path)
    final, pid = tmp_path / "log" / "round-7" / "evidence", worker(SLEEPS)
    assert evidence.start_gathering(7, [EvidenceTarget(0, pid)], final, "")
    assert posted.get(timeout=30).lacked_time
    assert (final / "evidence-a.json").exists() is left
    evidence.close()
    assert published(final)[0].trouble.startswith("it did not answer within 0.")
    assert evidence.directory_for(final) == final, "the second attempt has time"


def test_time_doubles_after_late_gathering(
    takes: MakeEvidence, worker: StartWorker, posted: Posted, tmp_path: Path
) -> None:
    """A machine that is too busy for the first two gatherings has the stacks of a later one."""
    spy, calls = tmp_path / "py-spy", tmp_path / "calls"
    slow = f"echo >>{calls}; [ $(wc -l <{calls}) -gt 2 ] || sleep 1000"
    spy.write_text(f'#!/bin/sh\n{slow}\nexec {module.find_py_spy()} "$@"\n')
    spy.chmod(0o700)
    evidence = takes(1.0, spy=str(spy))
    target = EvidenceTarget(0, worker(SLEEPS))
    found = []
    while not found or (found[-1].lacked_time and len(found) < 8):
        assert evidence.start_gathering(1, [target], tmp_path / "log", "")
        found.append(posted.get(timeout=30))
    assert [each.lacked_time for each in found[:2]] == [True, True]
    assert found[1].took_s > 1.0, "more than the first budget"
    assert (found[-1].lacked_time, found[-1].ranks[0].source) == (False, "py-spy")
    assert "did not answer within" in found[0].ranks[0].trouble


def test_directory_without_replacement_is_named_once(
    takes: MakeEvidence, worker: StartWorker, tmp_path: Path, impatient: None, caplog: pytest.LogCaptureFixture
) -> None:
    """Without a log directory the evidence belongs where it would go otherwise."""
    evidence = takes(job="job", temporary=tmp_path)
    final = blocked(tmp_path / f"elasticd-evidence-{os.getuid()}" / "job" / "round-7" / "evidence")
    evidence.write_later(7, "verdict.json", "{}\n", final)
    until_idle = time.monotonic() + 20
    while not caplog.messages and time.monotonic() < until_idle:
        time.sleep(0.05)
    evidence.close()
    assert caplog.messages == [
        f"verdict.json of round 7 is lost: {final} cannot be written: it did not answer within 1.0 s"
    ]


def test_files_for_dead_directory_are_redirected(takes: MakeEvidence, posted: Posted, tmp_path: Path) -> None:
    evidence = takes(0.5, job="job", temporary=tmp_path)  # what is to be written elsewhere is, although this closes
    final = blocked(tmp_path / "log" / "round-7" / "evidence")
    began = time.monotonic()
    evidence.write_later(7, "verdict.json", "{}\n", final)
    assert time.monotonic() - began < MARGIN_S
    evidence.close()
    elsewhere = tmp_path / f"elasticd-evidence-{os.getuid()}" / "job"
    assert (elsewhere / "round-7" / "evidence" / "verdict.json").read_text() == "{}\n"


def test_killed_helper_costs_only_its_reports(
    takes: MakeEvidence, worker: StartWorker, posted: Posted, tmp_path: Path, dead_spy: str, until: Until
) -> None:
    evidence = takes(spy=dead_spy)
    pid = worker(SLEEPS)
    assert evidence.start_gathering(1, [EvidenceTarget(0, pid)], tmp_path / "log", "")
    (helper,) = until(lambda: helpers(pid), 20)  # type: ignore[misc]
    os.kill(helper, signal.SIGKILL)
    found = posted.get(timeout=30)
    assert "the helper ended" in found.trouble
    assert (found.ranks[0].state, found.ranks[0].source) == ("S", "")
    assert evidence.start_gathering(1, [EvidenceTarget(0, pid)], tmp_path / "log", "")
    evidence.close()


def test_close_does_not_wait_for_gathering(
    takes: MakeEvidence, worker: StartWorker, tmp_path: Path, dead_spy: str, until: Until
) -> None:
    evidence = takes(1000.0, spy=dead_spy)
    pid = worker(SLEEPS)
    assert evidence.start_gathering(1, [EvidenceTarget(0, pid)], tmp_path / "log", "")
    until(lambda: helpers(pid), 20)
    began = time.monotonic()
    evidence.close()
    assert time.monotonic() - began < MARGIN_S
    assert not evidence.start_gathering(1, [], tmp_path / "log", "")
    assert "elasticd-evidence" not in [thread.name for thread in threading.enumerate()]


def test_close_writes_pending_files(takes: MakeEvidence, posted: Posted, tmp_path: Path) -> None:
    evidence = takes()
    final = tmp_path / "log" / "round-1" / "evidence"
    for n in range(3):
        evidence.write_later(1, f"file-{n}", f"{n}\n", final)
    evidence.write_later(1, "file-0", "another\n", final)
    evidence.write_later(2, "other", "", tmp_path / "log" / "round-2" / "evidence")
    evidence.close()
    assert {path.name: path.read_text() for path in final.iterdir()} == {
        "file-0": "another\n",
        "file-1": "1\n",
        "file-2": "2\n",
    }
    assert (tmp_path / "log" / "round-2" / "evidence" / "other").stat().st_mode & 0o777 == 0o600


def test_rotation_keeps_newest_rounds(takes: MakeEvidence, worker: StartWorker, posted: Posted, tmp_path: Path) -> None:
    evidence = takes(keep=2)
    pid, log = worker(SLEEPS), tmp_path / "log"
    (log / "round-11" / "rank-0").mkdir(parents=True)
    for number in (9, 10, 12):
        assert evidence.start_gathering(number, [EvidenceTarget(0, pid)], log / f"round-{number}" / "evidence", "")
        assert posted.get(timeout=30).trouble == ""
    evidence.close()
    assert len(list(log.glob("round-*/evidence/evidence-a.json"))) == 2
    assert not (log / "round-9" / "evidence").exists()
    assert (log / "round-9").exists()
    assert (log / "round-11" / "rank-0").exists()


def test_link_in_world_writable_directory(takes: MakeEvidence, posted: Posted, tmp_path: Path) -> None:
    (tmp_path / "theirs").mkdir()
    (tmp_path / "tmp").mkdir()
    (tmp_path / "tmp").chmod(0o1777)
    (tmp_path / "tmp" / "evidence").symlink_to(tmp_path / "theirs")
    evidence = takes(temporary=tmp_path / "aside")
    evidence.write_later(1, "verdict.json", "{}", tmp_path / "tmp" / "evidence" / "round-1")
    evidence.close()
    assert list((tmp_path / "theirs").iterdir()) == []
    assert [path.name for path in (tmp_path / "aside").rglob("verdict.json")] == ["verdict.json"]


def test_dead_directory_is_tried_twice(
    takes: MakeEvidence, worker: StartWorker, posted: Posted, tmp_path: Path, impatient: None
) -> None:
    """And no more; a person who requests a dump is told where it is at last."""
    evidence = takes(1.5, job="job", temporary=tmp_path)
    final, pid = blocked(tmp_path / "log" / "round-7" / "evidence"), worker(SLEEPS)
    place = tmp_path / f"elasticd-evidence-{os.getuid()}" / "job" / "round-7" / "evidence"
    for why, path in (("quiet", final), ("quiet", place), (DUMP_REASON, place)):
        assert evidence.start_gathering(7, [EvidenceTarget(0, pid)], final, why)
        found = posted.get(timeout=30)
        assert (found.directory, found.trouble) == (path, "")
    assert (place / "evidence-a.json").exists()
    other = blocked(tmp_path / "log" / "round-7" / "dump")
    assert evidence.start_gathering(7, [EvidenceTarget(0, pid)], other, DUMP_REASON)
    dumped = posted.get(timeout=30).directory
    assert dumped == place.with_name("dump")
    assert (dumped / "evidence-a.json").exists()


def test_unwritable_scratch_is_reported(
    takes: MakeEvidence, worker: StartWorker, posted: Posted, tmp_path: Path
) -> None:
    (tmp_path / "scratch").write_text("in the way")
    evidence = takes()
    assert evidence.start_gathering(1, [EvidenceTarget(0, worker(SLEEPS))], tmp_path / "log", "")
    found = posted.get(timeout=30)
    assert "no evidence" in found.trouble
    assert (found.ranks[0].state, found.ranks[0].source) == ("S", "")
    assert evidence.start_gathering(1, [], tmp_path / "log", "")
    posted.get(timeout=30)


def test_orphaned_helper_ends_by_itself(tmp_path: Path) -> None:
    """It waits for its request here, which stands for whatever it could be stuck in."""
    entry = Path(module.__file__).with_name("collector") / "__main__.py"
    with subprocess.Popen([sys.executable, "-I", "-S", str(entry), "publish", "0.2"], stdin=subprocess.PIPE) as helper:
        assert helper.wait(20) == -signal.SIGALRM


def test_full_disk_keeps_previous_file(tmp_path: Path) -> None:
    path = tmp_path / "rank-0.log"
    disk.write_atomically(str(path), b"before")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # as a full disk does: first a short write, then an error
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
        with pytest.raises(OSError, match="too large"):
            disk.write_atomically(str(path), b"x" * 2000)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, before)
    assert path.read_bytes() == b"before"
    assert os.listdir(tmp_path) == [path.name]
