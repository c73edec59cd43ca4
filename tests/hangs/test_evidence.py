"""Evidence of real processes, gathered by real helpers in bounded time."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path

from elasticd_agent.hangs.collector.record import RankEvidence
from elasticd_agent.hangs.evidence import EvidenceCollector, EvidenceTarget, GatheredEvidence
from elasticd_agent.system.processes import procfs
from tests.hangs.stuck_worker import MakeEvidence, Posted, StartWorker, Until, functions, published
from tests.tracing import ALLOW, Tracer


def ranks(found: GatheredEvidence) -> dict[int, RankEvidence]:
    return {rank.rank: rank for rank in found.ranks}


SLEEPS = """
import time
def wait_for_nothing():
    print("ready", flush=True)
    time.sleep(1e6)
wait_for_nothing()
"""
SPINS = """
def turn_round():
    print("ready", flush=True)
    while True:
        pass
turn_round()
"""


HOLDS_THE_GIL = """
import ctypes
def call_into_c():
    print("ready", flush=True)
    ctypes.PyDLL(None).sleep(1000000)
call_into_c()
"""
DEAD_LOCK = """
import threading
def wait_for_oneself():
    lock = threading.Lock()
    lock.acquire()
    print("ready", flush=True)
    lock.acquire()
wait_for_oneself()
"""
CATCHES = """
import faulthandler, sys
from signal import SIGRTMAX
faulthandler.register(SIGRTMAX - 3, open(sys.argv[1], "a"))
"""
LEAVES_A_THREAD = """
import ctypes, threading, time
def other():
    print("ready", flush=True)
    time.sleep(1e6)
threading.Thread(target=other).start()
def end():
    ctypes.CDLL(None).pthread_exit(None)
end()
"""
HAS_A_CHILD = """
import os, time
def child_waits():
    print("ready", flush=True)
    time.sleep(1e6)
if os.fork() == 0:
    child_waits()
os.wait()
"""


def test_evidence_of_every_rank(
    worker: StartWorker, evidence: EvidenceCollector, posted: Posted, tmp_path: Path, until: Until
) -> None:
    log, final = tmp_path / "stdout.log", tmp_path / "log" / "round-3" / "evidence"
    log.write_text("".join(f"line {n}\n" for n in range(500)))
    busy, stopped = worker(SPINS, state="R"), worker(SLEEPS)
    os.kill(stopped, signal.SIGSTOP)
    until(lambda: procfs.state(stopped) == "T", 20)
    assert evidence.start_gathering(
        3, [EvidenceTarget(0, busy, (log,)), EvidenceTarget(1, stopped)], final, "nobody has made progress"
    )
    found = posted.get(timeout=30)
    assert (found.round, found.directory, found.trouble) == (3, final, "")
    first, second = ranks(found)[0], ranks(found)[1]
    assert (first.state, first.where, first.source, first.trouble) == ("R", "elsewhere", "py-spy", "")
    assert (second.state, second.where, second.source, second.trouble) == ("T", "elsewhere", "py-spy", "")
    assert first.function.endswith("turn_round")
    assert second.function.endswith("wait_for_nothing")
    assert first.stack
    assert first.stack != second.stack
    assert procfs.state(stopped) == "T"
    record = published(final)
    assert "turn_round" in functions(record[0])
    assert record[0].log == tuple(f"line {n}" for n in range(300, 500))
    assert (record[1].pid, record[1].state, record[1].function) == (stopped, "T", second.function)
    assert {path.stat().st_mode & 0o777 for path in final.iterdir()} == {0o600}
    assert final.stat().st_mode & 0o777 == 0o700


def test_stacks_by_py_spy(worker: StartWorker, evidence: EvidenceCollector, posted: Posted, tmp_path: Path) -> None:
    """Of who holds the GIL in C for ever, and of who waits for its own lock; of children, behind their parent's."""
    pids = [worker(HOLDS_THE_GIL), worker(DEAD_LOCK), worker(HAS_A_CHILD)]
    assert evidence.start_gathering(
        1, [EvidenceTarget(rank, pid) for rank, pid in enumerate(pids)], tmp_path / "log", ""
    )
    found = posted.get(timeout=30)
    assert [rank.function.partition(" ")[2] for rank in found.ranks] == ["call_into_c", "wait_for_oneself", "<module>"]
    assert [rank.source for rank in found.ranks] == ["py-spy"] * 3
    assert "child_waits" in functions(published(tmp_path / "log")[2])


def test_workers_are_not_stopped(
    worker: StartWorker, evidence: EvidenceCollector, posted: Posted, tmp_path: Path
) -> None:
    """A process that has a tracer cannot get another one: who would stop its threads to read them gets nothing here."""
    pid = worker(f"{ALLOW}\n{SPINS}", state="R")
    with Tracer(pid):
        assert evidence.start_gathering(1, [EvidenceTarget(0, pid)], tmp_path / "log", "")
        (rank,) = posted.get(timeout=30).ranks
    assert (rank.source, rank.function.partition(" ")[2]) == ("py-spy", "turn_round")


def test_stacks_by_faulthandler_without_py_spy(
    takes: MakeEvidence, worker: StartWorker, posted: Posted, tmp_path: Path
) -> None:
    file = tmp_path / "stacks"
    asked, silent = worker(CATCHES + SLEEPS, str(file)), worker(SLEEPS)
    evidence = takes(spy="")
    assert evidence.start_gathering(
        1, [EvidenceTarget(0, asked, stacks=file), EvidenceTarget(1, silent, stacks=file)], tmp_path / "log", ""
    )
    first, second = posted.get(timeout=30).ranks
    evidence.close()
    assert (first.source, first.where, first.function) == ("faulthandler", "elsewhere", "<string>:9 wait_for_nothing")
    assert (second.source, second.where, second.stack) == ("", "", "")
    assert "py-spy is not installed" in second.trouble
    assert "faulthandler" in second.trouble
    assert procfs.state(silent) == "S"
    assert "wait_for_nothing" in functions(published(tmp_path / "log")[0])


