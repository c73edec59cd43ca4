"""`make` installs: tests/pip-install says what pip does, without a terminal, too."""

from __future__ import annotations

import os
import pty
import subprocess
from pathlib import Path

import pytest

from tests.examples.launching import REPOSITORY

INSTALL = REPOSITORY / "tests" / "pip-install"
PIP = """#!/bin/bash
echo "$@" > "{folder}/arguments"
while [ $# -gt 1 ]; do [ "$1" != --log ] || log=$2; shift; done
for step in 'Collecting torch==2.13.0' '  Downloading torch-2.13.0-cp311-linux_x86_64.whl (900 MB)'; do
    [ -z "$log" ] || echo "2026-01-01T00:00:00,000 $step" >> "$log"
done
until [ -e "{folder}/done" ]; do sleep 0.05; done
exit 3
"""


@pytest.fixture
def python(tmp_path: Path) -> Path:
    """Does what pip does on a slow network, until a file `done` is there; then it fails."""
    made = tmp_path / "python"
    made.write_text(PIP.format(folder=tmp_path))
    made.chmod(0o755)
    return made


def test_installation_without_a_terminal_says_what_it_does(python: Path, tmp_path: Path) -> None:
    """And for how long; its exit code is pip's, and nothing is left."""
    env = {**os.environ, "SAY_EVERY_S": "0.1", "TMPDIR": str(tmp_path / "tmp")}
    (tmp_path / "tmp").mkdir()
    with subprocess.Popen([INSTALL, python, "-e", "."], stdout=subprocess.PIPE, text=True, env=env) as run:
        lines = iter(run.stdout.readline, "")
        line = next(line for line in lines if "Downloading" in line)
        assert line.startswith("still installing after ") and line.endswith(
            " s: Downloading torch-2.13.0-cp311-linux_x86_64.whl (900 MB)\n"
        )
        (tmp_path / "done").touch()
        assert run.wait(60) == 3
        assert run.stdout.read() is not None, "no process holds the pipe open"
    assert (tmp_path / "arguments").read_text().startswith("-m pip install --disable-pip-version-check -e . --quiet")
    assert list((tmp_path / "tmp").iterdir()) == []


def test_installation_on_a_terminal_leaves_it_to_pip(python: Path, tmp_path: Path) -> None:
    ours, theirs = pty.openpty()
    (tmp_path / "done").touch()
    try:
        assert subprocess.run([INSTALL, python, "-e", "."], stdout=theirs, timeout=60).returncode == 3
    finally:
        os.close(ours)
        os.close(theirs)
    assert (tmp_path / "arguments").read_text() == "-m pip install --disable-pip-version-check -e .\n"


def test_no_target_installs_in_silence() -> None:
    makefile = (REPOSITORY / "Makefile").read_text()
    assert "-m pip install" not in makefile
