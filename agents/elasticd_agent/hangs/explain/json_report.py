"""Explanation -> the object that `elasticd explain --json` prints: docs/hangs.md lists its fields.

`version` is "major.minor": a minor version adds fields, a major one removes a field or changes its meaning.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

from elasticd_agent.hangs.explain.flight import GroupComparison
from elasticd_agent.hangs.explain.model import Aftermath, Explanation, StackGroup
from elasticd_agent.model.reports import RecordedVerdict

VERSION = "2.0"
_NOT_SHOWN = (
    "kernel", "tree", "proc", "place", "stack", "alone", "loading", "source", "trouble", "processes", "groups",
    "deviation", "late", "unknown",
)  # fmt: skip
"""Fields of a rank for the judge, or shown in other parts of the document."""


def document(explained: Explanation) -> dict[str, Any]:
    """Plain JSON values; what is not known is null."""
    return {
        "version": VERSION,
        "kind": explained.kind,
        "round": explained.round or None,
        "job": explained.job or None,
        "headline": explained.headline,
        "taken_at": explained.taken_at or None,
        "verdict": _verdict(explained.verdict),
        "followed": _aftermath(explained.aftermath),
        "ranks": [_plain(rank, without=_NOT_SHOWN) for rank in explained.ranks],
        "waiting": _plain(explained.waiting),
        "stacks": [_stack_group(group) for group in explained.stack_groups],
        "flight": [_flight(comparison) for comparison in explained.flight],
        "gpus": [_plain(gpu) | {"facts": dict(gpu.facts)} for gpu in explained.gpus],
        "troubles": _plain(explained.troubles),
        "evidence": explained.directory,
    }


def _plain(value: Any, without: Collection[str] = ()) -> Any:
    """The value as JSON has it; "" and -1, the model's unknown values, as null."""
    if is_dataclass(value):
        return {known.name: _plain(getattr(value, known.name)) for known in fields(value) if known.name not in without}
    if isinstance(value, Mapping):
        return {str(name): _plain(one) for name, one in value.items()}
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    return None if value in ("", -1) else value


def _verdict(verdict: RecordedVerdict | None) -> Any:
    if verdict is None:
        return None
    shown = _plain(verdict, without=("version", "round", "reports", "unknown"))
    culprits = [_plain(culprit, without=("unknown",)) for culprit in verdict.culprits]
    return shown | {"culprits": culprits, "why": verdict.why, "at_wall": verdict.at_wall or None}


def _aftermath(after: Aftermath) -> Any:
    resumed = None if after.resumed is None else dict(zip(("round", "step"), after.resumed, strict=True))
    numbers = {"round": after.round or None, "world_size": after.world_size or None}
    return _plain(after) | numbers | {"resumed": resumed}


def _stack_group(group: StackGroup) -> dict[str, Any]:
    threads = [
        {
            "name": thread.label,
            "main": thread is group.main,
            "state": thread.state or None,
            "below": None if process is group.first.processes[0] else str(process),
            "frames": [
                {
                    "function": f.function,
                    "file": f.path_in_library,
                    "line": f.line or None,
                    "library": f.library or None,
                }
                for f in thread.frames
            ],
        }
        for process in group.first.processes
        for thread in process.threads
    ]
    return {"ranks": list(group.ranks), "differs": group.differs, "source": group.first.source, "threads": threads}


def _flight(one: GroupComparison) -> Any:
    differing = None
    if one.differing is not None:
        differing = [{"issued": issued, "ranks": list(ranks)} for issued, ranks in one.differing.items()]
    values = _plain(one, without=("missing",))
    return values | {"pending": _plain(one.pending), "lacking": list(one.missing), "differing": differing}
