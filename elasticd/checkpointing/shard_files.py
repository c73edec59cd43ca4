"""A sharded checkpoint while it is written: each node writes its files, the first one commits them all. No torch here.

    .r3-s1200.<token>.staging/__5_0.distcp    what rank 5 has, in torch.distributed.checkpoint's format
    .r3-s1200.<token>.staging/.metadata       from rank 0: which tensor lies where
    .r3-s1200.<token>.staging/state.pt        from rank 0: everything that is not sharded
    .r3-s1200.<token>.staging/part-1.json     node 1 has written its files: their sizes and checksums, or an error

The first node makes the staging directory, with its lock, and the others wait for it. It waits for their parts, writes
the manifest and renames the directory: a checkpoint is visible once it is whole, and a node that dies leaves none.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

from elasticd.checkpointing import api
from elasticd.checkpointing.atomic_write import HashingFile, Staging, staging_path, write_file
from elasticd.checkpointing.buffers import Snapshot, WriteTask
from elasticd.checkpointing.manifest import MANIFEST, FileState

PART_S = 600.0
"""For another node to write its files once the first one has written its own."""
_POLL_S = 0.02

Content = Callable[[HashingFile], None]
Found = TypeVar("Found")


def write_snapshot(fd: int, snapshot: Snapshot, gives_up: Callable[[], str]) -> api.Entry | None:
    """This node's part of a checkpoint, from the buffer `fd`; the first node's result is the checkpoint.

    Raises OSError, also when another node does not write its part, or when `gives_up` returns a reason.
    """
    task, draft = snapshot.task, snapshot.draft
    assert task is not None
    contents = {name: _range(fd, start, size) for name, (start, size) in snapshot.files.items()}
    if task.node == 0:
        return api.write_files(
            task.directory, draft, lambda staging: _commit(staging, contents, task, gives_up), task.token
        )
    folder = staging_path(Path(task.directory), draft.round, draft.step, task.token)
    _wait(lambda: (folder / MANIFEST).exists() or None, gives_up, "the first node has not begun to write")
    part = json.dumps(write_part(folder, contents)).encode()
    path = folder / f"part-{task.node}.json"
    write_file(path.with_suffix(".tmp"), lambda file: file.write(part))
    os.rename(path.with_suffix(".tmp"), path)
    return None


def write_part(folder: Path, contents: Mapping[str, Content]) -> dict[str, Any]:
    """Write files; returns {files} or {error}, as JSON has them."""
    try:
        return {"files": {name: write_file(folder / name, fill) for name, fill in contents.items()}}
    except OSError as error:
        return {"error": str(error)}


def merge(parts: Mapping[str, Mapping[str, Any]]) -> dict[str, FileState]:
    """All files of all parts. Raises OSError for a part with an error."""
    for who, part in parts.items():
        if "error" in part:
            raise OSError(f"{who}: {part['error']}")
    return {name: (size, checksum) for part in parts.values() for name, (size, checksum) in part["files"].items()}


def _commit(
    staging: Staging, contents: Mapping[str, Content], task: WriteTask, gives_up: Callable[[], str]
) -> dict[str, FileState]:
    parts = {"node 0": write_part(staging.path, contents)}
    for node in range(1, task.nodes):
        path = staging.path / f"part-{node}.json"
        slow = f"node {node} has not written its part; do all nodes share {task.directory}?"
        parts[f"node {node}"] = json.loads(_wait(lambda path=path: _content(path), gives_up, slow))  # type: ignore[misc]
        path.unlink()
    return merge(parts)


def _content(path: Path) -> bytes | None:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        return None


def _wait(ready: Callable[[], Found | None], gives_up: Callable[[], str], slow: str) -> Found:
    deadline = time.monotonic() + PART_S
    while (found := ready()) is None:
        if why := gives_up() or (f"for {PART_S:g} s {slow}" if time.monotonic() > deadline else ""):
            raise OSError(why)
        time.sleep(_POLL_S)
    return found


def _range(fd: int, start: int, size: int) -> Content:
    return lambda file: file.copy(fd, start, size)


def stream(content: Iterator[bytes | memoryview]) -> Content:
    def fill(file: HashingFile) -> None:
        for piece in content:
            file.write(piece)

    return fill
