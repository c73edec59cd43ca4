"""Checks PEM files before the first connection, and defines which certificates a client trusts."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from elasticd_agent.model.job import Tls

if TYPE_CHECKING:
    from ssl import SSLContext


class _PassphraseRequested(Exception):
    """The key has a passphrase."""


def find_problem(tls: Tls) -> tuple[Literal["ca", "cert", "key"], str] | None:
    """Which file is wrong, and the end of a sentence about it. The files must be readable."""
    import ssl  # 20 ms that only TLS needs

    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    if tls.ca is not None:
        try:
            context.load_verify_locations(tls.ca)
        except ssl.SSLError:
            return "ca", f"{str(tls.ca)!r} holds no certificate in PEM form"
        ends = [ssl.cert_time_to_seconds(str(ca["notAfter"])) for ca in context.get_ca_certs()]
        if ends and max(ends) < time.time():
            day = time.strftime("%Y-%m-%d", time.gmtime(max(ends)))
            return "ca", f"{str(tls.ca)!r} expired on {day}; get a new one"
    if tls.cert is not None and tls.key is not None:

        def reject_passphrase() -> str:
            raise _PassphraseRequested

        try:
            context.load_cert_chain(tls.cert, tls.key, password=reject_passphrase)
        except _PassphraseRequested:
            return "key", f"{str(tls.key)!r} is protected by a passphrase; give one that is not"
        except ssl.SSLError as error:
            mismatch = error.reason == "KEY_VALUES_MISMATCH"
            why = "do not belong together" if mismatch else "are not a certificate and its key in PEM form"
            return "cert", f"{str(tls.cert)!r} and key {str(tls.key)!r} {why}"
    return None


def tls_context(ca: Path | None) -> SSLContext:
    """The context of a client that trusts `ca`, or the system's authorities. Raises OSError, ValueError."""
    import ssl

    context = ssl.create_default_context(cafile=None if ca is None else str(ca))
    # Python 3.13 and newer set it and reject authorities without a key usage, openssl's default. gRPC, etcd and curl
    # accept them, and a node must not lose its peers or its store by an upgrade of Python.
    context.verify_flags &= ~ssl.VERIFY_X509_STRICT
    return context
