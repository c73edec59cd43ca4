"""Counts and lists in words, for every sentence that a person reads."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable

MAX_ITEMS = 6
"""A list of more names hides what the sentence says."""
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f]")


def plural(number: int, noun: str) -> str:
    """ "node" for 1, else "nodes"."""
    return noun if number == 1 else f"{noun}s"


def count(number: int, noun: str) -> str:
    """ "1 node", "2 nodes", "1,000 nodes"."""
    return f"{number:,} {plural(number, noun)}"


def shortened(text: str, max_chars: int) -> str:
    """At most `max_chars` of a sentence: it ends after a word, with "…"; a word that is longer is cut itself."""
    if len(text) <= max_chars:
        return text
    words = text[:max_chars].rpartition(" ")[0].rstrip(" ,;:")
    return (words if len(words) >= max_chars // 2 else text[: max_chars - 1]) + "…"


def visible(text: str, kept: str = "") -> str:
    """The text with control characters but these escaped: no message may steer a terminal or begin another line."""
    return _CONTROL.sub(lambda found: found[0] if found[0] in kept else repr(found[0])[1:-1], text)


def with_reason(what: str, why: str) -> str:
    """ "what: why", or "what" alone."""
    return f"{what}: {why}" if why else what


def is_are(items: Collection[object]) -> str:
    return "is" if len(items) == 1 else "are"


def has_have(items: Collection[object]) -> str:
    return "has" if len(items) == 1 else "have"


def listing(items: Iterable[object], max_items: int | None = MAX_ITEMS, *, conjunction: str = "and") -> str:
    """ "a", "a and b", "a, b and c"; beyond `max_items` "a, b and 7 more"; "none" where there are none."""
    words = [str(item) for item in items]
    if max_items is not None and len(words) > max_items:
        words = [*words[:max_items], f"{len(words) - max_items} more"]
    if len(words) < 2:
        return words[0] if words else "none"
    return f"{', '.join(words[:-1])} {conjunction} {words[-1]}"


def did_you_mean(word: str, names: Iterable[str], else_say: str, cutoff: float = 0.7) -> str:
    """The end of a sentence about a name that is not known; `else_say` where none is similar."""
    from difflib import get_close_matches  # only a mistake needs it

    near = get_close_matches(word[:80], list(names), n=1, cutoff=cutoff)
    return f"did you mean {near[0]}?" if near else else_say


def ranges(numbers: Iterable[int], min_length: int = 2) -> list[str]:
    """ "0-3", "6": numbers in order, runs of at least `min_length` neighbours as one range each."""
    runs: list[list[int]] = []
    for number in sorted(set(numbers)):
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    parts = ([f"{run[0]}-{run[-1]}"] if len(run) >= max(2, min_length) else map(str, run) for run in runs)
    return [part for group in parts for part in group]
