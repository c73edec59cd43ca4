"""`elasticd checkpoints`: what a checkpoint directory holds, what of it can be loaded, and which of it may go.

Only `prune` changes the directory, and it refuses while a job uses it. No torch is imported.

The command uses the same walk over the lineage as a restore, so what it lists as restorable is what a job would load,
in the order in which it would try. A checkpoint that is not in the lineage is listed with the reason; it is never
deleted for that.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from elasticd.checkpointing.storage.directory_lock import DirectoryLock
from elasticd.checkpointing.storage.lineage import (
    CheckpointName,
    Entry,
    LineageWalk,
    find_damage,
    highest_round,
    list_names,
    list_names_aside,
    pull_from_store,
    read_named_manifest,
    walk_lineage,
)
from elasticd.checkpointing.storage.manifest import Unreadable
from elasticd.checkpointing.storage.object_store import store_of
from elasticd.checkpointing.storage.object_url import missing_package_reason, path_or_url, resolve, url_of
from elasticd.checkpointing.storage.retention import retain
from elasticd.errors import DirectoryInUse, ObjectStoreError, UsageError
from elasticd_agent.config.command_parser import CommandParser

_VERBS = ("list", "show", "verify", "prune")


def checkpoints(argv: Sequence[str]) -> int:
    """Returns the exit code. Raises UsageError."""
    options = build_parser().parse_intermixed_args(argv)
    if options.name is not None and options.verb not in ("show", "verify"):
        raise UsageError(f"{options.verb} takes no NAME")
    if options.json and options.verb != "list":
        raise UsageError(f"--json goes with list, not with {options.verb}")
    with contextlib.ExitStack() as stack:
        if url_of(options.directory) is not None:
            options.directory = stack.enter_context(_local_copy(options.directory))
        elif not options.directory.is_dir():
            raise UsageError(f"{options.directory} is no directory")
        try:
            return _run_verb(options)
        except ObjectStoreError as error:
            raise UsageError(str(error)) from None
        except OSError as error:
            raise UsageError(f"{error.filename or options.directory}: {error.strerror}") from None


@contextlib.contextmanager
def _local_copy(given: Path) -> Iterator[Path]:
    """A copy of an object store for this command, not the one that a job on this node may use."""
    if why := missing_package_reason(given):
        raise UsageError(why)
    with tempfile.TemporaryDirectory(prefix="elasticd-checkpoints-") as folder:
        directory = resolve(given, folder)
        store = store_of(directory)
        assert store is not None
        try:
            directory.mkdir(parents=True)
            pull_from_store(directory)
            if not list_names(directory) and not store.has_bucket():
                raise UsageError(f"there is no bucket for {store.url}")
        except ObjectStoreError as error:
            raise UsageError(str(error)) from None
        yield directory


def _run_verb(options: argparse.Namespace) -> int:
    if options.verb == "prune":
        return _prune(options.directory, options.keep, options.keep_every)
    present = _list_newest_first(options.directory)  # first: what a job saves from now on is not outside the lineage
    lineage = walk_lineage(options.directory)
    if options.verb == "list":
        _print_list(options.directory, present, lineage, options.json)
        return 0
    if options.verb == "show":
        return _print_manifest(options.directory, lineage, options.name)
    return _verify(present, lineage, options.name)


def build_parser() -> CommandParser:
    parser = CommandParser(
        "checkpoints",
        "list names what DIR holds, the newest first; show prints the description of one checkpoint; verify reads "
        "checkpoints whole and compares their checksums; prune deletes all but the newest.",
        "Exit codes: 0 done, 1 something is damaged or in use, 2 usage. More: elasticd docs checkpoints",
    )
    parser.add_argument("verb", choices=_VERBS)
    parser.add_argument(
        "directory", type=Path, metavar="DIR", help="a directory, or s3://BUCKET/PREFIX, gs://…, az://…"
    )
    parser.add_argument(
        "name", nargs="?", metavar="NAME", help="with show and verify: r12-s3400; default: the newest, all"
    )
    parser.add_argument("--json", action="store_true", help="with list: one object a line")
    parser.add_argument(
        "--keep", type=int, default=3, metavar="N", help="with prune: the newest N steps stay (default 3)"
    )
    parser.add_argument(
        "--keep-every",
        type=int,
        default=0,
        metavar="N",
        help="with prune: the first from each multiple of N on stays, too",
    )
    return parser


def _print_list(directory: Path, names: list[CheckpointName], found: LineageWalk, as_json: bool) -> None:
    """Print one line for each checkpoint, the newest first, with the reason against it where it
    would not be restored.
    """
    usable = {entry.path for entry in found.entries}
    skipped = {checkpoint.path: checkpoint.why for checkpoint in found.skipped}
    aside = {checkpoint.path: checkpoint for checkpoint in list_names_aside(directory)}
    present = [*names, *sorted(aside.values(), key=lambda each: each.path.name)]
    if not present and not as_json:
        print(f"{path_or_url(directory)} holds no checkpoint")
    for checkpoint in present:
        manifest = read_named_manifest(checkpoint)
        why = skipped.get(checkpoint.path, "not in the lineage of the newest round")
        why = "set aside by session.restore(step=…)" if checkpoint.path in aside else why
        size, saved, kind = "", "", ""
        described: dict[str, object] = {}
        if isinstance(manifest, Unreadable):
            if _is_deleted(checkpoint):
                continue
            why = manifest.why
        else:
            size = f"{manifest.total_bytes / 1e6:.1f} MB"
            saved = time.strftime("%Y-%m-%d %H:%M%z", time.localtime(manifest.wall))
            kind = "sharded" if manifest.files else "whole"
            described = {
                "kind": kind,
                "bytes": manifest.total_bytes,
                "world_size": manifest.world_size,
                "wall": manifest.wall,
            }
        why = "" if checkpoint.path in usable else why
        if as_json:
            print(
                json.dumps(
                    {
                        "name": checkpoint.path.name,
                        "round": checkpoint.round,
                        "step": checkpoint.step,
                        **described,
                        "why": why,
                    }
                )
            )
        else:
            files = "one file" if kind == "whole" else kind
            print(
                f"{checkpoint.path.name:<16} {size:>12}  {files:<8}  {saved:<21}  {why or 'can be restored'}".rstrip()
            )


def _list_newest_first(directory: Path) -> list[CheckpointName]:
    """The newest first."""
    checkpoints = [checkpoint for checkpoint in list_names(directory) if not checkpoint.hidden_kind]
    return sorted(checkpoints, key=lambda each: (-each.round, -each.step))


def _lineage_entries(found: LineageWalk, name: str | None) -> list[Entry]:
    """Return the checkpoints of the lineage, or the named one. Raises UsageError where that is not in it, with the
    reason.
    """
    entries = [entry for entry in found.entries if name in (None, entry.path.name)]
    if name is not None and not entries:
        why = next(
            (checkpoint.why for checkpoint in found.skipped if checkpoint.path.name == name),
            "there is none in the lineage",
        )
        raise UsageError(f"{name}: {why}")
    return entries


def _print_manifest(directory: Path, found: LineageWalk, name: str | None) -> int:
    """Print the manifest of a checkpoint."""
    entries = _lineage_entries(found, name)
    if not entries:
        print(f"{path_or_url(directory)} holds no checkpoint that can be restored")
        return 1
    print(json.dumps(json.loads(entries[0].manifest.to_json()), indent=2))
    return 0


def _is_deleted(checkpoint: CheckpointName) -> bool:
    """A job has deleted it since it was listed."""
    pull_from_store(checkpoint.path.parent)
    return not checkpoint.path.exists()


def _verify(present: list[CheckpointName], found: LineageWalk, name: str | None) -> int:
    """Read from the disk, not from the page cache; without a name also what is not in the lineage."""
    damaged = 0
    lineage = {entry.path for entry in _lineage_entries(found, name)}
    for checkpoint in present:
        if name is None or checkpoint.path in lineage:
            manifest = read_named_manifest(checkpoint)
            why = manifest.why if isinstance(manifest, Unreadable) else find_damage(Entry(checkpoint.path, manifest))
            if why is not None and _is_deleted(checkpoint):
                print(f"{checkpoint.path.name}: deleted meanwhile, by the job that uses the directory")
                continue
            damaged += why is not None
            outside = "" if checkpoint.path in lineage else ", not in the lineage of the newest round"
            print(f"{checkpoint.path.name}: {why or f'whole{outside}'}")
    return 1 if damaged else 0


def _prune(directory: Path, keep: int, keep_every: int) -> int:
    """Delete all but the newest steps, under the lock that a job would hold."""
    if keep < 1 or keep_every < 0:
        raise UsageError("--keep is at least 1, --keep-every at least 0")
    if (store := store_of(directory)) is not None and (holder := store.holder()):
        print(f"{store.url} is held by {holder}; if that run has ended, delete {store.url}/.owner.json")
        return 1
    lock = DirectoryLock(directory, "elasticd checkpoints prune", str(os.getpid()), claims=False)
    try:
        lock.acquire()
    except DirectoryInUse as error:
        print(error)
        return 1
    try:
        deleted = retain(directory, highest_round(directory), keep, keep_every)
    finally:
        lock.release()
    for path in deleted:
        print(f"{path.name}: deleted")
    print(f"{len(deleted)} deleted, {sum(not checkpoint.hidden_kind for checkpoint in list_names(directory))} left")
    return 0
