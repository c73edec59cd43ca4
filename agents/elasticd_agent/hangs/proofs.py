"""Pure: the flight recorders of the ranks -> a proof that some of them wait for each other, or for one that has ended.

A rank is stuck if it waits, no other thread of it runs code of the script, and each of its unfinished collectives can
never finish: a member that is stuck or has exited has not issued it, or has issued another collective under its number.
A rank in a call of its session is stuck if one that it waits for is stuck elsewhere, or has exited.
A rank that sends to or receives from another one is stuck if all ranks of the job are, and no bytes are under way.
Ranks without a recording may resume, so nothing is proven by their absence, nor by a rank with a group that no recorder
knows, nor in a group of which other programs may be members. Numbers count per process group.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from elasticd_agent.hangs.rank import RankState, describe_waits
from elasticd_agent.hangs.recordings import comparable_kind
from elasticd_agent.model.phrases import has_have
from elasticd_agent.model.reports import DEFAULT_GROUP_NAME, GroupTail

MAX_SHOWN = 3


@dataclass(frozen=True, slots=True)
class Proof:
    """`culprits` may be empty: two groups that are crossed have no side that is wrong."""

    culprits: tuple[RankState, ...]
    cause: str
    why: str


@dataclass(frozen=True, slots=True, order=True)
class _PendingCollective:
    """One unfinished collective of a process group, as one rank issued it."""

    group: str
    number: int
    kind: str
    backend: str
    in_job: bool
    members: int
    in_heartbeat_count: bool  #: true if the heartbeat counts it, too, where it is one of the default group

    def __str__(self) -> str:
        return f"{self.kind} (#{self.number} of {'the ' if self.group == DEFAULT_GROUP_NAME else ''}{self.group})"


def prove(live: Sequence[RankState], exited: Sequence[RankState], *, all_ranks_known: bool = False) -> Proof | None:
    """None: some rank may resume. `all_ranks_known`: `live` and `exited` are all ranks of the job."""
    stuck = _stuck_ranks(
        live, exited, quiet=all_ranks_known and not exited and all(rank.has_no_data_in_flight for rank in live)
    )
    if not stuck:
        return None
    waits: dict[_PendingCollective, list[RankState]] = {}
    transfers = [rank for rank in stuck if rank.is_in_point_to_point]
    called = [rank for rank in stuck if _in_session_call(rank)]
    for rank in stuck:
        for pending in _pending_collectives(rank) if rank.wait_is_recorded else ():
            waits.setdefault(pending, []).append(rank)
    shown = sorted(waits.items(), key=lambda item: (-len(item[1]), item[0]))
    sentences = [_sentence(collective, waiting, [*stuck, *exited]) for collective, waiting in shown[:MAX_SHOWN]]
    if transfers:
        calls = ", ".join(sorted({rank.report.function for rank in transfers}))
        sentences.append(f"{_describe_ranks(transfers)} {_wait_verb(transfers)} in {calls} while all ranks wait")
    if called:
        sentences.append(f"{describe_waits(called)}, which others have not called")
    why = "; ".join(sentences)
    culprits = _culprits(shown, stuck, exited)
    differ = any(_conflicting_kind(collective, member) for collective in waits for member in stuck)
    missed = culprits and (not differ or all(rank.report.deviation == "skipped" for rank in culprits))
    cause = "missed_collective" if missed else "mismatched_collectives"
    return Proof(tuple(culprits), cause, why)


def wait_apart(live: Sequence[RankState]) -> bool:
    """The recorders show that a rank waits in a collective that another member has not issued, or as another one."""
    awaited = {pending for rank in live for pending in _pending_collectives(rank)}
    return any(_has_not_issued(one, member) or _conflicting_kind(one, member) for one in awaited for member in live)


def _stuck_ranks(live: Sequence[RankState], exited: Sequence[RankState], quiet: bool) -> list[RankState]:
    """The greatest set of ranks that only wait for each other and for exited ones. `quiet`: no bytes are under way."""
    stuck = [rank for rank in live if _only_waits(rank)]

    def never_resumes(rank: RankState) -> bool:
        if _in_session_call(rank):
            return _session_call_never_ends(rank, stuck, exited)
        if rank.is_in_point_to_point:
            return quiet and len(stuck) == len(live) > 1
        return all(
            _collective_never_ends(collective, rank, [*stuck, *exited]) for collective in _pending_collectives(rank)
        )

    while (left := [rank for rank in stuck if never_resumes(rank)]) != stuck:
        stuck = left
    return stuck


def _only_waits(rank: RankState) -> bool:
    report = rank.report
    recorded = (
        _in_session_call(rank)
        or rank.is_in_point_to_point
        or (rank.wait_is_recorded and any(_pending_collectives(rank)))
    )
    return recorded and report.alone and not (rank.is_moving or rank.is_paused or rank.holds_gil)


def _in_session_call(rank: RankState) -> bool:
    """True if its heartbeat says so: other code of elasticd may wait for the agent."""
    return rank.report.phase == "barrier" or bool(rank.report.wait_call)


def _session_call_never_ends(rank: RankState, stuck: Sequence[RankState], exited: Sequence[RankState]) -> bool:
    """One that it waits for is stuck elsewhere, or has exited: that rank, or, at a barrier, any other."""
    if rank.report.wait_call:
        return any(member.report.rank == rank.report.wait_rank for member in [*stuck, *exited])
    return bool(exited) or not all(map(_in_session_call, stuck))


def _collective_never_ends(one: _PendingCollective, by: RankState, blocked: Sequence[RankState]) -> bool:
    if not one.in_job:
        return False
    return any(_has_not_issued(one, member) or _conflicting_kind(one, member) for member in blocked if member is not by)


def _pending_collectives(rank: RankState) -> Iterator[_PendingCollective]:
    for tail in rank.report.groups:
        if tail.pending:
            kind = dict(tail.kinds).get(tail.pending, "a collective")
            # Of a group with both backends the heartbeat counts NCCL's collectives.
            in_heartbeat_count = tail.backend != "gloo" or not rank.report.nccl_groups
            group = tail.group, tail.pending, kind, tail.backend, tail.in_job, tail.members
            yield _PendingCollective(*group, in_heartbeat_count)


def _tails(one: _PendingCollective, member: RankState) -> Iterator[GroupTail]:
    """The tails of what the member issued in this group through the same backend: each has a recorder and numbers of
    its own."""
    group = one.group, one.backend, one.members
    same = (tail for tail in member.report.groups if (tail.group, tail.backend, tail.members) == group)
    return (tail for tail in same if not tail.unrecorded)


def _has_not_issued(one: _PendingCollective, member: RankState) -> bool:
    """The member belongs to the group and has not issued it. Of one that has exited the default group is known."""
    if member.report.exited and one.group == DEFAULT_GROUP_NAME:
        return one.in_heartbeat_count and 0 <= member.report.collectives < one.number
    return any(tail.last < one.number for tail in _tails(one, member))


def _conflicting_kind(one: _PendingCollective, member: RankState) -> str:
    """The collective that the member issued under this number, if that is another one; else ""."""
    kind = next((dict(tail.kinds).get(one.number, "") for tail in _tails(one, member)), "")
    return kind if comparable_kind(kind, one.backend) != comparable_kind(one.kind, one.backend) else ""


def _culprits(
    waits: Sequence[tuple[_PendingCollective, list[RankState]]], stuck: Sequence[RankState], exited: Sequence[RankState]
) -> list[RankState]:
    """Those that have left; else a minority that issued another collective, or whose order of collectives is new."""
    left = [rank for rank in exited if any(_has_not_issued(collective, rank) for collective, _ in waits)]
    if left:
        return left
    for collective, _ in waits:
        kinds = {
            rank.report.rank: comparable_kind(
                _conflicting_kind(collective, rank) or collective.kind, collective.backend
            )
            for rank in stuck
            if any(tail.last >= collective.number for tail in _tails(collective, rank))
        }
        (common, most), *others = Counter(kinds.values()).most_common()
        if others and 2 * most > len(kinds):
            return [rank for rank in stuck if kinds.get(rank.report.rank, common) != common]
    if not waits:
        return []
    odd = [rank for rank in stuck if rank.report.deviation]
    if 0 < 2 * len(odd) <= len(stuck):
        return odd
    for collective, _ in waits:
        skipped = [rank for rank in stuck if _has_not_issued(collective, rank)]
        beyond = [
            rank for rank in skipped if all(other.group == DEFAULT_GROUP_NAME for other in _pending_collectives(rank))
        ]
        if collective.group != DEFAULT_GROUP_NAME and skipped and skipped == beyond:
            return skipped  # their next collective is one of all ranks
    first, waiting = waits[0]
    lacking = [rank for rank in stuck if _has_not_issued(first, rank)]
    return lacking if len(lacking) < len(waiting) else []


def _sentence(one: _PendingCollective, waiting: Sequence[RankState], others: Sequence[RankState]) -> str:
    lacking = [rank for rank in others if rank not in waiting and _has_not_issued(one, rank)]
    differing = {rank.report.rank: kind for rank in others if (kind := _conflicting_kind(one, rank))}
    parts = [f"{_describe_ranks(lacking)} {has_have(lacking)} not issued"] if lacking else []
    parts += [f"rank {rank} issued as {kind}" for rank, kind in list(differing.items())[:MAX_SHOWN]]
    return f"{_describe_ranks(waiting)} {_wait_verb(waiting)} in {one}, which {' and '.join(parts)}"


def _wait_verb(ranks: Sequence[RankState]) -> str:
    return "waits" if len(ranks) == 1 else "wait"


def _describe_ranks(ranks: Sequence[RankState]) -> str:
    numbers = ", ".join(str(rank.report.rank) for rank in ranks[:8])
    return f"rank{'s' if len(ranks) > 1 else ''} {numbers}{' …' if len(ranks) > 8 else ''}"
