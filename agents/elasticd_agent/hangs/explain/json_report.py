"""Explanation -> the object that `elasticd explain --json` prints: docs/hangs.md lists its fields.

`version` is "major.minor": a minor version adds fields, a major one removes a field or changes its meaning.
"""

from __future__ import annotations

from typing import Any

from elasticd_agent.hangs.explain.flight_recorder import GroupComparison, IssuedCollective
from elasticd_agent.hangs.explain.model import Aftermath, Explanation, RankFacts, StackGroup

VERSION = "1.0"


def document(explained: Explanation) -> dict[str, Any]:
    """Plain JSON values; what is not known is null."""
    verdict = explained.verdict
    return {
        "version": VERSION,
        "kind": explained.kind,
        "round": explained.round or None,
        "job": explained.job or None,
        "headline": explained.headline,
        "taken_at": explained.taken_at or None,
        "verdict": None
        if verdict is None
        else {
            "cause": verdict.cause,
            "culprits": [{"node": c.node, "rank": c.rank, "slot": _known(c.slot)} for c in verdict.culprits],
            "why": verdict.why,
            "action": verdict.action or None,
            "seen_after_s": verdict.seen_after_s,
            "at_wall": verdict.at_wall or None,
        },
        "followed": _followed(explained.aftermath),
        "ranks": [_rank(rank) for rank in explained.ranks],
        "waiting": list(explained.waiting),
        "stacks": [_stack_group(group) for group in explained.stack_groups],
        "flight": [_flight(one) for one in explained.flight],
        "gpus": [
            {"name": gpu.name, "facts": dict(gpu.facts), "trouble": gpu.trouble or None} for gpu in explained.gpus
        ],
        "troubles": list(explained.troubles),
        "evidence": explained.directory,
    }


def _rank(rank: RankFacts) -> dict[str, Any]:
    return {
        "rank": rank.rank,
        "node": rank.node or None,
        "slot": _known(rank.slot),
        "culprit": rank.culprit,
        "exited": rank.exited,
        "phase": rank.phase or None,
        "step": _known(rank.step),
        "collectives": _known(rank.collectives),
        "usual": _known(rank.usual),
        "barrier": rank.barrier or None,
        "idle_s": _known(rank.idle_s),
        "state": rank.state or None,
        "stopped_s": rank.stopped_s,
        "cpu_s": _known(rank.cpu_s),
        "io_bytes": _known(rank.io_bytes),
        "window_s": rank.window_s,
        "where": rank.where or None,
        "function": rank.function or None,
        "pid": rank.pid or None,
        "wchan": rank.wchan or None,
        "call": rank.call or None,
        "children": list(rank.children),
        "remarks": list(rank.remarks),
        "log": list(rank.log),
    }


def _followed(followed: Aftermath) -> dict[str, Any]:
    resumed = followed.resumed
    return {
        "round": followed.round or None,
        "reason": followed.reason or None,
        "world_size": followed.world_size or None,
        "nodes": list(followed.nodes),
        "resumed": None if resumed is None else {"round": resumed[0], "step": resumed[1]},
        "recovery_s": followed.recovery_s,
        "survivors": list(followed.survivors),
        "ended": followed.ended or None,
        "moments": [{"wall": one.wall, "node": one.node or None, "what": one.text} for one in followed.moments],
    }


def _stack_group(group: StackGroup) -> dict[str, Any]:
    stacks = group.stacks
    return {
        "ranks": list(group.ranks),
        "differs": group.differs,
        "source": stacks.source,
        "threads": [
            {
                "name": thread.label,
                "main": thread is stacks.main,
                "state": thread.state or None,
                "below": None if process is stacks.processes[0] else str(process),
                "frames": [
                    {"function": f.function, "file": f.path, "line": f.line or None, "library": f.library or None}
                    for f in thread.frames
                ],
            }
            for process in stacks.processes
            for thread in process.threads
        ],
    }


def _flight(one: GroupComparison) -> dict[str, Any]:
    return {
        "group": one.group,
        "last": {str(rank): _issued(issued) for rank, issued in one.last.items()},
        "pending": {str(rank): _issued(issued) for rank, issued in (one.pending or {}).items()},
        "waiting_for": _issued(one.waiting_for),
        "lacking": list(one.missing),
        "differing": None
        if one.differing is None
        else [{"issued": what, "ranks": list(who)} for what, who in one.differing.items()],
    }


def _issued(issued: IssuedCollective | None) -> dict[str, Any] | None:
    if issued is None:
        return None
    return {"number": issued.number, "operation": issued.operation, "sizes": issued.sizes, "done": issued.done}


def _known(value: float) -> float | None:
    return None if value < 0 else value
