"""README, docs and code use plain technical English: a list of words that they must not contain."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FORBIDDEN = re.compile(r"\b(whoever|lest|is told|was told|handed in|hands in|goes on|went on|but for)\b", re.IGNORECASE)
NO_SUBJECT = re.compile(r"(What|Who|That|Of|Where|So|As|By|How|Whether|To be|For|With|In|On|From|Its|Their|Not|Only)\b")
"""The words that begin a clause without a subject: a docstring begins with a noun phrase or a verb."""
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


def docstrings(source: str) -> list[tuple[int, str]]:
    """Those of the module, its classes and functions, and of fields: (line, text)."""
    found = []
    for node in ast.walk(ast.parse(source)):
        body = getattr(node, "body", None)
        for before, statement in zip([None, *body], body, strict=False) if isinstance(body, list) else ():
            match statement:
                case ast.Expr(value=ast.Constant(value=str(text))) if before is None or isinstance(
                    before, (ast.Assign, ast.AnnAssign)
                ):
                    found.append((statement.lineno, text.strip()))
    return found


def test_docstrings_begin_with_a_subject() -> None:
    modules = [
        path for path in sources() if path.suffix == ".py" and path.parts[len(ROOT.parts)] in ("agents", "elasticd")
    ]
    assert [
        f"{path.relative_to(ROOT)}:{line}: {text[:60]}"
        for path in modules
        for line, text in docstrings(path.read_text())
        if NO_SUBJECT.match(text)
    ] == []


def test_few_sentences_of_the_pages_are_long() -> None:
    """More than 35 words between full stops, colons or semicolons; what remains quotes a log line or an invariant."""
    pages = [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]
    prose = (
        re.sub(r"```.*?```|^\|[^\n]*$|^#[^\n]*$|<!--.*?-->", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
        for page in pages
    )
    sentences = (one for text in prose for one in re.split(r"(?<=[.:;])\s+(?=[A-Z`])|\n\s*\n|\n\s*[-*] ", text))
    assert len([sentence for sentence in sentences if len(sentence.split()) > 35]) <= 20
