"""Liveness probes: a port on which every agent sends its name and incarnation, and a probe of many of them at once.

A store cannot tell a process that is gone from one that is stopped, stuck or behind a broken network. A probe can: the
machine of the first one refuses the connection, which may be acted on at once; the others are silent, which counts only
after `seen_timeout`. Names are not resolved. The server sends its answer unasked and reads nothing, so it waits for no
client; a client that stays connected sees the agent's death as the end of the connection.

A silent node has three explanations: its agent is dead, its machine is, or the way to it is broken. The lease tells
them apart only when it ends, seconds later. A probe tells at once where it can:
- A refused connection is proof: the machine's kernel says that no process listens at the port. It counts when it is
  refused twice, `REFUSAL_CONFIRM_S` apart, since a living process that closes and opens its port refuses, too.
- An answer with the expected incarnation proves that the agent lives. One with another incarnation proves that the
  expected one is gone: the port, or the name, belongs to its successor.
- Silence proves nothing. The machine may be gone, stopped or overloaded, or a firewall may drop packets.

The server's thread sends the answer and does nothing else, so a busy agent still answers. It stops answering when the
deciding thread is stuck (`answering`), so that a stuck agent looks stuck; and it ends soon after the main thread, so
that it cannot answer for a dead agent.
"""

from __future__ import annotations

import errno
import ipaddress
import os
import resource
import selectors
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from elasticd.errors import UsageError, WireError
from elasticd_agent.model.codec import Document
from elasticd_agent.model.records import StoreLife
from elasticd_agent.system.waker import Waker

BACKLOG = 1024  # connections that the kernel keeps until they are accepted; measured with a thousand agents
REFUSAL_CONFIRM_S = 0.05  # a closing port of a living process refuses, too: only a second refusal after this counts
ACCEPT_RETRY_S = 0.05  # while the agent is stuck or out of file descriptors; callers stay in the backlog
MAIN_THREAD_CHECK_S = 1.0  # the thread ends so soon after the main thread: it must not answer for a dead agent
MAX_ANSWER_BYTES = 4096  # an answer is a name and a token; a longer one is not an agent's
MAX_ERROR_CHARS = 200  # of another program's text in our log


@dataclass(frozen=True, slots=True)
class ProbeAlive(Document):
    """The answer, one line of JSON: an agent is there. Whether it is the expected one, the caller compares."""

    node: str
    incarnation: str
    store: StoreLife | None = None  #: which it uses, if another agent may host the next one
    lost: bool = False  #: it has lost that store, or hosts it and has too few members there
    leaving: bool = False  #: and will host no other

    def check(self) -> None:
        if not self.node or not self.incarnation:
            raise WireError("ProbeAlive: needs a node and an incarnation")


@dataclass(frozen=True, slots=True)
class ProbeRefused:
    """The agent's machine refused the connection twice: no process listens there."""


@dataclass(frozen=True, slots=True)
class ProbeNoAnswer:
    """No answer, and no proof that the agent is gone."""

    why: str


Address = tuple[str, int]
ProbeAnswer = ProbeAlive | ProbeRefused | ProbeNoAnswer


class ProbeServer:
    """Answers at (`address`, `port`), port 0 for any free one, until closed.

    While `answering` returns False, callers are in the state that a stopped process leaves them in: connected, without
    an answer until it returns True. `answered` is called after each answer. Both are called from the server's thread.
    """

    def __init__(
        self,
        address: str,
        node: str,
        incarnation: str,
        port: int = 0,
        answering: Callable[[], bool] = lambda: True,
        answered: Callable[[], None] = lambda: None,
    ) -> None:
        """Listen at once. `answered` is called after each answer: being probed is a sign that a peer has failed.

        Raises UsageError if the port cannot be bound.
        """
        self._node, self._incarnation = node, incarnation
        self.set_probe_answer(None, False, False)
        self._answering = answering
        self._answered = answered
        self._listener = _make_listener(address, port)
        self.port: int = self._listener.getsockname()[1]
        self._most_kept = resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 4  # the rest is for other uses
        self._closing = threading.Event()
        self._waker = Waker()
        self._thread = threading.Thread(target=self._run, name="elasticd-probe", daemon=False)
        self._thread.start()

    def set_probe_answer(self, store: StoreLife | None, lost: bool, leaving: bool) -> None:
        """Say this in every answer from now on. Safe from any thread."""
        self._answer = ProbeAlive(self._node, self._incarnation, store, lost, leaving).to_json() + b"\n"

    def close(self) -> None:
        """Refuse from now on, within microseconds. May be called again."""
        if self._closing.is_set():
            return
        self._closing.set()
        self._waker.wake()
        self._thread.join()
        self._listener.close()
        self._waker.close()

    def _run(self) -> None:
        connected: set[socket.socket] = set()
        with selectors.DefaultSelector() as selector:
            selector.register(self._listener, selectors.EVENT_READ)
            selector.register(self._waker, selectors.EVENT_READ)
            while not self._closing.is_set() and threading.main_thread().is_alive():
                ready = [key.fileobj for key, _ in selector.select(MAIN_THREAD_CHECK_S)]
                for caller in connected.intersection(ready):
                    selector.unregister(caller)
                    connected.remove(caller)
                    caller.close()
                if self._listener in ready and not self._answer_callers(selector, connected):
                    self._closing.wait(ACCEPT_RETRY_S)
            for caller in connected:
                caller.close()

    def _answer_callers(self, selector: selectors.BaseSelector, kept: set[socket.socket]) -> bool:
        """Answer all callers in the backlog; False if that is not possible now. They may stay connected."""
        while not self._closing.is_set():
            if not self._answering():
                return False
            try:
                caller, _ = self._listener.accept()
            except BlockingIOError:
                return True
            except OSError:
                return False  # most likely out of file descriptors or memory: it would fail again at once
            try:
                caller.setblocking(False)
                caller.send(self._answer)
                self._answered()
            except OSError:
                caller.close()  # the caller has left
                continue
            if len(kept) < self._most_kept:
                kept.add(caller)
                selector.register(caller, selectors.EVENT_READ)
            else:
                caller.close()
        return True


