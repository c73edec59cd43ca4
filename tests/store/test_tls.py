"""Whom our connections trust does not depend on the Python they are made by (certificate_files.trusting)."""

from __future__ import annotations

import ssl
import subprocess
from pathlib import Path

import pytest

from elasticd_agent.store.tls import tls_context

PLAIN = """
openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -subj /CN=ca -keyout ca.key -out ca.pem
openssl req -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -subj /CN=x -keyout x.key -out x.csr
printf 'subjectAltName=DNS:node\n' >x.ext
openssl x509 -req -in x.csr -CA ca.pem -CAkey ca.key -CAcreateserial -extfile x.ext -out x.pem
"""
"""An authority without a key usage, as openssl makes it when nothing more is asked for."""


@pytest.fixture(autouse=True)
def python_3_13(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = ssl.create_default_context

    def strict(*args: object, **kwargs: object) -> ssl.SSLContext:
        context = plain(*args, **kwargs)  # type: ignore[arg-type]
        context.verify_flags |= ssl.VERIFY_X509_STRICT
        return context

    monkeypatch.setattr(ssl, "create_default_context", strict)


@pytest.fixture
def pki(tmp_path: Path) -> Path:
    subprocess.run(["bash", "-euc", PLAIN], cwd=tmp_path, check=True, capture_output=True, stdin=subprocess.DEVNULL)
    return tmp_path


def shake_hands(client: ssl.SSLContext, pki: Path, name: str) -> None:
    """In memory. Raises ssl.SSLError when the client does not trust the server."""
    serving = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    serving.load_cert_chain(pki / "x.pem", pki / "x.key")
    there, back = ssl.MemoryBIO(), ssl.MemoryBIO()
    ends = [client.wrap_bio(back, there, server_hostname=name), serving.wrap_bio(there, back, server_side=True)]
    for _ in range(4):
        for end in list(ends):
            try:
                end.do_handshake()
            except ssl.SSLWantReadError:
                continue
            ends.remove(end)
    assert ends == []


def test_ca_without_key_usage_is_trusted(pki: Path) -> None:
    shake_hands(tls_context(pki / "ca.pem"), pki, "node")
    with pytest.raises(ssl.SSLCertVerificationError):
        shake_hands(ssl.create_default_context(cafile=pki / "ca.pem"), pki, "node")


def test_wrong_name_or_ca_is_refused(pki: Path) -> None:
    with pytest.raises(ssl.SSLCertVerificationError, match="Hostname mismatch"):
        shake_hands(tls_context(pki / "ca.pem"), pki, "other")
    with pytest.raises(ssl.SSLCertVerificationError, match=r"self-signed|unable to get"):
        shake_hands(tls_context(None), pki, "node")
