"""The event log's lines -> when a round got stuck, what was done about it, and what came of that.

It exists because evidence ends with the verdict, and a person's first question is whether the job runs. Lines of other
jobs, of unknown kinds and without sense are passed over. Pure: times are what the lines say, and those of several nodes
are each node's own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from elasticd_agent.hangs.explain.model import Aftermath, Culprit, RecordedVerdict, TimelineEntry
from elasticd_agent.model.phrases import count

Line = Mapping[str, Any]
_CLOCKS_S = 60.0
"""By how much the clocks of two nodes may differ before one of them is taken for another day's."""


def lines_of_run(lines: Sequence[Line], number: int, at: float) -> list[Line]:
    """The lines that make sense, of one run of a job: a log may hold several.

    It is the last one whose round `number` began before `at`, unix time (0: any).
    """
    good = [line for line in lines if isinstance(line.get("kind"), str) and whole(line.get("round")) is not None]
    begun = [i for i, line in enumerate(good) if line["kind"] == "round_published" and line["round"] == number]
    begun = [i for i in begun if not at or _number(good[i].get("wall")) <= at + _CLOCKS_S] or begun
    ended = [i for i, line in enumerate(good) if _ends(line)]
    if begun:
        good = good[max((i + 1 for i in ended if i < begun[-1]), default=0) :]
        last = next((i for i, line in enumerate(good) if _ends(line)), len(good))
        good = good[: last + 1]
    job = next((line.get("job") for line in reversed(good) if line["round"] == number), None)
    return [line for line in good if line.get("job") == job]


def aftermath(lines: Sequence[Line], number: int) -> Aftermath:
    """What a run's lines say of round `number`'s end and of the round after it."""
    # Several nodes write the same Round into their logs; one of them is enough.
    after = sorted({line["round"] for line in lines if line["kind"] == "round_published" and line["round"] > number})
    following = after[0] if after else 0
    moments = [
        moment
        for line in lines
        if line["round"] in (number, following) and (moment := _moment(line, number, following)) is not None
    ]
    published = _first(lines, "round_published", following)
    resumed = _first(lines, "resumed", following)
    stepped = _first(lines, "first_step", following)
    ended = next((line for line in lines if _ends(line)), {})
    gone = [line for line in lines if line["kind"] == "group_gone" and line["round"] == number]
    took = stepped.get("recovery_seconds")
    return Aftermath(
        round=following,
        reason=text(published.get("reason")),
        world_size=whole(published.get("world_size")) or 0,
        nodes=tuple(text(node) for node in _list(published.get("nodes"))),
        resumed=_resumed(resumed),
        recovery_s=float(took) if isinstance(took, (int, float)) else None,
        survivors=tuple(pid for line in gone for pid in map(whole, _list(line.get("survivors"))) if pid is not None),
        ended=f"{text(ended.get('outcome'))}: {text(ended.get('reason'))}" if ended else "",
        moments=tuple(_once(sorted(moments, key=lambda moment: moment.wall))),
    )


def verdict(lines: Sequence[Line], number: int) -> RecordedVerdict | None:
    """The verdict on round `number` as the node wrote it down that judged."""
    line = next((line for line in reversed(lines) if line.get("kind") == "hung" and line.get("round") == number), None)
    if line is None:
        return None
    places = zip(_list(line.get("nodes")), _list(line.get("ranks")), _list(line.get("slots")), strict=False)
    culprits = tuple(
        Culprit(text(node), rank, slot if isinstance(slot, int) else -1)
        for node, rank, slot in places
        if whole(rank) is not None
    )
    wall = line.get("wall")
    return RecordedVerdict(
        text(line.get("cause")),
        culprits,
        text(line.get("reason")),
        text(line.get("action")),
        _number(line.get("seconds")),
        float(wall) if isinstance(wall, (int, float)) and 0 <= wall < 1e12 else 0.0,
    )


def restart_reason(lines: Sequence[Line], number: int) -> str:
    """Why round `number` was ended, as every node knows it: by the Round that answers the verdict. "" if none does."""
    for line in lines:
        if (line.get("kind"), line.get("cause"), line.get("round")) == ("round_published", "hung", number + 1):
            return text(line.get("reason")).partition("; restart ")[0]
    return ""


def members(lines: Sequence[Line], number: int) -> list[str]:
    """The nodes of round `number`."""
    published = [line for line in lines if line.get("kind") == "round_published" and line.get("round") == number]
    return [text(node) for line in published[:1] for node in _list(line.get("nodes"))]


def node_by_rank(lines: Sequence[Line], number: int) -> dict[int, str]:
    """On which node each rank of round `number` was, as far as the log has it."""
    started = [line for line in lines if line.get("kind") == "group_started" and line.get("round") == number]
    ranks = [(line, whole(rank)) for line in started for rank in _list(line.get("ranks"))]
    return {rank: text(line.get("node")) for line, rank in ranks if rank is not None}


def _moment(line: Line, number: int, following: int) -> TimelineEntry | None:
    wall = line.get("wall")
    if not isinstance(wall, (int, float)):
        return None
    reason, here = text(line.get("reason")), line["round"] == number
    match line["kind"]:
        case "suspected" if here:
            what = f"suspected: {reason}"
        case "suspicion_over" if here:
            what = reason
        case "hung" if here:
            what = f"found hung after {_number(line.get('seconds')):.1f} s without progress"
        case "group_gone" if here:
            left = _list(line.get("survivors"))
            what = f"the workers of round {number} were gone" + (
                f", but for processes {left}, which do not die" if left else ""
            )
        case "round_published" if not here and following:
            members = ", ".join(text(node) for node in _list(line.get("nodes")))
            what = f"round {following} agreed on: {count(whole(line.get('world_size')) or 0, 'worker')} on {members}"
        case "resumed" if not here:
            origin = f"r{whole(line.get('from_round'))}-s{whole(line.get('step'))}"
            what = f"round {following} resumed from checkpoint {origin}"
        case "first_step" if not here:
            what = f"round {following} trains: step {whole(line.get('step'))} done"
        case "waiting" if here:
            what = reason
        case "job_ended" if not _ends(line):
            what = f"{text(line.get('node'))} left the job: {reason}"
        case "job_ended":
            what = f"the job has {text(line.get('outcome'))}: {reason}"
        case _:
            return None
    return TimelineEntry(float(wall), what, text(line.get("node")))


def _ends(line: Line) -> bool:
    """Whether it is the job's end, not only that of one node's part."""
    return bool(line["kind"] == "job_ended" and line.get("outcome") != "left")


def _once(moments: list[TimelineEntry]) -> list[TimelineEntry]:
    """Each thing once, the first node's; a suspicion that flickers is told once."""
    kept: dict[str, TimelineEntry] = {}
    for moment in moments:
        kept.setdefault(moment.text, moment)
    return list(kept.values())[:24]


def _first(lines: Sequence[Line], kind: str, number: int) -> Line:
    return next((line for line in lines if number and line["kind"] == kind and line["round"] == number), {})


def _resumed(line: Line) -> tuple[int, int] | None:
    origin, step = whole(line.get("from_round")), whole(line.get("step"))
    return (origin, step) if origin is not None and step is not None else None


def whole(value: object) -> int | None:
    """The number, if it is a whole one."""
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def text(value: object) -> str:
    """The text, shortened to what a page can bear; "" for anything else."""
    return value[:2000] if isinstance(value, str) else ""


def _number(value: object) -> float:
    return float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else 0.0


def _list(value: object) -> list[Any]:
    return value[:64] if isinstance(value, list) else []
