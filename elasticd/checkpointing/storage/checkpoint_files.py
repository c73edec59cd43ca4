"""Checkpoints in a directory: written whole or not at all, and chained to the one that their round resumed from.

    <dir>/r<round>-s<step>/state.pt         plain torch.load(weights_only=True) opens it
    <dir>/r<round>-s<step>/manifest.json    what it is, where it comes from, its checksum

One process writes one checkpoint at a time. docs/checkpoints.md lists the guarantees, docs/on-disk.md their limits.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from elasticd.checkpointing.storage.atomic_write import Staging, make_durable_directory, sweep_unfinished
from elasticd.checkpointing.storage.lineage import Entry, list_names, read_named_manifest
from elasticd.checkpointing.storage.manifest import MANIFEST, STATE, Manifest, SizeAndChecksum, Unreadable, parse
from elasticd.errors import CheckpointRefused


def check_cursor(draft: Manifest) -> None:
    """Raises CheckpointRefused for a sampler's position that is not JSON."""
    try:
        draft.to_json()
    except (TypeError, ValueError) as error:
        raise CheckpointRefused(f"cursor: a sampler's state must be JSON, and this is not: {error}") from error


def write(
    directory: str | os.PathLike[str],
    draft: Manifest,
    fill: Callable[[Staging], dict[str, SizeAndChecksum]],
    token: str = "",
    publish: Callable[[Staging, Manifest], Path] = Staging.publish,
) -> Entry:
    """Write a checkpoint; when this returns it is on the disk under its name, and replaces one of the same step.

    `draft` describes it without sizes and checksums; `fill` writes its files, state.pt among them, and returns what
    they are. A round has one parent: once it has a checkpoint, that one's parent counts. Raises OSError, and leaves no
    checkpoint then; FileExistsError if `token` names a staging directory that another process has made.
    """
    base = Path(directory)
    draft = replace(draft, parent=_parent_of_round(base, draft.round, draft.parent))
    make_durable_directory(base)
    sweep_unfinished(base, draft.round)
    with Staging(base, draft.round, draft.step, token) as staging:
        files = fill(staging)
        size, checksum = files.pop(STATE)
        manifest = replace(draft, bytes=size, checksum=checksum, files=files)
        return Entry(publish(staging, manifest), manifest)


def relink(directory: str | os.PathLike[str], entry: Entry, round: int) -> Entry:
    """Make `entry`, which round `round` has loaded, that round's own first checkpoint, before its first step.

    From then on nothing that an older round writes is in the lineage. Hard links where the file system has
    them, else copies. A second call, or one for an entry of this round, changes nothing. Raises OSError; with ESTALE
    when the checkpoint has changed since it was loaded.
    """
    base, source = Path(directory), entry.manifest
    if source.round == round:
        return entry
    for own in list_names(base):
        if (own.round, own.step, own.hidden_kind) == (round, source.step, None):
            there = read_named_manifest(own)
            if isinstance(there, Manifest) and there.checksum == source.checksum:
                return Entry(own.path, there)
    manifest = source.relinked_to(round)
    sweep_unfinished(base, round)
    fd = os.open(entry.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        # Manifest and state come from one open directory, so they belong together whatever is renamed.
        if _manifest_in(fd) != source:
            raise OSError(errno.ESTALE, "the checkpoint was replaced after it was loaded", str(entry.path))
        with Staging(base, round, source.step, source=entry.path.name) as staging:
            for name, expected in source.all_files.items():
                copied = staging.link_or_copy(name, fd)
                if copied is not None and copied != expected:
                    raise OSError(errno.ESTALE, "the checkpoint changed while it was copied", str(entry.path))
            return Entry(staging.publish(manifest), manifest)
    finally:
        os.close(fd)


def _manifest_in(directory: int) -> Manifest | Unreadable:
    with open(os.open(MANIFEST, os.O_RDONLY | os.O_CLOEXEC, dir_fd=directory), "rb") as file:
        return parse(file.read())


def _parent_of_round(base: Path, round: int, given: tuple[int, int] | None) -> tuple[int, int] | None:
    """The parent of a round's checkpoints: the one in its first manifest, else the given one, through re-links."""
    present = [name for name in list_names(base) if name.hidden_kind is None]
    for own in sorted((name for name in present if name.round == round), key=lambda each: each.step):
        manifest = read_named_manifest(own)
        if isinstance(manifest, Manifest):
            return manifest.parent
    for other in present:
        if (other.round, other.step) == given:
            manifest = read_named_manifest(other)
            if isinstance(manifest, Manifest) and manifest.relinked:
                return manifest.parent
    return given
