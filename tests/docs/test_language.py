"""README, docs and code use plain technical English: a list of words that they must not contain."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FORBIDDEN = re.compile(r"\b(whoever|lest|is told|was told|handed in|hands in|goes on|went on|but for)\b", re.IGNORECASE)
SUFFIXES = {".py", ".md", ".toml", ".css", ".js", ".html", ".yaml", ".json", ".sh", ".service", ".sbatch", ""}
FOLDERS = ("docs", "agents", "elasticd", "deploy", "examples", "benchmarks")


def sources() -> list[Path]:
    found = [ROOT / "README.md", ROOT / "CONTRIBUTING.md"]
    for folder in FOLDERS:
        found += [path for path in (ROOT / folder).rglob("*") if path.is_file() and path.suffix in SUFFIXES]
    return sorted(path for path in found if "__pycache__" not in path.parts)


def strings(source: str) -> list[tuple[int, str]]:
    """Every string of a module with its line: literals that Python joins count as one, f-strings as their text."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.JoinedStr):
            parts = [part.value if isinstance(part, ast.Constant) else "…" for part in node.values]
            found.append((node.lineno, "".join(map(str, parts))))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            found.append((node.lineno, node.value))
    return found


def offences(path: Path, text: str) -> list[str]:
    """Where a file breaks the rule: line by line, and across line ends in prose and in strings."""
    where = path.relative_to(ROOT)
    found = {
        f"{where}:{number}: {match[0]}"
        for number, line in enumerate(text.split("\n"), 1)
        for match in FORBIDDEN.finditer(line)
    }
    if path.suffix == ".py":
        pieces = strings(text)
    elif path.suffix == ".md":
        pieces = [(text[: match.start()].count("\n") + 1, match[0]) for match in re.finditer(r"(?:.+\n)+", text)]
    else:
        pieces = []
    for number, piece in pieces:
        if match := FORBIDDEN.search(" ".join(piece.split())):
            found.add(f"{where}:{number}: {match[0]} (in the text that begins here)")
    return sorted(found)


def test_no_forbidden_words() -> None:
    assert [line for path in sources() for line in offences(path, path.read_text(errors="replace"))] == []


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("docs/x.md", "A job\nis\ntold so.\n", "is told"),
        ("docs/x.md", "Whoever reads this.\n", "Whoever"),
        ("elasticd/x.py", 'raise ValueError("what is " f"told {x}")\n', "is told"),
        ("elasticd/x.py", "# it goes on\n", "goes on"),
    ],
)
def test_forbidden_word_is_found(name: str, text: str, words: str) -> None:
    assert any(words in line for line in offences(ROOT / name, text))
