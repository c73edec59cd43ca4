"""The content of a folder of evidence as one value: `load` makes it, `text` and `json_report` show it.

Unknown numbers are -1, unknown texts "", unknown times 0.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from elasticd_agent.hangs.collector.record import RankEvidence
from elasticd_agent.hangs.explain.flight import GroupComparison
from elasticd_agent.hangs.stacks import ThreadStack
from elasticd_agent.model.codec import MAX_SECONDS
from elasticd_agent.model.phrases import listing, plural, ranges
from elasticd_agent.model.reports import RecordedVerdict

ExplanationKind = Literal["hang", "suspicion", "dump"]
"""A group was found hung; was suspected, and resumed or has not been judged; was dumped on request."""


@dataclass(frozen=True, slots=True)
class RankFacts(RankEvidence):
    """One rank: its evidence, under its node's report, with which the verdict was made, and what follows from both."""

    FLOAT_RANGE: ClassVar[tuple[float, float]] = (-1.0, MAX_SECONDS)
    node: str = ""
    slot: int = -1
    idle_s: float = -1.0
    stopped_s: float = 0.0
    cpu_s: float = -1.0
    io_bytes: int = -1
    window_s: float = 0.0
    exited: bool = False
    culprit: bool = False
    children: tuple[str, ...] = ()  #: the processes below it, in words
    remarks: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class StackGroup:
    """Ranks whose main threads are at the same place. `is_minority`: more ranks are at another one."""

    ranks: tuple[int, ...]
    first_rank: RankFacts
    main_thread: ThreadStack
    is_minority: bool


@dataclass(frozen=True, slots=True)
class GpuFacts:
    """One GPU's facts as (name, value); `trouble` are the bad ones."""

    name: str
    facts: tuple[tuple[str, str], ...]
    trouble: str = ""


@dataclass(frozen=True, slots=True)
class Aftermath:
    """The round after this one; `resumed` is the (round, step) of its state, `donor` the rank that saved it after the
    fault. `kept` workers stayed in their process, on the nodes of the log."""

    round: int = 0
    reason: str = ""
    world_size: int = 0
    nodes: tuple[str, ...] = ()
    resumed: tuple[int, int] | None = None
    donor: int | None = None
    kept: int = 0
    recovery_s: float | None = None
    survivors: tuple[int, ...] = ()
    ended: str = ""
    logged: bool = False  #: the round is in an event log


@dataclass(frozen=True, slots=True)
class Explanation:
    round: int
    kind: ExplanationKind
    directory: str
    headline: str
    job: str = ""
    taken_at: float = 0.0  #: Unix time of the newest stacks
    verdict: RecordedVerdict | None = None
    ranks: tuple[RankFacts, ...] = ()
    stack_groups: tuple[StackGroup, ...] = ()
    wait_sentences: tuple[str, ...] = ()
    group_comparisons: tuple[GroupComparison, ...] = ()
    gpus: tuple[GpuFacts, ...] = ()
    aftermath: Aftermath = Aftermath()
    troubles: tuple[str, ...] = ()  #: the parts that are missing or could not be read
    other_folders: tuple[str, ...] = ()

    @property
    def blamed_ranks(self) -> tuple[RankFacts, ...]:
        return tuple(rank for rank in self.ranks if rank.culprit)


def describe_ranks(ranks: tuple[int, ...] | list[int]) -> str:
    """ "rank 3", "ranks 0, 2-7 and 9"."""
    if not ranks:
        return "no rank"
    return f"{plural(len(set(ranks)), 'rank')} {listing(ranges(ranks, 3), None)}"
