"""The first page: the jobs, this node's first, and the nodes. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from elasticd_agent.model.phrases import count
from elasticd_agent.node.api.schema import JobStatus, JobSummary, NodeSummary
from elasticd_agent.node.dashboard import formatting
from elasticd_agent.node.dashboard.layout import banner, chip, section
from elasticd_agent.node.dashboard.markup import Child, Html, tag
from elasticd_agent.node.dashboard.status import JOB_STATE_STYLES, state
from elasticd_agent.system.durations import in_words

NODE_STATE_STYLES = {
    "ready": "good",
    "draining": "busy",
    "drained": "idle",
    "cordoned": "idle",
    "quarantined": "bad",
    "offline": "bad",
}
_SHOWN_NAMES = 4


def overview(
    jobs: Sequence[JobSummary],
    nodes: Sequence[NodeSummary],
    here: str,
    local: Mapping[str, JobStatus],
    problems: Sequence[str],
) -> list[Child]:
    """`local`: the jobs on this node, `here`, with their progress."""
    own = [row for row in jobs if here in row.nodes]
    others = [row for row in jobs if here not in row.nodes]
    unfinished = sum(1 for row in jobs if not row.ended)
    ready = sum(1 for row in nodes if row.state == "ready")
    of_jobs = f"{count(unfinished, 'job')} of {len(jobs)} not ended"
    total = f"{of_jobs} · {ready} of {count(len(nodes), 'node')} ready"
    return [
        tag("h1", "Jobs and nodes"),
        tag("p", f"{total} · {ready} of {count(len(nodes), 'node')} ready", class_="why", id="sum", data_live=True),
        tag("div", [banner("bad", one) for one in problems[:5]], id="troubles", data_live=True),
        section("here", f"Jobs on {here}", _jobs(own, local) or _empty("No job is scheduled on this node.")),
        tag("div", section("jobs", "Other jobs", _jobs(others, {})) if others else None, id="others", data_live=True),
        section("nodes", "Nodes", _nodes(nodes, here) or _empty("No node is registered.")),
    ]


def _jobs(rows: Sequence[JobSummary], local: Mapping[str, JobStatus]) -> Html | None:
    return _table(
        ("Job", "State", "Step", "Nodes", "Since", "Reason"),
        [
            (
                tag("a", row.job, href=formatting.job_url(row.job)),
                chip(*_state(row, local.get(row.job))),
                _step(local.get(row.job)),
                _short_list(row.nodes),
                _since(row),
                row.reason,
            )
            for row in rows
        ],
    )


def _nodes(rows: Sequence[NodeSummary], here: str) -> Html | None:
    return _table(
        ("Node", "State", "Slots", "GPUs", "Jobs", "Reason"),
        [
            (
                tag("span", tag("b", row.node) if row.node == here else row.node, title=row.address or None),
                chip(row.state, NODE_STATE_STYLES.get(row.state, "idle")),
                [_slots(row.used, row.slots), f" {row.used} of {row.slots}"],
                str(len(row.gpus) or "–"),
                _links(row.jobs),
                row.reason,
            )
            for row in rows
        ],
    )


def _slots(used: int, total: int) -> Html | None:
    """A box for each slot, filled if in use."""
    if not 0 < total <= 16:
        return None
    boxes = [
        tag("rect", x=i * 9, y=1, width=7, height=10, rx=1.5, class_="used" if i < used else "free")
        for i in range(total)
    ]
    width = total * 9 - 2
    return tag("svg", boxes, viewBox=f"0 0 {width} 12", width=width, class_="slots", aria_hidden="true")


def _state(row: JobSummary, job: JobStatus | None) -> tuple[str, str]:
    return state(job) if job is not None else (row.state, JOB_STATE_STYLES.get(row.state, "idle"))


def _step(job: JobStatus | None) -> Child:
    progress = job.known if job is not None else None
    if progress is None or progress.step is None:
        return "–"
    rate = progress.steps_per_second
    return [f"{progress.step:,}", None if rate is None else tag("span", f" {formatting.rate(rate)}", class_="quiet")]


def _since(row: JobSummary) -> str:
    if row.ended_seconds is not None:
        return f"ended {in_words(row.ended_seconds)} ago"
    return in_words(row.age_seconds) if row.age_seconds is not None else "–"


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
