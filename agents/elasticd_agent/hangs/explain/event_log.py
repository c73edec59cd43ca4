"""Pure: the event log's lines -> when a round hung, what was done about it, and what came of that.

Evidence ends with the verdict, and a person's first question is whether the job runs. Lines of other jobs, of unknown
kinds and without sense are skipped. Times are the lines' own; those of several nodes are each node's own clock.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from elasticd_agent.hangs.explain.json_values import number, text, values, whole
from elasticd_agent.hangs.explain.model import Aftermath, RecordedVerdict, TimelineEntry
from elasticd_agent.hangs.rank import RankLocation
from elasticd_agent.model.phrases import count

Line = Mapping[str, Any]
_CLOCKS_S = 60.0
"""The clocks of two nodes may differ by this much; a larger difference means another run."""
_MOST_ENTRIES = 24


@dataclass(frozen=True, slots=True)
class RunLog:
    """What one run of a job logged, and the round in question."""

    lines: tuple[Line, ...]
    round: int

    @classmethod
    def of(cls, lines: Sequence[Line], round: int, at: float) -> RunLog:
        """Of a log that may hold several runs the last one whose `round` began before `at`, unix time (0: any)."""
        good = [line for line in lines if isinstance(line.get("kind"), str) and whole(line.get("round")) is not None]
        start, end = _span(good, round, at)
        good = good[start:end]
        job = next((line.get("job") for line in reversed(good) if line["round"] == round), None)
        return cls(tuple(line for line in good if line.get("job") == job), round)

    @property
    def job(self) -> str:
        return text(self.lines[-1].get("job")) if self.lines else ""

    def aftermath(self) -> Aftermath:
        """How the round ended, and the round after it."""
        after = [line["round"] for line in self.lines if line["kind"] == "round_published"]
        following = min((number for number in after if number > self.round), default=0)
        published = self._first("round_published", following)
        stepped = [line for line in self.lines if line["kind"] == "first_step" and line["round"] == following]
        ended = next((line for line in self.lines if ends_job(line)), None)
        took = next((line["recovery_seconds"] for line in stepped if line.get("recovery_seconds") is not None), None)
        return Aftermath(
            round=following,
            reason=text(published.get("reason")),
            world_size=whole(published.get("world_size")) or 0,
            nodes=tuple(text(node) for node in values(published.get("nodes"))),
            resumed=_checkpoint(self._first("resumed", following)),
            recovery_s=float(took) if isinstance(took, (int, float)) else None,
            survivors=self._survivors(),
            ended=f"{text(ended.get('outcome'))}: {text(ended.get('reason'))}" if ended is not None else "",
            moments=self._timeline(following),
        )

    def verdict(self) -> RecordedVerdict | None:
        """The verdict, in the log of the node that judged."""
        line = next(iter(self._of("hang_detected")[-1:]), None)
        if line is None:
            return None
        places = zip(*(values(line.get(name)) for name in ("nodes", "ranks", "slots")), strict=False)
        culprits = tuple(
            RankLocation(text(node), rank, slot if isinstance(slot, int) else -1)
            for node, rank, slot in places
            if whole(rank) is not None
        )
        cause, why, action = (text(line.get(name)) for name in ("cause", "reason", "action"))
        return RecordedVerdict(cause, culprits, why, action, _float(line.get("seconds")), number(line.get("wall")))

    def restart_reason(self) -> str:
        """Why the round was ended, which the next Round says on every node; "" unless that was a hang."""
        for line in self.lines:
            if (line["kind"], line.get("cause"), line["round"]) == ("round_published", "hung", self.round + 1):
                return text(line.get("reason")).partition("; restart ")[0]
        return ""

    def members(self) -> list[str]:
        """The nodes of the round."""
        return [text(node) for line in self._of("round_published")[:1] for node in values(line.get("nodes"))]

    def node_by_rank(self) -> dict[int, str]:
        """The node of each rank of the round, as far as the log has it."""
        ranks = [(line, whole(rank)) for line in self._of("group_started") for rank in values(line.get("ranks"))]
        return {rank: text(line.get("node")) for line, rank in ranks if rank is not None}

    def _of(self, kind: str) -> list[Line]:
        return [line for line in self.lines if line["kind"] == kind and line["round"] == self.round]

    def _first(self, kind: str, round: int) -> Line:
        return next((line for line in self.lines if round and line["kind"] == kind and line["round"] == round), {})

    def _survivors(self) -> tuple[int, ...]:
        pids = [whole(pid) for line in self._of("group_ended") for pid in values(line.get("survivors"))]
        return tuple(pid for pid in pids if pid is not None)

    def _timeline(self, following: int) -> tuple[TimelineEntry, ...]:
        """Each sentence once, by the first node that wrote it: several nodes log the same Round, suspicions flicker."""
        entries: dict[str, TimelineEntry] = {}
        for line in sorted(self.lines, key=lambda line: _float(line.get("wall"))):
            table = {self.round: _HERE, following or self.round: _AFTER if following else _HERE}.get(line["round"], {})
            describe = table.get(line["kind"])
            if describe is not None and isinstance(line.get("wall"), (int, float)):
                sentence = describe(line)
                entries.setdefault(sentence, TimelineEntry(float(line["wall"]), sentence, text(line.get("node"))))
        return tuple(entries.values())[:_MOST_ENTRIES]


def _span(lines: Sequence[Line], round: int, at: float) -> tuple[int, int]:
    """From behind the job end before the last line that publishes `round` in time, to the job end after it."""
    published = [i for i, line in enumerate(lines) if line["kind"] == "round_published" and line["round"] == round]
    in_time = [i for i in published if not at or _float(lines[i].get("wall")) <= at + _CLOCKS_S] or published
    if not in_time:
        return 0, len(lines)
    ends = [i for i, line in enumerate(lines) if ends_job(line)]
    start = max((i + 1 for i in ends if i < in_time[-1]), default=0)
    return start, min((i + 1 for i in ends if i >= start), default=len(lines))


def _reason(line: Line) -> str:
    return text(line.get("reason"))


def _hang_detected(line: Line) -> str:
    return f"found hung after {_float(line.get('seconds')):.1f} s without progress"


def _group_gone(line: Line) -> str:
    left = values(line.get("survivors"))
    survive = f", except processes {left}, which survive SIGKILL" if left else ""
    return f"the workers of round {line['round']} were gone{survive}"


def _round_published(line: Line) -> str:
    workers = count(whole(line.get("world_size")) or 0, "worker")
    members = ", ".join(text(node) for node in values(line.get("nodes")))
    return f"round {line['round']} agreed on: {workers} on {members}"


def _resumed(line: Line) -> str:
    checkpoint = f"r{whole(line.get('from_round'))}-s{whole(line.get('step'))}"
    return f"round {line['round']} resumed from checkpoint {checkpoint}"


def _first_step(line: Line) -> str:
    return f"round {line['round']} trains: step {whole(line.get('step'))} done"


def _job_ended(line: Line) -> str:
    if ends_job(line):
        return f"the job has {text(line.get('outcome'))}: {_reason(line)}"
    return f"{text(line.get('node'))} left the job: {_reason(line)}"


_HERE: Mapping[str, Callable[[Line], str]] = {
    "hang_suspected": lambda line: f"suspected: {_reason(line)}",
    "hang_cleared": _reason,
    "hang_detected": _hang_detected,
    "group_ended": _group_gone,
    "waiting": _reason,
    "job_ended": _job_ended,
}
"""Kinds of events of the round itself -> their sentence in the timeline."""
_AFTER: Mapping[str, Callable[[Line], str]] = {
    "round_published": _round_published,
    "resumed": _resumed,
    "first_step": _first_step,
    "job_ended": _job_ended,
}
"""The same for the round after it."""


def ends_job(line: Line) -> bool:
    """Whether the whole job ended, not only one node's part."""
    return bool(line.get("kind") == "job_ended" and line.get("outcome") != "left")


def _checkpoint(line: Line) -> tuple[int, int] | None:
    origin, step = whole(line.get("from_round")), whole(line.get("step"))
    return (origin, step) if origin is not None and step is not None else None


def _float(value: object) -> float:
    return float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else 0.0
