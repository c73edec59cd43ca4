"""Whatever README and the pages under docs/ point at is there: files, folders, and headings in them."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")])
NAMED = re.compile(r"elasticd docs ([a-z][\w-]*)(?:#([\w-]+))?")


def links(text: str) -> list[str]:
    """Where a page points, in the order in which it does; not what code shows."""
    prose = re.sub(r"`[^`\n]*`", "", re.sub(r"^(```|~~~).*?^\1", "", text, flags=re.DOTALL | re.MULTILINE))
    return re.findall(r"\]\(\s*<?([^)\s>]+)", prose) + re.findall(r"<img[^>]* src=\"([^\"]+)\"", prose)


@cache
def anchors(page: Path) -> frozenset[str]:
    """As GitHub makes them: lower case, punctuation gone, spaces become hyphens, repeated ones are numbered."""
    text = re.sub(r"^(```|~~~).*?^\1", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    found: list[str] = []
    for heading in re.findall(r"^#{1,6} +(.*?) *$", text, re.MULTILINE):
        plain = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading)
        name = re.sub(r"[^\w\- ]", "", plain.lower()).replace(" ", "-")
        found.append(f"{name}-{found.count(name)}" if name in found else name)
    return frozenset(found) | frozenset(re.findall(r"<a (?:id|name)=\"([^\"]+)\"", text))


def broken(page: Path, text: str) -> list[str]:
    wrong = []
    for link in links(text):
        if re.match(r"[a-z]+:", link):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        if not target.exists():
            wrong.append(f"{link}: there is no {path}")
        elif not target.is_relative_to(ROOT):
            wrong.append(f"{link}: leads out of the repository")
        elif anchor and target.suffix == ".md" and anchor not in anchors(target):
            wrong.append(f"{link}: {target.name} has no such heading")
    return wrong


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_have_targets(page: Path) -> None:
    assert broken(page, page.read_text()) == []


def test_named_pages_exist() -> None:
    """In what --help, errors, alerts and dashboards print: who installed a wheel has no docs/."""
    files = [path for folder in ("agents", "deploy", "elasticd") for path in (ROOT / folder).rglob("*.*")]
    texts = {path: path.read_text() for path in files if path.suffix in (".json", ".md", ".py", ".toml", ".yaml")}
    found = {(path, url) for path, text in texts.items() for url in NAMED.findall(text)}
    assert len(found) > 20
    assert [(path, url) for path, url in found if not (ROOT / "docs" / f"{url[0]}.md").exists()] == []
    assert [url for _, url in found if url[1] and url[1] not in anchors(ROOT / "docs" / f"{url[0]}.md")] == []
    assert ".md" not in (ROOT / "docs" / "man" / "elasticd.1").read_text(), "made from every --help"


def test_broken_link_is_found() -> None:
    page = ROOT / "docs" / "states.md"
    assert links("[a](b.md) `[c](d.md)` ![e](f.png)\n```\n[g](h.md)\n```\n") == ["b.md", "f.png"]
    text = "[one](nothing.md) [two](states.md#nowhere) [three](../../etc/passwd) [four](states.md) [five](https://a.b)"
    assert [line.split(":")[0] for line in broken(page, text)] == [
        "nothing.md",
        "states.md#nowhere",
        "../../etc/passwd",
    ]
    assert anchors(ROOT / "docs" / "cli.md") >= {"nodes-cordon-drain-uncordon", "submit"}
