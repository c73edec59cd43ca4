"""The unit under a real systemd, with an agent that behaves as it is told: when runners stay, and when nothing stays.

The agent is standin/agent.py, which a drop-in starts instead of the real one; test_agent.py is about that one.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pytest

from tests.systemd.conftest import REPOSITORY
from tests.systemd.machine import Machine

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
class Service:
    machine: Machine
    until: Until

    def tell(self, name: str) -> None:
        self.machine.write(f"{STATE}/{name}", "")

    @property
    def agent(self) -> int:
        return int(self.machine.shows(UNIT, "MainPID")["MainPID"])

    @property
    def runner(self) -> int:
        return int(self.machine.file(f"{STATE}/runner").read_text())

    @property
    def heard(self) -> list[str]:
        path = self.machine.file(f"{STATE}/heard")
        return path.read_text().split() if path.exists() else []

    def lives(self, pid: int) -> bool:
        return (
            self.machine.file(f"/proc/{pid}").exists() and "Z" not in self.machine.file(f"/proc/{pid}/stat").read_text()
        )

    def active(self) -> str:
        return self.machine.shows(UNIT, "ActiveState")["ActiveState"]

    def signal(self, number: signal.Signals) -> None:
        self.machine.run("sh", "-c", f"kill -{number.value} {self.agent}")

    def replaced(self, agent: int) -> object:
        return self.until(lambda: self.agent not in (0, agent) and self.active() == "active", 20)


@pytest.fixture(scope="module")
def installed(machine: Machine) -> Machine:
    """For an interpreter that has elasticd already, and where somebody wants it."""
    install = str(REPOSITORY / "deploy" / "systemd" / "install.sh")
    for _ in range(2):
        machine.run(install, "--python", sys.executable, "--prefix", "/srv/elasticd", "--no-start")
    unit = machine.says("cat", f"/etc/systemd/system/{UNIT}")
    assert f"ExecStart={sys.executable} -m elasticd_agent agent" in unit
    assert "/opt/elasticd" not in unit
    machine.write(f"/etc/systemd/system/{UNIT}.d/standin.conf", DROP_IN)
    machine.run("systemctl", "daemon-reload")
    return machine


@pytest.fixture
def service(installed: Machine, until: Until) -> Iterator[Service]:
    installed.run("systemctl", "start", UNIT)
    made = Service(installed, until)
    assert made.lives(made.runner)
    yield made
    installed.run("systemctl", "kill", "--kill-who=all", "--signal=KILL", UNIT, check=False)
    installed.run("systemctl", "stop", UNIT, check=False)
    installed.run("systemctl", "reset-failed", UNIT, check=False)
    installed.run("sh", "-c", f"rm -rf {STATE}/*")


def test_a_killed_agent_is_back_and_its_runner_never_noticed(service: Service) -> None:
    agent, runner = service.agent, service.runner
    for _ in range(3):
        agent = service.agent
        service.signal(signal.SIGKILL)
        service.replaced(agent)
    assert service.runner == runner
    assert service.lives(runner)
    assert service.heard == []


def test_an_agent_that_does_not_decide_any_more_is_replaced(service: Service) -> None:
    agent, runner = service.agent, service.runner
    service.signal(signal.SIGSTOP)
    service.replaced(agent)
    assert "Watchdog timeout" in service.machine.journal(UNIT)
    assert service.runner == runner
    assert service.lives(runner)
    assert service.heard == [], "the watchdog's signal is none that would drain"


def test_a_stop_leaves_nothing(service: Service) -> None:
    runner = service.runner
    service.machine.run("systemctl", "stop", UNIT)
    assert service.active() == "inactive"
    assert service.heard == ["SIGTERM"]
    assert not service.lives(runner)


def test_a_stop_leaves_nothing_when_the_agent_takes_too_long(service: Service) -> None:
    runner = service.runner
    service.tell("stubborn")
    service.machine.run("systemctl", "stop", UNIT)
    assert service.heard == ["SIGTERM"]
    assert not service.lives(runner)
    assert "ends what is left after the stop (timeout): python" in service.machine.journal(UNIT)


def test_a_stop_leaves_nothing_when_the_agent_dies_over_it(service: Service) -> None:
    agent, runner = service.agent, service.runner
    service.tell("stubborn")
    service.machine.run("systemctl", "--no-block", "stop", UNIT)
    service.until(lambda: service.heard, 10)
    service.machine.run("sh", "-c", f"kill -9 {agent}")
    service.until(lambda: service.active() in ("inactive", "failed"), 10)
    assert not service.lives(runner)


def test_a_restart_leaves_nothing_either(service: Service) -> None:
    agent, runner = service.agent, service.runner
    service.tell("stubborn")
    service.machine.run("systemctl", "restart", UNIT)
    service.replaced(agent)
    assert not service.lives(runner)
    assert service.lives(service.runner)


def test_an_agent_that_does_not_come_up_costs_no_runner(service: Service) -> None:
    runner = service.runner
    service.tell("mute")
    service.signal(signal.SIGKILL)
    service.until(lambda: "start operation timed out" in service.machine.journal(UNIT), 20)
    assert service.lives(runner)
    assert service.heard == [], "SIGTERM would have drained"


def test_a_wrong_configuration_is_not_tried_again(service: Service) -> None:
    runner = service.runner
    service.tell("refuses")
    service.signal(signal.SIGKILL)
    service.until(lambda: service.active() == "failed", 20)
    assert service.machine.shows(UNIT, "ExecMainStatus") == {"ExecMainStatus": "2"}
    assert service.lives(runner), "it leaves by itself when nobody speaks to it for adopt_timeout"


def test_an_upgrade_is_no_restart(service: Service) -> None:
    agent, runner = service.agent, service.runner
    started = service.machine.shows(UNIT, "NRestarts", "ExecMainStartTimestampMonotonic")
    service.signal(signal.SIGUSR2)
    service.until(lambda: service.heard == ["SIGUSR2"], 10)
    service.signal(signal.SIGHUP)
    service.until(lambda: service.heard == ["SIGUSR2", "SIGHUP"], 10)
    # Longer than the watchdog's time: the successor feeds it.
    deadline = float(service.machine.says("cut", "-d ", "-f1", "/proc/uptime")) + 3
    service.until(lambda: float(service.machine.says("cut", "-d ", "-f1", "/proc/uptime")) > deadline, 10)
    assert service.agent == agent
    assert service.runner == runner
    assert service.lives(runner)
    assert service.machine.shows(UNIT, "NRestarts", "ExecMainStartTimestampMonotonic") == started
