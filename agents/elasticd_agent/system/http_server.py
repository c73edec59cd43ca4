"""An HTTP server with bounded requests: one request a connection, routes from a table.

A request reaches its handler only whole, bounded and authenticated: a head of at most 16 KiB and a body of at most
1 MiB within the request timeout; the sender is known before the body is read. Answers are bounded in time. Of a request
only its method, path and status are logged.
"""

from __future__ import annotations

import contextlib
import http.client
import io
import json
import logging
import socket
import ssl
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler
from typing import Any, Protocol
from urllib.parse import unquote

from elasticd.errors import UsageError
from elasticd_agent.system.http_auth import AccessDenied, Authenticator
from elasticd_agent.system.http_listener import HttpListener

MAX_HEAD_BYTES = 16 << 10
MAX_BODY_BYTES = 1 << 20
JSON = "application/json"
TEXT = "text/plain; charset=utf-8"
_LINGER_S = 1.0
_LINGER_BYTES = 4 << 20

_log = logging.getLogger("elasticd.http")


@dataclass(frozen=True, slots=True)
class HttpRequest:
    """A request whose sender is known. `path` and `query` are still encoded."""

    method: str
    path: str
    query: str
    requested_by: str
    """The sender in words, "" for a public path."""
    content_type: str = ""
    body: bytes = b""
    host: str = ""
    """The sender's address, "" on a unix socket."""


@dataclass(frozen=True, slots=True)
class UnauthenticatedRequest:
    """A request without valid credentials, with the headers that tell a browser from other clients."""

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


class HttpError(Exception):
    """A route's refusal: the status, and the sentence of the response."""

    def __init__(self, status: int, why: str) -> None:
        super().__init__(why)
        self.status = status


class Routes(Protocol):
    """Called on the connections' own threads, many at once. Any other exception than HttpError is a 500."""

    def is_public(self, method: str, path: str) -> bool:
        """True for paths that need no credentials."""
        ...

    def reject(self, request: UnauthenticatedRequest, denied: AccessDenied) -> str | HttpResponse:
        """The response; or the sender in words, if other credentials are valid."""
        ...

    def answer(self, request: HttpRequest) -> HttpResponse: ...


Handler = Callable[..., HttpResponse]
"""Called with the request and the words of the path that stand for "*"."""


class RouteTable:
    """Handlers by method and path, as in "GET /v1/jobs/*": a "*" is one word of the path."""

    def __init__(self, handlers: Mapping[str, Handler], hidden: str = "\0") -> None:
        """`hidden`: a path prefix that error responses do not list."""
        self.routes = tuple(handlers)
        self._handlers: dict[tuple[str, ...], dict[str, Handler]] = {}
        for route, handler in handlers.items():
            method, path = route.split(" ")
            self._handlers.setdefault(tuple(path.split("/")[1:]), {})[method] = handler
        paths = {route.split(" ")[1] for route in handlers}
        self._listed = " ".join(sorted(path.replace("*", "NAME") for path in paths if not path.startswith(hidden)))

    def answer(self, request: HttpRequest) -> HttpResponse:
        """Raises HttpError for a request that no route takes."""
        try:
            words = [unquote(word, errors="strict") for word in request.path.split("/")[1:]]
        except UnicodeDecodeError:
            raise HttpError(400, "the path is not UTF-8") from None
        for route, handlers in self._handlers.items():
            if len(route) == len(words) and all(mine in ("*", word) for mine, word in zip(route, words, strict=True)):
                handler = handlers.get(request.method)
                if handler is None:
                    raise HttpError(405, f"only {' and '.join(handlers)} here")
                return handler(request, *(word for mine, word in zip(route, words, strict=True) if mine == "*"))
        raise HttpError(404, f"there is no such page; there are {self._listed}")


class HttpServer(HttpListener):
    """Serves `routes` at a TCP address (host, port) or a unix socket's path until closed."""

    def __init__(
        self,
        address: tuple[str, int] | str,
        routes: Routes,
        *,
        name: str,
        max_connections: int,
        request_timeout_s: float,
        response_timeout_s: float | None = None,
        authenticator: Authenticator | None = None,
        tls_context: Callable[[], ssl.SSLContext] | None = None,
    ) -> None:
        """`response_timeout_s`: for requests with credentials, from when they are read; None: within the request's.

        Without an `authenticator` every path is public.
        """
        self.routes = routes
        self.authenticator = authenticator
        self.response_timeout_s = response_timeout_s
        self._tls_context = tls_context
        if isinstance(address, tuple):
            self.address_family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
        super().__init__(address, _Handler, connection_s=request_timeout_s, most=max_connections, name=name)

    @property
    def bound(self) -> tuple[str, int]:
        """Host and port, with the real port if 0 was requested."""
        host, port = self.server_address[:2]
        return str(host), int(port)

    def get_request(self) -> tuple[Any, Any]:
        sock, address = super().get_request()
        if self._tls_context is None:
            return sock, address
        try:
            # The handshake waits for the client: it is made on the connection's own thread.
            made = self._tls_context().wrap_socket(sock, server_side=True, do_handshake_on_connect=False)
        except BaseException:
            sock.close()
            raise
        return made, address


def listen_tcp(host: str, port: int, routes: Routes, *, option: str, advice: str, **how: Any) -> HttpServer:
    """An HttpServer at host:port. Raises UsageError, naming the option, if it cannot listen there."""
    try:
        return HttpServer((host, port), routes, **how)
    except (OSError, OverflowError) as error:
        why = (error.strerror if isinstance(error, OSError) else None) or str(error)
        raise UsageError(f"{option} {port}: {host} port {port}: {why}; {advice}") from None


class _HeadTooLarge(http.client.HTTPException):
    """http.server answers 431 to any HTTPException while it reads headers."""


