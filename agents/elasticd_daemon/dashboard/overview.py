"""The first page: a list of all jobs, to be searched, and the nodes. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from urllib.parse import quote, urlencode

from elasticd_agent.model.phrases import count, shortened
from elasticd_agent.system.durations import in_words
from elasticd_daemon.api.schema import JobStatus, JobSummary, NodeSummary
from elasticd_daemon.api.views import JobList
from elasticd_daemon.dashboard.status import JOB_STATE_STYLES, state
from elasticd_daemon.records import submitter

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

    text: str = ""  #: words that must all occur in the job's row
    state: str = ""  #: one of STATES; "": any
    page: int = 1

    def listed(self, jobs: JobList) -> JobPage:
        matching = jobs.find(self.state, self.text.casefold().split())
        shown = matching[(self.page - 1) * ROWS : self.page * ROWS]
        return JobPage(shown, len(matching), len(jobs.unfinished), len(jobs.by_name))

    def link(self, page: int) -> str:
        given = {"q": self.text, "state": self.state, "page": str(page) if page > 1 else ""}
        return "/?" + urlencode({name: value for name, value in given.items() if value}, errors="replace")


def values(
    jobs: JobPage,
    nodes: Sequence[NodeSummary],
    here: str,
    local: Mapping[str, JobStatus],
    problems: Sequence[str],
    query: ListQuery,
    form_key: str = "",
) -> dict[str, object]:
    """The values of templates/overview.html. `local`: the jobs on this node, `here`, with their progress."""
    ready = sum(1 for row in nodes if row.state == "ready")
    first = (query.page - 1) * ROWS
    # This node first, then those that take no work.
    rows = sorted(nodes, key=lambda row: (row.node != here, row.state == "ready", row.node))
    return {
        "total": f"{jobs.unfinished:,} of {count(jobs.all, 'job')} not ended · "
        f"{ready} of {count(len(nodes), 'node')} ready",
        "problems": problems[:5],
        "jobs": jobs,
        "local": local,
        "query": query,
        "states": ("", *STATES),
        "pages": -(-jobs.matching // ROWS),
        "extent": f"{first + 1:,} to {min(first + ROWS, jobs.matching):,} of {count(jobs.matching, 'job')}",
        "nodes": rows[:NODE_ROWS],
        "more_nodes": len(rows) - NODE_ROWS,
        "here": here,
        "form_key": form_key,
        "node_styles": NODE_STATE_STYLES,
        "node_url": lambda node: f"/nodes/{quote(node, safe='', errors='replace')}",
        "shown_names": _SHOWN_NAMES,
        "state_of": _state,
        "since": _since,
        "short_list": _short_list,
        "submitter": submitter,
    }


def _state(row: JobSummary, job: JobStatus | None) -> tuple[str, str]:
    return state(job) if job is not None else (row.state, JOB_STATE_STYLES.get(row.state, "idle"))


def _since(row: JobSummary) -> str:
    if row.ended_seconds is not None:
        return f"ended {in_words(row.ended_seconds)} ago"
    return in_words(row.age_seconds) if row.age_seconds is not None else "–"


def both_ends(text: str) -> str:
    """A long reason without its middle. Its end says what happened, as "ValueError: …"."""
    if len(text) <= REASON_CHARS:
        return text
    end = text[-REASON_CHARS // 2 :].partition(" ")[2] or text[-REASON_CHARS // 2 :]
    return f"{shortened(text, REASON_CHARS // 2)} {end}"


def _short_list(names: Sequence[str]) -> str:
    more = f" +{len(names) - _SHOWN_NAMES}" if len(names) > _SHOWN_NAMES else ""
    return ", ".join(names[:_SHOWN_NAMES]) + more or "–"
