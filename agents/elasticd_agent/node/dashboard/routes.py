"""The page's routes before the API's: /, /jobs/JOB, its files, and the way in and out for browsers.

It exists so that a browser is answered in HTML, and a pass (login.py) opens what a person reads and nothing else: with
it, only GET of the page's own paths is let in, so that no other site can have a browser do anything here. It reads
through the desk, shares answers among everybody who looks, and changes nothing.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import parse_qsl, unquote

from elasticd.errors import ElasticdError, StoreUnavailable, UsageError
from elasticd_agent.node.api.cluster import LogRequest, NodesUnavailable, NotFound
from elasticd_agent.node.api.routes import ApiRoutes
from elasticd_agent.node.api.server import HttpRequest, HttpResponse, UnauthenticatedRequest
from elasticd_agent.node.dashboard import decode as facts
from elasticd_agent.node.dashboard import format as words
from elasticd_agent.node.dashboard import job_page as jobpage
from elasticd_agent.node.dashboard import layout as frame
from elasticd_agent.node.dashboard.cache import ResponseCache
from elasticd_agent.node.dashboard.job_page import STREAMS, WINDOWS, LogTail, PageQuery
from elasticd_agent.node.dashboard.login import LoginCookies, LoginRateLimit, TokenVerifier
from elasticd_agent.node.dashboard.markup import Child, tag
from elasticd_agent.node.dashboard.overview import overview
from elasticd_agent.node.dashboard.status import problem
from elasticd_agent.system.bounded_io import DeadlineExceeded, run_within
from elasticd_agent.system.durations import in_words
from elasticd_agent.system.http_auth import AccessDenied

CACHE_S = 0.9
"""The script asks every two seconds: of several people who look each gets an answer that is newer than its last."""
EVIDENCE_S, MOST_EVIDENCE = 30.0, 8
TAIL_BYTES = 16 << 10
PAGE_TIMEOUT_S = 2.0
NODES_A_SECOND = 16
"""A page of a job on more nodes than twice that comes less often: each of them is asked for its ranks."""
MAX_OVERVIEW_JOBS = 8
"""Jobs of this node that are asked how they do, for the overview."""
_FORM = "application/x-www-form-urlencoded"


@dataclass(slots=True)
class DashboardRoutes:
    """Safe to call from many threads at once."""

    api: ApiRoutes
    token: TokenVerifier
    cookies: LoginCookies
    version: str
    rate_limit: LoginRateLimit = field(default_factory=lambda: LoginRateLimit(time.monotonic))
    _jobs: ResponseCache[dict[str, Any]] = field(default_factory=lambda: ResponseCache(CACHE_S))
    _evidence: ResponseCache[dict[str, Any]] = field(default_factory=lambda: ResponseCache(EVIDENCE_S, MOST_EVIDENCE))

    def is_public(self, method: str, path: str) -> bool:
        return self.api.is_public(method, path) or (method == "POST" and path in ("/login", "/logout"))

    def reject(self, knock: UnauthenticatedRequest, refused: AccessDenied) -> str | HttpResponse:
        ours = knock.method == "GET" and _is_dashboard_path(knock.path)
        if ours and refused.code == 401 and self.cookies.has_valid(knock.cookie):
            return "who has logged in"
        if not ours or "text/html" not in knock.accept:
            return self.api.reject(knock, refused)
        if refused.code == 401:
            then = knock.path + (f"?{knock.query}" if knock.query else "")
            why = "This page shows jobs, their logs and the nodes. It needs the agent's token."
            challenge = ("WWW-Authenticate", "Bearer")
            return frame.html_response(401, frame.login(why, then), frame.PUBLIC_POLICY, challenge)
        return _public_response(refused.code, "Not let in", refused.why)

    def answer(self, request: HttpRequest) -> HttpResponse:
        if request.method == "POST" and request.path == "/login":
            return self._login(request)
        if request.method == "POST" and request.path == "/logout":
            return _redirect("/", self.cookies.expire())
        if request.method != "GET" or not _is_dashboard_path(request.path):
            return self.api.answer(request)
        try:
            return self._page(request)
        except (NotFound, UsageError) as error:
            return self._error_page(404, "There is no such page", str(error), request)
        except StoreUnavailable as error:
            why = f"The store does not answer: {error}. Jobs go on meanwhile."
            return self._error_page(503, "The store is away", why, request)
        except (NodesUnavailable, DeadlineExceeded) as error:
            return self._error_page(504, "Nobody answers", str(error) or "the disk does not answer", request)

    # ---- the pages

    def _page(self, request: HttpRequest) -> HttpResponse:
        match [unquote(word, errors="replace") for word in request.path.split("/")[1:]]:
            case [""]:
                return self._overview(request)
            case ["page", name] if name in frame.ASSETS:
                return HttpResponse(200, frame.asset(name), frame.ASSETS[name])
            case ["jobs", job] if job:
                return self._job(request, job, _view(request.query))
            case ["jobs", job, "explain"] if job:
                return self._explain(request, job)
        raise NotFound("there are / and /jobs/JOB, and what docs/http.md lists")

    def _overview(self, request: HttpRequest) -> HttpResponse:
        desk = self.api.service
        here = desk.local.node
        both = self._jobs.get("/", lambda: {**desk.jobs(), "nodes": desk.nodes()["nodes"]})
        rows = both["jobs"]
        own = [row for row in rows if here in row["nodes"] and row["ended_at"] is None][:MAX_OVERVIEW_JOBS]
        content = overview(rows, both["nodes"], here, self._local_progress(own), [str(one) for one in both["troubles"]])
        return self._render(request, f"{here} · elasticd", *content)

    def _local_progress(self, rows: list[dict[str, Any]]) -> dict[str, facts.JobStatus]:
        """How this node's jobs are getting on, by its own word; those that do not say so in time are left out."""
        found: dict[str, facts.JobStatus] = {}
        until = time.monotonic() + PAGE_TIMEOUT_S
        for row in rows:
            try:
                known = run_within(max(0.0, until - time.monotonic()), functools.partial(self._local_job, row))
            except (ElasticdError, DeadlineExceeded):
                continue
            found[row["job"]] = facts.job_status({**row, "progress": known})
        return found

    def _local_job(self, row: Mapping[str, Any]) -> dict[str, Any]:
        name, number, desk = row["job"], row["number"], self.api.service
        return self._jobs.get((name, number, "here"), lambda: desk.local.progress(name, number, desk.now()))

    def _job(self, request: HttpRequest, name: str, view: PageQuery) -> HttpResponse:
        job = self._job_status(name)
        now = self.api.service.now()
        explained = self._explanation(job)
        content = jobpage.job_page(job, view, now, self._tail(job, view), explained)
        mark = "▲ " if problem(job) else ""
        every_s = max(frame.REFRESH_S, len(job.nodes) / NODES_A_SECOND)
        return self._render(request, f"{mark}{job.job}: {job.state} · elasticd", *content, every_s=every_s)

    def _explain(self, request: HttpRequest, name: str) -> HttpResponse:
        job = self._job_status(name)
        rows = self._evidence.get((name, job.number, "all"), lambda: self.api.service.explain(name, None))["nodes"]
        back = tag("p", tag("a", f"← {name}", href=words.job_url(name)))
        found = jobpage.explanation(name, rows, brief=False)
        return self._render(
            request, f"{name}: evidence · elasticd", back, tag("h1", "Who was to blame"), found, every_s=None
        )

    def _job_status(self, name: str) -> facts.JobStatus:
        return facts.job_status(self._jobs.get(name, lambda: self.api.service.job(name)))

    def _explanation(self, job: facts.JobStatus) -> Child:
        """The newest hang's; read once for each, since evidence does not change."""
        number = jobpage.last_hung_round(job.rounds)
        if not number:
            return jobpage.evidence_link(job.job)
        key, desk = (job.job, job.number, number), self.api.service
        try:
            found = run_within(PAGE_TIMEOUT_S, lambda: self._evidence.get(key, lambda: desk.explain(job.job, None)))
        except (ElasticdError, DeadlineExceeded):
            link = tag("a", "ask again", href=words.job_url(job.job, "/explain"))
            return tag("p", "Reading the evidence takes long: ", link, ".", class_="quiet")
        return jobpage.explanation(job.job, found["nodes"], brief=True)

    def _tail(self, job: facts.JobStatus, view: PageQuery) -> LogTail:
        asked = LogRequest(view.rank, None, view.stream, -TAIL_BYTES, TAIL_BYTES)
        try:
            logs = run_within(PAGE_TIMEOUT_S, lambda: self.api.service.logs(job.job, asked, None))
        except DeadlineExceeded:
            return LogTail(why=f"Who has it did not answer within {in_words(PAGE_TIMEOUT_S)}.")
        except ElasticdError as error:
            return LogTail(why=str(error))
        text = logs.data.decode("utf-8", "replace")
        if logs.start:  # the first line is cut
            text = text.partition("\n")[2] or text
        which = f"round {logs.round}, " if logs.round else ""
        return LogTail(text, f"{which}on {logs.node}, the last {len(logs.data):,} of {logs.size:,} bytes")

    def _render(
        self,
        request: HttpRequest,
        title: str,
        *content: Child,
        every_s: float | None = frame.REFRESH_S,
        code: int = 200,
    ) -> HttpResponse:
        desk, leave = self.api.service, bool(request.host)
        page = frame.page(title, desk.local.node, self.version, *content, now=desk.now(), leave=leave, every_s=every_s)
        return frame.html_response(code, page)

    def _error_page(self, code: int, title: str, why: str, request: HttpRequest) -> HttpResponse:
        said = [tag("h1", title), frame.banner("bad", why), tag("p", tag("a", "Jobs and nodes", href="/"))]
        return self._render(request, f"{title} · elasticd", *said, code=code)

    # ---- the way in

    def _login(self, request: HttpRequest) -> HttpResponse:
        asked = _form(request)
        then = _local_path(asked.get("then", "/"))
        if self.token.signing_key() is None:
            why = "This agent has no token, so nobody can log in: set http.token_file in agent.toml."
            return _public_response(403, "Nobody can log in", why)
        wait = self.rate_limit.attempt(request.host)
        if wait:
            why = f"There were too many wrong tokens. Try again in {in_words(wait)}."
            return frame.html_response(
                429, frame.login(why, then), frame.PUBLIC_POLICY, ("Retry-After", str(int(wait) + 1))
            )
        cookie = self.cookies.issue() if self.token.matches(asked.get("token", "")) else None
        if cookie is None:
            return frame.html_response(401, frame.login("That is not this agent's token.", then), frame.PUBLIC_POLICY)
        self.rate_limit.reset(request.host)
        return _redirect(then, cookie)


