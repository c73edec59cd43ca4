"""mkdocs' hook for `make site`: changelog and docstrings become pages, links to files outside of docs/ plain text."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
_OUTSIDE = re.compile(r"\[([^]\n]+)\]\((?:\.\./)+(?!docs/)[^)\n]+\)")


def on_files(files: Any, config: Any) -> Any:
    from mkdocs.structure.files import File

    from docs.generate import api

    files.append(File.generated(config, "api.md", content=api.page()))
    text = (ROOT / "CHANGELOG.md").read_text().replace("](docs/", "](")
    files.append(File.generated(config, "changelog.md", content=text))
    decisions = sorted((ROOT / "docs" / "adr").glob("*.md"))
    lines = (f"- [{page.read_text().splitlines()[0].lstrip('# ')}]({page.name})" for page in decisions)
    files.append(File.generated(config, "adr/index.md", content="# Decisions\n\n" + "\n".join(lines) + "\n"))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    # Beside the folder of the pages, and from a folder in it.
    depth = page.file.src_uri.count("/")
    markdown = markdown.replace("](../CHANGELOG.md)", "](changelog.md)").replace("](../docs/", "](")
    markdown = re.sub(r"\]\(adr/?\)", "](adr/index.md)", markdown)
    if depth:
        return re.sub(r"\[([^]\n]+)\]\((?:\.\./){2,}[^)\n]+\)", r"\1", markdown)
    return _OUTSIDE.sub(r"\1", markdown)
