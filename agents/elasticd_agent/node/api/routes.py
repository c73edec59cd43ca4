"""The daemon's routes: method and path -> a question to the desk, and what it answered -> a status and JSON.

It exists so that docs/http.md has one table to be true to. What is wrong with a request is a sentence and a 4xx, an
outage of the store a 503, of another node's daemon a 504. It reads no socket and no file; who asks has been admitted.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args
from urllib.parse import parse_qsl, unquote

from elasticd.errors import StoreUnavailable, UsageError
from elasticd_agent.config.documents import FileFormat
from elasticd_agent.node.api.cluster import LogChunk, NodesUnavailable, NotFound
from elasticd_agent.node.api.rank_logs import MAX_BYTES, LogRequest
from elasticd_agent.node.api.schema import JobSummary, NodeSummary
from elasticd_agent.node.api.server import TEXT, HttpRequest, HttpResponse, UnauthenticatedRequest, error_response
from elasticd_agent.node.api.service import Conflict, JobService
from elasticd_agent.system.bounded_io import DeadlineExceeded
from elasticd_agent.system.http_auth import AccessDenied
from elasticd_agent.telemetry.metrics_server import METRICS_TYPE, MonitoringPages

PUBLIC_PATHS = ("/metrics", "/healthz", "/readyz")
_JOB_FILE_TYPES: dict[str, FileFormat] = {
    "application/toml": "toml",
    "text/x-toml": "toml",
    "application/yaml": "yaml",
    "application/x-yaml": "yaml",
    "text/yaml": "yaml",
    "application/json": "json",
}
_MAX_PARAMETERS = 32


class _BadRequest(Exception):
    """The request itself: a status, and the sentence that says what would be right."""

    def __init__(self, code: int, why: str) -> None:
        super().__init__(why)
        self.code = code


@dataclass(frozen=True, slots=True)
class ApiRoutes:
    """Safe to call from many threads at once. `pages` are the daemon's own."""

    service: JobService
    pages: MonitoringPages

    def is_public(self, method: str, path: str) -> bool:
        return path in PUBLIC_PATHS and method in ("GET", "HEAD")

    def reject(self, knock: UnauthenticatedRequest, refused: AccessDenied) -> HttpResponse:
        challenge = (("WWW-Authenticate", "Bearer"),) if refused.code == 401 else ()
        return replace(error_response(refused.code, refused.why), headers=challenge)

    def answer(self, request: HttpRequest) -> HttpResponse:
        try:
            return self._answer(request)
        except _BadRequest as error:
            return error_response(error.code, str(error))
        except NotFound as error:
            return error_response(404, str(error))
        except Conflict as error:
            return error_response(409, str(error))
        except UsageError as error:
            return error_response(400, str(error))
        except StoreUnavailable as error:
            return error_response(503, f"the store does not answer: {error}; jobs go on meanwhile")
        except (NodesUnavailable, DeadlineExceeded) as error:
            return error_response(504, str(error) or "the disk that this is on does not answer")

    def _answer(self, request: HttpRequest) -> HttpResponse:
        try:
            words = [unquote(word, errors="strict") for word in request.path.split("/")[1:]]
        except UnicodeDecodeError:
            raise _BadRequest(400, "the path is not UTF-8") from None
        asked = _query(request.query)
        match request.method, *words:
            case "GET", "metrics":
                return HttpResponse(200, self.pages.metrics(), METRICS_TYPE)
            case "GET", ("healthz" | "readyz") as which:
                verdict = self.pages.healthy() if which == "healthz" else self.pages.ready()
                return HttpResponse(200 if verdict.ok else 503, verdict.reason.encode("utf-8", "replace") + b"\n", TEXT)
            case "GET", "status":
                return _json_response(self.pages.status())
            case "GET", "v1", "jobs":
                return _listing("jobs", *self.service.jobs())
            case "POST", "v1", "jobs":
                return self._submit(request, asked)
            case "GET", "v1", "jobs", job:
                return _json_response(self.service.job(job).to_dict())
            case "POST", "v1", "jobs", job, "cancel":
                return _json_response(self.service.cancel(job, request.requested_by))
            case "GET", "v1", "jobs", job, "logs":
                return _log_response(self.service.logs(job, _log_request(asked)))
            case "POST", "v1", "jobs", job, "dump":
                return _json_response(self.service.dump(job))
            case "GET", "v1", "jobs", job, "explain":
                return _json_response(self.service.explain(job, _integer(asked, "round")))
            case "GET", "v1", "nodes":
                return _listing("nodes", *self.service.nodes())
            case "POST", "v1", "nodes", node, ("cordon" | "drain") as what:
                reason = _reason(request.body)
                row = self.service.cordon(node, drain=what == "drain", reason=reason, by=request.requested_by)
                return _json_response(row.to_dict())
            case "POST", "v1", "nodes", node, "uncordon":
                return _json_response(self.service.uncordon(node))
            case method, "v1", "local", "jobs", job, *what:
                return self._local(method, job, what, asked)
        raise _no_route(request.method, words)

    def _local(self, method: str, job: str, what: list[str], asked: Mapping[str, str]) -> HttpResponse:
        """For other daemons: what this node has itself, without the store."""
        number = _integer(asked, "number")
        if number is None:
            raise _BadRequest(400, "number=N, the job's own, is missing")
        here = self.service.local
        match method, *what:
            case ("GET",):
                if not here.has_job(job, number):
                    raise NotFound(f"{here.node} has nothing of job {job!r} number {number}")
                progress = here.progress(job, number, self.service.now(), brief=asked.get("brief") == "1")
                return _json_response(progress.to_dict())
            case "GET", "logs":
                wanted = _log_request(asked)
                found = here.logs(job, number, wanted)
                if found is None:
                    raise NotFound(f"{here.node} has no log {wanted} of job {job!r} number {number}")
                return _log_response(LogChunk.from_local(here.node, *found))
            case "POST", "dump":
                return _json_response(here.dump(job, number))
            case "GET", "explain":
                return _json_response(here.explain(job, number, _integer(asked, "round")))
        raise _no_route(method, ["v1", "local", "jobs", job, *what])

    def _submit(self, request: HttpRequest, asked: Mapping[str, str]) -> HttpResponse:
        kind = _JOB_FILE_TYPES.get(request.content_type)
        if kind is None:
            raise _BadRequest(
                415, f"Content-Type: one of {', '.join(_JOB_FILE_TYPES)}, not {request.content_type[:60]!r}"
            )
        if not request.body:
            raise _BadRequest(400, "a job file is missing: it is the request's body")
        return _json_response(
            self.service.submit(
                request.body, kind, asked.get("id") or None, request.requested_by, asked.get("token", "")
            ),
            201,
        )


