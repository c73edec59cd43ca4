"""The commands of a documentation page, as a reader copies them."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"


def blocks(page: str) -> dict[str, list[str]]:
    """Heading → its blocks of shell commands, in order: ```sh, and of a block with `$ ` the lines after that."""
    found: dict[str, list[str]] = {}
    heading, fence, lines = "", None, list[str]()
    for line in (DOCS / page).read_text().splitlines():
        bare = line.strip()
        if bare.startswith("```"):
            fence, kind = (bare[3:], None) if fence is None else (None, fence)
            typed = [one.removeprefix("$ ") for one in lines if one.startswith("$ ")]
            if fence is None and (kind == "sh" or typed):
                found.setdefault(heading, []).append("\n".join(typed or lines))
            lines = []
        elif fence is not None:
            lines.append(bare if line.startswith("   ") and not line.startswith("    ") else line)
        elif line.startswith("#"):
            heading = line.lstrip("# ")
    return found
