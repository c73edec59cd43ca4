"""Trains, and waits at some place for some seconds in some way, without a word about it: `waits.py PLACE USE SECONDS`.

Every wait is one that scripts of real users have, and none is a hang. `--session` attaches a checkpoint and calls
session.step(); `--run` does so within session.run(); without both the script knows nothing of elasticd.
"""

from __future__ import annotations

import argparse
import asyncio
import atexit
import code
import concurrent.futures
import ctypes
import fcntl
import gc
import multiprocessing
import os
import pdb
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import mishaps
import peers
import torch
import torch.distributed as dist
import toy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

WAIT_AT, END = 220, 260
"""Steps. A job of fewer than 200 is given more time than what counts here (deadlines.YOUNG_STEPS)."""
PAUSE_S = 0.01
COMMUNICATOR_AT = 1000
ROLLOUTS_S = (0.05, 0.4, 3.0, 0.05, 8.0, 0.2, 40.0, 1.0, 20.0, 0.05, 40.0)

Use = Callable[[float], None]


class Training:
    """The model, its optimizer and, perhaps, a session; `done` steps so far."""

    def __init__(self, session: bool, timeout_s: float) -> None:
        timeout = timedelta(seconds=timeout_s)
        self.session = None
        if session:
            import elasticd

            self.session = elasticd.init(timeout=timeout)
        else:
            dist.init_process_group("gloo", timeout=timeout)
        self.rank, self.done = dist.get_rank(), 0
        self.ddp: DistributedDataParallel | None = DistributedDataParallel(toy.model())
        self.optimizer = torch.optim.SGD(self.ddp.parameters(), lr=0.01)
        if self.session is not None:
            self.session.attach(model=self.ddp, optimizer=self.optimizer)
            self.session.restore()
            self.session.checkpoint(every=50)
            self.done = self.session.steps

    def step(self, within: Callable[[], None] = lambda: None) -> None:
        assert self.ddp is not None
        time.sleep(PAUSE_S)
        loss = self.ddp(torch.ones(4, 16)).square().mean()
        within()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        if self.session is not None:
            self.session.step()
        self.done += 1
        mishaps.finished(self.done)

    def until(self, step: int) -> None:
        while self.done < step:
            self.step()

    def end(self) -> None:
        """DDP's reducer must not be the last to hold the process group: it may dead-lock with gloo's thread."""
        self.ddp = None
        gc.collect()
        if self.session is not None:
            self.session.close()
        if dist.is_initialized():
            dist.destroy_process_group()


# --- places: where in the job, on which ranks, and what the others do meanwhile ---------------------------------------


def first_step(t: Training, use: Use, seconds: float) -> None:
    t.step(lambda: use(seconds))


def all_ranks(t: Training, use: Use, seconds: float) -> None:
    t.until(WAIT_AT)
    use(seconds)


def rank_0(t: Training, use: Use, seconds: float) -> None:
    """The others wait in the next step's collective."""
    t.until(WAIT_AT)
    if t.rank == 0:
        use(seconds)


def barrier(t: Training, use: Use, seconds: float) -> None:
    rank_0(t, use, seconds)
    dist.barrier()


def group_barrier(t: Training, use: Use, seconds: float) -> None:
    group = dist.new_group(timeout=timedelta(minutes=5))
    rank_0(t, use, seconds)
    dist.barrier(group)


def store_wait(t: Training, use: Use, seconds: float) -> None:
    """The others wait for a key, as for data that rank 0 prepares."""
    store = dist.distributed_c10d._get_default_store()
    rank_0(t, use, seconds)
    if t.rank == 0:
        store.set("prepared", "")
    else:
        store.wait(["prepared"], timedelta(minutes=30))


