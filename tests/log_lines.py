"""Lines of an event log."""

from __future__ import annotations

import json
from dataclasses import MISSING, fields

from elasticd_agent.model.log_events import EVENT_TYPES, LogLine

_TYPES = {event_type.kind: event_type for event_type in EVENT_TYPES}
_EMPTY = {"int": 0, "float": 0.0, "str": "", "bool": False, "Mapping[str, float | None]": {}}


def line(kind: str, wall: float, round: int = 1, **given: object) -> LogLine:
    """An event with the fields given; the others are empty. Its clocks agree, unless `mono` is given."""
    required = (f for f in fields(_TYPES[kind]) if f.default is MISSING and f.default_factory is MISSING)
    empty = {f.name: _EMPTY.get(str(f.type), ()) for f in required}
    return LogLine(_TYPES[kind](**{**empty, "round": round, "mono": wall, **given}), wall)


def raw_line(kind: str, wall: float, round: int = 1, **given: object) -> str:
    """The same as a line of the file, with its newline."""
    head = {"kind": kind, "wall": wall, "job": given.pop("job", ""), "node": given.pop("node", "")}
    return json.dumps({**head, **line(kind, wall, round, **given).event.to_dict()}) + "\n"
