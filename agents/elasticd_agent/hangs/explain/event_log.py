"""Pure: the event log's lines -> the verdict on a round, what was done about it, and what came of that.

Evidence ends with the verdict, and a person's first question is whether the job runs. Lines of other jobs, of unknown
kinds and without sense are skipped.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from elasticd_agent.hangs.explain.model import Aftermath
from elasticd_agent.model import log_events as events
from elasticd_agent.model.log_events import LogEvent, LogLine, decode
from elasticd_agent.model.reports import RankLocation, RecordedVerdict

_MAX_CLOCK_SKEW_S = 60.0
"""The clocks of two nodes may differ by this much; a larger difference means another run."""

_Event = TypeVar("_Event", bound=LogEvent)


@dataclass(frozen=True, slots=True)
class RunLog:
    """The events that one run of a job logged, and the round in question."""

    lines: tuple[LogLine, ...]
    round: int

    @classmethod
    def run_with_round(cls, lines: Sequence[Mapping[str, Any]], round: int, at: float) -> RunLog:
        """The last run in a log whose `round` began before `at`, unix time (0: any)."""
        readable = list(filter(None, map(decode, lines)))
        start, end = _run_span(readable, round, at)
        run = readable[start:end]
        job = next((line.job for line in reversed(run) if line.event.round == round), None)
        return cls(tuple(line for line in run if line.job == job), round)

    @property
    def job(self) -> str:
        return self.lines[-1].job if self.lines else ""

    def aftermath(self) -> Aftermath:
        """The end of the round, and the round after it."""
        rounds = [line.event.round for line in self.lines if isinstance(line.event, events.RoundPublishedEvent)]
        following = min((number for number in rounds if number > self.round), default=0)
        published = next(iter(self._events(events.RoundPublishedEvent, following)), None)
        resumed = next(iter(self._events(events.ResumedEvent, following)), None)
        took = (event.recovery_seconds for event in self._events(events.FirstStepEvent, following))
        ended = next((line.event for line in self.lines if ends_job(line.event)), None)
        return Aftermath(
            round=following,
            reason=published.reason if published is not None else "",
            world_size=published.world_size if published is not None else 0,
            nodes=published.nodes if published is not None else (),
            resumed=(resumed.from_round, resumed.step) if resumed is not None else None,
            donor=resumed.donor if resumed is not None else None,
            kept=sum(event.kept for event in self._events(events.GroupStartedEvent, following)),
            recovery_s=next((seconds for seconds in took if seconds is not None), None),
            survivors=tuple(pid for event in self._events(events.GroupEndedEvent) for pid in event.survivors),
            ended=f"{ended.outcome}: {ended.reason}" if isinstance(ended, events.JobEndedEvent) else "",
            logged=bool(self.lines),
        )

    def verdict(self) -> RecordedVerdict | None:
        """The verdict, in the log of the node that judged."""
        judged = [
            (event, line.wall)
            for line in self.lines
            if isinstance(event := line.event, events.HangDetectedEvent) and event.round == self.round
        ]
        if not judged:
            return None
        event, wall = judged[-1]
        culprits = tuple(RankLocation(*place) for place in zip(event.nodes, event.ranks, event.slots, strict=False))
        why, action, seconds = event.reason, event.action, event.seconds
        return RecordedVerdict(self.round, event.cause, culprits, why, action, seconds, wall)

    def hang_restart_reason(self) -> str:
        """The reason why the round was ended, which the next Round says on every node; "" unless that was a hang."""
        for event in self._events(events.RoundPublishedEvent, self.round + 1):
            if event.cause == "hung":
                return event.reason.partition("; restart ")[0]
        return ""

    def member_nodes(self) -> list[str]:
        """The nodes of the round."""
        return [node for event in self._events(events.RoundPublishedEvent)[:1] for node in event.nodes]

    def node_by_rank(self) -> dict[int, str]:
        """The node of each rank of the round, as far as the log has it."""
        started = [(line, line.event) for line in self.lines if line.event.round == self.round]
        return {
            rank: line.node
            for line, event in started
            if isinstance(event, events.GroupStartedEvent)
            for rank in event.ranks
        }

    def _events(self, kind: type[_Event], round: int | None = None) -> list[_Event]:
        """The events of one kind, of the round in question or another one."""
        number = self.round if round is None else round
        return [line.event for line in self.lines if isinstance(line.event, kind) and line.event.round == number]


def _run_span(lines: Sequence[LogLine], round: int, at: float) -> tuple[int, int]:
    """The run's lines: from behind the job end before the last one that publishes `round` in time, to the next end."""
    published = [
        i
        for i, line in enumerate(lines)
        if isinstance(line.event, events.RoundPublishedEvent) and line.event.round == round
    ]
    in_time = [i for i in published if not at or lines[i].wall <= at + _MAX_CLOCK_SKEW_S] or published
    if not in_time:
        return 0, len(lines)
    ends = [i for i, line in enumerate(lines) if ends_job(line.event)]
    start = max((i + 1 for i in ends if i < in_time[-1]), default=0)
    return start, min((i + 1 for i in ends if i >= start), default=len(lines))


def ends_job(event: LogEvent) -> bool:
    """True if the whole job ended, not only one node's part."""
    return isinstance(event, events.JobEndedEvent) and event.outcome != "left"
