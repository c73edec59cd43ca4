"""Pure: a group that makes no progress -> who the others wait for, what is wrong with it, and how that is known.

It exists so that the question who is to blame is apart from the question whether anybody is. The order of its rules
is the order of what can be trusted: who has ended, who has issued fewer collectives, whose stack is not in a wait, who
waits in something else than the others. Where nothing tells ranks apart it blames nobody.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from elasticd.heartbeat.record import INIT_PROCESS_GROUP
from elasticd_agent.hangs.rank import RankState, describe_waits, labels

LONG_KERNEL_S = 60.0
"""A rank that others wait for, and that waits for its device, may run a long kernel, or evaluate: it is given this."""
_WORST_FIRST = ("stopped", "zombie", "gil", "blocked", "spinning")
"""Of several to blame: one that works may go on by itself."""


@dataclass(frozen=True, slots=True)
class Blame:
    """`patience_s`: until nobody has made progress for so long, this may be nothing."""

    culprits: tuple[RankState, ...]
    cause: str
    why: str
    patience_s: float = 0.0


def blame(live: Sequence[RankState], exited: Sequence[RankState], nodes: int) -> Blame:
    """Who of `live`, not empty, holds up the group on so many nodes. `ended`: ranks that have ended with code 0."""
    outside = _outside(live)
    done = max((rank.report.step for rank in exited), default=0)
    last = [
        rank for rank in live if 0 < done <= rank.report.step and (rank in outside or rank.report.where == "device")
    ]
    if all(rank.report.phase == "exit" or rank in last for rank in live):
        return _blame_exiting(live, exited)
    if outside:
        return _blame_outside(outside, live, exited)
    if exited:
        return _blame_exited(live, exited)
    if len(live) == 1:
        alone = live[0]
        return Blame(
            (alone,), "blocked", f"{alone.label()} {alone.activity()}, and there is no other rank", LONG_KERNEL_S
        )
    return _blame_waiting(live, nodes)


def _outside(live: Sequence[RankState]) -> list[RankState]:
    stuck = [rank for rank in live if rank.holds_gil]
    if len(stuck) == len(live) > 1:  # that is the machine, or the pulse
        stuck = []
    return [rank for rank in live if not rank.waits or rank in stuck]


def _blame_exiting(live: Sequence[RankState], ended: Sequence[RankState]) -> Blame:
    culprits = _outside(live) or (list(live) if ended else [])
    if not culprits:
        return Blame((), "exiting", f"all ranks wait for each other while they exit: {describe_waits(live)}")
    others = f"; {len(ended)} of the others ha{'s' if len(ended) == 1 else 've'} ended" if ended else ""
    return Blame(tuple(culprits), "exiting", f"{labels(culprits)} {_does(culprits)} after training is done{others}")


# ---- somebody is not waiting for anybody


def _blame_outside(outside: list[RankState], live: Sequence[RankState], ended: Sequence[RankState]) -> Blame:
    joined = any(rank.report.collectives >= 0 for rank in live)
    suspects = [rank for rank in outside if rank.report.phase != "exit"] or outside
    if joined:
        suspects = _fewest(suspects)
    if len(suspects) == len(live) > 1:
        suspects = _in_a_phase_of_their_own(suspects)
    if len(suspects) == len(live) > 1:
        return Blame((), "everyone", f"all {len(live)} ranks are quiet and none waits for another: {_each(live)}")
    others = [rank for rank in live if rank not in suspects]
    cause = min((rank.likely_cause for rank in suspects), key=_WORST_FIRST.index)
    if cause == "blocked" and all(rank.report.phase == "exit" for rank in suspects):
        cause = "missed_collective"
    waits = [rank for rank in others if rank.waits]
    joining = sorted({rank.report.function or INIT_PROCESS_GROUP for rank in waits if rank.is_joining})
    if joining and all(rank.report.collectives < 0 for rank in suspects):
        cause = "never_joined"
        said = f"{labels(suspects)} ha{_s(suspects)} not come to {joining[0]}{_namely(suspects)}"
    else:
        said = f"{labels(suspects)} {_issued(suspects, others)}"
    said += _does(suspects)
    held_up = describe_waits(others)
    return Blame(tuple(suspects), cause, said + (f"; {held_up} for {_whom(suspects)}" if held_up else ""))


def _fewest(ranks: Sequence[RankState]) -> list[RankState]:
    least = min(rank.report.collectives for rank in ranks)
    return [rank for rank in ranks if rank.report.collectives == least]


def _in_a_phase_of_their_own(ranks: list[RankState]) -> list[RankState]:
    """Nobody waits where we can see it: who saves or evaluates is waited for in some way of the script's own."""
    return [rank for rank in ranks if rank.report.phase in ("checkpoint", "eval")] or ranks


