"""Text in a page stays text."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elasticd_agent.node.dashboard.markup import joined, tag, text
from tests.node.dashboard.hostile_texts import PAYLOADS, read


@pytest.mark.parametrize("payload", PAYLOADS)
def test_text_is_escaped(payload: str) -> None:
    page = tag("p", payload, tag("a", payload, href="/", title=payload), class_=payload)
    found = read(page)
    assert found.links == ["/"]
    assert "".join(found.text) == str(read(tag("p", payload)).text[0]) * 2


@given(st.text())
def test_escaped_text_round_trips_except_invisible_characters(written: str) -> None:
    shown = "".join(read(tag("p", written)).text)
    visible = "".join(one for one in written if one.isprintable() or one in "\n\t ")
    assert all(one in shown for one in visible)
    assert shown == written or not written.isprintable() or any(ord(one) > 0x2000 for one in written)


def test_invisible_and_direction_characters_are_shown() -> None:
    assert text("a\x1b[31m\u202eb\x00") == "a\\x1b[31m\\u202eb\\x00"
    assert tag("p", "\ud800").encode() == b"<p>\\ud800</p>"


def test_attributes_and_children() -> None:
    assert tag("input", type="text", required=True, hidden=False, value=None) == '<input type="text" required>'
    assert tag("p", None, 1, 2.5, ["a", [tag("b", "c")]], data_live=True) == "<p data-live>12.5a<b>c</b></p>"
    assert joined("<", tag("i")) == "&lt;<i></i>"
    with pytest.raises(AssertionError):
        tag("p", **{"onclick=alert(1) x": "y"})