def dashboard_routes(
    api: ApiRoutes, token: TokenVerifier, version: str, *, tls: bool, clock: Callable[[], float] = time.time
) -> DashboardRoutes:
    return DashboardRoutes(api, token, LoginCookies(token, clock, tls=tls), version)


def _is_dashboard_path(path: str) -> bool:
    return path == "/" or path.startswith(("/jobs/", "/page/"))


def _view(query: str) -> PageQuery:
    """What makes no sense in a link shows what there is without it."""
    asked = _pairs(query)
    rank = asked.get("rank", "0")
    return PageQuery(
        window=found if (found := asked.get("window", "1h")) in WINDOWS else "1h",
        rank=int(rank) if rank.isascii() and rank.isdigit() and len(rank) < 8 else 0,
        stream=found if (found := asked.get("stream", "stdout")) in STREAMS else "stdout",
    )


def _form(request: HttpRequest) -> Mapping[str, str]:
    return _pairs(request.body.decode("ascii", "replace")) if request.content_type == _FORM else {}


def _pairs(text: str) -> dict[str, str]:
    try:
        return dict(parse_qsl(text, keep_blank_values=True, max_num_fields=32, errors="replace"))
    except ValueError:
        return {}


def _local_path(path: str) -> str:
    """Where to go on after the login: a page of ours, whatever the form said."""
    plain = path.isascii() and path.isprintable() and len(path) < 2000
    return path if plain and "\\" not in path and path.startswith("/jobs/") else "/"


def _redirect(where: str, cookie: str) -> HttpResponse:
    """303: what comes next is a GET."""
    return HttpResponse(303, b"", headers=(("Location", where), ("Set-Cookie", cookie)))


def _public_response(code: int, title: str, why: str) -> HttpResponse:
    said = [tag("h1", title), tag("p", why)]
    return frame.html_response(code, frame.public_page(f"{title} · elasticd", *said), frame.PUBLIC_POLICY)
