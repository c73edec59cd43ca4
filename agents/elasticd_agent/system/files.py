"""Plain files opened safely, and files replaced atomically: a reader finds the old content or the new one.

A folder may belong to a job's user, so the file there must not lead the agent elsewhere or make it wait: a link, a
second name of another user's file, and a pipe without a writer are errors. The folders above it are trusted.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import stat
import tempfile
from pathlib import Path

from elasticd.errors import UsageError


def temporary_directory() -> Path:
    """$TMPDIR, /tmp or another usual one; /dev/shm where none can be written, as in a container that is read-only."""
    try:
        return Path(tempfile.gettempdir())
    except FileNotFoundError:
        return Path("/dev/shm")


def open_plain(path: Path | str, flags: int, *, dir_fd: int | None = None) -> int:
    """A file descriptor; a new file has mode 0600. Raises OSError."""
    flags |= os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
    fd = os.open(path, flags, 0o600, dir_fd=dir_fd)
    try:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            raise OSError(errno.EINVAL, "it is not a plain file", str(path))
        if status.st_nlink != 1:
            raise OSError(errno.EMLINK, "it has another name as well", str(path))
    except BaseException:
        os.close(fd)
        raise
    return fd


def read_plain(path: Path, max_bytes: int) -> bytes:
    """The whole file. Raises OSError, also beyond `max_bytes`."""
    with open(open_plain(path, os.O_RDONLY), "rb") as file:
        if os.fstat(file.fileno()).st_size > max_bytes:
            raise OSError(errno.EFBIG, f"it has more than {max_bytes} bytes", str(path))
        return file.read(max_bytes)


def replace_file(path: Path, data: bytes, *, sync: bool = True) -> None:
    """Write `path` whole with mode 0600. Raises OSError; then `path` is as before.

    `sync`: the content is on disk before it gets its name. On failure the temporary file goes, too: a full disk.
    """
    temporary = path.with_name(f".{path.name}.new")
    _clear_path(temporary)
    fd = open_plain(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
    try:
        with open(fd, "wb") as file:
            file.write(data)
            file.flush()
            if sync:
                os.fsync(fd)
        rename_over(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def replace_link(path: Path, target: Path) -> None:
    """Make `path` a symbolic link to `target`, in one step where there was one already. Raises OSError."""
    temporary = path.with_name(f".{path.name}.new")
    _clear_path(temporary)
    temporary.symlink_to(target)
    rename_over(temporary, path)


def rename_over(temporary: Path, path: Path) -> None:
    """Give a file its name. Raises OSError."""
    try:
        os.replace(temporary, path)
    except IsADirectoryError:
        _set_aside(path)
        os.replace(temporary, path)


def _clear_path(path: Path) -> None:
    try:
        path.unlink(missing_ok=True)
    except IsADirectoryError:
        _set_aside(path)


def _set_aside(path: Path) -> None:
    """A job's user may put a directory there, in his own folder: it gets another name, and stops nothing."""
    path.rename(path.with_name(f".{path.name}.{os.urandom(4).hex()}"))


def remove_tree(path: Path) -> None:
    """Remove what is there, as far as that is possible. A job may nest directories deeper than Python can follow."""
    try:
        shutil.rmtree(path, ignore_errors=True)
    except RecursionError:
        import subprocess  # it would double the command line's start time

        with contextlib.suppress(OSError, subprocess.TimeoutExpired):
            subprocess.run(["rm", "-rf", "--one-file-system", "--", path], stderr=subprocess.DEVNULL, timeout=REMOVAL_S)


REMOVAL_S = 10.0
MAX_SECRET_CHARS = 1024
"""Characters; a longer file is not a secret."""


def find_secret_file_problem(path: Path) -> str | None:
    """The reason why `path` cannot hold a secret, and what would be right; None if it can. Its group may read it, as
    with secrets mounted into containers."""
    try:
        status = path.stat()
    except OSError as error:
        return f"{str(path)!r} cannot be found: {os.strerror(error.errno or 0)}"
    if not stat.S_ISREG(status.st_mode):
        return f"{str(path)!r} is not a file"
    if status.st_mode & 0o027:
        who = "anybody can" if status.st_mode & 0o007 else "its group can change it and"
        can = "read it" if status.st_mode & 0o004 else "change it" if status.st_mode & 0o007 else "replace the secret"
        mode = stat.S_IMODE(status.st_mode)
        # Its group may be the one that reads it: an agent is not root, and jobs must not own its secrets.
        return f"{str(path)!r}: {who} {can} (mode {mode:04o}); chmod {mode & ~0o027:03o} {path}"
    if not os.access(path, os.R_OK):
        return f"{str(path)!r} cannot be read: permission denied"
    return f"{str(path)!r} is empty" if status.st_size == 0 else None


def read_secret(path: Path, key: str) -> str:
    """The one line in `path`. `key` begins the sentences. Raises UsageError."""
    wrong = find_secret_file_problem(path)
    if wrong is not None:
        raise UsageError(f"{key}: {wrong}")
    return read_secret_any_mode(path, key)


def read_secret_any_mode(path: Path, key: str) -> str:
    """The same, whatever the mode of the file."""
    try:
        with path.open(encoding="utf-8") as file:
            text = file.read(MAX_SECRET_CHARS + 2)
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is not text"
        raise UsageError(f"{key}: {str(path)!r} cannot be read: {why}") from None
    secret = text.rstrip("\r\n")
    if (
        not secret.strip()
        or "\n" in secret
        or "\r" in secret
        or len(secret) > MAX_SECRET_CHARS
        or not secret.isprintable()
    ):
        raise UsageError(
            f"{key}: {str(path)!r} must hold one line, the secret, of at most {MAX_SECRET_CHARS} characters"
        )
    return secret
