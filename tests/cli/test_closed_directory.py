"""Files of jobs that only others may reach: a sentence, and no traceback."""

from __future__ import annotations

import contextlib
import os
import pwd
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from elasticd_agent.cli.main import main

COMMANDS = [["explain"], ["explain", "--list"], ["checkpoints", "list"], ["dump", "--job", "nobodys", "--out"]]


@contextlib.contextmanager
def closed_directory() -> Iterator[Path]:
    """A directory that is closed to this process, in one that is open. What is imported in the block must be loaded
    before: another user may not be able to read it.
    """
    with tempfile.TemporaryDirectory() as place:
        os.chmod(place, 0o755)
        path = Path(place, "shut")
        path.mkdir(mode=0o000)
        if os.geteuid() == 0:
            os.seteuid(pwd.getpwnam("nobody").pw_uid)
        try:
            yield path
        finally:
            if os.getuid() == 0:
                os.seteuid(0)
            path.chmod(0o700)


@pytest.fixture
def shut() -> Iterator[Path]:
    for command in COMMANDS:
        main([*command, "/nowhere/none"])
    with closed_directory() as path:
        yield path


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_path_in_a_closed_directory(shut: Path, command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    capsys.readouterr()
    assert main([*command, f"{shut}/x"]) == 2
    assert capsys.readouterr().err == f"elasticd {command[0]}: error: {shut}/x: Permission denied\n"
