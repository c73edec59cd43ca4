"""The daemon's HTTP server: one request a connection, over a unix socket and over TCP, before the same routes.

It exists so that a request reaches a route only whole, bounded and admitted: heads of at most 16 KiB and bodies of at
most 1 MiB in at most 10 s, who asks known (http_auth.py), answers bounded in time. It never waits for the deciding
thread,
keeps no connection alive, and nothing of a request but its method, path and fate is logged.
"""

from __future__ import annotations

import contextlib
import http.client
import io
import json
import logging
import os
import socket
import ssl
import stat
import time
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any, Protocol

from elasticd.errors import UsageError
from elasticd_agent.node.api.certificates import Certificates
from elasticd_agent.system.control_socket import short_path
from elasticd_agent.system.http_auth import AccessDenied, Authenticator, PeerCredentialAuth, TokenAuth
from elasticd_agent.system.http_listener import HttpListener

MAX_CONNECTIONS = 32
"""On each of the two. An answer that is forwarded holds one here and one there."""
REQUEST_TIMEOUT_S = 10.0
RESPONSE_TIMEOUT_S = 60.0
"""Evidence of a job on many nodes takes half of that; nothing takes longer, and nobody reads longer."""
MAX_HEAD_BYTES = 16 << 10
MAX_BODY_BYTES = 1 << 20
JSON, TEXT = "application/json", "text/plain; charset=utf-8"
_LINGER_S = 1.0
_LINGER_BYTES = 4 << 20

_log = logging.getLogger("elasticd.http")


@dataclass(frozen=True, slots=True)
class HttpRequest:
    """A request whose sender is known. `path` and `query` are as they came, still encoded. `by`: who asks, in words.

    `host` is the address it came from, "" for the socket.
    """

    method: str
    path: str
    query: str
    requested_by: str
    content_type: str = ""
    body: bytes = b""
    host: str = ""


@dataclass(frozen=True, slots=True)
class UnauthenticatedRequest:
    """A request whose sender the door did not let in, as far as a browser's differs from others."""

    method: str
    path: str
    query: str
    cookie: str = ""
    accept: str = ""


@dataclass(frozen=True, slots=True)
class HttpResponse:
    status: int
    body: bytes
    content_type: str = JSON
    headers: tuple[tuple[str, str], ...] = ()


class Routes(Protocol):
    """Called on connections' own threads, many at once; whatever it raises is a 500."""

    def is_public(self, method: str, path: str) -> bool:
        """True for what everybody may see."""
        ...

    def reject(self, knock: UnauthenticatedRequest, refused: AccessDenied) -> str | HttpResponse:
        """Who that is after all, in words, or what they are told."""
        ...

    def answer(self, request: HttpRequest) -> HttpResponse: ...


@dataclass(frozen=True, slots=True)
class ListenOptions:
    """Where to listen, and who may come in. `port` None: no TCP; 0: any that is free."""

    socket: Path
    bind: str = "127.0.0.1"
    port: int | None = None
    token_file: Path | None = None
    tls_cert: Path | None = None
    tls_key: Path | None = None
    users: tuple[str, ...] = ()
    groups: tuple[str, ...] = ()


class ApiServer:
    """Serves `routes` until closed. `address` is HOST:PORT's two parts, None without TCP."""

    def __init__(self, where: ListenOptions, routes: Routes, asking_s: float = REQUEST_TIMEOUT_S) -> None:
        """Raises UsageError, naming the key in agent.toml, for what cannot be had."""
        self.address: tuple[str, int] | None = None
        self._listeners: list[HttpListener] = []
        self._socket = where.socket
        self.token_auth = TokenAuth(where.token_file)
        if trouble := self.token_auth.problem():
            _log.warning("%s; until that is right nobody is let in over TCP", trouble)
        try:
            self._listen(_unix(where, routes, asking_s))
            if where.port is not None:
                tcp = _tcp(where, where.port, routes, asking_s, self.token_auth)
                host, port = tcp.server_address[:2]
                self.address = str(host), int(port)
                self._listen(tcp)
        except BaseException:
            self.close()
            raise

    def _listen(self, listener: HttpListener) -> None:
        self._listeners.append(listener)
        listener.start()

    def close(self, within: float = 2.0) -> bool:
        """Stop listening and cut every connection; True when all threads are gone in time. May be called again."""
        until = time.monotonic() + within
        # A list, not a generator for all(): every one is closed.
        gone = [listener.close(max(0.0, until - time.monotonic())) for listener in self._listeners]
        if self._listeners:
            with contextlib.suppress(OSError):
                self._socket.unlink()
        self._listeners = []
        return all(gone)


def _unix(where: ListenOptions, routes: Routes, asking_s: float) -> HttpListener:
    door = PeerCredentialAuth.from_names(where.users, where.groups)
    path = where.socket
    try:
        if not path.parent.is_dir():
            path.parent.mkdir(parents=True)
            path.parent.chmod(0o755)  # whatever the umask is: the socket's own mode says who may connect
        _remove_stale_socket(path)
        return _UnixListener(path, routes, door, asking_s)
    except OSError as error:
        raise UsageError(f"http.socket {path}: {error.strerror or error}; give a path in a directory of ours") from None


