"""Pure: a group that makes no progress -> who the others wait for, what is wrong with it, and how that is known.

It exists so that the question who is to blame is apart from the question whether anybody is. The order of its rules
is the order of what can be trusted: who has ended, who has issued fewer collectives, whose stack is not in a wait, who
waits in something else than the others. Where nothing tells ranks apart it blames nobody.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from elasticd.heartbeat.record import JOINING
from elasticd_agent.hangs.rank import Rank, names, waiting

LONG_KERNEL_S = 60.0
"""A rank that others wait for, and that waits for its device, may run a long kernel, or evaluate: it is given this."""
_WORST_FIRST = ("stopped", "zombie", "gil", "blocked", "spinning")
"""Of several to blame: one that works may go on by itself."""


@dataclass(frozen=True, slots=True)
class Blame:
    """`patience_s`: until nobody has made progress for so long, this may be nothing."""

    culprits: tuple[Rank, ...]
    cause: str
    why: str
    patience_s: float = 0.0


def blame(live: Sequence[Rank], ended: Sequence[Rank], nodes: int) -> Blame:
    """Who of `live`, not empty, holds up the group on so many nodes. `ended`: ranks that have ended with code 0."""
    outside = _outside(live)
    done = max((rank.seen.step for rank in ended), default=0)
    last = [rank for rank in live if 0 < done <= rank.seen.step and (rank in outside or rank.seen.where == "device")]
    if all(rank.seen.phase == "exit" or rank in last for rank in live):
        return _exiting(live, ended)
    if outside:
        return _of_outside(outside, live, ended)
    if ended:
        return _of_ended(live, ended)
    if len(live) == 1:
        alone = live[0]
        return Blame((alone,), "blocked", f"{alone.named()} {alone.doing()}, and there is no other rank", LONG_KERNEL_S)
    return _all_inside(live, nodes)


def _outside(live: Sequence[Rank]) -> list[Rank]:
    stuck = [rank for rank in live if rank.holds_gil]
    if len(stuck) == len(live) > 1:  # that is the machine, or the pulse
        stuck = []
    return [rank for rank in live if not rank.inside or rank in stuck]


def _exiting(live: Sequence[Rank], ended: Sequence[Rank]) -> Blame:
    culprits = _outside(live) or (list(live) if ended else [])
    if not culprits:
        return Blame((), "exiting", f"all ranks wait for each other while they exit: {waiting(live)}")
    others = f"; {len(ended)} of the others ha{'s' if len(ended) == 1 else 've'} ended" if ended else ""
    return Blame(tuple(culprits), "exiting", f"{names(culprits)} {_does(culprits)} after training is done{others}")


# ---- somebody is not waiting for anybody


def _of_outside(outside: list[Rank], live: Sequence[Rank], ended: Sequence[Rank]) -> Blame:
    joined = any(rank.seen.collectives >= 0 for rank in live)
    suspects = [rank for rank in outside if rank.seen.phase != "exit"] or outside
    if joined:
        suspects = _fewest(suspects)
    if len(suspects) == len(live) > 1:
        suspects = _in_a_phase_of_their_own(suspects)
    if len(suspects) == len(live) > 1:
        return Blame((), "everyone", f"all {len(live)} ranks are quiet and none waits for another: {_each(live)}")
    others = [rank for rank in live if rank not in suspects]
    cause = min((rank.standing for rank in suspects), key=_WORST_FIRST.index)
    if cause == "blocked" and all(rank.seen.phase == "exit" for rank in suspects):
        cause = "missed_collective"
    waits = [rank for rank in others if rank.inside]
    joining = sorted({rank.seen.function or JOINING for rank in waits if rank.joins})
    if joining and all(rank.seen.collectives < 0 for rank in suspects):
        cause = "never_joined"
        said = f"{names(suspects)} ha{_s(suspects)} not come to {joining[0]}{_namely(suspects)}"
    else:
        said = f"{names(suspects)} {_issued(suspects, others)}"
    said += _does(suspects)
    held_up = waiting(others)
    return Blame(tuple(suspects), cause, said + (f"; {held_up} for {_whom(suspects)}" if held_up else ""))


def _fewest(ranks: Sequence[Rank]) -> list[Rank]:
    least = min(rank.seen.collectives for rank in ranks)
    return [rank for rank in ranks if rank.seen.collectives == least]


def _in_a_phase_of_their_own(ranks: list[Rank]) -> list[Rank]:
    """Nobody waits where we can see it: who saves or evaluates is waited for in some way of the script's own."""
    return [rank for rank in ranks if rank.seen.phase in ("checkpoint", "eval")] or ranks


# ---- everybody waits


def _of_ended(live: Sequence[Rank], ended: Sequence[Rank]) -> Blame:
    if len(ended) > len(live):
        said = f"{names(live)} {_does(live)} for ranks that have all ended with code 0"
        return Blame(tuple(live), "missed_collective", said)
    fewer = _issued(ended, live)
    said = f"{names(ended)} {fewer}{_does(ended)}" if fewer else f"{names(ended)} ha{_s(ended)} ended with code 0"
    return Blame(tuple(ended), "missed_collective", f"{said}; {waiting(live)} for {_whom(ended)}")


