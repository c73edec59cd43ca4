"""Text in a page stays text."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elasticd_daemon.dashboard.layout import render_public_page
from tests.daemon.dashboard.hostile_texts import PAYLOADS, read


def message(text: str) -> str:
    return render_public_page("message.html", text, heading=text, why="")


@pytest.mark.parametrize("payload", PAYLOADS)
def test_text_is_escaped(payload: str) -> None:
    page = render_public_page("login.html", payload, why=payload, then=payload)
    found = read(page)
    assert found.links == ["data:,", "/login"]
    (shown,) = re.findall('<p id="why">(.*?)</p>', page, re.DOTALL)
    assert page.count(shown) == 3, "title, reason and a hidden field"


@given(st.text())
def test_escaped_text_round_trips_except_invisible_characters(written: str) -> None:
    shown = "".join(read(re.findall("<h1>.*</h1>", message(written), re.DOTALL)[0]).text)
    visible = "".join(one for one in written if one.isprintable() or one in "\n\t ")
    assert all(one in shown for one in visible)
    assert shown == written or not written.isprintable() or any(ord(one) > 0x2000 for one in written)


def test_invisible_and_direction_characters_are_shown() -> None:
    assert "<h1>a\\x1b[31m\\u202eb\\x00\\ud800</h1>" in message("a\x1b[31m\u202eb\x00\ud800")
    assert message("\ud800").encode()


def test_page_without_one_of_its_values_is_an_error() -> None:
    with pytest.raises(Exception, match="'why' is undefined"):
        render_public_page("message.html", "t", heading="h")
