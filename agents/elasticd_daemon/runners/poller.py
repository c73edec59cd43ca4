"""Polls the runners, each from a thread: shows them that the agent is alive, keeps their status, notices their end.

The main loop never waits for a runner, and no runner for another one.

A poll is also the sign of life that a runner waits for: without one for `adopt_timeout` it leaves. A runner is polled
by its process's identity, not by its folder, so the answer of a later run never counts for an earlier one.
"""

from __future__ import annotations

import contextlib
import os
import select
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from elasticd_agent.system.network import control_socket
from elasticd_agent.system.waker import Waker
from elasticd_daemon.job_dir import JobFiles
from elasticd_daemon.runners.liveness import ProcessIdentity, lock_owner

POLL_TIMEOUT_S = 1.0
STARTING_INTERVAL_S = 0.1
"""The interval of a runner that has not answered yet: it is starting."""

RunKey = tuple[str, int]
PollTarget = tuple[RunKey, ProcessIdentity]


class RunnersPoller:
    """Polls each runner every `interval_s` seconds, in a thread of its own: a runner that answers slowly, or a file
    system that does not, delays no other. `post` is called when a runner has ended, and at its first answer. Methods
    belong to the main loop's thread.
    """

    def __init__(self, post: Callable[[], None], interval_s: float) -> None:
        self.statuses: dict[RunKey, Mapping[str, Any]] = {}
        self._post = post
        self._interval_s = interval_s
        self._targets: dict[PollTarget, JobFiles] = {}
        self._threads: dict[PollTarget, tuple[threading.Thread, Waker]] = {}
        """The threads, with what ends them; written under the lock."""
        self._failure: BaseException | None = None
        self._lock = threading.Lock()

    def set_targets(self, runners: Mapping[RunKey, tuple[JobFiles, ProcessIdentity]]) -> None:
        self._targets = {(key, process): files for key, (files, process) in runners.items()}
        with self._lock:
            self.statuses = {key: status for key, status in self.statuses.items() if key in runners}
            for target in self._threads.keys() - self._targets.keys():
                _, waker = self._threads.pop(target)
                waker.wake()
        self.check_threads()

    def check_threads(self) -> None:
        """Start the threads that could not be started so far. Raises the exception that ended a thread: without polls
        every runner would leave as an orphan.
        """
        if self._failure is not None:
            raise self._failure
        for target in self._targets.keys() - self._threads.keys():
            with contextlib.suppress(OSError, RuntimeError):  # no descriptor or thread at the moment, or it has ended
                self._start(target)

    def close(self) -> None:
        until = time.monotonic() + 2 * POLL_TIMEOUT_S
        for _, waker in self._threads.values():
            waker.wake()
        for thread, _ in self._threads.values():
            thread.join(max(0.0, until - time.monotonic()))

    def _start(self, target: PollTarget) -> None:
        (job, _), process = target
        with contextlib.ExitStack() as opened:
            waker = Waker()
            opened.callback(waker.close)
            pidfd = os.pidfd_open(process.pid)
            opened.callback(os.close, pidfd)
            arguments = (target, self._targets[target], pidfd, waker)
            thread = threading.Thread(target=self._run, args=arguments, name=f"elasticd-poll-{job}", daemon=True)
            with self._lock:
                thread.start()
                self._threads[target] = thread, waker
            opened.pop_all()

    def _run(self, target: PollTarget, files: JobFiles, pidfd: int, waker: Waker) -> None:
        try:
            self._poll_until_gone(target, files, pidfd, waker)
        except BaseException as error:  # noqa: BLE001 the main loop raises it
            self._failure = error
            self._post()
        finally:
            os.close(pidfd)
            waker.close()

    def _poll_until_gone(self, target: PollTarget, files: JobFiles, pidfd: int, waker: Waker) -> None:
        key, process = target
        ends = select.poll()
        for end in (pidfd, waker.fileno()):
            ends.register(end, select.POLLIN)
        answered = False
        while process.alive:
            with contextlib.suppress(control_socket.ControlSocketError):
                status = ask_runner(files, {"do": "poll"}, POLL_TIMEOUT_S, process)
                with self._lock:
                    if target not in self._threads:
                        return
                    self.statuses[key] = status
                if not answered:
                    answered = True
                    self._post()
            interval_s = self._interval_s if answered else STARTING_INTERVAL_S
            if any(fd == waker.fileno() for fd, _ in ends.poll(1000 * interval_s)):
                return
        self._post()


def ask_runner(
    files: JobFiles, request: Mapping[str, Any], within_s: float, runner: ProcessIdentity | None = None
) -> dict[str, Any]:
    """Send a request to the runner of this folder. Raises ControlSocketError.

    `run` there is the job's user's, and could be a link to any socket: only the runner may answer, by default the owner
    of the lock.
    """
    try:
        owner = files.root.stat().st_uid
        runner = runner or lock_owner(files.lock)
        socket = files.runtime / control_socket.SOCKET_NAME
        return control_socket.send_request(socket, request, within_s, (owner,), None if runner is None else runner.pid)
    except OSError as error:  # it is still starting, or has ended
        raise control_socket.ControlSocketError(f"its runner cannot be reached: {error.strerror}") from error
