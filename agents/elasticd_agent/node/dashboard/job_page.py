"""One job whole: why it failed, its state, step rate, ranks, rounds, its last hang, a log, its file. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlencode

from elasticd_agent.model.phrases import count
from elasticd_agent.node.api.schema import CheckpointStatus, JobProgress, JobStatus, RoundStatus
from elasticd_agent.node.dashboard import formatting, ranks
from elasticd_agent.node.dashboard.chart import chart
from elasticd_agent.node.dashboard.layout import banner, button, chip, section
from elasticd_agent.node.dashboard.markup import Child, Html, joined, tag
from elasticd_agent.node.dashboard.series import scalar_charts, step_times
from elasticd_agent.node.dashboard.status import problem, state
from elasticd_agent.system.durations import in_words

WINDOWS: dict[str, float | None] = {"10m": 600.0, "1h": 3600.0, "1d": 86400.0, "all": None}
_NAMES = {"10m": "10 min", "1h": "1 hour", "1d": "1 day", "all": "all"}
SHOWN_ROUNDS = 25
_SHOWN_NODES = 6
STREAMS = ("stdout", "stderr", "elasticd", "events")
FAILURE_LINES = 40
_TRACEBACK = "Traceback (most recent call last):"


@dataclass(frozen=True, slots=True)
class PageQuery:
    """The page's query: a link with it shows the same."""

    window: str = "1h"
    rank: int = 0
    stream: str = "stdout"
    find: str = ""
    """Only lines of the log with this text."""

    def link(self, job: str, more: str = "", **other: str) -> str:
        query = {"window": self.window, "rank": str(self.rank), "stream": self.stream, "find": self.find, **other}
        return formatting.job_url(
            job, f"{more}?{urlencode({name: text for name, text in query.items() if text}, errors='replace')}"
        )


@dataclass(frozen=True, slots=True)
class LogTail:
    """The end of a log."""

    text: str = ""
    where: str = ""
    why: str = ""
    """Why there is none."""


def job_page(
    job: JobStatus,
    view: PageQuery,
    now: float,
    tail: LogTail,
    explained: Child,
    failure: LogTail | None = None,
    form_key: str = "",
) -> list[Child]:
    """`failure`: the end of the stderr of the rank that made the job fail."""
    return [
        tag("h1", job.job, " ", tag("span", chip(*state(job)), id="state", data_live=True, role="status")),
        tag("div", _summary(job), id="why", data_live=True),
        tag("div", _buttons(job, form_key), class_="acts") if form_key else None,
        tag("div", _failure(job, failure) if failure is not None else None, id="failed", data_live=True),
        tag("dl", _tiles(job), class_="tiles", id="tiles", data_live=True),
        section("course", "Step rate", _history(job, view, now), more=_windows(job, view)),
        section("numbers", "Numbers of the script", scalar_charts(job.known.scalars)),
        section("ranks", "Ranks", _ranks(job)),
        section("times", "Step times by rank", _times(job)),
        section("rounds", "Rounds", _rounds(job, now)),
        section("blame", "Root cause of the last hang", explained),
        tag("div", _log(job, view, tail), class_="log"),
        section("file", "Job file", _file(job)),
    ]


def _buttons(job: JobStatus, form_key: str) -> list[Child]:
    if job.ended:
        return []
    url = formatting.job_url(job.job)
    return [
        None if job.state == "pending" else button("Stacks of all ranks", f"{url}/dump", form_key),
        button("Cancel…", f"{url}/cancel", form_key, f"End {job.job} for good"),
    ]


def _failure(job: JobStatus, tail: LogTail) -> Html:
    """The last traceback, or the last lines."""
    before, found, after = tail.text.rpartition(_TRACEBACK)
    lines = (found + after if found else before or after).rstrip().split("\n")
    shown = lines if found and len(lines) <= FAILURE_LINES else lines[-FAILURE_LINES:]
    title = f"What rank {job.failed_rank} wrote last"
    text = tag("pre", "\n".join(shown), tabindex="0", role="region", aria_label="Its stderr", class_="wraps")
    return section("failure", title, tag("p", tail.why or tail.where, class_="quiet"), text if tail.text else None)


def _file(job: JobStatus) -> Child:
    if not job.file:
        return tag("p", "It was removed with the job's records.", class_="quiet")
    by = f"Submitted by {job.submitted_by}, as number {job.number}, with priority {job.priority}."
    text = tag("pre", job.file, tabindex="0", role="region", aria_label="The job file as JSON", class_="wraps")
    return [tag("p", by, class_="quiet"), text]


