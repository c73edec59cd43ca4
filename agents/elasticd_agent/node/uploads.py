"""Working directories that are uploaded with jobs: small archives in the store, named by their content.

Jobs with the same files share one archive. The oldest one that no job needs is deleted when there are too many; the
nodes' copies belong to the runs of the job and are deleted with them.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import os
import tarfile
import zlib
from collections.abc import Callable
from pathlib import Path, PurePosixPath

from elasticd import bounded_json
from elasticd.errors import UsageError
from elasticd_agent.node import keys as names
from elasticd_agent.store import Store

MAX_BYTES = 700 << 10
"""Compressed. etcd takes 1.5 MB in a request, and the HTTP API 1 MiB."""
MAX_CONTENT_BYTES = 64 << 20
MAX_FILES = 5000
MAX_KEPT = 32
_MAX_HEADER_BYTES = 8 << 20
"""Of all headers: compressed ones may have a thousand times the archive's size."""
_MAX_LONG_HEADER_BYTES = 1 << 20
"""Of those above a block: their fields take thirty times as much memory."""
_MAX_RACES = 100


def put(store: Store, data: bytes, is_in_use: Callable[[str], bool]) -> str:
    """Keep an archive. Returns its name. `is_in_use`: whether a job that has not ended names this archive.

    Raises UsageError for one that cannot be unpacked, and where jobs use as many archives as may be kept.
    """
    if len(data) > MAX_BYTES:
        raise UsageError(f"the upload has {len(data)} bytes; at most {MAX_BYTES} are kept")
    _members(data)
    digest = hashlib.sha256(data).hexdigest()
    for _ in range(_MAX_RACES):
        found = store.read(names.UPLOADS)
        kept = [] if found is None else [str(one) for one in bounded_json.loads(found.value)]
        after = [one for one in kept if one != digest]
        leaving: list[str] = []
        while len(after) + 1 > MAX_KEPT:
            unused = next((one for one in after if not is_in_use(one)), None)
            if unused is None:
                raise UsageError(f"jobs use {MAX_KEPT} uploads, as many as are kept; wait until some have been removed")
            after.remove(unused)
            leaving.append(unused)
        store.compare_and_swap(names.UPLOAD + digest, None, data)  # it may be there
        before, value = None if found is None else found.version, json.dumps([*after, digest]).encode()
        if store.compare_and_swap(names.UPLOADS, before, value):
            for one in leaving:
                store.delete(names.UPLOAD + one)
            return digest
    raise UsageError("the upload was not kept: too many others were at the same moment; try again")


def read(store: Store, digest: str) -> bytes:
    """Raises UsageError if it is gone."""
    found = store.read(names.UPLOAD + digest)
    if found is None or hashlib.sha256(found.value).hexdigest() != digest:
        raise UsageError("upload: the uploaded files are not in the store any more; submit the job again")
    return found.value


def unpack(archive: Path, where: Path) -> None:
    """The archive's files as new files in `where`, which is made; nothing if it is there. Raises UsageError."""
    try:
        if not where.is_dir():
            _unpack(archive, where)
    except OSError as error:
        raise UsageError(f"upload: {error.filename}: {error.strerror}") from None


def _unpack(archive: Path, where: Path) -> None:
    made = where.with_name(f".{where.name}.new")
    data = archive.read_bytes()
    with tarfile.open(fileobj=io.BytesIO(data), mode="r:gz") as tar:
        for member in _members(data):
            path = made / member.name
            (path if member.isdir() else path.parent).mkdir(parents=True, exist_ok=True)
            content = None if member.isdir() else tar.extractfile(member)
            if content is not None:
                path.write_bytes(content.read())
                path.chmod(0o700 if member.mode & 0o100 else 0o600)
    made.mkdir(exist_ok=True)
    os.rename(made, where)


def _members(data: bytes) -> list[tarfile.TarInfo]:
    """Directories and plain files below the archive's root, of a bounded size. Raises UsageError for anything else."""
    try:
        with tarfile.open(fileobj=_Headers(fileobj=io.BytesIO(data))) as tar:
            found: list[tarfile.TarInfo] = []
            size = 0
            for member in tar:
                # tarfile would keep them all, and give each member a copy of the archive's own.
                tar.members, tar.pax_headers, member.pax_headers = [], {}, {}  # type: ignore[attr-defined]
                path = PurePosixPath(member.name)
                if (
                    path.is_absolute()
                    or ".." in path.parts
                    or "\0" in member.name
                    or not (member.isfile() or member.isdir())
                ):
                    raise UsageError(f"the upload: {member.name[:200]!r} is neither a file nor a directory in it")
                size += member.size
                found.append(member)
                if size > MAX_CONTENT_BYTES or len(found) > MAX_FILES:
                    raise UsageError(f"the upload has more than {MAX_FILES} files or {MAX_CONTENT_BYTES >> 20} MiB")
            return found
    except (tarfile.TarError, OSError, EOFError, ValueError, RecursionError, zlib.error) as error:
        raise UsageError(f"the upload is not a tar archive with gzip: {error}") from None


class _Headers(gzip.GzipFile):
    """For reading an archive's headers, which tarfile reads in one piece each."""

    left, long_left = _MAX_HEADER_BYTES, _MAX_LONG_HEADER_BYTES

    def read(self, size: int | None = -1) -> bytes:
        if size is None or size < 0:
            raise tarfile.ReadError("a header without a size")
        self.left -= size
        self.long_left -= size if size > tarfile.BLOCKSIZE else 0
        if min(self.left, self.long_left) < 0:
            raise tarfile.ReadError("its headers are too large")
        return super().read(size)
