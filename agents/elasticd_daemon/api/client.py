"""The client of an agent's HTTP API: over its unix socket on this node, or over TCP with a token, with or without TLS.

Answers are whole and bounded in size and time; every failure is one sentence. It follows no redirect, uses no proxy and
keeps no connection. The token is in no message and no repr.

Every request is bounded in time and in bytes, the handshake and the body included. An error names the agent's address
and, where it is known, what to do about it, since the reader is a person at a shell: a wrong scheme, a certificate for
another name, a socket without access.
"""

from __future__ import annotations

import contextlib
import http.client
import os
import socket
import ssl
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import quote, urlencode, urlsplit

from elasticd import bounded_json
from elasticd.errors import ElasticdError, UsageError
from elasticd_agent.model.agent_address import AGENT_VARIABLE, DEFAULT_SOCKET
from elasticd_agent.store.tls import tls_context
from elasticd_agent.system.network.control_socket import short_path
from elasticd_agent.system.network.http_auth import read_token
from elasticd_daemon.api.schema import Answer

MAX_RESPONSE_BYTES = 64 << 20
"""Evidence of a thousand ranks is some megabytes of JSON, and so is a list of ten thousand jobs."""
DEFAULT_PORT = 9411
_NAME_MISMATCH_CODES = (62, 64)
"""X509_V_ERR_HOSTNAME_MISMATCH, X509_V_ERR_IP_ADDRESS_MISMATCH (openssl/x509_vfy.h)."""
_ADDRESS_FORMS = f"unix:{DEFAULT_SOCKET}, http://HOST:PORT or https://HOST:PORT"


class Unreachable(ElasticdError):
    """No valid answer in time. The text says why, and from where."""


class AnswerLost(Unreachable):
    """The agent was reached, and may have done what was asked."""


class RequestFailed(ElasticdError):
    """The agent refused; the text is its sentence."""


@dataclass(frozen=True, slots=True)
class Reply:
    """An answer with any status."""

    code: int
    body: bytes
    headers: Mapping[str, str] = field(default_factory=dict)
    max_json_values: int = MAX_RESPONSE_BYTES

    def document(self) -> Answer:
        """The answer's JSON object. Raises Unreachable for anything else."""
        try:
            parsed = bounded_json.loads(self.body, self.max_json_values)
        except (ValueError, RecursionError):
            parsed = None
        if not isinstance(parsed, dict):
            raise Unreachable(f"the answer is not from an elasticd agent: {self.body[:60]!r}")
        return parsed

    def result(self) -> Answer:
        """The JSON object of a request that succeeded. Raises RequestFailed, UsageError for a request that is invalid,
        Unreachable where the agent's store or another node does not answer.
        """
        if self.code == 400:
            raise UsageError(self.why)
        if self.code == 401 and "a token is needed" in self.why:
            raise RequestFailed("a token is needed: --token-file FILE, with the token in the agent's http.token_file")
        if self.code >= 500:
            raise Unreachable(self.why)
        if not 200 <= self.code < 300:
            raise RequestFailed(self.why)
        return self.document()

    @property
    def why(self) -> str:
        try:
            return str(self.document().get("error", f"HTTP {self.code}"))
        except Unreachable:
            return f"HTTP {self.code} without a reason: it may not be an elasticd agent"


@dataclass(frozen=True, slots=True)
class AgentClient:
    """One agent, at a unix socket or at host:port."""

    socket: Path | None
    host: str = ""
    port: int = 0
    token: str | None = field(default=None, repr=False)
    tls: ssl.SSLContext | None = field(default=None, repr=False)
    tls_name: str | None = None  #: the name in its certificate, if it is not `host`
    auth_scheme: str = "Bearer"
    max_bytes: int = MAX_RESPONSE_BYTES
    max_json_values: int = MAX_RESPONSE_BYTES

    def __str__(self) -> str:
        if self.socket is not None:
            return str(self.socket)
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{'https' if self.tls else 'http'}://{host}:{self.port}"

    def get(self, path: str, query: Mapping[str, object] | None = None, within_s: float = 30.0) -> Reply:
        return self.request("GET", path, query, within_s=within_s)

    def post(
        self, path: str, body: bytes = b"", content_type: str = "application/json", within_s: float = 30.0,
        query: Mapping[str, object] | None = None,
    ) -> Reply:  # fmt: skip
        return self.request("POST", path, query, body=body, content_type=content_type, within_s=within_s)

    def request(
        self,
        method: str,
        path: str,
        query: Mapping[str, object] | None = None,
        *,
        body: bytes = b"",
        content_type: str = "",
        within_s: float = 30.0,
    ) -> Reply:
        """Raises Unreachable, AnswerLost once it is connected. `query` values that are None are left out."""
        given = {name: str(value) for name, value in (query or {}).items() if value is not None}
        target = path + (f"?{urlencode(given, errors='backslashreplace', quote_via=quote)}" if given else "")
        headers = {"Connection": "close"}
        if self.token is not None:
            headers["Authorization"] = f"{self.auth_scheme} {self.token}"
        if content_type:
            headers["Content-Type"] = content_type
        until = time.monotonic() + within_s
        connection = _Connection(self, within_s)
        failure = Unreachable
        try:
            with contextlib.closing(connection):
                connection.connect()
                failure = AnswerLost
                with contextlib.suppress(BrokenPipeError):  # it answered before it had read everything
                    connection.request(method, target, body=body or None, headers=headers)
                sock = connection.sock  # http.client drops it once it has the head
                answer = connection.getresponse()
                with contextlib.closing(answer):
                    data = _read_body(sock, answer, until, self.max_bytes)
                headers = {name.lower(): value for name, value in answer.getheaders()}
                return Reply(answer.status, data, headers, self.max_json_values)
        except TimeoutError:
            raise failure(f"the agent at {self} did not answer within {within_s:.0f} s") from None
        except ssl.SSLCertVerificationError as error:
            advice = "--ca FILE names the authority that signed it"
            if error.verify_code in _NAME_MISMATCH_CODES:
                advice = "use one of the names or addresses in it"
            why = error.verify_message.rstrip(".")
            raise Unreachable(f"{self}: its certificate cannot be trusted: {why}; {advice}") from None
        except ssl.SSLError as error:
            raise Unreachable(f"{self}: no TLS: {error.reason or error}; it may use http://") from None
        except (http.client.HTTPException, ValueError) as error:
            tls = "" if self.tls is not None or self.socket is not None else "; it may use https://"
            raise failure(f"{self} does not answer as an agent: {type(error).__name__}{tls}") from None
        except OSError as error:
            raise failure(f"no agent answers at {self}: {error.strerror or error}{self._advice(error)}") from None

    def _advice(self, error: OSError) -> str:
        if self.socket is None:
            return ""
        if isinstance(error, PermissionError):
            return "; access is for root and http.users and http.groups of agent.toml"
        return f"; is `elasticd agent` running on this node? --agent or {AGENT_VARIABLE} names another one"


