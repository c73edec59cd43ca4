from __future__ import annotations

import pytest

from tests.daemon.conftest import etcd, node, nodes  # noqa: F401 fixtures


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--rewrite-pages",
        action="store_true",
        help="write what `elasticd explain` says now beside the evidence in tests/cli/explain; read the diff",
    )
