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
from elasticd_agent.node.api.cluster import Asked, Away, NoSuch
from elasticd_agent.node.api.routes import Api
from elasticd_agent.node.api.server import Answer, Knock, Request
from elasticd_agent.node.dashboard import decode as facts
from elasticd_agent.node.dashboard import format as words
from elasticd_agent.node.dashboard import job_page as jobpage
from elasticd_agent.node.dashboard import layout as frame
from elasticd_agent.node.dashboard.cache import Fresh
from elasticd_agent.node.dashboard.job_page import STREAMS, WINDOWS, Tail, View
from elasticd_agent.node.dashboard.login import Guesses, Passes, Token
from elasticd_agent.node.dashboard.markup import Child, tag
from elasticd_agent.node.dashboard.overview import overview
from elasticd_agent.node.dashboard.status import trouble
from elasticd_agent.system.bounded_io import Silent, within
from elasticd_agent.system.http_auth import Refused

FRESH_S = 0.9
"""The script asks every two seconds: of several people who look each gets an answer that is newer than its last."""
EVIDENCE_S, MOST_EVIDENCE = 30.0, 8
TAIL_BYTES = 16 << 10
TAIL_S = 2.0
NODES_A_SECOND = 16
"""A page of a job on more nodes than twice that comes less often: each of them is asked for its ranks."""
MOST_DOING = 8
"""Jobs of this node that are asked how they do, for the overview."""
_FORM = "application/x-www-form-urlencoded"


@dataclass(slots=True)
class Front:
    """Safe to call from many threads at once."""

    api: Api
    token: Token
    passes: Passes
    version: str
    guesses: Guesses = field(default_factory=lambda: Guesses(time.monotonic))
    _jobs: Fresh[dict[str, Any]] = field(default_factory=lambda: Fresh(FRESH_S))
    _evidence: Fresh[dict[str, Any]] = field(default_factory=lambda: Fresh(EVIDENCE_S, MOST_EVIDENCE))

    def is_open(self, method: str, path: str) -> bool:
        return self.api.is_open(method, path) or (method == "POST" and path in ("/login", "/logout"))

    def refused(self, knock: Knock, refused: Refused) -> str | Answer:
        ours = knock.method == "GET" and _is_ours(knock.path)
        if ours and refused.code == 401 and self.passes.good(knock.cookie):
            return "who has logged in"
        if not ours or "text/html" not in knock.accept:
            return self.api.refused(knock, refused)
        if refused.code == 401:
            then = knock.path + (f"?{knock.query}" if knock.query else "")
            why = "This page shows jobs, their logs and the nodes. It needs the agent's token."
            challenge = ("WWW-Authenticate", "Bearer")
            return frame.answer(401, frame.login(why, then), frame.OUTSIDE, challenge)
        return _outside(refused.code, "Not let in", refused.why)

    def answer(self, request: Request) -> Answer:
        if request.method == "POST" and request.path == "/login":
            return self._login(request)
        if request.method == "POST" and request.path == "/logout":
            return _go("/", self.passes.ended())
        if request.method != "GET" or not _is_ours(request.path):
            return self.api.answer(request)
        try:
            return self._page(request)
        except (NoSuch, UsageError) as error:
            return self._trouble(404, "There is no such page", str(error), request)
        except StoreUnavailable as error:
            why = f"The store does not answer: {error}. Jobs go on meanwhile."
            return self._trouble(503, "The store is away", why, request)
        except (Away, Silent) as error:
            return self._trouble(504, "Nobody answers", str(error) or "the disk does not answer", request)

    # ---- the pages

    def _page(self, request: Request) -> Answer:
        match [unquote(word, errors="replace") for word in request.path.split("/")[1:]]:
            case [""]:
                return self._overview(request)
            case ["page", name] if name in frame.FILES:
                return Answer(200, frame.file(name), frame.FILES[name])
            case ["jobs", job] if job:
                return self._job(request, job, _view(request.query))
            case ["jobs", job, "explain"] if job:
                return self._explain(request, job)
        raise NoSuch("there are / and /jobs/JOB, and what docs/http.md lists")

    def _overview(self, request: Request) -> Answer:
        desk = self.api.desk
        here = desk.here.node
        both = self._jobs.get("/", lambda: {**desk.jobs(), "nodes": desk.nodes()["nodes"]})
        rows = both["jobs"]
        own = [row for row in rows if here in row["nodes"] and row["ended_at"] is None][:MOST_DOING]
        content = overview(rows, both["nodes"], here, self._doing(own), [str(one) for one in both["troubles"]])
        return self._shown(request, f"{here} · elasticd", *content)

    def _doing(self, rows: list[dict[str, Any]]) -> dict[str, facts.Job]:
        """How this node's jobs are getting on, by its own word; those that do not say so in time are left out."""
        found: dict[str, facts.Job] = {}
        until = time.monotonic() + TAIL_S
        for row in rows:
            try:
                known = within(max(0.0, until - time.monotonic()), functools.partial(self._here, row))
            except (ElasticdError, Silent):
                continue
            found[row["job"]] = facts.job({**row, "progress": known})
        return found

    def _here(self, row: Mapping[str, Any]) -> dict[str, Any]:
        name, number, desk = row["job"], row["number"], self.api.desk
        return self._jobs.get((name, number, "here"), lambda: desk.here.about(name, number, desk.now()))

    def _job(self, request: Request, name: str, view: View) -> Answer:
        job = self._known(name)
        now = self.api.desk.now()
        explained = self._explained(job)
        content = jobpage.jobpage(job, view, now, self._tail(job, view), explained)
        mark = "▲ " if trouble(job) else ""
        every_s = max(frame.EVERY_S, len(job.nodes) / NODES_A_SECOND)
        return self._shown(request, f"{mark}{job.job}: {job.state} · elasticd", *content, every_s=every_s)

    def _explain(self, request: Request, name: str) -> Answer:
        job = self._known(name)
        rows = self._evidence.get((name, job.number, "all"), lambda: self.api.desk.explain(name, None))["nodes"]
        back = tag("p", tag("a", f"← {name}", href=words.link(name)))
        found = jobpage.explanation(name, rows, brief=False)
        return self._shown(
            request, f"{name}: evidence · elasticd", back, tag("h1", "Who was to blame"), found, every_s=None
        )

    def _known(self, name: str) -> facts.Job:
        return facts.job(self._jobs.get(name, lambda: self.api.desk.job(name)))

    def _explained(self, job: facts.Job) -> Child:
        """The newest hang's; read once for each, since evidence does not change."""
        number = jobpage.hung(job.rounds)
        if not number:
            return jobpage.look_for_evidence(job.job)
        key, desk = (job.job, job.number, number), self.api.desk
        try:
            found = within(TAIL_S, lambda: self._evidence.get(key, lambda: desk.explain(job.job, None)))
        except (ElasticdError, Silent):
            link = tag("a", "ask again", href=words.link(job.job, "/explain"))
            return tag("p", "Reading the evidence takes long: ", link, ".", class_="quiet")
        return jobpage.explanation(job.job, found["nodes"], brief=True)

    def _tail(self, job: facts.Job, view: View) -> Tail:
        asked = Asked(view.rank, None, view.stream, -TAIL_BYTES, TAIL_BYTES)
        try:
            logs = within(TAIL_S, lambda: self.api.desk.logs(job.job, asked, None))
        except Silent:
            return Tail(why=f"Who has it did not answer within {words.span(TAIL_S)}.")
        except ElasticdError as error:
            return Tail(why=str(error))
        text = logs.data.decode("utf-8", "replace")
        if logs.start:  # the first line is cut
            text = text.partition("\n")[2] or text
        which = f"round {logs.round}, " if logs.round else ""
        return Tail(text, f"{which}on {logs.node}, the last {len(logs.data):,} of {logs.size:,} bytes")

    def _shown(
        self, request: Request, title: str, *content: Child, every_s: float | None = frame.EVERY_S, code: int = 200
    ) -> Answer:
        desk, leave = self.api.desk, bool(request.host)
        page = frame.page(title, desk.here.node, self.version, *content, now=desk.now(), leave=leave, every_s=every_s)
        return frame.answer(code, page)

    def _trouble(self, code: int, title: str, why: str, request: Request) -> Answer:
        said = [tag("h1", title), frame.banner("bad", why), tag("p", tag("a", "Jobs and nodes", href="/"))]
        return self._shown(request, f"{title} · elasticd", *said, code=code)

    # ---- the way in

    def _login(self, request: Request) -> Answer:
        asked = _form(request)
        then = _local(asked.get("then", "/"))
        if self.token.key() is None:
            why = "This agent has no token, so nobody can log in: set http.token_file in agent.toml."
            return _outside(403, "Nobody can log in", why)
        wait = self.guesses.take(request.host)
        if wait:
            why = f"There were too many wrong tokens. Try again in {words.span(wait)}."
            return frame.answer(429, frame.login(why, then), frame.OUTSIDE, ("Retry-After", str(int(wait) + 1)))
        cookie = self.passes.made() if self.token.knows(asked.get("token", "")) else None
        if cookie is None:
            return frame.answer(401, frame.login("That is not this agent's token.", then), frame.OUTSIDE)
        self.guesses.right(request.host)
        return _go(then, cookie)


