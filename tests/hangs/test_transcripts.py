"""The rules still give the transcripts; `pytest tests/hangs/test_transcripts.py --rewrite-scenarios` writes them."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.hangs import hang_table

HERE = Path(__file__).parent / "transcripts"
SCENARIOS = sorted(HERE.glob("*.txt"))


@pytest.mark.parametrize("path", SCENARIOS, ids=lambda path: path.stem)
def test_transcript(path: Path, request: pytest.FixtureRequest) -> None:
    written = path.read_text()
    now = hang_table.rerun(written)
    if request.config.getoption("--rewrite-scenarios", default=False):
        path.write_text(now)
    else:
        assert now == written


def test_slow_transcripts_have_no_hang() -> None:
    quiet = {
        "last_upload",
        "last_kernel",
        "never_seen_to_train",
        "progress_again",
        "another_node_has_time",
        "debugger",
        "stopped_all",
        "independent",
        "no_stacks",
    }
    for path in SCENARIOS:
        hung = "=> HUNG" in path.read_text() or "=> report" in path.read_text()
        slow = path.stem.startswith("slow_") and path.stem != "slow_device_evaluation"
        assert hung != (slow or path.stem in quiet), path.stem
    assert len(SCENARIOS) >= 45
