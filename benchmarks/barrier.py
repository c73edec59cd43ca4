"""What `session.barrier` costs beside torch.distributed.barrier and monitored_barrier (both gloo), and at rest.

    python -m benchmarks.barrier [--processes 2 4 8] [--times 300]

Ranks are forked from one process that has imported torch; the round's store is a process of its own, as under an agent.
The three take turns in an order drawn anew each time. Before each, all ranks meet; the time of the rank that was
inside for longest counts. At rest: the store's time for the status that each rank publishes once a second.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import random
import socket
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

DEADLINE_S = 120.0
TICKS = os.sysconf("SC_CLK_TCK")
NAMES = ("session.barrier", "torch.distributed.barrier", "monitored_barrier")


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--processes", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--times", type=int, default=300)
    parser.add_argument("--statuses", type=int, default=5_000)
    args = parser.parse_args(argv)
    import torch.distributed  # noqa: F401 - once, before the ranks are forked

    print(f"{os.cpu_count()} cores; {args.times} barriers of each kind; median ms (worst).\n")
    print(f"| processes | {' | '.join(NAMES)} |\n|---|{'---|' * len(NAMES)}")
    for processes in args.processes:
        found = measure(processes, args.times)
        cells = (f"{statistics.median(found[name]):.2f} ({max(found[name]):.1f})" for name in NAMES)
        print(f"| {processes} | {' | '.join(cells)} |", flush=True)
    rank_us, store_us = statuses(args.statuses)
    print(f"\nA rank's status: {rank_us:.1f} µs of the rank's time, {store_us:.1f} µs of the store's.")
    return 0


def measure(processes: int, times: int) -> dict[str, list[float]]:
    """Milliseconds of each barrier, by kind: the longest time any rank was inside."""
    with tempfile.TemporaryDirectory(prefix="elasticd-bench-") as scratch:
        with ServedStore() as store:
            files = [Path(scratch, str(rank)) for rank in range(processes)]
            finish([start(rank_of, store.port, rank, processes, times, file) for rank, file in enumerate(files)])
        every = [json.loads(file.read_text()) for file in files]
    return {name: [max(each) for each in zip(*(found[name] for found in every), strict=True)] for name in NAMES}


def rank_of(port: int, rank: int, processes: int, times: int, result: Path) -> None:
    """One rank of a group: barriers in turns, timed."""
    place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": processes, "MASTER_PORT": port, "ELASTICD_ROUND": 1}
    os.environ.update({name: str(value) for name, value in place.items()})
    os.environ.update(MASTER_ADDR="127.0.0.1", GLOO_SOCKET_IFNAME="lo", TORCHELASTIC_USE_AGENT_STORE="True")
    import torch
    import torch.distributed as dist

    import elasticd

    torch.set_num_threads(1)
    session = elasticd.init(timeout=timedelta(seconds=DEADLINE_S))
    kinds: dict[str, Callable[[], Any]] = {
        "session.barrier": lambda: session.barrier("benchmark", DEADLINE_S),
        "torch.distributed.barrier": dist.barrier,
        "monitored_barrier": dist.monitored_barrier,
    }
    found: dict[str, list[float]] = {name: [] for name in kinds}
    order = random.Random(processes)  # the same on all ranks
    for number in range(times + times // 10):
        for name in order.sample(NAMES, len(NAMES)):
            dist.barrier()
            start = time.perf_counter()
            kinds[name]()
            if number >= times // 10:  # the first ones make connections
                found[name].append(1000 * (time.perf_counter() - start))
    result.write_text(json.dumps(found))
    session.close()


def statuses(count: int) -> tuple[float, float]:
    """Microseconds of one status, in the rank that publishes it and in the store."""
    from torch._C._distributed_c10d import TCPStore

    status = json.dumps({"n": 1, "step": 12345, "phase": "step", "barrier": "", "duration_s": 0.0})
    with ServedStore() as store:
        client = TCPStore("127.0.0.1", store.port, is_master=False)
        before, spent_s = store.cpu_s(), 0.0
        for rank in range(count):
            start = time.perf_counter()
            client.set(f"elasticd/r1/1/status/{rank % 512}", status)
            spent_s += time.perf_counter() - start
            time.sleep(0.0005)  # they do not arrive at once
        client.get("elasticd/r1/1/status/0")  # answered once all before it have been stored
        return 1e6 * spent_s / count, 1e6 * (store.cpu_s() - before) / count


class ServedStore:
    """The round's store, as a process."""

    def __enter__(self) -> ServedStore:
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port: int = free.getsockname()[1]
        self._process = start(serve, self.port)
        return self

    def cpu_s(self) -> float:
        """CPU time it has used."""
        fields = Path("/proc", str(self._process.pid), "stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / TICKS

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.join()


def serve(port: int) -> None:
    """A TCPStore until the process is killed."""
    from torch._C._distributed_c10d import TCPStore

    store = TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)
    while True:
        time.sleep(DEADLINE_S)
        store.check(["still here"])


def start(function: Callable[..., None], *arguments: Any) -> Any:
    """Run the function in a process forked from this one."""
    process = multiprocessing.get_context("fork").Process(target=function, args=arguments, daemon=True)
    process.start()
    return process


def finish(processes: Sequence[Any]) -> None:
    """Wait until all have ended well; raises RuntimeError, and ends them, if one does not."""
    deadline = time.monotonic() + DEADLINE_S
    for process in processes:
        process.join(max(0.0, deadline - time.monotonic()))
    codes = [process.exitcode for process in processes]
    if any(codes) or None in codes:
        for process in processes:
            process.kill()
        raise RuntimeError(f"the ranks ended with {codes}")


if __name__ == "__main__":
    sys.exit(main())
