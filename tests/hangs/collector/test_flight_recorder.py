"""The flight recorder's content: asked of the background thread through the beat, and of NCCL through its pipe."""

from __future__ import annotations

import json
import os
import pickle
from pathlib import Path

import pytest

from elasticd.heartbeat import record as beat
from elasticd_agent.hangs.evidence import EvidenceCollector, EvidenceTarget, GatheredEvidence
from tests.hangs.stuck_worker import MakeEvidence, Posted, StartWorker, published

REPO = str(Path(__file__).parents[3])
# The background thread's side of the beat: it counts, and writes when it is asked to.
ANSWERS = f"""
import os, sys, time
sys.path.append({REPO!r})
from elasticd.heartbeat.record import HeartbeatWriter
writer = HeartbeatWriter(sys.argv[1])
print("ready", flush=True)
while True:
    writer.tick(7, 0)
    if writer.dump_requested != writer.dump_done:
        with open(sys.argv[2], "w") as file:
            file.write('{{"entries": [1], "recorder": "nccl"}}')
        writer.dump_done = writer.dump_requested
    time.sleep(0.05)
"""
ANSWERS_LATE = ANSWERS.replace("        with open", "        time.sleep(float(sys.argv[3]))\n        with open")
COUNTED_ONCE = f"""
import sys, time
sys.path.append({REPO!r})
from elasticd.heartbeat.record import HeartbeatWriter
HeartbeatWriter(sys.argv[1]).tick(7, 0)
print("ready", flush=True)
time.sleep(1e6)
"""
# NCCL's monitor thread: a byte through the pipe, and it writes a pickle.
MONITOR = """
import os, pickle, sys, time
os.mkfifo(sys.argv[1])
fd = os.open(sys.argv[1], os.O_RDWR)
print("ready", flush=True)
while os.read(fd, 1):
    time.sleep(0.3)
    with open(sys.argv[2], "wb") as file:
        pickle.dump({"version": "2.10", "entries": [{"collective_seq_id": 5, "sizes": (2, 3)}]}, file)
"""


def gathered(
    evidence: EvidenceCollector, posted: Posted, target: EvidenceTarget, final: Path
) -> tuple[GatheredEvidence, Path]:
    assert evidence.start_gathering(1, [target], final, "")
    return posted.get(timeout=30), final / f"rank-{target.rank}.flight.json"


def pickled(tmp_path: Path) -> object:
    """The dump of NCCL's own beside the evidence."""
    return pickle.loads((tmp_path / "log" / "rank-0.nccl").read_bytes())


def test_dump_by_heartbeat_thread(
    worker: StartWorker, evidence: EvidenceCollector, posted: Posted, tmp_path: Path
) -> None:
    path, flight = tmp_path / "beat", tmp_path / "flight"
    beat.create(path)
    target = EvidenceTarget(2, worker(ANSWERS, str(path), str(flight)), heartbeat=path, flight=flight)
    found, recorded = gathered(evidence, posted, target, tmp_path / "log")
    assert json.loads(recorded.read_text()) == {"entries": [1], "recorder": "nccl"}
    rank = published(tmp_path / "log")[2]
    assert (rank.phase, rank.collectives) == ("starting", 7)
    assert found.ranks[0].source == "py-spy"


def test_heartbeat_thread_without_answer(
    worker: StartWorker, evidence: EvidenceCollector, posted: Posted, tmp_path: Path
) -> None:
    path = tmp_path / "beat"
    beat.create(path)
    target = EvidenceTarget(0, worker(COUNTED_ONCE, str(path)), heartbeat=path, flight=tmp_path / "flight")
    found, recorded = gathered(evidence, posted, target, tmp_path / "log")
    assert not recorded.exists()
    assert found.trouble == ""
    assert found.took_s < 10


