"""The HTTP server of agents and runners: bounded connections, one request each, routes from a table.

A slow reader, a flood, or a client that trickles bytes costs a few threads for a few seconds. A request reaches its
handler only whole, bounded and authenticated: a head of at most 16 KiB and a body of at most 1 MiB within the request
timeout; the sender is known before the body is read. Host names are never resolved. Of a request only its method, path
and status are logged.

Everything here is bounded, since the port may be reachable by anybody in the cluster, and the process behind it
supervises training:
- Threads. `max_connections` count; those that were cut need a moment to end and do not, so there are at most twice as
  many. Beyond them a connection is closed unread.
- Time. Each connection has a deadline from its first byte to the last of its request. A socket's own timeout begins
  anew with each byte and would let a trickling client stay for ever, so the accepting thread cuts connections by
  shutting their socket down. Once the request is read, the deadline is extended for the answer.
- Memory. The head and the body have limits, and the body of a request without valid credentials is not read at all.
- Fairness. When there is no room, the host with the most unfinished requests loses its oldest. A client that holds
  connections open blocks itself, and not the prober that would restart a container.

The order of a request: head, sender, refusal by path and access, body, handler, answer, and a moment for the client to
close. A handler may be called many times at once; an exception other than HttpError is logged and answered by 500, and
the port stays open.
"""

from __future__ import annotations

import contextlib
import http.client
import io
import json
import logging
import math
import selectors
import socket
import socketserver
import ssl
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Protocol
from urllib.parse import unquote

from elasticd.errors import UsageError
from elasticd_agent.system.network.http_auth import AccessDenied, Authenticator, Caller
from elasticd_agent.system.network.sockets import peer_uid
from elasticd_agent.system.waker import Waker

MAX_HEAD_BYTES = 16 << 10
MAX_BODY_BYTES = 1 << 20
JSON_TYPE = "application/json"
TEXT_TYPE = "text/plain; charset=utf-8"
_LINGER_S = 1.0
_LINGER_BYTES = 4 << 20

_log = logging.getLogger("elasticd.http")


@dataclass(frozen=True, slots=True)
class HttpRequest:
    """A request. `path` and `query` are still encoded."""

    method: str
    path: str
    query: str
    requested_by: str = ""  #: the sender in words; "" for a public path, and without valid credentials
    content_type: str = ""
    body: bytes = b""
    client_host: str = ""  #: the sender's address, "" on a unix socket
    host_header: str = ""
    cookie: str = ""
    fetch_site: str = ""  #: sec-Fetch-Site, "" of a client that is no present-day browser
    origin: str = ""
    accept: str = ""
    peer_uid: int | None = None  #: the user of the sender's process, if that is on this machine and the kernel tells

    @property
    def is_cross_origin(self) -> bool:
        """A browser sent it for another site's page. "null" is a page that names no origin, as ours do."""
        if self.fetch_site:
            return self.fetch_site != "same-origin"
        return self.origin not in ("", "null") and self.origin.partition("://")[2] != self.host_header


@dataclass(frozen=True, slots=True)
class HttpResponse:
    status: int
    body: bytes
    content_type: str = JSON_TYPE
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

    def admit_or_reject(self, request: HttpRequest, denied: AccessDenied) -> str | HttpResponse:
        """The response to a request without valid credentials; or the sender in words, if others are valid."""

    def answer(self, request: HttpRequest) -> HttpResponse: ...


RouteHandler = Callable[..., HttpResponse]
"""Called with the request and the words of the path that stand for "*"."""


class RouteTable:
    """Routes for all: handlers by method and path, as in "GET /v1/jobs/*": a "*" is one word of the path.

    A word is decoded after the path is split, so an encoded slash cannot make two words of one.
    """

    def __init__(self, handlers: Mapping[str, RouteHandler], hidden: str = "\0") -> None:
        """`hidden`: a path prefix that error responses do not list."""
        self.routes = tuple(handlers)
        self._handlers: dict[tuple[str, ...], dict[str, RouteHandler]] = {}
        for route, handler in handlers.items():
            method, path = route.split(" ")
            self._handlers.setdefault(tuple(path.split("/")[1:]), {})[method] = handler
        paths = {route.split(" ")[1] for route in handlers}
        self._listed = " ".join(sorted(path.replace("*", "NAME") for path in paths if not path.startswith(hidden)))

    def is_public(self, method: str, path: str) -> bool:
        return True

    def admit_or_reject(self, request: HttpRequest, denied: AccessDenied) -> HttpResponse:
        return error_response(denied.code, denied.why)

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


@dataclass(slots=True)
class _Connection:
    """`deadline`: when it is cut, infinite afterwards. `host`: the client's."""

    deadline: float
    thread: threading.Thread
    host: str
    is_request_read: bool = False