def _summary(job: JobStatus) -> list[Child]:
    found: list[Child] = []
    if wrong := problem(job):
        found.append(banner("warn", wrong[1]))
    for node, why in list(job.known.unreachable.items())[:3]:
        found.append(banner("warn", f"{node} does not answer: {why}"))
    reason = job.reason
    if job.ended and job.ended_seconds is not None:
        code = f" with exit code {job.exit_code}" if job.exit_code is not None else ""
        reason = f"Ended {in_words(job.ended_seconds)} ago{code}: {reason}"
    return [*found, tag("p", reason, class_="why")]


def _tiles(job: JobStatus) -> list[Html]:
    progress = job.known
    return [
        _step_tile(progress),
        _workers_tile(job),
        _round_tile(progress),
        _saved_tile("Checkpoint", progress.checkpoint),
        *([_saved_tile("In memory", progress.snapshot)] if progress.snapshot else []),
        _tile("Goodput", "–" if progress.goodput is None else f"{100 * progress.goodput:.1f} %", "of its time counted"),
        _lost_tile(progress),
    ]


def _step_tile(progress: JobProgress) -> Html:
    rate = progress.steps_per_second
    return _tile(
        "Step", "–" if progress.step is None else f"{progress.step:,}", "" if rate is None else formatting.rate(rate)
    )


def _workers_tile(job: JobStatus) -> Html:
    size, most = job.known.world_size, job.max_workers
    if job.ended:
        return _tile("Workers", "–", "")
    return _tile("Workers", str(size or "–"), "" if most in (None, size) else f"of at most {most}")


def _round_tile(progress: JobProgress) -> Html:
    restarts = "" if progress.restarts is None else count(progress.restarts, "restart")
    return _tile("Round", str(progress.round or "–"), restarts)


def _saved_tile(name: str, saved: CheckpointStatus | None) -> Html:
    if saved is None:
        return _tile(name, "none", "")
    age = "" if saved.age_seconds is None else f"{in_words(saved.age_seconds)} ago"
    return _tile(name, f"step {saved.step:,}", ", ".join(filter(None, [age, saved.cost])))


def _lost_tile(progress: JobProgress) -> Html:
    faults = [one for one in progress.rounds if not one.planned]
    lost = [one.lost_seconds for one in faults if one.lost_seconds is not None]
    if not lost:
        return _tile("Lost", "nothing", "")
    again = sum(one.lost_steps or 0 for one in faults)
    more = f"{count(len(faults), 'fault')}, {count(again, 'step')} again"
    if progress.donor_resumes:
        more += f", {count(progress.donor_steps, 'step')} saved after a fault"
    return _tile("Lost", in_words(sum(lost)), more)


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
    return tag("nav", links, aria_label="Time window", class_="windows")


