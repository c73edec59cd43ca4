"""Puts evidence into the log directory and rotates what is old there; in the helper, for the directory may not answer.

Whole `round-N/evidence` directories beyond the newest ones are removed, nothing else. Files are replaced atomically.
"""

from __future__ import annotations

import errno
import os
import re
import shutil
import stat
from pathlib import Path

from elasticd_agent.hangs.collector import files as disk
from elasticd_agent.hangs.collector.request import NO_STACKS, PublishRequest

_ROUND = re.compile(r"round-([1-9][0-9]*)")
_CHUNK = 1 << 30


def publish(request: PublishRequest) -> None:
    """Raises OSError."""
    final = Path(request.final)
    make_directory(final)
    if request.source:
        for path in _files(Path(request.source)):
            content = disk.read(str(path), _CHUNK)
            # Older stacks are better than none: the worker may have been ended meanwhile.
            if not content.startswith(NO_STACKS.encode()) or not (final / path.name).exists():
                disk.write(str(final / path.name), content)
    for name, text in request.files:
        disk.write(str(final / name), text.encode("utf-8", "surrogateescape"))
    if request.rounds > 0:
        rotate(final, request.rounds)


def _files(source: Path) -> list[Path]:
    """Complete files, the small ones first: there may be no time for a flight recording."""
    with os.scandir(source) as found:
        entries = [e for e in found if e.is_file(follow_symlinks=False) and not e.name.endswith(disk.PART)]
        return [Path(entry.path) for entry in sorted(entries, key=lambda entry: entry.stat().st_size)]


def make_directory(directory: Path) -> None:
    """The directory and those above it, 0700. Raises OSError.

    In a directory that all users may write to, such as /tmp, a directory or link of another user is refused.
    """
    for path in (*reversed(directory.parents), directory):
        try:
            path.mkdir(mode=0o700)
        except FileExistsError:
            found = os.lstat(path)
            if os.stat(path.parent).st_mode & stat.S_IWOTH and (
                found.st_uid not in (os.geteuid(), 0) or stat.S_ISLNK(found.st_mode)
            ):
                raise PermissionError(errno.EPERM, f"{path} belongs to another user, or is a link") from None
        except OSError:  # read-only, for example
            if not path.exists():
                raise
    if not directory.is_dir():
        raise NotADirectoryError(errno.ENOTDIR, f"{directory} is no directory")


def rotate(final: Path, rounds: int) -> list[Path]:
    """Remove the directories of `final`'s name of all but the newest `rounds` rounds that have one. Returns those."""
    if _ROUND.fullmatch(final.parent.name) is None:
        return []
    have = {}
    for name in os.listdir(final.parent.parent):
        found = _ROUND.fullmatch(name)
        path = final.parent.parent / name / final.name
        if found is not None and path.is_dir() and not path.is_symlink():
            have[int(found[1])] = path
    old = [have[number] for number in sorted(have)[:-rounds] if have[number] != final]
    for path in old:
        shutil.rmtree(path, ignore_errors=True)
    return old
