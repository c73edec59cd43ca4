"""Files that hold one secret: a token, a password, a private key. A sentence never quotes their content."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from elasticd.errors import UsageError

MAX_LENGTH = 1024
"""Characters; a longer file is not a secret."""


def find_problem(path: Path) -> str | None:
    """What is wrong with `path` as a secret's file and what would be right, or None. Its group may read it, as with
    secrets mounted into containers."""
    try:
        found = path.stat()
    except OSError as error:
        return f"{str(path)!r} cannot be found: {os.strerror(error.errno or 0)}"
    if not stat.S_ISREG(found.st_mode):
        return f"{str(path)!r} is not a file"
    if found.st_mode & 0o027:
        who = "anybody can" if found.st_mode & 0o007 else "its group can change it and"
        can = "read it" if found.st_mode & 0o004 else "change it" if found.st_mode & 0o007 else "replace the secret"
        return f"{str(path)!r}: {who} {can} (mode {stat.S_IMODE(found.st_mode):04o}); chmod 600 {path}"
    if not os.access(path, os.R_OK):
        return f"{str(path)!r} cannot be read: permission denied"
    return f"{str(path)!r} is empty" if found.st_size == 0 else None


def read_secret(path: Path, key: str) -> str:
    """The one line in `path`. `key` begins the sentences. Raises UsageError."""
    wrong = find_problem(path)
    if wrong is not None:
        raise UsageError(f"{key}: {wrong}")
    try:
        with path.open(encoding="utf-8") as file:
            text = file.read(MAX_LENGTH + 2)
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is not text"
        raise UsageError(f"{key}: {str(path)!r} cannot be read: {why}") from None
    secret = text.rstrip("\r\n")
    if not secret.strip() or "\n" in secret or "\r" in secret or len(secret) > MAX_LENGTH or not secret.isprintable():
        raise UsageError(f"{key}: {str(path)!r} must hold one line, the secret, of at most {MAX_LENGTH} characters")
    return secret
