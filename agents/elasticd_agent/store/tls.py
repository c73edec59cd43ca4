"""Do these PEM files make an authority, and a certificate with its key? And who is trusted that an authority signed?

It exists so that the command line and agent.toml find the same mistakes, each in its own words, before anybody
connects; and so that all our connections trust the same. It opens no socket, and asks nobody for a passphrase.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from elasticd_agent.model.job import Tls

if TYPE_CHECKING:
    from ssl import SSLContext


class _PassphraseRequested(Exception):
    """The key is under a passphrase."""


def find_problem(tls: Tls) -> tuple[Literal["ca", "cert", "key"], str] | None:
    """Which of the files is wrong and the end of a sentence about it; None. The files are there and can be read."""
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

        def ask() -> str:
            raise _PassphraseRequested

        try:
            context.load_cert_chain(tls.cert, tls.key, password=ask)
        except _PassphraseRequested:
            return "key", f"{str(tls.key)!r} is protected by a passphrase; give one that is not"
        except ssl.SSLError as error:
            mismatch = error.reason == "KEY_VALUES_MISMATCH"
            why = "do not belong together" if mismatch else "are not a certificate and its key in PEM form"
            return "cert", f"{str(tls.cert)!r} and key {str(tls.key)!r} {why}"
    return None


def tls_context(ca: Path | None) -> SSLContext:
    """For a client: trusts `ca`, or whom the system trusts. Raises OSError, ValueError."""
    import ssl

    context = ssl.create_default_context(cafile=None if ca is None else str(ca))
    # Set from Python 3.13 on: refuses authorities without a key usage, as openssl makes them by itself. gRPC, etcd and
    # curl take them, and a node must not lose the others, or its store, by an upgrade of its Python.
    context.verify_flags &= ~ssl.VERIFY_X509_STRICT
    return context
