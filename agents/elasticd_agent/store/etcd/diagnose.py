"""Finds out why an endpoint that has never answered does not: a typing mistake, or an outage.

gRPC reports UNAVAILABLE for both, and prints failed TLS handshakes to standard error. So TLS is tried here before gRPC,
and a plain endpoint with which gRPC failed is identified here. Every wait has a deadline.
"""

from __future__ import annotations

import socket
import ssl
import time

from elasticd.errors import StoreRefused, StoreUnavailable
from elasticd_agent.model.job import Tls
from elasticd_agent.store.etcd.errors import not_etcd_message
from elasticd_agent.store.tls import find_problem, tls_context
from elasticd_agent.system.bounded_io import DeadlineExceeded, run_within
from elasticd_agent.system.network.addresses import format_endpoint

# RFC 9113, 3.4: the client's preface, followed by a SETTINGS frame; the server answers with a SETTINGS frame.
_EMPTY_SETTINGS_FRAME = b"\x00\x00\x00\x04\x00\x00\x00\x00\x00"
_HTTP2_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + _EMPTY_SETTINGS_FRAME
_FRAME_TYPE, _SETTINGS = 3, 4
_NOT_YET_VALID_CODE = 9
"""X509_V_ERR_CERT_NOT_YET_VALID (openssl/x509_vfy.h)."""


def make_context(tls: Tls) -> ssl.SSLContext:
    """Raises StoreRefused for files that cannot be read, are no PEM, or do not belong together."""
    try:
        if (problem := find_problem(tls)) is not None:
            raise StoreRefused("TLS to the store: {} {}".format(*problem))
        context = tls_context(tls.ca)
        if tls.cert is not None:
            context.load_cert_chain(tls.cert, tls.key)
    except OSError as error:
        files = ", ".join(str(path) for path in (tls.ca, tls.cert, tls.key) if path is not None)
        raise StoreRefused(f"TLS to the store: one of {files}: {error}") from error
    context.set_alpn_protocols(["h2"])
    return context


def check_tls(host: str, port: int, tls: ssl.SSLContext, timeout_s: float) -> None:
    """Returns if the endpoint uses TLS, we trust it and it accepts us. Raises StoreRefused or StoreUnavailable."""
    where = f"https://{format_endpoint(host, port)}"
    deadline = time.monotonic() + timeout_s
    try:
        with _connect(host, port, deadline) as plain, tls.wrap_socket(plain, server_hostname=host) as secure:
            # With TLS 1.3 a server rejects our certificate only now.
            secure.sendall(_HTTP2_PREFACE)
            secure.recv(9)
    except ssl.SSLCertVerificationError as error:
        if error.verify_code == _NOT_YET_VALID_CODE:  # at a boot the clock may not be set yet
            raise StoreUnavailable(
                f"the certificate of etcd at {where} is not valid yet: is the clock of this machine right?"
            ) from error
        raise StoreRefused(
            f"the certificate of etcd at {where} is not valid: {error.verify_message}; check its dates, the names "
            "in it, and that the CA given is the one that signed it"
        ) from error
    except (ssl.SSLEOFError, ssl.SSLZeroReturnError, ConnectionError) as error:
        if isinstance(error, ConnectionRefusedError) or not _speaks_http2(host, port, deadline):
            raise StoreUnavailable(f"etcd at {where} cannot be reached: {error}") from error
        raise StoreRefused(f"etcd at {where} does not use TLS; write http:// instead of https://") from error
    except ssl.SSLError as error:
        reason = (error.reason or str(error)).lower().replace("_", " ")
        if "wrong version" in reason or "record layer" in reason or "http request" in reason:
            raise StoreRefused(f"etcd at {where} does not use TLS; write http:// instead of https://") from error
        if "alert" in reason:
            raise StoreRefused(
                f"etcd at {where} does not accept our certificate ({reason}); give a certificate and key that "
                "its CA signed"
            ) from error
        raise StoreRefused(f"etcd at {where} and we do not agree on TLS: {reason}") from error
    except OSError as error:  # no route, no such name, or no answer in time
        raise StoreUnavailable(f"etcd at {where} cannot be reached: {error}") from error


def find_mismatch(host: str, port: int, timeout_s: float) -> str | None:
    """Why a plain endpoint that accepts connections is not a plain etcd; None: it may be one."""
    where = format_endpoint(host, port)
    deadline = time.monotonic() + timeout_s
    try:
        answer = _read_http2_answer(host, port, deadline)
        if answer and not _is_settings_frame(answer):
            return not_etcd_message(where, "another kind of server answers there")
        if not answer and _speaks_tls(host, port, deadline):
            return f"etcd at {where} uses TLS; write https:// before the endpoint"
    except OSError:  # no server, or no answer in time: probably an outage
        return None
    return None


def _connect(host: str, port: int, deadline: float) -> socket.socket:
    """Raises OSError. A resolver has no deadline of its own, so it runs in a thread that may stay behind."""
    failed: OSError = socket.gaierror(f"no address is known for the name {host}")
    try:
        resolved = run_within(
            max(deadline - time.monotonic(), 0), lambda: socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        )
    except (socket.gaierror, DeadlineExceeded):
        raise failed from None
    for number, (*_, address) in enumerate(resolved):
        # The first may belong to a machine that is down, or to an IPv6 that leads nowhere.
        share_s = max((deadline - time.monotonic()) / (len(resolved) - number), 0.001)
        try:
            connection = socket.create_connection((str(address[0]), port), timeout=share_s)
        except OSError as error:
            failed = error
        else:
            connection.settimeout(max(deadline - time.monotonic(), 0.001))
            return connection
    try:
        raise failed
    finally:
        del failed  # or this frame and the error would hold each other


def _read_http2_answer(host: str, port: int, deadline: float) -> bytes:
    with _connect(host, port, deadline) as plain:
        try:
            plain.sendall(_HTTP2_PREFACE)
            answer = plain.recv(9)
        except ConnectionError:
            return b""
    # A TLS server may answer garbage with an alert.
    return b"" if answer[:1] == b"\x15" else answer


def _is_settings_frame(answer: bytes) -> bool:
    return len(answer) > _FRAME_TYPE and answer[_FRAME_TYPE] == _SETTINGS


def _speaks_http2(host: str, port: int, deadline: float) -> bool:
    try:
        return _is_settings_frame(_read_http2_answer(host, port, deadline))
    except OSError:
        return False


def _speaks_tls(host: str, port: int, deadline: float) -> bool:
    unchecked = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    unchecked.check_hostname = False
    unchecked.verify_mode = ssl.CERT_NONE
    with _connect(host, port, deadline) as plain:
        try:
            with unchecked.wrap_socket(plain, server_hostname=host):
                return True
        except ssl.SSLError as error:
            return "ALERT" in (error.reason or "")
