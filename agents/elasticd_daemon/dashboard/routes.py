"""The dashboard's routes in front of the API's: /, /jobs/JOB, its buttons, the page's files, login and logout.

A login cookie (login.py) admits to the dashboard's own paths only, and changes something only by POST of a form that
one of the visitor's own pages has made, so that no other site can make a browser change anything here. Answers are
shared among all open pages.
"""

from __future__ import annotations

import os
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field, replace
from typing import Generic, TypeVar
from urllib.parse import parse_qsl, unquote

from elasticd.errors import ElasticdError, StoreUnavailable, UsageError
from elasticd_agent.system.bounded_io import DeadlineExceeded, run_within
from elasticd_agent.system.durations import in_words
from elasticd_agent.system.network.http_auth import AccessDenied, TokenAuth
from elasticd_agent.system.network.http_server import HttpError, HttpRequest, HttpResponse, json_response
from elasticd_daemon.api.node_files import NodesUnavailable, NotFound
from elasticd_daemon.api.rank_logs import LogRequest
from elasticd_daemon.api.routes import ApiRoutes
from elasticd_daemon.api.schema import Answer, JobStatus, NodeSummary
from elasticd_daemon.api.service import Conflict
from elasticd_daemon.api.views import JobList
from elasticd_daemon.dashboard import formatting, job_page, layout, overview
from elasticd_daemon.dashboard.job_page import LOG_STREAMS, TIME_WINDOWS, EvidencePages, LogTail, PageQuery
from elasticd_daemon.dashboard.login import CODE_LIFETIME_S, LoginCookies, OneTimeCodes
from elasticd_daemon.dashboard.overview import STATE_FILTERS
from elasticd_daemon.dashboard.status import job_problem
from elasticd_daemon.records import submitter

CACHE_MAX_AGE_S = 0.9
"""The script asks every two seconds: every open page gets an answer that is newer than its last."""
EVIDENCE_MAX_AGE_S = 30.0
MAX_CACHED_EVIDENCE = 8
LOG_TAIL_BYTES = 16 << 10
PAGE_TIMEOUT_S = 2.0
NODES_ASKED_PER_S = 16
"""A page of a job on more than twice this many nodes is refreshed less often: each node is asked for its ranks."""
NO_TOKEN_REASON = "This agent has no token: set http.token_file in agent.toml."
_TOKEN_NEEDED_REASON = "This page shows jobs, their logs and the nodes. It needs the agent's token."
_LINK_USED_REASON = "This link was used, or is too old: `elasticd open` prints a new one. Or give the token."
_NO_TLS_REASON = (
    "the token would cross the network in plain text. Give the agent a certificate (http.tls_cert in agent.toml), or "
    "open this page as http://localhost through a tunnel, ssh -L or kubectl port-forward"
)
_FOREIGN_FORM_REASON = "This form does not come from a page that is open in this browser: load the page again."
_PUBLIC_ROUTES = {("POST", "/login"), ("POST", "/logout"), ("GET", "/login")}
_FORM_TYPE = "application/x-www-form-urlencoded"

_Overview = tuple[JobList, list[NodeSummary], list[str]]


V = TypeVar("V")


@dataclass(slots=True)
class _CacheEntry(Generic[V]):
    lock: threading.Lock = field(default_factory=threading.Lock)
    made_at: float = float("-inf")
    values: list[V] = field(default_factory=list)
    error: Exception | None = None


