"""Browsers that are closed after each test."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from tests.node.dashboard.browser import Browser, missing

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
