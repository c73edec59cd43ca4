"""What is fuzzed: a parser of bytes from elsewhere, inputs to begin with, and the errors that it may raise."""

from __future__ import annotations

import json
import os
import pickle
import socket
import tempfile
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, fields
from pathlib import Path

from elasticd.errors import UsageError, WireError
from elasticd.heartbeat import record
from elasticd_agent.cli import tables
from elasticd_agent.config.job_file import read_job
from elasticd_agent.hangs import recordings
from elasticd_agent.hangs.collector import flight_recorder
from elasticd_agent.model.codec import LEAST_NUMBER, Document, Record
from elasticd_agent.node import keys
from elasticd_agent.node.api.progress import JobTimeline
from elasticd_agent.node.api.routes import ApiRoutes
from elasticd_agent.node.api.schema import JobStatus, JobSummary, NodeSummary
from elasticd_agent.node.dashboard.login import LoginCookies
from elasticd_agent.node.dashboard.routes import DashboardRoutes, ResponseCache
from elasticd_agent.system.http_auth import TokenAuth
from elasticd_agent.system.http_server import HttpRequest, _Handler
from tests.node.api.test_fuzzed import RECORDS
from tests.node.served import JOB, TOKEN, Served

RECORDING = {
    "version": "2.5", "comm_lib_version": "2.26", "pg_status": {"0": {"last_completed_collective": 3}},
    "entries": [{"collective_seq_id": 4, "pg_id": 0, "process_group": ["0", "default_pg"], "state": "started",
                 "profiling_name": "nccl:all_reduce", "input_sizes": [[2, 3]], "input_dtypes": ["Float"]}],
}  # fmt: skip
STORED = {
    b"Submission": (keys.SUBMISSIONS, "j"),
    b"Placement": (keys.PLACEMENTS, "j"),
    b"JobResult": (keys.RESULTS, "j"),
    b"NodeStatus": (keys.NODES, "a"),
    b"Cordon": (keys.CORDONS, "a"),
}
NOW = 1_800_000_000.0
EVENT = {"kind": "round_published", "wall": 1.5, "mono": 1.0, "round": 1, "world_size": 2, "reason": "start"}
REQUESTS = [
    b"GET /v1/jobs HTTP/1.1\r\nHost: x\r\n\r\n",
    b"GET /metrics HTTP/1.0\r\n\r\n",
    f"GET /v1/jobs/llama/logs?rank=0&offset=-5 HTTP/1.1\r\nAuthorization: Bearer {TOKEN}\r\n\r\n".encode(),
    f"POST /v1/jobs?id=x HTTP/1.1\r\nAuthorization: Bearer {TOKEN}\r\nContent-Type: application/toml\r\n"
    f"Content-Length: {len(JOB)}\r\n\r\n".encode() + JOB,
    b"POST /login HTTP/1.1\r\nContent-Type: application/x-www-form-urlencoded\r\nContent-Length: 9\r\n\r\ntoken=abc",
]  # fmt: skip


@dataclass(frozen=True, slots=True)
class Target:
    run: Callable[[bytes], object]
    seeds: list[bytes]
    errors: tuple[type[Exception], ...]
    """Anything else that `run` raises is a defect."""


def _records(data: bytes) -> None:
    kinds = {type(one).__name__.encode(): type(one) for one in RECORDS}
    name, _, text = data.partition(b" ")
    kind: type[Document] | None = kinds.get(name)
    if kind is not None:
        found = kind.from_json(kind.from_json(text).to_json())  # the first writing replaces lone surrogates
        assert kind.from_json(found.to_json()) == found
        assert len(found.to_json()) <= 2 * kind.MAX_BYTES
        _check_numbers(found)


def _check_numbers(record: Record) -> None:
    """Finite, and in the range that its kind names: pages and tables rely on it."""
    for one in fields(record):
        values = [getattr(record, one.name)] if one.name != "unknown" else []
        while values:
            match values.pop():
                case Record() as inner:
                    _check_numbers(inner)
                case tuple() as inner:
                    values += inner
                case float() as value:
                    assert record.FLOATS[0] <= value <= record.FLOATS[1], (record, one.name)
                case int() as value:
                    assert LEAST_NUMBER <= value < 1 << 63, (record, one.name)


