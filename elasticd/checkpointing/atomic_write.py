"""How a checkpoint is written whole or not at all, and how it is deleted: staged, fsynced, renamed.

Everything is written under a hidden name first; one rename makes it a checkpoint. A writer that dies leaves only hidden
names, which the next save deletes once their lock shows that the writer is gone.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import secrets
import shutil
from collections.abc import Callable
from pathlib import Path
from types import TracebackType

from elasticd.checkpointing.lineage import CheckpointName, names
from elasticd.checkpointing.manifest import MANIFEST, STATE, Checksum, Manifest

_COPY_BYTES = 1 << 20


class HashingFile:
    """Each byte goes to the descriptor and into the checksum, once."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self.checksum = Checksum()
        self.bytes = 0

    def write(self, data: bytes | memoryview) -> None:
        """Raises OSError."""
        view = memoryview(data)
        while len(view):
            count = os.write(self._fd, view[:_COPY_BYTES])
            self.checksum.update(view[:count])
            self.bytes += count
            view = view[count:]


class Staging:
    """A checkpoint being written. Leaving the `with` block without `publish` removes what was written."""

    def __init__(self, directory: Path, round: int, step: int) -> None:
        self._directory = directory
        self._final = directory / f"r{round}-s{step}"
        self.path = directory / f".{self._final.name}.{secrets.token_hex(4)}.staging"
        self._manifest = -1

    def __enter__(self) -> Staging:
        try:
            self.path.mkdir(mode=0o700)
            self._manifest = os.open(self.path / MANIFEST, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            # Marks the directory as in use. On a file system without locks no lock can show that it is abandoned
            # either.
            with contextlib.suppress(OSError):
                fcntl.lockf(self._manifest, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BaseException:
            self._leave()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._leave()

    def _leave(self) -> None:
        if self._manifest >= 0:
            os.close(self._manifest)
            self._manifest = -1
        shutil.rmtree(self.path, ignore_errors=True)

    def write_state(self, writer: Callable[[HashingFile], None]) -> tuple[int, str]:
        """Let `writer` fill state.pt; returns its size and checksum. Raises OSError and what the writer raises."""
        fd = os.open(self.path / STATE, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            file = HashingFile(fd)
            writer(file)
            os.fsync(fd)
        finally:
            os.close(fd)
        return file.bytes, str(file.checksum)

    def link_state(self, source: int) -> tuple[int, str] | None:
        """Hard-link state.pt from the directory with descriptor `source`, or copy it: then its size and checksum."""
        try:
            os.link(STATE, self.path / STATE, src_dir_fd=source)
        except OSError:
            # No hard links here, too many of them, or not ours to link (fs.protected_hardlinks). The copy raises other
            # errors.
            return self.write_state(lambda file: _copy(source, file))
        return None

    def publish(self, manifest: Manifest) -> Path:
        """Rename it to a checkpoint; returns its path. Raises OSError."""
        data = memoryview(manifest.to_json())
        while len(data):
            data = data[os.write(self._manifest, data) :]
        os.fsync(self._manifest)
        fsync_directory(self.path)
        replacement = self._final.with_name(f"{self._final.name}.again")
        if os.path.lexists(replacement):
            self._replace(replacement)
        try:
            os.rename(self.path, self._final)
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
                raise
            os.rename(self.path, replacement)
            fsync_directory(self._directory)
            self._replace(replacement)
        fsync_directory(self._directory)
        return self._final

    def _replace(self, replacement: Path) -> None:
        """Give the replacement of a checkpoint its name. At any moment one of the two is there, whole."""
        discard(self._final)
        os.rename(replacement, self._final)


def discard(path: Path) -> None:
    """Delete a checkpoint: one rename makes it invalid, then its files go. Raises OSError if it cannot be renamed."""
    trash = path.with_name(f".{path.name.removesuffix('.again')}.{secrets.token_hex(4)}.trash")
    try:
        os.rename(path, trash)
    except FileNotFoundError:
        return
    _remove(trash)


def sweep(directory: Path, own_round: int, settled: bool = False) -> None:
    """Remove half-deleted checkpoints and those that dead writers left unfinished; `settled`: those of older rounds,
    too.
    """
    for each in names(directory):
        if each.hidden == "trash" or (
            each.hidden == "staging"
            and each.round <= own_round
            and ((settled and each.round < own_round) or _is_abandoned(each))
        ):
            _remove(each.path)


def fsync_directory(path: Path) -> None:
    """Make the names in a directory durable, where the file system can."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS):
            raise
    finally:
        os.close(fd)


def _is_abandoned(staging: CheckpointName) -> bool:
    try:
        fd = os.open(staging.path / MANIFEST, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        return True  # created but never filled, or already half removed
    except OSError:
        return False
    try:
        fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    finally:
        os.close(fd)
    return True


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with contextlib.suppress(OSError):
            path.unlink()


def _copy(source: int, file: HashingFile) -> None:
    fd = os.open(STATE, os.O_RDONLY | os.O_CLOEXEC, dir_fd=source)
    with open(fd, "rb", buffering=0) as state:
        while piece := state.read(_COPY_BYTES):
            file.write(piece)
