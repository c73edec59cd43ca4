"""The launcher's channel in a worker that stays: it leaves `train`, parks, and is released into another round.

A worker of the template keeps the socket over which it was released (ELASTICD_LAUNCH). `session.run(train)` uses it:

    worker    Entered                           `train` is called; from now on this process can be unwound
    worker    Left                              `train` is over: this process cannot be unwound any more
    worker    LostPeer(report)                  `train` has raised what the loss of a peer raises: it waits for Unwind
    launcher  NoFault                           all workers of this node are well: the error is the rank's own
    launcher  Unwind(why)                       the ranks change; sent once a survivor holds the state, or it is saved
    worker    AtEntry(step, holds)              parked: `train` is left, and every process group of the round is gone
    launcher  a release, as the template's      environment, stdout and stderr of the next round; end of file: exit

**Unwinding.** A flag alone would not end a collective, in which a rank waits for a dead one for ever. So the thread
that reads the channel also interrupts, after it has set the flag, the groups of the round (`transport.py`). The
training thread gets torch's error from what it waits in, and RoundChanged from the next session call.

**Order.** The flag comes first: an error that `run` catches while the flag is set is one of the change, and any other
is the script's own. A connection may break before the flag is there, since the kernel tells the peers of a dead process
sooner than its launcher: `run` waits for the flag then.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import queue
import socket
import stat
import sys
import threading
from collections.abc import Callable

from elasticd import channel
from elasticd.channel import Message
from elasticd.errors import RoundChanged
from elasticd.heartbeat import exit_report
from elasticd.rejoin.transport import open_descriptors

VARIABLE = "ELASTICD_LAUNCH"
"""The number of the descriptor; set by the template."""
LOST_PEER_ANSWER_S = 30.0
"""The wait for the launcher's word after a connection to a peer has broken: it saves the survivors' states first."""
_MAX_REPORT_BYTES = 1 << 14
_BROKEN_CONNECTION_PHRASES = (*exit_report.CONNECTION_LOST_PHRASES, "connection refused")


class NoLaunchChannel:
    """Nobody changes the ranks of this process: torchrun, plain python, a worker that was started cold."""

    def __init__(self) -> None:
        self.changed = threading.Event()
        """Set while this process has to leave the round."""
        self.why = ""
        self.on_change: Callable[[], None] = lambda: None
        """Called by another thread once `changed` is set, before groups are interrupted."""
        self.interrupt: Callable[[], None] = lambda: None
        """Ends what the training thread waits in."""

    @property
    def is_connected(self) -> bool:
        return False

    def raise_if_changed(self) -> None:
        """Raises RoundChanged in a process that has to leave the round."""

    def sleep_until_changed(self, seconds: float) -> None:
        """Wait for so long, or until this process has to leave the round; then RoundChanged is raised."""
        self.changed.wait(seconds)
        self.raise_if_changed()

    def enter_train(self) -> None:
        """`train` is about to be called."""

    def leave_train(self) -> bool:
        """`train` is over; False if the ranks change: then its result does not count."""
        return True

    def ask_if_change_caused(self, error: BaseException) -> bool:
        """The error, which has left `train`, is one of a change; waits for the launcher's word on a lost peer."""
        return False

    def report_entry(self, step: int, held_step: int) -> None:
        """Report that this process stands at its entry, and waits for its release.

        `held_step`: the step of the state that it holds, 0 for none.
        """

    def wait_for_release(self) -> Message:
        """The release, once it is there; without one this process ends here."""
        raise NotImplementedError

    def apply_release(self, release: Message) -> None:
        """Take over environment and output of the new round, as the template does for a new worker."""


