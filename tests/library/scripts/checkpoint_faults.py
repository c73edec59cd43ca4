"""Run by test_checkpoint_faults.py: saves checkpoints in processes that are stopped, or on a disk that is full.

The writer is a fork. Prints one JSON line for each thing that happened.
"""

from __future__ import annotations

import errno
import json
import os
import resource
import select
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from elasticd.checkpointing.storage.checkpoint_files import relink
from elasticd.checkpointing.storage.directory_lock import DirectoryLock
from elasticd.checkpointing.storage.lineage import lineage
from tests.library import checkpoints
from tests.library.checkpoints import verified_lineage


def save(directory: Path, round: int, step: int, parent: tuple[int, int] | None, size: int = 1000) -> None:
    state = {"step": step, "weights": torch.full((size,), float(step))}
    checkpoints.save(directory, round=round, step=step, parent=parent, world_size=1, job="j", run="r", state=state)


def tell(**what: Any) -> None:
    print(json.dumps(what), flush=True)


def loadable(directory: Path) -> int:
    """The newest step that really loads, 0 if none; the lineage must offer it first."""
    for entry in verified_lineage(directory)[0]:
        state = checkpoints.load(entry)
        assert state["step"] == entry.manifest.step
        assert bool((state["weights"] == entry.manifest.step).all())
        return int(state["step"])
    return 0


def fork(body: Callable[[Callable[[int], None]], None]) -> tuple[int, int]:
    """A child that runs `body(done)` and exits; returns its pid and the pipe on which `done(step)` arrives."""
    read, write = os.pipe()
    pid = os.fork()
    if pid:
        os.close(write)
        return pid, read
    try:
        os.close(read)
        body(lambda step: os.write(write, step.to_bytes(4, "little")) and None)
        os._exit(0)
    finally:
        os._exit(9)


def reaped(pid: int, read: int, told: bytes = b"") -> tuple[int, int]:
    """Wait for the child: its wait status, and the last step it said was saved."""
    with open(read, "rb") as pipe:
        told += pipe.read()
    return os.waitpid(pid, 0)[1], int.from_bytes(told[-4:], "little")


def stop_in_the_middle(base: Path) -> None:
    """A writer that only sleeps is no dead one: its half-written checkpoint stays, until it is killed."""
    directory, gate = base / "stopped", base / "gate"
    os.mkfifo(gate)

    def body(done: Callable[[int], None]) -> None:
        def hook(event: str, arguments: tuple[Any, ...]) -> None:
            if event == "open" and str(arguments[0]).endswith("state.pt"):
                done(1)
                os.close(os.open(gate, os.O_RDONLY))  # until somebody opens the other end

        sys.addaudithook(hook)
        save(directory, 1, 10, None)

    def unfinished() -> int:
        return sum(name.endswith(".staging") for name in os.listdir(directory))

    pid, read = fork(body)
    assert select.select([read], [], [], 30)[0]
    save(directory, 2, 20, None)
    while_alive = unfinished()
    os.kill(pid, signal.SIGKILL)
    reaped(pid, read)
    save(directory, 2, 30, None)
    tell(while_alive=while_alive, when_dead=unfinished(), loadable=loadable(directory))


def refuse(directory: Path, step: int, size: int) -> tuple[str, list[str]]:
    """Save where it cannot work: the error's name, and what is in the directory afterwards."""
    try:
        save(directory, 1, step, None, size)
    except OSError as error:
        return errno.errorcode[error.errno or 0], sorted(os.listdir(directory))
    return "saved", sorted(os.listdir(directory))


def full_disk(directory: Path) -> None:
    """A limit on file sizes stands for a disk that holds one checkpoint and not two."""
    megabytes = 250_000
    save(directory, 1, 10, None, megabytes * 3)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, resource.RLIM_INFINITY))
    error, left = refuse(directory, 20, megabytes * 3)
    again, _ = refuse(directory, 20, megabytes * 3)
    tell(full=error, again=again, left=left, loadable=loadable(directory))
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    save(directory, 1, 30, None, megabytes // 2)
    tell(loadable=loadable(directory))


def no_directory(directory: Path) -> None:
    """After `full_disk`: nothing can be written below a plain file, and everything can be read."""
    (directory.parent / "file").write_text("")
    where = directory.parent / "file" / "below"
    errors = []
    entry = lineage(directory)[0][0]
    attempts: list[Callable[[], object]] = [
        lambda: save(where, 1, 40, None),
        lambda: relink(where, entry, 2),
        lambda: DirectoryLock(where, "j", "r").acquire(),
    ]
    for attempt in attempts:
        try:
            attempt()
            errors.append("worked")
        except OSError as error:
            errors.append(errno.errorcode[error.errno or 0])
    tell(refused=errors, loadable=loadable(directory), left=sorted(os.listdir(directory)))


def main() -> None:
    what, base = sys.argv[1], Path(sys.argv[2])
    if what == "stop":
        stop_in_the_middle(base)
    else:
        full_disk(base)
        no_directory(base)


main()
