"""The agent's control socket: requests of `elasticd dump`, and of the daemon that started the runner.

One thread serves a few callers at a time, each with a deadline. A request becomes a message in the loop's inbox, whose
answer arrives whenever the deciding thread gives it; verbs are answered at once. Only this user and root may call: the
socket is in a private directory, and the kernel identifies the caller.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import selectors
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from elasticd import bounded_json
from elasticd.channel import Message
from elasticd_agent.system.network.sockets import peer_credentials
from elasticd_agent.system.waker import Waker

SOCKET_NAME = "control"
"""The socket's name in the agent's runtime directory."""
MAX_CALLERS = 8
REQUEST_BYTES = 16 << 10
ANSWER_BYTES = 1 << 20
ANSWER_S = 30.0
"""Evidence takes 3 s by default; an agent that has not answered by then is stuck."""
_ORPHAN_S = 1.0

Reply = Callable[[Path | str], None]
Verb = Callable[[Mapping[str, Any]], Mapping[str, Any]]
"""Answers a request at once, on the server's thread, from known state."""


class ControlSocketError(Exception):
    """No agent answered, or not in time, or not with JSON. The text says which."""


@dataclass(frozen=True, slots=True)
class DumpRequested:
    """A request for evidence of the running group, in `out` if given. `reply` takes its directory, or a sentence that
    says why there is none; from any thread, once."""

    out: Path | None
    reply: Reply = field(compare=False)


@dataclass(slots=True, eq=False)
class _Caller:
    sock: socket.socket
    until: float
    received: bytearray = field(default_factory=bytearray)
    requested: bool = False


