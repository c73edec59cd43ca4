"""docs/frameworks.md: its commands parse, its code compiles and names what exists."""

from __future__ import annotations

import ast
import importlib
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "frameworks.md").read_text()
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)


def test_code_compiles_and_imports_what_exists() -> None:
    trees = [ast.parse(block) for kind, block in BLOCKS if kind == "python"]
    imports = [each for tree in trees for each in ast.walk(tree) if isinstance(each, ast.ImportFrom)]
    assert len(imports) == 4
    for each in imports:
        assert hasattr(importlib.import_module(str(each.module)), each.names[0].name)


def test_integrations_import_nothing_of_a_framework() -> None:
    packages = ("transformers", "accelerate", "lightning", "torchdata", "torch")
    folder = ROOT / "elasticd" / "integrations"
    for path in folder.glob("*.py"):
        found = [each for each in ast.parse(path.read_text()).body if isinstance(each, (ast.Import, ast.ImportFrom))]
        names = [each.module or "" if isinstance(each, ast.ImportFrom) else each.names[0].name for each in found]
        assert [name for name in names if name.split(".")[0] in packages] == [], path.name


@pytest.mark.parametrize(
    ("module", "call"), [("lightning", "ElasticdCallback(8)"), ("transformers", "ElasticdCallback(1)")]
)
def test_missing_package_is_one_sentence(module: str, call: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from elasticd.errors import UsageError

    for name in (module, f"{module}.pytorch"):
        monkeypatch.setitem(__import__("sys").modules, name, None)
    imported = importlib.import_module(f"elasticd.integrations.{module}")
    with pytest.raises(UsageError, match=rf"needs {module}.*pip install 'elasticd\[{module}\]'"):
        eval(call, vars(imported))
