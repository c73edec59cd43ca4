"""docs/nccl.md: every line of what breaks on GPUs names tests that exist, or a check of the day with a GPU."""

from __future__ import annotations

import re

import pytest

from benchmarks import gpu_day
from tests.docs.pages import ROOT

PAGE = (ROOT / "docs" / "nccl.md").read_text()
ROWS = [
    [cell.strip() for cell in line.strip("|").split("|")]
    for line in PAGE.partition("## What breaks on GPUs")[2].splitlines()
    if line.startswith("| ") and not line.startswith(("| what", "|---"))
]


def test_table_is_found() -> None:
    assert len(ROWS) >= 15


@pytest.mark.parametrize("row", ROWS, ids=[row[0][:40] for row in ROWS])
def test_line_is_held(row: list[str]) -> None:
    _, tests, checks = row
    for test in re.findall(r"`([^`]+)`", tests):
        path, _, name = test.partition("::")
        assert (ROOT / path).is_file(), test
        assert f"def {name}(" in (ROOT / path).read_text() or not name, test
    assert set(filter(None, checks.split(", "))) <= {check.name for check in gpu_day.CHECKS}
    assert "`" in tests
