"""Nodes write one sharded checkpoint together: all files or no checkpoint, whoever fails."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from elasticd.checkpointing.memory import state_files
from elasticd.checkpointing.memory.buffers import Buffers, Snapshot, WriteTask
from elasticd.checkpointing.memory.state_files import WriteContent
from elasticd.checkpointing.storage.checkpoint_files import relink
from elasticd.checkpointing.storage.lineage import Entry, find_damage, lineage
from elasticd.checkpointing.storage.manifest import NO_CHECKSUM, STATE, Manifest

FILES = {
    0: {"__0_0.distcp": b"a" * 5000, ".metadata": b"m" * 10, STATE: b"s" * 4096},
    1: {"__1_0.distcp": b"b" * 9000},
    2: {"__2_0.distcp": b""},
}


@contextlib.contextmanager
def held(directory: Path, node: int, token: str = "abcd") -> Iterator[tuple[dict[str, WriteContent], Snapshot]]:
    """A node's files, each somewhere in a buffer."""
    fd, files, at = os.memfd_create("test"), {}, 123
    for name, content in FILES[node].items():
        os.pwrite(fd, content, at)
        files[name] = (at, len(content))
        at += len(content) + 77
    draft = Manifest(1, 10, None, 3, 0, NO_CHECKSUM, "lm", "1", None, time.time())
    task = WriteTask(str(directory), 3, "a test", "", "", 0, 0.0, token=token, node=node, nodes=len(FILES))
    snapshot = Snapshot(draft, 1, task, files=files)
    try:
        yield state_files.file_contents(Buffers(fd, [fd]), 0, snapshot), snapshot
    finally:
        os.close(fd)


def write(directory: Path, nodes: list[int], gives_up: Any = lambda: "") -> dict[int, Any]:
    """What became of it on each node: its result, or its error."""
    results: dict[int, Any] = {}

    def run(node: int) -> None:
        with held(directory, node) as (own, snapshot):
            try:
                results[node] = state_files.write_own_files(own, snapshot, gives_up)
            except OSError as error:
                results[node] = str(error)

    threads = [threading.Thread(target=run, args=(node,)) for node in nodes]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    return results


def test_first_node_commits_the_files_of_all(tmp_path: Path) -> None:
    results = write(tmp_path, [2, 1, 0])
    entry = results[0]
    assert isinstance(entry, Entry)
    assert (results[1], results[2]) == (None, None)
    assert find_damage(entry) is None
    for files in FILES.values():
        for name, content in files.items():
            assert (entry.path / name).read_bytes() == content
    assert sorted(path.name for path in entry.path.iterdir()) == sorted(
        ["manifest.json", *(name for files in FILES.values() for name in files)]
    )
    assert entry.manifest.total_bytes == 5000 + 10 + 4096 + 9000
    assert [each.path for each in lineage(tmp_path)[0]] == [entry.path]
    relinked = relink(tmp_path, entry, 2)
    assert find_damage(relinked) is None
    assert relinked.manifest.files == entry.manifest.files


@pytest.mark.parametrize("there", [[0, 1], [1, 2]])
def test_lost_node_leaves_no_checkpoint(tmp_path: Path, there: list[int]) -> None:
    start = time.monotonic()
    results = write(tmp_path, there, lambda: "a node is lost" if time.monotonic() > start + 0.3 else "")
    assert results[there[0]] == "a node is lost"
    assert lineage(tmp_path) == ([], [])
    assert [*tmp_path.iterdir()] == []


def test_error_of_a_node_is_the_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usual = state_files.write_file

    def write_file(path: Path, fill: Any) -> Any:
        if path.name == "__2_0.distcp":
            raise OSError(28, "No space left on device")
        return usual(path, fill)

    monkeypatch.setattr(state_files, "write_file", write_file)
    assert write(tmp_path, [0, 1, 2])[0] == "node 2: [Errno 28] No space left on device"
    assert [*tmp_path.iterdir()] == []
