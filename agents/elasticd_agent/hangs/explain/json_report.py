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

DOCUMENT_VERSION = "2.0"
_HIDDEN_RANK_FIELDS = (
    "kernel", "tree", "proc", "place", "stack", "alone", "loading", "source", "trouble", "processes", "groups",
    "deviation", "late", "unknown",
)  # fmt: skip
"""Fields of a rank for the judge, or shown in other parts of the document."""


def document(explained: Explanation) -> dict[str, Any]:
    """Plain JSON values; what is not known is null."""
    return {
        "version": DOCUMENT_VERSION,
        "kind": explained.kind,
        "round": explained.round or None,
        "job": explained.job or None,
        "headline": explained.headline,
        "taken_at": explained.taken_at or None,
        "verdict": _verdict(explained.verdict),
        "followed": _aftermath(explained.aftermath),
        "ranks": [_to_json_value(rank, without=_HIDDEN_RANK_FIELDS) for rank in explained.ranks],
        "waiting": _to_json_value(explained.wait_sentences),
        "stacks": [_stack_group(group) for group in explained.stack_groups],
        "flight": [_group_comparison(comparison) for comparison in explained.group_comparisons],
        "gpus": [_to_json_value(gpu) | {"facts": dict(gpu.facts)} for gpu in explained.gpus],
        "troubles": _to_json_value(explained.troubles),
        "evidence": explained.directory,
    }


def _to_json_value(value: Any, without: Collection[str] = ()) -> Any:
    """The value as JSON has it; "" and -1, the model's unknown values, as null."""
    if is_dataclass(value):
        return {
            known.name: _to_json_value(getattr(value, known.name))
            for known in fields(value)
            if known.name not in without
        }
    if isinstance(value, Mapping):
        return {str(name): _to_json_value(one) for name, one in value.items()}
    if isinstance(value, tuple):
        return [_to_json_value(item) for item in value]
    return None if value in ("", -1) else value


def _verdict(verdict: RecordedVerdict | None) -> Any:
    if verdict is None:
        return None
    shown = _to_json_value(verdict, without=("version", "round", "reports", "unknown"))
    culprits = [_to_json_value(culprit, without=("unknown",)) for culprit in verdict.culprits]
    return shown | {"culprits": culprits, "why": verdict.why, "at_wall": verdict.at_wall or None}


def _aftermath(after: Aftermath) -> Any:
    resumed = None if after.resumed is None else dict(zip(("round", "step"), after.resumed, strict=True))
    numbers = {"round": after.round or None, "world_size": after.world_size or None}
    return _to_json_value(after) | numbers | {"resumed": resumed}


def _stack_group(group: StackGroup) -> dict[str, Any]:
    threads = [
        {
            "name": thread.label,
            "main": thread is group.main_thread,
            "state": thread.state or None,
            "below": None if process is group.first_rank.processes[0] else str(process),
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
        for process in group.first_rank.processes
        for thread in process.threads
    ]
    return {
        "ranks": list(group.ranks),
        "differs": group.is_minority,
        "source": group.first_rank.source,
        "threads": threads,
    }


def _group_comparison(one: GroupComparison) -> Any:
    differing = None
    if one.differing is not None:
        differing = [{"issued": issued, "ranks": list(ranks)} for issued, ranks in one.differing.items()]
    values = _to_json_value(one, without=("missing",))
    return values | {"pending": _to_json_value(one.pending), "lacking": list(one.missing), "differing": differing}
