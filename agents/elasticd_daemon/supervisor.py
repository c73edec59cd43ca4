"""`elasticd agent --supervised`: starts the agent, and starts it again whenever it ends abnormally. For containers.

It does for a container what systemd does for a machine: runners outlive the agent, because they become this process's
children; orphans are reaped; signals are forwarded to the agent; an agent that hangs is ended and started again. It is
minimal so that nothing in it can fail: no configuration, no store. When the agent ends by itself, so does this process.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import socket
import subprocess
import time
from collections.abc import Mapping, Sequence

from elasticd_agent.system.processes import procfs
from elasticd_agent.system.processes.process import (
    PR_SET_CHILD_SUBREAPER,
    PR_SET_NAME,
    STRAY_SIGNALS,
    children,
    prctl,
    reap_children,
    signal_name,
)
from elasticd_daemon.keys import KEEPER_COMM, RUNNER_COMM

RESTART_BACKOFFS_S = (0.0, 1.0, 2.0, 5.0, 10.0, 30.0)
STABLE_AFTER_S = 60.0
"""An agent that ran this long started correctly: the backoff begins again."""
FORWARDED_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, *STRAY_SIGNALS)
"""The agent says what they mean to it."""
HANG_TIMEOUT_S = 30.0
"""The same as WatchdogSec in deploy/systemd, and less than the timeout of the kubelet's liveness probe."""
ABORT_GRACE_S = 5.0
"""The time from SIGABRT, on which the agent writes its stacks, to SIGKILL, which also ends a stopped agent."""
POLL_S = 5.0
FINAL_EXIT_CODES = (0, 2)
"""The agent left on request, or its configuration is wrong, which is no reason to end jobs with the container."""
MAX_DATAGRAM_BYTES = 4096
MAX_DATAGRAMS_PER_POLL = 1000
"""A flood on the address must not block the supervisor."""
EndRequested = bool
"""True: SIGTERM or SIGINT has arrived."""


class WatchdogMonitor:
    """The service manager's side of sd_notify: an address for keep-alives, and the time since the last one.

    It replaces WatchdogSec= in a container: a hung agent is restarted while its jobs continue, whereas the kubelet
    would end the container with all jobs. Times are the caller's, see `expired`.
    """

    def __init__(self, timeout_s: float) -> None:
        self.timeout_s = timeout_s
        self._last_feed_at: float | None = None
        self._stopping = False
        # In the abstract namespace: it needs no directory and leaves no file behind.
        self._address = f"elasticd-super-{os.getpid()}-{secrets.token_hex(8)}"
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK)
        self._socket.bind(f"\0{self._address}")

    @property
    def environment(self) -> Mapping[str, str]:
        return {"NOTIFY_SOCKET": f"@{self._address}", "WATCHDOG_USEC": str(round(self.timeout_s * 1e6))}

    def reset(self) -> None:
        """Another process starts: its time counts from its first message."""
        self._receive()
        self._last_feed_at = None
        self._stopping = False

    def expired(self, now: float) -> bool:
        """True if the last keep-alive is too old. A process that is starting or stopping has no time limit."""
        lines = self._receive()
        self._stopping = self._stopping or "STOPPING=1" in lines
        if self._stopping:
            return False
        if {"WATCHDOG=1", "READY=1"} & lines:
            self._last_feed_at = now
        return self._last_feed_at is not None and now - self._last_feed_at > self.timeout_s

    def _receive(self) -> set[str]:
        lines: set[str] = set()
        for _ in range(MAX_DATAGRAMS_PER_POLL):
            try:
                lines.update(self._socket.recv(MAX_DATAGRAM_BYTES).decode(errors="replace").splitlines())
            except OSError:
                break
        return lines

    def close(self) -> None:
        self._socket.close()


def supervise(
    command: Sequence[str], hang_timeout_s: float = HANG_TIMEOUT_S, abort_grace_s: float = ABORT_GRACE_S
) -> int:
    """Keep `command` running until it ends by itself. Returns its exit code."""
    # An existing NOTIFY_SOCKET, for example podman's, already has a watchdog.
    watchdog = None if "NOTIFY_SOCKET" in os.environ else WatchdogMonitor(hang_timeout_s)
    try:
        return _supervise(command, watchdog, min(POLL_S, hang_timeout_s / 4), abort_grace_s)
    finally:
        if watchdog is not None:
            watchdog.close()