def _history(job: JobStatus, view: PageQuery, now: float) -> Child:
    if not any(one.first_step_at for one in job.known.rounds) and not job.known.step_samples:
        return tag("p", "It made no step." if job.ended else "No step yet.", class_="quiet")
    legend = [
        tag("span", tag("i", class_="key rate"), "steps per second"),
        tag("span", tag("i", class_="key block"), "a round's workers while they trained"),
        tag("span", tag("i", class_="key fault"), "a round that followed a fault"),
        tag("span", tag("i", class_="key planned"), "a planned round"),
        tag("span", tag("i", class_="key lost"), "time without a step"),
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
    if not job.known.ranks and not job.assignments:
        return tag("p", "No workers at this moment." if job.known.rounds else "Not scheduled yet.", class_="quiet")
    return ranks.grid(job)


def _times(job: JobStatus) -> Child:
    return tag("p", "The job has ended.", class_="quiet") if job.ended else step_times(job.known.rank_steps)


def _rounds(job: JobStatus, now: float) -> Child:
    none = "Nothing is known of its rounds." if job.ended else "No round yet."
    return _round_list(job, now) if job.known.rounds else tag("p", none, class_="quiet")


def _round_list(job: JobStatus, now: float) -> Child:
    newest_first = list(reversed(job.known.rounds))
    shown, older = newest_first[:SHOWN_ROUNDS], newest_first[SHOWN_ROUNDS:]
    listed = [tag("ol", [_round_item(one, job, now) for one in shown], class_="rounds", reversed=True)]
    if older:
        rest = tag("ol", [_round_item(one, job, now) for one in older], class_="rounds", reversed=True)
        listed.append(tag("details", tag("summary", f"{len(older)} older rounds"), rest, id="older"))
    return listed


def _round_item(one: RoundStatus, job: JobStatus, now: float) -> Html:
    more = len(one.nodes) - _SHOWN_NODES
    nodes = ", ".join(one.nodes[:_SHOWN_NODES]) + (f" +{more}" if more > 0 else "")
    where = count(one.world_size, "worker") + (f" on {nodes}" if nodes else "")
    facts = [where, *filter(None, [one.origin]), _outcome(one, job, now)]
    return tag(
        "li",
        tag("div", tag("span", str(one.round), class_="number"), class_="rail"),
        tag(
            "div",
            tag("p", chip(one.kind, "idle" if one.planned else "bad"), " ", one.reason, class_="reason"),
            tag("p", formatting.timestamp(one.at, now), "".join(f" · {fact}" for fact in facts), class_="quiet"),
            class_="what",
        ),
        tag("div", _cost(one, job.ended), class_="lost"),
        value=one.round,
        class_="now" if one is job.known.newest_round and not job.ended else None,
    )


def _outcome(one: RoundStatus, job: JobStatus, now: float) -> str:
    is_newest = one is job.known.newest_round
    if one.first_step_at is None:
        return "no step yet" if is_newest and not job.ended else "made no step"
    ended_at = one.ended_at if one.ended_at is not None else job.ended_at if is_newest else None
    if ended_at is None:
        return f"training for {in_words(now - one.first_step_at)}" if is_newest else "trained"
    trained = f"trained for {in_words(max(0.0, ended_at - one.first_step_at))}"
    steps = (one.last_step or 0) - (one.first_step or 0)
    return trained + (f", steps {one.first_step:,} to {one.last_step:,}" if steps > 0 else "")


def _cost(one: RoundStatus, ended: bool) -> Child:
    if one.lost_seconds is None:
        return None
    again = "" if one.lost_steps is None else f"{count(one.lost_steps, 'step')} again"
    if one.first_step_at is None:
        return [
            tag("b", in_words(one.lost_seconds)),
            tag("span", f"without a step{'' if ended else ' so far'}", class_="quiet"),
        ]
    if one.planned:
        steps = again if one.lost_steps else "no step lost" if one.lost_steps == 0 else ""
        return tag("span", f"paused {in_words(one.lost_seconds)}", tag("br"), steps, class_="quiet")
    return [tag("b", f"−{in_words(one.lost_seconds)}"), tag("span", again, class_="quiet") if again else None]


def last_hung_round(listed: Sequence[RoundStatus]) -> int:
    """The newest round that followed a hang; 0 if there is none."""
    return max((one.round for one in listed if one.cause == "hung"), default=0)


def explanation(job: str, rows: Sequence[dict[str, Any]], *, brief: bool) -> Child:
    """The explanations of the nodes, those with a verdict first. `brief`: the first one, and a link to the others."""
    found = [row for row in rows if isinstance(row.get("page"), str)]
    found.sort(key=lambda row: not isinstance(row.get("document"), dict) or row["document"].get("verdict") is None)
    if not found:
        why = "; ".join(f"{row.get('node')}: {row.get('error', 'nothing')}" for row in rows[:8])
        return tag("p", why or "No node has evidence.", class_="quiet")
    shown: list[Child] = [_explanation_of(row) for row in (found[:1] if brief else found)]
    if brief and len(found) > 1:
        others = count(len(found) - 1, "other node")
        link = tag("a", f"The evidence of {others}", href=formatting.job_url(job, "/explain"))
        shown.append(tag("p", link, class_="below"))
    return shown


def _explanation_of(row: dict[str, Any]) -> list[Child]:
    label = f"Explanation of {row.get('node')}"
    return [
        tag("h3", f"Evidence of {row.get('node')}"),
        tag("pre", row["page"], tabindex="0", role="region", aria_label=label),
    ]


def evidence_link(job: str) -> Html:
    link = tag("a", "Search for evidence", href=formatting.job_url(job, "/explain"))
    return tag("p", "No round followed a hang. ", link, ".", class_="quiet")


def _log(job: JobStatus, view: PageQuery, tail: LogTail) -> Html:
    """The form keeps its place while the log itself is replaced."""
    size = max([job.known.world_size or 0, view.rank + 1, *(rank.rank + 1 for rank in job.known.ranks)])
    options = [tag("option", str(k), value=k, selected=k == view.rank) for k in range(min(size, 1024))]
    streams = [tag("option", name, value=name, selected=name == view.stream) for name in STREAMS]
    form = tag(
        "form",
        tag("label", "Rank ", tag("select", options, name="rank")),
        tag("label", "of ", tag("select", streams, name="stream")),
        tag("label", "with ", tag("input", type="search", name="find", value=view.find)),
        tag("input", type="hidden", name="window", value=view.window),
        tag("button", "Show"),
        tag("a", "Download", href=view.link(job.job, "/log", window="", find="")),
        method="get",
        action=formatting.job_url(job.job, "#log"),
        id="which",
    )
    heading = tag("div", tag("h2", "Log", id="log-title"), form, class_="heading")
    label = "The end of the log"
    text = tag(
        "pre", tail.text or "(empty)", tabindex="0", role="region", aria_label=label, class_="wraps", data_end=True
    )
    content = [tag("p", tail.why or tail.where, class_="quiet"), text if not tail.why else None]
    shown = tag("div", content, id="log", data_live=True)
    return joined(tag("section", heading, shown, aria_labelledby="log-title"))
