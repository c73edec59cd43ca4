"""HTML and SVG as values: every string that is not `Html` is escaped where it is inserted. Pure.

Job ids, reasons, node names and log lines come from others. Only this module and constants make `Html`. Control
characters, and those that change the direction of writing, are made visible.
"""

from __future__ import annotations

import html
import re
from collections.abc import Iterable
from typing import Union

Child = Union["Html", str, int, float, None, Iterable["Child"]]
"""None is nothing; numbers as Python prints them."""

_INVISIBLE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u200b-\u200f\u202a-\u202e\u2060-\u2069\ufeff\ud800-\udfff]")
_VOID = frozenset({"br", "hr", "input", "link", "meta"})
_NAME = re.compile(r"[a-z][a-zA-Z0-9:-]*")


class Html(str):
    """Markup that is inserted unescaped."""

    __slots__ = ()


def text(value: object) -> Html:
    """Escaped for content and attributes; invisible characters as escapes."""
    return Html(html.escape(_INVISIBLE.sub(lambda found: repr(found.group())[1:-1], str(value)), quote=True))


def tag(name: str, /, *children: Child, **attributes: object) -> Html:
    """<name attributes>children</name>. An attribute that is None or False is left out, one that is True has no value.

    A trailing underscore of an attribute's name is dropped (`class_`), others become hyphens (`aria_label`).
    """
    shown = "".join(_attribute(key.rstrip("_").replace("_", "-"), value) for key, value in attributes.items())
    assert _NAME.fullmatch(name)
    if name in _VOID:
        return Html(f"<{name}{shown}>")
    return Html(f"<{name}{shown}>{joined(*children)}</{name}>")


def joined(*children: Child) -> Html:
    return Html("".join(_content(child) for child in children))


def _content(child: Child) -> str:
    if child is None:
        return ""
    if isinstance(child, Html):
        return child
    if isinstance(child, (str, int, float)):
        return text(child)
    return "".join(_content(one) for one in child)


def _attribute(name: str, value: object) -> str:
    if value is None or value is False:
        return ""
    assert _NAME.fullmatch(name)
    return f" {name}" if value is True else f' {name}="{text(value)}"'
