"""The agent's end of the owner: starts it, exchanges messages with it, and ends its processes if it was killed."""

from __future__ import annotations

import errno
import logging
import os
import select
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from elasticd import channel
from elasticd.errors import UsageError
from elasticd_agent.system.installation import import_path, program
from elasticd_agent.system.processes import procfs
from elasticd_agent.system.processes.helper_process import end_process
from elasticd_agent.system.processes.process import PR_SET_CHILD_SUBREAPER, end_children, prctl
from elasticd_agent.workers.launcher import messages

LOOK_S, STOPPED_LOOKS = 1.0, 5
"""The interval in which the owner's state is read, and how often in a row it may be stopped. Looks are counted, not
time: the whole machine may have been suspended."""
END_DEADLINE_S = 12.0
"""The owner waits 10 s for killed processes to die, then ends in any case."""

_log = logging.getLogger("elasticd.launcher")


@dataclass(frozen=True, slots=True)
class OwnerReport:
    """A report of the owner, in the agent's inbox."""

    report: messages.Report


@dataclass(frozen=True, slots=True)
class OwnerLost:
    """The owner has died, and by PDEATHSIG the workers with it."""


class OwnerClient:
    """One owner process. `post` is called from a thread of this object."""

    def __init__(
        self, runtime_dir: Path, post: Callable[[OwnerReport | OwnerLost], None], keep: Sequence[int] = ()
    ) -> None:
        """`keep`: file descriptors that the owner keeps open, too, for as long as it has a process to end."""
        # If the owner is killed, its descendants become our children, and are ended by us.
        prctl(PR_SET_CHILD_SUBREAPER, 1)
        self._socket, theirs = channel.pair()
        with theirs:
            paths = os.pathsep.join(import_path())
            owner = [sys.executable, "-I", "-S", program("owner"), str(theirs.fileno()), str(runtime_dir), paths]
            self._process = subprocess.Popen(
                [*owner, *map(str, keep)], pass_fds=[theirs.fileno(), *keep], start_new_session=True
            )
        self.pid = self._process.pid
        self._post = post
        self._closing = False
        self._unkillable: set[int] = set()  # written by the reader thread
        self._reader = threading.Thread(target=self._read_reports, name="owner-reader", daemon=True)
        self._reader.start()

    def send(self, request: messages.Request) -> None:
        """Send one request. An owner that has died shows as OwnerLost, not here.

        Raises UsageError for a request that is too large.
        """
        try:
            channel.send(self._socket, messages.to_message(request))
        except OSError as error:
            if error.errno == errno.EMSGSIZE:  # where net.core.wmem_max is small, a smaller one is too large
                raise UsageError(
                    "the environment and the arguments take more bytes than a message to the launcher can carry "
                    f"({error.strerror}); make them smaller"
                ) from None

    def _kill_if_stopped(self) -> None:
        """Until the owner has something to say: an owner that is stopped neither reaps nor kills, and is replaced."""
        stopped = 0
        while not self._closing and not self._wait_readable():
            stopped = stopped + 1 if procfs.state(self._process.pid) == "T" else 0
            if stopped == STOPPED_LOOKS:
                _log.warning(
                    "the process that owns the workers has been stopped for %g s: replacing it", stopped * LOOK_S
                )
                self._process.kill()

    def _wait_readable(self) -> bool:
        poller = select.poll()  # select() takes no descriptor above 1,023
        poller.register(self._socket, select.POLLIN)
        return bool(poller.poll(LOOK_S * 1000))

    def _read_reports(self) -> None:
        while True:
            self._kill_if_stopped()
            message = channel.receive(self._socket)
            if message is None:
                break
            report = messages.decode_report(message)
            if isinstance(report, messages.Ended):
                self._unkillable.update(process["pid"] for process in report.unkillable)
            elif isinstance(report, messages.Reaped):
                self._unkillable.discard(report.pid)
            if report is not None:
                self._post(OwnerReport(report))
        if not self._closing:
            self._post(OwnerLost())

    def close(self) -> None:
        """End the owner with all of its processes, or return at a deadline.

        If it was killed, its processes are ours and end here, except those known to survive SIGKILL.
        """
        self._closing = True
        try:
            self._socket.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass
        end_process(self._process, END_DEADLINE_S, END_DEADLINE_S)
        self._reader.join(END_DEADLINE_S)
        self._socket.close()
        end_children(END_DEADLINE_S, except_pids=self._unkillable)