class HttpServer(ThreadingHTTPServer):
    """Serves `routes` at a TCP address (host, port) or a unix socket's path, with a thread for each connection.

    A connection beyond `max_connections` replaces the oldest one without a complete request, of the host that has most
    of those; if there is none, it is closed. So a client that holds connections open blocks itself, and not the prober
    that would kill a container.
    """

    daemon_threads = True
    block_on_close = False
    request_queue_size = 32
    allow_reuse_port = False  # some Pythons' HTTPServer would share the port with another server
    timeout = 0.0  # handle_request is called when a connection waits

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
        self.name = name
        self.max_connections = max_connections
        self.request_timeout_s = request_timeout_s
        self.response_timeout_s = response_timeout_s
        self.authenticator = authenticator
        self._tls_context = tls_context
        self._lock = threading.Lock()
        self._connections: dict[socket.socket, _Connection] = {}
        self._closing = False
        if isinstance(address, tuple):
            self.address_family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
        self._waker = Waker()
        try:
            super().__init__(address, _RequestHandler)  # type: ignore[arg-type]  # a unix socket's address is a path
        except BaseException:
            self._waker.close()
            raise
        self._serving = threading.Thread(target=self._serve, name="elasticd-http", daemon=True)

    @property
    def bound_address(self) -> tuple[str, int]:
        """Host and port, with the real port if 0 was requested."""
        host, port = self.server_address[:2]
        return str(host), int(port)

    def start(self) -> None:
        self._serving.start()

    def _serve(self) -> None:
        """Accept connections, and cut expired ones. Waiting costs nothing."""
        with selectors.PollSelector() as selector:  # it needs no descriptor: there may be none left
            selector.register(self.socket, selectors.EVENT_READ)
            selector.register(self._waker, selectors.EVENT_READ)
            while not self._closing:
                ready = selector.select(self._next_cut_in_s())
                if any(key.fileobj is self.socket for key, _ in ready):
                    try:
                        self.handle_request()
                    except Exception:  # noqa: BLE001 an error of one connection must not close the port for the others
                        _log.warning("%s could not accept a connection", self.name, exc_info=True)
                        time.sleep(0.1)
                # A socket's own timeout starts anew with every byte: a trickling client would stay for ever.
                self.cut_expired(time.monotonic())

    def _next_cut_in_s(self) -> float | None:
        with self._lock:
            first = min((connection.deadline for connection in self._connections.values()), default=math.inf)
        return None if first == math.inf else max(0.0, first - time.monotonic())

    def server_bind(self) -> None:
        """Bind without resolving a name: HTTPServer's own would ask for this machine's, which may
        take half a minute.
        """
        socketserver.TCPServer.server_bind(self)
        self.server_name = "elasticd"
        self.server_port = 0

    def get_request(self) -> tuple[Any, Any]:
        """Accept a connection. With TLS, the handshake waits for the client, so it is made on the connection's own
        thread.
        """
        try:
            sock, address = super().get_request()
        except OSError:
            # Out of file descriptors: the connection stays pending, and without a pause the loop would spin on it.
            time.sleep(0.1)
            raise
        if self._tls_context is None:
            return sock, address
        try:
            # The handshake waits for the client: it is made on the connection's own thread.
            made = self._tls_context().wrap_socket(sock, server_side=True, do_handshake_on_connect=False)
        except BaseException:
            sock.close()
            raise
        return made, address

    def process_request(self, request: Any, client_address: Any) -> None:
        """Start a thread for the connection, if there is room for it."""
        serve, name = self.process_request_thread, "elasticd-http-client"
        thread = threading.Thread(target=serve, args=(request, client_address), name=name, daemon=True)
        host = str(client_address[0]) if client_address else ""  # a unix socket's clients have no address
        with self._lock:
            room = self._make_room()
            if room:
                self._connections[request] = _Connection(time.monotonic() + self.request_timeout_s, thread, host)
        if room:
            thread.start()
        else:
            self.shutdown_request(request)

    def _make_room(self) -> bool:
        """Call with the lock. Threads that were cut need a moment to end: there are never more than `max_connections`
        of them."""
        counted = [item for item in self._connections.items() if item[1].deadline != math.inf]
        if len(counted) < self.max_connections:
            return len(self._connections) < 2 * self.max_connections
        asking = [item for item in counted if not item[1].is_request_read]  # the oldest first
        if not asking or len(self._connections) >= 2 * self.max_connections:
            return False
        ((host, _),) = Counter(connection.host for _, connection in asking).most_common(1)
        self._cut(*next(item for item in asking if item[1].host == host))
        return True

    def shutdown_request(self, request: Any) -> None:
        try:
            super().shutdown_request(request)
        finally:  # `close` waits for the connections that are still in here
            with self._lock:
                self._connections.pop(request, None)

    def extend_deadline(self, request: socket.socket, seconds: float) -> None:
        """Give this connection `seconds` from now on: its request is complete, and the answer takes longer."""
        with self._lock:
            connection = self._connections.get(request)
            if connection is not None and connection.deadline != math.inf:
                connection.deadline, connection.is_request_read = time.monotonic() + seconds, True

    def cut_expired(self, now: float) -> None:
        """End every connection whose deadline has passed, by shutting its socket down under its thread."""
        with self._lock:
            for request, connection in self._connections.items():
                if now >= connection.deadline:
                    self._cut(request, connection)

    @staticmethod
    def _cut(request: socket.socket, connection: _Connection) -> None:
        connection.deadline = math.inf
        # Not SSLSocket.shutdown, which would drop the encryption first.
        with contextlib.suppress(OSError):
            socket.socket.shutdown(request, socket.SHUT_RDWR)

    def close(self, within_s: float) -> bool:
        """Stop listening, cut every connection; True when every thread has ended within `within_s` seconds."""
        until = time.monotonic() + within_s
        self._closing = True
        self._waker.wake()
        if self._serving.is_alive():
            self._serving.join(max(0.0, until - time.monotonic()))
        self.server_close()
        self.cut_expired(math.inf)
        threads = [self._serving, *self.connection_threads()]
        if not self._serving.is_alive():
            self._waker.close()
        for thread in (thread for thread in threads if thread.ident is not None):
            thread.join(max(0.0, until - time.monotonic()))
        stuck = [thread.name for thread in threads if thread.is_alive()]
        if stuck:
            _log.warning("%s is closed, but %d of its threads did not end", self.name, len(stuck))
        return not stuck

    def connection_threads(self) -> list[threading.Thread]:
        with self._lock:
            return [connection.thread for connection in self._connections.values()]

    def handle_error(self, request: Any, client_address: Any) -> None:
        _log.debug("a connection of %s ended early", self.name, exc_info=True)


