"""The launcher's channel in a worker that stays: it leaves `train`, parks, and is released into another round.

A worker of the template keeps the socket over which it was released (ELASTICD_LAUNCH). `session.run(train)` uses it:

    worker    Entered                           `train` is called; from now on this process can be unwound
    worker    LostPeer(report)                  `train` has raised what the loss of a peer raises: it waits for Unwind
    launcher  Unwind(why)                       the ranks change; sent once the states of the survivors are saved
    worker    AtEntry(step)                     parked: `train` is left, and every process group of the round is gone
    launcher  a release, as the template's      environment, stdout and stderr of the next round; end of file: exit

**Unwinding.** A flag alone would not end a collective, in which a rank waits for a dead one for ever. So the thread
that reads the channel also shuts down, in this order after the flag, the connections of the round: gloo's pairs, found
by the set of descriptors that each of gloo's loops waits for, and those to the round's store. The training thread gets
torch's error from what it waits in, and RoundChanged from the next session call. Only connections with a peer are shut
down: gloo aborts the process if it loses its listening socket. No descriptor is closed here; their owners do that.

**Order.** The flag comes first: an error that `run` catches while the flag is set is one of the change, and any other
is the script's own. A connection may break before the flag is there, since the kernel tells the peers of a dead process
sooner than its launcher: `run` waits for the flag then.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import ipaddress
import os
import queue
import socket
import stat
import sys
import threading
from collections.abc import Iterator
from typing import Any

from elasticd import channel
from elasticd.channel import Message
from elasticd.errors import RoundChanged
from elasticd.heartbeat import exit_report

VARIABLE = "ELASTICD_LAUNCH"
"""The number of the descriptor; set by the template."""
PEER_S = 30.0
"""The wait for the launcher's word after a connection to a peer has broken: it saves the survivors' states first."""
_REPORT_BYTES = 1 << 14
_BROKEN = ("Connection closed by peer", "Connection reset by peer", "Broken pipe", "Connection refused")
"""Words in errors of gloo and of torch's store after the other end is gone."""


class NoLaunchChannel:
    """Nobody changes the ranks of this process: torchrun, plain python, a worker that was started cold."""

    def __init__(self) -> None:
        self.changed = threading.Event()
        """Set while this process has to leave the round."""
        self.why = ""

    @property
    def is_connected(self) -> bool:
        return False

    def check(self) -> None:
        """Raises RoundChanged in a process that has to leave the round."""

    def enter(self) -> None:
        """`train` is about to be called."""

    def leave(self) -> bool:
        """`train` has returned; False if the ranks change: then that does not count."""
        return True

    def explains(self, error: BaseException) -> bool:
        """The error, which has left `train`, is one of a change; waits for the launcher's word on a lost peer."""
        return False

    def report_entry(self, step: int) -> None:
        """Report that this process stands at its entry, and waits for its release."""

    def released(self) -> Message:
        """The release, once it is there; without one this process ends here."""
        raise NotImplementedError

    def follow(self, release: Message) -> None:
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
        self._released: queue.SimpleQueue[Message | None] = queue.SimpleQueue()
        self._names: set[str] = set()
        """The variables that the last release has set."""
        self._thread = threading.Thread(target=self._serve, name="elasticd-launch", daemon=True)

    @property
    def is_connected(self) -> bool:
        return not self._lost and os.getpid() == self._pid

    def check(self) -> None:
        if self.changed.is_set() and os.getpid() == self._pid:
            raise RoundChanged(self.why)

    def enter(self) -> None:
        self._begin()
        self._is_inside = True
        self._send({"type": "Entered"})

    def leave(self) -> bool:
        with self._lock:
            self._is_inside = self.changed.is_set()
            return not self._is_inside

    def explains(self, error: BaseException) -> bool:
        if self.changed.is_set() or not self._is_inside:
            return self.changed.is_set()
        if not is_of_lost_peer(error) or not self.is_connected:
            return False
        report = exit_report.encode(exit_report.report_of(error), _REPORT_BYTES)
        self._send({"type": "LostPeer", "report": report.decode()})
        return self.changed.wait(PEER_S)

    def report_entry(self, step: int) -> None:
        self._begin()
        self._send({"type": "AtEntry", "step": step})

    def released(self) -> Message:
        release = self._released.get()
        if release is None:
            os._exit(0)
        return release

    def follow(self, release: Message) -> None:
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
            for fd, target in _descriptors():
                if target == stacks:
                    _open_at(fd, os.environ["ELASTICD_STACKS"], inheritable=False)
        self._is_inside = False
        self.why = ""
        self.changed.clear()

    def _begin(self) -> None:
        if self._thread.ident is None:
            self._thread.start()

    def _send(self, message: Message) -> None:
        try:
            channel.send(self._socket, message)
        except OSError:
            self._lost = True

    def _serve(self) -> None:
        with contextlib.suppress(OSError, ValueError):
            while (message := channel.receive(self._socket)) is not None:
                if message.get("type") == "Unwind":
                    self._unwind(str(message.get("why", "")))
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
        disconnect()


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
        text = str(seen)
        if isinstance(seen, DecisionTimeout | BarrierTimeout):
            return True
        if isinstance(seen, RuntimeError) and any(words in text for words in _BROKEN):
            return True
        seen = seen.__cause__ or seen.__context__
    return False