class ResponseCache(Generic[V]):
    """Values that many readers share: made once, kept for `max_age_s`, and the oldest dropped beyond `max_entries`.

    Readers of one key wait for the one that makes it, so a page that fifty people have open costs as much as one. An
    exception is kept as a value is: a store that does not answer is asked once.
    """

    def __init__(self, max_age_s: float, max_entries: int = 64, clock: Callable[[], float] = time.monotonic) -> None:
        self._max_age_s = max_age_s
        self._max_entries = max_entries
        self._clock = clock
        self._lock = threading.Lock()
        self._entries: OrderedDict[Hashable, _CacheEntry[V]] = OrderedDict()

    def get_or_make(self, key: Hashable, make: Callable[[], V]) -> V:
        """Concurrent callers wait for one `make`. Raises what `make` raised."""
        with self._lock:
            entry = self._entries.setdefault(key, _CacheEntry())
            self._entries.move_to_end(key)
            while len(self._entries) > self._max_entries:
                self._entries.popitem(last=False)
        with entry.lock:
            if self._clock() - entry.made_at >= self._max_age_s:
                entry.values, entry.error = [], None
                try:
                    entry.values = [make()]
                except Exception as error:  # noqa: BLE001 raised below, to every caller
                    entry.error = error
                entry.made_at = self._clock()
            if entry.error is not None:
                raise entry.error.with_traceback(None)
            return entry.values[0]


