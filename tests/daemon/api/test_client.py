"""The client over Python's HTTP library, whose behaviour differs between releases."""

from __future__ import annotations

from collections.abc import Iterator
from http.client import HTTPResponse
from pathlib import Path

import pytest

from tests.daemon.served import Served


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Served]:
    made = Served(tmp_path / "it")
    yield made
    made.close()


@pytest.mark.parametrize("way", ["unix", "tcp"])
def test_answer_is_complete_when_its_last_byte_closes_it(
    served: Served, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    """As from Python 3.11.8, 3.12.2 and 3.13 on; the socket is closed with it."""
    closed = []
    plain = HTTPResponse.read1

    def read1(self: HTTPResponse, n: int = -1) -> bytes:
        part = plain(self, n)
        if self.length == 0 and not self.isclosed():
            self._close_conn()  # type: ignore[attr-defined]
        closed.append(self.isclosed())
        return part

    monkeypatch.setattr(HTTPResponse, "read1", read1)
    client = served.unix() if way == "unix" else served.tcp()
    reply = client.get("/v1/nodes")
    assert (reply.code, reply.document()["nodes"]) == (200, [])
    assert closed[-1], "or this was not tried"
