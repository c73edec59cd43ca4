"""The first page: a list of all jobs, to be searched, and the nodes. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from urllib.parse import quote, urlencode

from elasticd_agent.model.phrases import count, shortened
from elasticd_agent.node.api.job_list import JobList
from elasticd_agent.node.api.schema import JobStatus, JobSummary, NodeSummary
from elasticd_agent.node.dashboard import formatting
from elasticd_agent.node.dashboard.layout import banner, button, chip, section
from elasticd_agent.node.dashboard.markup import Child, Html, tag
from elasticd_agent.node.dashboard.status import JOB_STATE_STYLES, state
from elasticd_agent.node.records import submitter
from elasticd_agent.system.durations import in_words

NODE_STATE_STYLES = {
    "ready": "good",
    "draining": "busy",
    "drained": "idle",
    "cordoned": "idle",
    "quarantined": "bad",
    "lost": "bad",
    "offline": "bad",
}
STATES = ("unfinished", "running", "pending", "succeeded", "failed", "cancelled")
ROWS, NODE_ROWS = 100, 64
"""On a page."""
REASON_CHARS = 160
_SHOWN_NAMES = 4


@dataclass(frozen=True, slots=True)
class JobPage:
    """The jobs of one page, and how many there are."""

    shown: Sequence[JobSummary]
    matching: int
    unfinished: int
    all: int


@dataclass(frozen=True, slots=True)
class ListQuery:
    """Which jobs are listed: a link with it shows the same."""

    text: str = ""
    """Words that must all occur in the job's row."""
    state: str = ""
    """One of STATES; "": any."""
    page: int = 1

    def listed(self, jobs: JobList) -> JobPage:
        found = jobs.find(self.state, self.text.casefold().split())
        shown = [row.summary(jobs.now) for row in found[(self.page - 1) * ROWS : self.page * ROWS]]
        return JobPage(shown, len(found), len(jobs.unfinished), len(jobs.rows))

    def link(self, page: int) -> str:
        given = {"q": self.text, "state": self.state, "page": str(page) if page > 1 else ""}
        return "/?" + urlencode({name: value for name, value in given.items() if value}, errors="replace")


def overview(
    jobs: JobPage,
    nodes: Sequence[NodeSummary],
    here: str,
    local: Mapping[str, JobStatus],
    problems: Sequence[str],
    query: ListQuery,
    form_key: str = "",
) -> list[Child]:
    """`local`: the jobs on this node, `here`, with their progress."""
    ready = sum(1 for row in nodes if row.state == "ready")
    total = f"{jobs.unfinished:,} of {count(jobs.all, 'job')} not ended · {ready} of {count(len(nodes), 'node')} ready"
    none = "No job matches." if jobs.all else "No job was submitted yet."
    rows = [_jobs(jobs.shown, local) or _empty(none), _pages(query, jobs.matching)]
    heading = tag("div", tag("h2", "Jobs", id="jobs-title"), _form(query), class_="heading")
    listed = tag("div", rows, id="jobs", data_live=True)
    return [
        tag("h1", "Jobs and nodes"),
        tag("p", total, class_="why", id="sum", data_live=True),
        tag("div", [banner("bad", one) for one in problems[:5]], id="troubles", data_live=True),
        tag("section", heading, listed, aria_labelledby="jobs-title"),
        section("nodes", "Nodes", _node_list(nodes, here, form_key)),
    ]


def _form(query: ListQuery) -> Html:
    states = [tag("option", name or "any", value=name, selected=name == query.state) for name in ("", *STATES)]
    return tag(
        "form",
        tag("label", "Search ", tag("input", type="search", name="q", value=query.text)),
        tag("label", "State ", tag("select", states, name="state")),
        tag("button", "Show"),
        method="get",
        action="/",
        id="which",
    )


