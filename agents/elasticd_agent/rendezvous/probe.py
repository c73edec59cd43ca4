"""Is that agent there? A port on which every agent says who it is, and the planner's knock at many of them at once.

It exists to tell two things apart that look alike in a store: a process that is gone (its machine refuses the
connection) and one that does not speak (stopped, stuck, or behind a broken network). The first may be acted on at once,
the second only after `seen_timeout`. It decides nothing, resolves no names, and reads nothing that a caller sends: the
answer is sent unasked, so there is no client for whom it would have to wait. Who stays connected hears us die.
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
from elasticd_agent.system.waker import Waker

# A thousand agents at once are the most this is measured with; the kernel keeps their connections until we take them.
BACKLOG = 1024
# A port that closes while its process ends refuses just the same: only a second refusal, this much later, counts.
REFUSAL_CONFIRM_S = 0.05
# While the agent is stuck, or out of file descriptors, callers stay in the backlog and this is how often we look.
ACCEPT_RETRY_S = 0.05
# How soon the thread ends by itself when the main thread ended without close(): it must not answer for a dead agent.
ORPHAN_S = 1.0
# An answer is a name and a token; whoever says more without ending the line is no agent.
ANSWER_BYTES = 4096
MAX_ERROR_CHARS = 200  # of somebody else's text in our log


@dataclass(frozen=True, slots=True)
class ProbeAlive:
    """An agent is there. Whether it is the one that was meant, the caller compares."""

    node: str
    incarnation: str


@dataclass(frozen=True, slots=True)
class ProbeRefused:
    """Twice, AGAIN_S apart, its machine said that nobody listens there."""


@dataclass(frozen=True, slots=True)
class ProbeNoAnswer:
    """No answer, and no proof that nobody is there either."""

    why: str


@dataclass(frozen=True, slots=True)
class ProbeAnswer(Document):
    """What is sent: one line of JSON."""

    node: str
    incarnation: str

    def check(self) -> None:
        if not self.node or not self.incarnation:
            raise WireError("ProbeAnswer: needs a node and an incarnation")


class ProbeServer:
    """Answers at (`address`, `port`), port 0 being any that is free, until closed.

    `answering` is asked before callers are taken, from another thread, and must not wait. While it is False they find
    what a stopped process has to offer: a connection without an answer. They get one if it turns True in time.
    `answered` is called after each, from that thread.
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
        """Raises UsageError when the port cannot be had."""
        self._answer = ProbeAnswer(node=node, incarnation=incarnation).to_json() + b"\n"
        self._answering, self._answered = answering, answered
        self._listener = _listening(address, port)
        self.port: int = self._listener.getsockname()[1]
        self._most_kept = resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 4  # the rest of them is for others
        self._closing = threading.Event()
        self._waker = Waker()
        self._thread = threading.Thread(target=self._run, name="elasticd-knock", daemon=False)
        self._thread.start()

    def close(self) -> None:
        """Refuse from now on. The thread waits for nobody, so this takes some microseconds. May be called again."""
        if self._closing.is_set():
            return
        self._closing.set()
        self._waker.wake()
        self._thread.join()
        self._listener.close()
        self._waker.close()

    def _run(self) -> None:
        kept: set[socket.socket] = set()
        with selectors.DefaultSelector() as selector:
            selector.register(self._listener, selectors.EVENT_READ)
            selector.register(self._waker, selectors.EVENT_READ)
            while not self._closing.is_set() and threading.main_thread().is_alive():
                ready = [key.fileobj for key, _ in selector.select(ORPHAN_S)]
                for caller in kept.intersection(ready):
                    selector.unregister(caller)
                    kept.remove(caller)
                    caller.close()
                if self._listener in ready and not self._serve(selector, kept):
                    self._closing.wait(ACCEPT_RETRY_S)
            for caller in kept:
                caller.close()

    def _serve(self, selector: selectors.BaseSelector, kept: set[socket.socket]) -> bool:
        """Answer whoever waits; False when nobody can be answered at the moment.

        A caller stays connected for as long as it likes, and says nothing: it may want to hear us die.
        """
        while not self._closing.is_set():
            if not self._answering():
                return False
            try:
                caller, _ = self._listener.accept()
            except BlockingIOError:
                return True
            except OSError:
                # Out of file descriptors or of memory, most likely: it would fail again at once.
                return False
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


