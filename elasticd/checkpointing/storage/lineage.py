"""Which checkpoints a directory holds and which of them form the lineage, by names and manifests alone.

The lineage runs from the highest round along the parents in the manifests. Invariant: an older round's checkpoint is in
it only up to the step from which the newer round continued, so what a zombie writes past that step is never loaded. A
damaged checkpoint is skipped with a reason, but its manifest, while it can be read, still links its round to the
parent.

A zombie is a process of an older round that was not killed, since its node was cut off. It can still write into a
shared directory. Nothing can stop it, so it is made harmless: it writes under its own round's number, and readers
follow the newest round's parent, which was fixed when that round began. Its later steps are beyond that step and are
skipped; a step that it writes again after the newer round has taken it is found by the checksum that the newer round
recorded.

The newest round may have left names only: a save that was cut off, or a deletion. It continued from its first step at
the latest, and from that step on the lineage is that of the rounds before. If the manifests of a round in the middle
cannot be read, its parent is unknown and the lineage ends there. What is older may belong to another history, and to
load it in silence could undo days.

Nothing is decided by time or by file dates. Directories are copied, clocks differ between nodes.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os
import re
import stat
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

from elasticd.checkpointing.storage import object_store
from elasticd.checkpointing.storage.manifest import STATE, Checksum, Manifest, SizeAndChecksum, Unreadable, read
from elasticd.checkpointing.storage.object_store import store_of
from elasticd.checkpointing.storage.page_cache import CacheWindows
from elasticd.errors import CheckpointCorrupt, CheckpointError

_NUMBER_PATTERN = r"(0|[1-9][0-9]{0,17})"
_CHECKPOINT_NAME = re.compile(rf"r{_NUMBER_PATTERN}-s{_NUMBER_PATTERN}(\.again)?")
_NAME_ASIDE = re.compile(rf"r{_NUMBER_PATTERN}-s{_NUMBER_PATTERN}\.aside[0-9]*")
# Not checkpoints, but they show that a round was here: being written, being deleted.
_HIDDEN_NAME = re.compile(rf"\.r{_NUMBER_PATTERN}-s{_NUMBER_PATTERN}\.[0-9a-f]+\.(staging|trash)")
_READ_BYTES = 4 << 20
_DAMAGE_ERRNOS = (errno.ENOENT, errno.EIO, errno.ENODATA, errno.EBADMSG, errno.ESTALE, errno.EISDIR)


@dataclass(frozen=True, slots=True)
class Entry:
    """A checkpoint whose manifest can be read and whose state has the right size."""

    path: Path
    manifest: Manifest


@dataclass(frozen=True, slots=True)
class SkippedCheckpoint:
    """A checkpoint that is not used, and why."""

    path: Path
    why: str
    is_permanent: bool = True  #: false: a newer elasticd, or a later try, may read it


@dataclass(frozen=True, slots=True)
class CheckpointName:
    """A name in the directory."""

    path: Path
    round: int
    step: int
    is_replacement: bool = False
    hidden_kind: str | None = None  #: "staging" or "trash" for a directory that is no checkpoint


@dataclass(frozen=True, slots=True)
class LineageWalk:
    """The lineage of a directory."""

    entries: list[Entry]  #: newest first
    skipped: list[SkippedCheckpoint]
    link_of_round: dict[int, Path]
    """The checkpoint whose manifest names the parent, for each round, newest first; its state may be damaged."""
    oldest_round: int


def list_names(directory: str | os.PathLike[str]) -> list[CheckpointName]:
    """Every name of elasticd's, valid or not; none without a directory. Raises OSError if it cannot be listed."""
    try:
        listed = os.listdir(directory)
    except FileNotFoundError:
        return []
    base, named = Path(directory), []
    for name in listed:
        if match := _CHECKPOINT_NAME.fullmatch(name):
            named.append(CheckpointName(base / name, int(match[1]), int(match[2]), is_replacement=match[3] is not None))
        elif match := _HIDDEN_NAME.fullmatch(name):
            named.append(CheckpointName(base / name, int(match[1]), int(match[2]), hidden_kind=match[3]))
    return named


