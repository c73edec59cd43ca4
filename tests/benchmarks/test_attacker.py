"""benchmarks/attacker.py finds what is open: it would report no breach where it sees nothing."""

from __future__ import annotations

import os
import pwd
from pathlib import Path

import pytest

from benchmarks.attacker import Attacker
from benchmarks.daemon_checker import _whole

SOMEBODY = pwd.getpwnam("nobody")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root has files of other users")
def test_open_doors_are_found(tmp_path: Path) -> None:
    """Nothing keeps root out, so every attempt on another user's files works."""
    node = tmp_path / "nodes" / "n1"
    (node / "state" / "jobs").mkdir(parents=True)
    (node / "run").mkdir()
    token = tmp_path / "token"
    token.write_text("word")
    for path in (token, node / "state", node / "state" / "jobs", node / "run"):
        os.chown(path, SOMEBODY.pw_uid, SOMEBODY.pw_gid)
    attacker = Attacker(tmp_path, [node], [], 1, token, tmp_path / "canary", "j1")
    attacker.read_files()
    attacker.change_files()
    worked = {(line["what"], Path(line["on"].rpartition(" ")[2]).name) for line in _whole(tmp_path / "attacks.jsonl")}
    assert {("read file", "token"), ("read file", "jobs"), ("change file", "state"), ("change file", "run")} <= worked
