"""Texts that a page must show as text, and a parser with a browser's view of them."""

from __future__ import annotations

from dataclasses import dataclass, field
from html.parser import HTMLParser

PAYLOADS = (
    "<script>alert(1)</script>",
    "</pre></title></style></textarea></svg><script>alert(1)</script>",
    '"><img src=x onerror=alert(1)>',
    "' onmouseover='alert(1)",
    "javascript:alert(1)",
    "<svg/onload=alert(1)>",
    "<!--<script>",
    "]]><![CDATA[",
    "&lt;b&gt; &#x3c;i&#x3e;",
    "\x1b[2J\x00\x07\r\u202egnp.exe\ud800",
    "{{7*7}} ${7*7} %s %00",
)
WICKED = " ".join(PAYLOADS)
_ELEMENTS = frozenset(
    """
    html head meta title link script noscript body header main footer a span b form button h1 h2 h3 p div
    section dl dt dd nav svg desc line text polygon polyline g rect path ul li ol time table thead tbody tr th td pre
    label select option input details summary i style code br
    """.split()  # noqa: SIM905
)
_VOID = frozenset({"meta", "link", "input", "br"})
_ATTRIBUTES = frozenset(
    """
    charset name content title rel href type src defer http-equiv id class tabindex data-live data-every
    data-end data-label lang aria-labelledby aria-label aria-current aria-hidden aria-describedby role method
    action formaction value selected hidden for scope datetime required autofocus autocomplete reversed viewbox x y x1
    x2 y1 y2 d points width height rx fill stroke-width text-anchor
    """.split()  # noqa: SIM905
)


@dataclass
class Read(HTMLParser):
    """A page as it is parsed: fails for markup that no page of ours has, and for what is not closed."""

    text: list[str] = field(default_factory=list)
    links: list[str] = field(default_factory=list)
    ids: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.open_tags: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert tag in _ELEMENTS, tag
        named = dict(attrs)
        assert len(named) == len(attrs), attrs
        assert named.keys() <= _ATTRIBUTES, attrs
        if tag == "script":
            assert attrs == [("src", "/page/live.js"), ("defer", None)]
        for name in ("href", "src", "action"):
            if (value := named.get(name)) is not None:
                assert value.startswith(("/", "#", "data:,")) and not value.startswith("//"), value
                self.links.append(value)
        if "id" in named:
            self.ids.append(str(named["id"]))
        if tag not in _VOID:
            self.open_tags.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open_tags and self.open_tags.pop() == tag, (tag, self.open_tags)

    def handle_comment(self, data: str) -> None:
        raise AssertionError(f"a comment: {data}")

    def unknown_decl(self, data: str) -> None:
        raise AssertionError(f"a declaration: {data}")

    def handle_data(self, data: str) -> None:
        self.text.append(data)


def read(page: str) -> Read:
    found = Read()
    found.feed(page)
    found.close()
    assert not found.open_tags, found.open_tags
    assert len(set(found.ids)) == len(found.ids), found.ids
    return found
