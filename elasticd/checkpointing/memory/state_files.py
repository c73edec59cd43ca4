"""A state's files on their way to a checkpoint: each node writes its own, the first one commits them all. No torch.

A whole state is one file, state.pt, of the first node. A sharded one has a file of each rank:

    .r3-s1200.<token>.staging/__5_0.distcp    what rank 5 has, in torch.distributed.checkpoint's format
    .r3-s1200.<token>.staging/.metadata       from rank 0: which tensor lies where
    .r3-s1200.<token>.staging/state.pt        from rank 0: everything that is not sharded
    .r3-s1200.<token>.staging/part-1.json     node 1 has written its files: their sizes and checksums, or an error

The first node makes the staging directory, with its lock, and the others wait for it. It waits for their parts, writes
the manifest and renames the directory: a checkpoint is visible once it is whole, and a node that dies leaves none. In
an object store each node puts its files and its part below the checkpoint's name, and the first one the manifest.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

from elasticd.channel import Message
from elasticd.checkpointing.memory.buffers import Buffers, Snapshot, WriteTask
from elasticd.checkpointing.storage import checkpoint_files
from elasticd.checkpointing.storage.atomic_write import HashingFile, Staging, staging_path, write_file
from elasticd.checkpointing.storage.lineage import Entry
from elasticd.checkpointing.storage.manifest import MANIFEST, STATE, Manifest, SizeAndChecksum
from elasticd.checkpointing.storage.object_store import store_of
from elasticd.errors import Reason

PART_WAIT_S = 600.0
"""The wait for another node to write its files once the first one has written its own."""
_POLL_S, _STORE_POLL_S = 0.02, 0.5

WriteContent = Callable[[HashingFile], None]
_Result = TypeVar("_Result")


def write_own_files(
    own: Mapping[str, WriteContent], snapshot: Snapshot, why_give_up: Callable[[], Reason]
) -> Entry | None:
    """Write this node's own files of a state in memory; the first node's result is the checkpoint.

    Raises OSError, also when another node does not write its part, or when `why_give_up` returns a reason.
    """
    task, draft = snapshot.task, snapshot.draft
    assert task is not None
    if task.node == 0:
        return checkpoint_files.write(
            task.directory, draft, lambda staging: _write_and_merge(staging, draft, own, task, why_give_up), task.token
        )
    directory = Path(task.directory)
    folder = staging_path(directory, draft.round, draft.step, task.token)
    store = store_of(directory)
    if store is None:
        _wait_for(lambda: (folder / MANIFEST).exists() or None, why_give_up, "the first node has not begun to write")
    part = write_other_part(directory, draft, task.token, task.node, own)
    if store is not None:
        store.put_part(store.free_name(draft.name), _part_name(task, task.node), json.dumps(part).encode())
    else:
        report_part(folder / _part_name(task, task.node), part)
    return None


def file_contents(buffers: Buffers, buffer: int, snapshot: Snapshot) -> dict[str, WriteContent]:
    """The files of a state in a buffer."""
    if not snapshot.files:
        return {STATE: lambda file: file.write_pages(buffers.map_pages(buffer, snapshot.draft.bytes))}
    fd, places = buffers.fds[buffer], snapshot.files.items()
    return {
        name: functools.partial(HashingFile.copy_from, source=fd, start=at, size=size) for name, (at, size) in places
    }


def write_part(folder: Path, contents: Mapping[str, WriteContent]) -> Message:
    """Write the files that are not there, or being written; returns {files} or {error}, as JSON has them."""
    files: dict[str, SizeAndChecksum] = {}
    try:
        for name, fill in contents.items():
            with contextlib.suppress(FileExistsError):
                files[name] = write_file(folder / name, fill)
        return {"files": files}
    except OSError as error:
        return {"error": str(error)}


def report_part(path: Path, part: Mapping[str, Any]) -> None:
    """Report what `write_part` returned to the node that commits the checkpoint. Raises OSError."""
    data = json.dumps(part).encode()
    write_file(path.with_suffix(".tmp"), lambda file: file.write(data))
    os.rename(path.with_suffix(".tmp"), path)


def write_other_part(
    directory: Path, draft: Manifest, token: str, number: int, contents: Mapping[str, WriteContent]
) -> Message:
    """Write the part of another node or rank than the first, to the place where the first one publishes it."""
    store = store_of(directory)
    if store is None:
        return write_part(staging_path(directory, draft.round, draft.step, token), contents)
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        store.assume_claimed(draft.job, draft.run)
        with Staging(directory, draft.round, draft.step, f"{token}{number:04x}") as staging:
            part = write_part(staging.path, contents)
            store.put_files(staging.path, store.free_name(draft.name), part.get("files", ()))
            return part
    except OSError as error:
        return {"error": str(error)}


def merge_parts(parts: Mapping[str, Mapping[str, Any]]) -> dict[str, SizeAndChecksum]:
    """All files of all parts, each by what its error begins with. Raises OSError for a part with an error."""
    for who, part in parts.items():
        if "error" in part:
            raise OSError(who + part["error"])
    return {name: (size, checksum) for part in parts.values() for name, (size, checksum) in part["files"].items()}


def _write_and_merge(
    staging: Staging,
    draft: Manifest,
    contents: Mapping[str, WriteContent],
    task: WriteTask,
    why_give_up: Callable[[], Reason],
) -> dict[str, SizeAndChecksum]:
    parts = {"": write_part(staging.path, contents)}
    store = store_of(task.directory)
    for node in range(1, task.nodes):
        slow = f"node {node} has not written its part; do all nodes share {task.directory}?"
        name = _part_name(task, node)
        if store is None:
            taken = _wait_for(functools.partial(_take_part, staging.path / name), why_give_up, slow)
        else:
            take = functools.partial(store.take_part, store.free_name(draft.name), name)
            taken = _wait_for(take, why_give_up, f"node {node} has not put its part", _STORE_POLL_S)
        parts[f"node {node}: "] = json.loads(taken)
    return merge_parts(parts)


def _part_name(task: WriteTask, node: int) -> str:
    """The name of a node's part. In an object store there is no staging directory: a part of an earlier try is another
    object.
    """
    return f"part-{node}.json" if store_of(task.directory) is None else f"part-{node}.{task.token}.json"


def _take_part(path: Path) -> bytes | None:
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return None
    path.unlink()
    return content


def _wait_for(
    ready: Callable[[], _Result | None], why_give_up: Callable[[], Reason], slow: str, poll_s: float = _POLL_S
) -> _Result:
    deadline = time.monotonic() + PART_WAIT_S
    while (result := ready()) is None:
        if why := why_give_up() or (f"for {PART_WAIT_S:g} s {slow}" if time.monotonic() > deadline else ""):
            raise OSError(why)
        time.sleep(poll_s)
    return result


def stream(content: Iterator[bytes | memoryview]) -> WriteContent:
    def fill(file: HashingFile) -> None:
        for piece in content:
            file.write(piece)

    return fill