def file_lock(t: Training, use: Use, seconds: float) -> None:
    """One rank fills a cache, the others wait for its lock."""
    t.until(WAIT_AT)
    with (mishaps.WORK / "cache.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        if not (mishaps.WORK / "cache").exists():
            use(seconds)
            (mishaps.WORK / "cache").touch()


def accumulation(t: Training, use: Use, seconds: float) -> None:
    """Twenty micro-steps a step, for three steps."""
    t.until(WAIT_AT)
    for _ in range(3):
        with t.ddp.no_sync():
            for _ in range(20):
                t.ddp(torch.ones(4, 16)).square().mean().backward()
                use(seconds / 60)
        t.step()


def rollouts(t: Training, use: Use, seconds: float) -> None:
    """Reinforcement learning: each rank plays for a while of its own, then all learn; at most `seconds`."""
    t.until(WAIT_AT)
    for length in ROLLOUTS_S if t.rank == 0 else reversed(ROLLOUTS_S):
        use(length / max(ROLLOUTS_S) * seconds)
        for _ in range(5):
            t.step()


def communicator(t: Training, use: Use, seconds: float) -> None:
    """A group is made late, and one rank comes late to its first collective."""
    t.until(COMMUNICATOR_AT)
    group = dist.new_group()
    if t.rank == 1:
        use(seconds)
    for _ in range(20):
        dist.all_reduce(torch.ones(16), group=group)
        t.step()


def loader_start(t: Training, use: Use, seconds: float) -> None:
    """The workers of a DataLoader start anew in each of three epochs."""
    loader = DataLoader(Items(), num_workers=2, worker_init_fn=lambda _: use(seconds))
    for _ in range(3):
        for _ in loader:
            t.step()


def loader_items(t: Training, use: Use, seconds: float) -> None:
    """Every batch takes so many seconds of a processor, of which the DataLoader's workers get a small share."""
    t.until(WAIT_AT)
    for _ in DataLoader(Items(8, lambda: use(seconds)), num_workers=1, worker_init_fn=enter_quota):
        t.step()


def end(t: Training, use: Use, seconds: float) -> None:
    """An export by rank 0, after the others have ended."""
    t.until(END)
    t.end()
    if t.rank == 0:
        use(seconds)


def exit_handler(t: Training, use: Use, seconds: float) -> None:
    if t.rank == 0:
        atexit.register(use, seconds)


def slow_items(t: Training, use: Use, seconds: float) -> None:
    """The workers of a DataLoader wait, for three batches."""
    t.until(WAIT_AT)
    for _ in DataLoader(Items(3, lambda: use(seconds)), num_workers=1):
        t.step()


def uneven_inputs(t: Training, use: Use, seconds: float) -> None:
    """Rank 0 has three batches more than the others, whose DDP takes part in its collectives."""
    t.until(WAIT_AT)
    with t.ddp.join():
        for _ in range(3 if t.rank == 0 else 0):
            use(seconds)
            t.ddp(torch.ones(4, 16)).square().mean().backward()


def monitored_barrier(t: Training, use: Use, seconds: float) -> None:
    rank_0(t, use, seconds)
    dist.monitored_barrier(timeout=timedelta(minutes=5))


def pair(t: Training, use: Use, seconds: float) -> None:
    """Rank 0 waits for rank 1 in a group of both, all others for both in the next step."""
    group = dist.new_group([0, 1])
    t.until(WAIT_AT)
    if t.rank == 1:
        use(seconds)
    if t.rank < 2:
        dist.all_reduce(torch.ones(1), group=group)


def async_save(t: Training, use: Use, seconds: float) -> None:
    """A thread of every rank saves and then reduces in a group of its own; rank 0 joins it, the others train on."""
    group = dist.new_group()
    t.until(WAIT_AT)

    def save() -> None:
        if t.rank == 1:
            use(seconds)
        dist.all_reduce(torch.ones(1), group=group)

    thread = threading.Thread(target=save)
    if t.rank == 0:
        save()
    else:
        thread.start()
    t.step()
    if t.rank != 0:
        thread.join()


def gathered_objects(t: Training, use: Use, seconds: float) -> None:
    rank_0(t, use, seconds)
    found: list[object] = [None] * dist.get_world_size()
    dist.all_gather_object(found, {"rank": t.rank})


def nowhere(t: Training, use: Use, seconds: float) -> None:
    """Something happens from outside; it trains until the file `enough` is there."""
    enough = torch.zeros(1)
    while not enough:
        t.step()
        enough[0] = (mishaps.WORK / "enough").exists()
        dist.all_reduce(enough)


class Items(Dataset[int]):
    def __init__(self, length: int = 60, use: Callable[[], None] = lambda: None) -> None:
        self.length, self.use = length, use

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> int:
        self.use()
        return index


def enter_quota(_: int) -> None:
    (Path(os.environ["QUOTA"]) / "cgroup.procs").write_text(str(os.getpid()))


PLACES: dict[str, Callable[[Training, Use, float], None]] = {
    "first": first_step,
    "all": all_ranks,
    "rank0": rank_0,
    "barrier": barrier,
    "group": group_barrier,
    "store": store_wait,
    "lock": file_lock,
    "accumulation": accumulation,
    "rollouts": rollouts,
    "communicator": communicator,
    "loader": loader_start,
    "items": loader_items,
    "slow-items": slow_items,
    "join": uneven_inputs,
    "monitored": monitored_barrier,
    "pair": pair,
    "async-save": async_save,
    "objects": gathered_objects,
    "end": end,
    "atexit": exit_handler,
    "nowhere": nowhere,
    **peers.PLACES,
}


# --- uses: what the rank does with the time ---------------------------------------------------------------------------


def matmul(seconds: float) -> None:
    """In native code, without the GIL."""
    end, square = time.monotonic() + seconds, torch.ones(700, 700)
    while time.monotonic() < end:
        torch.mm(square, square)


def process_time(seconds: float) -> None:
    end = time.process_time() + seconds
    while time.process_time() < end:
        pass


def trickle(seconds: float) -> None:
    """30 ms of CPU in 100."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        process_time(0.03)
        time.sleep(0.07)


def metrics(seconds: float) -> None:
    """A validation, whose every batch ends with .item()."""
    end, square = time.monotonic() + seconds, torch.ones(700, 700)
    total = 0.0
    while time.monotonic() < end:
        total += torch.mm(square, square).mean().item()
        time.sleep(0.02)


def hold_gil(seconds: float) -> None:
    """One call of native code that computes and keeps the GIL."""
    start = time.monotonic()
    sum(range(4_000_000))
    sum(range(int(4_000_000 * seconds / (time.monotonic() - start))))


def hold_gil_idle(seconds: float) -> None:
    ctypes.PyDLL(None).sleep(int(seconds))


def receive(seconds: float) -> None:
    """A download of a megabyte a second."""
    with request("get", seconds) as server:
        while server.recv(1 << 16):
            pass


def send(seconds: float) -> None:
    """An upload to a server that reads a megabyte a second."""
    with request("put", seconds) as server:
        for _ in range(int(seconds * 10)):
            server.sendall(bytes(100_000))
        server.shutdown(socket.SHUT_WR)
        server.recv(1)


def answer(seconds: float) -> None:
    """A request whose answer takes a while."""
    with request("ask", seconds) as server:
        server.recv(1)


def request(what: str, seconds: float) -> socket.socket:
    """The test's server on this machine does `what` for so long: see harms.SlowServer."""
    server = socket.create_connection(("127.0.0.1", int(os.environ["SLOW_SERVER"])))
    server.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 100_000)
    server.sendall(f"{what} {seconds}\n".encode())
    return server


