"""The command `elasticd`; also `python -m elasticd_agent`, for where it is not on the path."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from typing import NoReturn

from elasticd_agent.system.processes.process import (
    STOP_SIGNALS,
    STRAY_SIGNALS,
    handle_signals_unless_ignored,
    ignore_signal,
)


def main() -> NoReturn:
    """Ends the process with the exit code; what the command raises passes through. Until the command has its own
    handlers Ctrl-C ends it without a traceback, and no stray signal does."""
    # A program that starts this one may have blocked them, to wait for its own: no exit of a worker would be noticed.
    # An agent unblocks requests itself, once it handles them: some may wait since before it replaced itself.
    requests = () if sys.argv[1:2] == ["agent"] else STOP_SIGNALS
    signal.pthread_sigmask(signal.SIG_UNBLOCK, (*requests, signal.SIGCHLD))
    handle_signals_unless_ignored(STRAY_SIGNALS, ignore_signal)
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    if os.getpid() == 1:  # in a container: the kernel drops a signal to it that has no handler
        handle_signals_unless_ignored(STOP_SIGNALS, lambda number, frame: os._exit(128 + number))
    from elasticd_agent.cli.main import main as command

    exit_without_finalization(command())


def exit_without_finalization(exit_code: int) -> NoReturn:
    """End without the interpreter's finalization, which frees what daemon threads still use: a job that has succeeded
    must not end by SIGSEGV because a thread was waiting in a library at that moment.

    The command has closed everything by then; there are no exit handlers that anything depends on.
    """
    for thread in threading.enumerate():
        if not thread.daemon and thread is not threading.current_thread():
            thread.join()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, AttributeError):  # closed, a broken pipe, or None
            stream.flush()
    os._exit(exit_code)


if __name__ == "__main__":
    main()
