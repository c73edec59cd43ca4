"""A lock in a folder that belongs to somebody else: it leads nowhere, and names nobody but its owner's processes."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from elasticd_agent.daemon.names import JobFiles
from elasticd_agent.daemon.running import alive
from elasticd_agent.daemon.running.order import Exit, replace_file, write_exit


@pytest.mark.parametrize("link", [os.symlink, os.link], ids=["symbolic", "hard"])
def test_a_lock_that_is_a_link_is_not_taken(tmp_path: Path, link: Callable[[Path, Path], None]) -> None:
    precious = tmp_path / "precious"
    precious.write_text("mine")
    link(precious, tmp_path / "lock")
    with pytest.raises(OSError, match=r"symbolic links|another name"):
        alive.take(tmp_path / "lock")
    assert precious.read_text() == "mine"


def test_nothing_is_written_through_a_link(tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    precious.write_text("mine")
    files = JobFiles(tmp_path)
    (tmp_path / "exit.spare").symlink_to(precious)
    (tmp_path / ".order.json.new").symlink_to(precious)
    with pytest.raises(OSError, match="symbolic links"):
        write_exit(files, Exit("j", 1, 0, "succeeded", "done"))
    replace_file(files.order, b"{}")
    assert precious.read_text() == "mine"
    assert files.order.read_bytes() == b"{}"


def test_who_has_it_is_found_and_nobody_else_can_be_named(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    fd = alive.take(path)
    assert fd is not None
    assert alive.held(path)
    assert alive.holder(path) == alive.Process.of(os.getpid())
    if os.geteuid() == 0:  # only root's agent runs jobs of others
        os.chown(path, 65534, 65534)
        assert alive.holder(path) is None, "a job's user had named a process of root's"
    os.close(fd)
    assert not alive.held(path)


def test_a_lock_lasts_as_long_as_any_copy_of_it(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    fd = alive.take(path)
    assert fd is not None
    with subprocess.Popen(
        [sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE, pass_fds=[fd]
    ) as keeper:
        os.close(fd)
        assert alive.held(path)
        assert keeper.pid in alive.keepers(path)
        assert alive.take(path) is None
    assert not alive.held(path)
