"""The transcripts beside this file still read the same; `pytest tests/scenarios --rewrite-scenarios` rewrites them."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.scenarios import daemon, interpreter, nodes

HERE = Path(__file__).parent
KINDS = {"nodes": nodes.rerun, "daemon": daemon.rerun}
SCENARIOS = sorted(HERE.glob("*.txt")) + sorted(path for kind in KINDS for path in (HERE / kind).glob("*.txt"))


@pytest.mark.parametrize("path", SCENARIOS, ids=lambda p: p.relative_to(HERE).with_suffix("").as_posix())
def test_transcript_reads_the_same(path: Path, request: pytest.FixtureRequest) -> None:
    written = path.read_text()
    now = KINDS.get(path.parent.name, interpreter.rerun)(written)
    if request.config.getoption("--rewrite-scenarios", default=False):
        path.write_text(now)
    else:
        assert now == written


def test_transcripts_are_found() -> None:
    assert len(SCENARIOS) >= 50