def _make_listener(address: str, port: int) -> socket.socket:
    listener: socket.socket | None = None
    try:
        family, where = _numeric_address(address, port)
        listener = socket.socket(family, socket.SOCK_STREAM)
        # Answered callers of the previous agent are in TIME_WAIT: without this a restart could not bind its port.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(where)
        listener.listen(BACKLOG)
        listener.setblocking(False)
        return listener
    except (OSError, ValueError) as error:
        if listener is not None:
            listener.close()
        raise UsageError(f"cannot listen for other agents on {address} port {port}: {_error_text(error)}") from error


def probe_nodes(nodes: Mapping[str, Address], timeout_s: float) -> dict[str, ProbeAnswer]:
    """Probe every node's (literal address, port), all at once; every node is in the result.

    Takes `timeout_s` plus REFUSAL_CONFIRM_S at most. A connection that is reset without an answer is tried once more at
    once. At most half of this process's file descriptors are used at a time.
    """
    try:
        selector = selectors.DefaultSelector()
    except OSError as error:  # no file descriptor left: no statement about the others
        return {node: ProbeNoAnswer(f"could not be probed: {_error_text(error)}") for node in nodes}
    with selector:
        probing = _ProbeRun(nodes, timeout_s, selector)
        try:
            probing.run()
        finally:
            probing.close()
        return probing.results


@dataclass(slots=True)
class _Attempt:
    node: str
    address: str
    port: int
    due_at: float
    was_refused: bool = False
    was_reset: bool = False
    received: bytearray = field(default_factory=bytearray)
    sock: socket.socket | None = None


