"""Where a rank is, told of processes that stand as torch's would: what the stack alone does not say is looked up."""

from __future__ import annotations

import ctypes
import os
import platform
from pathlib import Path

import pytest

from elasticd.heartbeat import record as beat
from elasticd_agent.hangs.collector.record import RankEvidence
from elasticd_agent.hangs.evidence import EvidenceCollector, EvidenceTarget
from tests.hangs.stuck_worker import Posted, StartWorker

# torch's file by its path; how the thread stands in it is the argument's.
GRAPH = """
import time
def _engine_run_backward(how):
    print("ready", flush=True)
    while how == "works":
        pass
    time.sleep(1e6)
"""
BACKWARD = """
import sys
sys.path.insert(0, sys.argv[1])
from torch.autograd.graph import _engine_run_backward
def train():
    _engine_run_backward(sys.argv[2])
train()
"""
WAITS = """
import time
class Work:
    wait = time.sleep
def train():
    print("ready", flush=True)
    Work.wait(1e6)
train()
"""

USERFAULTFD = {"x86_64": 323, "aarch64": 282}.get(platform.machine(), -1)
FAULTS = f"""
import ctypes, fcntl, mmap, os, struct
def train():
    memory = mmap.mmap(-1, mmap.PAGESIZE)
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    fd = ctypes.CDLL(None).syscall({USERFAULTFD}, os.O_CLOEXEC | 1)
    fcntl.ioctl(fd, 0xC018AA3F, bytearray(struct.pack("QQQ", 0xAA, 0, 0)))
    fcntl.ioctl(fd, 0xC020AA00, bytearray(struct.pack("QQQQ", address, mmap.PAGESIZE, 1, 0)))
    print("ready", flush=True)
    memory[:1]
"""
IN_A_THREAD = "import threading, time\nthreading.Thread(target=train).start()\ntime.sleep(1e6)\n"


@pytest.fixture
def joined(tmp_path: Path) -> Path:
    """The beat of a worker that has a process group."""
    path = tmp_path / "beat"
    beat.create(path)
    beat.HeartbeatWriter(path).tick(5, 0)
    return path


def located(evidence: EvidenceCollector, posted: Posted, target: EvidenceTarget, final: Path) -> RankEvidence:
    assert evidence.start_gathering(1, [target], final, "")
    (rank,) = posted.get(timeout=30).ranks
    assert rank.source == "py-spy"
    return rank


@pytest.mark.parametrize(
    ("how", "state", "where", "function"),
    [("waits", "S", "collective", "backward"), ("works", "R", "elsewhere", "train.py:6 train")],
)
def test_backward_is_a_wait_only_when_idle(
    worker: StartWorker,
    evidence: EvidenceCollector,
    posted: Posted,
    tmp_path: Path,
    joined: Path,
    how: str,
    state: str,
    where: str,
    function: str,
) -> None:
    graph = tmp_path / "site-packages" / "torch" / "autograd" / "graph.py"
    graph.parent.mkdir(parents=True)
    graph.write_text(GRAPH)
    for package in (graph.parent, graph.parents[1]):
        (package / "__init__.py").touch()
    (tmp_path / "train.py").write_text(BACKWARD)
    run = "import runpy, sys; runpy.run_path(sys.argv.pop(1))"
    pid = worker(run, str(tmp_path / "train.py"), str(tmp_path / "site-packages"), how, state=state)
    found = located(evidence, posted, EvidenceTarget(0, pid, heartbeat=joined), tmp_path / "log")
    assert (found.where, found.function) == (where, function)


@pytest.mark.parametrize(("has_group", "where"), [(True, "collective"), (False, "elsewhere")])
def test_wait_without_frame_is_found_by_source_line(
    worker: StartWorker,
    evidence: EvidenceCollector,
    posted: Posted,
    tmp_path: Path,
    joined: Path,
    has_group: bool,
    where: str,
) -> None:
    (tmp_path / "train.py").write_text(WAITS)
    pid = worker("import runpy, sys; runpy.run_path(sys.argv[1])", str(tmp_path / "train.py"))
    target = EvidenceTarget(0, pid, heartbeat=joined if has_group else None)
    assert located(evidence, posted, target, tmp_path / "log").where == where


@pytest.mark.parametrize(("steps", "barrier"), [(0, "epoch"), (1, "")])
def test_barrier_is_named_while_the_rank_waits_there(
    worker: StartWorker,
    evidence: EvidenceCollector,
    posted: Posted,
    tmp_path: Path,
    joined: Path,
    steps: int,
    barrier: str,
) -> None:
    writer = beat.HeartbeatWriter(joined)
    writer.set_phase(beat.Phase.BARRIER, "epoch")
    if steps:
        writer.step(steps)
    target = EvidenceTarget(0, worker("import time; print('ready', flush=True); time.sleep(1e6)"), heartbeat=joined)
    assert located(evidence, posted, target, tmp_path / "log").barrier == barrier


def test_source_on_dead_file_system_is_skipped(
    worker: StartWorker, evidence: EvidenceCollector, posted: Posted, tmp_path: Path, joined: Path
) -> None:
    """A pipe in the script's place stands for it: who opens it to read the line waits for ever."""
    script = tmp_path / "train.py"
    script.write_text(WAITS)
    pid = worker("import runpy, sys; runpy.run_path(sys.argv[1])", str(script))
    script.unlink()
    os.mkfifo(script)
    found = located(evidence, posted, EvidenceTarget(0, pid, heartbeat=joined), tmp_path / "log")
    assert (found.where, found.function) == ("elsewhere", "train.py:7 train")


@pytest.mark.parametrize(
    ("source", "loading"),
    [(f"{FAULTS}train()", True), (FAULTS + IN_A_THREAD, True), (WAITS, False)],
    ids=["a page that does not come", "in another thread", "a sleep"],
)
def test_page_that_does_not_come_is_loading(
    worker: StartWorker, evidence: EvidenceCollector, posted: Posted, tmp_path: Path, source: str, loading: bool
) -> None:
    """As one of a mapped file whose server is away: it keeps the GIL."""
    fd = ctypes.CDLL(None).syscall(USERFAULTFD, os.O_CLOEXEC | 1)  # for faults of the process' own code
    if fd < 0:
        pytest.skip("this kernel, or its sandbox, has no userfaultfd")
    os.close(fd)
    pid = worker(source)
    assert located(evidence, posted, EvidenceTarget(0, pid), tmp_path / "final").loading is loading
