"""The end of a job: the newest state that its nodes have in memory becomes a checkpoint, whichever nodes are left.

No rank is left to agree on anything, and rank 0's node may be lost. So the nodes meet in the checkpoint directory. Each
takes its newest state that is no checkpoint. The first one to make the staging directory of that state commits it; the
others add the files that nobody has begun to write there, and wait. A whole state is one file, so each node suffices;
of a sharded one all files have to come together. Where nodes do not share the directory, each writes what it holds. An
object store has no staging directory: there one of the nodes that hold all files reserves the checkpoint's name, by an
object that only one of them can put, and the others wait.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from elasticd.channel import Message
from elasticd.checkpointing.memory import state_files
from elasticd.checkpointing.memory.buffers import Buffers, SaveKey, Snapshot, WriteTask
from elasticd.checkpointing.memory.state_files import WriteContent
from elasticd.checkpointing.storage import checkpoint_files
from elasticd.checkpointing.storage.atomic_write import Staging, is_abandoned, staging_path
from elasticd.checkpointing.storage.lineage import Entry, lineage
from elasticd.checkpointing.storage.manifest import STATE, Manifest, SizeAndChecksum, shard_names
from elasticd.checkpointing.storage.object_store import ObjectStore, store_of
from elasticd.errors import Reason

PARTS_WAIT_WHEN_ENDED_S = 4.0
"""The wait for the parts of other nodes when the launcher ends the writer: it waits a little longer."""
PARTS_WAIT_AT_FLUSH_S = 15.0
"""The wait for the parts of a save as usual that is being written: half of what the launcher waits. Then copies are
used."""
OTHER_NODES_BEGIN_WAIT_S = 1.0
"""The wait for other nodes to begin to write, before this one says what the job leaves: their kills come later."""
UNBEGUN_PARTS_WAIT_S = 8.0
"""The wait for nodes that have not begun to write their part: all learn of the end within seconds."""
_STAGING_TOKEN = "e"
"""The token in the staging directory's name, by which all nodes know it."""
_COMMIT_TRIES = 5
_POLL_S, _LOOK_S = 0.02, 0.25


