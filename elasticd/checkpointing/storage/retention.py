"""Which checkpoints are deleted: all but the newest few of the lineage, and never the last good one.

A writer deletes only checkpoints of its own round, until its round has one whose checksum was read back from the disk;
then older rounds' go as well. Before anything is deleted, one of those that stay is read back whole. Rounds outside the
lineage (a job that was started over in the same directory) and checkpoints of a newer elasticd are left alone.
"""

from __future__ import annotations

import os
from pathlib import Path

from elasticd.checkpointing.storage.atomic_write import discard_checkpoint, fsync_directory, sweep_unfinished
from elasticd.checkpointing.storage.lineage import (
    CheckpointName,
    Entry,
    LineageWalk,
    find_damage,
    list_names,
    pull_from_store,
    read_named_manifest,
    walk_lineage,
)
from elasticd.checkpointing.storage.manifest import MANIFEST, Unreadable
from elasticd.checkpointing.storage.object_store import store_of
from elasticd.errors import ObjectStoreError


def retain(directory: str | os.PathLike[str], own_round: int, keep: int, keep_every: int = 0) -> list[Path]:
    """Keep the newest `keep` steps of the lineage across rounds; returns the deleted paths. Call it after a save.

    The first step from each multiple of `keep_every` on stays as well: saves at an interval of time meet no multiple.
    Before it deletes, it reads the newest checkpoint back, once; not from an object store, which compares what it
    receives: there the sizes are compared. Raises ValueError for keep < 1, OSError if the directory cannot be listed or
    changed; where one cannot be deleted, once the others are.
    """
    if keep < 1:
        raise ValueError(f"keep is {keep}: at least one checkpoint must stay")
    pull_from_store(directory)
    # Before the walk: what another node publishes from now on, also in the place of another one, is not deleted.
    present = [named for named in list_names(directory) if named.hidden_kind is None]
    seen = {named.path: _device_and_inode(named.path) for named in present}
    walked = walk_lineage(directory)
    if store_of(directory) is not None:
        present = [named for named in present if not _may_be_put(named, walked)]
    if not _paths_to_delete(present, walked, 0, own_round, keep, keep_every):
        return []
    trusted = store_of(directory) is not None
    anchor = next((i for i, entry in enumerate(walked.entries) if trusted or find_damage(entry) is None), None)
    if anchor is None:
        return []
    deleted, refused = [], None
    for path in _paths_to_delete(present, walked, anchor, own_round, keep, keep_every):
        if _device_and_inode(path) == seen[path]:
            try:
                discard_checkpoint(path)
                deleted.append(path)
            except ObjectStoreError:
                raise  # it may be away, and each try takes its time
            except OSError as error:  # somebody has made this one immutable
                refused = refused or error
    good = walked.entries[anchor].manifest
    sweep_unfinished(Path(directory), own_round, with_older_rounds=good.round == own_round and not good.relinked)
    if refused is not None:
        raise refused
    return deleted


def _paths_to_delete(
    present: list[CheckpointName], found: LineageWalk, anchor: int, own_round: int, keep: int, keep_every: int
) -> list[Path]:
    """The checkpoints that may be deleted, in an order that keeps the lineage whole if interrupted: others first, then
    the oldest.
    """
    staying = _kept_paths(found, keep, keep_every, anchor)
    own = [named for named in present if named.round == own_round]
    older: list[CheckpointName] = []
    if max((named.round for named in present), default=0) > own_round:
        # A newer round exists, so this writer is a zombie: it bounds its own files, and keeps what the lineage needs.
        newest = sorted(
            (named for named in own if not isinstance(read_named_manifest(named), Unreadable)),
            key=lambda each: each.step,
            reverse=True,
        )
        staying.update(named.path for named in newest[:keep])
    elif found.entries:
        good = found.entries[anchor].manifest
        if good.round == own_round and not good.relinked:
            older = [named for named in present if found.oldest_round <= named.round < own_round]
    lineage = {entry.path for entry in found.entries}
    deletable = [named for named in own + older if named.path not in staying and _is_deletable(named)]
    deletable.sort(key=lambda each: (each.path in lineage, each.round, each.step, not each.is_replacement))
    return [named.path for named in deletable]


def _kept_paths(found: LineageWalk, keep: int, keep_every: int, anchor: int) -> set[Path]:
    """The newest `keep` steps, milestones and the one known to be good, with the links between their rounds."""
    # A round's re-linked first checkpoint and its parent are one step: the same data, often the same file.
    newest_steps: list[Entry] = []
    steps: set[int] = set()
    every_step = [entry.manifest.step for entry in found.entries]
    for i, entry in enumerate(found.entries):
        step = entry.manifest.step
        before = next((older for older in every_step[i:] if older < step), 0)
        is_milestone = bool(keep_every) and step // keep_every > before // keep_every
        if (step not in steps and (len(steps) < keep or is_milestone)) or i == anchor:
            newest_steps.append(entry)
            steps.add(step)
    rounds = {entry.manifest.round for entry in newest_steps}
    between = [
        link for round, link in found.link_of_round.items() if round not in rounds and round > min(rounds, default=0)
    ]
    return {*(entry.path for entry in newest_steps), *between}


def set_aside(directory: str | os.PathLike[str], step: int) -> list[Path]:
    """Rename checkpoints of later steps than `step`, the newest first, and mark that the directory went back to it;
    returns their new paths. Nothing loads or deletes them any more. Raises OSError.
    """
    later = [named for named in list_names(directory) if named.hidden_kind is None and named.step > step]
    renamed = []
    store = store_of(directory)
    for named in sorted(later, key=lambda each: (each.round, each.step), reverse=True):
        target, number = named.path.with_name(f"{named.path.name}.aside"), 1
        while target.exists():
            number += 1
            target = named.path.with_name(f"{named.path.name}.aside{number}")
        if store is not None:
            store.rename_checkpoint(named.path.name, target.name)
        named.path.rename(target)
        renamed.append(target)
    fsync_directory(Path(directory))  # the mark says that they are gone
    went_back_mark(directory, step).touch()
    if store is not None:
        store.write_small_file(went_back_mark(directory, step).name)
    return renamed


def went_back_mark(directory: str | os.PathLike[str], step: int) -> Path:
    """The file that is there once a directory went back to a step."""
    return Path(directory, f".went-back-to-s{step}")


def _device_and_inode(path: Path) -> tuple[int, int] | None:
    """The device and inode that have this name now; None if nothing has."""
    try:
        status = os.stat(path, follow_symlinks=False)
    except FileNotFoundError:
        return None
    return status.st_dev, status.st_ino


def _may_be_put(named: CheckpointName, found: LineageWalk) -> bool:
    """True for files that another node may be putting into the object store for the next checkpoint: there is no
    manifest yet.
    """
    newest = found.entries[0].manifest if found.entries else None
    is_next = newest is not None and (named.round, named.step) >= (newest.round, newest.step)
    return is_next and not (named.path / MANIFEST).exists()


def _is_deletable(named: CheckpointName) -> bool:
    """False for what only a newer elasticd, or a later try, can read."""
    manifest = read_named_manifest(named)
    return not isinstance(manifest, Unreadable) or manifest.is_permanent