class _HeadReader:
    """Reads a request's head of at most MAX_HEAD_BYTES; a truncated one never counts as whole."""

    def __init__(self, raw: io.BufferedIOBase) -> None:
        self._raw = raw
        self._left = MAX_HEAD_BYTES

    def readline(self, most: int = -1) -> bytes:
        line = self._raw.readline(self._left + 1)
        self._left -= len(line)
        if self._left < 0:
            raise _HeadTooLarge("too large")
        if not line.endswith(b"\n"):
            raise ConnectionResetError("the head of the request was truncated")
        return line


class _Handler(BaseHTTPRequestHandler):
    # 1.1, since curl waits a second for "100 Continue" otherwise; but one request a connection.
    protocol_version = "HTTP/1.1"
    server_version = "elasticd"
    sys_version = ""
    command = ""
    request_version = "HTTP/1.1"
    requestline = ""
    path = ""
    server: HttpServer

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
        self.request_version = self.protocol_version  # a bare "GET /path" is HTTP/0.9, whose answers have no status
        self._send(self._response())

    do_GET = do_HEAD = do_POST = do_PUT = do_DELETE = do_PATCH = do_OPTIONS = _serve  # noqa: N815

    def _response(self) -> HttpResponse:
        server = self.server
        path, _, query = self.path.partition("?")
        is_public = server.authenticator is None or server.routes.is_public(self.command, path)
        method = "GET" if self.command == "HEAD" else self.command
        sender = self._sender(method, path, query, is_public)
        if isinstance(sender, HttpResponse):
            return sender
        body = self._body()
        if isinstance(body, HttpResponse):
            return body
        if not is_public and server.response_timeout_s is not None:
            server.extend(self.request, server.response_timeout_s)
            self.request.settimeout(server.response_timeout_s)
        content_type = self.headers.get("Content-Type", "").partition(";")[0].strip().lower()
        host = "" if server.address_family == socket.AF_UNIX else str(self.client_address[0])
        try:
            return server.routes.answer(HttpRequest(method, path, query, sender, content_type, body, host))
        except HttpError as error:
            return error_response(error.status, str(error))
        except Exception:  # noqa: BLE001 a defect of one route must not end the process
            _log.warning("%s could not answer %s %s", server.name, self.command, ascii(path)[:200], exc_info=True)
            return error_response(500, "internal error; the agent's log says why")

    def _sender(self, method: str, path: str, query: str, is_public: bool) -> str | HttpResponse:
        """Who sent it, or the response if access is denied."""
        authenticator = self.server.authenticator
        if authenticator is None:
            return ""
        found = authenticator.authenticate(self.request, self.headers.get_all("Authorization", []))
        if isinstance(found, str):
            return found
        if is_public:
            return ""
        headers = self.headers.get("Cookie", ""), self.headers.get("Accept", "")
        return self.server.routes.reject(UnauthenticatedRequest(method, path, query, *headers), found)

    def _body(self) -> bytes | HttpResponse:
        if "Transfer-Encoding" in self.headers:
            return error_response(411, "a body needs its Content-Length; chunks are not accepted")
        lengths = self.headers.get_all("Content-Length", ["0"])
        if len(lengths) != 1 or not (lengths[0].isascii() and lengths[0].isdigit() and len(lengths[0]) < 20):
            return error_response(400, "Content-Length: one number of bytes")
        length = int(lengths[0])
        if length > MAX_BODY_BYTES:
            return error_response(413, f"a body may have {MAX_BODY_BYTES} bytes, not {length}")
        if length and self.command in ("GET", "HEAD"):
            return error_response(413, f"a {self.command} has no body here")
        if length and self.headers.get("Expect", "").lower() == "100-continue":
            self.wfile.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        body = self._raw.read(length) if length else b""
        if len(body) < length:
            return error_response(400, f"the body was truncated: {len(body)} of {length} bytes arrived")
        return body

    def handle_expect_100(self) -> bool:
        return True  # _body answers it, after the sender is known

    def _send(self, response: HttpResponse) -> None:
        self.send_response(response.status)
        for name, value in (
            ("Content-Type", response.content_type),
            ("Content-Length", str(len(response.body))),
            ("Cache-Control", "no-store"),
            ("Connection", "close"),
            ("X-Content-Type-Options", "nosniff"),
            *response.headers,
        ):
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(response.body)

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """The errors that http.server finds itself. Its own pages quote the request; these do not."""
        self.close_connection = True
        self.request_version = "HTTP/1.1"
        why = {
            400: "this is not an HTTP request",
            414: "the request's first line is too long",
            431: f"the head of a request may have {MAX_HEAD_BYTES} bytes",
            501: "there are GET, HEAD and POST",
            505: "use HTTP/1.0 or HTTP/1.1",
        }.get(int(code), "the request cannot be answered")
        self._send(error_response(int(code), why))

    def finish(self) -> None:
        self.rfile = self._raw
        super().finish()
        self._linger()

    def _linger(self) -> None:
        """Wait a moment for the client to close: closing with unread bytes resets the connection, and the client might
        lose the answer.
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
        """Nothing: text from clients stays out of the log."""

    def log_request(self, code: int | str = "-", size: int | str = "-") -> None:
        path = ascii(self.path.partition("?")[0])[:200]
        _log.debug("%s %s: %s", ascii(self.command)[:20], path, int(code) if isinstance(code, int) else "-")


def json_response(value: Mapping[str, Any], status: int = 200) -> HttpResponse:
    text = json.dumps(value, ensure_ascii=False, default=str)
    return HttpResponse(status, text.encode("utf-8", "replace") + b"\n")


def error_response(status: int, why: str) -> HttpResponse:
    """{"error": "one sentence"}"""
    return json_response({"error": why}, status)
