"""Rank 0's checkpoints: written whole or not at all, checksummed, chained to their parent, with a fallback.

    <dir>/r<round>-s<step>/state.pt         plain torch.load(weights_only=True) opens it
    <dir>/r<round>-s<step>/manifest.json    what it is, where it comes from, its checksum

Sessions and agents call these functions. Only `save` and `load` import torch, so that the agent can read lineages. One
process saves one checkpoint at a time. docs/checkpoints.md lists the guarantees and their limits.
"""

from __future__ import annotations

import errno
import os
import pickle
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from elasticd.bounded_json import JsonObject
from elasticd.checkpointing.state.layout import UNPICKLABLE, Layout
from elasticd.checkpointing.state.safe_types import check_loadable
from elasticd.checkpointing.state.training_state import StateDict
from elasticd.checkpointing.storage.atomic_write import HashingFile, Staging, sweep, write_file
from elasticd.checkpointing.storage.directory_lock import DirectoryLock
from elasticd.checkpointing.storage.lineage import Entry, examine, highest_round, lineage, names, open_verified
from elasticd.checkpointing.storage.manifest import MANIFEST, STATE, FileState, Manifest, Unreadable, parse
from elasticd.checkpointing.storage.object_store import files_of
from elasticd.checkpointing.storage.retention import retain
from elasticd.errors import CheckpointCorrupt, CheckpointRefused

__all__ = ["DirectoryLock", "Entry", "highest_round", "lineage", "load", "relink", "retain", "save"]


def save(
    directory: str | os.PathLike[str],
    *,
    round: int,
    step: int,
    parent: tuple[int, int] | None,
    world_size: int,
    job: str,
    run: str,
    state: StateDict,
    cursor: JsonObject | None = None,
) -> Entry:
    """Write one checkpoint; when this returns it is on the disk under its name, and replaces one of the same step.

    `parent`: the (round, step) this round resumed from. A round has one parent: once it has a checkpoint, that one's
    parent counts. Raises CheckpointRefused, before writing, for a state that would not load again; OSError when the
    disk is full or the directory cannot be written, and then leaves no checkpoint; ValueError for invalid numbers.
    """
    check_loadable(state)
    draft = Manifest(round, step, parent, world_size, 0, "", job, run, cursor, time.time())
    check_cursor(draft)
    layout = Layout(state)
    return write(directory, draft, layout.fill)


def check_cursor(draft: Manifest) -> None:
    """Raises CheckpointRefused for a sampler's position that is not JSON."""
    try:
        draft.to_json()
    except (TypeError, ValueError) as error:
        raise CheckpointRefused(f"cursor: a sampler's state must be JSON, and this is not: {error}") from error


def write(directory: str | os.PathLike[str], draft: Manifest, fill: Callable[[HashingFile], None]) -> Entry:
    """Write the checkpoint that `draft` describes, without its size and checksum; `fill` writes state.pt.

    `save` describes what is raised.
    """
    return write_files(directory, draft, lambda staging: {STATE: write_file(staging.path / STATE, fill)})


def write_files(
    directory: str | os.PathLike[str],
    draft: Manifest,
    fill: Callable[[Staging], dict[str, FileState]],
    token: str = "",
    publish: Callable[[Staging, Manifest], Path] = Staging.publish,
) -> Entry:
    """The same for any files: `fill` writes them, state.pt among them, and returns what they are."""
    base = Path(directory)
    draft = replace(draft, parent=_parent(base, draft.round, draft.parent))
    base.mkdir(mode=0o700, parents=True, exist_ok=True)
    sweep(base, draft.round)
    with Staging(base, draft.round, draft.step, token) as staging:
        files = fill(staging)
        size, checksum = files.pop(STATE)
        manifest = replace(draft, bytes=size, checksum=checksum, files=files)
        return Entry(publish(staging, manifest), manifest)


def load(entry: Entry, map_location: Any = "cpu") -> StateDict:
    """The state that `save` wrote, checked as a whole before anything is unpickled. On the CPU its tensors are mapped
    from the file: memory is used for what is touched, and whatever changes them changes a private copy of the page.

    Raises CheckpointCorrupt for a checkpoint that cannot be used (the next one of the lineage may be good), OSError if
    it cannot be opened.
    """
    fd = open_verified(entry)
    try:
        return load_mapped(fd, map_location)
    finally:
        os.close(fd)


def load_mapped(fd: int, map_location: Any = "cpu") -> StateDict:
    """The state in the file or the memory `fd`, which is whole. Raises CheckpointCorrupt."""
    import torch

    try:
        state = torch.load(f"/proc/self/fd/{fd}", map_location=map_location, weights_only=True, mmap=True)
    except (*UNPICKLABLE, pickle.UnpicklingError, EOFError, KeyError) as error:
        raise CheckpointCorrupt(f"{STATE} is undamaged, but this torch cannot load it: {error}") from error
    if not isinstance(state, dict):
        raise CheckpointCorrupt(f"{STATE} holds {type(state).__name__}, not a dict")
    return state


def relink(directory: str | os.PathLike[str], entry: Entry, round: int) -> Entry:
    """Make `entry`, which round `round` has loaded, that round's own first checkpoint, before its first step.

    From then on nothing that an older round writes is in the lineage. Hard links where the file system has
    them, else copies. A second call, or one for an entry of this round, changes nothing. Raises OSError; with ESTALE
    when the checkpoint has changed since it was loaded.
    """
    base, source = Path(directory), entry.manifest
    if source.round == round:
        return entry
    for own in names(base):
        if (own.round, own.step, own.hidden) == (round, source.step, None):
            there = examine(own)
            if isinstance(there, Manifest) and there.checksum == source.checksum:
                return Entry(own.path, there)
    manifest = source.relinked_to(round)
    sweep(base, round)
    fd = os.open(entry.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        # Manifest and state come from one open directory, so they belong together whatever is renamed.
        if _manifest_in(fd) != source:
            raise OSError(errno.ESTALE, "the checkpoint was replaced after it was loaded", str(entry.path))
        with Staging(base, round, source.step, source=entry.path.name) as staging:
            for name, expected in files_of(source).items():
                copied = staging.link(name, fd)
                if copied is not None and copied != expected:
                    raise OSError(errno.ESTALE, "the checkpoint changed while it was copied", str(entry.path))
            return Entry(staging.publish(manifest), manifest)
    finally:
        os.close(fd)


def _manifest_in(directory: int) -> Manifest | Unreadable:
    with open(os.open(MANIFEST, os.O_RDONLY | os.O_CLOEXEC, dir_fd=directory), "rb") as file:
        return parse(file.read())


def _parent(base: Path, round: int, given: tuple[int, int] | None) -> tuple[int, int] | None:
    """The parent of a round's checkpoints: the one in its first manifest, else the given one, through re-links."""
    present = [name for name in names(base) if name.hidden is None]
    for own in sorted((name for name in present if name.round == round), key=lambda each: each.step):
        manifest = examine(own)
        if isinstance(manifest, Manifest):
            return manifest.parent
    for other in present:
        if (other.round, other.step) == given:
            manifest = examine(other)
            if isinstance(manifest, Manifest) and manifest.relinked:
                return manifest.parent
    return given
