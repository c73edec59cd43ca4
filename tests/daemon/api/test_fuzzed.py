"""Arbitrary bytes from the network or the store: no crash, no change without the token, nothing left open."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from elasticd.errors import WireError
from elasticd_agent.model.codec import Document
from elasticd_daemon.records import (
    Cordon,
    JobResult,
    KnownNode,
    NodeStatus,
    Placement,
    RoundSummary,
    RunnerStatus,
    SlotAssignment,
    Submission,
)
from elasticd_daemon.runners.spec import RunnerExit, RunnerSpec
from tests.daemon.served import DEADLINE, JOB, TOKEN, Served, fds

RECORDS: list[Document] = [
    Submission("j", 1, "{}", 1, 2, 1, 8, "me", 1.5),
    Placement("j", 1, (SlotAssignment("a", (0, 1)),), "why"),
    JobResult("j", 1, "failed", 1, "why", nodes=("a",)),
    NodeStatus("a", "i", 4, runners=(RunnerStatus("j", 1, (0,), "running"),)),
    KnownNode("b", "h:1", 1.5, 1_800_000_000.0, ("j",)),
    Cordon("a", True, "why"),
    RunnerSpec("j", 1, "a", (0,), "{}"),
    RunnerExit("j", 1, 0, "succeeded", "why"),
]
FORGED = [
    JobResult("j", 1, "failed", 1, "why", ended_at=-1e17),
    JobResult("j", 1, "failed", 1, "why", rounds=(RoundSummary(1, 2, "start", 1e300),)),
    JobResult("j", 1, "failed", -(10**9), "why"),
    NodeStatus("a", "i", 4, memory_bytes=-(10**9)),
    Submission("j", 1, "{}", 1, 2, 1, 8, "me", -1.0),
    Cordon("a", True, "why", cordoned_at=1e18),
    KnownNode("b", lost_s=0.0, lost_at=1e18),
]
FEW = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.fixture
def one(tmp_path: Path) -> Iterator[Served]:
    before, threads = fds(), threading.active_count()
    made = Served(tmp_path / "it")
    made.announce()
    made.submit()
    made.log(1, 0, "stdout", "hello\n")
    yield made
    assert made.tcp().get("/v1/jobs").code == 200, "it still answers"
    made.close()
    assert threading.active_count() == threads
    assert fds() <= before, "what an earlier test has left may go meanwhile"


def said(served: Served, data: bytes) -> bytes:
    """What comes back to these bytes when nothing follows them."""
    with served.connected() as sock, contextlib.suppress(OSError):
        sock.settimeout(DEADLINE)
        sock.sendall(data)
        sock.shutdown(socket.SHUT_WR)
        return b"".join(iter(lambda: sock.recv(65536), b""))
    return b""


PLACES = "v1 jobs nodes here llama n1 cancel logs dump explain cordon drain uncordon status metrics"
words = st.sampled_from(
    [*PLACES.split(), "..", ".", "", "%2e%2e", "%2f", "%00", "%ff", "*", "http:", "llama.1", "n1\u00e4"]
)
paths = st.lists(words | st.text(max_size=4), max_size=6).map(lambda parts: "/" + "/".join(parts))
queries = st.text(max_size=12) | st.lists(
    st.tuples(
        st.sampled_from(["rank", "round", "stream", "offset", "limit", "node", "number", "id", "token", "x"]),
        st.sampled_from(["0", "1", "-1", "stdout", "../..", "n1", "%00", "9" * 30, ""]) | st.text(max_size=4),
    ).map("=".join),
    max_size=4,
).map("&".join)
methods = st.sampled_from(["GET", "POST", "HEAD", "PUT", "DELETE", "OPTIONS", "TRACE", "get", "CONNECT", "\u00fc"])
bodies = st.binary(max_size=60) | st.sampled_from([JOB, b"{}", b"[]", b'{"reason": 1}', b"[" * 20_000, b"\x00" * 99])
names = st.text(st.characters(min_codepoint=33, max_codepoint=126), min_size=1, max_size=8)
headers = st.lists(
    st.tuples(
        st.sampled_from(["Content-Length", "Content-Type", "Transfer-Encoding", "Expect", "Host", "Connection"])
        | names,
        st.sampled_from(["0", "5", "-1", "application/toml", "application/json", "chunked", "100-continue", "close"])
        | st.text(st.characters(min_codepoint=32, max_codepoint=255), max_size=8),
    ),
    max_size=4,
)


def request(method: str, path: str, query: str, head: list[tuple[str, str]], body: bytes) -> bytes:
    lines = [f"{method} {path}?{query} HTTP/1.1", *(f"{name}: {value}" for name, value in head)]
    return "\r\n".join(lines).encode("utf-8", "replace") + b"\r\n\r\n" + body


def test_requests_without_token_change_and_reveal_nothing(one: Served) -> None:
    before = one.store.list("/")

    @FEW
    @given(methods, paths, queries, headers, bodies)
    def fuzz(method: str, path: str, query: str, head: list[tuple[str, str]], body: bytes) -> None:
        answer = said(one, request(method, path, query, head, body))
        for secret in (b"hello", b"llama has", b"train.py", TOKEN.encode()):
            assert secret not in answer
        plain = "/" + path.lstrip("/")  # as http.server reads it
        assert not answer or int(answer.split()[1]) >= 300 or plain in ("/metrics", "/healthz", "/readyz")

    fuzz()
    assert one.store.list("/") == before


def test_requests_with_token_get_json_and_never_a_500(one: Served) -> None:
    @FEW
    @given(methods, paths, queries, headers, bodies)
    def fuzz(method: str, path: str, query: str, head: list[tuple[str, str]], body: bytes) -> None:
        known = [("Authorization", f"Bearer {TOKEN}"), *head]
        if "Content-Length" not in dict(head) and method == "POST":
            known.append(("Content-Length", str(len(body))))
        answer = said(one, request(method, path, query, known, body))
        if answer and method != "HEAD" and b"\r\n\r\n" in answer:
            top, _, rest = answer.partition(b"\r\n\r\n")
            if b"100 Continue" in top:
                top, _, rest = rest.partition(b"\r\n\r\n")
            assert int(top.split()[1]) != 500, (top, rest)
            if b"application/json" in top:
                assert isinstance(json.loads(rest), dict)

    fuzz()


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)


@pytest.mark.parametrize("record", RECORDS, ids=lambda record: type(record).__name__)
def test_records_round_trip_or_raise_wire_error(record: Document) -> None:
    kind = type(record)
    assert kind.from_json(record.to_json()) == record
    fields: list[str] = sorted(json.loads(record.to_json()))

    @settings(max_examples=40, deadline=None)
    @given(st.sampled_from(fields), json_values)
    def one_field(name: str, value: Any) -> None:
        _read(kind, json.dumps({**json.loads(record.to_json()), name: value}).encode())

    @settings(max_examples=40, deadline=None)
    @given(st.binary(max_size=80) | json_values.map(lambda value: json.dumps(value).encode()))
    def anything(data: bytes) -> None:
        _read(kind, data)

    @settings(max_examples=40, deadline=None)
    @given(st.integers(0, len(record.to_json())), st.binary(max_size=4))
    def torn(at: int, data: bytes) -> None:
        whole = record.to_json()
        _read(kind, whole[:at] + data + whole[at + len(data) :])
        _read(kind, whole[:at])

    one_field()
    anything()
    torn()


@pytest.mark.parametrize("record", FORGED, ids=range(len(FORGED)))
def test_number_out_of_range_is_refused_where_the_record_is_read(record: Document) -> None:
    """One forged record must not break the lists of all jobs and nodes."""
    with pytest.raises(WireError, match="expected a number from"):
        type(record).from_json(record.to_json())


def _read(kind: type[Document], data: bytes) -> None:
    with contextlib.suppress(WireError):
        kind.from_json(data).to_json()