def _remove_stale_socket(path: Path) -> None:
    """What a daemon that was killed has left; never one that answers, never what is no socket."""
    try:
        if not stat.S_ISSOCK(path.lstat().st_mode):
            raise UsageError(
                f"http.socket {path}: something that is no socket is there; remove it, or give another path"
            )
    except FileNotFoundError:
        return
    with socket.socket(socket.AF_UNIX) as probe, short_path(path) as name:
        probe.settimeout(1.0)
        try:
            probe.connect(name)
        except (ConnectionRefusedError, FileNotFoundError):
            with contextlib.suppress(FileNotFoundError):
                path.unlink()
            return
        except OSError:  # its backlog is full: somebody listens
            pass
    raise UsageError(f"http.socket {path}: a daemon answers there already; stop that one, or give another run_dir")


def _tcp(where: ListenOptions, port: int, routes: Routes, asking_s: float, door: Authenticator) -> HttpListener:
    if (where.tls_cert is None) != (where.tls_key is None):
        raise UsageError("http.tls_cert and http.tls_key come together or not at all")
    certificates = None
    if where.tls_cert is not None and where.tls_key is not None:
        certificates = Certificates(where.tls_cert, where.tls_key)
    family = socket.AF_INET6 if ":" in where.bind else socket.AF_INET
    made = type("_Bound", (_TcpListener,), {"address_family": family})
    try:
        listener: _TcpListener = made((where.bind, port), routes, door, asking_s, certificates)
    except (OSError, OverflowError) as error:
        why = (error.strerror if isinstance(error, OSError) else None) or str(error)
        raise UsageError(
            f"http.port {port}: {where.bind} port {port}: {why}; give another http.bind or http.port"
        ) from None
    return listener


class _AuthenticatingListener(HttpListener):
    """A listener whose handler finds the routes and the door."""

    def __init__(self, address: Any, routes: Routes, door: Authenticator, asking_s: float, name: str) -> None:
        self.routes, self.authenticator = routes, door
        super().__init__(address, _Handler, connection_s=asking_s, most=MAX_CONNECTIONS, name=name)


class _UnixListener(_AuthenticatingListener):
    address_family = socket.AF_UNIX
    allow_reuse_address = False

    def __init__(self, path: Path, routes: Routes, door: PeerCredentialAuth, asking_s: float) -> None:
        self._path, self._peers = path, door
        super().__init__(str(path), routes, door, asking_s, "the daemon's socket")

    def server_bind(self) -> None:
        # Nobody can connect before it listens, so whatever mode it is made with is right in time.
        with short_path(self._path) as name:
            self.socket.bind(name)
        if len(self._peers.groups) == 1:
            os.chown(self._path, -1, *self._peers.groups)
        os.chmod(self._path, self._peers.socket_mode)
        self.server_name, self.server_port = "elasticd", 0


class _TcpListener(_AuthenticatingListener):
    def __init__(
        self,
        address: tuple[str, int],
        routes: Routes,
        door: Authenticator,
        asking_s: float,
        certificates: Certificates | None,
    ) -> None:
        self._certificates = certificates
        super().__init__(address, routes, door, asking_s, "the daemon's port")

    def get_request(self) -> tuple[Any, Any]:
        sock, address = super().get_request()
        if self._certificates is None:
            return sock, address
        try:
            # The handshake waits for the client: it is the connection's own thread that does it.
            made = self._certificates.context().wrap_socket(sock, server_side=True, do_handshake_on_connect=False)
        except BaseException:
            sock.close()
            raise
        return made, address


class _HeadTooLarge(http.client.HTTPException):
    """http.server answers 431 to any HTTPException while it reads headers."""


class _HeadReader:
    """Reads a request's head: never more than HEAD_BYTES, and one that is cut short never counts as whole."""

    def __init__(self, raw: io.BufferedIOBase) -> None:
        self._raw, self._left = raw, MAX_HEAD_BYTES

    def readline(self, most: int = -1) -> bytes:
        line = self._raw.readline(self._left + 1)
        self._left -= len(line)
        if self._left < 0:
            raise _HeadTooLarge("too large")
        if not line.endswith(b"\n"):
            raise ConnectionResetError("the head of the request was cut short")
        return line


