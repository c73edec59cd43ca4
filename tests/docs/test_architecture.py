"""docs/architecture.md names every thread, key and process name that the code makes, and none that it does not."""

from __future__ import annotations

import re
from pathlib import Path

from elasticd_agent.model.keys import Keys
from elasticd_daemon import keys as names

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "architecture.md").read_text()
FOLDERS = "agents/elasticd_agent", "agents/elasticd_daemon", "elasticd"
SOURCES = [path.read_text() for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")]
ELSEWHERE = {"elasticd-explain", "elasticd-rendezvous"}
"""Threads of commands and of torchrun's own process."""


def test_architecture_names_every_thread() -> None:
    found = {name for text in SOURCES for name in re.findall(r"Thread\([^)]*?name=f?\"([^\"{]+)\"", text, re.DOTALL)}
    assert len(found) > 15
    told = set(re.findall(r"`([a-z][\w -]+)`", PAGE))
    assert {name for name in found if not name.startswith("resolving")} - ELSEWHERE - told == set()
    rows = "".join(
        re.findall(r"^\| [\w, ]*\| .*$", PAGE.partition("## Threads")[2].partition("\n## ")[0], re.MULTILINE)
    )
    made = "".join(SOURCES)
    assert [name for name in re.findall(r"`(elasticd-[a-z-]+)`", rows) if f'"{name}"' not in made] == []


def test_architecture_names_every_process() -> None:
    titles = {name for text in SOURCES for name in re.findall(r"b\"(elasticd-[a-z]+)\"", text)}
    assert titles >= {"elasticd-job", "elasticd-owner", "elasticd-store"}
    assert {title for title in titles if title not in PAGE} - {"elasticd-super"} == set()


def test_architecture_names_every_store_key() -> None:
    keys = Keys("JOB")
    named = {name: value for name, value in vars(keys).items() if isinstance(value, str)}
    words = {value.removeprefix("/elasticd/v1/jobs/JOB").strip("/").split("/")[0] for value in named.values()}
    words |= {"master", "failures", "done", "hang_reports"}
    words |= {
        value.removeprefix("/elasticd/v1/").strip("/")
        for name, value in vars(names).items()
        if name.isupper() and isinstance(value, str) and value.startswith("/elasticd/v1/")
    }
    table = PAGE.partition("## Shared state")[2].partition("\n## ")[0]
    assert {word for word in words if word and not re.search(rf"\b{word}\b", table)} - {"JOB"} == set()
    for word in re.findall(r"[`/ ](\w+)/(?:N/)?(?:NODE|JOB|N)\b", table):
        assert word in words | {"jobs", "nodes", "submissions", "placements", "results", "cordons"}, word
