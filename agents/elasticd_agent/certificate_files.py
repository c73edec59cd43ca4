"""Do these PEM files make an authority, and a certificate with its key? Looked at before anybody connects.

It exists so that the command line and agent.toml find the same mistakes, each in its own words. It opens no socket, and
asks nobody for a passphrase.
"""

from __future__ import annotations

import time
from typing import Literal

from elasticd_agent.config import Tls


class _Asked(Exception):
    """The key is under a passphrase."""


def wrong(tls: Tls) -> tuple[Literal["ca", "cert", "key"], str] | None:
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
            raise _Asked

        try:
            context.load_cert_chain(tls.cert, tls.key, password=ask)
        except _Asked:
            return "key", f"{str(tls.key)!r} is protected by a passphrase; give one that is not"
        except ssl.SSLError as error:
            mismatch = error.reason == "KEY_VALUES_MISMATCH"
            why = "do not belong together" if mismatch else "are not a certificate and its key in PEM form"
            return "cert", f"{str(tls.cert)!r} and key {str(tls.key)!r} {why}"
    return None
