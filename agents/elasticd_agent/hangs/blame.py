"""Pure: a group without progress -> the culprits, the cause, and how that is known.

`blame` tries RULES in their order, which is the order of what can be trusted: which ranks have exited, which have
issued fewer collectives, which stacks are outside of any wait, which ranks wait in something else than the others.
Without a difference between ranks there is no culprit.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

from elasticd.heartbeat.record import INIT_PROCESS_GROUP
from elasticd_agent.hangs.rank import RankState, describe_waits, labels
from elasticd_agent.model.phrases import has_have

LONG_KERNEL_S = 60.0
"""A rank that others wait for, and that waits for its device, may run a long kernel or evaluate: it gets this long."""
_WORST_FIRST = ("stopped", "zombie", "gil", "blocked", "spinning")
"""Of several culprits the worst names the cause: one that works may still finish by itself."""


@dataclass(frozen=True, slots=True)
class Blame:
    """The answer of one rule."""

    culprits: tuple[RankState, ...]
    cause: str
    why: str
    patience_s: float = 0.0
    """Until no rank has made progress for this long, the group may be healthy."""


@dataclass(frozen=True)
class _Group:
    """The ranks of a group without progress; `live` is not empty, `exited` have ended with code 0."""

    live: Sequence[RankState]
    exited: Sequence[RankState]
    nodes: int

    @cached_property
    def outside(self) -> list[RankState]:
        """The live ranks that wait for no other rank."""
        stuck = [rank for rank in self.live if rank.holds_gil]
        if len(stuck) == len(self.live) > 1:  # that is the machine, or the heartbeat thread
            stuck = []
        return [rank for rank in self.live if not rank.waits or rank in stuck]

    @cached_property
    def suspects(self) -> list[RankState]:
        """Of the ranks outside of any wait those that the others wait for, as far as that can be told."""
        suspects = [rank for rank in self.outside if rank.report.phase != "exit"] or self.outside
        if suspects and any(rank.report.collectives >= 0 for rank in self.live):
            least = min(rank.report.collectives for rank in suspects)
            suspects = [rank for rank in suspects if rank.report.collectives == least]
        if len(suspects) == len(self.live) > 1:
            # No wait is visible: the script waits in its own way for ranks that save or evaluate.
            suspects = [rank for rank in suspects if rank.report.phase in ("checkpoint", "eval")] or suspects
        return suspects

    @cached_property
    def behind(self) -> list[RankState]:
        """The live ranks that have issued fewer collectives than others."""
        most = max(rank.report.collectives for rank in self.live)
        return [rank for rank in self.live if rank.report.collectives < most]

    def others(self, ranks: Sequence[RankState]) -> list[RankState]:
        return [rank for rank in self.live if rank not in ranks]


def blame(live: Sequence[RankState], exited: Sequence[RankState], nodes: int) -> Blame:
    """Which of `live`, not empty, hold up the group on that many nodes. `exited`: ranks that ended with code 0."""
    group = _Group(live, exited, nodes)
    return next(found for rule in RULES if (found := rule(group)) is not None)


# ---- rules: some ranks do not wait for others


def _exiting(group: _Group) -> Blame | None:
    """Training is done: every live rank is in its exit handlers, or did its last step and computes on."""
    done = max((rank.report.step for rank in group.exited), default=0)
    for rank in group.live:
        computes = rank in group.outside or rank.report.where == "device"
        if rank.report.phase != "exit" and not (0 < done <= rank.report.step and computes):
            return None
    culprits = group.outside or (list(group.live) if group.exited else [])
    if not culprits:
        return Blame((), "exiting", f"all ranks wait for each other while they exit: {describe_waits(group.live)}")
    gone = len(group.exited)
    others = f"; {gone} of the others ha{'s' if gone == 1 else 've'} exited" if gone else ""
    return Blame(tuple(culprits), "exiting", f"{labels(culprits)} {_activity(culprits)} after training is done{others}")


def _all_idle(group: _Group) -> Blame | None:
    """No rank can be told from the others, and none waits for another."""
    if not len(group.suspects) == len(group.live) > 1:
        return None
    each = "; ".join(f"{rank.label()} {rank.activity()}" for rank in group.live[:3])
    more = "; …" if len(group.live) > 3 else ""
    return Blame((), "everyone", f"all {len(group.live)} ranks are idle and none waits for another: {each}{more}")


def _not_joined(group: _Group) -> Blame | None:
    """Others make a process group, and the suspects have never been in one."""
    suspects = group.suspects
    joining = [rank for rank in group.others(suspects) if rank.is_joining]
    if not suspects or not joining or any(rank.report.collectives >= 0 for rank in suspects):
        return None
    call = min(rank.report.function or INIT_PROCESS_GROUP for rank in joining)
    why = f"{labels(suspects)} {has_have(suspects)} not reached {call}{_namely(suspects)}{_activity(suspects)}"
    return Blame(tuple(suspects), "never_joined", why + _held_up(group.others(suspects), suspects))


def _outside_a_wait(group: _Group) -> Blame | None:
    """The suspects are at work, blocked or ending while others wait."""
    suspects = group.suspects
    if not suspects:
        return None
    others = group.others(suspects)
    cause = min((rank.likely_cause for rank in suspects), key=_WORST_FIRST.index)
    if cause == "blocked" and all(rank.report.phase == "exit" for rank in suspects):
        cause = "missed_collective"
    why = f"{labels(suspects)} {_issued(suspects, others)}{_activity(suspects)}"
    return Blame(tuple(suspects), cause, why + _held_up(others, suspects))


# ---- rules: all live ranks wait


def _exited_early(group: _Group) -> Blame | None:
    """Some ranks have exited while others still wait; the minority is to blame."""
    live, exited = group.live, group.exited
    if not exited:
        return None
    if len(exited) > len(live):
        why = f"{labels(live)} {_activity(live)} for ranks that have all exited with code 0"
        return Blame(tuple(live), "missed_collective", why)
    fewer = _issued(exited, live)
    done = f"{fewer}{_activity(exited)}" if fewer else f"{has_have(exited)} exited with code 0"
    return Blame(tuple(exited), "missed_collective", f"{labels(exited)} {done}{_held_up(live, exited)}")


def _single_rank(group: _Group) -> Blame | None:
    if len(group.live) > 1:
        return None
    rank = group.live[0]
    return Blame((rank,), "blocked", f"{rank.label()} {rank.activity()}, and there is no other rank", LONG_KERNEL_S)


def _skipped_in_last_step(group: _Group) -> Blame | None:
    """A minority issued fewer collectives in its last step than the others in theirs, and is not behind them."""
    live = group.live
    minority = _minority(live, [rank.report.usual for rank in live], max)
    step = max(rank.report.step for rank in live)
    odd = tuple(rank for rank, common in minority if -1 < rank.report.usual < common and rank.report.step == step)
    if not odd:
        return None
    _, common = minority[0]
    why = f"{labels(odd)} issued {odd[0].report.usual:,} collectives in its last step, the others {common:,} in theirs"
    return Blame(odd, "missed_collective", f"{why}: {describe_waits(live)}")


def _split_by_node(group: _Group) -> Blame | None:
    """Some are behind, and all ranks of each node are at the same place: a fault of one rank looks different.

    The ranks ahead were done with what the others wait in: the root of a broadcast does not wait for its receivers.
    """
    at: dict[str, set[tuple[int, str]]] = {}
    for rank in group.live:
        at.setdefault(rank.node, set()).add((rank.report.collectives, _kind(rank)))
    if not group.behind or len(at) < 2 or any(len(places) > 1 for places in at.values()):
        return None
    return _no_culprit(group, f"ranks on {' and '.join(sorted({rank.node for rank in group.behind}))} are behind")


def _mismatched(group: _Group) -> Blame | None:
    """Ranks wait in different collectives or barriers, and so for each other."""
    live = group.live
    kinds = Counter(_kind(rank) for rank in live if rank.report.where != "device")
    if len(kinds) < 2:
        return None
    at_barriers = [rank for rank in live if rank.at_barrier]
    others = group.others(at_barriers)
    if at_barriers and len(at_barriers) <= len(others) and (fewer := _issued(at_barriers, others)):
        why = f"{labels(at_barriers)} {fewer}{_activity(at_barriers)}"
        return Blame(tuple(at_barriers), "missed_collective", why + _held_up(others, at_barriers))
    (common, most), (_, next_most) = kinds.most_common(2)
    why = f"ranks wait in different collectives: {describe_waits(live)}"
    if most == next_most:
        return Blame((), "mismatched_collectives", why)
    odd = tuple(rank for rank in live if rank.report.where != "device" and _kind(rank) != common)
    differ = "differs" if len(odd) == 1 else "differ"
    return Blame(odd, "mismatched_collectives", f"{why}; {labels(odd)} {differ} from the others")


def _minority_behind(group: _Group) -> Blame | None:
    """Fewer than half of the ranks are behind."""
    behind = group.behind
    if not behind or 2 * len(behind) >= len(group.live):
        return None
    long = behind[0].report.where == "device"
    others = group.others(behind)
    why = f"{labels(behind)} {_issued(behind, others)}{_activity(behind)}{_held_up(others, behind)}"
    return Blame(tuple(behind), "blocked" if long else "missed_collective", why, LONG_KERNEL_S if long else 0.0)


def _ahead_in_steps(group: _Group) -> Blame | None:
    """All have issued as many collectives, and a minority has made more steps with them."""
    if group.behind:
        return None
    odd = tuple(rank for rank, _ in _minority(group.live, [rank.report.step for rank in group.live], min))
    if not odd:
        return None
    why = f"{labels(odd)} issued {odd[0].report.collectives:,} collectives, as many as others in another step"
    return Blame(odd, "missed_collective", f"{why}: {describe_waits(group.live)}")


def _network(group: _Group) -> Blame:
    """Nothing tells the ranks apart."""
    if group.behind:
        return _no_culprit(group, "no rank stands out")
    issued = group.live[0].report.collectives
    return _no_culprit(group, "none is behind" + (f" after {issued:,} collectives" if issued >= 0 else ""))


def _no_culprit(group: _Group, finding: str) -> Blame:
    idle = f"for {min(rank.report.idle_s for rank in group.live):.1f} s"
    what = "the backend, or tensors that differ"
    if group.nodes > 1:
        what = f"the network between {group.nodes} nodes, or the backend"
    return Blame((), "network", f"{describe_waits(group.live)} {idle}, {finding}: {what}")


RULES: tuple[Callable[[_Group], Blame | None], ...] = (
    _exiting,
    _all_idle,
    _not_joined,
    _outside_a_wait,
    # From here on all live ranks wait.
    _exited_early,
    _single_rank,
    _skipped_in_last_step,
    _split_by_node,
    _mismatched,
    _minority_behind,
    _ahead_in_steps,
    _network,
)
"""The first one that answers decides; the last one always does."""


def _kind(rank: RankState) -> str:
    return f"barrier {rank.report.barrier!r}" if rank.at_barrier else rank.report.function or rank.report.where


def _minority(
    live: Sequence[RankState], values: Sequence[int], of_two: Callable[[Iterable[int]], int]
) -> list[tuple[RankState, int]]:
    """Ranks whose value differs from the majority's, with the latter. Of two ranks `of_two` chooses the usual one."""
    (common, most), *_ = Counter(values).most_common(1)
    if len(live) == 2:
        common = of_two(values)
    elif 2 * most <= len(live):
        return []
    return [(rank, common) for rank, value in zip(live, values, strict=True) if value != common]


# ---- words


def _issued(ranks: Sequence[RankState], others: Sequence[RankState]) -> str:
    """How far `ranks` are behind, "" if they are not."""
    mine = max(rank.report.collectives for rank in ranks)
    counts = [rank.report.collectives for rank in others]
    if not counts or mine < 0 or max(counts) <= mine:
        return ""
    theirs = f"{max(counts):,}" if min(counts) == max(counts) else f"up to {max(counts):,}"
    return f"{has_have(ranks)} issued {mine:,} collectives, the others {theirs}{_namely(ranks)}"


def _activity(ranks: Sequence[RankState]) -> str:
    if len(ranks) == 1:
        return ranks[0].activity()
    more = "; …" if len(ranks) > 3 else ""
    return f"({'; '.join(f'rank {rank.report.rank} {rank.activity()}' for rank in ranks[:3])}{more})"


def _held_up(waiting: Sequence[RankState], culprits: Sequence[RankState]) -> str:
    waits = describe_waits(waiting)
    return f"; {waits} for {'it' if len(culprits) == 1 else 'them'}" if waits else ""


def _namely(ranks: Sequence[RankState]) -> str:
    return ": it " if len(ranks) == 1 else " "
