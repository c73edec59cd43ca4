"""Names in records become paths and keys; whoever may write to the store chooses them."""

from __future__ import annotations

import os
import pwd
from pathlib import Path

import pytest

from elasticd.errors import UsageError, WireError
from elasticd_agent.model.keys import decode_record
from elasticd_daemon.keys import CORDONS, NODES, PLACEMENTS, RESULTS, SUBMISSIONS
from elasticd_daemon.records import Cordon, JobResult, NodeStatus, Placement, Submission
from elasticd_daemon.runners.manager import RunnerManager
from elasticd_daemon.runners.spawn import Account
from elasticd_daemon.runners.spec import RunnerSpec

RECORDS = [
    (SUBMISSIONS, lambda name: Submission(name, 1, "{}", 1, 2, 1, 4)),
    (PLACEMENTS, lambda name: Placement(name, 1, (), "why")),
    (RESULTS, lambda name: JobResult(name, 1, "failed", 1, "why")),
    (NODES, lambda name: NodeStatus(name, "i1", 1)),
    (CORDONS, lambda name: Cordon(name, False, "why")),
]


@pytest.mark.parametrize(("prefix", "make"), RECORDS, ids=[prefix for prefix, _ in RECORDS])
@pytest.mark.parametrize("name", ["../../../etc", "/etc", "", ".", "a/b", "a\n", "x" * 129])
def test_record_with_a_bad_name_is_left_alone(prefix: str, make, name: str) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(WireError, match="is left alone"):
        decode_record(type(make("a")), prefix + name, make(name).to_json())


@pytest.mark.parametrize(("prefix", "make"), RECORDS, ids=[prefix for prefix, _ in RECORDS])
def test_record_under_another_name_is_left_alone(prefix: str, make) -> None:  # type: ignore[no-untyped-def]
    assert decode_record(type(make("a")), prefix + "a", make("a").to_json()) == make("a")
    with pytest.raises(WireError, match=r"it is of another (job|node), 'a'"):
        decode_record(type(make("a")), prefix + "b", make("a").to_json())


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may give a folder to somebody else")
def test_folder_of_another_user_or_a_link_is_not_given_away(tmp_path: Path) -> None:
    nobody = Account.of("nobody")
    spec, other = RunnerSpec("one", 1, "n1", (0,), "{}"), tmp_path / "other"
    other.mkdir()
    (tmp_path / "jobs").mkdir()
    manager = RunnerManager(tmp_path, lambda: None, lambda line: None)
    try:
        (tmp_path / "jobs" / "one.1").symlink_to(other)
        with pytest.raises(OSError, match=r"Not a directory|Too many levels"):
            manager.refuse(spec, nobody, "why")
        assert other.stat().st_uid == 0
        (tmp_path / "jobs" / "one.1").unlink()
        (tmp_path / "jobs" / "one.1").mkdir()
        daemon = pwd.getpwnam("daemon").pw_uid
        os.chown(tmp_path / "jobs" / "one.1", daemon, -1)
        with pytest.raises(UsageError, match="belongs to another user"):
            manager.refuse(spec, nobody, "why")
        assert (tmp_path / "jobs" / "one.1").stat().st_uid == daemon
    finally:
        manager.close()
