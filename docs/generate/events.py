"""docs/events.md, from the event classes."""

from __future__ import annotations

from dataclasses import Field, fields
from typing import Any

from elasticd_agent.model.log_events import EVENT_TYPES, FORMAT_VERSION, MAX_LINE_BYTES, LogEvent


def page() -> str:
    rows = [
        "| field | type | meaning |", "|---|---|---|",
        f"| `v` | int | version of the format: {FORMAT_VERSION} |",
        "| `kind` | str | what happened: one of the kinds below |",
        "| `job` | str | the job's id |",
        "| `node` | str | the id of the node whose agent wrote the line |",
        "| `wall` | float | unix time when it happened, in seconds, by this node's clock |",
        *map(_row, _documented(LogEvent)),
        "| `cut` | bool | present, and true, when something was shortened to stay below "
        f"{MAX_LINE_BYTES // 1024} KiB |",
    ]  # fmt: skip
    parts = [INTRODUCTION, "## Every line", "\n".join(rows), "## Kinds"]
    common = {f.name for f in fields(LogEvent)}
    for kind in EVENT_TYPES:
        own = [_row(f) for f in _documented(kind) if f.name not in common]
        parts += [f"### {kind.kind}", (kind.__doc__ or "").strip()]
        parts += ["\n".join(["| field | type | meaning |", "|---|---|---|", *own])] if own else []
    return "\n\n".join(parts) + "\n"


def _documented(kind: type[LogEvent]) -> list[Field[Any]]:
    return [f for f in fields(kind) if "meaning" in f.metadata]


def _row(f: Field[Any]) -> str:
    kind = (
        str(f.type)
        .replace("TimeSplit", "object")
        .replace("tuple[", "list[")
        .replace(", ...]", "]")
        .replace(" | None", " or null")
    )
    return f"| `{f.name}` | {kind} | {f.metadata['meaning']} |"


INTRODUCTION = """# The event log

<!-- Written by `make docs` from docs/generate/events.py and agents/elasticd_agent/model/log_events.py. -->

`elasticd run --event-log FILE ...` appends one JSON object a line to FILE (UTF-8, mode 0600 when elasticd creates it).
Each line is written when the event happens, by one write to a file opened for appending, so a reader may follow the
file while the job runs.

- The format follows semantic versioning: kinds and fields may be added, so ignore unknown ones. `v` changes when the
  meaning of an existing one does.
- Measure durations with `mono`, between lines of one node; `wall` may jump when the machine's clock is set.
- A full disk never stops the job. Lines that cannot be written are kept, up to 256 KiB, and written with the next line
  or at the end; older ones are lost and counted (`elasticd_event_log_lines_lost_total`). One warning goes to stderr. A
  line cut short by a full disk is followed by a newline and the whole line, so skip lines that are not JSON.
- FILE may be a named pipe with a reader; a slow reader costs the job no time, and lines only beyond these 256 KiB."""
