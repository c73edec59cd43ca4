"""The owner's part of saving: memory for states, the process that writes them to disk, and the wait at a fault.

The owner holds the memory, so it outlives every worker and every writer. It listens on the writer's socket until a rank
connects, and only then starts the writer (elasticd/checkpointing/memory/writer.py); when the writer has died, the next
connection starts another one, which finds the states in the same memory. A job that saves nothing has no writer.
"""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import socket
import time
from collections.abc import Collection

from elasticd import channel
from elasticd_agent.system.processes.process import IGNORED_SIGNALS, describe_wait_status, signal_child, spawn

SOCKET_NAME = "writer"
"""The socket's name in the runtime directory."""
BUFFER_COUNT = 3
"""Two that ranks fill in turn, and one for a copy of another node's part of a sharded state."""
END_GRACE_S = 6.0
"""The time that the writer has to finish what it writes when the job has ended."""

MIN_SAVE_S = 0.3
SAVE_S_PER_BYTE = 1.2e-9
"""Three times as long as one rank takes to copy into memory that was not used before."""
BUSY_SAVE_FACTOR = 8
"""The factor for a rank that has begun, on a machine with more to do than it can."""
MAX_FIRST_ANSWER_S = 3.0
"""The most that is waited for the first rank to answer. On a machine with more to do than it can a rank may get no
processor for seconds, and without its answer all that was trained since the last save is trained again."""
MAX_LOOK_GAP_S = 0.25
"""The owner looks every 0.05 s at what it waits for, unless the machine is suspended or has no processor for it."""
_SHORT_LIFE_S = 2.0
_MAX_SHORT_LIVES = 3
"""A writer that ends at its start will do so again: then ranks find no writer, and write checkpoints themselves."""


class WriterProcess:
    """Raises OSError if the socket or the memory cannot be made."""

    def __init__(self, argv: list[str], env: dict[str, str], runtime_dir: str) -> None:
        """`env`: the job's, which may hold credentials for an object store."""
        self._argv = argv
        self._env = env
        self.pid = 0
        self._started_at = 0.0
        self._short_lives = 0
        path = os.path.join(runtime_dir, SOCKET_NAME)
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)  # of an owner that was killed
        self.listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.listener.bind(path)
        self.listener.listen(4096)
        self._memory = [os.memfd_create(f"elasticd-{number}", os.MFD_CLOEXEC) for number in range(1 + BUFFER_COUNT)]

    def start(self) -> str:
        """A rank connects. Returns why there can be no writer, "" if there is one."""
        self._started_at, why = time.monotonic(), ""
        fds = [self.listener.fileno(), *self._memory]
        for fd in fds:
            os.set_inheritable(fd, True)
        ignored = [
            number for number in IGNORED_SIGNALS if number != signal.SIGTERM
        ]  # with which `end_process` asks for its end
        try:
            self.pid = spawn([*self._argv, *map(str, fds)], self._env, "/", None, None, ignored)
        except OSError as error:  # no memory, or too many processes
            why = f"their writer could not be started: {error}"
        for fd in fds:
            os.set_inheritable(fd, False)
        if why:
            self.close()
        return why

    def request_save(
        self, round: int, signum: int, running_since: float, stay: Collection[int] = ()
    ) -> SaveAtFault | None:
        """Ask the surviving ranks of a round to save their state before they get this signal; None if none can be.

        With `stay`, only the processes with these pids are asked, to hold it.
        """
        request = {"do": "donate", "round": round, "signum": int(signum), "stay": list(stay)}
        connection = self._request(request) if self.pid else None
        return None if connection is None else SaveAtFault(connection, self, signum, running_since, bool(stay))

    def request_flush(self) -> socket.socket | None:
        """Have everything written that is in memory; the answer says what became of the newest state. None if there is
        nothing. Where the writer has died, this connection starts another one.
        """
        return self._request({"do": "flush"}) if self.held_bytes() else None

    def held_bytes(self) -> int:
        """The memory of the largest state."""
        return max((os.fstat(fd).st_blocks * 512 for fd in self._memory), default=0)

    def _request(self, message: channel.Message) -> socket.socket | None:
        with contextlib.ExitStack() as on_error, contextlib.suppress(OSError):
            connection = on_error.enter_context(channel.connect(self.listener.getsockname(), 0))
            channel.send(connection, message)
            on_error.pop_all()
            return connection
        return None

    def longest_save_s(self, busy: bool, lost_s: float) -> float:
        """The time that ranks have to copy a state before they are killed. `busy`: a rank has begun. `lost_s`: the time
        of what is trained again at most if none saves, 0 when one has answered.
        """
        copy_s = max(MIN_SAVE_S, self.held_bytes() * SAVE_S_PER_BYTE)
        return max(copy_s * (BUSY_SAVE_FACTOR if busy else 1), min(lost_s, MAX_FIRST_ANSWER_S))

    def handle_exit(self, status: int) -> str:
        """It was reaped. Returns why no other one is started, "" if one may be."""
        self.pid = 0
        if os.waitstatus_to_exitcode(status) == errno.ENOMEM:
            self.close()
            return "the kernel has killed a process of this cgroup for lack of memory"
        short = time.monotonic() - self._started_at < _SHORT_LIFE_S
        self._short_lives = self._short_lives + 1 if short else 0
        if self._short_lives < _MAX_SHORT_LIVES:
            return ""
        self.close()
        return f"their writer {describe_wait_status(status)}, {_MAX_SHORT_LIVES} times in a row"

    def close(self) -> None:
        """States are held no longer, and ranks find no writer. The memory is free when no rank reads it any more."""
        self.listener.close()
        for fd in self._memory:
            os.close(fd)
        self._memory = []

    def end_process(self) -> None:
        """Let it finish, and return within END_GRACE_S. It is reaped here or later."""
        if self.pid:
            signal_child(self.pid, signal.SIGTERM)
        deadline = time.monotonic() + END_GRACE_S
        while self.pid and time.monotonic() < deadline:
            if os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG) is not None:
                self.pid = 0
            time.sleep(0.005)