def front(api: Api, token: Token, version: str, *, tls: bool, clock: Callable[[], float] = time.time) -> Front:
    return Front(api, token, Passes(token, clock, tls=tls), version)


def _is_ours(path: str) -> bool:
    return path == "/" or path.startswith(("/jobs/", "/page/"))


def _view(query: str) -> View:
    """What makes no sense in a link shows what there is without it."""
    asked = _pairs(query)
    rank = asked.get("rank", "0")
    return View(
        window=found if (found := asked.get("window", "1h")) in WINDOWS else "1h",
        rank=int(rank) if rank.isascii() and rank.isdigit() and len(rank) < 8 else 0,
        stream=found if (found := asked.get("stream", "stdout")) in STREAMS else "stdout",
    )


def _form(request: Request) -> Mapping[str, str]:
    return _pairs(request.body.decode("ascii", "replace")) if request.kind == _FORM else {}


def _pairs(text: str) -> dict[str, str]:
    try:
        return dict(parse_qsl(text, keep_blank_values=True, max_num_fields=32, errors="replace"))
    except ValueError:
        return {}


def _local(path: str) -> str:
    """Where to go on after the login: a page of ours, whatever the form said."""
    plain = path.isascii() and path.isprintable() and len(path) < 2000
    return path if plain and "\\" not in path and path.startswith("/jobs/") else "/"


def _go(where: str, cookie: str) -> Answer:
    """303: what comes next is a GET."""
    return Answer(303, b"", headers=(("Location", where), ("Set-Cookie", cookie)))


def _outside(code: int, title: str, why: str) -> Answer:
    said = [tag("h1", title), tag("p", why)]
    return frame.answer(code, frame.outside(f"{title} · elasticd", *said), frame.OUTSIDE)
