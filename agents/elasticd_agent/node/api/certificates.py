"""The daemon's TLS certificate, loaded again when it has been renewed on disk.

It exists because a daemon outlives its certificates. What cannot be loaded is said once, and the one before goes on
being shown: half of a renewal must not close the port.
"""

from __future__ import annotations

import logging
import os
import ssl
import threading
from pathlib import Path

from elasticd.errors import UsageError

_log = logging.getLogger("elasticd.http")


class Certificates:
    """Thread-safe. Raises UsageError at the start when the files make no certificate."""

    def __init__(self, cert: Path, key: Path) -> None:
        self._cert, self._key = cert, key
        self._lock = threading.Lock()
        self._stamp = self._file_stamps()
        self._context = self._load()

    def context(self) -> ssl.SSLContext:
        """The newest that could be loaded."""
        with self._lock:
            stamp = self._file_stamps()
            if stamp != self._stamp:
                self._stamp = stamp
                try:
                    self._context = self._load()
                except UsageError as error:
                    _log.warning("%s; the certificate from before goes on being shown", error)
            return self._context

    def _file_stamps(self) -> tuple[object, ...]:
        """Whatever changes when one of the files does; a file that is away for a moment has not changed."""
        found: list[object] = []
        for path in (self._cert, self._key):
            try:
                one = os.stat(path)
            except OSError:
                found.append(None)
            else:
                found.append((one.st_ino, one.st_size, one.st_mtime_ns, one.st_ctime_ns))
        return tuple(found)

    def _load(self) -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        try:
            # A key under a passphrase would ask on the terminal, and wait: an empty one is tried instead.
            context.load_cert_chain(self._cert, self._key, password="")
        except (OSError, ValueError) as error:  # ssl.SSLError is an OSError
            why = (isinstance(error, OSError) and error.strerror) or str(error)
            raise UsageError(
                f"http.tls_cert {self._cert}, http.tls_key {self._key}: no certificate with its key can be read: {why}"
            ) from None
        return context
