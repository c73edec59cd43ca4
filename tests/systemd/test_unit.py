"""The unit under a real systemd, with an agent that misbehaves: when runners stay, and when no process stays.

The agent is standin/agent.py, which a drop-in starts instead of the real one. How that one is killed, hangs, stops and
is upgraded is in test_agent.py.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pytest

from tests.systemd.conftest import REPOSITORY
from tests.systemd.machine import Nspawn

Until = Callable[[Callable[[], object], float], object]

UNIT = "elasticd-agent.service"
STATE = "/var/lib/elasticd"
STANDIN = f"{REPOSITORY}/tests/systemd/standin/agent.py"
DROP_IN = f"""\
[Service]
Environment=PYTHONPATH={REPOSITORY}:{REPOSITORY}/agents PYTHONDONTWRITEBYTECODE=1
ExecStart=
ExecStart={sys.executable} {STANDIN} {STATE}
WatchdogSec=2s
TimeoutStartSec=4s
TimeoutStopSec=2s
TimeoutAbortSec=2s
RestartSec=200ms
"""


@dataclass
class UnitService:
    machine: Nspawn
    until: Until

    def command(self, name: str) -> None:
        self.machine.write(f"{STATE}/{name}", "")

    @property
    def agent(self) -> int:
        return int(self.machine.properties(UNIT, "MainPID")["MainPID"])

    @property
    def runner(self) -> int:
        return int(self.machine.file(f"{STATE}/runner").read_text())

    @property
    def received(self) -> list[str]:
        path = self.machine.file(f"{STATE}/heard")
        return path.read_text().split() if path.exists() else []

    def is_alive(self, pid: int) -> bool:
        return (
            self.machine.file(f"/proc/{pid}").exists() and "Z" not in self.machine.file(f"/proc/{pid}/stat").read_text()
        )

    def active(self) -> str:
        return self.machine.properties(UNIT, "ActiveState")["ActiveState"]

    def signal(self, number: signal.Signals) -> None:
        self.machine.run("sh", "-c", f"kill -{number.value} {self.agent}")

    def wait_for_replacement(self, agent: int) -> object:
        return self.until(lambda: self.agent not in (0, agent) and self.active() == "active", 20)


@pytest.fixture(scope="module")
def installed(machine: Nspawn) -> Nspawn:
    """For an interpreter that has elasticd already, and where somebody wants it."""
    install = str(REPOSITORY / "deploy" / "systemd" / "install.sh")
    for _ in range(2):
        machine.run(install, "--python", sys.executable, "--prefix", "/srv/elasticd", "--no-start")
    unit = machine.output_of("cat", f"/etc/systemd/system/{UNIT}")
    assert f"ExecStart={sys.executable} -m elasticd_agent agent" in unit
    assert "/opt/elasticd" not in unit
    machine.write(f"/etc/systemd/system/{UNIT}.d/standin.conf", DROP_IN)
    machine.run("systemctl", "daemon-reload")
    return machine


@pytest.fixture
def service(installed: Nspawn, until: Until) -> Iterator[UnitService]:
    installed.run("systemctl", "start", UNIT)
    made = UnitService(installed, until)
    assert made.is_alive(made.runner)
    yield made
    installed.run("systemctl", "kill", "--kill-who=all", "--signal=KILL", UNIT, check=False)
    installed.run("systemctl", "stop", UNIT, check=False)
    installed.run("systemctl", "reset-failed", UNIT, check=False)
    installed.run("sh", "-c", f"rm -rf {STATE}/*")


def test_install_checks_the_settings_of_the_environment_file_too(installed: Nspawn) -> None:
    """They need not be in agent.toml; an upgrade was refused for the lack of them."""
    right = installed.output_of("cat", "/etc/elasticd/agent.toml")
    installed.write("/etc/elasticd/agent.toml", '[store]\nbackend = "etcd"\n')
    installed.write("/etc/elasticd/agent.env", 'ELASTICD_STORE_ENDPOINTS="http://10.0.0.1:2379"\n')
    install = str(REPOSITORY / "deploy" / "systemd" / "install.sh")
    installed.run(install, "--python", sys.executable, "--prefix", "/srv/elasticd", "--no-start")
    installed.write("/etc/elasticd/agent.toml", right)
    installed.run("rm", "/etc/elasticd/agent.env")


def test_stop_timeout_leaves_no_process(service: UnitService) -> None:
    runner = service.runner
    service.command("stubborn")
    service.machine.run("systemctl", "stop", UNIT)
    assert service.received == ["SIGTERM"]
    assert not service.is_alive(runner)
    assert "kills the processes left after the stop (timeout): python" in service.machine.journal(UNIT)


def test_agent_killed_during_a_stop_leaves_no_process(service: UnitService) -> None:
    agent, runner = service.agent, service.runner
    service.command("stubborn")
    service.machine.run("systemctl", "--no-block", "stop", UNIT)
    service.until(lambda: service.received, 10)
    service.machine.run("sh", "-c", f"kill -9 {agent}")
    service.until(lambda: service.active() in ("inactive", "failed"), 10)
    assert not service.is_alive(runner)


def test_restart_leaves_no_process(service: UnitService) -> None:
    agent, runner = service.agent, service.runner
    service.command("stubborn")
    service.machine.run("systemctl", "restart", UNIT)
    service.wait_for_replacement(agent)
    assert not service.is_alive(runner)
    assert service.is_alive(service.runner)


def test_failed_start_ends_no_runner(service: UnitService) -> None:
    runner = service.runner
    service.command("mute")
    service.signal(signal.SIGKILL)
    service.until(lambda: "start operation timed out" in service.machine.journal(UNIT), 20)
    assert service.is_alive(runner)
    assert service.received == [], "SIGTERM would have drained"


def test_wrong_configuration_is_not_retried(service: UnitService) -> None:
    runner = service.runner
    service.command("refuses")
    service.signal(signal.SIGKILL)
    service.until(lambda: service.active() == "failed", 20)
    assert service.machine.properties(UNIT, "ExecMainStatus") == {"ExecMainStatus": "2"}
    assert service.is_alive(runner), "it leaves by itself when nobody speaks to it for adopt_timeout"
