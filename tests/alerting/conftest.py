"""`watched(...)` starts two nodes that train together, with Prometheus, Alertmanager and a webhook that watch them.

All of these tests are the slow kind. Where the servers are not there they skip, saying which command fetches them.
"""

from __future__ import annotations

import contextlib
import faulthandler
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.alerting import rules
from tests.alerting.pair import Pair, pair
from tests.alerting.watching import Watch, missing, watching
from tests.faults.job import Fault

_HERE = Path(__file__).resolve().parent
Watched = Callable[..., tuple[Pair, Watch]]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.is_relative_to(_HERE):
            item.add_marker(pytest.mark.system)
            if item.get_closest_marker("timeout") is None:
                item.add_marker(pytest.mark.timeout(300))


@pytest.fixture
def watched(tmp_path: Path) -> Iterator[Watched]:
    """`watched(*script's arguments, scale=…, faults=[…], settings={agent.toml's}, **job's keys)`: they are scraped."""
    if lacks := missing():
        pytest.skip(lacks)
    faulthandler.cancel_dump_traceback_later()  # whoever waits for alerts takes longer than what is taken for stuck
    with contextlib.ExitStack() as stack:

        def start(
            *args: str,
            scale: float = 1.0,
            inhibits: bool = False,
            faults: Sequence[Fault] = (),
            settings: dict[str, Any] | None = None,
            **job: Any,
        ) -> tuple[Pair, Watch]:
            nodes = stack.enter_context(pair(tmp_path, **settings or {}))
            watch = stack.enter_context(watching(rules.scaled(tmp_path, scale), inhibits))
            nodes.strikes(faults)
            nodes.train(*args, **job)
            watch.scrape(nodes.ports)
            return nodes, watch

        yield start
