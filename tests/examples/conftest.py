"""The fixture that starts the repository's scripts and leaves nothing running."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.examples.launching import Ran, Run


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    """run(*command) starts python with these arguments in a fresh folder; whatever still runs afterwards is ended."""
    started: list[Ran] = []

    def start(*command: object) -> Ran:
        folder = tmp_path / f"run{len(started)}"
        folder.mkdir()
        started.append(Ran([sys.executable, *map(str, command)], folder))
        return started[-1]

    yield start
    for ran in started:
        ran.end()
