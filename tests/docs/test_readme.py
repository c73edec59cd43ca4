"""README is short, its commands are understood, its figures are those of docs/measured.md, whose commands exist."""

from __future__ import annotations

import re
import shlex
import sys
from pathlib import Path

import pytest

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
HANGS = (ROOT / "docs/hangs.md").read_text().partition("\n## Measured")[2]
MEASURED = (ROOT / "docs" / "measured.md").read_text()
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def shell(text: str) -> list[list[str]]:
    blocks = re.findall(r"^```sh\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    lines = [line for block in blocks for line in block.replace("\\\n", " ").split("\n")]
    return [words for line in lines if (words := shlex.split(line, comments=True))]


def test_readme_is_short() -> None:
    assert len(README.splitlines()) <= 180
    assert max(len(line) for line in README.split("\n") if not line.startswith("|")) <= 160


def test_readme_commands_parse() -> None:
    commands = shell(README)
    assert len(commands) >= 7
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for words in commands:
        match words:
            case ["make", target]:
                assert target in targets
            case ["sudo", script]:
                assert (ROOT / script).stat().st_mode & 0o100, script
            case ["kubectl", "apply", "-k", folder]:
                assert (ROOT / folder / "kustomization.yaml").exists()
            case ["elasticd", *_]:
                pass  # test_commands.py
            case _:
                pytest.fail(f"nobody looks whether this works: {shlex.join(words)}")


def test_readme_figures_match_measured() -> None:
    """Of the first table row by row; of the others, put together from several, cell by cell."""
    section = README.partition("\n## Measured")[2].partition("\n## ")[0]
    first, states, second, hangs = re.findall(r"(?:^\|.*\n)+", section, re.MULTILINE)
    assert first in MEASURED
    told = re.findall(r"\d+\.\d+ \(\d+\.\d+\)|never", hangs.replace("**", ""))
    assert len(told) >= 12
    assert set(told) <= set(re.findall(r"\d+\.\d+ \(\d+\.\d+\)|never", HANGS)), "docs/hangs.md says otherwise"
    steady = section.partition("Without faults")[2].partition("\n\n")[0]
    figures = set(re.findall(r"\d+\.\d+", states + second + steady))
    assert len(figures) >= 8
    assert figures <= set(re.findall(r"\d+\.\d+", MEASURED))


@pytest.mark.parametrize("words", shell(MEASURED), ids=shlex.join)
def test_measured_commands_exist(words: list[str]) -> None:
    program = words[2].replace(".", "/") if words[1] == "-m" else words[1].removesuffix(".py")
    program += "/__main__.py" if (ROOT / program).is_dir() else ".py"
    text = (ROOT / program).read_text()
    for word in words[2:]:
        if word.startswith("--"):
            assert f'"{word}"' in text, f"{program} knows no {word}"
    faults = [word for word in words if " " in word]
    known = (ROOT / "benchmarks/node_faults.py").read_text() + (ROOT / "benchmarks/nodes.py").read_text()
    assert all(f'"{fault}"' in known for fault in faults)


def test_readme_versions_match_pyproject() -> None:
    table = README.partition("\n## Compatibility")[2]
    python = PROJECT["requires-python"].removeprefix(">=")
    (torch,) = [need.removeprefix("torch>=") for need in PROJECT["dependencies"] if need.startswith("torch")]
    assert f"Python {python} and newer, torch {torch} and newer" in table
