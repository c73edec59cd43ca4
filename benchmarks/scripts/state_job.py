"""A job with a state of a given size, saved in one of three ways or not at all.

Every rank appends "STEP MONOTONIC" to DIRECTORY/steps-RANK.log after each optimizer step, and in each round a line to
moments-RANK.log: when the script ran, had built its model, had restored its state. While there is a file
DIRECTORY/no-saves, nothing is saved. Rank 0 appends one JSON object for each measured save or restore to
DIRECTORY/costs.jsonl. Times are the slowest rank's, CPU seconds all ranks'.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import resource
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import async_save
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import elasticd

LAYERS = 8


class Job:
    """The model, its optimizer, and the way they are saved. Adam keeps twice the parameters' size."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.directory = Path(args.directory)
        self.checkpoints = self.directory / "checkpoints"
        self.session = elasticd.init()
        width = max(int((args.megabytes * 1e6 / 4 / 3 / LAYERS) ** 0.5), 1)
        layers = [torch.nn.Linear(width, width, bias=False) for _ in range(LAYERS)]
        self.model = self.parallel(torch.nn.Sequential(*layers))
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=1e-5)
        self.inputs = torch.randn(1, width)
        self.steps = 0

    def parallel(self, model: torch.nn.Module) -> torch.nn.Module:
        return DistributedDataParallel(model)

    def step(self) -> None:
        self.model(self.inputs).square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=False)
        self.steps += 1

    def finished_step(self, log: Any) -> None:
        log.write(f"{self.steps} {time.monotonic():.6f}\n")
        log.flush()

    def restore(self) -> None:
        """Sets `steps`."""

    def save(self) -> None:
        """Called by all ranks after a step; returns when training may continue."""

    def finished(self) -> bool:
        """True on rank 0 once the last save is on the disk."""
        return True


class Elasticd(Job):
    def __init__(self, args: argparse.Namespace) -> None:
        super().__init__(args)
        self.session.attach(model=self.model, optimizer=self.optimizer)
        self.first = True

    def restore(self) -> None:
        self.session.restore(self.checkpoints)
        self.steps = self.session.steps

    def step(self) -> None:
        super().step()
        if self.first:  # every step is one of the session's, and `save` decides which of them saves
            self.first = False
            self.session.checkpoint(every=1 << 40, directory=self.checkpoints)

    def finished_step(self, log: Any) -> None:
        self.session.step()
        super().finished_step(log)

    def save(self) -> None:
        saver = self.session._saver
        saver.save(self.session.steps, self.session._attached, "by the benchmark")

    def finished(self) -> bool:
        return self.session._saver._writes.wait_until_saved()


class InPlace(Elasticd):
    """With `session.run`: a process that is not killed stays."""

    def __init__(self, args: argparse.Namespace) -> None:
        super().__init__(args)
        self.first = False
        self.session.checkpoint(every=1 << 40, directory=self.checkpoints)

    def restore(self) -> None:
        self.steps = self.session.steps


class Sharded(Elasticd):
    """FSDP2: each rank has a shard."""

    def parallel(self, model: torch.nn.Module) -> torch.nn.Module:
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        fully_shard(model, mesh=mesh)
        return model


class TorchSave(Job):
    """What a careful script does: rank 0 writes a temporary file, fsyncs, renames."""

    def state(self) -> dict[str, Any]:
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict(), "step": self.steps}

    def restore(self) -> None:
        path = self.checkpoints / "state.pt"
        if path.exists():
            state = torch.load(path, weights_only=True)
            self.model.load_state_dict(state["model"])
            self.optimizer.load_state_dict(state["optimizer"])
            self.steps = state["step"]

    def save(self) -> None:
        if dist.get_rank() == 0:
            self.checkpoints.mkdir(exist_ok=True)
            with (self.checkpoints / "state.new").open("wb") as file:
                torch.save(self.state(), file)
                os.fsync(file.fileno())
            (self.checkpoints / "state.new").rename(self.checkpoints / "state.pt")
        dist.barrier()


class DcpAsync(Job):
    """torch.distributed.checkpoint's async_save, one at a time; a directory counts once its name is written down.

    Its thread needs a process group of its own: its collectives and those of training come in another order on each
    rank, and on one group they wait for each other for ever.
    """

    future: Any = None
    writing = 0

    def __init__(self, args: argparse.Namespace) -> None:
        super().__init__(args)
        self.group = dist.new_group(backend="gloo")

    def restore(self) -> None:
        latest = self.checkpoints / "latest"
        if latest.exists():
            model, optimizer = get_state_dict(self.model, self.optimizer)
            state: dict[str, Any] = {"model": model, "optimizer": optimizer}
            load(state, checkpoint_id=self.checkpoints / latest.read_text())
            set_state_dict(
                self.model, self.optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"]
            )
            self.steps = int(latest.read_text())

    def save(self) -> None:
        self.finished()
        model, optimizer = get_state_dict(self.model, self.optimizer)
        state = {"model": model, "optimizer": optimizer}
        self.writing = self.steps
        where = self.checkpoints / str(self.steps)
        self.future = async_save(state, checkpoint_id=where, process_group=self.group)

    def finished(self) -> bool:
        if self.future is not None:
            self.future.result()
            self.future = None
            if dist.get_rank() == 0:
                (self.checkpoints / "new").write_text(str(self.writing))
                (self.checkpoints / "new").rename(self.checkpoints / "latest")
        return True

    def finished_step(self, log: Any) -> None:
        if self.future is not None and self.future.done():
            self.finished()
        super().finished_step(log)