class LastWrite:
    """The last write of one writer. `task` says where and how, as a rank said at the last copy; None: not known yet."""

    def __init__(self, buffers: Buffers, is_ending: Callable[[], bool]) -> None:
        """`is_ending` returns whether the launcher ends the writer."""
        self._buffers, self._is_ending = buffers, is_ending
        self._ends_at = float("inf")
        self._token = secrets.token_hex(8)
        self.task: WriteTask | None = None
        self._tried: set[SaveKey] = set()
        self._found: Entry | None = None
        """The newest checkpoint, once a state was made one or found to be older."""
        self._lost: tuple[int, str] | None = None
        """The newest step that could not be written, and why."""

    def next_buffer(self) -> int | None:
        """The buffer with the newest state, unless it is a checkpoint or is to be written as usual; then an older one
        if it could not be written.
        """
        for at, snapshot in self._newest_first():
            if snapshot.is_due or snapshot.checkpoint_path:
                break
            if snapshot.original_key not in self._tried and (snapshot.task or self.task):
                return at
        return None

    def flush_result(self, results: Mapping[SaveKey, Mapping[str, Any]]) -> Message:
        """{step, path} of the checkpoint that is left, and `why` a newer state is none; {} without a state.

        Waits until other nodes have left theirs. `results`: of the writes as usual, by the state's key.
        """
        self._look_for_other_nodes()
        snapshot = next((snapshot for _, snapshot in self._newest_first()), None)
        if snapshot is None:
            return {}
        step, why = self._lost or (snapshot.draft.step, results.get(snapshot.key, {}).get("why", ""))
        why = why and f"step {step}: {why}"
        if self._found is not None:
            return {"step": self._found.manifest.step, "path": str(self._found.path), "why": why}
        return {"step": snapshot.draft.step, "path": snapshot.checkpoint_path, "why": why}

    def _look_for_other_nodes(self) -> None:
        """Look for states that other nodes of the job leave."""
        if self.task is None or self.task.nodes == 1:
            return
        deadline, directory = time.monotonic() + OTHER_NODES_BEGIN_WAIT_S, Path(self.task.directory)
        with contextlib.suppress(OSError):
            while True:
                late = time.monotonic() > deadline
                writing = [
                    staging for staging in directory.glob(f".*.{_STAGING_TOKEN}.staging") if not is_abandoned(staging)
                ]
                newest, _ = lineage(directory)
                self._found = newest[0] if newest else self._found
                if (late and not writing) or self._why_give_up():
                    return
                time.sleep(_LOOK_S)

    def mark_done(self, snapshot: Snapshot, entry: Entry | None, why: str) -> None:
        """The result of the task."""
        self._tried.add(snapshot.original_key)
        self._found = entry
        if entry is None:
            self._lost = self._lost or (snapshot.draft.step, why)

    def _newest_first(self) -> list[tuple[int, Snapshot]]:
        every = [(at, snapshot) for at, snapshot in enumerate(self._buffers.held) if snapshot is not None]
        return sorted(
            every, key=lambda each: (each[1].draft.round, each[1].draft.step, each[1].save_number), reverse=True
        )

    def write(self, buffer: int, snapshot: Snapshot) -> Entry:
        """Make the state in this buffer a checkpoint; returns the newest one then. Raises OSError, CheckpointError."""
        task, draft = snapshot.task, snapshot.draft
        assert task is not None
        directory = Path(task.directory)
        folder = staging_path(directory, draft.round, draft.step, _STAGING_TOKEN)
        final = directory / draft.name
        contents = self._contents(buffer, snapshot)
        needed = shard_names(draft.world_size) if snapshot.files else [STATE]
        if (store := store_of(directory)) is not None:
            return self._put_to_store(store, snapshot, contents, set(needed))
        joined = False
        for _ in range(_COMMIT_TRIES):
            newest, _ = lineage(directory)
            if newest and (newest[0].manifest.round, newest[0].manifest.step) >= (draft.round, draft.step):
                return newest[0]
            if self._why_give_up() or (joined and not contents.keys() >= set(needed)):
                break
            try:
                return checkpoint_files.write(
                    directory,
                    draft,
                    lambda staging: self.commit(staging.path, final, contents, needed),
                    _STAGING_TOKEN,
                )
            except FileExistsError:
                self._add_files_and_wait(folder, contents)
                joined = True
        raise OSError("another node has begun to commit it, and has not done so")

    def _put_to_store(
        self, store: ObjectStore, snapshot: Snapshot, contents: Mapping[str, WriteContent], needed: set[str]
    ) -> Entry:
        """Under the name of a step's second checkpoint: rank 0's node may still be putting the first one, as usual."""
        task, draft = snapshot.task, snapshot.draft
        assert task is not None
        directory, deadline = Path(task.directory), time.monotonic() + UNBEGUN_PARTS_WAIT_S
        path = directory / f"{draft.name}.again"

        def fill(staging: Staging) -> dict[str, SizeAndChecksum]:
            return state_files.merge_parts({"": state_files.write_part(staging.path, contents)})

        def publish(staging: Staging, manifest: Manifest) -> Path:
            store.commit(staging.path, path.name, manifest, None)
            return path

        while True:
            newest, _ = lineage(directory)
            if newest and (newest[0].manifest.round, newest[0].manifest.step) >= (draft.round, draft.step):
                return newest[0]
            if contents.keys() >= needed and self._reserve(store, path.name, task):
                return checkpoint_files.write(directory, draft, fill, publish=publish)
            if self._why_give_up() or (time.monotonic() > deadline and not store.is_reserved(path.name)):
                raise OSError("no node has put all of it into the object store")
            time.sleep(_LOOK_S)

    def _reserve(self, store: ObjectStore, name: str, task: WriteTask) -> bool:
        try:
            return store.reserve(name, self._token)
        except NotImplementedError:  # without conditional puts it is always the same node
            return task.node == 0

    def _contents(self, buffer: int, snapshot: Snapshot) -> dict[str, WriteContent]:
        """The files of this state that are in this node's memory, also as a copy for another node."""
        contents = state_files.file_contents(self._buffers, buffer, snapshot)
        for at, other in enumerate(self._buffers.held):
            if other is not None and at != buffer and other.original_key == snapshot.original_key:
                contents |= state_files.file_contents(self._buffers, at, other)
        return contents

    def commit(
        self, folder: Path, final: Path, contents: Mapping[str, WriteContent], needed: Sequence[str]
    ) -> dict[str, SizeAndChecksum]:
        """Write this node's files, and wait for the others'; or for `final`, which another node may still be writing
        as usual. Raises OSError: FileExistsError once that is there.
        """
        parts = {"": state_files.write_part(folder, contents)}
        deadline, seen = time.monotonic() + UNBEGUN_PARTS_WAIT_S, dict[str, int]()
        while missing := set(needed) - set(merged := state_files.merge_parts(parts)):
            for path in folder.glob("part-*.json"):
                parts[f"another node ({path.stem}): "] = json.loads(path.read_bytes())
                path.unlink()
            begun = {name: (folder / name).stat().st_size for name in missing & set(os.listdir(folder))}
            if begun and (begun != seen or not missing <= contents.keys()):  # another node writes
                deadline, seen = time.monotonic() + UNBEGUN_PARTS_WAIT_S, begun
            if final.exists():
                raise FileExistsError(final)
            late = time.monotonic() > deadline
            if begun and late:  # that node has died, and this one has them, too
                for name in missing:
                    (folder / name).unlink(missing_ok=True)
                parts["again: "] = state_files.write_part(folder, {name: contents[name] for name in missing})
            if why := self._why_give_up() or ("no other node has written them" if late and not begun else ""):
                raise OSError(f"{', '.join(sorted(missing))}: {why}")
            time.sleep(_POLL_S)
        return {name: merged[name] for name in needed}

    def _why_give_up(self) -> Reason:
        """Why other nodes are waited for no longer, "" if they are."""
        if self._is_ending():
            self._ends_at = min(self._ends_at, time.monotonic() + PARTS_WAIT_WHEN_ENDED_S)
        return "the launcher has ended the writer" if time.monotonic() > self._ends_at else ""

    def _add_files_and_wait(self, folder: Path, contents: Mapping[str, WriteContent]) -> None:
        """Write what is not there yet; returns when the other node has ended with it."""
        part = state_files.write_part(folder, contents)
        if part.get("files", True):
            with contextlib.suppress(FileNotFoundError):  # the other node has given up
                state_files.report_part(folder / f"part-{os.getpid():x}{time.time_ns():x}.json", part)
        while not is_abandoned(folder) and not self._why_give_up():
            time.sleep(_POLL_S)