class _Connection(http.client.HTTPConnection):
    def __init__(self, client: AgentClient, within_s: float) -> None:
        super().__init__(client.host or "elasticd", client.port or None, timeout=within_s)
        self._client = client
        self._within_s = within_s

    def connect(self) -> None:
        client = self._client
        if client.socket is not None:
            self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            self.sock.settimeout(self._within_s)
            with short_path(client.socket) as name:
                self.sock.connect(name)
            return
        self.sock = socket.create_connection((client.host, client.port), self._within_s)
        if client.tls is not None:
            plain = self.sock
            try:
                self.sock = client.tls.wrap_socket(plain, server_hostname=client.tls_name or client.host)
            except BaseException:
                plain.close()
                raise


def _read_body(sock: socket.socket, answer: http.client.HTTPResponse, until: float, max_bytes: int) -> bytes:
    parts, size = [], 0
    while not answer.isclosed():  # from Python 3.11.8 and 3.12.2 on its last byte closes it, and the socket with it
        left = until - time.monotonic()
        if left <= 0:
            raise TimeoutError
        sock.settimeout(left)
        part = answer.read1(1 << 16)
        if not part:
            break
        parts.append(part)
        size += len(part)
        if size > max_bytes:
            raise Unreachable(f"the answer exceeds {max_bytes >> 20} MiB")
    if answer.length:  # read1 does not report an answer that ends early
        raise AnswerLost("the answer was truncated")
    return b"".join(parts)


def job_path(job: str) -> str:
    return f"/v1/jobs/{quoted(job)}"


def quoted(name: str) -> str:
    """A name as one part of a path; one that is not UTF-8 is nobody's, and is shown by its escapes."""
    return quote(name, safe="", errors="backslashreplace")


def fetch_status(client: AgentClient, job: str | None) -> Answer:
    """One job's status; without `job` all jobs and nodes. Raises what `Reply.result` raises."""
    if job is not None:
        return client.get(job_path(job)).result()
    return {**client.get("/v1/jobs").result(), "nodes": client.get("/v1/nodes").result()["nodes"]}


def make_client(where: str | None, token_file: Path | None, ca: Path | None) -> AgentClient:
    """Return the agent at `where`; default: this node's. Raises UsageError for an address or a token file that cannot
    be used.
    """
    if not where:
        return AgentClient(Path(DEFAULT_SOCKET))
    if where.startswith(("unix:", "/")):
        path = where.removeprefix("unix:")
        if not os.path.isabs(path) or path.endswith("/"):
            raise UsageError(f"--agent {where}: give an absolute path, as in {_ADDRESS_FORMS}")
        return AgentClient(Path(path))
    try:
        parts = urlsplit(where)
        host, port = parts.hostname, parts.port
    except ValueError:
        host, port, parts = None, None, urlsplit("")
    if parts.scheme not in ("http", "https") or not host or parts.path.strip("/") or parts.query or parts.username:
        raise UsageError(f"--agent {where}: give {_ADDRESS_FORMS}")
    token = None if token_file is None else read_token(token_file, "--token-file")
    tls = client_tls_context(ca) if parts.scheme == "https" else None
    return AgentClient(None, host, port or DEFAULT_PORT, token, tls)


def client_tls_context(ca: Path | None) -> ssl.SSLContext:
    """Trusts `ca`, or the system's authorities. Raises UsageError."""
    try:
        return tls_context(ca)
    except (OSError, ValueError) as error:
        why = (isinstance(error, OSError) and error.strerror) or str(error)
        raise UsageError(f"--ca {ca}: not a readable CA certificate: {why}") from None
