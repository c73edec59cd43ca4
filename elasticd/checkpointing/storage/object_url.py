"""URLs of object stores, s3://…, gs://… and az://…, and the paths of their copies on this node.

Small, because every command that reads the path of a checkpoint directory imports it: object_store.py has the stores.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import stat
import sys
from pathlib import Path

from elasticd.errors import UsageError

PACKAGES = {"s3": "s3fs", "gs": "gcsfs", "az": "adlfs"}
"""The schemes, and what fsspec needs for each."""
CACHE_VARIABLE = "ELASTICD_OBJECT_CACHE"


def resolve(directory: str | os.PathLike[str], root: str = "") -> Path:
    """The absolute path of a directory; of a URL, also as `Path` shortens it, that of its copy on this node.

    `root`: of the copies. Raises UsageError for a URL without a bucket.
    """
    path = Path(directory)
    at = scheme_index(path)
    if at is None:
        return path.absolute()
    if ".." in path.parts[at:] or len(path.parts) < at + 2:
        raise UsageError(f"{url_of(path)} names no bucket")
    root = root or os.environ.get(CACHE_VARIABLE) or make_own_directory(f"/var/tmp/elasticd-objects-{os.getuid()}")
    return Path(root, *path.parts[at:]).absolute()


def make_own_directory(path: str) -> str:
    """`path`, made for this user alone: all users may write above it. Raises UsageError."""
    with contextlib.suppress(OSError):
        os.mkdir(path, 0o700)
    with contextlib.suppress(FileNotFoundError):
        status = os.lstat(path)
        if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid() or status.st_mode & 0o022:
            raise UsageError(f"{path} is not this user's alone: set {CACHE_VARIABLE} to another directory")
    return path


def url_of(directory: Path) -> str | None:
    """The URL of the store that this directory is a copy of; None for any other directory."""
    at = scheme_index(directory)
    return None if at is None else f"{directory.parts[at]}//{'/'.join(directory.parts[at + 1 :])}"


def path_or_url(path: Path) -> str:
    """The directory as people write it."""
    return url_of(path) or str(path)


def package_of(directory: Path) -> str | None:
    """The package that fsspec needs for the store of `directory`; None for any other directory."""
    at = scheme_index(directory)
    return None if at is None else PACKAGES[directory.parts[at][:-1]]


def missing_package_reason(directory: Path) -> str | None:
    """One sentence if this interpreter lacks what the store of `directory` needs."""
    package = package_of(directory)
    if package is None or importlib.util.find_spec(package) is not None:
        return None
    url = url_of(directory)
    return f"checkpoints in {url} need the package {package}: pip install 'elasticd[objects]' for {sys.executable}"


def scheme_index(path: Path) -> int | None:
    """The index of the scheme in the parts of this path; None for a path that has none."""
    return next((at for at, part in enumerate(path.parts) if part[-1:] == ":" and part[:-1] in PACKAGES), None)
