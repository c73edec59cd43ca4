"""The agent as a service: installed by install.sh, with a running job, through all events of a machine."""

from __future__ import annotations

import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.systemd.conftest import REPOSITORY
from tests.systemd.machine import Nspawn

Until = Callable[[Callable[[], object], float], object]

UNIT = "elasticd-agent.service"
INSTALL = str(REPOSITORY / "deploy" / "systemd" / "install.sh")
UNINSTALL = str(REPOSITORY / "deploy" / "systemd" / "uninstall.sh")
PYTHON = "/opt/elasticd/venv/bin/python"
WORK = "/srv/train"
CONFIG = """\
node = "machine"
slots = 2
adopt_timeout = "30s"
drain_timeout = "30s"
"""
JOB = f"""\
id = "train"
command = ["{REPOSITORY}/tests/systemd/train.py", "{WORK}"]
workdir = "{WORK}"
checkpoint_dir = "{WORK}/checkpoints"
workers = 2
env = {{ OMP_NUM_THREADS = "1" }}
"""
OLD, NEW = "0.1.0", "0.1.1"
EVERY = 20
"""Steps between the checkpoints of train.py."""


class TrainedStep(NamedTuple):
    number: int
    worker: int
    at: float


@dataclass
class AgentService:
    machine: Nspawn
    until: Until

    @property
    def agent(self) -> int:
        return int(self.machine.properties(UNIT, "MainPID")["MainPID"])

    @property
    def steps(self) -> list[TrainedStep]:
        path = self.machine.file(f"{WORK}/steps")
        whole = path.read_text().splitlines(keepends=True) if path.exists() else []
        fields = [line.split() for line in whole if line.endswith("\n")]
        return [TrainedStep(int(number), int(pid), float(at)) for number, pid, at in fields]

    @property
    def workers(self) -> set[str]:
        """All processes of the job that are not its agent's: pid, start time and command."""
        listed = self.machine.output_of(
            "sh", "-c", 'for p in /proc/[0-9]*; do read -r s 2>/dev/null <$p/stat && echo "$s"; done'
        )
        found = set()
        for line in listed.splitlines():
            pid, rest = line.split(" (", 1)
            name, fields = rest.rsplit(")", 1)
            cmdline = self.machine.file(f"/proc/{pid}/cmdline")
            command = cmdline.read_bytes() if cmdline.exists() else b""
            if int(pid) != self.agent and (b"elasticd_agent" in command or b"train.py" in command):
                found.add(f"{pid} {fields.split()[19]} {name}")
        return found

    def wait_for_steps(self, further: int = 5, within: float = 60) -> None:
        """So many steps from now on."""
        before = len(self.steps)
        try:
            self.until(lambda: len(self.steps) >= before + further, within)
        except AssertionError:
            pytest.fail(
                f"it does not train: {self.steps[-3:]}\n{self.machine.journal(UNIT)[-5000:]}\n{self.diagnostics()}"
            )

    def diagnostics(self) -> str:
        """What its runners said."""
        return self.machine.run("sh", "-c", "tail -n 40 /var/lib/elasticd/jobs/*/runner.log", check=False).stdout

    def wait_for_replacement(self, agent: int) -> None:
        self.until(lambda: self.agent not in (0, agent) and self.state == "active", 60)

    @property
    def state(self) -> str:
        return self.machine.properties(UNIT, "ActiveState")["ActiveState"]

    def signal(self, number: signal.Signals) -> None:
        self.machine.run("sh", "-c", f"kill -{number.value} {self.agent}")


