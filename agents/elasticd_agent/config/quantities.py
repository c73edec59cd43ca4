"""Times, sizes, paths and counts of nodes and slots, as configuration files write them."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

from elasticd.checkpointing.storage.object_url import url_of
from elasticd_agent.model.job import MAX_WAIT_S
from elasticd_agent.system.durations import parse_duration

_UNIT_BYTES = {"": 1, "B": 1, **{f"{p}B": 1000**n for n, p in enumerate("kMGT", 1)}}
_UNIT_BYTES |= {f"{p}iB": 1024**n for n, p in enumerate("KMGT", 1)}
MAX_COUNT = 100_000
"""Nodes, or slots of one, that a job can ask for: more is a slip of the pen."""
MAX_SLOTS_PER_NODE = 4096
"""The most slots of a node. Every scheduler counts through those of all nodes, and each node writes its own number."""


class Seconds(float):
    """A time. In files: seconds, or text with its unit, "500ms", "5s", "2m", "1.5h", "7d"."""


class Size(int):
    """Bytes. In files: a number, or text with its unit, "500MB", "10GiB"."""


def decode_quantity(kind: type, value: Any) -> Any:
    """msgspec's hook for the types it does not know. Raises ValueError, the end of a sentence."""
    if kind is Seconds:
        return parse_seconds(value)
    if kind is Size:
        return parse_size(value)
    if kind is Path:
        return parse_path_or_url(value)
    raise NotImplementedError(kind)


def encode_quantity(value: Any) -> Any:
    """The way back, as JSON can carry it."""
    if isinstance(value, Path):
        return str(value)
    return float(value) if isinstance(value, float) else int(value)


def parse_seconds(value: Any) -> Seconds:
    seconds: float | None = None
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        seconds = float(value)
    elif isinstance(value, str):
        parts = re.fullmatch(r"\s*(-?[0-9]{1,12}(?:\.[0-9]{1,9})?)\s*(ms|s|m|h|d|)\s*", value)
        seconds = parse_duration(parts[1] + parts[2]) if parts else None
    if seconds is None or math.isnan(seconds):
        raise ValueError(
            f"{_quote_value(value)} is not a time; write seconds or a unit, as in 500ms, 5s, 2m, 1.5h or 7d"
        )
    if seconds < 0:
        raise ValueError(f"{_quote_value(value)}: a time cannot be negative")
    if seconds > MAX_WAIT_S:
        raise ValueError(f"{_quote_value(value)} is longer than a year; at most 365d")
    return Seconds(seconds)


def parse_size(value: Any) -> Size:
    size: float | None = None
    if isinstance(value, int) and not isinstance(value, bool):
        size = value
    elif isinstance(value, str):
        parts = re.fullmatch(r"\s*([0-9]{1,15}(?:\.[0-9]{1,9})?)\s*([kMGTK]?i?B?)\s*", value)
        size = float(parts[1]) * _UNIT_BYTES[parts[2]] if parts and parts[2] in _UNIT_BYTES else None
    if size is None or not 0 <= size < 2**63:
        raise ValueError(f"{_quote_value(value)} is not a size; write bytes or a unit, as in 500MB or 10GiB")
    return Size(size)


def parse_path_or_url(value: Any) -> Path:
    """An absolute path: a daemon's current directory is nobody's. Or the URL of an object store."""
    if not isinstance(value, str) or not value:
        raise ValueError(f"{_quote_value(value)} is not a path; write it as text, as in /srv/data")
    if not value.startswith("/") and url_of(Path(value)) is None:
        right = "write the home directory out" if value.startswith("~") else "begin it with /"
        raise ValueError(f"{_quote_value(value)} is not an absolute path; {right}")
    return Path(value)


def parse_count_range(value: int | str) -> tuple[int, int]:
    """(MIN, MAX) of 4, "4" or "2:8". Raises ValueError."""
    parts = re.fullmatch(r"\s*(-?[0-9]{1,40})\s*(?::\s*([0-9]{1,40})\s*)?", str(value))
    if not parts or isinstance(value, bool):
        raise ValueError(f"{_quote_value(value)} is neither a number nor MIN:MAX, as in 4 or 2:8")
    low = int(parts[1])
    high = low if parts[2] is None else int(parts[2])
    if max(low, high) > MAX_COUNT:
        raise ValueError(f"{_quote_value(value)}: at most {MAX_COUNT} are possible")
    if low < 1:
        raise ValueError(f"{value}: at least 1 is needed")
    if low > high:
        raise ValueError(f"{value}: MIN {low} exceeds MAX {high}; write {high}:{low}")
    return low, high


def format_size(value: int) -> str:
    for unit in ("TiB", "GiB", "MiB", "KiB"):
        if value >= _UNIT_BYTES[unit] and value % _UNIT_BYTES[unit] == 0:
            return f"{value // _UNIT_BYTES[unit]}{unit}"
    return str(value)


def _quote_value(value: object) -> str:
    if value is None or isinstance(value, bool):
        return "nothing" if value is None else str(value).lower()
    text = repr(value) if isinstance(value, (str, int, float)) else "a list or a table"
    return text if len(text) <= 60 else text[:59] + "…"
