"""A small Debian on which a real systemd boots, as a machine of the test: `with Nspawn(...) as machine`.

It is a container (systemd-nspawn) with its own processes, mounts, users and a network of loopback alone. Its files are
the tree that make-rootfs made, unchanged, under a layer that belongs to the test: what the test does there outlasts a
reboot and goes with the test. Folders of this machine are seen there under their own names, read-only.
"""

from __future__ import annotations

import os
import re
import select
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


class Nspawn:
    def __init__(self, tree: Path, layer: Path, *, shows: Sequence[Path] = ()):
        """`shows`: folders of this machine that are seen there."""
        self._tree, self._layer, self._shows = tree, layer, shows
        self._leader = 0

    def __enter__(self) -> Nspawn:
        for name in ("up", "work", "root"):
            (self._layer / name).mkdir(parents=True)
        root = str(self._layer / "root")
        overlay = f"lowerdir={self._tree},upperdir={self._layer / 'up'},workdir={self._layer / 'work'}"
        nspawn = ["env", "-i", "systemd-nspawn", "--quiet", "--register=no", "--keep-unit", "--private-network"]
        nspawn += [
            "--console=pipe",
            "--machine=elasticd-test",
            "-D",
            root,
            *(f"--bind-ro={p}" for p in self._shows),
            "-b",
        ]
        # One shell for all its boots: it boots for each line it reads, and says when it is off. What is mounted, and
        # what runs, is in namespaces that end with the shell, and the shell ends with whoever started it.
        once = f"{shlex.join(nspawn)} </dev/null >>{shlex.quote(str(self._console))} 2>&1"
        script = (
            f"mount -t overlay overlay -o {shlex.quote(overlay)} {shlex.quote(root)} || exit 1\n"
            # What nspawn keeps of its machines: nobody else's may have the same name, and nothing of it stays.
            "mkdir -p /run/systemd/nspawn && mount -t tmpfs elasticd /run/systemd/nspawn || exit 1\n"
            f"while read -r _; do {once}; echo off; done"
        )
        command = ["setpriv", "--pdeathsig", "KILL", "unshare", "--mount", "--propagation", "private"]
        command += ["--pid", "--fork", "--kill-child", "--mount-proc", "sh", "-c", script]
        self._shell = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True, text=True, bufsize=1
        )
        try:
            self.boot()
        except BaseException:
            self._close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._close()

    def _close(self) -> None:
        os.killpg(self._shell.pid, signal.SIGKILL)
        self._shell.communicate(timeout=30)

    @property
    def _console(self) -> Path:
        return self._layer / "console"

    def boot(self) -> None:
        self._shell.stdin.write("boot\n")
        deadline = time.monotonic() + _BOOT_S
        state = ""
        while state not in UP:
            assert self._shell.poll() is None, "its files could not be put together"
            assert time.monotonic() < deadline, f"not up: {state}\n{self._console.read_text(errors='replace')[-2000:]}"
            time.sleep(0.1)
            self._leader = self._find_leader()
            if self._leader:
                with suppress(subprocess.TimeoutExpired):
                    state = self.run("systemctl", "is-system-running", check=False, timeout=10).stdout.strip()

    def reboot(self) -> None:
        """As an operator does it: every service is stopped first."""
        self.run("systemctl", "--no-block", "poweroff")
        self._wait_until_off()
        self.boot()

    def lose_power(self) -> None:
        """Everything on it is gone at once; what was on its disk stays."""
        os.kill(self._leader, signal.SIGKILL)
        self._wait_until_off()

    def _wait_until_off(self) -> None:
        assert self._shell.stdout is not None
        there, _, _ = select.select([self._shell.stdout], [], [], _OFF_S)
        assert there, f"it does not go off:\n{self.journal()[-4000:]}"
        assert self._shell.stdout.readline() == "off\n"
        self._leader = 0

    def run(
        self, *command: str, check: bool = True, timeout: float = 60, text: str | None = None, env: Sequence[str] = ()
    ) -> subprocess.CompletedProcess[str]:
        """As root. `env`: NAME=VALUE. Nothing of this machine's environment goes there."""
        path = "PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
        enter = ["nsenter", "--target", str(self._leader), "--all", "--wdns=/", "env", "-i", path, "LANG=C.UTF-8", *env]
        done = subprocess.run(
            [*enter, *command], input=text or "", capture_output=True, text=True, timeout=timeout, errors="replace"
        )
        assert not check or done.returncode == 0, (
            f"{shlex.join(command)} → {done.returncode}\n{done.stdout}\n{done.stderr}\n{self.journal()[-4000:]}"
        )
        return done

    def output_of(self, *command: str, **more: float) -> str:
        return self.run(*command, **more).stdout.strip()  # type: ignore[arg-type]

    def properties(self, unit: str, *names: str) -> dict[str, str]:
        """systemctl show."""
        lines = self.output_of("systemctl", "show", unit, *(f"--property={name}" for name in names)).splitlines()
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

    def _find_leader(self) -> int:
        """Its process 1, as this machine counts; 0 if there is none yet."""
        below = [self._shell.pid]
        while below:
            pid = below.pop()
            with suppress(OSError):
                numbers = re.search(r"^NSpid:(.*)$", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE)
                if numbers and len(numbers[1].split()) == 3 and numbers[1].split()[2] == "1":
                    return pid if Path(f"/proc/{pid}/comm").read_text().strip() == "systemd" else 0
                below += map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split())
        return 0
