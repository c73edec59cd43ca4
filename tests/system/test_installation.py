"""Where our own files are."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from elasticd_agent.model.version import version
from elasticd_agent.system import installation


@pytest.mark.parametrize("name", sorted(installation._PROGRAM_PATHS))
def test_program_exists(name: str) -> None:
    assert Path(installation.program(name)).exists()


PATHS = """
import json, os, sys
from elasticd_agent.model.version import version
from elasticd_agent.system import installation
if len(sys.argv) > 1:
    from pathlib import Path
    installation.switch_to_copy(Path(sys.argv[1]))
import elasticd.checkpointing, elasticd_agent.hangs.explain.model as late
paths = [installation.program("owner"), installation.library_file("elasticd.heartbeat.record")]
print(json.dumps([*paths, *installation.import_path(), late.__file__, elasticd.checkpointing.__file__]))
"""


def run(code: str, *args: str, **env: str) -> str:
    command = [sys.executable, "-c", code, *args]
    ran = subprocess.run(command, env={**os.environ, **env}, cwd="/", capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    return ran.stdout


@pytest.mark.parametrize("start", ["from the copy", "redirected"])
def test_a_process_of_a_copy_uses_only_the_copy(tmp_path: Path, start: str) -> None:
    copy = tmp_path / "copy"
    installation.copy_to(copy)
    printed = run(PATHS, PYTHONPATH=str(copy)) if start == "from the copy" else run(PATHS, str(copy))
    paths = json.loads(printed)
    assert len(paths) == 5
    assert all(Path(path).is_relative_to(copy) and Path(path).exists() for path in paths)


def test_a_copy_is_the_command_elasticd(tmp_path: Path) -> None:
    installation.copy_to(tmp_path / "copy")
    command = [sys.executable, str(tmp_path / "copy"), "--version"]
    ran = subprocess.run(command, cwd="/", capture_output=True, text=True)
    assert ran.stdout == f"elasticd {version()}\n", ran.stderr


def test_a_copy_is_readable_by_all_and_writable_by_its_owner(tmp_path: Path) -> None:
    """A job's user runs this code, with the store's credentials in memory, and must not be able to change it."""
    before = os.umask(0o077)
    try:
        installation.copy_to(tmp_path / "copy")
    finally:
        os.umask(before)
    for path in [tmp_path / "copy", *(tmp_path / "copy").rglob("*")]:
        assert stat.S_IMODE(path.stat().st_mode) == (0o755 if path.is_dir() else 0o644), path


def test_digest_changes_with_any_source(tmp_path: Path) -> None:
    copy, digest = tmp_path / "copy", installation.digest()
    assert not installation.is_copy(copy, digest)
    installation.copy_to(copy)
    assert installation.is_copy(copy, digest)
    run(PATHS, PYTHONPATH=str(copy))
    assert installation.is_copy(copy, digest), "compiled files do not count"
    with open(copy / "elasticd" / "errors.py", "a") as file:
        file.write("# damaged\n")
    assert not installation.is_copy(copy, digest)
