"""The daemon's routes: method and path -> a question to the desk, and what it answered -> a status and JSON.

It exists so that docs/http.md has one table to be true to. What is wrong with a request is a sentence and a 4xx, an
outage of the store a 503, of another node's daemon a 504. It reads no socket and no file; who asks has been admitted.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args
from urllib.parse import parse_qsl, unquote

from elasticd.errors import StoreUnavailable, UsageError
from elasticd_agent.config.documents import Kind
from elasticd_agent.node.api import rank_logs as ranklogs
from elasticd_agent.node.api.cluster import Asked, Away, Logs, NoSuch
from elasticd_agent.node.api.server import TEXT, Answer, Knock, Request, said
from elasticd_agent.node.api.service import Conflict, Desk
from elasticd_agent.system.bounded_io import Silent
from elasticd_agent.system.http_auth import Refused
from elasticd_agent.telemetry.metrics_server import METRICS_TYPE, Pages

OPEN = ("/metrics", "/healthz", "/readyz")
_KINDS: dict[str, Kind] = {
    "application/toml": "toml",
    "text/x-toml": "toml",
    "application/yaml": "yaml",
    "application/x-yaml": "yaml",
    "text/yaml": "yaml",
    "application/json": "json",
}
_MOST_WORDS = 32


class _Wrong(Exception):
    """The request itself: a status, and the sentence that says what would be right."""

    def __init__(self, code: int, why: str) -> None:
        super().__init__(why)
        self.code = code


@dataclass(frozen=True, slots=True)
class Api:
    """Safe to call from many threads at once. `pages` are the daemon's own."""

    desk: Desk
    pages: Pages

    def is_open(self, method: str, path: str) -> bool:
        return path in OPEN and method in ("GET", "HEAD")

    def refused(self, knock: Knock, refused: Refused) -> Answer:
        challenge = (("WWW-Authenticate", "Bearer"),) if refused.code == 401 else ()
        return replace(said(refused.code, refused.why), headers=challenge)

    def answer(self, request: Request) -> Answer:
        try:
            return self._answer(request)
        except _Wrong as error:
            return said(error.code, str(error))
        except NoSuch as error:
            return said(404, str(error))
        except Conflict as error:
            return said(409, str(error))
        except UsageError as error:
            return said(400, str(error))
        except StoreUnavailable as error:
            return said(503, f"the store does not answer: {error}; jobs go on meanwhile")
        except (Away, Silent) as error:
            return said(504, str(error) or "the disk that this is on does not answer")

    def _answer(self, request: Request) -> Answer:
        try:
            words = [unquote(word, errors="strict") for word in request.path.split("/")[1:]]
        except UnicodeDecodeError:
            raise _Wrong(400, "the path is not UTF-8") from None
        asked = _query(request.query)
        match request.method, *words:
            case "GET", "metrics":
                return Answer(200, self.pages.metrics(), METRICS_TYPE)
            case "GET", ("healthz" | "readyz") as which:
                verdict = self.pages.healthy() if which == "healthz" else self.pages.ready()
                return Answer(200 if verdict.ok else 503, verdict.reason.encode("utf-8", "replace") + b"\n", TEXT)
            case "GET", "status":
                return _json(self.pages.status())
            case "GET", "v1", "jobs":
                return _json(self.desk.jobs())
            case "POST", "v1", "jobs":
                return self._submitted(request, asked)
            case "GET", "v1", "jobs", job:
                return _json(self.desk.job(job))
            case "POST", "v1", "jobs", job, "cancel":
                return _json(self.desk.cancel(job, request.by))
            case "GET", "v1", "jobs", job, "logs":
                return _logs(self.desk.logs(job, _asked(asked), asked.get("node")))
            case "POST", "v1", "jobs", job, "dump":
                return _json(self.desk.dump(job))
            case "GET", "v1", "jobs", job, "explain":
                return _json(self.desk.explain(job, _whole(asked, "round")))
            case "GET", "v1", "nodes":
                return _json(self.desk.nodes())
            case "POST", "v1", "nodes", node, ("cordon" | "drain") as what:
                reason = _reason(request.body)
                return _json(self.desk.cordon(node, drain=what == "drain", reason=reason, by=request.by))
            case "POST", "v1", "nodes", node, "uncordon":
                return _json(self.desk.uncordon(node))
            case method, "v1", "here", "jobs", job, *what:
                return self._here(method, job, what, asked)
        raise _not_there(request.method, words)

    def _here(self, method: str, job: str, what: list[str], asked: Mapping[str, str]) -> Answer:
        """For other daemons: what this node has itself, without the store."""
        number = _whole(asked, "number")
        if number is None:
            raise _Wrong(400, "number=N, the job's own, is missing")
        here = self.desk.here
        match method, *what:
            case ("GET",):
                if not here.knows(job, number):
                    raise NoSuch(f"{here.node} has nothing of job {job!r} number {number}")
                return _json(here.about(job, number, self.desk.now(), brief=asked.get("brief") == "1"))
            case "GET", "logs":
                wanted = _asked(asked)
                args = (wanted.rank, wanted.round, wanted.stream, wanted.offset, wanted.limit)
                found = here.logs(job, number, *args)
                if found is None:
                    raise NoSuch(f"{here.node} has no log {wanted} of job {job!r} number {number}")
                return _logs(Logs.here(here.node, *found))
            case "POST", "dump":
                return _json(here.dump(job, number))
            case "GET", "explain":
                return _json(here.explain(job, number, _whole(asked, "round")))
        raise _not_there(method, ["v1", "here", "jobs", job, *what])

    def _submitted(self, request: Request, asked: Mapping[str, str]) -> Answer:
        kind = _KINDS.get(request.kind)
        if kind is None:
            raise _Wrong(415, f"Content-Type: one of {', '.join(_KINDS)}, not {request.kind[:60]!r}")
        if not request.body:
            raise _Wrong(400, "a job file is missing: it is the request's body")
        return _json(
            self.desk.submit(request.body, kind, asked.get("id") or None, request.by, asked.get("token", "")), 201
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
    ("v1", "here", "jobs", "*"): ("GET",),
    ("v1", "here", "jobs", "*", "logs"): ("GET",),
    ("v1", "here", "jobs", "*", "dump"): ("POST",),
    ("v1", "here", "jobs", "*", "explain"): ("GET",),
}
"""What there is, for those who ask for something else."""


