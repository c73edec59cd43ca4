"""`elasticd agent --supervised`: starts the agent, and starts it again whenever it dies. Process 1 of a container.

It exists so that a container has what systemd does for a machine: runners outlive the agent's death, because they
become this process's children; whoever dies is reaped; signals go to the agent; one that hangs is ended and started
again. It is small, so that it does not die: it reads no configuration, talks to no store and decides nothing. An agent
that ends by itself ends this, too.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import time
from collections.abc import Sequence

from elasticd_agent.node.watchdog import WatchdogMonitor
from elasticd_agent.workers.launcher.reaping import signal_name

PR_SET_CHILD_SUBREAPER, PR_SET_NAME = 36, 15
BACKOFF_S = (0.0, 1.0, 2.0, 5.0, 10.0, 30.0)
STABLE_S = 60.0
"""An agent that lived so long did not die of how it starts."""
FORWARDED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGQUIT)
HANG_TIMEOUT_S = 30.0
"""As deploy/systemd's WatchdogSec: less than what the kubelet's liveness probe takes."""
ABORT_GRACE_S = 5.0
"""From SIGABRT, by which the agent writes its stacks, to SIGKILL, which a stopped one hears as well."""
POLL_S = 5.0
FINAL_EXIT_CODES = (0, 2)
"""It has left because it was asked to, or cannot work as it is configured."""


def supervise(
    command: Sequence[str], hang_timeout_s: float = HANG_TIMEOUT_S, abort_grace_s: float = ABORT_GRACE_S
) -> int:
    """Keep `command` running until it ends by itself. Returns its exit code."""
    # Where somebody listens already, as podman may, that one hears and watches.
    feeding = None if "NOTIFY_SOCKET" in os.environ else WatchdogMonitor(hang_timeout_s)
    try:
        return _supervise(command, feeding, min(POLL_S, hang_timeout_s / 4), abort_grace_s)
    finally:
        if feeding is not None:
            feeding.close()


def _supervise(command: Sequence[str], watchdog: WatchdogMonitor | None, poll_s: float, abort_grace_s: float) -> int:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    libc.prctl(PR_SET_NAME, b"elasticd-super", 0, 0, 0)
    waited_for = {*FORWARDED, signal.SIGCHLD}
    # Signals are waited for, not handled: none can come between a look and the wait.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, waited_for)
    deaths = 0
    while True:
        since = time.monotonic()
        try:
            child = _start(command, before, watchdog)
        except OSError as error:  # no room for another process, say: our end would be that of every runner
            how = f"cannot be started ({error.strerror}), and it is tried again"
        else:
            code, asked_to_end = _watch_agent(child, watchdog, waited_for, poll_s, abort_grace_s)
            if code in FINAL_EXIT_CODES or asked_to_end:
                return code if code >= 0 else 128 - code
            how = f"{_describe_exit(code)} and is started again"
        deaths = 1 if time.monotonic() - since >= STABLE_S else deaths + 1
        pause_s = BACKOFF_S[min(deaths - 1, len(BACKOFF_S) - 1)]
        _log(f"the agent {how} in {pause_s:g} s; jobs go on without it")
        if _pause(pause_s, waited_for):
            return 128 + signal.SIGTERM


def _watch_agent(
    child: subprocess.Popen[bytes],
    watchdog: WatchdogMonitor | None,
    signals: set[signal.Signals],
    poll_s: float,
    abort_grace_s: float,
) -> tuple[int, bool]:
    """How the agent has ended, and whether it had been asked to; one that hangs is ended."""
    looked_at = time.monotonic()
    attentive_s, kill_at, asked_to_end = 0.0, float("inf"), False
    while (status := _reap(child.pid)) is None:
        got = signal.sigtimedwait(signals, poll_s)
        if got is not None and got.si_signo in FORWARDED:
            asked_to_end = asked_to_end or got.si_signo in (signal.SIGTERM, signal.SIGINT)
            os.kill(child.pid, got.si_signo)  # Popen's own would reap it, and we would wait for ever
        now = time.monotonic()
        # A container that was frozen has not waited: its agent could not say anything either.
        attentive_s, looked_at = attentive_s + min(now - looked_at, 2 * poll_s), now
        if attentive_s >= kill_at:
            os.kill(child.pid, signal.SIGKILL)
        elif kill_at == float("inf") and watchdog is not None and watchdog.expired(attentive_s):
            silent = f"the agent has decided nothing for {watchdog.timeout_s:g} s"
            _log(f"{silent}; it is ended, with its stacks if it can")
            os.kill(child.pid, signal.SIGABRT)
            kill_at = attentive_s + abort_grace_s
    child.returncode = os.waitstatus_to_exitcode(status)
    return child.returncode, asked_to_end


def _start(
    command: Sequence[str], mask: set[signal.Signals] | set[int], watchdog: WatchdogMonitor | None
) -> subprocess.Popen[bytes]:
    """With our own signal mask as it was before: a blocked signal would stay blocked in the agent. Raises OSError."""
    if watchdog is not None:
        watchdog.reset()
    blocked = signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    try:
        return subprocess.Popen(command, env={**os.environ, **(watchdog.environment if watchdog is not None else {})})
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)


def _reap(agent: int) -> int | None:
    """Reap everybody who has ended, orphans too; the agent's status if it is among them."""
    status = None
    while True:
        try:
            pid, how = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return status
        if not pid:
            return status
        if pid == agent:
            status = how


def _pause(seconds: float, signals: set[signal.Signals]) -> bool:
    """Reap meanwhile. True if somebody wants us to end."""
    until = time.monotonic() + seconds
    while (left := until - time.monotonic()) > 0:
        got = signal.sigtimedwait(signals, left)
        _reap(0)
        if got is not None and got.si_signo in (signal.SIGTERM, signal.SIGINT):
            return True
    return False


def _describe_exit(code: int) -> str:
    return f"was killed by {signal_name(-code)}" if code < 0 else f"ended with code {code}"


def _log(sentence: str) -> None:
    with contextlib.suppress(OSError):  # nobody reads it any more, or the disk is full
        # Not by sys.stderr: what it could not write it would try again at our end, and that makes the exit code 120.
        os.write(2, f"{time.strftime('%Y-%m-%d %H:%M:%S')} elasticd: {sentence}\n".encode(errors="replace"))
