"""Limits of jobs with the lines of docs/systemd.md: a real systemd and kernel, in a user-mode Linux.

The machines of the other tests share this machine's kernel, and with it control groups of version 1 where it has those.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.daemon.runners.test_control_groups import boot, user_mode_linux
from tests.faults.job import REPOSITORY

UNIT = "elasticd-agent.service"
OLDEST = 254
"""The systemd that has DelegateSubgroup=."""
CONFIG = """\
node = "n1"
slots = 3
http = { port = 0 }
health = { all_reduce = false, disk_free_min = "1MB" }
limits = { job_pids = 400, job_cpu_weight = 100 }
"""
LIMITS = {"memory": 'memory = "150MB"', "pids": "pids = 60", "share": "cpu_weight = 7, pids = 1000"}
JOB = """\
id = "NAME"
command = ["/repository/tests/daemon/scripts/hungry.py", "NAME", "${local_rank}"]
workdir = "/srv/work"
workers = 1
max_restarts = 0
limits = { LIMITS }
env = { WORK = "/srv/work", PYTHONPATH = "/repository:/repository/agents" }
"""
WATCH = f"""\
#!/bin/sh
export PYTHONPATH=/repository:/repository/agents
for job in memory pids share; do
    until /repository/.venv/bin/python -m elasticd_agent submit /etc/elasticd/$job.toml; do sleep 1; done
done
until [ "$(ls /var/lib/elasticd/jobs/*/exit.json 2>/dev/null | wc -l)" = 3 ]; do sleep 1; done
for file in /var/lib/elasticd/jobs/*/exit.json; do cat $file; echo; done >/srv/exits
tail -n 1 /srv/work/*-group >/srv/groups
cat /proc/$(systemctl show -p MainPID --value {UNIT})/cgroup >/srv/agent
systemctl stop {UNIT}
systemctl show -p Result --value {UNIT} >/srv/stopped
systemctl poweroff -ff
"""


def prepare(root: Path) -> None:
    """Files of a user other than root cannot be on hostfs: the guest's agent writes to memory."""
    python = sys.base_prefix
    mounts = [f"none {python} hostfs ro,{python}", f"none /repository hostfs ro,{REPOSITORY}"]
    for path in ("/var/lib/elasticd", "/srv/work"):
        mounts.append(f"tmpfs {path} tmpfs mode=700,uid=990,gid=990")
    for mount in mounts:
        (root / mount.split()[1].lstrip("/")).mkdir(parents=True, exist_ok=True)
    for above in Path(python).parents[:-1]:
        (root / above.relative_to("/")).chmod(0o755)
    write(root / "etc/fstab", "".join(f"{mount} 0 0\n" for mount in mounts))
    write(root / "etc/passwd", (root / "etc/passwd").read_text() + "elasticd:x:990:990::/:/bin/false\n")
    write(root / "etc/group", (root / "etc/group").read_text() + "elasticd:x:990:\n")
    write(root / "etc/elasticd/agent.toml", CONFIG)
    for name, limits in LIMITS.items():
        write(root / f"etc/elasticd/{name}.toml", JOB.replace("NAME", name).replace("LIMITS", limits))
    units = root / "etc/systemd/system"
    shutil.copy(REPOSITORY / "deploy" / "systemd" / UNIT, units)
    page = (REPOSITORY / "docs" / "systemd.md").read_text()
    lines = re.search(r"## Limits of jobs.*?```ini\n(.*?)```", page, re.DOTALL)
    assert lines and "DelegateSubgroup=" in lines[1]
    write(units / f"{UNIT}.d" / "limits.conf", lines[1])
    here = (
        f"[Unit]\nRequiresMountsFor={' '.join(mount.split()[1] for mount in mounts)}\n[Service]\nExecStart=\n"
        f"ExecStart=/repository/.venv/bin/python -m elasticd_agent agent --config /etc/elasticd/agent.toml\n"
        "Environment=PYTHONPATH=/repository:/repository/agents\nTimeoutStartSec=200s\nWatchdogSec=120s\n"
    )
    write(units / f"{UNIT}.d" / "slow.conf", here)
    write(units / "watch.service", f"[Unit]\nAfter={UNIT}\n[Service]\nExecStart=/bin/sh /watch\n")
    write(root / "watch", WATCH)
    for unit in (UNIT, "watch.service"):
        wanted = units / "multi-user.target.wants" / unit
        wanted.parent.mkdir(exist_ok=True)
        wanted.symlink_to(f"/etc/systemd/system/{unit}")


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


@pytest.mark.timeout(600)
def test_limits_hold_with_the_lines_of_the_page(rootfs: Path, tmp_path: Path) -> None:
    if not (program := user_mode_linux()) or not Path(sys.executable).is_relative_to(REPOSITORY):
        pytest.skip("no user-mode Linux, or another environment than .venv")
    version = subprocess.run(
        ["systemctl", "--version"], capture_output=True, text=True, preexec_fn=lambda: os.chroot(rootfs)
    )
    if int(version.stdout.split()[1]) < OLDEST:
        pytest.skip(f"systemd {version.stdout.split()[1]} has no DelegateSubgroup=: set ELASTICD_TEST_DEBIAN=trixie")
    root = tmp_path / "root"
    subprocess.run(["cp", "-a", str(rootfs), str(root)], check=True)
    prepare(root)
    init = ["init=/lib/systemd/systemd", "systemd.show_status=0"]
    wrote = boot(program, tmp_path, 550, f"rootflags={root}", "rw", *init)
    assert (root / "srv" / "stopped").exists(), wrote
    exits = {one["job"]: one for one in map(json.loads, (root / "srv" / "exits").read_text().splitlines())}
    assert "was killed by SIGKILL" in exits["memory"]["reason"]
    assert "can't start new thread" in exits["pids"]["reason"]
    assert exits["share"]["outcome"] == "succeeded"
    groups = (root / "srv" / "groups").read_text()
    assert {"job.memory.1 100", "job.pids.2 100", "job.share.3 7"} <= set(groups.splitlines())
    assert (root / "srv" / "agent").read_text().endswith(f"{UNIT}/agent\n")
    assert (root / "srv" / "stopped").read_text() == "success\n"