def _supervise(command: Sequence[str], watchdog: WatchdogMonitor | None, poll_s: float, abort_grace_s: float) -> int:
    prctl(PR_SET_CHILD_SUBREAPER, 1)
    prctl(PR_SET_NAME, b"elasticd-super")
    signals = {*FORWARDED_SIGNALS, signal.SIGCHLD}
    # Signals are waited for, not handled: none can be lost between a check and the wait.
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, signals)
    failures = 0
    while True:
        started_at = time.monotonic()
        try:
            child = _start_agent(command, mask, watchdog)
        except OSError as error:  # for example a full process table: our own exit would end every runner
            failure = f"cannot be started ({error.strerror}), retrying"
        else:
            code, end_requested = _watch_agent(child, watchdog, signals, poll_s, abort_grace_s)
            if end_requested or code == 0 or (code in FINAL_EXIT_CODES and not _has_runners()):
                return code if code >= 0 else 128 - code
            failure = f"{_describe_exit(code)} and is started again"
        failures = 1 if time.monotonic() - started_at >= STABLE_AFTER_S else failures + 1
        pause_s = RESTART_BACKOFFS_S[min(failures - 1, len(RESTART_BACKOFFS_S) - 1)]
        _log(f"the agent {failure} in {pause_s:g} s; jobs continue without it")
        if _wait_for_stop_signal(pause_s, signals):
            return 128 + signal.SIGTERM


def _has_runners() -> bool:
    """True while a runner, or its keeper, is our child."""
    names = {procfs.read(f"/proc/{pid}/comm").strip() for pid in children()}
    return not names.isdisjoint((RUNNER_COMM, KEEPER_COMM))


def _watch_agent(
    child: subprocess.Popen[bytes],
    watchdog: WatchdogMonitor | None,
    signals: set[signal.Signals],
    poll_s: float,
    abort_grace_s: float,
) -> tuple[int, EndRequested]:
    """The agent's exit code. Ends an agent that hangs."""
    polled_at = time.monotonic()
    watched_s = 0.0
    kill_at = float("inf")
    end_requested = False
    while (status := reap_children().get(child.pid)) is None:
        received = signal.sigtimedwait(signals, poll_s)
        if received is not None and received.si_signo in FORWARDED_SIGNALS:
            end_requested = end_requested or received.si_signo in (signal.SIGTERM, signal.SIGINT)
            os.kill(child.pid, received.si_signo)  # Popen.send_signal would reap it, and the loop would never end
        now = time.monotonic()
        # Time in a frozen container does not count: its agent could not send anything either.
        watched_s += min(now - polled_at, 2 * poll_s)
        polled_at = now
        if watched_s >= kill_at:
            os.kill(child.pid, signal.SIGKILL)
        elif kill_at == float("inf") and watchdog is not None and watchdog.expired(watched_s):
            _log(
                f"the agent's main loop has not run for {watchdog.timeout_s:g} s; ending it with its stacks in the log"
            )
            os.kill(child.pid, signal.SIGABRT)
            kill_at = watched_s + abort_grace_s
    child.returncode = os.waitstatus_to_exitcode(status)
    return child.returncode, end_requested


def _start_agent(
    command: Sequence[str], mask: set[signal.Signals] | set[int], watchdog: WatchdogMonitor | None
) -> subprocess.Popen[bytes]:
    """Start the agent with the original signal mask: a blocked signal would stay blocked in it. Raises OSError."""
    if watchdog is not None:
        watchdog.reset()
    blocked = signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    try:
        return subprocess.Popen(command, env={**os.environ, **(watchdog.environment if watchdog is not None else {})})
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)


def _wait_for_stop_signal(seconds: float, signals: set[signal.Signals]) -> EndRequested:
    """Wait, and reap meanwhile."""
    until = time.monotonic() + seconds
    while (left := until - time.monotonic()) > 0:
        received = signal.sigtimedwait(signals, left)
        reap_children()
        if received is not None and received.si_signo in (signal.SIGTERM, signal.SIGINT):
            return True
    return False


def _describe_exit(code: int) -> str:
    return f"was killed by {signal_name(-code)}" if code < 0 else f"ended with code {code}"


def _log(sentence: str) -> None:
    with contextlib.suppress(OSError):  # standard error is closed, or the disk is full
        # Not sys.stderr: it would retry an unwritten line at exit, which makes the exit code 120.
        os.write(2, f"{time.strftime('%Y-%m-%d %H:%M:%S%z')} elasticd: {sentence}\n".encode(errors="replace"))
