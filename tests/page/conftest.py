"""The daemon's nodes, and browsers that are gone afterwards."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from tests.daemon.conftest import etcd, node, nodes  # noqa: F401 fixtures
from tests.page.browser import Browser, missing

Browse = Callable[..., Browser]


@pytest.fixture
def browser() -> Iterator[Browse]:
    if why := missing():
        pytest.skip(why)
    with ExitStack() as stack:

        def start(**how: Any) -> Browser:
            made = Browser(**how)
            stack.callback(made.close)
            return made

        yield start
