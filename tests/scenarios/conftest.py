from __future__ import annotations

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--rewrite-scenarios",
        action="store_true",
        help="write what the agent does now into tests/scenarios/**/*.txt; read the diff before you commit it",
    )