def list_names_aside(directory: str | os.PathLike[str]) -> list[CheckpointName]:
    """The checkpoints that were set aside. Raises OSError."""
    matches = [match for name in os.listdir(directory) if (match := _NAME_ASIDE.fullmatch(name))]
    return [CheckpointName(Path(directory, match[0]), int(match[1]), int(match[2])) for match in matches]


def pull_from_store(directory: str | os.PathLike[str]) -> None:
    """Learn what is in an object store now. Raises OSError."""
    if (store := store_of(directory)) is not None:
        store.pull(lambda name: bool(_CHECKPOINT_NAME.fullmatch(name) or _NAME_ASIDE.fullmatch(name)))


def highest_round(directory: str | os.PathLike[str]) -> int:
    """The highest round that ever wrote here, valid, damaged or unfinished; 0 if none. Raises OSError."""
    return max((named.round for named in list_names(directory)), default=0)


def lineage(directory: str | os.PathLike[str]) -> tuple[list[Entry], list[SkippedCheckpoint]]:
    """The checkpoints that may be loaded, newest first, and the skipped ones with their reasons.

    Reads manifests and file sizes only. Raises OSError if the directory cannot be listed; a missing one is empty. Of an
    object store, what is there now.
    """
    pull_from_store(directory)
    walked = walk_lineage(directory)
    return walked.entries, walked.skipped


def walk_lineage(directory: str | os.PathLike[str]) -> LineageWalk:
    """The lineage as `lineage` has it, with links and end, for retention."""
    rounds: dict[int, list[CheckpointName]] = defaultdict(list)
    for named in list_names(directory):
        if named.hidden_kind is None:
            rounds[named.round].append(named)
    entries: list[Entry] = []
    skipped: list[SkippedCheckpoint] = []
    links: dict[int, Path] = {}
    number = max(rounds, default=None)
    oldest = number or 0
    entered = False
    limit: int | None = None
    newer = 0
    parent_checksum: str | None = None
    while number is not None:
        oldest = number
        manifests: list[Manifest] = []
        for named in sorted(rounds[number], key=lambda each: (each.step, each.is_replacement), reverse=True):
            manifest = read_named_manifest(named)
            if isinstance(manifest, Unreadable):
                skipped.append(SkippedCheckpoint(named.path, manifest.why, manifest.is_permanent))
                continue
            manifests.append(manifest)
            links.setdefault(number, named.path)
            damage = (_file_damage(named.path, name, state) for name, state in manifest.all_files.items())
            why = _why_beyond_lineage(manifest, limit, newer, parent_checksum) or next(filter(None, damage), None)
            if why is None:
                entries.append(Entry(named.path, manifest))
            else:
                skipped.append(SkippedCheckpoint(named.path, why))
        newer = number
        if not manifests:
            if entered:
                break  # the parent of this round is unknown; an older round may be of another lineage
            # Only names are left of the newest round. It continued from its first step at the latest: that much is
            # known.
            first = min(rounds[number], key=lambda each: each.step)
            links[number] = first.path
            limit = first.step if limit is None else min(limit, first.step)
            number = max((older for older in rounds if older < newer), default=None)
            continue
        entered = True
        parent = manifests[0].parent
        if parent is None:
            break
        oldest, limit = parent
        parent_checksum = next((m.checksum for m in manifests if m.relinked and m.step == limit), None)
        number = oldest if oldest in rounds else None
    return LineageWalk(entries, skipped, links, oldest)


def read_named_manifest(named: CheckpointName) -> Manifest | Unreadable:
    """The manifest under a name, if the two agree."""
    manifest = read(named.path)
    if isinstance(manifest, Manifest) and (manifest.round, manifest.step) != (named.round, named.step):
        return Unreadable(
            f"its manifest belongs to r{manifest.round}-s{manifest.step}: the directory was renamed or copied"
        )
    return manifest


def find_damage(entry: Entry) -> str | None:
    """Why the state cannot be used, after reading all of it from the disk; None if it is whole."""
    try:
        if (store := store_of(entry.path.parent)) is not None:
            return store.find_damage(entry.path.name, entry.manifest)
        for name in entry.manifest.all_files:
            os.close(open_verified(entry, name, from_disk=True))
    except (CheckpointCorrupt, OSError) as error:
        return str(error)
    return None


