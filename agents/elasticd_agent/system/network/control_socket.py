"""The agent's control socket: requests of `elasticd dump`, and of the daemon that started the runner.

Each of a few callers has a thread. A request for evidence becomes a message in the loop's inbox, whose answer arrives
whenever the deciding thread gives it; verbs are answered at once, one at a time. Only this user and root may call: the
socket is in a private directory, and the kernel identifies the caller.

Requests are small and their number is bounded, so a caller that sends without end, or never reads, holds one of
`MAX_CALLERS` places for ANSWER_TIMEOUT_S and no more. The answer to a request that nobody waits for any more is
dropped. The deciding thread is never called from here: it finds a message in its inbox, and replies from its own turn
through a queue, so a stuck agent shows as an answer that does not come.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from elasticd import bounded_json
from elasticd.channel import Message
from elasticd_agent.system.network.sockets import peer_credentials, shut_down

SOCKET_NAME = "control"
"""The socket's name in the agent's runtime directory."""
MAX_CALLERS = 8
MAX_REQUEST_BYTES = 16 << 10
MAX_ANSWER_BYTES = 1 << 20
ANSWER_TIMEOUT_S = 30.0
"""Evidence takes 3 s by default; an agent that has not answered by then is stuck."""

ReplyCallback = Callable[[Path | str], None]
_ReplyQueue = queue.SimpleQueue[Path | str | None]
VerbHandler = Callable[[Mapping[str, Any]], Mapping[str, Any]]
"""Answers a request at once, on a caller's thread, from known state."""


class ControlSocketError(Exception):
    """No agent answered, or not in time, or not with JSON. The text says which."""


@dataclass(frozen=True, slots=True)
class DumpRequested:
    """A request for evidence of the running group, in `out` if given. `reply` takes its directory, or a sentence that
    says why there is none; from any thread, once."""

    out: Path | None
    reply: ReplyCallback = field(compare=False)


class ControlServer:
    """Listens at `path` until closed. `post` is called on a caller's thread; `about` answers that request."""

    def __init__(
        self,
        path: Path,
        post: Callable[[DumpRequested], None],
        about: Mapping[str, Any] | None = None,
        users: Sequence[int] | None = None,
        verbs: Mapping[str, VerbHandler] | None = None,
    ) -> None:
        """`users` may call, by default root and this user; `verbs` are added to about and dump. Raises OSError."""
        self._path = path
        self._post = post
        about = dict(about or {})
        self._verbs: dict[str, VerbHandler] = {"about": lambda _: {**about, "pid": os.getpid()}, **(verbs or {})}
        self._users = (0, os.geteuid()) if users is None else tuple(users)
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            with short_path(path) as name:
                self._listener.bind(name)
            os.chmod(path, 0o600)
            self._listener.listen(MAX_CALLERS)
        except OSError:
            self._listener.close()
            raise
        self._callers: dict[socket.socket, _ReplyQueue] = {}
        self._lock = threading.Lock()  # guards the callers
        self._answering = threading.Lock()  # verbs are not made for several threads
        self._closing = False
        self._thread = threading.Thread(target=self._accept, name="elasticd-control", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Callers stay without an answer. May be called again."""
        if self._closing:
            return
        self._closing = True
        self._listener.shutdown(socket.SHUT_RDWR)  # wakes accept, which close would not
        self._thread.join(1.0)
        self._listener.close()
        with self._lock:
            for sock, replies in self._callers.items():
                replies.put(None)
                shut_down(sock)
        with contextlib.suppress(OSError):
            self._path.unlink()

    def _accept(self) -> None:
        while not self._closing:
            try:
                sock, _ = self._listener.accept()
            except OSError:  # closed, or no file descriptor left: the backlog keeps the caller
                time.sleep(0.01)
                continue
            with self._lock:
                if len(self._callers) >= MAX_CALLERS or peer_credentials(sock)[1] not in self._users:
                    sock.close()
                    continue
                self._callers[sock] = queue.SimpleQueue()
            thread = threading.Thread(target=self._serve, args=(sock,), name="elasticd-control", daemon=True)
            try:
                thread.start()
            except RuntimeError:  # the job has used up its processes; the caller asks again
                with self._lock:
                    del self._callers[sock]
                    sock.close()

    def _serve(self, sock: socket.socket) -> None:
        """Read one request, answer it, and close. Bounded by ANSWER_TIMEOUT_S on both sides."""
        sock.settimeout(ANSWER_TIMEOUT_S)
        try:
            with contextlib.suppress(OSError), sock.makefile("rb") as lines:
                line = lines.readline(MAX_REQUEST_BYTES)
                if line.endswith(b"\n") and (answer := self._answer(line, self._callers[sock])) is not None:
                    sock.sendall(json.dumps(answer).encode("utf-8", "backslashreplace") + b"\n")
        finally:
            with self._lock:
                del self._callers[sock]
                sock.close()

    def _answer(self, line: bytes, replies: _ReplyQueue) -> Mapping[str, Any] | None:
        """None: the server was closed first."""
        try:
            request = json.loads(line)
        except (ValueError, RecursionError):
            request = None
        if not isinstance(request, dict):
            return {"error": "a request is one JSON object a line"}
        name, out = request.get("do"), request.get("out")
        if name == "dump":
            if out is not None and not (isinstance(out, str) and os.path.isabs(out)):
                return {"error": "out must be an absolute path"}
            self._post(DumpRequested(None if out is None else Path(out), replies.put))
            try:
                reply = replies.get(timeout=ANSWER_TIMEOUT_S)
            except queue.Empty:
                return {"error": f"the agent did not answer within {ANSWER_TIMEOUT_S:.0f} s"}
            return {"path": str(reply)} if isinstance(reply, Path) else None if reply is None else {"error": reply}
        if not isinstance(name, str) or name not in self._verbs:
            known = ", ".join(["about", "dump", *(verb for verb in self._verbs if verb != "about")])
            return {"error": f"unknown request {name!r:.100}; there are {known}"}
        try:
            with self._answering:
                return self._verbs[name](request)
        except Exception as error:  # noqa: BLE001 a failing verb concerns only its caller
            return {"error": f"{name}: {type(error).__name__}: {error}"}


def send_request(
    path: Path,
    request: Mapping[str, Any],
    within_s: float = ANSWER_TIMEOUT_S + 5,
    server_users: Sequence[int] | None = None,
    server_pid: int | None = None,
) -> Message:
    """The answer of the agent at this socket, which must be one of `server_users`, by default root or us, and the
    process `server_pid`, if given. Raises ControlSocketError."""
    until = time.monotonic() + within_s
    received = bytearray()
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
        sock.settimeout(within_s)
        try:
            with short_path(path) as name:
                sock.connect(name)
            pid, user, _ = peer_credentials(sock)
            if user not in ((0, os.geteuid()) if server_users is None else server_users):
                raise ControlSocketError(f"{path} belongs to another user")
            if server_pid not in (None, pid):
                raise ControlSocketError(f"{path} belongs to another process")
            sock.sendall(json.dumps(request).encode() + b"\n")
            while b"\n" not in received and len(received) <= MAX_ANSWER_BYTES:
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
