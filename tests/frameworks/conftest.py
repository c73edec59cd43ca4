"""Marks every test here, and gives it the fixture that starts scripts; nothing is collected without the packages."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.examples.conftest import run

__all__ = ["run"]

collect_ignore_glob = [] if find_spec("transformers") else ["test_*.py"]
_HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if _HERE in item.path.parents:
            item.add_marker(pytest.mark.frameworks)
            item.add_marker(pytest.mark.timeout(300))
