"""Traces for OpenTelemetry: spans of a job, its rounds, restores, saves and hangs, made of the events of its log.

One thread imports the SDK, makes the spans and sends each as it ends. The threads of the job only put events into its
queue: a collector that is slow or away costs spans, and no time. The SDK's own batches are not used, since they start a
thread in every process that is forked from this one.

A span is made when its end is known or its begin is, from the event's own time, so a trace is right however late it is
sent. Spans nest: job, round, and within a round the restore, saves and hangs. Failures are the status of their span
with the sentence of the log, so a search for errors in a tracing system finds the reason without another tool.

Nothing is imported, no thread is started and nothing is sent unless the environment names a collector and the extra is
installed.
"""

from __future__ import annotations

import logging
import os
import queue
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from elasticd_agent.model import log_events as events
from elasticd_agent.model.log_events import LogEvent
from elasticd_agent.telemetry.event_log import EventSink
from elasticd_agent.telemetry.timeline import PLANNED_CAUSES

if TYPE_CHECKING:
    from opentelemetry.trace import Span, Tracer

_log = logging.getLogger("elasticd.traces")
ENDPOINT_VARIABLES = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
PROTOCOL_VARIABLES = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
SUPPORTED_PROTOCOL = "http/protobuf"
"""The default. Where another one is set, the endpoint would not understand us."""
_EXPORTER_MODULE = "opentelemetry.exporter.otlp.proto.http"
MAX_QUEUED_EVENTS = 2000
"""Events; about 1 MB."""
CLOSE_S = 2.0
"""At the end of a job its last spans have this long to be sent."""


def with_traces(log: EventSink, job: str, node: str, environ: Mapping[str, str]) -> EventSink:
    """`log`, whose events also become spans if the environment names a collector and elasticd[otel] is installed."""
    off = environ.get("OTEL_SDK_DISABLED", "").lower() == "true" or environ.get("OTEL_TRACES_EXPORTER") == "none"
    if (
        off
        or not any(map(environ.get, ENDPOINT_VARIABLES))
        or next(filter(None, map(environ.get, PROTOCOL_VARIABLES)), SUPPORTED_PROTOCOL) != SUPPORTED_PROTOCOL
    ):
        return log
    with suppress(ModuleNotFoundError):  # of its parents
        if find_spec(_EXPORTER_MODULE) is not None:
            return TracingEventSink(log, job, node)
    return log


class TracingEventSink:
    """An event sink that forwards everything to `log`, and makes spans of it."""

    def __init__(self, log: EventSink, job: str, node: str) -> None:
        self._log = log
        self._about = {"elasticd.job": job, "elasticd.node": node}
        self._events: queue.Queue[tuple[LogEvent, int] | None] = queue.Queue(MAX_QUEUED_EVENTS)
        self._thread = threading.Thread(target=self._run, name="elasticd-traces", daemon=True)
        self._thread.start()

    @property
    def lines_lost(self) -> int:
        return self._log.lines_lost

    def write(self, record: LogEvent) -> None:
        """Forward an event, and queue it for the spans. A queue that is full drops the span, never the event."""
        self._log.write(record)
        wall_s = time.time() - (time.monotonic() - record.mono)
        with suppress(queue.Full):
            self._events.put_nowait((record, int(wall_s * 1e9)))

    def close(self) -> None:
        """Send what is left, within CLOSE_S, and close the log."""
        with suppress(queue.Full):
            self._events.put_nowait(None)
            self._thread.join(CLOSE_S)
        self._log.close()

    def _run(self) -> None:
        """Make spans until the end, with the SDK's warnings reduced to the first one."""
        logger = logging.getLogger("opentelemetry")
        logger.addHandler(_FirstWarningHandler(logging.WARNING))
        logger.propagate = False
        try:
            spans = JobSpans(_make_tracer(self._about), self._about)
        except Exception as error:  # noqa: BLE001 the SDK raises what it likes for a setting that it does not understand
            _log.warning("no traces are sent: %s", error)
            return
        while (item := self._events.get()) is not None:
            spans.feed(*item)
        spans.close(time.time_ns())


def _make_tracer(about: Mapping[str, str]) -> Tracer:
    """A tracer as the SDK's environment variables describe it."""
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor

    named = {} if os.environ.get("OTEL_SERVICE_NAME") else {"service.name": "elasticd"}
    provider = TracerProvider(resource=Resource.create({**named, **about}), shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(OTLPSpanExporter()))
    return provider.get_tracer("elasticd")