class ControlServer:
    """Listens at `path` until closed. `post` is called on the server's thread; `about` answers that request."""

    def __init__(
        self,
        path: Path,
        post: Callable[[DumpRequested], None],
        about: Mapping[str, Any] | None = None,
        users: Sequence[int] | None = None,
        verbs: Mapping[str, Verb] | None = None,
    ) -> None:
        """`users` may call, by default root and this user; `verbs` are added to about and dump. Raises OSError."""
        self._path = path
        self._post = post
        about = dict(about or {})
        self._verbs: dict[str, Verb] = {"about": lambda _: {**about, "pid": os.getpid()}, **(verbs or {})}
        self._users = (0, os.geteuid()) if users is None else tuple(users)
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        try:
            with short_path(path) as name:
                self._listener.bind(name)
            os.chmod(path, 0o600)
            self._listener.listen(MAX_CALLERS)
        except OSError:
            self._listener.close()
            raise
        self._callers: set[_Caller] = set()
        self._replies: queue.SimpleQueue[tuple[_Caller, Message]] = queue.SimpleQueue()
        self._closing = False
        self._waker = Waker()
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._waker, selectors.EVENT_READ, self._waker.drain)
        self._selector.register(self._listener, selectors.EVENT_READ, self._accept)
        self._thread = threading.Thread(target=self._run, name="elasticd-control", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Callers stay without an answer. May be called again."""
        if self._closing:
            return
        self._closing = True
        self._waker.wake()
        self._thread.join(1.0)
        with contextlib.suppress(OSError):
            self._path.unlink()

    def _run(self) -> None:
        while not self._closing and threading.main_thread().is_alive():
            until = min((caller.until for caller in self._callers), default=time.monotonic() + _ORPHAN_S)
            for key, _ in self._selector.select(max(0.0, min(until - time.monotonic(), _ORPHAN_S))):
                key.data()
            while not self._replies.empty():
                self._end(*self._replies.get())
            for caller in [caller for caller in self._callers if caller.until <= time.monotonic()]:
                self._end(caller, {"error": f"the agent did not answer within {ANSWER_S:.0f} s"})
        for caller in list(self._callers):
            self._drop(caller)
        self._selector.close()
        self._listener.close()
        self._waker.close()

    def _accept(self) -> None:
        try:
            sock, _ = self._listener.accept()
        except OSError:  # closed again, or no file descriptor left: the backlog keeps it
            time.sleep(0.01)
            return
        sock.setblocking(False)
        if len(self._callers) >= MAX_CALLERS or peer_credentials(sock)[1] not in self._users:
            sock.close()
            return
        caller = _Caller(sock, time.monotonic() + ANSWER_S)
        self._callers.add(caller)
        self._selector.register(sock, selectors.EVENT_READ, lambda: self._receive(caller))

    def _receive(self, caller: _Caller) -> None:
        if caller not in self._callers:
            return
        try:
            data = caller.sock.recv(REQUEST_BYTES)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        caller.received += data
        if not data or len(caller.received) > REQUEST_BYTES or caller.requested:
            self._drop(caller)  # closed, or sending without an end: its answer is dropped
        elif b"\n" in caller.received:
            caller.requested = True
            answer = self._answer(caller)
            if answer is not None:
                self._end(caller, answer)

    def _answer(self, caller: _Caller) -> Mapping[str, Any] | None:
        """None if it comes later."""
        try:
            request = json.loads(bytes(caller.received))
        except (ValueError, RecursionError):
            request = None
        if not isinstance(request, dict):
            return {"error": "a request is one JSON object a line"}
        name, out = request.get("do"), request.get("out")
        if name == "dump":
            if out is not None and not (isinstance(out, str) and os.path.isabs(out)):
                return {"error": "out must be an absolute path"}
            self._post(DumpRequested(None if out is None else Path(out), lambda reply: self._reply(caller, reply)))
            return None
        if not isinstance(name, str) or name not in self._verbs:
            known = ", ".join(["about", "dump", *(verb for verb in self._verbs if verb != "about")])
            return {"error": f"unknown request {name!r:.100}; there are {known}"}
        try:
            return self._verbs[name](request)
        except Exception as error:  # noqa: BLE001 a failing verb concerns only its caller
            return {"error": f"{name}: {type(error).__name__}: {error}"}

    def _reply(self, caller: _Caller, reply: Path | str) -> None:
        self._replies.put((caller, {"path": str(reply)} if isinstance(reply, Path) else {"error": reply}))
        self._waker.wake()

    def _end(self, caller: _Caller, answer: Mapping[str, Any]) -> None:
        if caller not in self._callers:
            return
        # An answer is far smaller than a socket's buffer: a full one belongs to a caller that does not read.
        with contextlib.suppress(OSError):
            caller.sock.send(json.dumps(answer).encode("utf-8", "backslashreplace") + b"\n")
        self._drop(caller)

    def _drop(self, caller: _Caller) -> None:
        self._selector.unregister(caller.sock)
        self._callers.remove(caller)
        caller.sock.close()


class NullControlServer:
    """The server of an agent that could not create its socket."""

    def close(self) -> None:
        pass


def open_control(
    path: Path,
    post: Callable[[DumpRequested], None],
    about: Mapping[str, Any],
    log: Callable[[str], None],
    verbs: Mapping[str, Verb] | None = None,
) -> ControlServer | NullControlServer:
    """A server at `path`; the job also runs without one."""
    try:
        return ControlServer(path, post, about, verbs=verbs)
    except OSError as error:
        log(f"elasticd dump will not reach this agent: {path}: {error.strerror or error}")
        return NullControlServer()


def send_request(
    path: Path,
    request: Mapping[str, Any],
    within_s: float = ANSWER_S + 5,
    users: Sequence[int] | None = None,
    process: int | None = None,
) -> Message:
    """The answer of the agent at this socket, which must be one of `users`, by default root or us, and the process with
    this pid, if given. Raises ControlSocketError."""
    until = time.monotonic() + within_s
    received = bytearray()
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
        sock.settimeout(within_s)
        try:
            with short_path(path) as name:
                sock.connect(name)
            pid, user, _ = peer_credentials(sock)
            if user not in ((0, os.geteuid()) if users is None else users):
                raise ControlSocketError(f"{path} belongs to another user")
            if process not in (None, pid):
                raise ControlSocketError(f"{path} belongs to another process")
            sock.sendall(json.dumps(request).encode() + b"\n")
            while b"\n" not in received and len(received) <= ANSWER_BYTES:
                if (left_s := until - time.monotonic()) <= 0:
                    raise TimeoutError
                sock.settimeout(left_s)
                data = sock.recv(1 << 16)
                if not data:
                    break
                received += data
        except TimeoutError:
            raise ControlSocketError(f"no answer within {within_s:.0f} s") from None
        except OSError as error:
            raise ControlSocketError(error.strerror or str(error)) from error
    try:
        answer = bounded_json.loads(received)
    except (ValueError, RecursionError):
        raise ControlSocketError(
            "the connection ended without an answer" if not received else "an answer that is not a JSON object"
        ) from None
    if not isinstance(answer, dict):
        raise ControlSocketError("an answer that is not a JSON object")
    return answer


@contextlib.contextmanager
def short_path(path: Path) -> Iterator[str]:
    """A name for `path` that fits into the 108 bytes of a unix socket's address."""
    fd = os.open(path.parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{fd}/{path.name}"
    finally:
        os.close(fd)