def debugger(seconds: float) -> None:
    """A person reads in the debugger, and then continues."""
    with request("continue", seconds) as server, server.makefile("r") as keyboard:
        pdb.Pdb(stdin=keyboard, stdout=sys.stdout, nosigint=True, readrc=False).set_trace()
        time.sleep(0)


def console(seconds: float) -> None:
    with request("continue", seconds) as server, server.makefile("r") as keyboard:

        def read(prompt: str = "") -> str:
            if not (line := keyboard.readline()) or line == "continue\n":
                raise EOFError
            return line

        code.interact(banner="", readfunc=read, exitmsg="")


def child(seconds: float) -> None:
    subprocess.run([sys.executable, "-c", f"import time; time.sleep({seconds})"], check=True)


def child_computes(seconds: float) -> None:
    """A tokenizer, ffmpeg, a compiler."""
    subprocess.run([sys.executable, "-c", mishaps._BURN, str(seconds)], check=True)


def thread(seconds: float) -> None:
    with concurrent.futures.ThreadPoolExecutor() as pool:
        pool.submit(matmul, seconds).result()


def thread_sends(seconds: float) -> None:
    thread = threading.Thread(target=send, args=[seconds])
    thread.start()
    thread.join()


def pool(seconds: float) -> None:
    with multiprocessing.get_context("spawn").Pool(2) as processes:
        processes.map(mishaps.burn, [str(seconds)] * 2)


