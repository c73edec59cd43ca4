"""What is fuzzed: a parser of bytes from elsewhere, inputs to begin with, and the errors that it may raise."""

from __future__ import annotations

import json
import os
import shutil
import socket
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, cast

from elasticd import bounded_json
from elasticd.checkpointing.storage import manifest
from elasticd.errors import UsageError, WireError
from elasticd.heartbeat import record
from elasticd_agent.hangs import recordings
from elasticd_agent.hangs.collector import ras
from elasticd_agent.hangs.explain import load, locate
from elasticd_agent.hangs.explain.flight import compare_groups
from elasticd_agent.hangs.explain.json_report import document
from elasticd_agent.hangs.explain.text import page
from elasticd_agent.model.codec import MIN_NUMBER, Document, Record
from elasticd_agent.model.keys import Keys
from elasticd_agent.model.log_events import decode
from elasticd_agent.model.records import Exclusion, Failure, Member, NodeRecord, QuarantinedSlot, Round, StoreLife
from elasticd_agent.model.reports import GroupTail, HangReport, RankReport
from elasticd_agent.rendezvous.probe import ProbeAlive
from elasticd_agent.system.network.http_auth import TokenAuth
from elasticd_agent.system.network.http_server import HttpRequest, _RequestHandler
from elasticd_agent.telemetry.report import Report
from elasticd_agent.telemetry.timeline import JobTimeline
from elasticd_agent.torchrun_plugin.member import JobClosed
from elasticd_agent.torchrun_plugin.plan import Candidate, TorchrunMember, TorchrunRound
from elasticd_daemon import keys
from elasticd_daemon.api.client import Reply, Unreachable
from elasticd_daemon.api.local import summarize
from elasticd_daemon.api.node_files import ClusterReader
from elasticd_daemon.api.routes import ApiRoutes
from elasticd_daemon.api.schema import (
    CheckpointStatus,
    JobProgress,
    JobStatus,
    JobSummary,
    MemberSlots,
    NodeSummary,
    RankProgress,
    RoundStatus,
    ScalarSeries,
)
from elasticd_daemon.cli import report_command, tables
from elasticd_daemon.config.job_file import read_job
from elasticd_daemon.dashboard.login import LoginCookies
from elasticd_daemon.dashboard.routes import DashboardRoutes, ResponseCache
from elasticd_daemon.health.result import GpuUsage
from elasticd_daemon.records import NodeStatus
from tests.daemon.api.test_fuzzed import RECORDS
from tests.daemon.served import JOB, TOKEN, Served
from tests.hangs import test_ras

RECORDING = {
    "version": "2.5", "comm_lib_version": "2.26", "pg_status": {"0": {"last_completed_collective": 3}},
    "entries": [{"collective_seq_id": 4, "pg_id": 0, "process_group": ["0", "default_pg"], "state": "started",
                 "profiling_name": "nccl:all_reduce", "input_sizes": [[2, 3]], "input_dtypes": ["Float"]}],
}  # fmt: skip
RANK = RankReport(0, 0, "training", 7, 12, 4, wait_call="save()", nccl_groups=((0, 3, 2),), where="collective",
                  groups=(GroupTail("0", 4, 3, ((3, "all_reduce"),), "nccl"),))  # fmt: skip
ROUND = Round(3, (Member("n1", "i1", (0, 1), "trainer", "127.0.0.1:9"),), (2, 10), 1, run="1", reason="start",
              quarantined_slots=(QuarantinedSlot("n1", 1, 2, 1, 3.5),), excluded=(Exclusion("n2", 1, 2.0),),
              hang_places=(("all_reduce", 2),), store=StoreLife(1, "127.0.0.1:9", "127.0.0.1:8"))  # fmt: skip
