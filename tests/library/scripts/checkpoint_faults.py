"""Run by test_checkpoint_faults.py: saves checkpoints in processes that die or are stopped, or on a disk that is full.

torch is imported once; each writer that shall die is a fork. Prints one JSON line for each thing that happened.
"""

from __future__ import annotations

import errno
import json
import os
import resource
import select
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from elasticd.checkpointing.storage.checkpoint_files import relink
from elasticd.checkpointing.storage.directory_lock import DirectoryLock
from elasticd.checkpointing.storage.lineage import lineage
from elasticd.checkpointing.storage.retention import retain
from tests.library import checkpoints
from tests.library.checkpoints import verified_lineage

FILE_OPERATIONS = ("open", "os.mkdir", "os.rename", "os.link", "os.remove", "os.rmdir", "os.truncate")


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


def life(directory: Path, done: Callable[[int], None]) -> None:
    """Everything that touches the directory: a re-link, saves, a step saved again, retention."""
    entry = lineage(directory)[0][0]
    relink(directory, entry, 2)
    save(directory, 2, 20, (1, 10))
    done(20)
    save(directory, 2, 20, (1, 10))
    retain(directory, 2, 1)
    save(directory, 2, 30, (1, 10))
    done(30)
    retain(directory, 2, 1)


def clean_afterwards(directory: Path) -> list[str]:
    """What is there after another round went on and saved twice."""
    entries, _ = lineage(directory)
    if entries:
        relink(directory, entries[0], 3)
    save(directory, 3, 40, (entries[0].manifest.round, entries[0].manifest.step) if entries else None)
    save(directory, 3, 50, None)
    retain(directory, 3, 1)
    return sorted(os.listdir(directory))


def die_at_every_file_operation(base: Path) -> None:
    point = 0
    where = base / "where"
    while True:
        point += 1
        directory = base / str(point)
        save(directory, 1, 10, None)

        def body(done: Callable[[int], None], point: int = point, directory: Path = directory) -> None:
            left = [point]

            def hook(event: str, arguments: tuple[Any, ...]) -> None:
                if event in FILE_OPERATIONS:
                    left[0] -= 1
                    if left[0] == 0:
                        os.write(fd, event.encode())
                        os.kill(os.getpid(), signal.SIGKILL)

            fd = os.open(where, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            sys.addaudithook(hook)
            life(directory, done)
            left[0] = -1

        status, saved = reaped(*fork(body))
        killed = os.WIFSIGNALED(status)
        assert killed or status == 0, status
        tell(
            point=point,
            event=where.read_text(),
            killed=killed,
            saved=saved or 10,
            loadable=loadable(directory),
            # Every third point will do: most leave the same things behind.
            after=clean_afterwards(directory) if point % 3 == 0 or not killed else None,
        )
        shutil.rmtree(directory)
        if not killed:
            return


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
    if what == "kill":
        die_at_every_file_operation(base)
    elif what == "stop":
        stop_in_the_middle(base)
    else:
        full_disk(base)
        no_directory(base)


main()
