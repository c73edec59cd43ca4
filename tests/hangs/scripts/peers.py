"""Places of waits.py in which ranks legitimately differ: in sizes, in roles, in what they train, in when they end."""

from __future__ import annotations

import atexit
import ctypes
import fcntl
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import mishaps
import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from waits import Training

Use = Callable[[float], None]
AT = 220
"""waits.WAIT_AT."""
_SO_MAX_PACING_RATE = 47  # asm-generic/socket.h
_JOIN = """
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

def join(store, rank):
    # As libraries do that send weights to an inference engine.
    store = dist.PrefixStore("engine", store)
    group, _ = c10d._new_process_group_helper(
        2, rank, [], c10d.Backend("gloo"), store, group_name="engine", timeout=c10d.default_pg_timeout
    )
    c10d._world.pg_group_ranks[group] = {0: 0, 1: 1}
    return group
"""
_ENGINE = """
import os, sys, time, torch
group = join(dist.TCPStore("127.0.0.1", int(sys.argv[1]), is_master=False), 1)
time.sleep(float(sys.argv[2]))
dist.send(torch.ones(4), 0, group=group)
time.sleep(1)
os._exit(0)
"""
_SLOW_ENGINE = """
import sys, time, torch.distributed as dist
from datetime import timedelta
time.sleep(float(sys.argv[2]))
store = dist.TCPStore("127.0.0.1", int(sys.argv[1]), 2, True, timedelta(minutes=30))  # waits for rank 0
time.sleep(20)
"""
_LOCK = "import fcntl, sys, time; file = open(sys.argv[1], 'w'); fcntl.flock(file, fcntl.LOCK_EX); print(flush=True); "


def late(t: Training, use: Use, seconds: float) -> None:
    """Rank 1 is late."""
    t.until(AT)
    if t.rank == 1:
        use(seconds)


def all_to_all(t: Training, use: Use, seconds: float) -> None:
    late(t, use, seconds)
    size = dist.get_world_size()
    inputs = [t.rank + 2 * to + 1 for to in range(size)]
    outputs = [source + 2 * t.rank + 1 for source in range(size)]
    dist.all_to_all_single(torch.empty(sum(outputs)), torch.ones(sum(inputs)), outputs, inputs)


def scatter(t: Training, use: Use, seconds: float) -> None:
    late(t, use, seconds)
    dist.scatter(torch.empty(4), [torch.ones(4)] * dist.get_world_size() if t.rank == 0 else None, src=0)


def gather(t: Training, use: Use, seconds: float) -> None:
    late(t, use, seconds)
    dist.gather(torch.ones(4), [torch.empty(4) for _ in range(dist.get_world_size())] if t.rank == 0 else None, dst=0)


def uneven_all_gather(t: Training, use: Use, seconds: float) -> None:
    """Each rank has as many results as it has: broadcast by each of them in turn, as torch does for NCCL."""
    late(t, use, seconds)
    for source in range(dist.get_world_size()):
        dist.broadcast(torch.ones(100 * (source + 1)), src=source)


def engine(t: Training, use: Use, seconds: float) -> None:
    """Rank 0 receives from a process that is not of this job, as an engine for inference is not."""
    t.until(AT)
    if t.rank != 0:
        return
    port = _free_port()
    store = dist.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)
    _start_engine(_JOIN + _ENGINE, port, seconds)
    names: dict[str, Any] = {}
    exec(_JOIN, names)
    dist.recv(torch.empty(4), src=1, group=names["join"](store, 0))


def slow_engine(t: Training, use: Use, seconds: float) -> None:
    """Rank 0 meets a process that is not of this job and starts late, in the store of that process."""
    t.until(AT)
    if t.rank == 0:
        port = _free_port()
        _start_engine(_SLOW_ENGINE, port, seconds)
        meeting = dist.rendezvous(f"tcp://127.0.0.1:{port}", 1, 2, timeout=timedelta(minutes=30))
        next(iter(meeting))
    dist.barrier()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _start_engine(code: str, port: int, seconds: float) -> None:
    command = f"exec setsid {sys.executable} - {port} {seconds} <<'END' & \n{code}\nEND"
    subprocess.run(["bash", "-c", command], check=True)


def last_gather(t: Training, use: Use, seconds: float) -> None:
    """The last act; rank 1 ends at once, the last one evaluates before it."""
    t.until(AT)
    if t.rank == dist.get_world_size() - 1:
        use(seconds)
    gathered = [torch.empty(4) for _ in range(dist.get_world_size())]
    dist.gather(torch.ones(4), gathered if t.rank == 0 else None, dst=0)
    _leave(t)


def exit_barrier(t: Training, use: Use, seconds: float) -> None:
    """An exit handler uploads on rank 0 and then calls a collective."""
    t.until(AT)

    def upload() -> None:
        if t.rank == 0:
            use(seconds)
        dist.barrier()
        os._exit(0)  # gloo and DDP's reducer may dead-lock while Python is finalized

    atexit.register(upload)
    if t.session is not None:
        t.session.close()
    sys.exit(0)


def _leave(t: Training) -> None:
    if t.session is not None:
        t.session.close()
    os._exit(0)


def own_models(t: Training, use: Use, seconds: float) -> None:
    """A model per rank, as in a cross-validation: one barrier at the end, to which rank 0 comes later."""
    t.until(AT)
    (use if t.rank == 0 else probe)(seconds if t.rank == 0 else 1.0)
    dist.barrier()


