"""The HTTP API: each method and path of docs/http.md, the JobService call behind it, and its JSON.

An invalid request is a 4xx with a sentence, an outage of the store a 503, of another node's agent a 504.

The routes hold no rules: who may call is the server's and the authenticator's concern, what a call does is
JobService's. What is left is the translation of a request into arguments, each decoded strictly, and of an exception
into a status. A name that is given twice, or a query that is none, is refused on every path, since two readers could
understand it differently.

Routes under /v1/local are for other agents. They answer from this node's files, without the store, so the logs of a job
can be read while the store is away.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TypeVar
from urllib.parse import parse_qsl

import msgspec

from elasticd import bounded_json
from elasticd.errors import StoreRefused, StoreUnavailable, UsageError
from elasticd_agent.system.bounded_io import DeadlineExceeded
from elasticd_agent.system.network.http_auth import AccessDenied
from elasticd_agent.system.network.http_server import (
    HttpError,
    HttpRequest,
    HttpResponse,
    RouteTable,
    error_response,
    json_response,
)
from elasticd_agent.telemetry.metrics_server import MonitoringPages
from elasticd_daemon.api import views
from elasticd_daemon.api.node_files import NodesUnavailable, NotFound
from elasticd_daemon.api.rank_logs import LogRequest, NaturalNumber
from elasticd_daemon.api.schema import LogChunk
from elasticd_daemon.api.service import Conflict, JobService
from elasticd_daemon.config.decode import ConfigError, decode
from elasticd_daemon.config.documents import FileFormat

PUBLIC_PATHS = ("/metrics", "/healthz", "/readyz")
_JOB_FILE_FORMATS: dict[str, FileFormat] = {
    "application/toml": "toml",
    "text/x-toml": "toml",
    "application/json": "json",
}
_MAX_PARAMETERS = 32
_ERROR_STATUS: dict[type[Exception], int] = {
    NotFound: 404,
    Conflict: 409,
    StoreRefused: 403,  # a UsageError, too
    UsageError: 400,
    NodesUnavailable: 504,
    DeadlineExceeded: 504,
}


class ApiRoutes:
    """Safe to call from many threads at once."""

    def __init__(self, service: JobService, pages: MonitoringPages) -> None:
        self.service = service
        self.table = RouteTable(
            {
                **pages.handlers(),
                "GET /v1/jobs": lambda request: self._list_jobs(),
                "POST /v1/jobs": self._submit,
                "GET /v1/jobs/*": lambda request, job: json_response(service.job_status(job).to_dict()),
                "POST /v1/jobs/*/cancel": lambda request, job: json_response(service.cancel(job, request.requested_by)),
                "GET /v1/jobs/*/logs": lambda request, job: _log_response(
                    service.read_log(job, _decode_query(request, LogRequest))
                ),
                "POST /v1/jobs/*/dump": lambda request, job: json_response(service.dump(job)),
                "GET /v1/jobs/*/explain": self._explain,
                "GET /v1/nodes": lambda request: self._list_nodes(),
                "POST /v1/nodes/*/cordon": lambda request, node: self._cordon(request, node, drain=False),
                "POST /v1/nodes/*/drain": lambda request, node: self._cordon(request, node, drain=True),
                "POST /v1/nodes/*/uncordon": lambda request, node: json_response(service.uncordon(node)),
                # For other agents: what this node has itself, without the store.
                "GET /v1/local/jobs/*": self._local_progress,
                "GET /v1/local/jobs/*/logs": self._local_logs,
                "POST /v1/local/jobs/*/dump": self._local_dump,
                "GET /v1/local/jobs/*/explain": self._local_explain,
            },
            hidden="/v1/local",
        )

    def is_public(self, method: str, path: str) -> bool:
        return path in PUBLIC_PATHS and method in ("GET", "HEAD")

    def admit_or_reject(self, request: HttpRequest, denied: AccessDenied) -> HttpResponse:
        headers = {401: (("WWW-Authenticate", "Bearer"),), 429: (("Retry-After", str(int(denied.retry_after_s) + 1)),)}
        return replace(error_response(denied.code, denied.why), headers=headers.get(denied.code, ()))

    def answer(self, request: HttpRequest) -> HttpResponse:
        """Return the response to a request, with the status that belongs to its error."""
        try:
            _parse_query(request)  # an invalid query is refused on every path
            return self.table.answer(request)
        except StoreUnavailable as error:
            return error_response(503, f"the store does not answer: {error}; running jobs continue")
        except tuple(_ERROR_STATUS) as error:
            status = next(status for kind, status in _ERROR_STATUS.items() if isinstance(error, kind))
            return error_response(status, str(error) or "the disk does not answer")

    def _list_jobs(self) -> HttpResponse:
        jobs, problems = self.service.jobs()
        return _list_response("jobs", [msgspec.Raw(views.encode_answer(row)) for row in jobs.summaries()], problems)

    def _list_nodes(self) -> HttpResponse:
        nodes, problems = self.service.nodes()
        return _list_response("nodes", [msgspec.Raw(views.encode_answer(row)) for row in nodes], problems)

    def _submit(self, request: HttpRequest) -> HttpResponse:
        kind = _job_file_format(request)
        query = _parse_query(request)
        name, token = query.get("id") or None, query.get("token", "")
        return json_response(self.service.submit(request.body, kind, name, request.requested_by, token), 201)

    def _explain(self, request: HttpRequest, job: str) -> HttpResponse:
        return json_response(self.service.explain(job, _decode_query(request, _RoundQuery).round))

    def _cordon(self, request: HttpRequest, node: str, *, drain: bool) -> HttpResponse:
        reason = _parse_reason(request.body)
        return json_response(self.service.cordon(node, drain=drain, reason=reason, by=request.requested_by).to_dict())

    def _local_progress(self, request: HttpRequest, job: str) -> HttpResponse:
        local, number = self.service.local, _decode_query(request, _JobQuery).number
        if not local.has_job(job, number):
            raise NotFound(f"{local.node} has nothing of job {job!r} number {number}")
        brief = _parse_query(request).get("brief") == "1"
        return json_response(local.progress(job, number, self.service.clock(), brief=brief).to_dict())

    def _local_logs(self, request: HttpRequest, job: str) -> HttpResponse:
        local, number = self.service.local, _decode_query(request, _JobQuery).number
        log_request = _decode_query(request, LogRequest)
        chunk = local.read_log(job, number, log_request)
        if chunk is None:
            raise NotFound(f"{local.node} has no log {log_request} of job {job!r} number {number}")
        return _log_response(chunk)

    def _local_dump(self, request: HttpRequest, job: str) -> HttpResponse:
        return json_response(self.service.local.dump(job, _decode_query(request, _JobQuery).number))

    def _local_explain(self, request: HttpRequest, job: str) -> HttpResponse:
        round = _decode_query(request, _RoundQuery).round
        return json_response(self.service.local.explain(job, _decode_query(request, _JobQuery).number, round))


def _job_file_format(request: HttpRequest) -> FileFormat:
    kind = _JOB_FILE_FORMATS.get(request.content_type)
    if kind is None:
        names = ", ".join(_JOB_FILE_FORMATS)
        raise HttpError(415, f"Content-Type: one of {names}, not {request.content_type[:60]!r}")
    if not request.body:
        raise HttpError(400, "a job file is missing: it is the request's body")
    return kind


def _parse_query(request: HttpRequest) -> dict[str, str]:
    """Return the query as names and values. Raises HttpError for one that is not NAME=VALUE, or has a name twice."""
    text = request.query
    try:
        pairs = parse_qsl(
            text, keep_blank_values=True, strict_parsing=bool(text), max_num_fields=_MAX_PARAMETERS, errors="strict"
        )
    except (ValueError, UnicodeDecodeError):
        raise HttpError(400, "the query is not NAME=VALUE&NAME=VALUE") from None
    if len(dict(pairs)) != len(pairs):
        raise HttpError(400, "the query has a name twice")
    return dict(pairs)


class _ReasonBody(msgspec.Struct, frozen=True):
    reason: str = ""


class _JobQuery(msgspec.Struct, frozen=True):
    """The query of a request about one run of a job on this node."""

    number: NaturalNumber


class _RoundQuery(msgspec.Struct, frozen=True):
    round: NaturalNumber | None = None


QueryType = TypeVar("QueryType", bound=msgspec.Struct)


def _decode_query(request: HttpRequest, kind: type[QueryType]) -> QueryType:
    """The query of a request. Raises ConfigError."""
    return decode(_parse_query(request), kind, {}, text_numbers=True)


def _parse_reason(body: bytes) -> str:
    try:
        reason = decode(bounded_json.loads(body or b"{}"), _ReasonBody, {}).reason
        reason.encode()
    except (ValueError, RecursionError, ConfigError):
        raise HttpError(400, 'the body must be {"reason": "…"} or empty') from None
    return reason


def _list_response(name: str, rows: Sequence[msgspec.Raw], problems: Sequence[str]) -> HttpResponse:
    shown = [sentence.encode("utf-8", "replace").decode() for sentence in problems]  # a key need not be UTF-8
    return HttpResponse(200, msgspec.json.encode({name: rows, "problems": shown}) + b"\n")


def _log_response(found: LogChunk) -> HttpResponse:
    return HttpResponse(200, found.data, "application/octet-stream", found.headers())
