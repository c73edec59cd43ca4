"""Pure: the ends of several ranks' flight recordings -> the collective they wait for, and the ranks that lack it.

The rank to blame is the one whose list is shorter than the others', or differs. Numbers are per process group.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from elasticd_agent.hangs.recordings import comparable_kind
from elasticd_agent.model.reports import DEFAULT_GROUP_NAME, GroupTail

MAX_SHOWN_GROUPS = 16


@dataclass(frozen=True, slots=True)
class NumberedCollective:
    """One collective as a rank issued it."""

    number: int
    operation: str
    sizes: str
    done: bool

    def __str__(self) -> str:
        return f"#{self.number} {self.operation}" + (f" of {self.sizes}" if self.sizes else "")


@dataclass(frozen=True, slots=True)
class GroupComparison:
    """One process group, all ranks that have a recording."""

    group: str
    last: Mapping[int, NumberedCollective | None]  #: the last collective that each rank issued
    pending: Mapping[int, NumberedCollective]  #: the first one of each rank that was not finished
    missing: tuple[int, ...] = ()  #: the ranks that are behind, unless they wait themselves
    waiting_for: NumberedCollective | None = None  #: the first collective that those have not issued
    differing: Mapping[str, tuple[int, ...]] | None = None
    """At the first number at which ranks issued different collectives, the ranks by their collective."""


def compare_groups(recorded: Mapping[int, Sequence[GroupTail]]) -> list[GroupComparison]:
    """One comparison for each process group, those with a difference first: of gloo's recordings only if all are."""
    known = {rank: [tail for tail in tails if not tail.unrecorded] for rank, tails in recorded.items()}
    device = {rank: [tail for tail in tails if tail.backend != "gloo"] for rank, tails in known.items()}
    known = {rank: tails for rank, tails in device.items() if tails} or known
    groups = [
        _compare_group(*key, known) for key in sorted({_key(t) for tails in known.values() for t in tails if t.last})
    ]
    groups.sort(key=lambda group: (group.differing is None and not group.missing, not group.pending))
    return groups[:MAX_SHOWN_GROUPS]


def _key(tail: GroupTail) -> tuple[str, int]:
    """The name of its group and a checksum of the group's ranks, which for the default group is left out."""
    return tail.group, 0 if tail.group == DEFAULT_GROUP_NAME else tail.members


def _compare_group(name: str, ranks: int, recorded: Mapping[int, Sequence[GroupTail]]) -> GroupComparison:
    members = {rank: tail for rank, tails in recorded.items() for tail in tails if _key(tail) == (name, ranks)}
    if name == DEFAULT_GROUP_NAME:  # every rank is in it; one that has recorded nothing there is behind
        members = {rank: members.get(rank, GroupTail(name, 0)) for rank in recorded}
    reached = {rank: tail.last for rank, tail in members.items()}
    least, most = min(reached.values()), max(reached.values())
    missing = tuple(rank for rank in sorted(reached) if reached[rank] == least < most and not members[rank].pending)
    first_missing = next(filter(None, (_collective_of_number(tail, least + 1) for tail in members.values())), None)
    return GroupComparison(
        name,
        {rank: _collective_of_number(tail, tail.last) for rank, tail in members.items()},
        {rank: first for rank, tail in members.items() if (first := _collective_of_number(tail, tail.pending))},
        missing,
        first_missing if missing else None,
        _first_difference(members),
    )


def _collective_of_number(tail: GroupTail, number: int) -> NumberedCollective | None:
    kind = dict(tail.kinds).get(number)
    if kind is None:
        return None
    operation, _, sizes = kind.partition(" of ")
    return NumberedCollective(number, operation, sizes, done=not 0 < tail.pending <= number)


def _first_difference(members: Mapping[int, GroupTail]) -> dict[str, tuple[int, ...]] | None:
    for number in sorted({number for tail in members.values() for number, _ in tail.kinds}):
        ranks: dict[str, list[int]] = defaultdict(list)
        for rank, tail in sorted(members.items()):
            if kind := dict(tail.kinds).get(number):
                ranks[comparable_kind(kind, tail.backend)].append(rank)
        if len(ranks) > 1:
            common = sorted(ranks.values(), key=lambda group: -len(group))
            return {str(_collective_of_number(members[group[0]], number)): tuple(group) for group in common}
    return None
