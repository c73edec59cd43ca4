"""mkdocs' hook for `make site`: changelog and docstrings become pages, links to files outside of docs/ plain text."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
_OUTSIDE = re.compile(r"\[([^]\n]+)\]\((?:\.\./)+(?!docs/)[^)\n]+\)")


def on_config(config: Any) -> Any:
    from markdown.extensions.toc import slugify

    def identifier(text: str, separator: str) -> str:
        """The theme's script uses it as a selector, which cannot begin with a digit."""
        return re.sub(r"^(?=\d)", "n", slugify(text, separator))

    config.mdx_configs.setdefault("toc", {})["slugify"] = identifier
    return config


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
    markdown = re.sub(r"(\]\([^)#\s]*#)(?=\d)", r"\1n", markdown)  # as on_config's identifier
    if depth:
        return re.sub(r"\[([^]\n]+)\]\((?:\.\./){2,}[^)\n]+\)", r"\1", markdown)
    return _OUTSIDE.sub(r"\1", markdown)


_HEAD = """<link id="hljs-light"><link id="hljs-dark">
<style>[role=main] table { display: block; overflow-x: auto } [role=main] { overflow-wrap: break-word }</style>
</head>"""
"""The theme's switch of colours sets these links, although the site does not load highlight.js. Tables scroll."""


def on_post_page(output: str, **_: Any) -> str:
    return output.replace("</head>", _HEAD, 1)


on_post_template = on_post_page  # 404.html
