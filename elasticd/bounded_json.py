"""JSON from elsewhere, refused before it is decoded where its values would take a multiple of its size in memory."""

from __future__ import annotations

import json
from typing import Any

MAX_VALUES = 200_000
"""A value takes up to 70 bytes in memory for each of its marks, and one to three bytes as JSON."""
_VALUE_MARKS = "[{,:"

JsonObject = dict[str, Any]
"""A JSON object as Python decodes it."""


def loads(text: bytes | bytearray | str, max_values: int = MAX_VALUES, **hooks: Any) -> Any:
    """`json.loads` of a text with at most `max_values` of JSON's marks. Raises ValueError, RecursionError."""
    if isinstance(text, str):
        found = sum(text.count(mark) for mark in _VALUE_MARKS)
    else:
        found = sum(text.count(mark) for mark in _VALUE_MARKS.encode())
    if found > max_values:  # those inside a text count, too: no honest text has so many
        raise ValueError(f"more than {max_values} values")
    return json.loads(text, **hooks)
