"""The transcripts beside this file still read the same; `pytest tests/scenarios --rewrite-scenarios` rewrites them."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.scenarios.interpreter import rerun

SCENARIOS = sorted(Path(__file__).parent.glob("*.txt"))


@pytest.mark.parametrize("path", SCENARIOS, ids=lambda p: p.stem)
def test_scenario(path: Path, request: pytest.FixtureRequest) -> None:
    written = path.read_text()
    now = rerun(written)
    if request.config.getoption("--rewrite-scenarios", default=False):
        path.write_text(now)
    else:
        assert now == written


def test_there_are_scenarios() -> None:
    assert len(SCENARIOS) >= 10