def _not_there(method: str, words: list[str]) -> _Wrong:
    for route, methods in _ROUTES.items():
        if len(route) == len(words) and all(mine in ("*", word) for mine, word in zip(route, words, strict=True)):
            return _Wrong(405, f"only {' and '.join(methods)} here")
    shown = sorted({"/" + "/".join(route).replace("*", "NAME") for route in _ROUTES if "here" not in route})
    return _Wrong(404, f"there is no such page; there are {' '.join(shown)}")


def _query(text: str) -> dict[str, str]:
    try:
        pairs = parse_qsl(
            text, keep_blank_values=True, strict_parsing=bool(text), max_num_fields=_MOST_WORDS, errors="strict"
        )
    except (ValueError, UnicodeDecodeError):
        raise _Wrong(400, "what follows the ? is not NAME=VALUE&NAME=VALUE") from None
    if len(dict(pairs)) != len(pairs):
        raise _Wrong(400, "what follows the ? names something twice")
    return dict(pairs)


def _whole(asked: Mapping[str, str], name: str, least: int = 0) -> int | None:
    text = asked.get(name)
    if text is None:
        return None
    digits = text.removeprefix("-")
    if not (digits.isascii() and digits.isdigit() and len(digits) < 16) or int(text) < least:
        raise _Wrong(
            400, f"{name}={text[:40]!r}: a whole number is wanted" + ("" if least < 0 else f", from {least} on")
        )
    return int(text)


Stream = Literal["stdout", "stderr", "elasticd"]


def _asked(asked: Mapping[str, str]) -> Asked:
    stream = asked.get("stream", "stdout")
    if stream not in get_args(Stream):
        raise _Wrong(400, f"stream={stream[:40]!r}: one of {', '.join(get_args(Stream))}")
    limit = _whole(asked, "limit")
    return Asked(
        rank=_whole(asked, "rank") or 0,
        round=_whole(asked, "round", 1),
        stream=stream,
        offset=_whole(asked, "offset", -(1 << 50)) or 0,
        limit=ranklogs.MOST_BYTES if limit is None else min(limit, ranklogs.MOST_BYTES),
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
    raise _Wrong(400, 'the body is {"reason": "…"}, or there is none')


def _json(found: Mapping[str, Any], code: int = 200) -> Answer:
    text = json.dumps(found, ensure_ascii=False, default=str)
    return Answer(code, text.encode("utf-8", "replace") + b"\n")


def _logs(found: Logs) -> Answer:
    return Answer(200, found.data, "application/octet-stream", found.headers())