def test_digest_does_not_depend_on_source(
    takes: MakeEvidence, worker: StartWorker, posted: Posted, tmp_path: Path
) -> None:
    file = tmp_path / "stacks"
    pid, stacks = worker(CATCHES + SLEEPS, str(file)), []
    for spy in (None, ""):
        evidence = takes(spy=spy)
        assert evidence.start_gathering(1, [EvidenceTarget(0, pid, stacks=file)], tmp_path / "log", "")
        stacks.append(posted.get(timeout=30).ranks[0])
        evidence.close()
    assert [one.source for one in stacks] == ["py-spy", "faulthandler"]
    assert stacks[0].stack == stacks[1].stack


def test_ended_rank_does_not_affect_others(
    worker: StartWorker, evidence: EvidenceCollector, posted: Posted, tmp_path: Path, until: Until
) -> None:
    pid, zombie = worker(SLEEPS), worker(SLEEPS)
    os.kill(zombie, signal.SIGKILL)
    until(lambda: procfs.state(zombie) == "Z", 20)
    assert evidence.start_gathering(
        1, [EvidenceTarget(0, zombie), EvidenceTarget(1, pid), EvidenceTarget(2, 0)], tmp_path / "log", ""
    )
    found = posted.get(timeout=30)
    assert [(rank.state, rank.source) for rank in found.ranks] == [("Z", ""), ("S", "py-spy"), ("", "")]
    assert "ended" in found.ranks[0].trouble
    assert published(tmp_path / "log")[0].state == "Z"


def test_zombie_with_living_thread_has_stacks(
    worker: StartWorker, evidence: EvidenceCollector, posted: Posted, tmp_path: Path
) -> None:
    pid = worker(LEAVES_A_THREAD, state="Z")
    assert evidence.start_gathering(1, [EvidenceTarget(0, pid)], tmp_path / "log", "")
    (rank,) = posted.get(timeout=30).ranks
    assert (rank.state, rank.source, rank.function) == ("Z", "py-spy", "<string>:8 end")
    assert "other" in functions(published(tmp_path / "log")[0])


def test_older_stacks_of_ended_process_are_kept(
    worker: StartWorker, evidence: EvidenceCollector, posted: Posted, tmp_path: Path, until: Until
) -> None:
    pid, final = worker(SLEEPS), tmp_path / "log"
    assert evidence.start_gathering(1, [EvidenceTarget(0, pid)], final, "")
    posted.get(timeout=30)
    os.kill(pid, signal.SIGKILL)
    until(lambda: procfs.state(pid) == "Z", 20)
    assert evidence.start_gathering(1, [EvidenceTarget(0, pid)], final, "")
    assert posted.get(timeout=30).ranks[0].source == ""
    (rank,) = published(final).values()
    assert (rank.state, rank.source, "wait_for_nothing" in functions(rank)) == ("Z", "py-spy", True)


def test_name_that_is_no_utf8(worker: StartWorker, evidence: EvidenceCollector, posted: Posted, tmp_path: Path) -> None:
    """Of an open file, for instance: it costs its own letters, and not the evidence."""
    path = os.fsencode(tmp_path) + b"/\xff.bin"
    pid = worker(f"import os; os.open({path!r}, os.O_CREAT)\n{SLEEPS}")
    assert evidence.start_gathering(1, [EvidenceTarget(0, pid)], tmp_path / "log", "")
    assert posted.get(timeout=30).ranks[0].source == "py-spy"
    assert f"{tmp_path}/?.bin" in published(tmp_path / "log")[0].proc["fds"].values()


def test_log_that_is_a_pipe_is_skipped(
    worker: StartWorker, evidence: EvidenceCollector, posted: Posted, tmp_path: Path
) -> None:
    pipe, log = tmp_path / "stdout", tmp_path / "stderr"
    os.mkfifo(pipe)
    log.write_bytes(b"last words\n" + b"\xff" * 9000 + b"\n")
    assert evidence.start_gathering(1, [EvidenceTarget(0, worker(SLEEPS), (pipe, log))], tmp_path / "log", "")
    assert posted.get(timeout=30).trouble == ""
    lines = published(tmp_path / "log")[0].log
    assert "no plain file" in lines[1]
    assert "last words" in lines
    assert max(map(len, lines)) <= 2000


def test_thread_start_failure_is_retried(
    worker: StartWorker, evidence: EvidenceCollector, posted: Posted, tmp_path: Path
) -> None:
    """Whoever asks is the deciding thread: a full process table must not end the job's part on this node."""
    asked = 1, [EvidenceTarget(0, worker(SLEEPS))], tmp_path / "log", ""
    before = threading.stack_size(1 << 46)
    try:
        assert not evidence.start_gathering(*asked)
    finally:
        threading.stack_size(before)
    assert evidence.start_gathering(*asked)
    assert posted.get(timeout=30).ranks[0].source == "py-spy"


def test_one_gathering_at_a_time(
    worker: StartWorker, evidence: EvidenceCollector, posted: Posted, tmp_path: Path
) -> None:
    targets = [EvidenceTarget(0, worker(SLEEPS))]
    assert evidence.start_gathering(1, targets, tmp_path / "log", "")
    assert not evidence.start_gathering(1, targets, tmp_path / "log", "")
    posted.get(timeout=30)
    assert evidence.start_gathering(1, targets, tmp_path / "log", "")
    posted.get(timeout=30)
