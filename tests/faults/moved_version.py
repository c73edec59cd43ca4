"""An installation of elasticd in a folder, and its replacement by a version in which every module has another path."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
from collections.abc import Callable
from pathlib import Path

from tests.faults.job import REPOSITORY, Event, comm_of, descendants, until

_AGENTS = REPOSITORY / "agents"
_PACKAGES = (REPOSITORY / "elasticd", _AGENTS / "elasticd_agent", _AGENTS / "elasticd_daemon")


def install(site: Path) -> Path:
    for package in _PACKAGES:
        shutil.copytree(package, site / package.name, ignore=shutil.ignore_patterns("__pycache__"))
    return site


def upgrade(site: Path) -> None:
    """Replace the installation by one that works, and has no file in common with it but the packages' entry points."""
    made = install(site.with_name(f"{site.name}.new"))
    for package in _PACKAGES:
        _move(made / package.name)
    site.rename(old := site.with_name(f"{site.name}.old"))
    made.rename(site)
    for package in _PACKAGES:
        before, after = (
            {p.relative_to(top / package.name) for p in _sources(top / package.name)} for top in (old, site)
        )
        assert {str(path) for path in before & after} <= {"__init__.py", "__main__.py"}
    shutil.rmtree(old)


def _sources(package: Path) -> list[Path]:
    return list(package.rglob("*.py"))


def _move(package: Path) -> None:
    """Add "_v2" to the name of every subpackage and top-level module, and change everything that refers to them."""
    parts = [path for path in package.iterdir() if path.is_dir() or (path.suffix == ".py" and "__" not in path.name)]
    names = "|".join(path.stem for path in parts)
    for path in parts:
        path.rename(path.with_name(f"{path.stem}_v2{path.suffix}"))
    for file in (path for top in _PACKAGES for path in _sources(package.parent / top.name)):
        text = re.sub(rf"\b{package.name}\.({names})\b", rf"{package.name}.\1_v2", file.read_text())
        text = re.sub(
            rf"^( *from {package.name} import )(\w.*)$",
            lambda line: line[1] + re.sub(rf"(?<!as )\b({names})\b( as)?", _moved, line[2]),
            text,
            flags=re.M,
        )
        in_strings = file.name in ("installation.py", "requests.py") or file.parent == package
        if in_strings and package.name != "elasticd_daemon":  # there they name folders
            text = re.sub(rf'"({names})(?=["/.])', r'"\1_v2', text)
        file.write_text(text)


def _moved(name: re.Match[str]) -> str:
    return f"{name[1]}_v2 as" if name[2] else f"{name[1]}_v2 as {name[1]}"


def hang_a_rank(worker: int, events: Callable[[str], list[Event]], logs: Path, report: Callable[[], str]) -> None:
    """SIGSTOP: the hang must be judged, with evidence of both ranks."""
    os.kill(worker, signal.SIGSTOP)
    (verdict,) = until(lambda: events("hang_detected") or events("hung"), report)
    assert verdict["cause"] == "stopped"
    evidence = logs / "round-1" / "evidence"
    until(lambda: (evidence / "verdict.json").exists(), report)
    (of_node,) = (json.loads(path.read_text()) for path in evidence.glob("evidence-*.json"))
    assert {rank["rank"] for rank in of_node["ranks"]} == {0, 1}


def kill_owner(runner: int) -> None:
    (owner,) = (pid for pid in descendants(runner) if comm_of(pid) == "elasticd-owner")
    os.kill(owner, signal.SIGKILL)
