"""Durations as people write and read them: "500ms", "1.5h", "3 min 20 s"."""

from __future__ import annotations

UNITS_S = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}


def parse_duration(text: str) -> float:
    """Seconds of "500ms", "5s", "2m", "1.5h", "7d"; a bare number is seconds. Raises ValueError."""
    unit = next((unit for unit in UNITS_S if text.endswith(unit)), "s")
    return float(text.removesuffix(unit)) * UNITS_S[unit]


def format_duration(seconds: float) -> str:
    """A duration as a file would have it, in the largest unit that leaves a whole number: "90s", "2h"."""
    for unit in ("d", "h", "m"):
        times = seconds / UNITS_S[unit]
        if times >= 1 and times == int(times):
            return f"{int(times)}{unit}"
    return f"{seconds:g}s"


def in_words(seconds: float) -> str:
    """ "0.4 s", "12 s", "3 min 20 s", "5 h 12 min", "4 d 3 h"."""
    if seconds < 9.95:
        return f"{max(0.0, seconds):.1f} s"
    whole = int(seconds + 0.5)
    for size, unit, smaller, name in ((86400, "d", 3600, "h"), (3600, "h", 60, "min"), (60, "min", 1, "s")):
        if whole >= size:
            rest = whole % size // smaller
            return f"{whole // size} {unit}" + (f" {rest} {name}" if rest else "")
    return f"{whole} s"
