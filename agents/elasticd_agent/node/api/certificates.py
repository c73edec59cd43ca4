"""The agent's TLS certificate, reloaded when it has been renewed on disk.

A renewed certificate that cannot be loaded is logged once, and the old one stays in use: half of a renewal must not
close the port.
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
    """Thread-safe. The constructor raises UsageError for invalid files."""

    def __init__(self, cert: Path, key: Path) -> None:
        self._cert = cert
        self._key = key
        self._lock = threading.Lock()
        self._stamp = self._file_stamps()
        self._context = self._load()

    def context(self) -> ssl.SSLContext:
        """The newest valid one."""
        with self._lock:
            stamp = self._file_stamps()
            if stamp != self._stamp:
                self._stamp = stamp
                try:
                    self._context = self._load()
                except UsageError as error:
                    _log.warning("%s; the old certificate stays in use", error)
            return self._context

    def _file_stamps(self) -> tuple[object, ...]:
        """Changes whenever one of the files does."""
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
            # An encrypted key would prompt on the terminal: the empty password makes it fail instead.
            context.load_cert_chain(self._cert, self._key, password="")
        except (OSError, ValueError) as error:  # ssl.SSLError is an OSError
            why = (isinstance(error, OSError) and error.strerror) or str(error)
            raise UsageError(
                f"http.tls_cert {self._cert}, http.tls_key {self._key}: no certificate with its key can be read: {why}"
            ) from None
        return context
