"""Copies of the code in the state directory: made once, verified, shared, removed when no process uses them."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from elasticd_agent.system import installation
from elasticd_daemon.runners import versions


def names(state: Path) -> set[str]:
    return {path.name for path in (state / "versions").iterdir()}


def test_a_copy_is_made_once_and_repaired(tmp_path: Path) -> None:
    copy = versions.ensure_copy(tmp_path)
    made = copy.stat().st_ino
    assert versions.ensure_copy(tmp_path).stat().st_ino == made
    (copy / "elasticd" / "errors.py").write_text("")
    assert versions.ensure_copy(tmp_path) == copy
    assert installation.is_copy(copy, copy.name)
    assert names(tmp_path) == {copy.name}


def test_only_unused_copies_are_removed(tmp_path: Path) -> None:
    own = versions.ensure_copy(tmp_path)
    used, unused, partial = (tmp_path / "versions" / name for name in ("used", "unused", ".partial.new"))
    for copy in (used, unused, partial):
        copy.mkdir()
    for copy in (used, unused):
        (copy / "lock").touch()
    lock = versions.lock_copy(used)
    inherited = os.dup(lock)
    os.close(lock)
    versions.remove_unused(tmp_path, own)
    assert names(tmp_path) == {own.name, "used"}
    os.close(inherited)
    versions.remove_unused(tmp_path, own)
    assert names(tmp_path) == {own.name}


def test_a_copy_that_fails_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(directory: Path) -> None:
        directory.mkdir()
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(installation, "copy_to", full)
    with pytest.raises(OSError, match="No space left"):
        versions.ensure_copy(tmp_path)
    assert names(tmp_path) == set()