_ROUTES: dict[tuple[str, ...], tuple[str, ...]] = {
    ("metrics",): ("GET",),
    ("healthz",): ("GET",),
    ("readyz",): ("GET",),
    ("status",): ("GET",),
    ("v1", "jobs"): ("GET", "POST"),
    ("v1", "jobs", "*"): ("GET",),
    ("v1", "jobs", "*", "cancel"): ("POST",),
    ("v1", "jobs", "*", "logs"): ("GET",),
    ("v1", "jobs", "*", "dump"): ("POST",),
    ("v1", "jobs", "*", "explain"): ("GET",),
    ("v1", "nodes"): ("GET",),
    ("v1", "nodes", "*", "cordon"): ("POST",),
    ("v1", "nodes", "*", "drain"): ("POST",),
    ("v1", "nodes", "*", "uncordon"): ("POST",),
    ("v1", "local", "jobs", "*"): ("GET",),
    ("v1", "local", "jobs", "*", "logs"): ("GET",),
    ("v1", "local", "jobs", "*", "dump"): ("POST",),
    ("v1", "local", "jobs", "*", "explain"): ("GET",),
}
"""What there is, for those who ask for something else."""


def _no_route(method: str, words: list[str]) -> _BadRequest:
    for route, methods in _ROUTES.items():
        if len(route) == len(words) and all(mine in ("*", word) for mine, word in zip(route, words, strict=True)):
            return _BadRequest(405, f"only {' and '.join(methods)} here")
    shown = sorted({"/" + "/".join(route).replace("*", "NAME") for route in _ROUTES if "local" not in route})
    return _BadRequest(404, f"there is no such page; there are {' '.join(shown)}")


def _query(text: str) -> dict[str, str]:
    try:
        pairs = parse_qsl(
            text, keep_blank_values=True, strict_parsing=bool(text), max_num_fields=_MAX_PARAMETERS, errors="strict"
        )
    except (ValueError, UnicodeDecodeError):
        raise _BadRequest(400, "what follows the ? is not NAME=VALUE&NAME=VALUE") from None
    if len(dict(pairs)) != len(pairs):
        raise _BadRequest(400, "what follows the ? names something twice")
    return dict(pairs)


def _integer(asked: Mapping[str, str], name: str, least: int = 0) -> int | None:
    text = asked.get(name)
    if text is None:
        return None
    digits = text.removeprefix("-")
    if not (digits.isascii() and digits.isdigit() and len(digits) < 16) or int(text) < least:
        raise _BadRequest(
            400, f"{name}={text[:40]!r}: a whole number is wanted" + ("" if least < 0 else f", from {least} on")
        )
    return int(text)


LogStream = Literal["stdout", "stderr", "elasticd"]


def _log_request(asked: Mapping[str, str]) -> LogRequest:
    stream = asked.get("stream", "stdout")
    if stream not in get_args(LogStream):
        raise _BadRequest(400, f"stream={stream[:40]!r}: one of {', '.join(get_args(LogStream))}")
    limit = _integer(asked, "limit")
    return LogRequest(
        rank=_integer(asked, "rank") or 0,
        round=_integer(asked, "round", 1),
        stream=stream,
        offset=_integer(asked, "offset", -(1 << 50)) or 0,
        limit=MAX_BYTES if limit is None else min(limit, MAX_BYTES),
        node=asked.get("node"),
    )


def _reason(body: bytes) -> str:
    if not body:
        return ""
    try:
        found = json.loads(body)
        reason = found.get("reason", "") if isinstance(found, dict) else None
        if isinstance(reason, str):
            reason.encode()
            return reason
    except (ValueError, RecursionError):
        pass
    raise _BadRequest(400, 'the body is {"reason": "…"}, or there is none')


def _listing(name: str, rows: Sequence[JobSummary | NodeSummary], problems: Sequence[str]) -> HttpResponse:
    return _json_response({name: [row.to_dict() for row in rows], "problems": list(problems)})


def _json_response(found: Mapping[str, Any], code: int = 200) -> HttpResponse:
    text = json.dumps(found, ensure_ascii=False, default=str)
    return HttpResponse(code, text.encode("utf-8", "replace") + b"\n")


def _log_response(found: LogChunk) -> HttpResponse:
    return HttpResponse(200, found.data, "application/octet-stream", found.headers())
