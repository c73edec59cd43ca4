"""One job whole: why it failed, its state, step rate, ranks, rounds, its last hang, a log, its file. Pure.

The page answers, from top to bottom, what a person asks: does it run, what is wrong, how fast was it, which ranks are
where, what happened before, and what do the logs say. A part without anything to say is left out, except where its
absence is the answer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import get_args
from urllib.parse import urlencode

from elasticd_agent.model.phrases import count
from elasticd_agent.system.durations import in_words
from elasticd_daemon.api.rank_logs import LogStream
from elasticd_daemon.api.schema import Answer, JobStatus, RoundStatus
from elasticd_daemon.dashboard import formatting, status
from elasticd_daemon.dashboard.chart import chart_values

TIME_WINDOWS: dict[str, tuple[str, float | None]] = {
    "10m": ("10 min", 600.0),
    "1h": ("1 hour", 3600.0),
    "1d": ("1 day", 86400.0),
    "all": ("all", None),
}
SHOWN_ROUNDS = 25
_SHOWN_NODES = 6
LOG_STREAMS: tuple[LogStream, ...] = get_args(LogStream)
MAX_FAILURE_LINES = 40
_TRACEBACK_HEAD = "Traceback (most recent call last):"


@dataclass(frozen=True, slots=True)
class PageQuery:
    """The page's query: a link with it shows the same."""

    window: str = "1h"
    rank: int = 0
    stream: LogStream = "stdout"

    def link(self, job: str, window: str) -> str:
        """The same with another window."""
        query = {"window": window, "rank": self.rank, "stream": self.stream}
        return formatting.job_url(job, f"?{urlencode(query)}")


@dataclass(frozen=True, slots=True)
class LogTail:
    """The end of a log."""

    text: str = ""
    where: str = ""
    why: str = ""


@dataclass(frozen=True, slots=True)
class EvidencePages:
    """The explanations of the nodes' evidence."""

    pages: Sequence[tuple[str, str]] = ()  #: the node and its page; those with a verdict first
    why: str = ""
    other_count: int = 0
    is_late: bool = False


def template_values(
    job: JobStatus,
    query: PageQuery,
    now: float,
    tail: LogTail,
    evidence: EvidencePages | None,
    failure: LogTail | None = None,
    form_key: str = "",
) -> dict[str, object]:
    """The values of templates/job.html. `failure`: the end of the stderr of the rank that made the job fail."""
    progress = job.known
    has_steps = any(row.first_step_at for row in progress.rounds) or progress.step_samples
    boxes, more_ranks = status.node_boxes(job)
    size = max([progress.world_size or 0, query.rank + 1, *(rank.rank + 1 for rank in progress.ranks)])
    return {
        "job": job, "query": query, "tail": tail, "failure": failure, "form_key": form_key,
        "evidence": evidence, "state": status.job_state_chip(job), "warnings": _warnings(job),
        "reason": _state_reason(job), "failure_excerpt": _failure_excerpt, "tiles": status.job_facts(job),
        "windows": TIME_WINDOWS,
        "course": chart_values(job, now, TIME_WINDOWS[query.window][1]) if has_steps else None,
        "boxes": boxes, "more_ranks": more_ranks, "behind": lambda rank: status.steps_behind(rank, progress),
        "rounds": progress.rounds[::-1], "shown_rounds": SHOWN_ROUNDS,
        "facts": lambda one: _round_facts(one, job, now), "ranks": range(min(size, 1024)), "streams": LOG_STREAMS,
    }  # fmt: skip


def _failure_excerpt(text: str) -> str:
    """The last traceback, or the last lines."""
    before, mark, after = text.rpartition(_TRACEBACK_HEAD)
    lines = (mark + after if mark else before or after).rstrip().split("\n")
    return "\n".join(lines if mark and len(lines) <= MAX_FAILURE_LINES else lines[-MAX_FAILURE_LINES:])


def _warnings(job: JobStatus) -> list[str]:
    """The sentences above all else: the job's problem, and nodes that do not answer."""
    wrong = status.job_problem(job)
    silent = [f"{node} does not answer: {why}" for node, why in list(job.known.unreachable.items())[:3]]
    return [*([wrong[1]] if wrong else []), *silent]


def _state_reason(job: JobStatus) -> str:
    """The reason for the job's state, with how it ended."""
    if not job.ended or job.ended_seconds is None:
        return job.reason
    code = f" with exit code {job.exit_code}" if job.exit_code is not None else ""
    return f"Ended {in_words(job.ended_seconds)} ago{code}: {job.reason}"


def _round_facts(one: RoundStatus, job: JobStatus, now: float) -> list[str]:
    """The facts of a round: its workers, where its state is from, and how it went."""
    more = len(one.nodes) - _SHOWN_NODES
    nodes = ", ".join(one.nodes[:_SHOWN_NODES]) + (f" +{more}" if more > 0 else "")
    where = count(one.world_size, "worker") + (f" on {nodes}" if nodes else "")
    return [where, *one.origin_phrases, _round_outcome(one, job, now)]


def _round_outcome(one: RoundStatus, job: JobStatus, now: float) -> str:
    """The course of a round: the time for which it trained, and its steps."""
    is_newest = one is job.known.newest_round
    if one.first_step_at is None:
        return "no step yet" if is_newest and not job.ended else "made no step"
    ended_at = one.ended_at if one.ended_at is not None else job.ended_at if is_newest else None
    if ended_at is None:
        return f"training for {in_words(now - one.first_step_at)}" if is_newest else "trained"
    trained = f"trained for {in_words(max(0.0, ended_at - one.first_step_at))}"
    steps = (one.last_step or 0) - (one.first_step or 0)
    return trained + (f", steps {one.first_step:,} to {one.last_step:,}" if steps > 0 else "")


def evidence_pages(rows: Sequence[Answer], *, brief: bool) -> EvidencePages:
    """`brief`: only the first one."""
    explained = [row for row in rows if isinstance(row.get("page"), str)]
    explained.sort(key=lambda row: not isinstance(row.get("document"), dict) or row["document"].get("verdict") is None)
    if not explained:
        return EvidencePages(why="; ".join(f"{row.get('node')}: {row.get('error', 'nothing')}" for row in rows[:8]))
    pages = [(str(row.get("node")), row["page"]) for row in (explained[:1] if brief else explained)]
    return EvidencePages(pages, other_count=len(explained) - len(pages))
