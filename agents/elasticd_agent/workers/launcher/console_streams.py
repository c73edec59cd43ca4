"""Keeps a worker independent of its console: a closed one costs its output, and Ctrl-C shows one line a rank.

Set up before the script runs. Python's own streams raise BrokenPipeError once nobody reads them (`elasticd run … |
head`), and EIO after the terminal has gone: a `print` would end the training. So would a full disk below the job's
log files, which are not the script's own.
"""

from __future__ import annotations

import errno
import io
import os
import stat
import sys
from collections.abc import Callable, Collection
from types import TracebackType
from typing import Any

_CLOSED_ERRNOS = (errno.EPIPE, errno.ECONNRESET, errno.EIO)
_FULL_ERRNOS = (errno.ENOSPC, errno.EDQUOT)
_LIBRARY_PATHS = (f"{os.sep}site-packages{os.sep}", f"{os.sep}lib{os.sep}python")


class ConsoleFile(io.FileIO):
    """A standard stream, which becomes /dev/null when its other end has gone."""

    on_full_disk: Callable[[OSError], None] | None = None
    """Called with what is lost, if this is a log file of the job."""

    def write(self, data: Any) -> int:
        try:
            return super().write(data)
        except OSError as error:
            if error.errno in _FULL_ERRNOS and self.on_full_disk is not None:
                self.on_full_disk(error)
                return memoryview(data).nbytes
            if error.errno not in _CLOSED_ERRNOS:
                raise
            null = os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)
            os.dup2(null, self.fileno())
            os.close(null)
            return memoryview(data).nbytes


def survive_closed_console(logs: Collection[int] = (), on_full_disk: Callable[[OSError], None] | None = None) -> None:
    """Replace the standard streams that lead to a pipe, a socket or a terminal by ones that never fail, and those of
    the descriptors `logs`, which are log files of the job.
    """
    for name, fd in (("stdout", 1), ("stderr", 2)):
        old = getattr(sys, name)
        if type(old) is not io.TextIOWrapper or old.fileno() != fd:
            continue
        if stat.S_ISREG(os.fstat(fd).st_mode) and fd not in logs:
            continue
        raw = ConsoleFile(fd, "w", closefd=False)
        raw.on_full_disk = on_full_disk if fd in logs else None
        raw.name = f"<{name}>"
        new = io.TextIOWrapper(
            raw if isinstance(old.buffer, io.FileIO) else io.BufferedWriter(raw),  # python -u
            old.encoding,
            old.errors,
            "\n",
            old.line_buffering,
            old.write_through,
        )
        new.mode = "w"  # type: ignore[misc]  # as that of Python's own
        setattr(sys, name, new)
        setattr(sys, f"__{name}__", new)


def shorten_interrupts() -> None:
    """An uncaught KeyboardInterrupt is one line with the script's innermost call, not a traceback a rank.

    Libraries compare the hook with Python's own before they set theirs, so both names lead to this one.
    """
    if sys.excepthook is sys.__excepthook__:
        sys.excepthook = sys.__excepthook__ = _short_interrupt_excepthook


_python_excepthook = sys.__excepthook__


def _short_interrupt_excepthook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    if kind is not KeyboardInterrupt:
        _python_excepthook(kind, error, trace)
        return
    where = ""
    while trace is not None:
        code = trace.tb_frame.f_code
        if not where or not any(
            part in code.co_filename for part in (*_LIBRARY_PATHS, _short_interrupt_excepthook.__code__.co_filename)
        ):
            where = f" at {code.co_filename}:{trace.tb_lineno} in {code.co_name}"
        trace = trace.tb_next
    # print() writes the end of the line by itself, and all ranks write at once.
    sys.stderr.write(f"KeyboardInterrupt{where}\n")
