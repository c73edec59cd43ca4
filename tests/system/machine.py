"""A small Debian on which a real systemd boots, as a test's own machine: `with Machine(...) as machine`.

It is a container (systemd-nspawn) with its own processes, mounts, users and a network of loopback alone. Its files are
the tree that make-rootfs made, unchanged, under a layer that belongs to the test: what the test does there outlasts a
reboot and goes with the test. Folders of this machine are seen there under their own names, read-only.
"""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType

_BOOT_S = 60.0
_OFF_S = 120.0
UP = ("running", "degraded")


class Machine:
    def __init__(self, tree: Path, layer: Path, *, shows: Sequence[Path] = (), shares: Sequence[tuple[Path, str]] = ()):
        """`shows`: folders seen there read-only under their own names; `shares`: (here, there), writable."""
        self._tree, self._layer = tree, layer
        self._shows, self._shares = shows, shares
        self._nspawn: subprocess.Popen[bytes] | None = None
        self._leader = 0

    def __enter__(self) -> Machine:
        self.boot()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.lose_power()

    @property
    def console(self) -> str:
        return (self._layer / "console").read_text(errors="replace")

    def boot(self) -> None:
        assert self._nspawn is None, "it is on already"
        for name in ("up", "work", "root"):
            (self._layer / name).mkdir(parents=True, exist_ok=True)
        root = self._layer / "root"
        overlay = f"lowerdir={self._tree},upperdir={self._layer / 'up'},workdir={self._layer / 'work'}"
        binds = [f"--bind-ro={shown}" for shown in self._shows] + [f"--bind={a}:{b}" for a, b in self._shares]
        # The layers are mounted in nspawn's own namespace, so that nothing stays mounted, however the test ends.
        nspawn = ["systemd-nspawn", "--quiet", "--register=no", "--keep-unit", "--private-network", "--console=pipe"]
        nspawn += ["--machine=elasticd-test", "--hostname=machine", "-D", str(root), *binds, "-b"]
        script = (
            f"mount -t overlay overlay -o {shlex.quote(overlay)} {shlex.quote(str(root))} && exec {shlex.join(nspawn)}"
        )
        command = ["unshare", "--mount", "--propagation", "private", "sh", "-c", script]
        with (self._layer / "console").open("ab") as console:
            self._nspawn = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=console, stderr=console, start_new_session=True
            )
        self._wait_until_up(not_this_leader=0)

    def reboot(self) -> None:
        """As an operator does it: every service is stopped first."""
        before = self._leader
        self.run("systemctl", "--no-block", "reboot")
        self._wait_until_up(not_this_leader=before)

    def lose_power(self) -> None:
        """Everything on it is gone at once; what was on its disk stays."""
        if self._nspawn is None:
            return
        with suppress(ProcessLookupError):
            os.kill(self._leader or self._nspawn.pid, signal.SIGKILL)
        try:
            self._nspawn.wait(30)
        except subprocess.TimeoutExpired:
            os.killpg(self._nspawn.pid, signal.SIGKILL)
            self._nspawn.wait(30)
        self._nspawn, self._leader = None, 0

    def run(
        self, *command: str, check: bool = True, timeout: float = 60, text: str | None = None, env: Sequence[str] = ()
    ) -> subprocess.CompletedProcess[str]:
        """As root. `env`: NAME=VALUE. Nothing of this machine's environment goes there."""
        path = "PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
        enter = ["nsenter", "--target", str(self._leader), "--all", "--wd=/", "env", "-i", path, "LANG=C.UTF-8", *env]
        done = subprocess.run(
            [*enter, *command], input=text or "", capture_output=True, text=True, timeout=timeout, errors="replace"
        )
        assert not check or done.returncode == 0, (
            f"{shlex.join(command)} → {done.returncode}\n{done.stdout}\n{done.stderr}\n{self.journal()[-4000:]}"
        )
        return done

    def says(self, *command: str, **more: float) -> str:
        return self.run(*command, **more).stdout.strip()  # type: ignore[arg-type]

    def shows(self, unit: str, *names: str) -> dict[str, str]:
        """systemctl show."""
        lines = self.says("systemctl", "show", unit, *(f"--property={name}" for name in names)).splitlines()
        return dict(line.split("=", 1) for line in lines if "=" in line)

    def journal(self, unit: str = "") -> str:
        command = ["journalctl", "--no-pager", "--output=short-monotonic", *((f"--unit={unit}",) if unit else ())]
        return self.run(*command, check=False).stdout

    def write(self, path: str, text: str, mode: int = 0o644) -> None:
        there = self.file(path)
        there.parent.mkdir(parents=True, exist_ok=True)
        there.write_text(text)
        there.chmod(mode)

    def file(self, path: str) -> Path:
        """A file of its, seen from here. Links in it lead astray."""
        return Path(f"/proc/{self._leader}/root") / path.lstrip("/")

    def _wait_until_up(self, not_this_leader: int) -> None:
        assert self._nspawn is not None
        deadline = time.monotonic() + (_BOOT_S if not not_this_leader else _BOOT_S + _OFF_S)
        state = ""
        while True:
            assert self._nspawn.poll() is None, f"the machine does not boot: {self.console[-2000:]}"
            leader = self._find_leader()
            if leader not in (0, not_this_leader):
                self._leader = leader
                with suppress(subprocess.TimeoutExpired):
                    state = self.run("systemctl", "is-system-running", check=False, timeout=10).stdout.strip()
                if state in UP:
                    return
            assert time.monotonic() < deadline, f"not up: {state}\n{self.console[-2000:]}"
            time.sleep(0.1)

    def _find_leader(self) -> int:
        """Its process 1, as this machine counts."""
        assert self._nspawn is not None
        pid = self._nspawn.pid
        with suppress(OSError):
            for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
                if Path(f"/proc/{child}/comm").read_text().strip() == "systemd":
                    return int(child)
        return 0