# ---- everybody waits


def _blame_exited(live: Sequence[RankState], ended: Sequence[RankState]) -> Blame:
    if len(ended) > len(live):
        said = f"{labels(live)} {_does(live)} for ranks that have all ended with code 0"
        return Blame(tuple(live), "missed_collective", said)
    fewer = _issued(ended, live)
    said = f"{labels(ended)} {fewer}{_does(ended)}" if fewer else f"{labels(ended)} ha{_s(ended)} ended with code 0"
    return Blame(tuple(ended), "missed_collective", f"{said}; {describe_waits(live)} for {_whom(ended)}")


def _blame_waiting(live: Sequence[RankState], nodes: int) -> Blame:
    skipped = _skipped_one(live)
    if skipped is not None:
        return skipped
    behind = [rank for rank in live if rank.report.collectives < max(rank.report.collectives for rank in live)]
    if behind and _apart_by_nodes(live):
        return _network(live, nodes, f"ranks on {' and '.join(sorted({rank.node for rank in behind}))} are behind")
    crossed = _mismatched(live)
    if crossed is not None:
        return crossed
    if behind and 2 * len(behind) < len(live):
        first = behind[0]
        long = first.report.where == "device"
        others = [rank for rank in live if rank not in behind]
        said = (
            f"{labels(behind)} {_issued(behind, others)}{_does(behind)}; {describe_waits(others)} for {_whom(behind)}"
        )
        return Blame(tuple(behind), "blocked" if long else "missed_collective", said, LONG_KERNEL_S if long else 0.0)
    ahead = None if behind else _ahead(live)
    if ahead is not None:
        return ahead
    issued = live[0].report.collectives
    alike = f" after {issued:,} collectives" if not behind and issued >= 0 else ""
    return _network(live, nodes, "nobody can be told from the others" if behind else f"none is behind{alike}")


def _network(live: Sequence[RankState], nodes: int, but: str) -> Blame:
    idle = f"for {min(rank.report.idle_s for rank in live):.1f} s"
    what = f"the network between {nodes} nodes, or the backend" if nodes > 1 else "the backend, or tensors that differ"
    return Blame((), "network", f"{describe_waits(live)} {idle}, {but}: {what}")


def _apart_by_nodes(live: Sequence[RankState]) -> bool:
    """All ranks of each node stand at the same place: what one of them alone does wrong looks otherwise.

    Who is ahead was done with what the others wait in: the root of a broadcast does not wait for who receives.
    """
    return len({rank.node for rank in live}) > 1 and all(
        len({(rank.report.collectives, _kind(rank)) for rank in live if rank.node == one.node}) == 1 for one in live
    )


