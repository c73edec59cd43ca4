"""The first page: the jobs, the unfinished ones first, and the nodes. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from urllib.parse import quote

from elasticd_agent.model.phrases import count, shortened
from elasticd_agent.system.durations import in_words
from elasticd_daemon.api.schema import JobSummary, NodeSummary
from elasticd_daemon.api.views import JobList
from elasticd_daemon.dashboard.status import JOB_STATE_STYLES
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
STATE_FILTERS = ("unfinished", "running", "pending", "succeeded", "failed", "cancelled")
ROWS, NODE_ROWS = 150, 64
MAX_REASON_CHARS = 160
_MAX_SHOWN_NAMES = 4


def template_values(
    jobs: JobList, nodes: Sequence[NodeSummary], here: str, problems: Sequence[str], state: str, form_key: str = ""
) -> dict[str, object]:
    """The values of templates/overview.html. `state`: of the jobs that are listed, one of STATE_FILTERS; "": any."""
    ready = sum(1 for row in nodes if row.state == "ready")
    matching = jobs.find(state)
    # This node first, then those that take no work.
    rows = sorted(nodes, key=lambda row: (row.node != here, row.state == "ready", row.node))
    return {
        "total": f"{len(jobs.unfinished):,} of {count(len(jobs.by_name), 'job')} not ended · "
        f"{ready} of {count(len(nodes), 'node')} ready",
        "problems": problems[:5],
        "jobs": matching[:ROWS],
        "more_jobs": len(matching) - ROWS,
        "state": state,
        "states": ("", *STATE_FILTERS),
        "nodes": rows[:NODE_ROWS],
        "more_nodes": len(rows) - NODE_ROWS,
        "here": here,
        "form_key": form_key,
        "job_styles": JOB_STATE_STYLES,
        "node_styles": NODE_STATE_STYLES,
        "node_url": lambda node: f"/nodes/{quote(node, safe='', errors='replace')}",
        "shown_names": _MAX_SHOWN_NAMES,
        "since": _age_or_end,
        "short_list": _shorten_list,
        "submitter": submitter,
    }


def _age_or_end(row: JobSummary) -> str:
    if row.ended_seconds is not None:
        return f"ended {in_words(row.ended_seconds)} ago"
    return in_words(row.age_seconds) if row.age_seconds is not None else "–"


def shorten_middle(text: str) -> str:
    """A long reason without its middle. Its end says what happened, as "ValueError: …"."""
    if len(text) <= MAX_REASON_CHARS:
        return text
    end = text[-MAX_REASON_CHARS // 2 :].partition(" ")[2] or text[-MAX_REASON_CHARS // 2 :]
    return f"{shortened(text, MAX_REASON_CHARS // 2)} {end}"


def _shorten_list(names: Sequence[str]) -> str:
    more = f" +{len(names) - _MAX_SHOWN_NAMES}" if len(names) > _MAX_SHOWN_NAMES else ""
    return ", ".join(names[:_MAX_SHOWN_NAMES]) + more or "–"
