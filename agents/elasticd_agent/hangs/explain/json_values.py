"""Values of JSON that any program may have written: each is what it should be, or a default."""

from __future__ import annotations

from typing import Any

MOST_ITEMS = 4096
_MOST_LIST = 64


def text(value: object) -> str:
    """The text, shortened to what fits on a page; "" for anything else."""
    return value[:2000] if isinstance(value, str) else ""


def whole(value: object) -> int | None:
    """The number, if it is a whole one."""
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def count(value: object) -> int:
    """The number, if it is one that a counter can show; -1 for anything else."""
    counted = whole(value)
    return -1 if counted is None or not -1 <= counted < 1 << 62 else counted


def clock_time(value: object) -> float:
    """The seconds, if they are from 0 to 1e12, as a clock shows them; 0 for anything else."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < 1e12:
        return 0.0
    return float(value)


def items(value: object, most: int = MOST_ITEMS) -> list[dict[str, Any]]:
    """The objects in a list of them."""
    return [item for item in value[:most] if isinstance(item, dict)] if isinstance(value, list) else []


def values(value: object) -> list[Any]:
    """The first values of a list."""
    return value[:_MOST_LIST] if isinstance(value, list) else []
