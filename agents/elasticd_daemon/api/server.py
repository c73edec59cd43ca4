"""The agent's two listeners, a unix socket and a TCP port, with the same routes behind both.

The socket is for people and programs on this machine: the kernel says who they are, so no secret is needed, and the
mode of the socket keeps others out. The port is for other nodes, browsers and Prometheus: it asks for a token, and what
needs none is what a prober needs. Both have the same limits, each for itself, so a flood of the port leaves the socket
usable.

The socket's file is removed and made anew at each start. A file there that is not a socket, or a socket that answers,
is never removed: it is another program's.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import ssl
import stat
import time
from pathlib import Path

from elasticd.errors import UsageError
from elasticd_agent.system.network.addresses import format_endpoint
from elasticd_agent.system.network.control_socket import short_path
from elasticd_agent.system.network.http_auth import PeerCredentialAuth, TokenAuth
from elasticd_agent.system.network.http_server import HttpServer, Routes, listen_tcp
from elasticd_daemon.config.agent_settings import HttpSettings

MAX_CONNECTIONS = 32
"""The limit of each listener. An answer that is forwarded takes one here and one on the other node."""
REQUEST_TIMEOUT_S = 10.0
RESPONSE_TIMEOUT_S = 60.0
"""Evidence of a job on many nodes, the slowest answer, takes half of that."""

_log = logging.getLogger("elasticd.http")


class ApiServer:
    """Serves `routes` until closed. `address` is the TCP listener's host and port."""

    def __init__(
        self,
        path: Path,
        options: HttpSettings,
        routes: Routes,
        token_auth: TokenAuth,
        request_timeout_s: float = REQUEST_TIMEOUT_S,
    ) -> None:
        """`path`: the unix socket. Raises UsageError, naming the key in agent.toml, for a listener that cannot open."""
        self.listeners: list[HttpServer] = []
        self._socket = path
        self.token_auth = token_auth
        if problem := token_auth.problem():
            _log.warning("%s; until this is fixed access over TCP is denied", problem)
        try:
            self._start_listener(_listen_unix(path, options, routes, request_timeout_s))
            server = _listen_tcp(options, routes, request_timeout_s, token_auth)
            self.address = server.bound_address
            token_auth.address = format_endpoint(*server.bound_address)
            self._start_listener(server)
        except BaseException:
            self.close()
            raise

    def _start_listener(self, listener: HttpServer) -> None:
        """Take a listener into service; `close` will end it."""
        self.listeners.append(listener)
        listener.start()

    def close(self, within_s: float = 2.0) -> bool:
        """Stop listening and cut every connection; True when all threads are gone in time. May be called again."""
        until = time.monotonic() + within_s
        # A list, not a generator for all(): every listener is closed.
        closed = [listener.close(max(0.0, until - time.monotonic())) for listener in self.listeners]
        if self.listeners:
            with contextlib.suppress(OSError):
                self._socket.unlink()
        self.listeners = []
        return all(closed)


class _UnixServer(HttpServer):
    address_family = socket.AF_UNIX
    allow_reuse_address = False

    def server_bind(self) -> None:
        """Bind the socket and set its group and mode before any client can connect."""
        assert isinstance(self.authenticator, PeerCredentialAuth)
        path = Path(self.server_address)  # type: ignore[arg-type]
        # No client can connect before the socket listens, so its mode is set in time.
        with short_path(path) as name:
            self.socket.bind(name)
        mode = self.authenticator.socket_mode
        if len(self.authenticator.groups) == 1:
            try:
                os.chown(path, -1, *self.authenticator.groups)
            except PermissionError:  # an agent that is not root gives files to its own groups only
                mode = 0o666
        os.chmod(path, mode)
        self.server_name = "elasticd"
        self.server_port = 0


def _listen_unix(path: Path, options: HttpSettings, routes: Routes, request_timeout_s: float) -> HttpServer:
    authenticator = PeerCredentialAuth.from_names(options.users, options.groups)
    try:
        if not path.parent.is_dir():
            path.parent.mkdir(parents=True)
            path.parent.chmod(0o755)  # whatever the umask is: the socket's own mode limits access
        _remove_stale_socket(path)
        return _UnixServer(
            str(path),
            routes,
            name="the agent's socket",
            max_connections=MAX_CONNECTIONS,
            request_timeout_s=request_timeout_s,
            response_timeout_s=RESPONSE_TIMEOUT_S,
            authenticator=authenticator,
        )
    except OSError as error:
        raise UsageError(f"http.socket {path}: {error.strerror or error}; give a path in a directory of ours") from None


def _remove_stale_socket(path: Path) -> None:
    """Remove the socket of a killed agent; never one that answers, never another kind of file."""
    try:
        if not stat.S_ISSOCK(path.lstat().st_mode):
            raise UsageError(f"http.socket {path}: the file there is not a socket; remove it or give another path")
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
        except OSError:  # its backlog is full: an agent listens
            pass
    raise UsageError(f"http.socket {path}: another agent listens there; stop it, or give another run_dir")


def _listen_tcp(
    options: HttpSettings, routes: Routes, request_timeout_s: float, authenticator: TokenAuth
) -> HttpServer:
    if (options.tls_cert is None) != (options.tls_key is None):
        raise UsageError("http.tls_cert and http.tls_key: give both or neither")
    tls_context = None
    if options.tls_cert is not None and options.tls_key is not None:
        tls_context = ReloadingCertificate(options.tls_cert, options.tls_key).current_context
    return listen_tcp(
        options.bind,
        options.port,
        routes,
        option="http.port",
        advice="give another http.bind or http.port",
        name="the agent's port",
        max_connections=MAX_CONNECTIONS,
        request_timeout_s=request_timeout_s,
        response_timeout_s=RESPONSE_TIMEOUT_S,
        authenticator=authenticator,
        tls_context=tls_context,
    )


class ReloadingCertificate:
    """The agent's TLS certificate, read for each connection, since it is renewed on disk.

    A renewed certificate that cannot be loaded is logged once, and the old one stays in use: half of a renewal must not
    close the port.
    """

    def __init__(self, cert: Path, key: Path) -> None:
        """Raises UsageError."""
        self._cert = cert
        self._key = key
        self._context = self._load()
        self._problem = ""

    def current_context(self) -> ssl.SSLContext:
        """The newest valid one."""
        problem = ""
        try:
            self._context = self._load()
        except UsageError as error:
            problem = str(error)
            if problem != self._problem:
                _log.warning("%s; the old certificate stays in use", problem)
        self._problem = problem
        return self._context

    def _load(self) -> ssl.SSLContext:
        """Load certificate and key. Raises UsageError, naming both files."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        try:
            # An encrypted key would prompt on the terminal: the empty password makes it fail instead.
            context.load_cert_chain(self._cert, self._key, password="")
        except (OSError, ValueError) as error:  # ssl.SSLError is an OSError
            why = (isinstance(error, OSError) and error.strerror) or str(error)
            raise UsageError(
                f"http.tls_cert {self._cert}, http.tls_key {self._key}: no certificate with its key can be read: {why}"
            ) from None
        return context
