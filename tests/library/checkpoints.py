"""Checkpoints for tests: saved and loaded without a session, and the lineage as a resume would find it."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

from elasticd.checkpointing.state.layout import Layout, load_mapped
from elasticd.checkpointing.state.safe_types import check_loadable
from elasticd.checkpointing.storage import checkpoint_files
from elasticd.checkpointing.storage.lineage import Entry, SkippedCheckpoint, find_damage, lineage, open_verified
from elasticd.checkpointing.storage.manifest import STATE, Manifest


class Kept:
    """An object to attach that keeps what it loads."""

    def __init__(self, **kept: Any) -> None:
        self.kept = kept

    def state_dict(self) -> dict[str, Any]:
        return self.kept

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.kept = state


def save(
    directory: Path,
    *,
    state: dict[str, Any],
    round: int = 1,
    step: int = 1,
    parent: tuple[int, int] | None = None,
    world_size: int = 2,
    job: str = "job",
    run: str = "run",
    cursor: dict[str, Any] | None = None,
) -> Entry:
    """Write one checkpoint of a whole state, as a session without a writer does."""
    check_loadable(state)
    draft = Manifest(round, step, parent, world_size, 0, "", job, run, cursor, time.time())
    checkpoint_files.check_cursor(draft)
    return checkpoint_files.write(directory, draft, lambda staging: {STATE: Layout(state).write_file(staging.path)})


def load(entry: Entry) -> dict[str, Any]:
    """The state, compared with its checksum."""
    fd = open_verified(entry)
    try:
        return load_mapped(fd)
    finally:
        os.close(fd)


def verified_lineage(directory: Path) -> tuple[list[Entry], list[SkippedCheckpoint]]:
    """As `lineage`, with damaged states among the skipped ones."""
    good: list[Entry] = []
    entries, skipped = lineage(directory)
    for entry in entries:
        why = find_damage(entry)
        if why is None:
            good.append(entry)
        else:
            skipped.append(SkippedCheckpoint(entry.path, why))
    return good, skipped