def _all_inside(live: Sequence[Rank], nodes: int) -> Blame:
    skipped = _left_one_out(live)
    if skipped is not None:
        return skipped
    behind = [rank for rank in live if rank.seen.collectives < max(rank.seen.collectives for rank in live)]
    if behind and _apart_by_nodes(live):
        return _network(live, nodes, f"ranks on {' and '.join(sorted({rank.node for rank in behind}))} are behind")
    crossed = _crossed(live)
    if crossed is not None:
        return crossed
    if behind and 2 * len(behind) < len(live):
        first = behind[0]
        long = first.seen.where == "device"
        others = [rank for rank in live if rank not in behind]
        said = f"{names(behind)} {_issued(behind, others)}{_does(behind)}; {waiting(others)} for {_whom(behind)}"
        return Blame(tuple(behind), "blocked" if long else "missed_collective", said, LONG_KERNEL_S if long else 0.0)
    ahead = None if behind else _ahead(live)
    if ahead is not None:
        return ahead
    issued = live[0].seen.collectives
    alike = f" after {issued:,} collectives" if not behind and issued >= 0 else ""
    return _network(live, nodes, "nobody can be told from the others" if behind else f"none is behind{alike}")


def _network(live: Sequence[Rank], nodes: int, but: str) -> Blame:
    idle = f"for {min(rank.seen.idle_s for rank in live):.1f} s"
    what = f"the network between {nodes} nodes, or the backend" if nodes > 1 else "the backend, or tensors that differ"
    return Blame((), "network", f"{waiting(live)} {idle}, {but}: {what}")


def _apart_by_nodes(live: Sequence[Rank]) -> bool:
    """All ranks of each node stand at the same place: what one of them alone does wrong looks otherwise.

    Who is ahead was done with what the others wait in: the root of a broadcast does not wait for who receives.
    """
    return len({rank.node for rank in live}) > 1 and all(
        len({(rank.seen.collectives, _kind(rank)) for rank in live if rank.node == one.node}) == 1 for one in live
    )


def _crossed(live: Sequence[Rank]) -> Blame | None:
    """Ranks that wait in different collectives, or barriers: they wait for each other."""
    kinds = Counter(_kind(rank) for rank in live if rank.seen.where != "device")
    if len(kinds) < 2:
        return None
    at_barriers = [rank for rank in live if rank.at_barrier]
    others = [rank for rank in live if rank not in at_barriers]
    if at_barriers and others and (went_past := _issued(at_barriers, others)) and len(at_barriers) <= len(others):
        said = f"{names(at_barriers)} {went_past}{_does(at_barriers)}; {waiting(others)} for {_whom(at_barriers)}"
        return Blame(tuple(at_barriers), "missed_collective", said)
    (common, most), (_, next_most) = kinds.most_common(2)
    said = f"ranks wait in different collectives: {waiting(live)}"
    if most == next_most:
        return Blame((), "mismatched_collectives", said)
    odd = tuple(rank for rank in live if rank.seen.where != "device" and _kind(rank) != common)
    return Blame(odd, "mismatched_collectives", f"{said}; {names(odd)} {'is' if len(odd) == 1 else 'are'} the odd one")


def _kind(rank: Rank) -> str:
    return f"barrier {rank.seen.barrier!r}" if rank.at_barrier else rank.seen.function or rank.seen.where


def _left_one_out(live: Sequence[Rank]) -> Blame | None:
    """Somebody issued fewer in its last step than the others in theirs, and is not behind them."""
    usual = _odd_ones(live, [rank.seen.usual for rank in live], max)
    step = max(rank.seen.step for rank in live)
    odd = tuple(rank for rank, common in usual if -1 < rank.seen.usual < common and rank.seen.step == step)
    if not odd:
        return None
    _, common = usual[0]
    said = f"{names(odd)} issued {odd[0].seen.usual:,} collectives in its last step, the others {common:,} in theirs"
    return Blame(odd, "missed_collective", f"{said}: {waiting(live)}")


def _ahead(live: Sequence[Rank]) -> Blame | None:
    """As many collectives, but somebody has made more steps with them."""
    odd = tuple(rank for rank, common in _odd_ones(live, [rank.seen.step for rank in live], min))
    if not odd:
        return None
    said = f"{names(odd)} issued {odd[0].seen.collectives:,} collectives, as many as others in another step"
    return Blame(odd, "missed_collective", f"{said}: {waiting(live)}")


def _odd_ones(
    live: Sequence[Rank], values: Sequence[int], of_two: Callable[[Iterable[int]], int]
) -> list[tuple[Rank, int]]:
    """Who differs from most of the ranks, and from what. Two ranks have no majority: `of_two` says what is usual."""
    (common, most), *_ = Counter(values).most_common(1)
    if len(live) == 2:
        common = of_two(values)
    elif 2 * most <= len(live):
        return []
    return [(rank, common) for rank, value in zip(live, values, strict=True) if value != common]


# ---- words


def _issued(ranks: Sequence[Rank], others: Sequence[Rank]) -> str:
    mine = max(rank.seen.collectives for rank in ranks)
    counts = [rank.seen.collectives for rank in others]
    if not counts or mine < 0 or max(counts) <= mine:
        return ""
    theirs = f"{max(counts):,}" if min(counts) == max(counts) else f"up to {max(counts):,}"
    return f"ha{_s(ranks)} issued {mine:,} collectives, the others {theirs}{_namely(ranks)}"


def _does(ranks: Sequence[Rank]) -> str:
    if len(ranks) == 1:
        return ranks[0].doing()
    more = "; …" if len(ranks) > 3 else ""
    return f"({'; '.join(f'rank {rank.seen.rank} {rank.doing()}' for rank in ranks[:3])}{more})"


def _each(ranks: Sequence[Rank]) -> str:
    return "; ".join(f"{rank.named()} {rank.doing()}" for rank in ranks[:3]) + ("; …" if len(ranks) > 3 else "")


def _s(ranks: Sequence[Rank]) -> str:
    return "s" if len(ranks) == 1 else "ve"


def _namely(ranks: Sequence[Rank]) -> str:
    """Between what they have or have not done, and what each of them does."""
    return ": it " if len(ranks) == 1 else " "


def _whom(ranks: Sequence[Rank]) -> str:
    return "it" if len(ranks) == 1 else "them"
