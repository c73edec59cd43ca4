"""Starts the owner's children: the template, a cold worker, a cold store.

Standard library only: the owner runs without site-packages. A forked child never returns into the owner's loop.
"""

from __future__ import annotations

import ctypes
import os
import signal

PR_SET_PDEATHSIG = 1
IGNORED_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
"""They do not end the owner, and keep their usual meaning for its children."""


def prctl(option: int, argument: int | bytes) -> None:
    ctypes.CDLL(None, use_errno=True).prctl(option, argument, 0, 0, 0)


def spawn(argv: list[str], env: dict[str, str], cwd: str, stdout: str | None, stderr: str | None) -> int:
    """Fork and exec as `Popen(start_new_session=True)` would; the child dies with its parent."""
    owner = os.getpid()
    # Until its exec the child has our handlers: a signal in between waits for the default action.
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, IGNORED_SIGNALS)
    pid = os.fork()
    if pid:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        return pid
    try:
        os.setsid()
        prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != owner:
            os._exit(0)
        signal.set_wakeup_fd(-1)
        for ignored in (signal.SIGPIPE, signal.SIGXFSZ):
            signal.signal(ignored, signal.SIG_DFL)
        for signum in IGNORED_SIGNALS:
            if signal.getsignal(signum) is not signal.SIG_IGN:
                signal.signal(signum, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        redirect(stdout, stderr)
        os.chdir(cwd)
        os.execvpe(argv[0], argv, env)
    except BaseException as error:  # noqa: BLE001 a forked child must not return into the owner's loop
        # The name may contain bytes that are not UTF-8.
        os.write(2, f"elasticd: cannot start {argv[0]}: {error}\n".encode("utf-8", "backslashreplace"))
    finally:
        os._exit(127)


def redirect(stdout: str | None, stderr: str | None) -> None:
    """Append this process' output to files with mode 0600; None keeps a stream as inherited."""
    for path, fd in ((stdout, 1), (stderr, 2)):
        if path is not None:
            opened = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
            os.dup2(opened, fd)
            os.close(opened)
