"""What a folder of evidence says, as one value: made by `reading`, shown by `page`, written as JSON by `document`.

It exists so that the person's page and the program's document cannot say different things. Nothing here reads or
judges.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from elasticd_agent.hangs.explain.flight_recorder import GroupComparison
from elasticd_agent.hangs.stacks import RankStacks
from elasticd_agent.model.phrases import listing, plural, ranges

EvidenceKind = Literal["hang", "suspicion", "dump"]
"""A group was found hung; one was suspected, and went on or has not been judged; nobody suspects anything."""


@dataclass(frozen=True, slots=True)
class Culprit:
    """Whom the verdict blames."""

    node: str
    rank: int
    slot: int


@dataclass(frozen=True, slots=True)
class RecordedVerdict:
    """What was decided. `seen_after_s`: after how long without progress; `at_wall`: unix time, 0 unknown."""

    cause: str
    culprits: tuple[Culprit, ...]
    why: str
    action: str
    seen_after_s: float
    at_wall: float


@dataclass(frozen=True, slots=True)
class RankFacts:
    """One rank, by all that is known of it. Numbers are -1 and words "" where nothing is.

    `call` is the system call its main thread was in, with what that was about; `kernel` its kernel stack, innermost
    first; `children` the processes below it, in words. `remarks` are sentences on all of that; `log` its last lines of
    output; `no_stacks` says why there are none.
    """

    rank: int
    node: str = ""
    slot: int = -1
    phase: str = ""
    step: int = -1
    collectives: int = -1
    usual: int = -1
    barrier: str = ""
    idle_s: float = -1.0
    state: str = ""
    stopped_s: float = 0.0
    cpu_s: float = -1.0
    io_bytes: int = -1
    window_s: float = 0.0
    where: str = ""
    function: str = ""
    exited: bool = False
    culprit: bool = False
    pid: int = 0
    wchan: str = ""
    call: str = ""
    kernel: tuple[str, ...] = ()
    children: tuple[str, ...] = ()
    remarks: tuple[str, ...] = ()
    log: tuple[str, ...] = ()
    stacks: RankStacks | None = None
    no_stacks: str = ""


@dataclass(frozen=True, slots=True)
class StackGroup:
    """Ranks whose main threads are at the same place. `differs`: there are others, and more of them."""

    ranks: tuple[int, ...]
    stacks: RankStacks
    differs: bool


@dataclass(frozen=True, slots=True)
class GpuFacts:
    """One GPU's facts as (name, value), and what of them is bad."""

    name: str
    facts: tuple[tuple[str, str], ...]
    trouble: str = ""


@dataclass(frozen=True, slots=True)
class TimelineEntry:
    """Something that happened: unix time by its node's clock, and a sentence."""

    wall: float
    text: str
    node: str = ""


@dataclass(frozen=True, slots=True)
class Aftermath:
    """What came after. `round`: the next one, 0 unknown; `resumed`: (round, step) of its checkpoint."""

    round: int = 0
    reason: str = ""
    world_size: int = 0
    nodes: tuple[str, ...] = ()
    resumed: tuple[int, int] | None = None
    recovery_s: float | None = None
    survivors: tuple[int, ...] = ()
    ended: str = ""
    moments: tuple[TimelineEntry, ...] = ()


@dataclass(frozen=True, slots=True)
class Explanation:
    """All of it. `taken_at`: unix time of the newest stacks, 0 unknown. `waiting` says who waited where; `troubles`
    what is missing or could not be read."""

    round: int
    kind: EvidenceKind
    directory: str
    headline: str
    job: str = ""
    taken_at: float = 0.0
    verdict: RecordedVerdict | None = None
    ranks: tuple[RankFacts, ...] = ()
    stack_groups: tuple[StackGroup, ...] = ()
    waiting: tuple[str, ...] = ()
    flight: tuple[GroupComparison, ...] = ()
    gpus: tuple[GpuFacts, ...] = ()
    aftermath: Aftermath = Aftermath()
    troubles: tuple[str, ...] = ()
    others: tuple[str, ...] = ()

    @property
    def blamed(self) -> tuple[RankFacts, ...]:
        return tuple(rank for rank in self.ranks if rank.culprit)


def name_ranks(ranks: tuple[int, ...] | list[int]) -> str:
    """ "rank 3", "ranks 0, 2-7 and 9"."""
    if not ranks:
        return "no rank"
    return f"{plural(len(set(ranks)), 'rank')} {listing(ranges(ranks, 3), None)}"
