"""The lineage with every state read back, as a resume would find it."""

from __future__ import annotations

from pathlib import Path

from elasticd.checkpointing.storage.lineage import Entry, SkippedCheckpoint, find_damage, lineage


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