class _Handler(BaseHTTPRequestHandler):
    # 1.1, since curl waits a second for "100 Continue" otherwise; but one request a connection.
    protocol_version = "HTTP/1.1"
    server_version, sys_version = "elasticd", ""
    command, request_version, requestline, path = "", "HTTP/1.1", "", ""
    server: _AuthenticatingListener

    def setup(self) -> None:
        self.request.settimeout(self.server.connection_s)
        if isinstance(self.request, ssl.SSLSocket):
            self.request.do_handshake()
        super().setup()
        self._raw = self.rfile
        self.rfile = _HeadReader(self._raw)  # type: ignore[assignment]

    def handle(self) -> None:
        try:
            self.handle_one_request()
        except _HeadTooLarge:
            self.send_error(431)

    def _serve(self) -> None:
        self.close_connection = True
        self.request_version = self.protocol_version  # to "GET /path" alone, which is HTTP/0.9, there would be no code
        path, _, query = self.path.partition("?")
        is_open = self.server.routes.is_public(self.command, path)
        method = "GET" if self.command == "HEAD" else self.command
        by: str | AccessDenied | HttpResponse = self.server.authenticator.authenticate(
            self.request, self.headers.get_all("Authorization", [])
        )
        if isinstance(by, AccessDenied) and not is_open:
            headers = self.headers.get("Cookie", ""), self.headers.get("Accept", "")
            by = self.server.routes.reject(UnauthenticatedRequest(method, path, query, *headers), by)
        if isinstance(by, HttpResponse):
            self._answer(by)
            return
        body = self._body()
        if isinstance(body, AccessDenied):
            self._answer(error_response(body.code, body.why))
            return
        if not is_open:
            self.server.extend(self.request, RESPONSE_TIMEOUT_S)
            self.request.settimeout(RESPONSE_TIMEOUT_S)
        kind = self.headers.get("Content-Type", "").partition(";")[0].strip().lower()
        host = "" if self.server.address_family == socket.AF_UNIX else str(self.client_address[0])
        request = HttpRequest(method, path, query, by if isinstance(by, str) else "", kind, body, host)
        try:
            answer = self.server.routes.answer(request)
        except Exception:  # noqa: BLE001 a route's defect is that route's, never the daemon's
            _log.warning("the daemon could not answer %s %s", self.command, ascii(path)[:200], exc_info=True)
            answer = error_response(500, "this could not be answered; the daemon's log says why")
        self._answer(answer)

    do_GET = do_HEAD = do_POST = do_PUT = do_DELETE = do_PATCH = do_OPTIONS = _serve  # noqa: N815

    def _body(self) -> bytes | AccessDenied:
        if "Transfer-Encoding" in self.headers:
            return AccessDenied(411, "a body comes with its Content-Length here, not in chunks")
        lengths = self.headers.get_all("Content-Length", ["0"])
        if len(lengths) != 1 or not (lengths[0].isascii() and lengths[0].isdigit() and len(lengths[0]) < 20):
            return AccessDenied(400, "Content-Length: one number of bytes")
        length = int(lengths[0])
        if length > MAX_BODY_BYTES:
            return AccessDenied(413, f"a body may have {MAX_BODY_BYTES} bytes, not {length}")
        if length and self.command in ("GET", "HEAD"):
            return AccessDenied(413, f"a {self.command} has no body here")
        if length and self.headers.get("Expect", "").lower() == "100-continue":
            self.wfile.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        body = self._raw.read(length) if length else b""
        if len(body) < length:
            return AccessDenied(400, f"the body was cut short: {len(body)} of {length} bytes came")
        return body

    def handle_expect_100(self) -> bool:
        return True  # who asks is looked at first: see _body

    def _answer(self, answer: HttpResponse) -> None:
        self.send_response(answer.status)
        headers = [
            ("Content-Type", answer.content_type),
            ("Content-Length", str(len(answer.body))),
            ("Cache-Control", "no-store"),
        ]
        for name, value in [
            *headers,
            ("Connection", "close"),
            ("X-Content-Type-Options", "nosniff"),
            *answer.headers,
        ]:
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(answer.body)

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """What http.server finds wrong by itself. Its pages quote the request; ours do not."""
        self.close_connection = True
        self.request_version = "HTTP/1.1"
        why = {
            400: "that is no HTTP request",
            414: "the request's first line is too long",
            431: f"the head of a request may have {MAX_HEAD_BYTES} bytes",
            501: "there are GET, HEAD and POST",
            505: "HTTP/1.0 or HTTP/1.1, please",
        }.get(int(code), "that cannot be answered")
        self._answer(error_response(int(code), why))

    def finish(self) -> None:
        self.rfile = self._raw
        super().finish()
        self._linger()

    def _linger(self) -> None:
        """Closing with bytes unread resets the connection, and the client might never see our answer.

        Who has all of it hangs up at once; nobody else is waited for for long.
        """
        until, left = time.monotonic() + _LINGER_S, _LINGER_BYTES
        with contextlib.suppress(OSError):
            socket.socket.shutdown(self.request, socket.SHUT_WR)
            while left > 0 and (rest := until - time.monotonic()) > 0:
                self.request.settimeout(rest)
                data = socket.socket.recv(self.request, 1 << 16)
                if not data:
                    return
                left -= len(data)

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing: what clients say has no business in logs."""

    def log_request(self, code: int | str = "-", size: int | str = "-") -> None:
        path = ascii(self.path.partition("?")[0])[:200]
        _log.debug("%s %s: %s", ascii(self.command)[:20], path, int(code) if isinstance(code, int) else "-")


def error_response(code: int, why: str) -> HttpResponse:
    """An answer that is a sentence: {"error": …}."""
    return HttpResponse(code, json.dumps({"error": why}, ensure_ascii=False).encode("utf-8", "replace") + b"\n")
