"""hidden_modules.py: what was preloaded comes back with the package that a script imports, and nothing else does."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from elasticd_agent.workers.launcher.hidden_modules import HiddenModules
from elasticd_agent.workers.launcher.template import Template

MADE = {"first_one", "second_one", "second_one.inner", "second_one.inner.made", "whole_one", "nobodys_own"}


@pytest.fixture
def hidden(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HiddenModules]:
    """whole_one was preloaded, and has loaded two others; one of these has made modules itself, as extensions do."""
    for name, text in {
        "whole_one": "import first_one, second_one",
        "first_one": "",
        "second_one": "from second_one import inner",
        "second_one/inner": "\n".join(
            f"import sys; sys.modules[{name!r}] = type(sys)({name!r})"
            for name in ("second_one.inner.made", "nobodys_own")
        ),
    }.items():
        folder = tmp_path / name
        folder.mkdir()
        (folder / "__init__.py").write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))
    made = HiddenModules()
    with made.recording_import_of("whole_one"):
        importlib.import_module("whole_one")
    made.hide_all()
    assert there() == set()
    yield made
    for name in there():
        del sys.modules[name]
    if made in sys.meta_path:
        sys.meta_path.remove(made)


def there() -> set[str]:
    return MADE & set(sys.modules)


def test_modules_that_an_extension_makes_come_with_its_package(hidden: HiddenModules) -> None:
    """torch's compiler loads triton, whose extension makes two dozen: `import numpy` must not bring them."""
    importlib.import_module("first_one")
    assert there() == {"first_one", "nobodys_own"}, "nobody knows whose that is"
    importlib.import_module("second_one")
    assert there() == MADE - {"whole_one"}


def test_restore_brings_the_whole_batch(hidden: HiddenModules) -> None:
    importlib.import_module("whole_one")
    assert there() == MADE
    assert hidden not in sys.meta_path


def test_modules_come_back_in_the_order_of_their_import(hidden: HiddenModules) -> None:
    """Python ends modules in the reverse order, so that one which uses another ends first."""
    importlib.import_module("whole_one")
    users = ["second_one.inner.made", "nobodys_own", "second_one.inner", "second_one", "whole_one"]
    assert [name for name in sys.modules if name in users] == users


def test_file_that_shadows_a_preloaded_module(tmp_path: Path) -> None:
    (tmp_path / "numpy.py").touch()

    def shadows(directory: Path) -> str | None:
        hidden = SimpleNamespace(hidden_packages=lambda: {"numpy"})
        template: Any = SimpleNamespace(config={"script_dir": str(directory)}, baseline=set(sys.modules), hidden=hidden)
        return Template.find_shadowing_file(template)

    assert shadows(tmp_path) == f"{tmp_path / 'numpy.py'} shadows a module that is preloaded"
    assert shadows(tmp_path / "numpy.py") is None, "a directory that cannot be listed: Python finds no module there"
