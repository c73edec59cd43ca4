"""CONTRIBUTING lists the packages that the linter knows, and its table names files and symbols that exist."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parents[2]
AGENT = ROOT / "agents" / "elasticd_agent"
DAEMON = ROOT / "agents" / "elasticd_daemon"
PAGE = (ROOT / "CONTRIBUTING.md").read_text()
CONTRACTS = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]


def layers(container: str) -> list[list[str]]:
    (found,) = [c["layers"] for c in CONTRACTS if c["type"] == "layers" and c.get("containers") == [container]]
    return [[name.strip() for name in layer.split("|")] for layer in found]


def changes() -> list[tuple[str, str]]:
    """Row by row: what to change, and where."""
    table = PAGE.partition("\n## Where to change what\n")[2].partition("\n## ")[0]
    return [
        (row[0].strip(), row[1])
        for row in (line.strip("|").split("|", 1) for line in table.split("\n") if line[:2] == "| ")
    ][1:]


def resolve(name: str) -> Path:
    if name.startswith("elasticd_daemon/"):
        return DAEMON.parent / name
    return ROOT / name if name.startswith(("elasticd/", "docs/", "tests/", "deploy/")) else AGENT / name


def test_package_table_matches_linter() -> None:
    listed = re.findall(r"^\| `(\w+)/` \|", PAGE, re.MULTILINE)
    assert sorted(listed) == sorted(name for layer in layers("elasticd_agent") for name in layer if name != "__main__")
    assert packages(AGENT) == set(listed)
    assert packages(DAEMON) == set(re.findall(r"`elasticd_daemon/(\w+)/`", PAGE))


def packages(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir() if (path / "__init__.py").exists()}


def test_layer_picture_matches_linter() -> None:
    picture = PAGE.partition("\n## Layers\n")[2].partition("```\n")[2].partition("```")[0]
    rows = re.findall(r"^\d  (\w+(?: *\| \w+)*) ", picture, re.MULTILINE)
    found = [[name.strip() for name in row.split("|")] for row in rows]
    assert found == [layer for layer in layers("elasticd_agent") if layer != ["__main__"]]


def test_every_change_has_a_row() -> None:
    assert len(changes()) >= 12


@pytest.mark.parametrize(("change", "where"), changes(), ids=lambda text: text[:30])
def test_files_and_names_of_a_change_exist(change: str, where: str) -> None:
    files = re.findall(r"`([\w./-]+/?[\w.-]+\.(?:py|toml|md|html|yaml))`", where)
    assert files, change
    text = "".join(resolve(file).read_text() for file in files)
    for name in re.findall(r"`([A-Za-z_][\w.]*)`", re.sub(r"`[\w./-]+\.(?:py|toml|md|html|yaml)`", "", where)):
        assert all(re.search(rf"\b{part}\b", text) for part in name.split(".")), f"{change}: no {name} in {files}"