@dataclass(slots=True)
class DashboardRoutes:
    """The routes of the dashboard, and of the HTTP API behind them. Safe to call from many threads at once.

    A browser is let in by a cookie, which it gets for a token, or for a one-time code that `elasticd open` prints. A
    request that changes something needs more: it must come from a page of ours (no other site's), and carry the key of
    its form. So another page that the person has open cannot cancel a job.

    Pages are made on the server, where the template engine escapes every value; a script of our own asks for them again
    every two seconds. Text of workers, job names and reasons are foreign text and are treated as such.
    """

    api: ApiRoutes
    token_auth: TokenAuth
    cookies: LoginCookies
    version: str
    base_url: str = ""  #: the address of the dashboard for a browser on this machine: http://127.0.0.1:9411
    codes: OneTimeCodes = field(default_factory=lambda: OneTimeCodes(time.monotonic))
    _overviews: ResponseCache[_Overview] = field(default_factory=lambda: ResponseCache(CACHE_MAX_AGE_S))
    _jobs: ResponseCache[JobStatus] = field(default_factory=lambda: ResponseCache(CACHE_MAX_AGE_S))
    _evidence: ResponseCache[Answer] = field(
        default_factory=lambda: ResponseCache(EVIDENCE_MAX_AGE_S, MAX_CACHED_EVIDENCE)
    )

    def is_public(self, method: str, path: str) -> bool:
        return self.api.is_public(method, path) or (method, path) in _PUBLIC_ROUTES

    def admit_or_reject(self, request: HttpRequest, denied: AccessDenied) -> str | HttpResponse:
        """Return the response to a request without valid credentials, or the visitor whose cookie replaces them.

        Programs get the API's JSON; browsers get the page to log in, which returns to where they wanted to go.
        """
        is_page = request.method == "GET" and _is_dashboard_path(request.path)
        is_button = request.method == "POST" and _parse_button_path(request.path) is not None
        may_log_in = self.cookies.may_log_in(request.client_host, request.host_header, request.peer_uid)
        visitor = self.cookies.visitor(request.cookie, request.peer_uid) if may_log_in else None
        if (is_page or is_button) and denied.code == 401 and visitor is not None:
            return str(visitor)
        if not is_page or "text/html" not in request.accept:
            return self.api.admit_or_reject(request, denied)
        if denied.code == 401 and not may_log_in:
            return self._login_needs_tls()
        if denied.code == 401:
            then = request.path + (f"?{request.query}" if request.query else "")
            return self._login_form(401, _TOKEN_NEEDED_REASON, then, ("WWW-Authenticate", "Bearer"))
        return _message_response(denied.code, "Access denied", denied.why)

    def answer(self, request: HttpRequest) -> HttpResponse:
        if request.method == "POST" and request.path in ("/login", "/logout") and request.is_cross_origin:
            return _message_response(403, "Not allowed", _FOREIGN_FORM_REASON)
        if request.method == "POST" and request.path == "/login":
            return self._log_in(request)
        if request.method == "GET" and request.path == "/login":
            return self._redeem_login_code(request)
        if request.method == "POST" and request.path == "/v1/login":
            return self._issue_login_code(request.requested_by)
        if request.method == "POST" and request.path == "/logout":
            return _redirect("/", self.cookies.logout_header())
        pressed = _parse_button_path(request.path) if request.method == "POST" else None
        if pressed is None and (request.method != "GET" or not _is_dashboard_path(request.path)):
            return self.api.answer(request)
        try:
            return self._dispatch_page(request) if pressed is None else self._press_button(request, *pressed)
        except Conflict as error:
            return self._error_page(409, "Not now", str(error), request)
        except (NotFound, UsageError) as error:
            return self._error_page(404, "Page not found", str(error), request)
        except StoreUnavailable as error:
            why = f"The store does not answer: {error}. Running jobs continue."
            return self._error_page(503, "The store is unavailable", why, request)
        except (NodesUnavailable, DeadlineExceeded) as error:
            return self._error_page(504, "No answer", str(error) or "the disk does not answer", request)

    def _dispatch_page(self, request: HttpRequest) -> HttpResponse:
        match [unquote(word, errors="replace") for word in request.path.split("/")[1:]]:
            case [""]:
                return self._overview_page(request)
            case ["page", name] if name in layout.ASSET_TYPES:
                return HttpResponse(200, layout.read_asset(name), layout.ASSET_TYPES[name])
            case ["jobs", job] if job:
                return self._job_page(request, job, _parse_page_query(request.query))
            case ["jobs", job, "explain"] if job:
                return self._evidence_page(request, job)
        raise NotFound("there are / and /jobs/JOB, and the routes in elasticd docs http")

    def _overview_page(self, request: HttpRequest) -> HttpResponse:
        here = self.api.service.local.node
        jobs, nodes, problems = self._overviews.get_or_make("/", self.api.service.overview)
        state = _parse_pairs(request.query).get("state", "")
        values = overview.template_values(
            jobs, nodes, here, problems, state if state in STATE_FILTERS else "", self._form_key(request)
        )
        return self._render(request, "overview.html", f"{here} · elasticd", values)

    def _form_key(self, request: HttpRequest) -> str:
        """The key of this page's buttons; "" for one who may not press any."""
        visitor = self.cookies.visitor(request.cookie, request.peer_uid)
        return visitor.form_key if visitor is not None and visitor.may_operate else ""

    def _press_button(self, request: HttpRequest, kind: str, target: str, action: str) -> HttpResponse:
        """Do what a button asks for: cancel, dump, cordon, drain or uncordon. The page that follows
        shows the result.
        """
        visitor = self.cookies.visitor(request.cookie, request.peer_uid)
        if visitor is None or request.is_cross_origin:
            return self._error_page(403, "Not allowed", _FOREIGN_FORM_REASON, request)
        if not visitor.may_operate:
            why = f"{visitor.name} may only read: its token is in http.read_only of agent.toml."
            return self._error_page(403, "Not allowed", why, request)
        if not visitor.owns_form_key(_parse_form(request).get("key", "")):
            return self._error_page(403, "Not allowed", _FOREIGN_FORM_REASON, request)
        service, by = self.api.service, request.requested_by
        where = formatting.job_url(target) if kind == "jobs" else "/"
        match action:
            case "cancel":
                service.cancel(target, by)
            case "dump":
                service.dump(target)
                where = formatting.job_url(target, "/explain")
            case "uncordon":
                service.uncordon(target)
            case _:
                service.cordon(target, drain=action == "drain", reason="", by=by)
        return _redirect(where)

    def _job_page(self, request: HttpRequest, name: str, query: PageQuery) -> HttpResponse:
        """Return a job's page. A job that failed shows the stderr of the rank that failed first, unless the reader
        chose another.
        """
        job = self._job_status(name)
        now = self.api.service.clock()
        rank = job.failed_rank
        if rank is not None and "rank" not in _parse_pairs(request.query):
            query = replace(query, rank=rank, stream="stderr")
        failure = None if rank is None else self._read_log_tail(job, PageQuery(rank=rank, stream="stderr"))
        key, evidence = self._form_key(request), self._newest_evidence(job)
        values = job_page.template_values(job, query, now, self._read_log_tail(job, query), evidence, failure, key)
        mark = "▲ " if job_problem(job) else ""
        refresh_s = max(layout.REFRESH_INTERVAL_S, len(job.nodes) / NODES_ASKED_PER_S)
        title = f"{mark}{job.job}: {job.state} · elasticd"
        return self._render(request, "job.html", title, values, refresh_s=refresh_s)

    def _evidence_page(self, request: HttpRequest, name: str) -> HttpResponse:
        job = self._job_status(name)
        rows = self._evidence.get_or_make((name, job.number, "all"), lambda: self.api.service.explain(name, None))[
            "nodes"
        ]
        values = {"job": name, "evidence": job_page.evidence_pages(rows, brief=False)}
        return self._render(request, "evidence.html", f"{name}: evidence · elasticd", values, refresh_s=None)

    def _job_status(self, name: str) -> JobStatus:
        return self._jobs.get_or_make(name, lambda: self.api.service.job_status(name))

    def _newest_evidence(self, job: JobStatus) -> EvidencePages | None:
        """The newest hang's; read once for each, since evidence does not change. None: no round followed a hang."""
        number = max((row.round for row in job.known.rounds if row.cause == "hung"), default=0)
        if not number:
            return None
        key, service = (job.job, job.number, number), self.api.service
        try:
            answer = run_within(
                PAGE_TIMEOUT_S, lambda: self._evidence.get_or_make(key, lambda: service.explain(job.job, None)), job.job
            )
        except (ElasticdError, DeadlineExceeded):
            return EvidencePages(is_late=True)
        return job_page.evidence_pages(answer["nodes"], brief=True)

    def _read_log_tail(self, job: JobStatus, query: PageQuery) -> LogTail:
        request = LogRequest(query.rank, None, query.stream, -LOG_TAIL_BYTES, LOG_TAIL_BYTES)
        try:
            logs = run_within(PAGE_TIMEOUT_S, lambda: self.api.service.read_log(job.job, request), job.job)
        except DeadlineExceeded:
            return LogTail(why=f"Its node did not answer within {in_words(PAGE_TIMEOUT_S)}.")
        except ElasticdError as error:
            return LogTail(why=str(error))
        text = logs.data.decode("utf-8", "replace")
        if logs.start:  # the first line is cut
            text = text.partition("\n")[2] or text
        round = f"round {logs.round}, " if logs.round else ""
        return LogTail(text, f"{round}on {logs.node}, the last {len(logs.data):,} of {logs.size:,} bytes")

    def _render(
        self,
        request: HttpRequest,
        template: str,
        title: str,
        values: Mapping[str, object],
        *,
        refresh_s: float | None = layout.REFRESH_INTERVAL_S,
        code: int = 200,
    ) -> HttpResponse:
        service, has_logout_button = self.api.service, bool(request.client_host)
        node, now = service.local.node, service.clock()
        page = layout.render_page(
            template,
            title,
            node,
            self.version,
            values,
            now=now,
            has_logout_button=has_logout_button,
            refresh_s=refresh_s,
        )
        return layout.html_response(code, page)

    def _error_page(self, code: int, title: str, why: str, request: HttpRequest) -> HttpResponse:
        return self._render(request, "error.html", f"{title} · elasticd", {"heading": title, "why": why}, code=code)

    def _log_in(self, request: HttpRequest) -> HttpResponse:
        """Check a token and set the cookie. Wrong tokens of one host are counted, and soon have to wait."""
        form = _parse_form(request)
        target = _safe_login_target(form.get("then", "/"))
        if self.token_auth.fingerprint() is None:
            return _message_response(403, "Login is disabled", NO_TOKEN_REASON)
        if not self.cookies.may_log_in(request.client_host, request.host_header, request.peer_uid):
            return self._login_needs_tls()
        holder = self.token_auth.holder(form.get("token", ""))
        if holder is not None:
            cookie = self.cookies.login_header(holder.name, holder.access == "operate", request.peer_uid)
            return _redirect(target, cookie or "")
        if wait := self.token_auth.deny_wrong_token(request.client_host).retry_after_s:
            why = f"Too many wrong tokens. Try again in {in_words(wait)}."
            return self._login_form(429, why, target, ("Retry-After", str(int(wait) + 1)))
        return self._login_form(401, "That is not the token of this page.", target)

    def _login_form(self, code: int, why: str, then: str, *headers: tuple[str, str]) -> HttpResponse:
        page = layout.render_public_page("login.html", "Log in · elasticd", why=why, then=then)
        return layout.html_response(code, page, layout.PUBLIC_POLICY, *headers)

    def _login_needs_tls(self) -> HttpResponse:
        return _message_response(403, "Login needs TLS", f"{_NO_TLS_REASON[0].upper()}{_NO_TLS_REASON[1:]}.")

    def _issue_login_code(self, by: str) -> HttpResponse:
        """A path that logs one browser in, for a caller of the API, who has full access."""
        if self.token_auth.fingerprint() is None:
            raise HttpError(409, self.token_auth.problem() or NO_TOKEN_REASON)
        host = self.base_url.partition("://")[2]
        if not self.cookies.may_log_in("127.0.0.1", host, os.getuid()):
            raise HttpError(409, f"a browser may not log in at {self.base_url}: {_NO_TLS_REASON}")
        path = f"/login?code={self.codes.issue(submitter(by))}"
        return json_response({"path": path, "base": self.base_url, "expires_seconds": CODE_LIFETIME_S}, 201)

    def _redeem_login_code(self, request: HttpRequest) -> HttpResponse:
        """Log in by a one-time code. A code is valid once and for a short time, since it stands in
        a browser's history.
        """
        if not self.cookies.may_log_in(request.client_host, request.host_header, request.peer_uid):
            return self._login_needs_tls()
        name = self.codes.redeem(_parse_pairs(request.query).get("code", ""))
        if name is not None and (cookie := self.cookies.login_header(name, True, request.peer_uid)) is not None:
            return _redirect("/", cookie)
        return self._login_form(401, _LINK_USED_REASON, "/")


