"""`elasticd docs`: the documentation that was installed with this version, on any machine and without a network."""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from pathlib import Path

from elasticd.errors import UsageError
from elasticd_agent.config.command_parser import CommandParser

_PACKAGE_DIR = Path(__file__).resolve().parents[1]


def docs(argv: Sequence[str]) -> int:
    """Returns 0; raises UsageError for a page or a heading that is not there."""
    args = build_parser().parse_args(argv)
    folder = next((path for path in (_PACKAGE_DIR / "docs", _PACKAGE_DIR.parents[1] / "docs") if path.is_dir()), None)
    if folder is None:
        raise UsageError("this installation has no documentation")
    pages = {path.stem: path for path in sorted(folder.glob("*.md")) if path.stem != "README"}
    if args.page is None:
        for name, path in pages.items():
            print(f"{name:<24} {path.read_text(encoding='utf-8').partition(chr(10))[0].lstrip('# ')}")
        return 0
    name, _, anchor = args.page.partition("#")
    if name not in pages:
        raise UsageError(f"there is no page {name!r}; there are {', '.join(pages)}")
    text = pages[name].read_text(encoding="utf-8")
    print(section_at(text, anchor) if anchor else text, end="")
    return 0


def section_at(text: str, anchor: str) -> str:
    """The part of a page below the heading with this anchor, as GitHub and mkdocs make them. Raises UsageError."""
    lines, start, depth, fenced = text.splitlines(keepends=True), -1, 0, False
    for number, line in enumerate(lines):
        fenced ^= line.lstrip().startswith("```")
        heading = None if fenced else re.match(r"(#+) (.+)", line)
        if heading is None:
            continue
        if start >= 0 and len(heading[1]) <= depth:
            return "".join(lines[start:number])
        if start < 0 and re.sub(r"[^\w\- ]", "", heading[2].lower()).replace(" ", "-") == anchor:
            start, depth = number, len(heading[1])
    if start < 0:
        raise UsageError(f"the page has no heading with the anchor {anchor!r}")
    return "".join(lines[start:])


def build_parser() -> argparse.ArgumentParser:
    parser = CommandParser(
        "docs",
        "Prints a page of the documentation of this version, or the part of it below a heading: elasticd docs "
        "operations#elasticdjobhung. Without PAGE it lists the pages.",
        "Exit codes: 0 printed, 2 usage, or there is no such page.",
    )
    parser.add_argument(
        "page", metavar="PAGE[#HEADING]", nargs="?", help="the page, perhaps with the anchor of a heading"
    )
    return parser
