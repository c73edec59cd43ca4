"""Polls the runners, each from a thread: shows them that the agent is alive, keeps their status, notices their end.

The main loop never waits for a runner, and no runner for another one.
"""

from __future__ import annotations

import contextlib
import functools
import os
import select
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from elasticd_agent.system.network import control_socket
from elasticd_agent.system.waker import Waker
from elasticd_daemon.job_dir import JobFiles
from elasticd_daemon.runners.liveness import ProcessIdentity, lock_owner

TIMEOUT_S = 1.0
STARTING_INTERVAL_S = 0.1
"""For a runner that has not answered yet: it is starting."""
RETRY_MS = 1000

Key = tuple[str, int]
Target = tuple[Key, ProcessIdentity]


@dataclass(frozen=True, slots=True)
class _Watched:
    fd: int
    gone: threading.Event
    thread: threading.Thread


class RunnerPoller:
    """Polls each runner every `interval_s` seconds, in a thread of its own: a runner that answers slowly, or a file
    system that does not, delays no other. `post` is called when a runner has ended, and at its first answer."""

    def __init__(self, post: Callable[[], None], interval_s: float) -> None:
        self.statuses: dict[Key, Mapping[str, Any]] = {}
        self._post = post
        self._interval_s = interval_s
        self._targets: dict[Target, JobFiles] = {}
        self._changed = False
        self._closing = False
        self._failure: BaseException | None = None
        self._lock = threading.Lock()
        self._waker = Waker()
        self._watched: dict[Target, _Watched] = {}
        self._thread = threading.Thread(target=self._run, name="elasticd-poller", daemon=True)
        self._thread.start()

    def set_targets(self, runners: Mapping[Key, tuple[JobFiles, ProcessIdentity]]) -> None:
        with self._lock:
            self._targets = {(key, process): files for key, (files, process) in runners.items()}
            self._changed = True
        self._waker.wake()

    def raise_failure(self) -> None:
        """Raises the exception that ended a thread: without polls every runner would leave as an orphan."""
        if self._failure is not None:
            raise self._failure

    def close(self) -> None:
        self._closing = True
        self._waker.wake()
        self._thread.join(5.0)

    def _guard(self, work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException as error:  # noqa: BLE001 the main loop raises it
            self._failure = error
            self._post()

    def _run(self) -> None:
        self._guard(self._watch_until_closed)

    def _watch_until_closed(self) -> None:
        poll = select.poll()
        poll.register(self._waker, select.POLLIN)
        while not self._closing:
            if self._changed:
                self._apply_targets(poll)
            for fd, _ in poll.poll(RETRY_MS if self._changed else None):
                if fd == self._waker.fileno():
                    self._waker.drain()
                else:
                    poll.unregister(fd)
                    self._post()
        until = time.monotonic() + TIMEOUT_S
        for watched in self._watched.values():
            watched.gone.set()
        for watched in self._watched.values():
            watched.thread.join(max(0.0, until - time.monotonic()))
            os.close(watched.fd)
        self._waker.close()

    def _apply_targets(self, poll: select.poll) -> None:
        with self._lock:
            self._changed = False
            targets = dict(self._targets)
            keys = {key for key, _ in targets}
            self.statuses = {key: status for key, status in self.statuses.items() if key in keys}
            gone = [self._watched.pop(target) for target in self._watched.keys() - targets.keys()]
            for watched in gone:
                watched.gone.set()
        for watched in gone:
            with contextlib.suppress(KeyError):  # it has ended, and was unregistered then
                poll.unregister(watched.fd)
            os.close(watched.fd)
        for target in targets.keys() - self._watched.keys():
            _, process = target
            try:
                fd = os.pidfd_open(process.pid)
            except OSError:
                self._post()
                continue
            if not process.alive:
                os.close(fd)
                self._post()
                continue
            event = threading.Event()
            work = functools.partial(self._poll_until_gone, target, targets[target], event)
            name = f"elasticd-poll-{target[0][0]}"
            thread = threading.Thread(target=self._guard, args=(work,), name=name, daemon=True)
            try:
                thread.start()
            except RuntimeError:  # no thread can be created at the moment
                os.close(fd)
                self._changed = True
                continue
            self._watched[target] = _Watched(fd, event, thread)
            poll.register(fd, select.POLLIN)

    def _poll_until_gone(self, target: Target, files: JobFiles, gone: threading.Event) -> None:
        key, process = target
        first = True
        while not gone.is_set():
            with contextlib.suppress(control_socket.ControlSocketError):
                status = ask_runner(files, {"do": "poll"}, TIMEOUT_S, process)
                with self._lock:
                    if gone.is_set():
                        return
                    self.statuses[key] = status
                if first:
                    first = False
                    self._post()
            gone.wait(STARTING_INTERVAL_S if first else self._interval_s)


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
