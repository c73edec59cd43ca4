"""sd_notify: the datagrams that systemd receives."""

from __future__ import annotations

import os
import queue
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from elasticd_daemon import agent
from elasticd_daemon.sd_notify import Notifier, take_notifier


class SystemdSocket:
    """The service manager's end."""

    def __init__(self, address: str) -> None:
        self.address = address
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.settimeout(30)
        self._socket.bind("\0" + address[1:] if address.startswith("@") else address)

    def receive(self) -> list[str]:
        return self._socket.recv(4096).decode().split("\n")

    def is_empty(self) -> bool:
        self._socket.setblocking(False)
        try:
            return not self._socket.recv(4096)
        except BlockingIOError:
            return True
        finally:
            self._socket.settimeout(30)

    def close(self) -> None:
        self._socket.close()


@pytest.fixture(params=["path", "abstract"])
def systemd(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[SystemdSocket]:
    made = SystemdSocket(str(tmp_path / "notify") if request.param == "path" else f"@elasticd-test-{os.getpid()}")
    yield made
    made.close()


def test_datagrams(systemd: SystemdSocket) -> None:
    environ = {"NOTIFY_SOCKET": systemd.address, "PATH": "/bin"}
    notifier = take_notifier(environ)
    assert notifier.ready("2 jobs run")
    assert systemd.receive() == ["READY=1", "STATUS=2 jobs run"]
    assert notifier.stopping(90.5, "drains")
    assert systemd.receive() == ["STOPPING=1", "EXTEND_TIMEOUT_USEC=90500000", "STATUS=drains"]
    assert not notifier.feed(), "there is no watchdog"
    assert systemd.is_empty()


def test_reloading_has_the_time(systemd: SystemdSocket) -> None:
    notifier = Notifier(systemd.address, clock_ns=lambda: 12_345_678)
    assert notifier.reloading()
    assert systemd.receive() == ["RELOADING=1", "MONOTONIC_USEC=12345"]


def test_newline_in_a_status_starts_no_message(systemd: SystemdSocket) -> None:
    take_notifier({"NOTIFY_SOCKET": systemd.address}).ready("job a\nMAINPID=1\r\n ends")
    assert systemd.receive() == ["READY=1", "STATUS=job a MAINPID=1 ends"]


def test_four_feeds_for_each_watchdog_period(systemd: SystemdSocket) -> None:
    now = [0]
    notifier = Notifier(systemd.address, watchdog_s=2.0, clock_ns=lambda: now[0])
    fed = []
    for now[0] in range(0, 2_000_000_000, 100_000_000):
        if notifier.feed():
            fed.append(now[0] // 1_000_000)
            assert systemd.receive() == ["WATCHDOG=1"]
    assert fed == [0, 500, 1000, 1500]
    assert systemd.is_empty()


@pytest.mark.parametrize(
    ("variables", "watchdog_s"),
    [
        ({"WATCHDOG_USEC": "30000000", "WATCHDOG_PID": "7"}, 30.0),
        ({"WATCHDOG_USEC": "30000000"}, 30.0),
        ({"WATCHDOG_USEC": "30000000", "WATCHDOG_PID": "8"}, None),
        ({"WATCHDOG_USEC": "0", "WATCHDOG_PID": "7"}, None),
        ({"WATCHDOG_USEC": "soon", "WATCHDOG_PID": "7"}, None),
        ({"WATCHDOG_PID": "7"}, None),
    ],
)
def test_watchdog_variables(variables: dict[str, str], watchdog_s: float | None) -> None:
    assert take_notifier({"NOTIFY_SOCKET": "/nowhere", **variables}, pid=7).watchdog_s == watchdog_s


@pytest.mark.parametrize("address", [None, "", "@", "relative", "vsock:2:1234"])
def test_without_a_service_manager(address: str | None) -> None:
    environ = {} if address is None else {"NOTIFY_SOCKET": address}
    notifier = take_notifier(environ)
    assert not environ
    assert not any((notifier.ready(), notifier.feed(), notifier.reloading(), notifier.stopping(1)))


def test_missing_socket_is_no_error(tmp_path: Path) -> None:
    notifier = take_notifier({"NOTIFY_SOCKET": str(tmp_path / "gone"), "WATCHDOG_USEC": "1000000"})
    assert not notifier.ready()
    assert not notifier.feed()


def test_full_socket_does_not_block(systemd: SystemdSocket) -> None:
    now = [0]
    notifier = Notifier(systemd.address, watchdog_s=0.001, clock_ns=lambda: now[0])
    for now[0] in range(0, 2_000_000_000, 1_000_000):
        if not notifier.feed():
            break
    else:
        pytest.fail("the socket never filled up")
    assert systemd.receive() == ["WATCHDOG=1"]
    assert notifier.feed(), "an unsent keep-alive is sent at the next turn"


def test_children_do_not_inherit_the_variables(systemd: SystemdSocket) -> None:
    environ = {**os.environ, "NOTIFY_SOCKET": systemd.address, "WATCHDOG_USEC": "1000000", "WATCHDOG_PID": "7"}
    notifier = take_notifier(environ, pid=7)
    asks = "import os; print([name for name in os.environ if 'NOTIFY' in name or 'WATCHDOG' in name])"
    child = subprocess.run([sys.executable, "-Ic", asks], env=environ, capture_output=True, text=True, timeout=30)
    assert child.stdout == "[]\n"
    # A process that replaces itself passes them on, and its replacement notifies as the same process.
    assert take_notifier({**environ, **notifier.inherited}, pid=7).ready()
    assert dict(notifier.inherited) == {
        "NOTIFY_SOCKET": systemd.address,
        "WATCHDOG_USEC": "1000000",
        "WATCHDOG_PID": "7",
    }


def test_replacement_has_the_watchdogs_whole_time(systemd: SystemdSocket, monkeypatch: pytest.MonkeyPatch) -> None:
    notifier = take_notifier({"NOTIFY_SOCKET": systemd.address, "WATCHDOG_USEC": "30000000"})
    executed: list[object] = []
    monkeypatch.setattr(os, "execve", lambda *how: executed.append(how))
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    try:
        agent.exec_replacement(notifier, queue.SimpleQueue())
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    assert executed
    assert not systemd.is_empty()
