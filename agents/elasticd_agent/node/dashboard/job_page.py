"""One job whole: what it does, how it went, its ranks, its rounds, who was to blame, what it wrote. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlencode

from elasticd_agent.model.phrases import count
from elasticd_agent.node.dashboard import format as words
from elasticd_agent.node.dashboard import ranks
from elasticd_agent.node.dashboard import rounds as history
from elasticd_agent.node.dashboard.chart import chart
from elasticd_agent.node.dashboard.decode import JobStatus, RoundStatus
from elasticd_agent.node.dashboard.layout import banner, chip, section
from elasticd_agent.node.dashboard.markup import Child, Html, joined, tag
from elasticd_agent.node.dashboard.status import problem, state
from elasticd_agent.system.durations import in_words

WINDOWS: dict[str, float | None] = {"10m": 600.0, "1h": 3600.0, "1d": 86400.0, "all": None}
_NAMES = {"10m": "10 min", "1h": "1 hour", "1d": "1 day", "all": "all of it"}
STREAMS = ("stdout", "stderr", "elasticd")


@dataclass(frozen=True, slots=True)
class PageQuery:
    """What of a job is looked at: the page's query, so that a link to it shows the same."""

    window: str = "1h"
    rank: int = 0
    stream: str = "stdout"

    def link(self, job: str, **other: str) -> str:
        query = {"window": self.window, "rank": str(self.rank), "stream": self.stream, **other}
        return words.job_url(job, f"?{urlencode(query)}")


@dataclass(frozen=True, slots=True)
class LogTail:
    """The end of a log. `text` without anything to say is "", `why`: there is none."""

    text: str = ""
    where: str = ""
    why: str = ""


def job_page(job: JobStatus, view: PageQuery, now: float, tail: LogTail, explained: Child) -> list[Child]:
    return [
        tag("h1", job.job, " ", tag("span", chip(*state(job)), id="state", data_live=True, role="status")),
        tag("div", _summary(job), id="why", data_live=True),
        tag("dl", _tiles(job), class_="tiles", id="tiles", data_live=True),
        section("course", "How it went", _history(job, view, now), more=_windows(job, view)),
        section("ranks", "Ranks", _ranks(job)),
        section("rounds", "Rounds", _rounds(job, now)),
        section("blame", "Who was to blame", explained),
        tag("div", _log(job, view, tail), class_="log"),
    ]


def _summary(job: JobStatus) -> list[Child]:
    said: list[Child] = []
    if wrong := problem(job):
        said.append(banner("warn", wrong[1]))
    said += [banner("warn", f"{node} does not answer: {why}") for node, why in job.unreachable_nodes[:3]]
    if job.ended and job.ended_s is not None:
        code = f" with exit code {job.exit_code}" if job.exit_code is not None else ""
        said.append(tag("p", f"Ended {in_words(job.ended_s)} ago{code}: {job.reason}", class_="why"))
    else:
        said.append(tag("p", job.reason, class_="why"))
    return said


def _tiles(job: JobStatus) -> list[Html]:
    faulty = [one for one in job.rounds if not one.planned]
    lost = [one.lost_s for one in faulty if one.lost_s is not None]
    again = sum(one.lost_steps for one in faulty if one.lost_steps is not None)
    saved, most = job.checkpoint, job.max_workers
    workers = str(job.world_size) if job.world_size and not job.ended else "–"
    fewer = most is not None and most != job.world_size and not job.ended
    return [
        _tile("Step", "–" if job.step is None else f"{job.step:,}", "" if job.rate is None else words.rate(job.rate)),
        _tile("Workers", workers, f"of at most {most}" if fewer else ""),
        _tile("Round", str(job.round or "–"), "" if job.restarts is None else count(job.restarts, "restart")),
        _tile(
            "Checkpoint",
            "none" if saved is None else f"step {saved.step:,}",
            "" if saved is None or saved.age_s is None else f"{in_words(saved.age_s)} ago",
        ),
        _tile("Goodput", "–" if job.goodput is None else f"{100 * job.goodput:.1f} %", "of its time counted"),
        _tile(
            "Lost",
            in_words(sum(lost)) if lost else "nothing",
            f"{count(len(faulty), 'fault')}, {count(again, 'step')} again" if lost else "",
        ),
    ]


def _tile(name: str, value: str, more: str) -> Html:
    return tag("div", tag("dt", name), tag("dd", value, tag("span", more) if more else None))