class _ProbeRun:
    """One run over many nodes with one selector, in the caller's thread.

    Connections beyond half of the process's descriptors wait their turn. Each attempt is repeated at most once: after a
    refusal to confirm it, after a reset because the agent may have died at that moment.
    """

    def __init__(self, nodes: Mapping[str, Address], timeout_s: float, selector: selectors.BaseSelector) -> None:
        now = time.monotonic()
        self.results: dict[str, ProbeAnswer] = {}
        self._timeout_s = timeout_s
        self._end = now + timeout_s + REFUSAL_CONFIRM_S
        self._selector = selector
        self._calls = [_Attempt(node, address, port, now) for node, (address, port) in nodes.items()]
        self._waiting = deque(self._calls)  # not probed yet, or to probe again, by due time
        self._open: set[str] = set()
        soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        self._room = len(self._calls) if soft == resource.RLIM_INFINITY else max(1, soft // 2)

    def run(self) -> None:
        late = False
        while not late:
            now = time.monotonic()
            # Checked before the select: an answer that has arrived counts even if this process was held up.
            late = now >= self._end
            while self._waiting and self._waiting[0].due_at <= now and len(self._open) < self._room:
                self._dial(self._waiting.popleft())
            until = self._end
            if self._waiting and len(self._open) < self._room:
                until = min(until, self._waiting[0].due_at)
            if not self._waiting and not self._open:
                break
            for key, _ in self._selector.select(max(0.0, until - now)):
                self._read_answer(key.data)
        for call in self._calls:
            if call.node not in self.results:
                self._set_result(call, ProbeNoAnswer(self._silence_text(call)))

    def close(self) -> None:
        for call in self._calls:
            self._close(call)

    def _dial(self, call: _Attempt) -> None:
        """Begin to connect. Anything but a connection under way is a result at once."""
        try:
            family, where = _numeric_address(call.address, call.port)
        except (OSError, ValueError):
            self._set_result(
                call, ProbeNoAnswer(f"{call.address!r} port {call.port} is not an address and a port"[:MAX_ERROR_CHARS])
            )
            return
        if call.port == 0 or ipaddress.ip_address(where[0]).is_unspecified:
            # The kernel would refuse port 0, and take an unspecified address for this machine's own.
            self._set_result(call, ProbeNoAnswer(f"{call.address} port {call.port} is not an agent's address"))
            return
        try:
            call.sock = sock = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE) and self._open:
                self._room = len(self._open)
                self._waiting.appendleft(call)
            else:
                self._set_result(call, ProbeNoAnswer(f"could not be probed: {_error_text(error)}"))
            return
        code = sock.connect_ex(where)
        if is_connected_to_itself(sock, where):
            self._on_refusal(call)
        elif code in (0, errno.EINPROGRESS):
            # A connection error makes it readable, too.
            self._selector.register(sock, selectors.EVENT_READ, call)
            self._open.add(call.node)
        elif code == errno.ECONNREFUSED:
            self._on_refusal(call)
        else:
            self._set_result(call, ProbeNoAnswer(_error_text(OSError(code, os.strerror(code)))))

    def _read_answer(self, call: _Attempt) -> None:
        """Read what has arrived: an answer is one line; the end of the connection before it is a reset."""
        assert call.sock is not None
        try:
            data = call.sock.recv(MAX_ANSWER_BYTES)
        except BlockingIOError:
            return
        except ConnectionRefusedError:
            self._on_refusal(call)
            return
        except ConnectionResetError as error:
            self._on_reset(call, _error_text(error))
            return
        except OSError as error:
            self._set_result(call, ProbeNoAnswer(_error_text(error)))
            return
        call.received += data
        line, ended, _ = bytes(call.received).partition(b"\n")
        if ended:
            self._set_result(call, _decode_answer(line))
        elif not data:
            self._on_reset(call, "closed the connection without an answer")
        elif len(call.received) >= MAX_ANSWER_BYTES:
            self._set_result(call, ProbeNoAnswer("answered something that is not an agent's"))

    def _on_refusal(self, call: _Attempt) -> None:
        """Count a refusal. The second one is the result; the first is tried again after `REFUSAL_CONFIRM_S`."""
        self._close(call)
        if call.was_refused:
            self.results[call.node] = ProbeRefused()
        else:
            call.was_refused, call.due_at = True, time.monotonic() + REFUSAL_CONFIRM_S
            self._waiting.append(call)

    def _on_reset(self, call: _Attempt, text: str) -> None:
        """It may have died just now: the kernel resets the backlog once the port is closed. So probe again."""
        if call.was_reset:
            self._set_result(call, ProbeNoAnswer(text))
            return
        self._close(call)
        call.was_reset, call.due_at = True, time.monotonic()
        call.received.clear()
        self._waiting.appendleft(call)

    def _set_result(self, call: _Attempt, result: ProbeAlive | ProbeNoAnswer) -> None:
        self._close(call)
        self.results[call.node] = result

    def _close(self, call: _Attempt) -> None:
        sock, call.sock = call.sock, None
        if sock is not None:
            if call.node in self._open:
                self._open.discard(call.node)
                self._selector.unregister(sock)
            sock.close()

    def _silence_text(self, call: _Attempt) -> str:
        """Return the sentence for a node that has not answered in time, with how far the attempt came."""
        before = "refused once, then " if call.was_refused else "reset once, then " if call.was_reset else ""
        if call.sock is None:
            return before + ("there was no time to probe again" if before else "not probed: too few file descriptors")
        try:
            call.sock.getpeername()
        except OSError:
            return f"{before}no connection within {self._timeout_s:g} s"
        return f"{before}connected, but no answer within {self._timeout_s:g} s"


def _numeric_address(address: str, port: int) -> tuple[socket.AddressFamily, tuple[str, int]]:
    """The arguments of bind and connect, with an IPv6 scope. Raises OSError or ValueError; never resolves a name."""
    if not address or not 0 <= port <= 65535:
        raise ValueError("not an address and a port")
    flags = socket.AI_NUMERICHOST | socket.AI_NUMERICSERV
    family, _, _, _, where = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM, flags=flags)[0]
    return family, where  # type: ignore[return-value]  # an IPv6 address has two fields more, which the kernel reads


def is_connected_to_itself(sock: socket.socket, where: tuple[str, int]) -> bool:
    """True if TCP connected the socket with itself: our end got the very address that it connects to.

    That takes a free port of this machine in the range of outgoing connections.
    """
    own: tuple[str, int] = sock.getsockname()
    return own[:2] == where[:2]


def _decode_answer(line: bytes) -> ProbeAlive | ProbeNoAnswer:
    try:
        return ProbeAlive.from_json(line)
    except WireError as error:
        return ProbeNoAnswer(f"answered, but not as an agent does: {error}"[:MAX_ERROR_CHARS])


def _error_text(error: OSError | ValueError) -> str:
    text = (error.strerror if isinstance(error, OSError) else None) or str(error)
    return text[:1].lower() + text[1:]