# --- the connections of a round ---------------------------------------------------------------------------------------


def disconnect() -> None:
    """Shut down the connections of gloo's process groups, and those to the round's store."""
    libc = ctypes.CDLL(None)
    for fd in list(_pairs()):
        # For reading: gloo closes the pair then, and its next use raises. If a write failed before, gloo would wait for
        # ever for the end of what it was sending (Pair::signalException signals no operation of tx_).
        libc.shutdown(fd, socket.SHUT_RD)
    for fd in list(_to_store(os.environ.get("MASTER_ADDR", ""), os.environ.get("MASTER_PORT", ""))):
        libc.shutdown(fd, socket.SHUT_RDWR)


def _pairs() -> Iterator[int]:
    """gloo's connections: members of a set for epoll(7) that has a listening socket and was made without close-on-exec.

    Each of gloo's loops has such a set. Those of Python, libuv, gRPC and asio are closed on exec.
    """
    for fd, target in _descriptors():
        if target != "anon_inode:[eventpoll]":
            continue
        with contextlib.suppress(OSError, ValueError):
            if fcntl.fcntl(fd, fcntl.F_GETFD) & fcntl.FD_CLOEXEC:
                continue
            with open(f"/proc/self/fdinfo/{fd}", encoding="ascii", errors="replace") as file:
                members = [int(line.split()[1]) for line in file if line.startswith("tfd:")]
            if any(map(_is_listening, members)):
                yield from (member for member in members if _peer(member) is not None)


def _to_store(host: str, port: str) -> Iterator[int]:
    try:
        address = ipaddress.ip_address(host)
    except ValueError:  # a name
        address = None
    for fd, target in _descriptors():
        peer = _peer(fd) if target.startswith("socket:") else None
        if peer is not None and str(peer[1]) == port and address in (None, peer[0]):
            yield fd


def _is_listening(fd: int) -> bool:
    value, size = ctypes.c_int(0), ctypes.c_uint(4)
    error = ctypes.CDLL(None).getsockopt(
        fd, socket.SOL_SOCKET, socket.SO_ACCEPTCONN, ctypes.byref(value), ctypes.byref(size)
    )
    return not error and bool(value.value)


def _peer(fd: int) -> tuple[Any, int] | None:
    """Address and port of the other end of a TCP connection; None for anything else.

    By libc: a socket object of Python would change the descriptor of a script that has set a default timeout.
    """
    raw = ctypes.create_string_buffer(128)
    if ctypes.CDLL(None).getpeername(fd, raw, ctypes.byref(ctypes.c_uint(len(raw)))):
        return None
    family, port = int.from_bytes(raw.raw[:2], sys.byteorder), int.from_bytes(raw.raw[2:4], "big")
    if family == socket.AF_INET:
        return ipaddress.IPv4Address(raw.raw[4:8]), port
    if family == socket.AF_INET6:
        address = ipaddress.IPv6Address(raw.raw[8:24])
        return address.ipv4_mapped or address, port
    return None


def _descriptors() -> list[tuple[int, str]]:
    found: list[tuple[int, str]] = []
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            found.append((int(name), os.readlink(f"/proc/self/fd/{name}")))
    return found


def _open_at(fd: int, path: str, inheritable: bool) -> None:
    """Put a file that is written at its end in the place of a descriptor."""
    opened = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
    try:
        os.dup2(opened, fd, inheritable=inheritable)
    finally:
        os.close(opened)