OTHERS: list[Document] = [
    ROUND,
    NodeRecord("n1", "i1", "127.0.0.1:9", (0, 1), checkpoint=(2, 10), wait_counts=((0, 5, 2),), unreachable=("n2",)),
    Failure(3, "n1", "crash", ((0, 1),), "why", 12, (2, 10), "ValueError", "Traceback", step=11, places=("x",)),
    HangReport(3, "n1", (RANK,), "no progress", 20.0, 1.5),
    ProbeAlive("n1", "i1", StoreLife(1, "127.0.0.1:9", "127.0.0.1:8")),
    JobClosed("n1"),
    Candidate(TorchrunMember("n1", "127.0.0.1", 2000), 3),
    TorchrunRound(4, (TorchrunMember("n1", "127.0.0.1", 2000),)),
]
"""Records of a job's nodes, besides those of the API."""
PROGRESS: dict[bytes, Record] = {
    b"runner": JobProgress("", 3, "running", 2, (MemberSlots("n1", (0, 1)),), None, 7, 1.5, None,
                           CheckpointStatus(3, 6, 1e9), step_samples=((1e9, 3, 7),),
                           ranks=(RankProgress(0, "n1", 0, "training", 7, 0.5, "R"),)),
    b"node": JobProgress("n2", 3, "running", 2, (MemberSlots("n2", (0, 1)),), 1, 7, 1.5, CheckpointStatus(3, 6, 1e9),
                         goodput=0.9, started_at=1e9, rounds=(RoundStatus(3, 1e9, 2, ("n2",), "start", "why"),),
                         step_samples=((1e9, 3, 7),), scalars=(ScalarSeries("loss", ((7, 0.5),)),),
                         gpus=(GpuUsage(0, node="n2"),), unreachable={"n3": "why"}),
}  # fmt: skip
"""What a runner, which is a job's user's, and another node answer about a job."""
EVIDENCE = Path(__file__).parents[1] / "cli" / "explain" / "stopped"
CHECKPOINT = manifest.Manifest(
    3, 7, (2, 5), 2, 9, "xxh3_128:00", "llama", "1", {"epoch": 1}, files={"a": (9, "sha256:00")}
)
STORED = {
    b"Round": (Keys("j").round, ""),
    b"Submission": (keys.SUBMISSIONS, "j"),
    b"Placement": (keys.PLACEMENTS, "j"),
    b"JobResult": (keys.RESULTS, "j"),
    b"NodeStatus": (keys.NODES, "a"),
    b"KnownNode": (keys.KNOWN_NODES, "b"),
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
    kinds = {type(one).__name__.encode(): type(one) for one in (*RECORDS, *OTHERS)}
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
                    assert record.FLOAT_RANGE[0] <= value <= record.FLOAT_RANGE[1], (record, one.name)
                case int() as value:
                    assert MIN_NUMBER <= value < 1 << 63, (record, one.name)


def _stored(served: Served, data: bytes) -> None:
    """A record of the store in every list and page, and as the command line reads them."""
    name, _, value = data.partition(b" ")
    folder, key = STORED.get(name, ("", ""))
    if not folder:
        return
    store, api = served.store, served.server.listeners[0].routes
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


@dataclass(slots=True)
class _Peers:
    """Another node, which answers `answer` whatever it is asked."""

    answer: dict[str, Any] = field(default_factory=dict)

    def request(self, *_: object, **__: object) -> Reply:
        raise Unreachable("it has no log")

    def request_all(
        self, addresses: Mapping[str, str], *_: object, meanwhile: Callable[[], None] = lambda: None, **__: object
    ) -> dict[str, dict[str, Any] | str]:
        return {node: dict(self.answer) for node in addresses}


def _answers(served: Served, peers: _Peers, data: bytes) -> None:
    """An answer about a job in every page of it."""
    name, _, text = data.partition(b" ")
    found = bounded_json.loads(text)
    if name not in PROGRESS or not isinstance(found, dict):
        return
    served.answers["status"], peers.answer = (found, {}) if name == b"runner" else ({}, found)
    api = served.server.listeners[0].routes
    for path in ("/v1/jobs/llama", "/v1/local/jobs/llama", "/jobs/llama", "/"):
        answer = api.answer(HttpRequest("GET", path, "number=1" if "local" in path else "", "root"))
        assert answer.status == 200, (path, answer.body[:300])
        if path == "/v1/jobs/llama":
            JobStatus.from_dict(json.loads(answer.body, parse_constant=_no_constant))


def _no_constant(name: str) -> None:
    raise AssertionError(f"{name} is not JSON")


def _evidence(logs: Path, data: bytes) -> None:
    """One file of a folder of evidence, which is a job's user's."""
    name, _, content = data.partition(b"\n")
    file = next((path for path in logs.rglob("*.*") if path.name.encode() == name), None)
    if file is None:
        return
    before = file.read_bytes()
    file.write_bytes(content)
    try:
        place = locate.choose_default_folder(locate.find_folders(logs))
        if place is not None:
            explained = load.explain(place, logs / "events.jsonl")
            json.dumps(document(explained), allow_nan=False)
            assert page(explained)
    finally:
        file.write_bytes(before)


def _manifest(data: bytes) -> None:
    """Of a checkpoint; with a seal that fits, which everybody can make."""
    manifest.parse(data)
    found = json.loads(data)
    if isinstance(found, dict):
        found.pop("seal", None)
        read = manifest.parse(json.dumps({**found, "seal": manifest.seal_of(found)}).encode())
        if isinstance(read, manifest.Manifest):
            assert manifest.parse(read.to_json()) == read


def _job_file(data: bytes) -> None:
    for kind in ("toml", "json"):
        with suppress(UsageError):
            read_job(data, kind, "the job")


def _ras_answers() -> list[bytes]:
    ranks = [test_ras.rank(number, 70 + number, AllReduce=40 + number) for number in range(2)]
    return [test_ras.answer(*ranks, missing=1), *(path.read_bytes() for path in sorted(test_ras.HERE.iterdir()))]


def _recording(data: bytes) -> None:
    found = bounded_json.loads(data)
    one = recordings.parse(found) if isinstance(found, dict) else None
    if one is not None:
        compare_groups({0: one.tails(), 1: one.tails()})


def _events(data: bytes) -> None:
    timeline, report = JobTimeline(), Report(since=120.0)
    for line in data.split(b"\n"):
        found = json.loads(line)
        if isinstance(found, dict) and (event := decode(found)) is not None:
            timeline.feed(event)
            report.feed(event if event.job else replace(event, job="j"))
    json.dumps(summarize(timeline, "n1", 200.0).to_dict())
    report_command.page({**report.to_json(200.0), "logs": 1})


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
            beat.write_bytes(data[: record.FILE_BYTES].ljust(record.FILE_BYTES, b"\0"))
            with closing(record.HeartbeatReader(beat)) as reader:
                reader.read()

        def http(data: bytes) -> None:
            client = socket.create_connection(listener.getsockname())
            server, _ = listener.accept()
            with client, server:
                client.sendall(data[:60_000])
                client.shutdown(socket.SHUT_WR)
                _RequestHandler(server, ("127.0.0.1", 1), served.server.listeners[1])
                server.close()
                answer = client.recv(1 << 16)
                assert answer.startswith(b"HTTP/1.1 ") or not answer, answer[:80]
                assert b" 500 " not in answer[:14], answer

        pages.announce()
        pages.place("llama", pages.submit(), "n1", "n2")
        pages.event("round_published", NOW, 3)
        other = NodeStatus("n2", "i2", 2, "127.0.0.1:9", elasticd="0.1.0")
        assert pages.store.announce(keys.NODES + "n2", other.to_json(), 1e6) is not None
        peers = _Peers()
        pages.service.cluster = ClusterReader(pages.service.local, cast(Any, peers))
        logs = Path(place) / "logs"
        shutil.copytree(EVIDENCE, logs)

        seeds = [f"{type(one).__name__} ".encode() + one.to_json() for one in (*RECORDS, *OTHERS)]
        yield {
            "records": Target(_records, seeds, (WireError,)),
            "stored": Target(lambda data: _stored(pages, data), seeds, ()),
            "answers": Target(
                lambda data: _answers(pages, peers, data),
                [name + b" " + json.dumps(one.to_dict()).encode() for name, one in PROGRESS.items()],
                (ValueError, RecursionError),
            ),
            "evidence": Target(
                lambda data: _evidence(logs, data),
                [path.name.encode() + b"\n" + path.read_bytes() for path in sorted(logs.rglob("*.*"))],
                (),
            ),
            "manifests": Target(_manifest, [CHECKPOINT.to_json()], (ValueError, RecursionError)),
            "jobs": Target(_job_file, [JOB, b'{"command": ["train.py"], "workdir": "/tmp"}'], ()),
            "beats": Target(beats, [beat.read_bytes()], (WireError,)),
            "events": Target(_events, [json.dumps(EVENT).encode()], (ValueError, RecursionError)),
            "http": Target(http, REQUESTS, (OSError,)),
            "ras": Target(ras.parse_differences, _ras_answers(), ()),
            "recordings": Target(_recording, [json.dumps(RECORDING).encode()], (ValueError, RecursionError)),
        }


def corpus(folder: Path, name: str) -> list[bytes]:
    """Inputs that were kept."""
    found = folder / name
    return [(found / file).read_bytes() for file in sorted(os.listdir(found))] if found.is_dir() else []