@pytest.mark.parametrize(("seconds", "late"), [(3.0, False), (1e6, True)])
def test_heartbeat_thread_that_writes_slowly(
    worker: StartWorker, takes: MakeEvidence, posted: Posted, tmp_path: Path, seconds: float, late: bool
) -> None:
    """As on a busy machine: it has all of the time for evidence, and more of it the next time."""
    path, flight = tmp_path / "beat", tmp_path / "flight"
    beat.create(path)
    pid = worker(ANSWERS_LATE, str(path), str(flight), str(seconds))
    evidence = takes(2.0 if late else 20.0)
    target = EvidenceTarget(2, pid, heartbeat=path, flight=flight)
    found, recorded = gathered(evidence, posted, target, tmp_path / "log")
    assert (recorded.exists(), found.lacked_time) == (not late, late)


def test_dump_by_nccl_pipe(worker: StartWorker, evidence: EvidenceCollector, posted: Posted, tmp_path: Path) -> None:
    """It is kept beside that of the heartbeat thread, for torch's own tools."""
    path, flight, pipe, dump = (tmp_path / name for name in ("beat", "flight", "nccl.pipe", "nccl_trace"))
    beat.create(path)
    dump.write_bytes(pickle.dumps({"entries": ["of another time"]}))
    worker(MONITOR, str(pipe), str(dump))
    pid = worker(ANSWERS, str(path), str(flight))
    target = EvidenceTarget(0, pid, heartbeat=path, flight=flight, pipe=pipe, dump=dump)
    _, recorded = gathered(evidence, posted, target, tmp_path / "log")
    assert json.loads(recorded.read_text())["recorder"] == "nccl"
    assert pickled(tmp_path) == {"version": "2.10", "entries": [{"collective_seq_id": 5, "sizes": (2, 3)}]}


def test_nccl_pipe_without_reader(
    worker: StartWorker, evidence: EvidenceCollector, posted: Posted, tmp_path: Path
) -> None:
    pipe = tmp_path / "nccl.pipe"
    os.mkfifo(pipe)
    pid = worker("import time; print('ready', flush=True); time.sleep(1e6)")
    found, recorded = gathered(
        evidence, posted, EvidenceTarget(0, pid, pipe=pipe, dump=tmp_path / "dump"), tmp_path / "log"
    )
    assert not recorded.exists()
    assert found.took_s < 10


def test_heartbeat_thread_after_a_silent_pipe(
    worker: StartWorker, evidence: EvidenceCollector, posted: Posted, tmp_path: Path
) -> None:
    """NCCL's thread may be read in a longer interval; both are asked in the time for evidence."""
    path, flight, pipe = tmp_path / "beat", tmp_path / "flight", tmp_path / "nccl.pipe"
    beat.create(path)
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDWR)
    target = EvidenceTarget(
        2, worker(ANSWERS, str(path), str(flight)), heartbeat=path, flight=flight, pipe=pipe, dump=tmp_path / "dump"
    )
    _, recorded = gathered(evidence, posted, target, tmp_path / "log")
    os.close(reader)
    assert json.loads(recorded.read_text()) == {"entries": [1], "recorder": "nccl"}


def test_older_nccl_dump_is_kept_and_proves_nothing(
    worker: StartWorker, evidence: EvidenceCollector, posted: Posted, tmp_path: Path
) -> None:
    """The rank may have issued what it lacks in there since."""
    pipe, dump = tmp_path / "nccl.pipe", tmp_path / "nccl_trace"
    os.mkfifo(pipe)
    recording = {"entries": [{"collective_seq_id": 3, "profiling_name": "nccl:all_reduce", "state": "started"}]}
    dump.write_bytes(pickle.dumps(recording))
    code = "import os, sys, time; os.open(sys.argv[1], os.O_RDWR); print('ready', flush=True); time.sleep(1e6)"
    target = EvidenceTarget(0, worker(code, str(pipe)), pipe=pipe, dump=dump)
    found, _ = gathered(evidence, posted, target, tmp_path / "log")
    assert pickled(tmp_path) == recording
    assert found.ranks[0].groups == ()