def open_verified(entry: Entry, name: str = STATE, from_disk: bool = False) -> int:
    """Open a file, read all of it through a small part of the page cache and compare the checksum; returns its
    descriptor.

    `from_disk`: past the page cache where the file system can (O_DIRECT), which costs a tenth of the CPU time.
    Of an object store: a copy of the file on this node; a damaged copy is made again. Raises CheckpointCorrupt if it is
    damaged, CheckpointError if its checksum cannot be computed here, OSError if it cannot be opened.
    """
    if store_of(entry.path.parent) is not None:
        try:
            return _open_verified_once(entry, name, from_disk)
        except CheckpointCorrupt:
            (entry.path / name).unlink(missing_ok=True)
    return _open_verified_once(entry, name, from_disk)


def _open_verified_once(entry: Entry, name: str, from_disk: bool) -> int:
    manifest = entry.manifest
    expected = manifest.all_files[name]
    algorithm = expected[1].partition(":")[0]
    try:
        checksum = Checksum(algorithm)
    except LookupError:
        raise CheckpointError(
            f"{entry.path}: this interpreter cannot compute its checksum, {algorithm}; `pip install xxhash`"
        ) from None
    fd = -1
    try:
        if (store := store_of(entry.path.parent)) is not None:
            fd = store.fetch_and_open(entry.path, name)
        else:
            fd = os.open(entry.path / name, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)  # a pipe is damage, too
        if from_disk:
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)  # where O_DIRECT is refused
            with contextlib.suppress(OSError):
                fcntl.fcntl(fd, fcntl.F_SETFL, os.O_DIRECT)
        _verify_file(fd, name, expected, checksum)
    except BaseException as error:
        if fd >= 0:
            os.close(fd)
        if isinstance(error, OSError) and error.errno in _DAMAGE_ERRNOS:
            raise CheckpointCorrupt(f"{name} cannot be read: {error.strerror}") from error
        raise
    return fd


def _verify_file(fd: int, name: str, expected: SizeAndChecksum, checksum: Checksum) -> None:
    size = os.fstat(fd).st_size
    if size != expected[0]:
        raise CheckpointCorrupt(_wrong_size_reason(name, size, expected))
    buffer = memoryview(mmap.mmap(-1, _READ_BYTES))  # at the beginning of a page, as O_DIRECT requires
    cache = CacheWindows(fd)
    done = 0
    while done < size:
        try:
            count = os.preadv(fd, [buffer], done)
        except OSError as error:
            if error.errno != errno.EINVAL or not fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT:
                raise
            fcntl.fcntl(fd, fcntl.F_SETFL, 0)  # after a short read, or where larger blocks are needed
            continue
        if not count:
            raise CheckpointCorrupt(f"{name} ended early while being read")
        checksum.update(buffer[:count])
        done += count
        cache.mark_read_until(done)
    if str(checksum) != expected[1]:
        raise CheckpointCorrupt(f"{name} does not match its checksum: it was damaged after it was written")


def _why_beyond_lineage(found: Manifest, limit: int | None, newer: int, parent_checksum: str | None) -> str | None:
    if limit is None:
        return None
    if found.step > limit:
        return f"round {newer} continued from step {limit}: later steps of round {found.round} are not in the lineage"
    if found.step == limit and parent_checksum is not None and found.checksum != parent_checksum:
        return f"round {found.round} wrote it again after round {newer} continued from step {limit}"
    return None


def _file_damage(path: Path, name: str, expected: SizeAndChecksum) -> str | None:
    try:
        status = os.stat(path / name)
    except FileNotFoundError:
        return object_store.why_not_in_store(path, name)
    except OSError as error:
        return f"{name} cannot be read: {error.strerror}"
    if not stat.S_ISREG(status.st_mode):
        return f"{name} is not a file"
    return None if status.st_size == expected[0] else _wrong_size_reason(name, status.st_size, expected)


def _wrong_size_reason(name: str, size: int, expected: SizeAndChecksum) -> str:
    return f"{name} has {size} bytes, its manifest says {expected[0]}: it was cut short or replaced"