def _windows(job: JobStatus, view: PageQuery) -> Html:
    links = [
        tag(
            "a",
            _NAMES[name],
            href=view.link(job.job, window=name),
            aria_current="true" if name == view.window else None,
        )
        for name in WINDOWS
    ]
    return tag("nav", links, aria_label="How much of it", class_="windows")


def _history(job: JobStatus, view: PageQuery, now: float) -> Child:
    if not any(one.first_step_at for one in job.rounds) and not job.step_samples:
        return tag("p", "No step has been made yet.", class_="quiet")
    legend = [
        tag("span", tag("i", class_="key rate"), "steps per second"),
        tag("span", tag("i", class_="key block"), "a round's workers, as long as they trained"),
        tag("span", tag("i", class_="key fault"), "a round began because of a fault"),
        tag("span", tag("i", class_="key planned"), "as planned"),
        tag("span", tag("i", class_="key lost"), "no step because of it"),
    ]
    drawn = tag(
        "div",
        chart(job, now, WINDOWS[view.window]),
        class_="drawn",
        tabindex="0",
        role="region",
        aria_label="Step rate and rounds",
    )
    return [drawn, tag("p", legend, class_="legend")]


def _ranks(job: JobStatus) -> Child:
    if job.ended:
        return tag("p", "The job has ended.", class_="quiet")
    if not job.ranks and not job.assignments:
        return tag("p", "It has no place yet." if not job.rounds else "No workers at this moment.", class_="quiet")
    return ranks.grid(job)


def _rounds(job: JobStatus, now: float) -> Child:
    return history.rounds(job, now) if job.rounds else tag("p", "No round has been agreed on yet.", class_="quiet")


def last_hung_round(rounds: Sequence[RoundStatus]) -> int:
    """The newest round that began because the one before hung; 0 if there is none."""
    return max((one.number for one in rounds if one.cause == "hung"), default=0)


def explanation(job: str, rows: Sequence[dict[str, Any]], *, brief: bool) -> Child:
    """What nodes say of their evidence, those that judged first. `brief`: only the first one, and where the rest is."""
    told = [row for row in rows if isinstance(row.get("page"), str)]
    told.sort(key=lambda row: not isinstance(row.get("document"), dict) or row["document"].get("verdict") is None)
    if not told:
        why = "; ".join(f"{row.get('node')}: {row.get('error', 'nothing')}" for row in rows[:8])
        return tag("p", why or "No node has any evidence.", class_="quiet")
    shown: list[Child] = [
        [tag("h3", f"As {row.get('node')} saw it"), tag("pre", row["page"], tabindex="0", role="region",
                                                       aria_label=f"Explanation of {row.get('node')}")]
        for row in (told[:1] if brief else told)
    ]  # fmt: skip
    if brief and len(told) > 1:
        link = words.job_url(job, "/explain")
        others = "node says" if len(told) == 2 else f"{len(told) - 1} nodes say"
        shown.append(tag("p", tag("a", f"What the other {others}", href=link), class_="below"))
    return shown


def evidence_link(job: str) -> Html:
    link = tag("a", "Look for evidence all the same", href=words.job_url(job, "/explain"))
    return tag("p", "No round began because of a hang. ", link, ".", class_="quiet")


def _log(job: JobStatus, view: PageQuery, tail: LogTail) -> Html:
    """Its form stays where it is while the log itself is replaced."""
    size = max([job.world_size or 0, view.rank + 1, *(rank.rank + 1 for rank in job.ranks)])
    options = [tag("option", str(k), value=k, selected=k == view.rank) for k in range(min(size, 1024))]
    streams = [tag("option", name, value=name, selected=name == view.stream) for name in STREAMS]
    form = tag(
        "form",
        tag("label", "Rank ", tag("select", options, name="rank")),
        tag("label", "of ", tag("select", streams, name="stream")),
        tag("input", type="hidden", name="window", value=view.window),
        tag("button", "Show"),
        method="get",
        action=words.job_url(job.job, "#log"),
        id="which",
    )
    heading = tag("div", tag("h2", "Log", id="log-title"), form, class_="heading")
    told = tag(
        "div",
        tag("p", tail.why or tail.where, class_="quiet"),
        tag("pre", tail.text or "(nothing yet)", tabindex="0", role="region", aria_label="The end of the log",
            class_="wraps", data_end=True) if not tail.why else None,
        id="log",
        data_live=True,
    )  # fmt: skip
    return joined(tag("section", heading, told, aria_labelledby="log-title"))