def two_waits(seconds: float) -> None:
    answer(seconds / 2)
    child(seconds / 2)


def inductor(_: float) -> None:
    """torch.compile with empty caches; takes as long as it takes."""
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(mishaps.WORK / f"inductor-{mishaps.RANK}")
    torch.compile(torch.nn.Sequential(*[torch.nn.Linear(64, 64), torch.nn.GELU()] * 8))(
        torch.ones(4, 64)
    ).sum().backward()


def event_loop(seconds: float) -> None:
    asyncio.run(asyncio.sleep(seconds))


def poll(seconds: float) -> None:
    """Four lines, half a second each."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        time.sleep(0.5)
        time.sleep(0.5)
        time.sleep(0.5)
        time.sleep(0.5)


def backoff(seconds: float) -> None:
    """A service that is away, asked again after 1, 2, 4 … seconds."""
    end, delay = time.monotonic() + seconds, 1.0
    while time.monotonic() < end:
        with socket.socket() as probe:
            probe.connect_ex(("127.0.0.1", 9))
        time.sleep(min(delay, max(0.0, end - time.monotonic())))
        delay *= 2


def read_slowly(seconds: float) -> None:
    """4 KiB now and then, through a pipe, as from a slow file server; all of it in one call."""
    feed = f"import os, time\nfor _ in range({int(seconds)}): os.write(1, bytes(4096)); time.sleep(1)"
    with subprocess.Popen([sys.executable, "-c", feed], stdout=subprocess.PIPE) as process:
        process.communicate()


def write_output(seconds: float) -> None:
    """More output than a pipe holds; `seconds` is for the reader."""
    for _ in range(20_000):
        print("x" * 1000, flush=True)


USES: dict[str, Use] = {
    "idle": time.sleep,
    "compute": lambda seconds: mishaps.burn(str(seconds)),
    "matmul": matmul,
    "process-time": process_time,
    "trickle": trickle,
    "item": metrics,
    "gil": hold_gil,
    "gil-idle": hold_gil_idle,
    "receive": receive,
    "send": send,
    "ask": answer,
    "pdb": debugger,
    "console": console,
    "child": child,
    "child-computes": child_computes,
    "compile": lambda seconds: mishaps.compile_for(str(seconds)),
    "fsync": lambda seconds: mishaps.write_for(str(seconds)),
    "thread": thread,
    "thread-sends": thread_sends,
    "pool": pool,
    "two": two_waits,
    "inductor": inductor,
    "asyncio": event_loop,
    "poll": poll,
    "backoff": backoff,
    "pipe": read_slowly,
    "print": write_output,
    **peers.USES,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("place", choices=PLACES)
    parser.add_argument("use", choices=USES)
    parser.add_argument("seconds", type=float)
    parser.add_argument("--session", action="store_true")
    parser.add_argument("--run", action="store_true")
    parser.add_argument("--timeout", type=float, default=1800.0, help="the process group's")
    args = parser.parse_args()
    training = Training(args.session or args.run, args.timeout)

    def train() -> None:
        training.rank, training.done = dist.get_rank(), 0 if training.session is None else training.session.steps
        PLACES[args.place](training, USES[args.use], args.seconds)
        training.until(END)

    if args.run:
        training.session.run(train)
    else:
        train()
    training.end()


if __name__ == "__main__":
    main()