def _pages(query: ListQuery, matching: int) -> Html | None:
    pages = -(-matching // ROWS)
    if pages <= 1:
        return None
    first = (query.page - 1) * ROWS
    return tag(
        "nav",
        tag("a", "Newer", href=query.link(query.page - 1)) if query.page > 1 else None,
        tag("span", f" {first + 1:,} to {min(first + ROWS, matching):,} of {count(matching, 'job')} ", class_="quiet"),
        tag("a", "Older", href=query.link(query.page + 1)) if query.page < pages else None,
        aria_label="Pages",
        class_="below",
    )


def _jobs(rows: Sequence[JobSummary], local: Mapping[str, JobStatus]) -> Html | None:
    return _table(
        ("Job", "State", "Step", "Nodes", "By", "Since", "Reason"),
        [
            (
                tag("a", row.job, href=formatting.job_url(row.job)),
                chip(*_state(row, local.get(row.job))),
                _step(row, local.get(row.job)),
                _short_list(row.nodes),
                submitter(row.submitted_by),
                _since(row),
                _reason(row.reason),
            )
            for row in rows
        ],
    )


def _node_list(nodes: Sequence[NodeSummary], here: str, form_key: str) -> Child:
    """This node first, then those that take no work."""
    rows = sorted(nodes, key=lambda row: (row.node != here, row.state == "ready", row.node))
    more = len(rows) - NODE_ROWS
    listed = _nodes(rows[:NODE_ROWS], here, form_key) or _empty("No node is registered.")
    return [listed, _empty(f"and {count(more, 'more node')}: elasticd nodes lists all") if more > 0 else None]


def _nodes(rows: Sequence[NodeSummary], here: str, form_key: str) -> Html | None:
    return _table(
        ("Node", "State", "Slots", "GPUs", "Jobs", *(("Change",) if form_key else ()), "Reason"),
        [
            (
                tag("span", tag("b", row.node) if row.node == here else row.node, title=row.address or None),
                chip(row.state, NODE_STATE_STYLES.get(row.state, "idle")),
                [_slots(row.used, row.slots), f" {row.used} of {row.slots}"],
                str(len(row.gpus) or "–"),
                _links(row.jobs),
                *((_changes(row, form_key),) if form_key else ()),
                _reason(row.reason),
            )
            for row in rows
        ],
    )


def _changes(row: NodeSummary, form_key: str) -> Child:
    place = f"/nodes/{quote(row.node, safe='', errors='replace')}"
    if row.cordoned_by is not None:
        return button("Uncordon", f"{place}/uncordon", form_key)
    sure = tag("button", f"Move all jobs off {row.node}", formaction=f"{place}/drain")
    return tag(
        "form",
        tag("input", type="hidden", name="key", value=form_key),
        tag("button", "Cordon", formaction=f"{place}/cordon"),
        " ",
        tag("details", tag("summary", "Drain…"), sure, id=f"{place}/drain"),
        method="post",
        class_="act",
    )


def _slots(used: int, total: int) -> Html | None:
    """A box for each slot, filled if in use."""
    if not 0 < total <= 16:
        return None
    drawn = ["".join(f"M{i * 9},1h7v10h-7z" for i in slots) for slots in (range(used), range(used, total))]
    boxes = [tag("path", d=d, class_=name) for d, name in zip(drawn, ("used", "free"), strict=True) if d]
    width = total * 9 - 2
    return tag("svg", boxes, viewBox=f"0 0 {width} 12", width=width, class_="slots", aria_hidden="true")


def _state(row: JobSummary, job: JobStatus | None) -> tuple[str, str]:
    return state(job) if job is not None else (row.state, JOB_STATE_STYLES.get(row.state, "idle"))


def _step(row: JobSummary, job: JobStatus | None) -> Child:
    progress = job.known if job is not None else None
    if progress is None or progress.step is None or row.ended:
        return "–" if row.step is None else f"{row.step:,}"
    rate = progress.steps_per_second
    return [f"{progress.step:,}", None if rate is None else tag("span", f" {formatting.rate(rate)}", class_="quiet")]


def _since(row: JobSummary) -> str:
    if row.ended_seconds is not None:
        return f"ended {in_words(row.ended_seconds)} ago"
    return in_words(row.age_seconds) if row.age_seconds is not None else "–"


def _reason(text: str) -> Child:
    """A long one is whole in the tooltip, and on the job's own page. Its end says what happened, as "ValueError: …"."""
    if len(text) <= REASON_CHARS:
        return text
    end = text[-REASON_CHARS // 2 :].partition(" ")[2] or text[-REASON_CHARS // 2 :]
    return tag("span", f"{shortened(text, REASON_CHARS // 2)} {end}", title=text)


def _short_list(names: Sequence[str]) -> str:
    more = f" +{len(names) - _SHOWN_NAMES}" if len(names) > _SHOWN_NAMES else ""
    return ", ".join(names[:_SHOWN_NAMES]) + more or "–"


def _links(jobs: Sequence[str]) -> Child:
    found: list[Child] = []
    for job in jobs[:_SHOWN_NAMES]:
        found += [", " if found else None, tag("a", job, href=formatting.job_url(job))]
    more = f" +{len(jobs) - _SHOWN_NAMES}" if len(jobs) > _SHOWN_NAMES else None
    return [*found, more] if found else "–"


def _empty(sentence: str) -> Html:
    return tag("p", sentence, class_="quiet")


def _table(heads: Sequence[str], rows: Sequence[Sequence[Child]]) -> Html | None:
    if not rows:
        return None
    head = tag("tr", [tag("th", one, scope="col") for one in heads])
    body = [
        tag("tr", [tag("td", tag("span", cell), data_label=name) for name, cell in zip(heads, row, strict=True)])
        for row in rows
    ]
    return tag("table", tag("thead", head), tag("tbody", body))
