"""How long a group's processes may take to die."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from elasticd_agent.workers.launcher import owned_group
from elasticd_agent.workers.launcher.messages import STORE_RANK, Signal
from elasticd_agent.workers.launcher.owned_group import OwnedGroup, has_device_open, is_not_exiting
from elasticd_agent.workers.launcher.writer_process import SaveAtFault

HOLDS = "import sys; file = open(sys.argv[1]); print('ready', flush=True); sys.stdin.read()"


def test_open_device_is_found(tmp_path: Path) -> None:
    (tmp_path / "nvidia0").touch()
    command = [sys.executable, "-I", "-S", "-c", HOLDS, str(tmp_path / "nvidia0")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "ready\n"
        assert has_device_open(process.pid, (f"{tmp_path}/nvidia",))
        assert not has_device_open(process.pid, (f"{tmp_path}/kfd",))
    assert not has_device_open(process.pid)


@pytest.mark.parametrize(("holder", "seconds"), [(None, 5), (7, 30), (8, 5)])
def test_worker_with_a_device_gets_longer(monkeypatch: pytest.MonkeyPatch, holder: int | None, seconds: float) -> None:
    """Not the store, which has none: process 8."""
    monkeypatch.setattr(owned_group, "has_device_open", lambda pid: pid == holder)
    group = OwnedGroup(1, {})
    group.alive = {6: 0, 7: 1, 8: STORE_RANK}
    assert group.awaits_member_deaths(0.0)
    group.note_kill(100.0)
    assert group.awaits_member_deaths(100 + seconds)
    assert not group.awaits_member_deaths(100.1 + seconds)


def test_moment_without_a_processor_is_not_time_to_leave_or_to_save() -> None:
    group, quick = OwnedGroup(1, {}), SimpleNamespace(longest_save_s=lambda busy, lost_s: 1.0)
    group.unwinding, group.end = {6: 0}, Signal(1, 9, park_s=1.0)
    saving = SaveAtFault(socket.socket(), quick, 9, 0.0)
    group.unwound_at = group.looked_at = saving.since
    for is_late, since in ((group.is_late_at_entry, saving.since), (saving.is_late, saving.since)):
        late = [is_late(since + after_s) for after_s in (0.05, 3.0, 3.05, 3.2, 3.4, 3.6, 3.8)]
        assert late == [False] * 6 + [True]
    saving.connection.close()


def test_process_that_ends_does_not_run() -> None:
    """It has lost its memory, also while it still closes devices."""
    with subprocess.Popen(["sleep", "60"]) as process:
        assert is_not_exiting(process.pid)
        process.kill()
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        assert not is_not_exiting(process.pid)
    assert not is_not_exiting(process.pid)
