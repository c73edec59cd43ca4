"""`network(hosts=3)` makes a Network that ends with the test; where none can be made, these tests skip, saying why."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.multihost.net import Network, missing

StartNetwork = Callable[..., Network]


def pytest_runtest_setup() -> None:
    # one place for all of them: the summary folds what skips in one place, for one reason, into one line
    if reason := missing():
        pytest.skip(reason)


@pytest.fixture
def network() -> Iterator[StartNetwork]:
    with contextlib.ExitStack() as ending:

        def start(hosts: int, **how: Any) -> Network:
            return ending.enter_context(Network(hosts, **how))

        yield start