def _mismatched(live: Sequence[RankState]) -> Blame | None:
    """Ranks that wait in different collectives, or barriers: they wait for each other."""
    kinds = Counter(_kind(rank) for rank in live if rank.report.where != "device")
    if len(kinds) < 2:
        return None
    at_barriers = [rank for rank in live if rank.at_barrier]
    others = [rank for rank in live if rank not in at_barriers]
    if at_barriers and others and (went_past := _issued(at_barriers, others)) and len(at_barriers) <= len(others):
        said = (
            f"{labels(at_barriers)} {went_past}{_does(at_barriers)}; {describe_waits(others)} for {_whom(at_barriers)}"
        )
        return Blame(tuple(at_barriers), "missed_collective", said)
    (common, most), (_, next_most) = kinds.most_common(2)
    said = f"ranks wait in different collectives: {describe_waits(live)}"
    if most == next_most:
        return Blame((), "mismatched_collectives", said)
    odd = tuple(rank for rank in live if rank.report.where != "device" and _kind(rank) != common)
    return Blame(odd, "mismatched_collectives", f"{said}; {labels(odd)} {'is' if len(odd) == 1 else 'are'} the odd one")


def _kind(rank: RankState) -> str:
    return f"barrier {rank.report.barrier!r}" if rank.at_barrier else rank.report.function or rank.report.where


def _skipped_one(live: Sequence[RankState]) -> Blame | None:
    """Somebody issued fewer in its last step than the others in theirs, and is not behind them."""
    usual = _minority(live, [rank.report.usual for rank in live], max)
    step = max(rank.report.step for rank in live)
    odd = tuple(rank for rank, common in usual if -1 < rank.report.usual < common and rank.report.step == step)
    if not odd:
        return None
    _, common = usual[0]
    said = f"{labels(odd)} issued {odd[0].report.usual:,} collectives in its last step, the others {common:,} in theirs"
    return Blame(odd, "missed_collective", f"{said}: {describe_waits(live)}")


def _ahead(live: Sequence[RankState]) -> Blame | None:
    """As many collectives, but somebody has made more steps with them."""
    odd = tuple(rank for rank, common in _minority(live, [rank.report.step for rank in live], min))
    if not odd:
        return None
    said = f"{labels(odd)} issued {odd[0].report.collectives:,} collectives, as many as others in another step"
    return Blame(odd, "missed_collective", f"{said}: {describe_waits(live)}")


def _minority(
    live: Sequence[RankState], values: Sequence[int], of_two: Callable[[Iterable[int]], int]
) -> list[tuple[RankState, int]]:
    """Who differs from most of the ranks, and from what. Two ranks have no majority: `of_two` says what is usual."""
    (common, most), *_ = Counter(values).most_common(1)
    if len(live) == 2:
        common = of_two(values)
    elif 2 * most <= len(live):
        return []
    return [(rank, common) for rank, value in zip(live, values, strict=True) if value != common]


# ---- words


def _issued(ranks: Sequence[RankState], others: Sequence[RankState]) -> str:
    mine = max(rank.report.collectives for rank in ranks)
    counts = [rank.report.collectives for rank in others]
    if not counts or mine < 0 or max(counts) <= mine:
        return ""
    theirs = f"{max(counts):,}" if min(counts) == max(counts) else f"up to {max(counts):,}"
    return f"ha{_s(ranks)} issued {mine:,} collectives, the others {theirs}{_namely(ranks)}"


def _does(ranks: Sequence[RankState]) -> str:
    if len(ranks) == 1:
        return ranks[0].activity()
    more = "; …" if len(ranks) > 3 else ""
    return f"({'; '.join(f'rank {rank.report.rank} {rank.activity()}' for rank in ranks[:3])}{more})"


def _each(ranks: Sequence[RankState]) -> str:
    return "; ".join(f"{rank.label()} {rank.activity()}" for rank in ranks[:3]) + ("; …" if len(ranks) > 3 else "")


def _s(ranks: Sequence[RankState]) -> str:
    return "s" if len(ranks) == 1 else "ve"


def _namely(ranks: Sequence[RankState]) -> str:
    """Between what they have or have not done, and what each of them does."""
    return ": it " if len(ranks) == 1 else " "


def _whom(ranks: Sequence[RankState]) -> str:
    return "it" if len(ranks) == 1 else "them"
