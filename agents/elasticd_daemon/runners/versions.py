"""Copies of elasticd's code in the state directory, from which runners are started: `<state>/versions/<digest>/`.

One copy is shared by all runners of a version (docs/adr/0007). A runner and its owner hold a shared lock on it, so a
later agent can tell which copies are in use, and removes the others at its start. Job users cannot change the files.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
from pathlib import Path

from elasticd_agent.system import installation
from elasticd_daemon.runners import liveness

_LOCK_FILE = "lock"


def ensure_copy(state: Path) -> Path:
    """The copy of the code that this process runs; made, or verified if it exists. Raises OSError."""
    versions = state / "versions"
    digest = installation.digest()
    copy = versions / digest
    versions.mkdir(exist_ok=True)
    versions.chmod(0o711)
    if not installation.is_copy(copy, digest):
        partial = versions / f".{digest}.new"
        for obsolete in (partial, copy):
            shutil.rmtree(obsolete, ignore_errors=True)
        try:
            installation.copy_to(partial)
            (partial / _LOCK_FILE).touch(0o600)
            os.rename(partial, copy)
        except OSError:
            shutil.rmtree(partial, ignore_errors=True)  # it must not fill a disk that is full
            raise
    return copy


def lock_copy(copy: Path) -> int:
    """A file descriptor with a shared lock: the copy is kept while any process has it open. Raises OSError."""
    fd = os.open(copy / _LOCK_FILE, os.O_RDONLY | os.O_CLOEXEC)
    fcntl.flock(fd, fcntl.LOCK_SH)
    return fd


def remove_unused(state: Path, own: Path) -> None:
    """Remove the copies of other versions that no process uses."""
    with contextlib.suppress(OSError):
        for copy in (state / "versions").iterdir():
            if copy != own and not liveness.is_locked(copy / _LOCK_FILE, or_shared=True):
                shutil.rmtree(copy, ignore_errors=True)