def local_sgd(t: Training, use: Use, seconds: float) -> None:
    """Each rank makes steps of its own, at its own speed, and then all average; twice."""
    t.until(AT)
    for _ in range(2):
        (use if t.rank == 1 else probe)(seconds if t.rank == 1 else 1.0)
        dist.all_reduce(torch.ones(16))


def pauses(t: Training, use: Use, seconds: float) -> None:
    """Several, with steps between them: a search for hyper-parameters waits for its server."""
    t.until(AT)
    for number in range(1, 3):
        use(seconds)
        t.until(AT + 10 * number)


def monitored(t: Training, use: Use, seconds: float) -> None:
    late(t, use, seconds)
    dist.monitored_barrier(timeout=timedelta(seconds=600))


def slow_link(t: Training, use: Use, seconds: float) -> None:
    """An all_reduce over links of 2 Mbit/s."""
    t.until(AT)
    _pace(250_000)
    dist.all_reduce(torch.ones(int(seconds * 250_000 / 4)))
    _pace(1 << 30)


def _pace(bytes_per_s: int) -> None:
    for fd in os.listdir("/proc/self/fd"):
        try:
            with socket.socket(fileno=os.dup(int(fd))) as one:
                one.setsockopt(socket.SOL_SOCKET, _SO_MAX_PACING_RATE, bytes_per_s)
        except OSError:
            continue


def start_again(t: Training, use: Use, seconds: float) -> None:
    """One rank fails once; the start after that takes longer."""
    if mishaps.ROUND > 1:
        use(seconds)
    t.until(AT)
    if mishaps.ROUND == 1:
        if t.rank == 1:
            os._exit(3)
        time.sleep(30)


def probe(seconds: float) -> None:
    """Trains a small model of its own."""
    model = torch.nn.Linear(8, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        time.sleep(0.05)
        model(torch.ones(2, 8)).sum().backward()
        optimizer.step()


def learner(seconds: float) -> None:
    """Six functions, one after the other, and a step of its own optimizer in one of them."""

    def turn(number: int) -> None:
        time.sleep(0.7)
        if number == 3:
            probe(0.1)

    end = time.monotonic() + seconds
    while time.monotonic() < end:
        for number in range(6):
            turn(number)


def foreign_lock(seconds: float) -> None:
    """Another job fills the cache."""
    path = mishaps.WORK / "foreign.lock"
    command = f'exec setsid {sys.executable} -c "{_LOCK}time.sleep({seconds})" {path} &'
    started = mishaps.WORK / "foreign.started"
    if mishaps.RANK == 0 and not started.exists():
        started.touch()
        subprocess.run(["bash", "-c", command], check=True, stdout=subprocess.DEVNULL)
    time.sleep(1.0)
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)


def read_line(seconds: float) -> None:
    """A person answers."""
    reading, writing = os.pipe()
    os.dup2(reading, 0)
    subprocess.Popen(["sh", "-c", f"sleep {seconds}; echo yes"], stdout=writing)
    input("continue? ")
    os.wait()


def load_library(seconds: float) -> None:
    """dlopen of a library whose constructor takes long; Python keeps the GIL."""
    source, library = mishaps.WORK / f"slow-{mishaps.RANK}.c", mishaps.WORK / f"slow-{mishaps.RANK}.so"
    source.write_text(f"#include <unistd.h>\n__attribute__((constructor)) void slow(void) {{ sleep({seconds:g}); }}\n")
    subprocess.run(["cc", "-shared", "-fPIC", "-o", library, source], check=True)
    ctypes.CDLL(str(library))


def drip(seconds: float) -> None:
    """An upload of 30 kB/s."""
    with socket.create_connection(("127.0.0.1", int(os.environ["SLOW_SERVER"]))) as server:
        server.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 10_000)
        server.sendall(f"drip {seconds}\n".encode())
        server.sendall(bytes(int(seconds * 30_000)))
        server.shutdown(socket.SHUT_WR)
        server.recv(1)


def judged(seconds: float) -> None:
    """A judge answers a kilobyte each 1.5 s."""
    end = time.monotonic() + seconds
    with socket.create_connection(("127.0.0.1", int(os.environ["SLOW_SERVER"]))) as server:
        server.sendall(f"judge {seconds}\n".encode())
        while time.monotonic() < end:
            server.sendall(bytes(100))
            server.recv(1024, socket.MSG_WAITALL)


def asking_pool(seconds: float) -> None:
    """Threads ask a server, each with a connection of its own for each request; the main thread waits for them."""
    end = time.monotonic() + seconds

    def ask(_: int) -> None:
        while time.monotonic() < end:
            with socket.create_connection(("127.0.0.1", int(os.environ["SLOW_SERVER"]))) as server:
                server.sendall(b"ask 3\n")
                server.recv(16)

    with ThreadPoolExecutor(16) as pool:
        list(pool.map(ask, range(16)))


PLACES = {
    "all-to-all": all_to_all,
    "scatter": scatter,
    "gather": gather,
    "uneven": uneven_all_gather,
    "engine": engine,
    "slow-engine": slow_engine,
    "last-gather": last_gather,
    "exit-barrier": exit_barrier,
    "own-models": own_models,
    "local-sgd": local_sgd,
    "pauses": pauses,
    "monitored-late": monitored,
    "slow-link": slow_link,
    "start-again": start_again,
}
USES: dict[str, Use] = {
    "probe": probe,
    "learner": learner,
    "foreign-lock": foreign_lock,
    "input": read_line,
    "dlopen": load_library,
    "drip": drip,
    "judge": judged,
    "asking-pool": asking_pool,
}
