"""The first page: the jobs, this node's first, and the nodes. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from elasticd_agent.model.phrases import count
from elasticd_agent.node.dashboard import decode as facts
from elasticd_agent.node.dashboard import format as words
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
    "away": "bad",
}


def overview(
    jobs: Sequence[Mapping[str, Any]],
    nodes: Sequence[Mapping[str, Any]],
    here: str,
    doing: Mapping[str, facts.JobStatus],
    troubles: Sequence[str],
) -> list[Child]:
    """`jobs` and `nodes` as the API answers them; `doing`: how those on this node, `here`, are getting on."""
    mine = [row for row in jobs if here in row["nodes"]]
    others = [row for row in jobs if here not in row["nodes"]]
    live = sum(1 for row in jobs if row["ended_at"] is None)
    ready = sum(1 for row in nodes if row["state"] == "ready")
    return [
        tag("h1", "Jobs and nodes"),
        tag(
            "p",
            f"{count(live, 'job')} of {len(jobs)} not ended · {ready} of {count(len(nodes), 'node')} ready",
            class_="why",
            id="sum",
            data_live=True,
        ),
        tag("div", [banner("bad", one) for one in troubles[:5]], id="troubles", data_live=True),
        section("here", f"Jobs on {here}", _jobs(mine, doing) or _empty("No job has a place on this node.")),
        tag("div", section("jobs", "Other jobs", _jobs(others, {})) if others else None, id="others", data_live=True),
        section("nodes", "Nodes", _nodes(nodes, here) or _empty("No agent has announced one.")),
    ]


def _jobs(rows: Sequence[Mapping[str, Any]], doing: Mapping[str, facts.JobStatus]) -> Html | None:
    return _table(
        ("Job", "State", "Step", "Nodes", "Since", "Why"),
        [
            (
                tag("a", row["job"], href=words.job_url(row["job"])),
                chip(*_state(row, doing.get(row["job"]))),
                _step(doing.get(row["job"])),
                _short_list(row["nodes"]),
                _since(row),
                row["reason"],
            )
            for row in rows
        ],
    )


def _nodes(rows: Sequence[Mapping[str, Any]], here: str) -> Html | None:
    return _table(
        ("Node", "State", "Slots", "GPUs", "Jobs", "Why"),
        [
            (
                tag(
                    "span", tag("b", row["node"]) if row["node"] == here else row["node"], title=row["address"] or None
                ),
                chip(row["state"], NODE_STATE_STYLES.get(row["state"], "idle")),
                [_slots(row["used"], row["slots"]), f" {row['used']} of {row['slots']}"],
                str(len(row["gpus"]) or "–"),
                _links(row["jobs"]),
                row["reason"],
            )
            for row in rows
        ],
    )


def _slots(used: int, there: int) -> Html | None:
    """As many boxes as there are slots, those in use filled."""
    if not 0 < there <= 16:
        return None
    boxes = [
        tag("rect", x=i * 9, y=1, width=7, height=10, rx=1.5, class_="used" if i < used else "free")
        for i in range(there)
    ]
    return tag("svg", boxes, viewBox=f"0 0 {there * 9 - 2} 12", width=there * 9 - 2, class_="slots", aria_hidden="true")


def _state(row: Mapping[str, Any], job: facts.JobStatus | None) -> tuple[str, str]:
    return state(job) if job is not None else (row["state"], JOB_STATE_STYLES.get(row["state"], "idle"))


def _step(job: facts.JobStatus | None) -> Child:
    if job is None or job.step is None:
        return "–"
    return [f"{job.step:,}", tag("span", f" {words.rate(job.rate)}", class_="quiet") if job.rate is not None else None]


def _since(row: Mapping[str, Any]) -> str:
    if row["ended_seconds"] is not None:
        return f"ended {in_words(row['ended_seconds'])} ago"
    return in_words(row["age_seconds"]) if row["age_seconds"] is not None else "–"


def _short_list(names: Sequence[str]) -> str:
    more = f" +{len(names) - 4}" if len(names) > 4 else ""
    return ", ".join(names[:4]) + more or "–"


def _links(jobs: Sequence[str]) -> Child:
    found: list[Child] = []
    for job in jobs[:4]:
        found += [", " if found else None, tag("a", job, href=words.job_url(job))]
    return [*found, f" +{len(jobs) - 4}" if len(jobs) > 4 else None] if found else "–"


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
