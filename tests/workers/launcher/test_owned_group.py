"""How long a group's processes may take to die."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from elasticd_agent.workers.launcher import owned_group
from elasticd_agent.workers.launcher.messages import STORE_RANK
from elasticd_agent.workers.launcher.owned_group import OwnedGroup, has_device_open

HOLDS = "import sys; file = open(sys.argv[1]); print('ready', flush=True); sys.stdin.read()"


def test_open_device_is_found(tmp_path: Path) -> None:
    (tmp_path / "nvidia0").touch()
    command = [sys.executable, "-I", "-S", "-c", HOLDS, str(tmp_path / "nvidia0")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
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
    assert group.members_may_die(0.0)
    group.begin_kill(100.0)
    assert group.members_may_die(100 + seconds)
    assert not group.members_may_die(100.1 + seconds)