def listen_tcp(host: str, port: int, routes: Routes, *, option: str, advice: str, **options: Any) -> HttpServer:
    """An HttpServer at host:port. Raises UsageError, naming the option, if it cannot listen there."""
    try:
        return HttpServer((host, port), routes, **options)
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


class _RequestHandler(BaseHTTPRequestHandler):
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
        self.request.settimeout(self.server.request_timeout_s)
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

    def _respond(self) -> None:
        self.close_connection = True
        self.request_version = self.protocol_version  # a bare "GET /path" is HTTP/0.9, whose answers have no status
        self._send(self._make_response())

    do_GET = do_HEAD = do_POST = do_PUT = do_DELETE = do_PATCH = do_OPTIONS = _respond  # noqa: N815

    def _make_response(self) -> HttpResponse:
        server, headers = self.server, self.headers
        path, _, query = self.path.partition("?")
        is_local = server.address_family == socket.AF_UNIX
        request = HttpRequest(
            "GET" if self.command == "HEAD" else self.command,
            path,
            query,
            content_type=headers.get("Content-Type", "").partition(";")[0].strip().lower(),
            client_host="" if is_local else str(self.client_address[0]),
            host_header=self._host_header(),
            cookie=headers.get("Cookie", ""),
            fetch_site=headers.get("Sec-Fetch-Site", ""),
            origin=headers.get("Origin", ""),
            accept=headers.get("Accept", ""),
            peer_uid=None if is_local else peer_uid(self.request),
        )
        is_public = server.authenticator is None or server.routes.is_public(self.command, path)
        sender = self._sender(request, is_public)
        if isinstance(sender, HttpResponse):
            return sender
        body = self._read_body()
        if isinstance(body, HttpResponse):
            return body
        if not is_public and server.response_timeout_s is not None:
            server.extend_deadline(self.request, server.response_timeout_s)
            self.request.settimeout(server.response_timeout_s)
        try:
            return server.routes.answer(replace(request, requested_by=sender, body=body))
        except HttpError as error:
            return error_response(error.status, str(error))
        except Exception:  # noqa: BLE001 a defect of one route must not end the process
            _log.warning("%s could not answer %s %s", server.name, self.command, ascii(path)[:200], exc_info=True)
            return error_response(500, "internal error; the agent's log says why")

    def _sender(self, request: HttpRequest, is_public: bool) -> str | HttpResponse:
        """The sender in words, or the response if access is denied."""
        authenticator = self.server.authenticator
        credentials = self.headers.get_all("Authorization", [])
        if authenticator is None or (is_public and not credentials):
            return ""
        caller = authenticator.authenticate(self.request, credentials)
        if isinstance(caller, Caller):
            if not (why := caller.refusal(self.command, request.path)) or is_public:
                return str(caller)
            caller = AccessDenied(403, why, caller=caller)
        return "" if is_public else self.server.routes.admit_or_reject(request, caller)

    def _host_header(self) -> str:
        names = self.headers.get_all("Host", [])
        return str(names[0]) if len(names) == 1 else ""

    def _read_body(self) -> bytes | HttpResponse:
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
        return True  # _read_body answers it, after the sender is known

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