class LaunchChannel(NoLaunchChannel):
    """The worker's end of the channel."""

    def __init__(self, connection: socket.socket) -> None:
        super().__init__()
        self._socket = connection
        self._pid = os.getpid()
        self._lost = False
        self._is_inside = False
        """`train` is being called."""
        self._lock = threading.Lock()
        self._answered = threading.Event()
        """Set once the launcher has said whether an error is one of a change."""
        self._released: queue.SimpleQueue[Message | None] = queue.SimpleQueue()
        self._names: set[str] = set()
        """The variables that the last release has set."""
        self._thread = threading.Thread(target=self._read_messages, name="elasticd-launch", daemon=True)

    @property
    def is_connected(self) -> bool:
        return not self._lost and os.getpid() == self._pid

    def raise_if_changed(self) -> None:
        if self.changed.is_set() and os.getpid() == self._pid:
            raise RoundChanged(self.why)

    def enter_train(self) -> None:
        self._start_thread()
        self._is_inside = True
        self._send({"type": "Entered"})

    def leave_train(self) -> bool:
        with self._lock:
            self._is_inside = self.changed.is_set()
            if not self._is_inside:
                self._send({"type": "Left"})
            return not self._is_inside

    def ask_if_change_caused(self, error: BaseException) -> bool:
        if self.changed.is_set() or not self._is_inside:
            return self.changed.is_set()
        if not is_of_lost_peer(error) or not self.is_connected:
            return False
        report = exit_report.encode(exit_report.report_of(error), _MAX_REPORT_BYTES)
        self._send({"type": "LostPeer", "report": report.decode()})
        self._answered.wait(LOST_PEER_ANSWER_S)
        return self.changed.is_set()

    def report_entry(self, step: int, held_step: int) -> None:
        self._start_thread()
        self._send({"type": "AtEntry", "step": step, "holds": held_step})

    def wait_for_release(self) -> Message:
        release = self._released.get()
        if release is None:
            os._exit(1)  # a rank that has left `train` has not ended its work
        return release

    def apply_release(self, release: Message) -> None:
        stacks = os.environ.get("ELASTICD_STACKS", "")
        for name in {"ELASTICD_NEWCOMER", *self._names} - release["env"].keys():
            os.environ.pop(name, None)
        self._names = set(release["env"])
        os.environ.update(release["env"])
        for stream, path, fd in ((sys.stdout, release["stdout"], 1), (sys.stderr, release["stderr"], 2)):
            with contextlib.suppress(OSError, ValueError, AttributeError):  # closed, or replaced by the script
                stream.flush()
            if path is not None:
                _open_at(fd, path, inheritable=True)
        if stacks and "ELASTICD_STACKS" in os.environ:  # faulthandler has the descriptor
            for fd, target in open_descriptors():
                if target == stacks:
                    _open_at(fd, os.environ["ELASTICD_STACKS"], inheritable=False)
        self._is_inside = False
        self.why = ""
        self.changed.clear()
        self._answered.clear()

    def _start_thread(self) -> None:
        if self._thread.ident is None:
            self._thread.start()

    def _send(self, message: Message) -> None:
        try:
            channel.send(self._socket, message)
        except OSError:
            self._lost = True

    def _read_messages(self) -> None:
        with contextlib.suppress(OSError, ValueError):
            while (message := channel.receive(self._socket)) is not None:
                if message.get("type") == "Unwind":
                    self._unwind(str(message.get("why", "")))
                elif message.get("type") == "NoFault":
                    if os.environ.get("LOCAL_WORLD_SIZE") == os.environ.get("WORLD_SIZE"):  # no rank is elsewhere
                        self._answered.set()
                elif "env" in message:
                    self._released.put(message)
        self._lost = True
        self._released.put(None)

    def _unwind(self, why: str) -> None:
        with self._lock:
            if not self._is_inside:
                return  # `train` has returned, and the launcher ends this process
            self.why = why or "the ranks of the job change"
            self.changed.set()
            self._answered.set()
        self.on_change()
        self.interrupt()


def from_environment() -> NoLaunchChannel:
    """The channel that the template has left open, if this process is the one that it was left for."""
    text = os.environ.get(VARIABLE, "")
    with contextlib.suppress(OSError, ValueError):
        fd = int(text)
        # A process that the script has started inherits the variable, and another file may have the number there.
        if stat.S_ISSOCK(os.fstat(fd).st_mode) and fcntl.fcntl(fd, fcntl.F_GETFD) & fcntl.FD_CLOEXEC:
            connection = socket.socket(fileno=os.dup(fd))
            if (connection.family, connection.type) == (socket.AF_UNIX, socket.SOCK_SEQPACKET):
                return LaunchChannel(connection)
            connection.close()
    return NoLaunchChannel()


def is_of_lost_peer(error: BaseException) -> bool:
    """The error, or the one that it was raised for, says that the process at the other end is gone."""
    from elasticd.errors import BarrierTimeout, DecisionTimeout

    seen: BaseException | None = error
    while seen is not None:
        text = str(seen).lower()
        if isinstance(seen, DecisionTimeout | BarrierTimeout):
            return True
        if isinstance(seen, RuntimeError) and any(words in text for words in _BROKEN_CONNECTION_PHRASES):
            return True
        seen = seen.__cause__ or seen.__context__
    return False


def _open_at(fd: int, path: str, inheritable: bool) -> None:
    """Put a file that is written at its end in the place of a descriptor."""
    opened = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
    try:
        os.dup2(opened, fd, inheritable=inheritable)
    finally:
        os.close(opened)
