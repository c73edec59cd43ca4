"""A real process that waits for its device as CUDA and NCCL do: what is observed of it, and whose fault that is."""

from __future__ import annotations

import shutil
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from elasticd.heartbeat import record as beat
from elasticd_agent.hangs.observer import GroupObserver, Observation
from elasticd_agent.hangs.rank import RankState
from tests.hangs.stuck_worker import StartWorker
from tests.library.fake_recorders import C10D

pytestmark = pytest.mark.system
REPO = str(Path(__file__).parents[2])
SOURCE = Path(__file__).parent / "scripts" / "device.c"
RANK = f"""
import ctypes, json, sys, types
sys.path.append({REPO!r})
from elasticd.heartbeat.record import HeartbeatWriter
from elasticd.heartbeat.thread import HeartbeatThread
library, heartbeat, wait = sys.argv[1:]

class Backend:
    uid = 4

class Group:
    group_name, _device_types = "0", ["cuda"]
    def _get_backend(self, device):
        return Backend()
    def _get_sequence_number_for_group(self):
        return 7

group = Group()
counts = {{"last_enqueued_collective": "7", "last_completed_collective": "6"}}
recorder = types.SimpleNamespace(
    _dump_nccl_trace_json=lambda includeCollectives: json.dumps({{"pg_status": {{"4": counts}}}}).encode())
world = types.SimpleNamespace(default_pg=group, pg_map={{group: None}}, pg_group_ranks={{group: {{0: 0, 1: 1}}}})
c10d = types.SimpleNamespace(_world=world, GroupMember=types.SimpleNamespace(WORLD=group))
sys.modules[{C10D!r}], sys.modules["torch.distributed.distributed_c10d"] = recorder, c10d
device = ctypes.CDLL(library)
writer = HeartbeatWriter(heartbeat)
HeartbeatThread(writer).start()
writer.step(1)
device.start_proxy(b"NCCL Progress 0")
print("ready", flush=True)
step = compile(f"def step(): device.{{wait}}()", "/env/torch/optim/adam.py", "exec")
exec(step)
step()
"""


@pytest.mark.parametrize(("wait", "state"), [("wait_asleep", "S"), ("wait_spinning", "R")])
def test_rank_that_waits_for_its_device(
    wait: str, state: str, worker: StartWorker, tmp_path: Path, until: Callable[[Callable[[], object], float], object]
) -> None:
    """Neither a spinning proxy nor a spinning launch is work; the recorder says what the device waits in."""
    compiler = shutil.which("cc")
    assert compiler is not None
    subprocess.run([compiler, "-shared", "-fPIC", "-pthread", "-o", tmp_path / "device.so", SOURCE], check=True)
    beat.create(tmp_path / "beat")
    pid = worker(RANK, str(tmp_path / "device.so"), str(tmp_path / "beat"), wait, state=state)
    observer = GroupObserver(1, [(0, 0)], [tmp_path / "beat"], [tmp_path / "notes"])
    observer.set_processes([pid], 0)

    def look() -> Observation:
        time.sleep(0.25)
        return observer.observe(time.monotonic())

    def seen() -> RankState | None:
        report = look().ranks[0]
        known = report.nccl_groups and report.window_s > 2 and report.idle_s > 4
        return RankState("a", report) if known else None

    try:
        rank = until(seen, 30)
        assert isinstance(rank, RankState)
        (counts,) = rank.report.nccl_groups
        assert counts[1:] == (7, 6)
        assert rank.has_pending_collective
        assert rank.waits
        assert not rank.is_busy
        assert not rank.holds_gil
        assert (rank.cores < 0.1) == (wait == "wait_asleep"), rank.cores
        assert rank.activity().startswith("waits in an NCCL collective on its device")
    finally:
        observer.close()
