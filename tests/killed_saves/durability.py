"""What a power cut may take away: names and bytes that no fsync has made durable when something relies on them.

Kill -9 loses nothing that a system call has written, since the page cache stays; a power cut loses it. So the order of
calls is examined instead: whoever reads a checkpoint after a power cut relies on its files being whole.
"""

from __future__ import annotations

import os
import re
from pathlib import PurePath

from tests.killed_saves.tracer import Trace

_CHECKPOINT = re.compile(r"r\d+-s\d+(\.again)?")


class _Disk:
    """The names and bytes that are not durable yet."""

    def __init__(self) -> None:
        self.bytes: set[str] = set()
        """Files written since their last fsync."""
        self.names: set[str] = set()
        """Names made or changed since the last fsync of their directory."""
        self.removed: set[str] = set()
        """Names that a rename has taken away since then."""

    def inside(self, folder: str) -> list[str]:
        return sorted(each for each in self.bytes | self.names if PurePath(folder) in PurePath(each).parents)

    def move(self, source: str, target: str) -> None:
        def moved(path: str) -> str:
            return target + path[len(source) :] if (path + "/").startswith(source + "/") else path

        self.bytes = set(map(moved, self.bytes))
        self.names = {*(moved(each) for each in self.names if each != source), target}
        self.removed.add(source)

    def sync(self, path: str) -> None:
        self.bytes.discard(path)
        self.names = {each for each in self.names if os.path.dirname(each) != path}
        self.removed = {each for each in self.removed if os.path.dirname(each) != path}


def breaches(trace: Trace, directory: str) -> list[str]:
    """Sentences about what something relies on before it is durable. At the end everything that is there must be."""
    disk, found = _Disk(), []
    for call in trace.calls:
        if call.result is None or call.result < 0:
            continue
        path = call.paths[0] if call.paths else ""
        if not path.startswith(directory):
            path = "" if call.name not in ("fsync", "fdatasync") else path
            if not path:
                continue
        match call.name:
            case "fsync" | "fdatasync":
                disk.sync(path)
            case "write" | "pwrite64" | "writev" | "pwritev" | "ftruncate" | "fallocate":
                disk.bytes.add(path)
            case "open" | "openat" | "creat" if call.flags & os.O_CREAT and call.is_new:
                found += _relies(disk, path)
                disk.names.add(path)
            case "mkdir" | "mkdirat":
                disk.names.add(path)
            case "link" | "linkat":
                disk.names.add(call.paths[1])
            case "rename" | "renameat" | "renameat2":
                source, target = call.paths
                if _CHECKPOINT.fullmatch(os.path.basename(target)):
                    found += [f"{target} is committed before {each} is durable" for each in disk.inside(source)]
                elif _CHECKPOINT.fullmatch(os.path.basename(source)):
                    newer = [each for each in disk.names if _CHECKPOINT.fullmatch(os.path.basename(each))]
                    found += [f"{source} is taken away before {each} is durable" for each in newer]
                disk.move(source, target)
            case "unlink" | "unlinkat" | "rmdir":
                disk.bytes.discard(path)
                disk.names.discard(path)
    kept = [each for each in [*disk.bytes, *disk.names] if not _is_bookkeeping(each)]
    return found + [f"{each} is not durable at the end" for each in sorted(kept)]


def _relies(disk: _Disk, path: str) -> list[str]:
    """The mark of a directory that went back is read as "newer checkpoints were set aside"."""
    if not os.path.basename(path).startswith(".went-back"):
        return []
    return [f"{path} is made before {each} is durably gone" for each in sorted(disk.removed)]


def _is_bookkeeping(path: str) -> bool:
    """Deleted files and the lock may be there or not."""
    return ".trash" in path or path.endswith((".lock",))
