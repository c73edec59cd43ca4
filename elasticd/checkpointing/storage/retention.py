"""Which checkpoints are deleted: all but the newest few of the lineage, and never the last good one.

A writer deletes only checkpoints of its own round, until its round has one whose checksum was read back from the disk;
then older rounds' go as well. Before anything is deleted, one of those that stay is read back whole. Rounds outside the
lineage (a job that was started over in the same directory) and checkpoints of a newer elasticd are left alone.
"""

from __future__ import annotations

import os
from pathlib import Path

from elasticd.checkpointing.storage.atomic_write import discard, sweep
from elasticd.checkpointing.storage.lineage import (
    CheckpointName,
    Entry,
    LineageWalk,
    examine,
    find_damage,
    names,
    refresh,
    walk,
)
from elasticd.checkpointing.storage.manifest import Unreadable
from elasticd.checkpointing.storage.object_store import store_of


def retain(directory: str | os.PathLike[str], own_round: int, keep: int, keep_every: int = 0) -> list[Path]:
    """Keep the newest `keep` steps of the lineage across rounds; returns the deleted paths. Call it after a save.

    Steps that are multiples of `keep_every` stay as well. Before it deletes, it reads the newest checkpoint back, once;
    not from an object store, which compares what it receives: there the sizes are compared.
    Raises ValueError for keep < 1, OSError if the directory cannot be listed or changed.
    """
    if keep < 1:
        raise ValueError(f"keep is {keep}: at least one checkpoint must stay")
    refresh(directory)
    # Before the walk: what another node publishes from now on, also in the place of another one, is not deleted.
    present = [each for each in names(directory) if each.hidden is None]
    seen = {each.path: _identity(each.path) for each in present}
    found = walk(directory)
    if not _to_delete(present, found, 0, own_round, keep, keep_every):
        return []
    trusted = store_of(directory) is not None
    anchor = next((i for i, entry in enumerate(found.entries) if trusted or find_damage(entry) is None), None)
    if anchor is None:
        return []
    deleted = []
    for path in _to_delete(present, found, anchor, own_round, keep, keep_every):
        if _identity(path) == seen[path]:
            discard(path)
            deleted.append(path)
    good = found.entries[anchor].manifest
    sweep(Path(directory), own_round, settled=good.round == own_round and not good.relinked)
    return deleted


def _to_delete(
    present: list[CheckpointName], found: LineageWalk, anchor: int, own_round: int, keep: int, keep_every: int
) -> list[Path]:
    """What may be deleted, in an order that keeps the lineage whole if interrupted: others first, then the oldest."""
    kept = _kept(found, keep, keep_every, anchor)
    own = [each for each in present if each.round == own_round]
    older: list[CheckpointName] = []
    if max((each.round for each in present), default=0) > own_round:
        # A newer round exists, so this writer is a zombie: it bounds its own files, and keeps what the lineage needs.
        newest = sorted((each for each in own if _is_readable(each)), key=lambda each: each.step, reverse=True)
        kept.update(each.path for each in newest[:keep])
    elif found.entries:
        good = found.entries[anchor].manifest
        if good.round == own_round and not good.relinked:
            older = [each for each in present if found.oldest_round <= each.round < own_round]
    lineage = {entry.path for entry in found.entries}
    deletable = [each for each in own + older if each.path not in kept and _is_deletable(each)]
    deletable.sort(key=lambda each: (each.path in lineage, each.round, each.step, not each.replacement))
    return [each.path for each in deletable]


def _kept(found: LineageWalk, keep: int, keep_every: int, anchor: int) -> set[Path]:
    """The newest `keep` steps, milestones and the one known to be good, with the links between their rounds."""
    # A round's re-linked first checkpoint and its parent are one step: the same data, often the same file.
    newest_steps: list[Entry] = []
    steps: set[int] = set()
    newest: set[int] = set()
    for i, entry in enumerate(found.entries):
        step = entry.manifest.step
        is_milestone = bool(keep_every) and step % keep_every == 0
        if (step not in steps and (len(newest) < keep or is_milestone)) or i == anchor:
            newest_steps.append(entry)
            steps.add(step)
            newest |= {step} if len(newest) < keep else set()
    rounds = {entry.manifest.round for entry in newest_steps}
    between = [link for round, link in found.links.items() if round not in rounds and round > min(rounds, default=0)]
    return {*(entry.path for entry in newest_steps), *between}


def set_aside(directory: str | os.PathLike[str], step: int) -> list[Path]:
    """Rename checkpoints of later steps than `step`, the newest first, and mark that the directory went back to it;
    returns their new paths. Nothing loads or deletes them any more. Raises OSError.
    """
    later = [each for each in names(directory) if each.hidden is None and each.step > step]
    renamed = []
    store = store_of(directory)
    for each in sorted(later, key=lambda each: (each.round, each.step), reverse=True):
        target, number = each.path.with_name(f"{each.path.name}.aside"), 1
        while target.exists():
            number += 1
            target = each.path.with_name(f"{each.path.name}.aside{number}")
        if store is not None:
            store.rename(each.path.name, target.name)
        each.path.rename(target)
        renamed.append(target)
    went_back(directory, step).touch()
    if store is not None:
        store.write(went_back(directory, step).name)
    return renamed


def went_back(directory: str | os.PathLike[str], step: int) -> Path:
    """The file that is there once a directory went back to a step."""
    return Path(directory, f".went-back-to-s{step}")


def _identity(path: Path) -> tuple[int, int] | None:
    """Of what has this name now; None if nothing has."""
    try:
        found = os.stat(path, follow_symlinks=False)
    except FileNotFoundError:
        return None
    return found.st_dev, found.st_ino


def _is_readable(named: CheckpointName) -> bool:
    return not isinstance(examine(named), Unreadable)


def _is_deletable(named: CheckpointName) -> bool:
    """False for what only a newer elasticd, or a later try, can read."""
    found = examine(named)
    return not isinstance(found, Unreadable) or found.permanent
