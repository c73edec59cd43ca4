"""Files that are replaced in a folder that belongs to a job's user."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from elasticd_agent.system.files import replace_file, replace_link


@pytest.mark.parametrize("name", ["it", ".it.new"])
@pytest.mark.parametrize(
    "replace",
    [lambda path: replace_file(path, b"new"), lambda path: replace_link(path, Path("/new"))],
    ids=["file", "link"],
)
def test_directory_in_the_way_gets_another_name(tmp_path: Path, replace: Callable[[Path], None], name: str) -> None:
    (tmp_path / name / "full").mkdir(parents=True)
    replace(tmp_path / "it")
    assert (tmp_path / "it").is_symlink() or (tmp_path / "it").read_bytes() == b"new"
    (aside,) = (path for path in tmp_path.iterdir() if path.name != "it")
    assert (aside / "full").is_dir()
