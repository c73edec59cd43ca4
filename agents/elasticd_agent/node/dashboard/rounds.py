"""The rounds, newest first: when and why each began, its nodes, and its cost. Pure."""

from __future__ import annotations

from elasticd_agent.model.phrases import count
from elasticd_agent.node.api.schema import JobStatus, RoundStatus
from elasticd_agent.node.dashboard import format as words
from elasticd_agent.node.dashboard.layout import chip
from elasticd_agent.node.dashboard.markup import Child, Html, tag
from elasticd_agent.system.durations import in_words

SHOWN = 25
_SHOWN_NODES = 6


def rounds(job: JobStatus, now: float) -> Child:
    newest_first = list(reversed(job.known.rounds))
    shown, older = newest_first[:SHOWN], newest_first[SHOWN:]
    listed = [tag("ol", [_round(one, job, now) for one in shown], class_="rounds", reversed=True)]
    if older:
        rest = tag("ol", [_round(one, job, now) for one in older], class_="rounds", reversed=True)
        listed.append(tag("details", tag("summary", f"{len(older)} older rounds"), rest, id="older"))
    return listed


def _round(one: RoundStatus, job: JobStatus, now: float) -> Html:
    more = len(one.nodes) - _SHOWN_NODES
    nodes = ", ".join(one.nodes[:_SHOWN_NODES]) + (f" +{more}" if more > 0 else "")
    where = count(one.world_size, "worker") + (f" on {nodes}" if nodes else "")
    return tag(
        "li",
        tag("div", tag("span", str(one.round), class_="number"), class_="rail"),
        tag(
            "div",
            tag("p", chip(one.kind, "idle" if one.planned else "bad"), " ", one.reason, class_="reason"),
            tag("p", words.timestamp(one.at, now), f" · {where} · {_outcome(one, job, now)}", class_="quiet"),
            class_="what",
        ),
        tag("div", _cost(one), class_="lost"),
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


def _cost(one: RoundStatus) -> Child:
    if one.lost_seconds is None:
        return None
    again = "" if one.lost_steps is None else f"{count(one.lost_steps, 'step')} again"
    if one.first_step_at is None:
        return [tag("b", in_words(one.lost_seconds)), tag("span", "without a step so far", class_="quiet")]
    if one.planned:
        steps = again if one.lost_steps else "no step lost" if one.lost_steps == 0 else ""
        return tag("span", f"paused {in_words(one.lost_seconds)}", tag("br"), steps, class_="quiet")
    return [tag("b", f"−{in_words(one.lost_seconds)}"), tag("span", again, class_="quiet") if again else None]