class SaveAtFault:
    """The wait of a group's signal `signum` until its workers have saved the state of their last step.

    The writer reports each worker that begins or is done. SIGKILL, asked for meanwhile, replaces the signal and does
    not shorten the wait.
    """

    def __init__(
        self,
        connection: socket.socket,
        writer: WriterProcess,
        signum: int,
        running_since: float,
        is_of_stayers: bool = False,
    ) -> None:
        self.connection = connection
        self.signum = signum
        self.is_of_stayers = is_of_stayers
        """Workers that stay are asked to hold their state, and no other ones."""
        self.held = 0
        """The newest step of which one of them holds the state."""
        self.saved = 0
        """The newest step of which one of them knows the state to be in memory."""
        self.since = self._looked_at = time.monotonic()
        self.unsaved = 0
        """Workers that have not answered yet, once the writer has reported."""
        self._writer = writer
        self._lost_s = self.since - running_since
        self._patience_s = writer.longest_save_s(False, self._lost_s)

    def receive_report(self) -> bool:
        """Read one report. True if every worker is done, or the writer has ended.

        A worker that has begun gets more time than workers that cannot even begin.
        """
        report = channel.receive(self.connection)
        if report is None or "busy" not in report:
            report = report or {}
            self.held, self.saved = report.get("held", 0), report.get("saved", 0)
            return True
        self.unsaved = report.get("left", 0)
        lost_s = 0.0 if report.get("answered") else self._lost_s
        self._patience_s = self._writer.longest_save_s(report["busy"] > 0, lost_s)
        return False

    def is_late(self, now: float) -> bool:
        """The workers have had their time. A moment in which this process does not run either is left out."""
        self.since += max(now - self._looked_at - MAX_LOOK_GAP_S, 0.0)
        self._looked_at = now
        return now >= self.since + self._patience_s