def _parse_button_path(path: str) -> tuple[str, str, str] | None:
    """jobs or nodes, which one, and what is to be done."""
    match [unquote(word, errors="replace") for word in path.split("/")[1:]]:
        case ["jobs", job, "cancel" | "dump" as action] if job:
            return "jobs", job, action
        case ["nodes", node, "cordon" | "drain" | "uncordon" as action] if node:
            return "nodes", node, action
    return None


def _is_dashboard_path(path: str) -> bool:
    return path == "/" or path.startswith(("/jobs/", "/page/"))


def _parse_page_query(query: str) -> PageQuery:
    """Values that make no sense are replaced by the defaults."""
    values = _parse_pairs(query)
    rank = values.get("rank", "0")
    return PageQuery(
        window=found if (found := values.get("window", "1h")) in TIME_WINDOWS else "1h",
        rank=int(rank) if rank.isascii() and rank.isdigit() and len(rank) < 8 else 0,
        stream=next((stream for stream in LOG_STREAMS if stream == values.get("stream")), "stdout"),
    )


def _parse_form(request: HttpRequest) -> Mapping[str, str]:
    return _parse_pairs(request.body.decode("ascii", "replace")) if request.content_type == _FORM_TYPE else {}


def _parse_pairs(text: str) -> dict[str, str]:
    try:
        return dict(parse_qsl(text, keep_blank_values=True, max_num_fields=32, errors="replace"))
    except ValueError:
        return {}


def _safe_login_target(path: str) -> str:
    """The target after the login: always a page of this agent."""
    plain = path.isascii() and path.isprintable() and len(path) < 2000
    return path if plain and "\\" not in path and path.startswith("/jobs/") else "/"


def _redirect(where: str, cookie: str = "") -> HttpResponse:
    """303: the browser continues with a GET."""
    headers = (("Location", where), *((("Set-Cookie", cookie),) if cookie else ()))
    return HttpResponse(303, b"", headers=headers)


def _message_response(code: int, title: str, why: str) -> HttpResponse:
    page = layout.render_public_page("message.html", f"{title} · elasticd", heading=title, why=why)
    return layout.html_response(code, page, layout.PUBLIC_POLICY)
