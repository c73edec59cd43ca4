"""Polls the runners from its own thread: shows them that the agent is alive, keeps their status, notices their end.

The main loop never waits for a runner: a stopped runner costs only this thread one second.
"""

from __future__ import annotations

import contextlib
import os
import select
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from elasticd_agent.model.job_dir import JobFiles
from elasticd_agent.node.runners.liveness import ProcessIdentity
from elasticd_agent.system import control_socket
from elasticd_agent.system.waker import Waker

TIMEOUT_S = 1.0
STARTING_INTERVAL_S = 0.1
"""For a runner that has not answered yet: it is starting."""

Key = tuple[str, int]


class RunnerPoller:
    """Polls every `interval_s` seconds. `post` is called when a runner has ended, and at its first answer."""

    def __init__(self, post: Callable[[], None], interval_s: float) -> None:
        self.statuses: dict[Key, Mapping[str, Any]] = {}
        self._post = post
        self._interval_s = interval_s
        self._targets: dict[Key, tuple[JobFiles, ProcessIdentity]] = {}
        self._changed = False
        self._closing = False
        self._failure: BaseException | None = None
        self._lock = threading.Lock()
        self._waker = Waker()
        self._fds: dict[int, Key] = {}
        self._thread = threading.Thread(target=self._run, name="elasticd-poller", daemon=True)
        self._thread.start()

    def set_targets(self, runners: Mapping[Key, tuple[JobFiles, ProcessIdentity]]) -> None:
        with self._lock:
            self._targets = dict(runners)
            self._changed = True
        self._waker.wake()

    def raise_failure(self) -> None:
        """Raises the exception that ended the thread: without polls every runner would leave as an orphan."""
        if self._failure is not None:
            raise self._failure

    def close(self) -> None:
        self._closing = True
        self._waker.wake()
        self._thread.join(5.0)

    def _run(self) -> None:
        try:
            self._poll_until_closed()
        except BaseException as error:  # noqa: BLE001 the main loop raises it
            self._failure = error
            self._post()

    def _poll_until_closed(self) -> None:
        poll = select.poll()
        poll.register(self._waker, select.POLLIN)
        due = 0.0
        while not self._closing:
            if self._changed:
                self._apply_targets(poll)
                due = 0.0
            for fd, _ in poll.poll(max(0, int(1000 * (due - time.monotonic())) + 1)):
                if fd == self._waker.fileno():
                    self._waker.drain()
                else:
                    poll.unregister(fd)
                    self._post()
            if time.monotonic() >= due and not self._closing:
                due = time.monotonic() + self._poll_all()
        for fd in self._fds:
            os.close(fd)
        self._waker.close()

    def _apply_targets(self, poll: select.poll) -> None:
        with self._lock:
            self._changed = False
            targets = dict(self._targets)
        for fd, key in list(self._fds.items()):
            if key not in targets:
                with contextlib.suppress(KeyError):  # it has ended, and was unregistered then
                    poll.unregister(fd)
                os.close(fd)
                del self._fds[fd]
        self.statuses = {key: status for key, status in self.statuses.items() if key in targets}
        for key in targets.keys() - self._fds.values():
            process = targets[key][1]
            try:
                fd = os.pidfd_open(process.pid)
            except OSError:
                self._post()
                continue
            if not process.alive:
                os.close(fd)
                self._post()
                continue
            self._fds[fd] = key
            poll.register(fd, select.POLLIN)

    def _poll_all(self) -> float:
        """Poll every runner. Returns the seconds until the next round."""
        starting = False
        for key, (files, _) in list(self._targets.items()):
            if self._closing or self._changed:
                return 0.0
            try:
                status = ask_runner(files, {"do": "poll"}, TIMEOUT_S)
            except control_socket.ControlSocketError:
                starting = starting or key not in self.statuses
                continue
            first = key not in self.statuses
            self.statuses[key] = status
            if first:
                self._post()
        return STARTING_INTERVAL_S if starting else self._interval_s


def ask_runner(files: JobFiles, request: Mapping[str, Any], within_s: float) -> dict[str, Any]:
    """Send a request to the runner of this folder. Only the folder's owner and root may answer.

    Raises ControlSocketError.
    """
    try:
        owner = files.root.stat().st_uid
        socket = files.runtime / control_socket.SOCKET_NAME
        return control_socket.send_request(socket, request, within_s, (0, os.geteuid(), owner))
    except OSError as error:  # it is still starting, or has ended
        raise control_socket.ControlSocketError(f"its runner cannot be reached: {error.strerror}") from error