def _listening(address: str, port: int) -> socket.socket:
    try:
        family, where = _numeric_address(address, port)
        listener = socket.socket(family, socket.SOCK_STREAM)
    except (OSError, ValueError) as error:
        raise UsageError(f"cannot listen for other agents on {address!r} port {port}: {_error_text(error)}") from error
    try:
        # The last agent's answered callers linger in TIME_WAIT: without this a restart could not have its port again.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(where)
        listener.listen(BACKLOG)
        listener.setblocking(False)
    except OSError as error:
        listener.close()
        raise UsageError(f"cannot listen for other agents on {address} port {port}: {_error_text(error)}") from error
    return listener


def probe_nodes(
    nodes: Mapping[str, tuple[str, int]], timeout_s: float
) -> dict[str, ProbeAlive | ProbeRefused | ProbeNoAnswer]:
    """Ask at every node's (literal address, port), all at once; every node is in the result.

    Takes `timeout_s` plus AGAIN_S at the most. Whoever hangs up without an answer is asked once more, at once. More
    nodes than half of this process's file descriptors are asked as others answer.
    """
    try:
        selector = selectors.DefaultSelector()
    except OSError as error:  # no file descriptor left: says nothing about the others
        return {node: ProbeNoAnswer(f"could not be asked: {_error_text(error)}") for node in nodes}
    with selector:
        knocking = _ProbeRun(nodes, timeout_s, selector)
        try:
            knocking.run()
        finally:
            knocking.hang_up()
        return knocking.results


@dataclass(slots=True)
class _Attempt:
    node: str
    address: str
    port: int
    due: float
    refused: bool = False
    hung_up: bool = False
    heard: bytearray = field(default_factory=bytearray)
    sock: socket.socket | None = None


