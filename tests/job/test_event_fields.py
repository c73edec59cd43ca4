"""Every event that the job's reporters write has the fields of its kind: their call takes any keyword."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import MISSING, fields
from pathlib import Path

from elasticd_agent import job
from elasticd_agent.telemetry import events

FILLED_IN = {"round", "mono", "reason"}
"""By JobContext.write."""


def calls() -> Iterator[tuple[str, type[events.LogEvent], set[str | None]]]:
    """(place, kind, keywords) of every `….write(events.SomeEvent, at, reason, …)`; None stands for `**more`."""
    for path in sorted(Path(job.__file__).parent.glob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "write"):
                continue
            if node.args and isinstance(node.args[0], ast.Attribute) and node.args[0].attr.endswith("Event"):
                kind = getattr(events, node.args[0].attr)
                yield f"{path.name}:{node.lineno}", kind, {word.arg for word in node.keywords}


def test_written_events_have_their_fields() -> None:
    found = list(calls())
    assert len(found) > 15
    for place, kind, given in found:
        known = {f.name for f in fields(kind)} - {"mono", "reason"}
        required = {f.name for f in fields(kind) if f.default is MISSING and f.default_factory is MISSING} - FILLED_IN
        assert given - {None} <= known, place
        assert None in given or required <= given, place
