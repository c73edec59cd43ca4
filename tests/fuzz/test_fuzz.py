"""A short run of every target of `make fuzz`, with the same inputs every time; and the fuzzer itself."""

from __future__ import annotations

import random

import pytest

from tests.fuzz.guided import fuzz
from tests.fuzz.targets import Target, targets


def test_no_input_breaks_a_parser() -> None:
    with targets() as known:
        for name, target in known.items():
            _, tried, lines = fuzz(target, [], random.Random(1), seconds=60, inputs=60)
            assert tried == 60 and lines > 10, name


def test_the_fuzzer_finds_a_defect() -> None:
    def run(data: bytes) -> None:
        if b"null" in data:
            raise KeyError("a defect")

    with pytest.raises(AssertionError, match="KeyError: 'a defect', for"):
        fuzz(Target(run, [b'{"a": 1}'], (ValueError,)), [], random.Random(1), seconds=60)