@pytest.fixture(scope="session")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """This checkout as it is, and as its next version."""
    made = {}
    for version in (OLD, NEW):
        source = tmp_path_factory.mktemp(f"source-{version}")
        for name in ("pyproject.toml", "README.md", "LICENSE"):
            text = (REPOSITORY / name).read_text()
            (source / name).write_text(text.replace(f'version = "{OLD}"', f'version = "{version}"'))
        for name in ("elasticd", "agents", "docs/man"):
            shutil.copytree(REPOSITORY / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
        command = [
            sys.executable,
            "-m",
            "pip",
            "wheel",
            "--quiet",
            "--no-deps",
            "--wheel-dir",
            str(source),
            str(source),
        ]
        subprocess.run(command, check=True, timeout=120, cwd=source)
        (made[version],) = source.glob("*.whl")
    return made


def install(machine: Nspawn, wheel: Path, *more: str) -> str:
    """As an operator without a network does: what it depends on is there already."""
    there = f"/root/{wheel.name}"
    machine.file(there).write_bytes(wheel.read_bytes())
    env = ["PIP_NO_INDEX=1", "PIP_NO_DEPS=1", "PIP_DISABLE_PIP_VERSION_CHECK=1", "HOME=/root"]
    return machine.run(INSTALL, "--from", there, *more, env=env, timeout=120).stdout


@pytest.fixture(scope="module")
def installed(machine: Nspawn, wheels: dict[str, Path]) -> Nspawn:
    # Its virtual environment finds torch and the rest where this test's interpreter has them.
    machine.file("/usr/local/bin").joinpath("python3").symlink_to(sys.executable)
    machine.run("python3", "-m", "venv", "/opt/elasticd/venv", env=["HOME=/root"])
    site = Path(os.__file__).parent.name
    packages = next(path for path in sys.path if path.endswith("site-packages"))
    machine.write(f"/opt/elasticd/venv/lib/{site}/site-packages/machine.pth", f"{packages}\n")
    # The venv's own would hide the version that requirements.txt asks for.
    machine.run("/opt/elasticd/venv/bin/pip", "uninstall", "--quiet", "--yes", "setuptools", env=["HOME=/root"])
    install(machine, wheels[OLD], "--no-start")
    return machine


def submit(machine: Nspawn, job: str) -> None:
    machine.write("/root/job.toml", job)
    machine.run("/opt/elasticd/venv/bin/elasticd", "submit", "/root/job.toml")


@pytest.fixture
def service(installed: Nspawn, wheels: dict[str, Path], until: Until) -> Iterator[AgentService]:
    """Started, with a job that trains and has saved a checkpoint."""
    installed.run("install", "-d", "-o", "elasticd", "-g", "elasticd", WORK)
    installed.write("/etc/elasticd/agent.toml", CONFIG, 0o640)
    installed.run("chown", "root:elasticd", "/etc/elasticd/agent.toml")
    installed.run("systemctl", "start", UNIT)
    submit(installed, JOB)
    made = AgentService(installed, until)
    made.wait_for_steps(EVERY + 5, within=120)
    yield made
    installed.run("systemctl", "stop", UNIT, check=False, timeout=120)
    result = installed.properties(UNIT, "Result")
    installed.run("systemctl", "reset-failed", UNIT, check=False)
    installed.run("sh", "-c", f"rm -rf {WORK} /var/lib/elasticd/* /etc/systemd/system/{UNIT}.d")
    installed.run("systemctl", "daemon-reload")
    assert result == {"Result": "success"}, f"after all this it did not drain:\n{installed.journal(UNIT)[-6000:]}"


def slowest(steps: list[TrainedStep]) -> float:
    return max(after.at - before.at for before, after in itertools.pairwise(steps))


def undisturbed(steps: list[TrainedStep], since: int) -> bool:
    """No step took twice as long as the slowest before. One of 50 ms may take half a second on a machine that works."""
    return slowest(steps[since - 5 :]) <= max(0.5, 2 * slowest(steps[5:since]))


def lost(steps: list[TrainedStep]) -> list[tuple[int, int]]:
    """Where the numbers do not follow each other: steps that were trained twice, or not at all."""
    return [(a.number, b.number) for a, b in itertools.pairwise(steps) if b.number != a.number + 1]


def test_installation(service: AgentService) -> None:
    machine = service.machine
    version = int(machine.output_of("systemctl", "--version").split()[1])
    assert machine.properties(UNIT, "User", "Type", "UnitFileState", "SubState") == {
        "User": "elasticd",
        "Type": "notify" if version < 253 else "notify-reload",
        "UnitFileState": "enabled",
        "SubState": "running",
    }
    modes = machine.output_of("stat", "-c", "%n %U:%G %a", "/etc/elasticd", "/var/lib/elasticd", "/run/elasticd")
    assert modes.splitlines() == [
        "/etc/elasticd root:elasticd 750",
        "/var/lib/elasticd elasticd:elasticd 700",
        "/run/elasticd elasticd:elasticd 755",
    ]
    owners = machine.output_of("find", f"{WORK}/checkpoints", "-mindepth", "1", "-printf", "%u %m\\n").splitlines()
    assert owners
    assert {owner.split()[0] for owner in owners} == {"elasticd"}
    assert machine.properties(UNIT, "StatusText") == {"StatusText": "node machine"}
    assert f"elasticd {OLD}" in machine.journal(UNIT)
    # What systemd may do there depends on the machine below; what it was told to do does not.
    assert machine.properties(UNIT, "OOMScoreAdjust") == {"OOMScoreAdjust": "-500"}
    assert machine.output_of("cat", f"/proc/{service.steps[-1].worker}/oom_score_adj") == "0"


def test_killed_agent(service: AgentService) -> None:
    agent, before, since = service.agent, service.workers, len(service.steps)
    assert before
    service.signal(signal.SIGKILL)
    service.wait_for_replacement(agent)
    service.wait_for_steps(40)
    assert service.workers == before
    assert lost(service.steps) == []
    assert undisturbed(service.steps, since)


def test_stopped_agent_is_restarted_by_the_watchdog(service: AgentService) -> None:
    service.machine.write(f"/etc/systemd/system/{UNIT}.d/quick.conf", "[Service]\nWatchdogSec=3s\n")
    service.machine.run("systemctl", "daemon-reload")
    service.machine.run("systemctl", "kill", "--kill-who=main", "--signal=KILL", UNIT)
    service.until(lambda: service.state == "active", 30)
    agent, before = service.agent, service.workers
    service.wait_for_steps(100)
    assert service.agent == agent, "a healthy agent feeds its watchdog"
    service.signal(signal.SIGSTOP)
    service.wait_for_replacement(agent)
    service.wait_for_steps(20)
    assert "Watchdog timeout" in service.machine.journal(UNIT)
    assert "Fatal Python error: Aborted" in service.machine.journal(UNIT), "its stacks say what it hung in"
    assert service.workers == before
    assert lost(service.steps) == []


def test_upgrade(service: AgentService, wheels: dict[str, Path]) -> None:
    agent, before, since = service.agent, service.workers, len(service.steps)
    restarts = service.machine.properties(UNIT, "NRestarts")
    said = install(service.machine, wheels[NEW])
    assert f"elasticd {NEW}" in said
    service.until(lambda: f"elasticd {NEW}, pid {agent}: " in service.machine.journal(UNIT), 60)
    service.wait_for_steps(40)
    assert service.agent == agent
    assert service.machine.properties(UNIT, "NRestarts") == restarts
    assert service.workers == before
    assert lost(service.steps) == []
    assert undisturbed(service.steps, since)
    # What is started from now on is the new one, too.
    service.machine.run("systemctl", "restart", UNIT, timeout=120)
    service.wait_for_steps()
    assert lost(service.steps) == []
    install(service.machine, wheels[OLD])


def test_submission_through_the_socket(service: AgentService) -> None:
    machine = service.machine
    submit(machine, JOB.replace('"train"', '"second"'))
    elasticd = "/opt/elasticd/venv/bin/elasticd"
    jobs = {one["job"]: one for one in json.loads(machine.output_of(elasticd, "jobs", "--json"))["jobs"]}
    assert (jobs["train"]["state"], jobs["second"]["state"]) == ("running", "pending")
    stranger = machine.run(
        "setpriv", "--reuid=nobody", "--regid=nogroup", "--clear-groups", elasticd, "jobs", check=False
    )
    assert stranger.returncode == 1
    assert len(stranger.stderr.splitlines()) == 1
    before = len(service.steps)
    machine.run(elasticd, "cancel", "train")
    runs = "second"
    service.until(lambda: "running" in machine.output_of(elasticd, "status", runs), 60)
    service.until(lambda: len(service.steps) > before + 5, 60)


def test_reload(service: AgentService) -> None:
    before = service.workers
    service.machine.write(
        "/etc/elasticd/agent.toml", 'drain_timeout = "20s"\n' + CONFIG.replace('drain_timeout = "30s"\n', "")
    )
    service.machine.run("systemctl", "reload", UNIT)
    service.until(lambda: "drain_timeout" in service.machine.journal(UNIT), 20)
    service.machine.write("/etc/elasticd/agent.toml", "slot = 2\n")
    service.machine.run("systemctl", "reload", UNIT)
    service.until(lambda: "the configuration was not reloaded" in service.machine.journal(UNIT), 20)
    service.wait_for_steps()
    assert service.workers == before


def test_agent_of_root_runs_jobs_as_their_users(service: AgentService) -> None:
    """With the lines that docs/systemd.md gives."""
    machine = service.machine
    machine.run("systemctl", "stop", UNIT, timeout=120)
    machine.run("sh", "-c", f"rm -rf {WORK}/* /var/lib/elasticd/*; useradd alice")
    machine.run("chown", "-R", "alice:", WORK)
    drop_in = "[Service]\nUser=\nCapabilityBoundingSet=~\nStateDirectoryMode=0711\n"
    machine.write(f"/etc/systemd/system/{UNIT}.d/root.conf", drop_in)
    machine.run("systemctl", "daemon-reload")
    machine.run("systemctl", "start", UNIT)
    submit(machine, JOB.replace('id = "train"', 'id = "hers"\nuser = "alice"'))
    service.wait_for_steps(within=120)
    status = dict(
        line.split(":\t", 1)
        for line in machine.output_of("cat", f"/proc/{service.steps[-1].worker}/status").splitlines()
        if ":\t" in line
    )
    assert set(status["Uid"].split()) == {machine.output_of("id", "-u", "alice")}
    assert int(status["CapEff"], 16) == 0
    assert status["NoNewPrivs"] == "1"
    owners = machine.output_of("stat", "-c", "%U %a", "/var/lib/elasticd").split()
    assert owners[0] == "root"


def test_stop_drains(service: AgentService) -> None:
    service.machine.run("systemctl", "stop", UNIT, timeout=100)
    assert service.state == "inactive"
    assert service.workers == set()
    assert "kills the processes left" not in service.machine.journal(UNIT)
    service.machine.run("systemctl", "start", UNIT)
    service.wait_for_steps()
    assert lost(service.steps) == [], "a drain loses nothing"
    assert len({step.worker for step in service.steps}) == 2


def test_reboot_drains_and_resumes(service: AgentService) -> None:
    service.machine.reboot()
    service.wait_for_steps()
    assert lost(service.steps) == []


def test_power_cut_costs_the_steps_after_the_checkpoint(service: AgentService) -> None:
    service.machine.lose_power()
    service.machine.boot()
    last = service.steps[-1].number
    service.wait_for_steps()
    ((before, after),) = lost(service.steps)
    assert before == last
    assert after % EVERY == 1
    assert before - after < 2 * EVERY


def test_uninstallation(service: AgentService, wheels: dict[str, Path]) -> None:
    machine = service.machine
    machine.run(UNINSTALL)
    assert service.workers == set()
    assert machine.run("systemctl", "cat", UNIT, check=False).returncode != 0
    assert not machine.file("/opt/elasticd/libexec").exists()
    assert machine.file("/etc/elasticd/agent.toml").exists()
    assert machine.file("/var/lib/elasticd").exists()
    machine.run(UNINSTALL, "--purge")
    assert not machine.file("/etc/elasticd").exists()
    assert machine.run("id", "elasticd", check=False).returncode != 0
