"""`elasticd docs`: the pages that messages, alerts and --help name, and no address that somebody else may own."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from elasticd.errors import UsageError
from elasticd_agent.cli.docs import docs

ROOT = Path(__file__).resolve().parents[2]


def tracked() -> list[Path]:
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return [path for path in map(ROOT.joinpath, listed.splitlines()) if path.is_file()]


def test_part_below_a_heading(capsys: pytest.CaptureFixture[str]) -> None:
    assert docs(["operations#elasticdjobhung"]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("## ElasticdJobHung\n")
    assert printed.count("\n## ") == 0
    assert docs([]) == 0
    assert re.search(r"^hangs +\S", capsys.readouterr().out, re.M)


@pytest.mark.parametrize("page", ["nosuch", "hangs#nosuch", "../README"])
def test_missing_page(page: str) -> None:
    with pytest.raises(UsageError, match=r"there is no page|no heading"):
        docs([page])


def test_no_address_that_nobody_owns() -> None:
    """Labels of Kubernetes have a name before the slash, which no browser opens."""
    found = [path for path in tracked() if path != Path(__file__) and b"https://elasticd." in path.read_bytes()]
    assert found == []
