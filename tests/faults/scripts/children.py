"""A rank that waits beside children of every kind. Each of them is a line "KIND PID" in the file `children`.

"deaf": it ignores the signals that stop a job, and so do its children. "fails": it raises an error once the test wants
it; nothing saves, since Python ends only after a save. In later rounds it has only a daemon.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import time
from multiprocessing.shared_memory import SharedMemory
from typing import NoReturn

import faults
import torch
import torch.distributed as dist
import torch.multiprocessing
from plain import daemonise
from torch._inductor.compile_worker.subproc_pool import SubprocPool
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType, async_save
from torch.utils.data import DataLoader, TensorDataset

SAY = "echo {} $$ >> children"


def child(kind: str, pid: int) -> None:
    faults.write("children", f"{kind} {pid}\n")


class BlockedWriter(FileSystemWriter):
    def write_data(self, *_: object) -> NoReturn:
        child("saves", os.getpid())
        time.sleep(3600)
        raise AssertionError


def save() -> object:
    """A process that saves, and one that compiles: they import torch side by side."""
    storage = BlockedWriter(faults.WORK / "save")
    saving = async_save({}, storage_writer=storage, async_checkpointer_type=AsyncCheckpointerType.PROCESS)
    pool = compile()
    while "saves" not in (faults.WORK / "children").read_text():
        time.sleep(0.01)
    return saving, pool


def compile() -> object:
    pool = SubprocPool(1)
    child("compiles", pool.process.pid)
    child("compiles", pool.submit(os.getpid).result())
    return pool


def load() -> object:
    batches = iter(DataLoader(TensorDataset(torch.ones(64, 16)), num_workers=2, worker_init_fn=introduce))
    return batches, [next(batches) for _ in range(2)]


def introduce(number: int) -> None:
    """They share tensors in both of torch's ways: by descriptors, and by files of /dev/shm."""
    torch.multiprocessing.set_sharing_strategy(["file_descriptor", "file_system"][number])
    child("loads", os.getpid())


def start() -> object:
    """A daemon, a shell with a program, and processes that wait for a FIFO: in open(), and in read()."""
    daemonise()
    child("daemon", int((faults.WORK / "family").read_text()))
    os.mkfifo("fifo")
    inner = f"{SAY.format('shell')}; exec sleep 3600"
    for command in (
        f"{SAY.format('shell')}; sh -c '{inner}'; true",
        f"{SAY.format('fifo')}; exec cat fifo",
        f"{SAY.format('fifo')}; exec cat <> fifo",
    ):
        subprocess.Popen(["sh", "-c", command])
    return None


def share() -> object:
    lock, segment = multiprocessing.get_context("spawn").Lock(), SharedMemory(create=True, size=4096)
    faults.write("shared", f"sem.{lock._semlock.name[1:]}\n{segment.name}\n")
    return lock, segment


def main(deaf: bool, fails: bool) -> None:
    faults.at(0)
    dist.init_process_group("gloo")
    for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP) if deaf else ():
        signal.signal(signum, signal.SIG_IGN)
    kept: list[object] = [
        make() for make in ((compile if fails else save, load, start, share) if faults.ROUND == 1 else (daemonise,))
    ]
    faults.write(f"ready-{faults.ROUND}", "ready")
    while not os.path.exists("hungry"):
        if os.path.exists("error"):
            raise RuntimeError("a test wants it")
        time.sleep(0.05)
    kept.append(b"x" * (1 << 30))


if __name__ == "__main__":
    main("deaf" in sys.argv, "fails" in sys.argv)
