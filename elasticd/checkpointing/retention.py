"""Which checkpoints are deleted: all but the newest few of the lineage, and never the last good one.

A writer deletes only what its own round wrote, until its round has a checkpoint of its own whose checksum was read back
from the disk; then older rounds' go as well. Before anything is deleted, one of those that stay was read back whole.
Rounds that the lineage does not descend from (somebody started over in the same directory) and what a newer elasticd
wrote are left alone.
"""

from __future__ import annotations

import os
from pathlib import Path

from elasticd.checkpointing.atomic_write import discard, sweep
from elasticd.checkpointing.lineage import CheckpointName, Entry, LineageWalk, examine, find_damage, names, walk
from elasticd.checkpointing.manifest import Unreadable


def retain(directory: str | os.PathLike[str], own_round: int, keep: int) -> list[Path]:
    """Keep the newest `keep` steps of the lineage across rounds; returns what was deleted. Call it after a save.

    Where something has to go it reads the newest checkpoint back, once. Raises ValueError for keep < 1, OSError if the
    directory cannot be listed or changed.
    """
    if keep < 1:
        raise ValueError(f"keep is {keep}: at least one checkpoint must stay")
    found = walk(directory)
    if not _doomed(directory, found, 0, own_round, keep):
        return []
    anchor = next((i for i, entry in enumerate(found.entries) if find_damage(entry) is None), None)
    if anchor is None:
        return []
    doomed = _doomed(directory, found, anchor, own_round, keep)
    for path in doomed:
        discard(path)
    good = found.entries[anchor].manifest
    sweep(Path(directory), own_round, settled=good.round == own_round and not good.relinked)
    return doomed


def _doomed(
    directory: str | os.PathLike[str], found: LineageWalk, anchor: int, own_round: int, keep: int
) -> list[Path]:
    """What may go, in an order in which an interruption leaves the lineage unbroken: strays, then the oldest first."""
    kept = _kept(found, keep, anchor)
    present = [each for each in names(directory) if each.hidden is None]
    own = [each for each in present if each.round == own_round]
    older: list[CheckpointName] = []
    if max((each.round for each in present), default=0) > own_round:
        # A newer round is here, this writer is a zombie: it bounds its own files, and keeps what the lineage needs.
        newest = sorted((each for each in own if _is_readable(each)), key=lambda each: each.step, reverse=True)
        kept.update(each.path for each in newest[:keep])
    elif found.entries:
        good = found.entries[anchor].manifest
        if good.round == own_round and not good.relinked:
            older = [each for each in present if found.oldest_round <= each.round < own_round]
    lineage = {entry.path for entry in found.entries}
    doomed = [each for each in own + older if each.path not in kept and _is_deletable(each)]
    doomed.sort(key=lambda each: (each.path in lineage, each.round, each.step, not each.replacement))
    return [each.path for each in doomed]


def _kept(found: LineageWalk, keep: int, anchor: int) -> set[Path]:
    """The newest `keep` distinct steps and the one known to be good; with them what links the rounds in between.

    A round's re-linked first checkpoint and its parent are one step: they are the same data, often the same file.
    """
    wanted: list[Entry] = []
    steps: set[int] = set()
    for i, entry in enumerate(found.entries):
        step = entry.manifest.step
        if (step not in steps and len(steps) < keep) or i == anchor:
            wanted.append(entry)
            steps.add(step)
    rounds = {entry.manifest.round for entry in wanted}
    between = [link for round, link in found.links.items() if round not in rounds and round > min(rounds, default=0)]
    return {*(entry.path for entry in wanted), *between}


def _is_readable(named: CheckpointName) -> bool:
    return not isinstance(examine(named), Unreadable)


def _is_deletable(named: CheckpointName) -> bool:
    """Not what only a newer elasticd, or a better moment, can read."""
    found = examine(named)
    return not isinstance(found, Unreadable) or found.permanent
