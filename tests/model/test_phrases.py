"""Sentences for people."""

from __future__ import annotations

import pytest

from elasticd_agent.model.phrases import shortened


@pytest.mark.parametrize(
    ("text", "most", "expected"),
    [
        ("rank 3 failed", 13, "rank 3 failed"),
        ("rank 3 failed twice", 13, "rank 3…"),
        ("rank 3 failed twice", 14, "rank 3 failed…"),
        ("rank 3, failed", 10, "rank 3…"),
        ("x" * 20, 10, "x" * 9 + "…"),
        ("a " + "x" * 20, 10, "a xxxxxxx…"),
        ("", 10, ""),
    ],
)
def test_long_text_ends_after_a_word(text: str, most: int, expected: str) -> None:
    assert shortened(text, most) == expected
    assert len(expected) <= most
