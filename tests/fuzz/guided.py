"""A small coverage-guided fuzzer: an input that reaches a new line of our code is kept, and mutated further."""

from __future__ import annotations

import random
import re
import sys
import time
from collections.abc import Callable
from types import FrameType
from typing import Any

from tests.fuzz.targets import Target

OURS = ("/elasticd/", "/elasticd_agent/")
VALUES = (
    b"0", b"-1", b"1e999", b"NaN", b"18446744073709551616", b"null", b"true", b"[]", b"{}", b'""', b'"../../etc"',
    b"-1e17", b"1e300", b"-1e9", b"1e12",
    b'"\\ud800"', b'"\\u0000"', b"[[[[[[[[[[[[]]]]]]]]]]]]", b'"' + b"x" * 5000 + b'"', b"1.5", b"[1, 1]", b"-0.0",
)  # fmt: skip
_VALUE = re.compile(rb'"(?:[^"\\]|\\.)*"|-?\d+(?:\.\d+)?|true|false|null|\[\]|\{\}')
Lines = set[tuple[str, int]]


class Defect(AssertionError):
    """`data` made a parser raise an error that it must not raise."""

    def __init__(self, data: bytes, error: Exception) -> None:
        super().__init__(f"{type(error).__name__}: {str(error)[:300]}, for {data[:300]!r}")
        self.data = data


def mutate(data: bytes, other: bytes, rng: random.Random) -> bytes:
    """One to four changes: of values, as JSON writes them, or of bytes."""
    made = bytearray(data)
    for _ in range(rng.randint(1, 4)):
        at = rng.randrange(len(made) + 1)
        match rng.randrange(7):
            case 0 | 1:
                if spots := list(_VALUE.finditer(made)):
                    spot = rng.choice(spots)
                    made[spot.start() : spot.end()] = rng.choice(VALUES)
            case 2:
                made[at : at + 1] = bytes([rng.randrange(256)])
            case 3:
                made[at : at + rng.randrange(1, 30)] = b""
            case 4:
                made[at:at] = made[rng.randrange(len(made) + 1) :][: rng.randrange(1, 60)]
            case 5:
                cut = rng.randrange(len(other) + 1)
                made[at:at] = other[cut : cut + rng.randrange(1, 60)]
            case 6:
                made[at : at + 8] = rng.choice((b"\xff" * 8, b"\0" * 8, b"\x7f" + b"\xff" * 7))
    return bytes(made[:65536])


def fuzz(
    target: Target, kept: list[bytes], rng: random.Random, *, seconds: float, inputs: int | None = None
) -> tuple[list[bytes], int, int]:
    """Inputs that reached new lines, the number of inputs tried, and of lines. Raises Defect."""
    known: Lines = set()
    pool: list[bytes] = []
    fresh: list[bytes] = []
    tried, until = 0, time.monotonic() + seconds
    for data in [*target.seeds, *kept]:
        known |= _lines(target, data)
        pool.append(data)
    while time.monotonic() < until and (inputs is None or tried < inputs):
        data = mutate(rng.choice(pool), rng.choice(pool), rng)
        reached = _lines(target, data)
        tried += 1
        if reached - known:
            known |= reached
            pool.append(data)
            fresh.append(data)
    return fresh, tried, len(known)


def _lines(target: Target, data: bytes) -> Lines:
    """The lines of our code that this input reaches."""
    reached: Lines = set()

    def in_frame(frame: FrameType, event: str, _: Any) -> Callable[..., Any]:
        reached.add((frame.f_code.co_filename, frame.f_lineno))
        return in_frame

    def trace(frame: FrameType, event: str, _: Any) -> Callable[..., Any] | None:
        return in_frame if any(part in frame.f_code.co_filename for part in OURS) else None

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        target.run(data)
    except target.errors:
        pass
    except Exception as error:
        sys.settrace(before)
        raise Defect(data, error) from error
    finally:
        sys.settrace(before)
    return reached
