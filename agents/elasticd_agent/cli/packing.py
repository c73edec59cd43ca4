"""Packs a small working directory for `elasticd submit --upload`: the same files always make the same archive."""

from __future__ import annotations

import gzip
import io
import os
import tarfile
from collections.abc import Iterator
from pathlib import Path

from elasticd.errors import UsageError

MAX_BYTES = 700 << 10
"""Of the archive, as node/uploads.py has it."""
LEFT_OUT = frozenset({"__pycache__", "node_modules"})
"""Names that are left out, beside those that begin with a dot."""


def pack(directory: Path) -> bytes:
    """Raises UsageError for a directory that is too large, naming its largest files."""
    packed = io.BytesIO()
    sizes: dict[str, int] = {}
    path = directory
    try:
        # Times and owners are left out: an unchanged directory is not stored twice.
        with gzip.GzipFile(fileobj=packed, mode="wb", mtime=0) as zipped, tarfile.open(fileobj=zipped, mode="w") as tar:
            for path in _files(directory):
                info = tarfile.TarInfo(str(path.relative_to(directory)))
                info.size, info.mode = path.stat().st_size, path.stat().st_mode & 0o700
                sizes[info.name] = info.size
                if sum(sizes.values()) > 64 * MAX_BYTES:
                    break
                with path.open("rb") as file:
                    tar.addfile(info, file)
    except OSError as error:  # tarfile's own, for a file that has become shorter, names none
        what = f"{error.filename}: {error.strerror}" if error.filename else f"{path}: {error}"
        raise UsageError(f"--upload {directory}: {what}") from None
    if packed.tell() > MAX_BYTES or sum(sizes.values()) > 64 * MAX_BYTES:
        largest = sorted(sizes, key=lambda name: -sizes[name])[:3]
        named = ", ".join(f"{name} ({sizes[name]:,} bytes)" for name in largest)
        raise UsageError(f"--upload {directory}: more than {MAX_BYTES >> 10} KiB packed; the largest files are {named}")
    return packed.getvalue()


def _files(directory: Path) -> Iterator[Path]:
    """Plain files, in one order; links to them count as what they lead to."""
    if not directory.is_dir():
        raise UsageError(f"--upload {directory}: it is not a directory")
    for place, folders, files in os.walk(directory, onerror=_refuse):
        folders[:] = sorted(name for name in folders if not name.startswith(".") and name not in LEFT_OUT)
        for name in sorted(files):
            path = Path(place) / name
            if not name.startswith(".") and path.is_file():
                yield path


def _refuse(error: OSError) -> None:
    raise error