class _FirstWarningHandler(logging.Handler):
    """Passes the SDK's first complaint on: it repeats it with each span."""

    _said = False

    def emit(self, record: logging.LogRecord) -> None:
        if not self._said:
            self._said = True
            _log.warning("traces cannot be sent for now, which costs the job no time: %s", record.getMessage())


class JobSpans:
    """The spans of one job on one node. Times are unix nanoseconds."""

    def __init__(self, tracer: Tracer, about: Mapping[str, str]) -> None:
        from opentelemetry import trace

        self._trace, self._tracer, self._about = trace, tracer, about
        self._open: dict[str, Span] = {}  #: by name, from the outermost one on
        self._group_at: dict[int, int] = {}  #: when the workers of the newest round started

    def feed(self, event: LogEvent, at: int) -> None:
        """Take one event, in the order of the log. `at` is unix nanoseconds."""
        if "job" not in self._open:
            self._begin("job", at, self._about)
        match event:
            case events.RoundPublishedEvent():
                planned = event.cause in PLANNED_CAUSES and not event.lost
                self._end("round", at, "" if planned else event.reason)
                fields = _attributes(
                    event, "reason", "round", "cause", "world_size", "nodes", "lost", "restarts", "leader"
                )
                self._begin("round", at, fields)
            case events.GroupStartedEvent(round=number):
                self._group_at = {number: at}
            case events.FirstStepEvent() | events.PausedEvent() | events.WorkRecoveredEvent():
                self._add_round_event(event, at, "step")
            case events.WorkerExitedEvent(requested=False):
                self._add_round_event(event, at, "rank", "exit_code", "signal", "step")
            case events.ResumedEvent(round=number):
                self._begin(
                    "restore", self._group_at.get(number, at), _attributes(event, "step", "from_round", "donor")
                )
                self._end("restore", at)
            case events.CheckpointSavedEvent(written_seconds=seconds):
                fields = {**_attributes(event, "step", "path", "bytes"), "elasticd.paused_seconds": event.seconds}
                self._begin("save", at - int(seconds * 1e9), fields)
                self._end("save", at)
            case events.CheckpointFailedEvent():
                self._begin("save", at, _attributes(event, "step", "path"))
                self._end("save", at, event.reason)
            case events.HangSuspectedEvent() if "hang" not in self._open:
                self._begin("hang", at, _attributes(event, "reason"))
            case events.HangClearedEvent():
                self._end("hang", at)
            case events.HangDetectedEvent():
                if "hang" not in self._open:
                    self._begin("hang", at, {})
                self._open["hang"].set_attributes(_attributes(event, "cause", "nodes", "ranks", "action"))
                self._end("hang", at, event.reason)
            case events.JobEndedEvent():
                self._open["job"].set_attributes(_attributes(event, "outcome", "exit_code", "restarts", "step"))
                self.close(at, event.reason if event.outcome == "failed" else "")

    def close(self, at: int, failure_reason: str = "") -> None:
        """End what has not ended."""
        self._end("round", at, failure_reason)
        self._end("job", at, failure_reason)

    def _begin(self, name: str, at: int, fields: Mapping[str, Any]) -> None:
        """Begin a span within the innermost one that is open."""
        context = self._trace.set_span_in_context(next(reversed(self._open.values()), self._trace.INVALID_SPAN))
        self._open[name] = self._tracer.start_span(name, context, start_time=at, attributes=dict(fields))

    def _end(self, name: str, at: int, failure_reason: str = "") -> None:
        """End this span and those within it."""
        while name in self._open:
            inner, span = self._open.popitem()
            if failure_reason and inner == name:
                span.set_status(self._trace.Status(self._trace.StatusCode.ERROR, failure_reason))
            span.end(at)

    def _add_round_event(self, event: LogEvent, at: int, *names: str) -> None:
        """Add an event to the span of the round."""
        if "round" in self._open:
            self._open["round"].add_event(event.kind, _attributes(event, "reason", *names), at)


def _attributes(event: LogEvent, *names: str) -> dict[str, Any]:
    """OpenTelemetry has no null."""
    return {f"elasticd.{name}": value for name in names if (value := getattr(event, name)) is not None}
