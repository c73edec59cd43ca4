"""Atomic writes: a checkpoint is written whole or not at all, and deleted in the same way: staged, fsynced, renamed.

Everything is written under a hidden name first; one rename makes it a checkpoint. A writer that dies leaves only hidden
names, which the next save deletes once their lock shows that the writer is gone.

The order of a save, and what each step prevents:
1. A staging directory under a random hidden name, with an empty manifest that is locked. A sweep that finds the name
   sees the lock and leaves it alone; the lock is of the process, so it ends with it, however it ends.
2. The files, each with its checksum, fsynced before its descriptor is closed. After a power loss a file is as the
   manifest describes it, or it is found damaged.
3. The manifest, fsynced, then the directory. A checkpoint whose files are not all durable never has a manifest.
4. The rename to `rROUND-sSTEP`, and an fsync of the parent. It is one step: before it there is no checkpoint, after it
   there is a whole one.

A step that is saved a second time, after a restart from an earlier one, has its name already. The new one is renamed
beside it (`.again`), the old one is discarded, and the new one takes its name. At every moment one of the two is there,
whole, and readers know both names.

Deletion is the same backwards: one rename to a hidden name makes a checkpoint invalid, and its files go afterwards. A
reader that has opened it keeps its descriptors.

In an object store, the files are uploaded under a name that is free and the manifest last; what is local is a copy.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os
import secrets
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from types import TracebackType

from elasticd.checkpointing.storage.lineage import list_names
from elasticd.checkpointing.storage.manifest import MANIFEST, Checksum, Manifest, SizeAndChecksum
from elasticd.checkpointing.storage.object_store import ObjectStore, store_of

_BLOCK_BYTES = 4 << 20
_STAGING_TRIES = 5
_DIRECT_ALIGNMENT = 4096
"""The alignment of offsets and sizes with O_DIRECT: no disk has larger blocks."""


class HashingFile:
    """A new file. Each byte goes into the checksum and to the disk, once.

    It is written past the page cache where the file system can (O_DIRECT): that takes a third of the CPU time, and the
    state is in memory already.
    """

    def __init__(self, path: Path) -> None:
        """Raises OSError."""
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        self._direct = True
        try:
            self._fd = os.open(path, flags | os.O_DIRECT, 0o600)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            self._direct = False
            path.unlink(missing_ok=True)  # some file systems make the file before they refuse
            self._fd = os.open(path, flags, 0o600)
        self._block = memoryview(mmap.mmap(-1, _BLOCK_BYTES))
        """Collects what is written next. At the beginning of a page, as O_DIRECT requires."""
        self._filled = 0
        self.checksum = Checksum()
        self.bytes = 0

    def write(self, data: bytes | memoryview) -> None:
        """Raises OSError."""
        view = memoryview(data)
        while len(view):
            count = min(len(view), _BLOCK_BYTES - self._filled)
            self._block[self._filled : self._filled + count] = view[:count]
            self._advance(count)
            view = view[count:]

    def copy_from(self, source: int, start: int = 0, size: int | None = None) -> None:
        """Write `size` bytes of the descriptor `source`, from `start` on; None: all of them. Raises OSError."""
        at, end = start, sys.maxsize if size is None else start + size
        while count := os.preadv(source, [self._block[self._filled : self._filled + end - at]], at):
            at += count
            self._advance(count)

    def write_pages(self, pages: memoryview) -> None:
        """Write memory that begins with a page, before anything else, without a copy of it. Raises OSError."""
        for start in range(0, len(pages), _BLOCK_BYTES):
            self._write_block(pages[start : start + _BLOCK_BYTES])

    def sync(self) -> None:
        """Everything is on the disk when this returns. Raises OSError."""
        self._flush()
        os.fsync(self._fd)

    def close(self) -> None:
        """Close the descriptor. What was not synced may be lost."""
        os.close(self._fd)

    def _advance(self, count: int) -> None:
        self._filled += count
        if self._filled == _BLOCK_BYTES:
            self._flush()

    def _flush(self) -> None:
        self._write_block(self._block[: self._filled])
        self._filled = 0

    def _write_block(self, block: memoryview) -> None:
        self.checksum.update(block)
        self.bytes += len(block)
        if len(block) % _DIRECT_ALIGNMENT:
            self._use_page_cache()
        while len(block):
            try:
                block = block[os.write(self._fd, block) :]
            except OSError as error:
                if error.errno != errno.EINVAL or not self._direct:
                    raise
                self._use_page_cache()  # after a short write, or where larger blocks are needed

    def _use_page_cache(self) -> None:
        fcntl.fcntl(self._fd, fcntl.F_SETFL, 0)
        self._direct = False


def write_file(path: Path, fill: Callable[[HashingFile], None]) -> SizeAndChecksum:
    """Let `fill` write a new file; returns its size and checksum. Raises OSError and what `fill` raises."""
    file = HashingFile(path)
    try:
        fill(file)
        file.sync()
    finally:
        file.close()
    return file.bytes, str(file.checksum)


def write_at(fd: int, offset: int, data: memoryview) -> None:
    """Write all of it at this offset. Raises OSError."""
    while len(data):
        count = os.pwrite(fd, data, offset)
        data = data[count:]
        offset += count


def staging_path(directory: Path, round: int, step: int, token: str) -> Path:
    """Return the hidden name of a checkpoint that is being written; `token` makes it one that
    several processes know.
    """
    return directory / f".r{round}-s{step}.{token}.staging"


class Staging:
    """A checkpoint being written. Leaving the `with` block without `publish` removes what was written."""

    def __init__(self, directory: Path, round: int, step: int, token: str = "", source: str | None = None) -> None:
        """`token`: hexadecimal digits in the hidden name, if other processes write into it, too. `source`: the
        checkpoint in the same directory that has the same files.
        """
        self._source = source
        self._directory = directory
        self._named = round, step
        self._final = directory / f"r{round}-s{step}"
        self.path = staging_path(directory, round, step, secrets.token_hex(4))
        self._shared = staging_path(directory, round, step, token) if token else None
        self._manifest = -1
        self._published = False

    def __enter__(self) -> Staging:
        """Raises OSError: FileExistsError if another process has made the shared one."""
        for left in reversed(range(_STAGING_TRIES)):
            self.path.mkdir(mode=0o700)
            try:
                self._lock_manifest()
                if self._shared is not None:  # with its lock from the beginning
                    self._rename_to_shared(self._shared)
                return self
            except FileNotFoundError:
                self._release_and_remove()
                if not left:
                    raise
                self.path = staging_path(self._directory, *self._named, secrets.token_hex(4))
            except BaseException:
                self._release_and_remove()
                raise
        raise AssertionError

    def _lock_manifest(self) -> None:
        """Mark the directory as in use. Raises OSError: FileNotFoundError if a sweep has taken it before that."""
        self._manifest = os.open(self.path / MANIFEST, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            fcntl.lockf(self._manifest, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            # On a file system without locks no lock can show that it is abandoned either.
            if error.errno in (errno.EACCES, errno.EAGAIN):
                raise FileNotFoundError(errno.ENOENT, "another process removes it", str(self.path)) from None
        os.stat(self.path / MANIFEST)

    def _rename_to_shared(self, name: Path) -> None:
        """Give the directory the name that other processes know. Raises FileExistsError if one of them has made it."""
        try:
            os.rename(self.path, name)
        except OSError as error:
            raise FileExistsError(name) if error.errno == errno.ENOTEMPTY else error from None
        self.path = name

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._release_and_remove()

    def _release_and_remove(self) -> None:
        """Release the lock, and remove what was not published."""
        if self._manifest >= 0:
            os.close(self._manifest)
            self._manifest = -1
        if not self._published:  # else another process may have made one of this name by now
            shutil.rmtree(self.path, ignore_errors=True)

    def link_or_copy(self, name: str, source: int) -> SizeAndChecksum | None:
        """Hard-link a file from the directory with descriptor `source`, or copy it: then its size and checksum."""
        if store_of(self._directory) is not None and not os.path.exists(f"/proc/self/fd/{source}/{name}"):
            return None  # it is in the object store
        try:
            os.link(name, self.path / name, src_dir_fd=source)
        except OSError:
            # No hard links here, too many of them, or not ours to link (fs.protected_hardlinks). The copy raises other
            # errors.
            return write_file(self.path / name, lambda file: _copy_file(source, name, file))
        return None

    def publish(self, manifest: Manifest) -> Path:
        """Rename it to a checkpoint; returns its path. Raises OSError."""
        data = memoryview(manifest.to_json())
        while len(data):
            data = data[os.write(self._manifest, data) :]
        os.fsync(self._manifest)
        fsync_directory(self.path)
        if (store := store_of(self._directory)) is not None:
            return self._publish_to_store(store, manifest)
        replacement = self._final.with_name(f"{self._final.name}.again")
        if os.path.lexists(replacement):
            self._rename_replacement(replacement)
        try:
            os.rename(self.path, self._final)
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
                raise
            os.rename(self.path, replacement)
            self._published = True
            self._rename_replacement(replacement)
        self._published = True
        fsync_directory(self._directory)
        return self._final

    def _publish_to_store(self, store: ObjectStore, manifest: Manifest) -> Path:
        """A step saved a second time has the other one of two names, and then the first one goes."""
        path = self._directory / store.free_name(self._final.name)
        store.commit(self.path, path.name, manifest, self._source)
        _remove(path)
        os.rename(self.path, path)
        self._published = True
        other = path.with_name(f"{path.name}.again" if path == self._final else self._final.name)
        if other.exists():
            discard_checkpoint(other)
        store.drop_local_copies(path)
        return path

    def _rename_replacement(self, replacement: Path) -> None:
        """Give the replacement of a checkpoint its name. At any moment one of the two is there, whole."""
        fsync_directory(self._directory)  # also where the replacement is of a writer that was killed
        discard_checkpoint(self._final)
        os.rename(replacement, self._final)


def discard_checkpoint(path: Path) -> None:
    """Delete a checkpoint: one rename makes it invalid, then its files go. Raises OSError if it cannot be renamed."""
    if (store := store_of(path.parent)) is not None:
        store.delete_checkpoint(path.name)
    trash = path.with_name(f".{path.name.removesuffix('.again')}.{secrets.token_hex(4)}.trash")
    try:
        os.rename(path, trash)
    except FileNotFoundError:
        return
    _remove(trash)


def sweep_unfinished(directory: Path, own_round: int, with_older_rounds: bool = False) -> None:
    """Remove half-deleted checkpoints and those that dead writers left unfinished; `with_older_rounds`: those of older
    rounds, too.
    """
    for named in list_names(directory):
        if named.hidden_kind == "trash" or (
            with_older_rounds and named.hidden_kind == "staging" and named.round < own_round
        ):
            _remove(named.path)
        elif named.hidden_kind == "staging" and named.round <= own_round:
            _remove_abandoned(named.path)


def make_durable_directory(path: Path) -> None:
    """Make a directory and its parents; what is saved in them does not go with their names at a power loss. Raises
    OSError.
    """
    missing = [each for each in (path, *path.parents) if not each.exists()]
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    for each in missing:
        with contextlib.suppress(PermissionError):  # a parent that may be searched and not read
            fsync_directory(each.parent)


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


def is_abandoned(staging: Path) -> bool:
    """True if the writer of a staging directory is dead, or it does not exist. False where the file system has no
    locks.
    """
    try:
        fd = os.open(staging / MANIFEST, os.O_RDWR | os.O_CLOEXEC)
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


def _remove_abandoned(staging: Path) -> None:
    """Remove it if its writer is dead, but not one that another process is just making, there or in its place: what has
    a manifest is renamed under its lock, what has none goes only while it is empty, or if it never gets one.
    """
    try:
        fd = os.open(staging / MANIFEST, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        with contextlib.suppress(OSError):
            staging.rmdir()
        if not os.path.lexists(staging / MANIFEST):  # half removed
            _remove(staging)
        return
    except OSError:
        return
    trash = staging.with_name(f".{staging.name.split('.')[1]}.{secrets.token_hex(4)}.trash")
    try:
        fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.path.samestat(os.fstat(fd), os.stat(staging / MANIFEST)):
            os.rename(staging, trash)
    except OSError:
        return
    finally:
        os.close(fd)
    _remove(trash)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with contextlib.suppress(OSError):
            path.unlink()


def _copy_file(directory: int, name: str, file: HashingFile) -> None:
    fd = os.open(name, os.O_RDONLY | os.O_CLOEXEC, dir_fd=directory)
    try:
        file.copy_from(fd)
    finally:
        os.close(fd)
