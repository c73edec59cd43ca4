"""Process 1 of a user-mode Linux: an agent in a delegated group of cgroup v2, with three jobs that have limits.

    guest.py WORK        # writes WORK/result.json

The guest's files are this machine's, read-only; only WORK can be written.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import traceback
from pathlib import Path

HERE = Path(__file__).resolve()
CONTROL = Path("/sys/fs/cgroup")


def prepare(work: Path) -> None:
    def mount(kind: str, where: str, *options: str) -> None:
        done = subprocess.run(["mount", "-t", kind, *options, "none", where], capture_output=True, text=True)
        assert done.returncode == 0 or "already mounted" in done.stderr, done.stderr

    mount("hostfs", str(work), "-o", str(work))
    for kind, where in (("proc", "/proc"), ("sysfs", "/sys"), ("devtmpfs", "/dev"), ("tmpfs", "/run")):
        mount(kind, where)
    mount("cgroup2", str(CONTROL))
    Path("/dev/shm").mkdir(exist_ok=True)
    mount("tmpfs", "/dev/shm")
    subprocess.run(["ip", "link", "set", "lo", "up"], check=True)


def main(work: Path) -> dict[str, object]:
    from tests.daemon.node import COLD, AgentNode

    group = CONTROL / "elasticd.service" / "agent"  # as Delegate=yes and DelegateSubgroup=agent make it
    group.parent.mkdir()
    (CONTROL / "cgroup.subtree_control").write_text("+cpu +memory +pids")
    group.mkdir()
    (group / "cgroup.procs").write_text(str(os.getpid()))
    node = AgentNode(work / "n1", "n1", "GUEST=1", slots=3)
    node.settings["limits"] = {"job_pids": 400, "job_cpu_weight": 100}
    asked = {"memory": {"memory": "150MB"}, "pids": {"pids": 60}, "share": {"cpu_weight": 7, "pids": 1000}}
    for name, limits in asked.items():
        node.job(name, "hungry.py", name, COLD, workers=1, max_restarts=0, limits=limits)
    node.start()
    result: dict[str, object] = {}
    for number, name in enumerate(asked, 1):
        ended = node.wait_for_exit(name, number, within=200)
        taken = node.work / name
        group_file = node.work / f"{name}-group"
        result[name] = {
            "outcome": ended.outcome,
            "reason": ended.reason,
            "taken": int(taken.read_text()) if taken.exists() else 0,
            "group": group_file.read_text() if group_file.exists() else "",
            "log": node.files(name, number).runner_log.read_text()[-1500:],
        }
    result["agent"] = Path(f"/proc/{node.pid}/cgroup").read_text().strip()
    node.until(lambda: not list(group.parent.glob("job.*")), "the groups of ended jobs to be removed")
    result["exit"] = node.drain()
    return result


if __name__ == "__main__":
    work = Path(sys.argv[1])
    os.environ |= {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "HOME": str(work), "TMPDIR": str(work)}
    sys.path[:0] = [str(HERE.parents[3]), str(HERE.parents[3] / "agents")]
    try:
        prepare(work)
        found: dict[str, object] = main(work)
    except (Exception, KeyboardInterrupt):  # noqa: BLE001  the test shows it
        found = {"error": traceback.format_exc()}
    (work / "result.json").write_text(json.dumps(found))
    os.sync()
    os.execv("/sbin/poweroff", ["poweroff", "-f"])