class _ProbeRun:
    def __init__(
        self, nodes: Mapping[str, tuple[str, int]], timeout_s: float, selector: selectors.BaseSelector
    ) -> None:
        now = time.monotonic()
        self.results: dict[str, ProbeAlive | ProbeRefused | ProbeNoAnswer] = {}
        self._timeout_s = timeout_s
        self._end = now + timeout_s + REFUSAL_CONFIRM_S
        self._selector = selector
        self._calls = [_Attempt(node, address, port, now) for node, (address, port) in nodes.items()]
        self._waiting = deque(self._calls)  # those not asked yet, and those to ask again: by the time they are due
        self._open: set[str] = set()
        soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        self._room = len(self._calls) if soft == resource.RLIM_INFINITY else max(1, soft // 2)

    def run(self) -> None:
        late = False
        while not late:
            now = time.monotonic()
            # Looked at before the select, so that whoever has answered is heard even if we were the ones held up.
            late = now >= self._end
            while self._waiting and self._waiting[0].due <= now and len(self._open) < self._room:
                self._dial(self._waiting.popleft())
            until = self._end
            if self._waiting and len(self._open) < self._room:
                until = min(until, self._waiting[0].due)
            if not self._waiting and not self._open:
                break
            for key, _ in self._selector.select(max(0.0, until - now)):
                self._listen(key.data)
        for call in self._calls:
            if call.node not in self.results:
                self._done(call, ProbeNoAnswer(self._silence(call)))

    def hang_up(self) -> None:
        for call in self._calls:
            self._close(call)

    def _dial(self, call: _Attempt) -> None:
        try:
            family, where = _numeric_address(call.address, call.port)
        except (OSError, ValueError):
            self._done(
                call, ProbeNoAnswer(f"{call.address!r} port {call.port} is not an address and a port"[:MAX_ERROR_CHARS])
            )
            return
        if call.port == 0 or ipaddress.ip_address(where[0]).is_unspecified:
            # The kernel would refuse the one, and take the other for this very machine, where the port may be free.
            self._done(call, ProbeNoAnswer(f"{call.address} port {call.port} is nobody's in particular"))
            return
        try:
            call.sock = sock = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE) and self._open:
                self._room = len(self._open)
                self._waiting.appendleft(call)
            else:
                self._done(call, ProbeNoAnswer(f"could not be asked: {_error_text(error)}"))
            return
        code = sock.connect_ex(where)
        if _connected_to_itself(sock, where):
            self._refused(call)
        elif code in (0, errno.EINPROGRESS):
            # An error of the connection makes it readable, too.
            self._selector.register(sock, selectors.EVENT_READ, call)
            self._open.add(call.node)
        elif code == errno.ECONNREFUSED:
            self._refused(call)
        else:
            self._done(call, ProbeNoAnswer(_error_text(OSError(code, os.strerror(code)))))

    def _listen(self, call: _Attempt) -> None:
        assert call.sock is not None
        try:
            data = call.sock.recv(ANSWER_BYTES)
        except BlockingIOError:
            return
        except ConnectionRefusedError:
            self._refused(call)
            return
        except ConnectionResetError as error:
            self._hung_up(call, _error_text(error))
            return
        except OSError as error:
            self._done(call, ProbeNoAnswer(_error_text(error)))
            return
        call.heard += data
        line, ended, _ = bytes(call.heard).partition(b"\n")
        if ended:
            self._done(call, _decode_answer(line))
        elif not data:
            self._hung_up(call, "closed the connection without an answer")
        elif len(call.heard) >= ANSWER_BYTES:
            self._done(call, ProbeNoAnswer("answered something that is not an agent's"))

    def _refused(self, call: _Attempt) -> None:
        self._close(call)
        if call.refused:
            self.results[call.node] = ProbeRefused()
        else:
            call.refused, call.due = True, time.monotonic() + REFUSAL_CONFIRM_S
            self._waiting.append(call)

    def _hung_up(self, call: _Attempt, words: str) -> None:
        """It may have died just now: the kernel ends what its backlog holds, once the port is closed. So ask again."""
        if call.hung_up:
            self._done(call, ProbeNoAnswer(words))
            return
        self._close(call)
        call.hung_up, call.due = True, time.monotonic()
        call.heard.clear()
        self._waiting.appendleft(call)

    def _done(self, call: _Attempt, result: ProbeAlive | ProbeNoAnswer) -> None:
        self._close(call)
        self.results[call.node] = result

    def _close(self, call: _Attempt) -> None:
        sock, call.sock = call.sock, None
        if sock is not None:
            if call.node in self._open:
                self._open.discard(call.node)
                self._selector.unregister(sock)
            sock.close()

    def _silence(self, call: _Attempt) -> str:
        before = "refused once, then " if call.refused else "hung up once, then " if call.hung_up else ""
        if call.sock is None:
            return before + ("there was no time to ask again" if before else "not asked: too few file descriptors")
        try:
            call.sock.getpeername()
        except OSError:
            return f"{before}no connection within {self._timeout_s:g} s"
        return f"{before}connected, but no answer within {self._timeout_s:g} s"


def _numeric_address(address: str, port: int) -> tuple[socket.AddressFamily, tuple[str, int]]:
    """What bind and connect take, scope of an IPv6 address included. Raises OSError or ValueError, never asks DNS."""
    if not address or not 0 <= port <= 65535:
        raise ValueError("not an address and a port")
    flags = socket.AI_NUMERICHOST | socket.AI_NUMERICSERV
    family, _, _, _, where = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM, flags=flags)[0]
    return family, where  # type: ignore[return-value]  # an IPv6 address has two fields more, which only the kernel reads


def _connected_to_itself(sock: socket.socket, where: tuple[str, int]) -> bool:
    """Whether the kernel gave our end the very address we dialled: TCP then connects the socket with itself.

    That takes a port of this machine nobody listens on, in the range that outgoing connections are numbered from.
    """
    mine: tuple[str, int] = sock.getsockname()
    return mine[:2] == where[:2]


def _decode_answer(line: bytes) -> ProbeAlive | ProbeNoAnswer:
    try:
        answer = ProbeAnswer.from_json(line)
    except WireError as error:
        return ProbeNoAnswer(f"answered, but not as an agent does: {error}"[:MAX_ERROR_CHARS])
    return ProbeAlive(answer.node, answer.incarnation)


def _error_text(error: OSError | ValueError) -> str:
    words = (error.strerror if isinstance(error, OSError) else None) or str(error)
    return words[:1].lower() + words[1:]
