"""Looks after runners from a thread of its own: says that the daemon is here, hears how they are, sees them die.

It exists so that the deciding thread never waits for a runner: one that is stopped costs this thread a second, and
nobody else anything. What it hears is kept for the deciding thread to read; it decides nothing.
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
from elasticd_agent.system import control_socket as control
from elasticd_agent.system.waker import Waker

TIMEOUT_S = 1.0
STARTING_INTERVAL_S = 0.1
"""How often one is tried that has never answered: it is starting."""

Key = tuple[str, int]


class RunnerPoller:
    """Visits every `visit_s` seconds. `post` is called when a runner has died, or answers for the first time."""

    def __init__(self, post: Callable[[], None], interval_s: float) -> None:
        self._post, self._interval_s = post, interval_s
        self.statuses: dict[Key, Mapping[str, Any]] = {}
        self._targets: dict[Key, tuple[JobFiles, ProcessIdentity]] = {}
        self._changed = False
        self._closing = False
        self._failure: BaseException | None = None
        self._lock = threading.Lock()
        self._waker = Waker()
        self._fds: dict[int, Key] = {}
        self._thread = threading.Thread(target=self._run, name="elasticd-visitor", daemon=True)
        self._thread.start()

    def set_targets(self, runners: Mapping[Key, tuple[JobFiles, ProcessIdentity]]) -> None:
        """Look after these from now on, and after nobody else."""
        with self._lock:
            self._targets = dict(runners)
            self._changed = True
        self._waker.wake()

    def raise_failure(self) -> None:
        """Raises what has ended the thread: without it every runner would take itself for an orphan."""
        if self._failure is not None:
            raise self._failure

    def close(self) -> None:
        self._closing = True
        self._waker.wake()
        self._thread.join(5.0)

    def _run(self) -> None:
        try:
            self._poll_until_closed()
        except BaseException as error:  # noqa: BLE001 nobody else would hear of it
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
            wanted = dict(self._targets)
        for fd, key in list(self._fds.items()):
            if key not in wanted:
                with contextlib.suppress(KeyError):  # it has died, and nobody waits for that any more
                    poll.unregister(fd)
                os.close(fd)
                del self._fds[fd]
        self.statuses = {key: said for key, said in self.statuses.items() if key in wanted}
        for key in wanted.keys() - self._fds.values():
            process = wanted[key][1]
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
        """Say to everybody that the daemon is here. Returns when to do so again."""
        eager = False
        for key, (files, _) in list(self._targets.items()):
            if self._closing or self._changed:
                return 0.0
            try:
                said = ask_runner(files, {"do": "here"}, TIMEOUT_S)
            except control.ControlSocketError:
                eager = eager or key not in self.statuses
                continue
            first = key not in self.statuses
            self.statuses[key] = said
            if first:
                self._post()
        return STARTING_INTERVAL_S if eager else self._interval_s


def ask_runner(files: JobFiles, request: Mapping[str, Any], within_s: float) -> dict[str, Any]:
    """Ask the runner of this folder. Only who owns the folder, or root, may answer. Raises control.Unanswered."""
    try:
        owner = files.root.stat().st_uid
        return control.send_request(files.runtime / control.SOCKET_NAME, request, within_s, (0, os.geteuid(), owner))
    except OSError as error:  # it has not come so far, or is gone
        raise control.ControlSocketError(f"its runner cannot be asked: {error.strerror}") from error
