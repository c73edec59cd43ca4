"""Reads files that another program left behind, without being blocked by them.

Evidence is read when things are broken: a name may be a pipe without a writer, a link to a secret, or a file of a
hundred gigabytes. Only plain files are read, a bounded part of each, and an error is a sentence, never an exception. A
file system that does not answer blocks one thread, which is abandoned.
"""

from __future__ import annotations

import errno
import math
import os
import stat
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from elasticd import bounded_json
from elasticd.bounded_json import JsonObject

MAX_TEXT_BYTES = 4 << 20
"""A stack dump of a thousand threads is below 1 MB, a flight recorder of 2,000 entries about 2 MB."""
MAX_LINE_CHARS = 1 << 20
MAX_ENTRIES = 20_000
_MAX_INT_DIGITS = 20
"""Digits of a 64-bit integer, and its sign."""
MAX_HANGING_THREADS = 64
"""Threads that wait for the file systems of one job: pages that refresh themselves ask dead ones again and again."""
_THREAD_NAME_PREFIX = "elasticd-explain"

_Result = TypeVar("_Result")


class DeadlineExceeded(Exception):
    """The file system did not answer in time."""


def run_within(seconds: float, work: Callable[[], _Result], job: str = "") -> _Result:
    """The result of `work`, or its exception. DeadlineExceeded after `seconds`, with the thread left where it hangs, or
    when no thread can be started: at most MAX_HANGING_THREADS are for each `job`, which is only a name."""
    name = f"{_THREAD_NAME_PREFIX} {job}"
    if sum(thread.name == name for thread in threading.enumerate()) >= MAX_HANGING_THREADS:
        raise DeadlineExceeded(f"{MAX_HANGING_THREADS} threads wait for its file systems already")
    results: list[_Result] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            results.append(work())
        except BaseException as error:  # noqa: BLE001 raised again below, in the calling thread
            errors.append(error)

    thread = threading.Thread(target=run, name=name, daemon=True)
    try:
        thread.start()
    except RuntimeError as error:
        raise DeadlineExceeded(str(error)) from None
    thread.join(seconds)
    if errors:
        raise errors[0]
    if not results:
        raise DeadlineExceeded
    return results[0]


@dataclass(frozen=True, slots=True)
class FileText:
    """The text read of one file. `trouble`: why it is incomplete, "" if it is complete."""

    text: str = ""
    trouble: str = ""
    missing: bool = False


def read(path: Path, max_bytes: int = MAX_TEXT_BYTES, *, tail: bool = False) -> FileText:
    """The file's first `max_bytes` bytes, or its last. Undecodable bytes become U+FFFD."""
    # O_NOFOLLOW: a job's user must not lead `elasticd explain` of another user to a file only that one may read.
    flags = os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NOCTTY
    try:
        fd = os.open(path, flags)
    except FileNotFoundError:
        return FileText(missing=True)
    except (OSError, ValueError) as error:
        link = isinstance(error, OSError) and error.errno == errno.ELOOP
        return FileText(
            trouble=f"{path.name} is a link and is not followed" if link else f"{path.name}: {_error_text(error)}"
        )
    try:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            return FileText(trouble=f"{path.name} is not a plain file and was not read")
        cut = status.st_size > max_bytes
        data = _pread(fd, status.st_size - max_bytes if cut and tail else 0, max_bytes)
    except OSError as error:
        return FileText(trouble=f"{path.name}: {_error_text(error)}")
    finally:
        os.close(fd)
    which = "last" if tail else "first"
    trouble = f"{path.name} is large: only its {which} {max_bytes >> 10} KiB were read" if cut else ""
    return FileText(data.decode("utf-8", "replace"), trouble)


def read_json_lines(path: Path, max_bytes: int = MAX_TEXT_BYTES) -> tuple[list[JsonObject], str]:
    """The JSON objects of the file's last `max_bytes` bytes, one a line, and the error."""
    file = read(path, max_bytes, tail=True)
    lines = [line for line in file.text.splitlines() if line.strip()]
    if file.trouble and lines:
        lines = lines[1:]  # the first one is incomplete
    objects = [data for line in lines if len(line) <= MAX_LINE_CHARS and (data := _parse_object(line)) is not None]
    bad = len(lines) - len(objects)
    trouble = f"{path.name}: {bad} of {len(lines)} lines cannot be read" if bad else file.trouble
    return objects, trouble


def entry_names(directory: Path) -> list[str]:
    """The sorted names in the directory, at most MAX_ENTRIES; none if it cannot be read."""
    try:
        with os.scandir(directory) as entries:
            return sorted(entry.name for _, entry in zip(range(MAX_ENTRIES), entries, strict=False))
    except OSError:
        return []


def _parse_object(text: str) -> JsonObject | None:
    """A number that no JSON can show (NaN, 1e999, one of 400 digits) becomes None."""
    try:
        data = bounded_json.loads(
            text, parse_float=_parse_finite, parse_int=_parse_bounded_int, parse_constant=lambda _: None
        )
    except (ValueError, RecursionError):
        return None
    return data if isinstance(data, dict) else None


def _parse_finite(digits: str) -> float | None:
    value = float(digits)
    return value if math.isfinite(value) else None


def _parse_bounded_int(digits: str) -> int | None:
    return int(digits) if len(digits) <= _MAX_INT_DIGITS else None


def _pread(fd: int, offset: int, max_bytes: int) -> bytes:
    parts, left = [], max_bytes
    while left > 0 and (part := os.pread(fd, min(left, 1 << 20), offset)):
        parts.append(part)
        offset, left = offset + len(part), left - len(part)
    return b"".join(parts)


def _error_text(error: Exception) -> str:
    return (error.strerror if isinstance(error, OSError) else None) or str(error)
