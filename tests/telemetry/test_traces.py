"""Traces: the spans that events make, and their way to a collector that answers, or never does."""

from __future__ import annotations

import gzip
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from elasticd_agent.telemetry.event_log import NullEventLog
from elasticd_agent.telemetry.traces import CLOSE_S, MAX_QUEUED_EVENTS, JobSpans, TracingEventSink, with_traces
from tests import log_lines

SECOND = 10**9


def spans_of(*lines: tuple[float, str, int, dict[str, Any]]) -> dict[str, list[Any]]:
    exporter = InMemorySpanExporter()
    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    spans = JobSpans(provider.get_tracer("test"), {"elasticd.job": "j"})
    for at, kind, round, given in lines:
        spans.feed(log_lines.line(kind, at, round, **given).event, int(at * SECOND))
    found: dict[str, list[Any]] = {}
    for span in exporter.get_finished_spans():
        found.setdefault(span.name, []).append(span)
    return found


def seconds(span: Any) -> tuple[float, float]:
    return span.start_time / SECOND, span.end_time / SECOND


def test_spans_of_a_job() -> None:
    found = spans_of(
        (10, "round_published", 1, {"cause": "start", "world_size": 2, "nodes": ("a",)}),
        (11, "group_started", 1, {}),
        (13, "resumed", 1, {"step": 7}),
        (14, "first_step", 1, {"step": 8}),
        (20, "checkpoint_saved", 1, {"step": 9, "written_seconds": 2.0}),
        (21, "checkpoint_failed", 1, {"reason": "the disk is full"}),
        (25, "worker_exited", 1, {"rank": 1, "exit_code": 3, "requested": False}),
        (26, "round_published", 2, {"cause": "crash", "reason": "rank 1 exited with code 3"}),
        (40, "job_ended", 2, {"outcome": "succeeded"}),
    )
    (job,), (first, second), (restore,) = found["job"], found["round"], found["restore"]
    assert [seconds(span) for span in (job, first, second, restore)] == [(10, 40), (10, 26), (26, 40), (11, 13)]
    assert [seconds(span) for span in found["save"]] == [(18, 20), (21, 21)]
    assert first.parent.span_id == second.parent.span_id == job.context.span_id
    assert restore.parent.span_id == first.context.span_id
    assert (first.status.description, second.status.description) == ("rank 1 exited with code 3", None)
    assert (first.attributes["elasticd.cause"], second.attributes["elasticd.cause"]) == ("start", "crash")
    assert [event.name for event in first.events] == ["first_step", "worker_exited"]
    assert [span.status.is_ok for span in found["save"]] == [True, False]
    assert job.status.is_ok


def test_span_of_a_hang_has_its_verdict() -> None:
    """A suspicion that clears ends without an error; saves go on meanwhile."""
    found = spans_of(
        (0, "round_published", 1, {"cause": "start"}),
        (5, "hang_suspected", 1, {}),
        (6, "checkpoint_saved", 1, {}),
        (8, "hang_cleared", 1, {}),
        (20, "hang_suspected", 1, {}),
        (29, "hang_detected", 1, {"cause": "stopped", "ranks": (3,), "nodes": ("a",), "reason": "rank 3 is stopped"}),
        (30, "job_ended", 1, {"outcome": "failed", "reason": "no restarts left"}),
    )
    cleared, hung = found["hang"]
    assert (seconds(cleared), seconds(hung)) == ((5, 8), (20, 29))
    assert cleared.status.is_ok
    assert hung.status.description == "rank 3 is stopped"
    assert hung.attributes["elasticd.ranks"] == (3,)
    assert [span.status.description for span in (*found["round"], *found["job"])] == ["no restarts left"] * 2


class Collector(ThreadingHTTPServer):
    """Takes spans by OTLP over HTTP; answers only while `answers` is set."""

    daemon_threads = True

    def __init__(self) -> None:
        self.names: list[str] = []
        self.asked, self.answers = threading.Event(), threading.Event()
        self.answers.set()
        super().__init__(("127.0.0.1", 0), _Handler)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class _Handler(BaseHTTPRequestHandler):
    server: Collector

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        if self.headers.get("Content-Encoding") == "gzip":
            body = gzip.decompress(body)
        request = ExportTraceServiceRequest.FromString(body)
        scopes = (scope for resource in request.resource_spans for scope in resource.scope_spans)
        self.server.names += [span.name for scope in scopes for span in scope.spans]
        self.server.asked.set()
        self.server.answers.wait(30)
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def collector() -> Iterator[Collector]:
    with Collector() as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def test_a_job_sends_its_spans(collector: Collector) -> None:
    environ = {"OTEL_EXPORTER_OTLP_ENDPOINT": collector.url, "PATH": "/usr/bin:/bin", "HOME": "/nonexistent"}
    command = [sys.executable, "-m", "elasticd_agent", "run", "--nproc-per-node", "1", "--no-python", "/bin/true"]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert collector.names == ["round", "job"]


def test_a_collector_that_never_answers_costs_no_time(collector: Collector, monkeypatch: pytest.MonkeyPatch) -> None:
    """The events beyond what is kept are no spans."""
    collector.answers.clear()
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", collector.url)
    sink = TracingEventSink(NullEventLog(), "j", "a")
    try:
        sink.write(log_lines.line("round_published", 0, 1).event)
        sink.write(log_lines.line("checkpoint_saved", 0, 1).event)
        assert collector.asked.wait(30)
        began = time.monotonic()
        for _ in range(2 * MAX_QUEUED_EVENTS):
            sink.write(log_lines.line("scalars", 0, 1).event)
        sink.close()
        assert time.monotonic() - began < CLOSE_S + 20.0
    finally:
        collector.answers.set()
        deadline = time.monotonic() + 60
        while any(thread.name == "elasticd-traces" for thread in threading.enumerate()):
            assert time.monotonic() < deadline
            sink.close()


@pytest.mark.parametrize(
    "environ",
    [
        {},
        {"OTEL_EXPORTER_OTLP_ENDPOINT": ""},
        {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://c", "OTEL_SDK_DISABLED": "True"},
        {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://c", "OTEL_TRACES_EXPORTER": "none"},
        {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://c", "OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"},
    ],
)
def test_nothing_is_sent_unless_configured(environ: dict[str, str]) -> None:
    log = NullEventLog()
    assert with_traces(log, "j", "a", environ) is log


def test_nothing_is_imported_unless_configured() -> None:
    code = (
        "import sys; from elasticd_agent.job.reporting import with_traces; with_traces(None, 'j', 'a', {});"
        "print([name for name in sys.modules if name.startswith('opentelemetry')])"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "[]\n"