METHODS: dict[str, Callable[[argparse.Namespace], Job]] = {
    "none": Job,
    "elasticd": Elasticd,
    "elasticd in place": InPlace,
    "elasticd FSDP2": Sharded,
    "torch.save": TorchSave,
    "DCP async_save": DcpAsync,
}


def cpu_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def writer_cpu_seconds() -> float:
    """Of the process that writes elasticd's checkpoints, a child of our own parent; 0 without one."""
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            text = path.read_text()
            fields = text.rpartition(")")[2].split()
            if "(elasticd-writer)" in text and int(fields[1]) == os.getppid():
                return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return 0.0


class PeakMemory:
    """The most anonymous memory of this process while a block runs, above that at its start. In MB."""

    def __enter__(self) -> PeakMemory:
        self.start = self.most = self.now()
        self.over = threading.Event()
        self.thread = threading.Thread(target=self.watch)
        self.thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.over.set()
        self.thread.join()

    def watch(self) -> None:
        while not self.over.wait(0.005):
            self.most = max(self.most, self.now())

    def now(self) -> float:
        status = Path("/proc/self/status").read_text()
        return int(status.partition("RssAnon:")[2].split()[0]) / 1000

    @property
    def megabytes(self) -> float:
        return max(self.most, self.now()) - self.start


def shared_megabytes() -> float:
    """Of this machine: files in memory, as elasticd's buffers are."""
    return int(Path("/proc/meminfo").read_text().partition("Shmem:")[2].split()[0]) / 1000


@contextlib.contextmanager
def measured(job: Job, what: str) -> Iterator[dict[str, Any]]:
    """Adds the slowest rank's wall seconds, all ranks' CPU seconds, and the largest peak of memory."""
    found: dict[str, Any] = {"what": what}
    dist.barrier()
    with PeakMemory() as memory:
        start, cpu = time.perf_counter(), cpu_seconds()
        yield found
        wall, cpu = time.perf_counter() - start, cpu_seconds() - cpu
    slowest = torch.tensor([wall, memory.megabytes])
    total = torch.tensor([cpu])
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    dist.all_reduce(total)
    found |= {"wall_s": slowest[0].item(), "cpu_s": total.item(), "peak_mb": slowest[1].item()}


def note(job: Job, found: dict[str, Any]) -> None:
    if dist.get_rank() == 0:
        with (job.directory / "costs.jsonl").open("a") as file:
            file.write(json.dumps(found) + "\n")


def measure(job: Job, args: argparse.Namespace, log: Any) -> None:
    """Restore what there is, then save a few times, and wait for the disk after each. Before each save, ranks copy as
    many bytes together from memory to memory.
    """
    job.step()  # the optimizer has its state
    with measured(job, "restore") as found:
        job.restore()
    note(job, found)
    shared = shared_megabytes()
    share = torch.ones(int(args.megabytes * 1e6) // dist.get_world_size(), dtype=torch.uint8)
    target = torch.zeros_like(share)
    for _ in range(args.saves):
        with measured(job, "copy") as found:
            target.copy_(share)
        note(job, found)
        job.step()
        job.finished_step(log)
        written = writer_cpu_seconds() if dist.get_rank() == 0 else 0.0
        with measured(job, "save") as found:
            job.save()
        start = time.perf_counter()
        job.finished()
        dist.barrier()
        found["then_s"] = time.perf_counter() - start
        if dist.get_rank() == 0:
            found["writer_cpu_s"] = writer_cpu_seconds() - written
            found["shared_mb"] = shared_megabytes() - shared
        note(job, found)


def train(job: Job, args: argparse.Namespace, log: Any, started: float) -> None:
    """Steps of a minimal time, a save every so many seconds by rank 0's clock, until it is killed or time is up."""
    built = time.monotonic()
    job.restore()
    with (job.directory / f"moments-{dist.get_rank()}.log").open("a") as moments:
        moments.write(f"{started:.6f} {built:.6f} {time.monotonic():.6f}\n")
    saved_at = time.monotonic()
    while True:
        start = time.monotonic()
        job.step()
        job.finished_step(log)
        due = bool(args.every) and time.monotonic() - saved_at >= args.every
        due = due and not (job.directory / "no-saves").exists()
        decision = torch.tensor([int(due), int(time.monotonic() >= args.until)])
        dist.broadcast(decision, src=0)
        if decision[1]:
            return
        if decision[0]:
            job.save()
            saved_at = time.monotonic()
        time.sleep(max(start + args.step - time.monotonic(), 0.0))


def main() -> None:
    started = time.monotonic()
    parser = argparse.ArgumentParser()
    parser.add_argument("--method", choices=METHODS, required=True)
    parser.add_argument("--megabytes", type=float, required=True)
    parser.add_argument("--directory", required=True)
    parser.add_argument("--saves", type=int, default=0, help="measure so many saves, then end")
    parser.add_argument("--every", type=float, default=0.0, help="seconds between saves; 0: none")
    parser.add_argument("--step", type=float, default=0.0, help="least seconds of a step")
    parser.add_argument("--until", type=float, default=float("inf"), help="CLOCK_MONOTONIC at which it ends")
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    job = METHODS[args.method](args)

    def run() -> None:
        rank = dist.get_rank()
        (job.directory / f"pid-{rank}").write_text(str(os.getpid()))
        with (job.directory / f"steps-{rank}.log").open("a") as log:
            if args.saves:
                measure(job, args, log)
            else:
                train(job, args, log, started)

    if isinstance(job, InPlace):
        job.session.run(run)
    else:
        run()
    job.session.close()


if __name__ == "__main__":
    main()