def _stored(served: Served, data: bytes) -> None:
    """A record of the store in every list and page, and as the command line reads them."""
    name, _, value = data.partition(b" ")
    folder, key = STORED.get(name, ("", ""))
    if not folder:
        return
    store, api = served.store, served.server._listeners[0].routes
    before = store.read(folder + key)
    store.compare_and_swap(folder + key, None if before is None else before.version, value)
    try:
        found = {}
        for path in ("/v1/jobs", "/v1/nodes", "/v1/jobs/j", "/", "/jobs/j", "/?q=j&state=ended"):
            path, _, query = path.partition("?")
            answer = api.answer(HttpRequest("GET", path, query, "root"))
            assert answer.status in (200, 404), (path, answer.body[:300])
            found[path] = json.loads(answer.body) if path.startswith("/v1/") else {}
        jobs = [JobSummary.from_dict(row) for row in found["/v1/jobs"]["jobs"]]
        nodes = [NodeSummary.from_dict(row) for row in found["/v1/nodes"]["nodes"]]
        assert tables.jobs(jobs) and tables.queue(jobs) and tables.nodes(nodes)
        if "job" in found["/v1/jobs/j"]:
            JobStatus.from_dict(found["/v1/jobs/j"])
    finally:
        store.delete(folder + key)


def _job_file(data: bytes) -> None:
    for kind in ("toml", "json"):
        with suppress(UsageError):
            read_job(data, kind, "the job")


def _recording(data: bytes) -> None:
    found = json.loads(flight_recorder.as_json(data))
    one = recordings.parse(found) if isinstance(found, dict) else None
    if one is not None:
        recordings.compare({0: one, 1: one})


def _events(data: bytes) -> None:
    timeline = JobTimeline()
    for line in data.split(b"\n"):
        found = json.loads(line)
        if isinstance(found, dict):
            timeline.feed(found)
    json.dumps(timeline.progress("n1", 200.0).to_dict())


def _dashboard(api: ApiRoutes, token: TokenAuth, tls: bool) -> DashboardRoutes:
    cookies = LoginCookies(token, lambda: NOW, tls=tls)
    return DashboardRoutes(api, token, cookies, "0.1.0", _overviews=ResponseCache(0.0), _jobs=ResponseCache(0.0))


@contextmanager
def targets() -> Iterator[dict[str, Target]]:
    with (
        tempfile.TemporaryDirectory() as place,
        closing(Served(Path(place) / "one")) as served,
        closing(Served(Path(place) / "two", front=_dashboard)) as pages,
        socket.create_server(("127.0.0.1", 0)) as listener,
    ):
        served.submit()
        beat = Path(place) / "beat"
        record.create(beat)

        def beats(data: bytes) -> None:
            beat.write_bytes(data[: record.SIZE].ljust(record.SIZE, b"\0"))
            with closing(record.HeartbeatReader(beat)) as reader:
                reader.read()

        def http(data: bytes) -> None:
            client = socket.create_connection(listener.getsockname())
            server, _ = listener.accept()
            with client, server:
                client.sendall(data[:60_000])
                client.shutdown(socket.SHUT_WR)
                _Handler(server, ("127.0.0.1", 1), served.server._listeners[1])
                server.close()
                answer = client.recv(1 << 16)
                assert answer.startswith(b"HTTP/1.1 ") or not answer, answer[:80]
                assert b" 500 " not in answer[:14], answer

        seeds = [f"{type(one).__name__} ".encode() + one.to_json() for one in RECORDS]
        dumps = [json.dumps(RECORDING).encode(), pickle.dumps(RECORDING, 2)]
        yield {
            "records": Target(_records, seeds, (WireError,)),
            "stored": Target(lambda data: _stored(pages, data), seeds, ()),
            "jobs": Target(_job_file, [JOB, b'{"command": ["train.py"], "workdir": "/tmp"}'], ()),
            "beats": Target(beats, [beat.read_bytes()], (WireError,)),
            "recordings": Target(_recording, dumps, (ValueError, RecursionError)),
            "events": Target(_events, [json.dumps(EVENT).encode()], (ValueError, RecursionError)),
            "http": Target(http, REQUESTS, (OSError,)),
        }


def corpus(folder: Path, name: str) -> list[bytes]:
    """Inputs that were kept."""
    found = folder / name
    return [(found / file).read_bytes() for file in sorted(os.listdir(found))] if found.is_dir() else []
