"""The cost of a heartbeat for the training thread: the optimizer hook, a session's step, the thread beside it.

    python -m benchmarks.heartbeat

One process, a real gloo group, no agent. A row's median is the cost; its worst is mostly what the kernel gave to other
processes meanwhile. The last lines give the share of rank 0's training thread.
"""

from __future__ import annotations

import mmap
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from elasticd.heartbeat import record as heartbeat
from elasticd.heartbeat.collectives import CollectiveCounter
from elasticd.heartbeat.optimizer_hook import install_optimizer_hook
from elasticd.heartbeat.record import HeartbeatWriter
from elasticd.heartbeat.recorders import flight_recorder_dump
from elasticd.heartbeat.thread import PERIOD_S, STEPPING_PERIODS, HeartbeatThread

STEP_S = 0.02
"""The step for the share: a small model's."""
SAMPLES, PER_SAMPLE = 2000, 50
TICKS = 300
ALIVE = 200 // 8
"""Index of `alive_ticks` in the heartbeat's layout, in 64-bit words."""


def samples(call: Callable[[], Any]) -> list[float]:
    """Seconds of one call: each sample is the mean of a few, for a clock's resolution. Without an empty loop's."""
    found = []
    for _ in range(SAMPLES):
        start = time.perf_counter()
        for _ in range(PER_SAMPLE):
            pass
        empty = time.perf_counter()
        for _ in range(PER_SAMPLE):
            call()
        found.append((time.perf_counter() - empty - (empty - start)) / PER_SAMPLE)
    return found


def hook_of(writer: HeartbeatWriter) -> Callable[[], None]:
    """What torch calls after an optimizer step."""
    hooks: list[Any] = []

    def register(hook: Any) -> None:
        hooks.append(hook)

    install_optimizer_hook(writer, register)
    (hook,), optimizer, args, kwargs = hooks, object(), (), {}  # type: ignore[var-annotated]
    return lambda: hook(optimizer, args, kwargs)


def step_of(writer: HeartbeatWriter) -> Callable[[], None]:
    """The heartbeat's part of `session.step()`."""
    issued = CollectiveCounter().issued
    return lambda: writer.step(7, issued=issued())


def stalls(path: Path) -> list[float]:
    """For how long a thread that never gives up the GIL by itself stalls during a tick, in seconds."""
    with path.open("r+b") as file, mmap.mmap(file.fileno(), heartbeat.FILE_BYTES) as shared, memoryview(shared) as raw:
        words = raw.cast("Q")
        found: list[float] = []
        seen, before = words[ALIVE], time.perf_counter()
        while len(found) < TICKS:
            alive, now = words[ALIVE], time.perf_counter()
            if alive != seen:
                found.append(now - before)
                seen = alive
            before = now
        words.release()
    return found


def row(name: str, seconds: list[float]) -> float:
    ordered = sorted(seconds)
    median, high = statistics.median(ordered), ordered[int(len(ordered) * 0.99)]
    sys.stdout.write(f"{name:<44} {median * 1e6:>9.2f} {high * 1e6:>9.2f} {ordered[-1] * 1e6:>9.2f}\n")
    return median


def processor_time(seconds: float) -> float:
    """The share of one core that this process uses while its main thread sleeps."""
    before = time.process_time()
    time.sleep(seconds)
    return (time.process_time() - before) / seconds


def main() -> None:
    import torch
    import torch.distributed as dist
    from torch._C._distributed_c10d import HashStore

    torch.set_num_threads(1)
    folder = Path(tempfile.mkdtemp(prefix="elasticd-heartbeat-", dir="/dev/shm" if os.path.isdir("/dev/shm") else None))
    path = folder / "beat"
    heartbeat.create(path)
    writer = HeartbeatWriter(path)
    try:
        sys.stdout.write(f"{'µs':<44} {'median':>9} {'99 %':>9} {'worst':>9}\n")
        row("session's heartbeat, no process group", samples(step_of(writer)))
        dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1, timeout=timedelta(seconds=60))
        for _ in range(2000):  # as many as the flight recorder keeps
            dist.all_reduce(torch.ones(1))
        row("sequence number of the process group", samples(CollectiveCounter().issued))
        session = row("session's heartbeat", samples(step_of(writer)))
        fresh = folder / "hooked"
        heartbeat.create(fresh)
        hook = row("optimizer hook", samples(hook_of(HeartbeatWriter(fresh))))
        idle = processor_time(1.0)
        thread = HeartbeatThread(writer, period_s=0.005)
        thread.start()
        stall = row("training thread stalled by a tick", stalls(path))
        thread.stop()
        thread = HeartbeatThread(writer)
        thread.start()
        busy = processor_time(3.0) - idle
        thread.stop()
        dumps = []
        for _ in range(10):
            start = time.perf_counter()
            flight_recorder_dump()
            dumps.append(time.perf_counter() - start)
        row("flight recorder, 2000 collectives, on request", dumps)
        dist.destroy_process_group()
    finally:
        for file in folder.iterdir():
            file.unlink()
        folder.rmdir()
    share = max(session, hook) / STEP_S + stall / (PERIOD_S * STEPPING_PERIODS)
    sys.stdout.write(f"of rank 0's training thread, with steps of {STEP_S * 1e3:g} ms: {share:.4%}\n")
    sys.stdout.write(f"of a core, the heartbeat thread: {busy:.4%}\n")


if __name__ == "__main__":
    main()
