"""podman for tests: its own image store in .venv, without a service, a registry or cgroup permissions.

It exists so that deploy/Containerfile is really built and its image really started. The base is the small Debian of
tests/system, imported; pip gets a folder of wheels that this machine's own pip has made before. Both, and podman's
layers, are kept from run to run: the first build takes minutes, one after an edit seconds.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shlex
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
UID = 10001
IMAGE = "localhost/elasticd:test"

_CONTAINERS = """\
[containers]
default_ulimits = ["nofile=1024:4096", "nproc=1024:4096"]
[engine]
runtime = "runc"
cgroup_manager = "cgroupfs"
events_logger = "none"
lock_type = "file"
tmp_dir = "{where}/run/libpod"
"""
_STORAGE = """\
[storage]
driver = "overlay"
graphroot = "{where}/graph"
runroot = "{where}/run"
"""


class CannotRun(Exception):
    """No image can be built on this machine; the sentence says what is missing."""


class Podman:
    def __init__(self, where: Path) -> None:
        self._where = where
        missing = [tool for tool in ("podman", "runc") if shutil.which(tool) is None]
        if missing or os.geteuid() != 0:
            raise CannotRun(f"needs {' and '.join(missing) or 'root'} (tests/install-servers system, as root)")
        where.mkdir(parents=True, exist_ok=True)
        boot = Path("/proc/sys/kernel/random/boot_id").read_text()
        if not (note := where / "boot").exists() or note.read_text() != boot:
            # What podman notes of mounts and containers that live would outlive them at a reboot.
            shutil.rmtree(where / "run", ignore_errors=True)
            note.write_text(boot)
        (where / "containers.conf").write_text(_CONTAINERS.format(where=where))
        (where / "storage.conf").write_text(_STORAGE.format(where=where))
        (where / "policy.json").write_text('{"default": [{"type": "insecureAcceptAnything"}]}')

    def __call__(self, *words: str, check: bool = True, timeout: float = 60) -> subprocess.CompletedProcess[str]:
        env = os.environ | {
            "CONTAINERS_CONF": str(self._where / "containers.conf"),
            "CONTAINERS_STORAGE_CONF": str(self._where / "storage.conf"),
        }
        done = subprocess.run(
            ["podman", *words], env=env, capture_output=True, text=True, errors="replace", timeout=timeout
        )
        assert not check or done.returncode == 0, (
            f"podman {shlex.join(words)} → {done.returncode}\n{done.stdout[-6000:]}\n{done.stderr[-6000:]}"
        )
        return done

    def imported(self, tree: Path, stamp: Path) -> str:
        """An image of these files; the same one as long as `stamp` says the same."""
        name = f"localhost/debian:{hashlib.sha256(stamp.read_bytes()).hexdigest()[:12]}"
        if self("image", "exists", name, check=False).returncode:
            archive = self._where / "base.tar"
            with tarfile.open(archive, "w") as tar:
                tar.add(tree, arcname=".")
            try:
                self("import", str(archive), name, timeout=300)
            finally:
                archive.unlink()
        return name

    def wheels(self) -> Path:
        """What the image's pip is to find, from wherever this machine's pip finds it."""
        asked = [
            (REPOSITORY / name).read_bytes()
            for name in (
                "pyproject.toml",
                "constraints.txt",
                "deploy/requirements.txt",
                "deploy/build-requirements.txt",
            )
        ]
        into = self._where / f"wheels-{hashlib.sha256(b''.join(asked)).hexdigest()[:12]}"
        if not into.exists():
            for old in self._where.glob("wheels-*"):
                shutil.rmtree(old)
            making = into.with_name("making-wheels")
            shutil.rmtree(making, ignore_errors=True)
            for words in (
                ["download", "--require-hashes", "-r", "deploy/requirements.txt", "-d", str(making)],
                ["download", "--require-hashes", "-r", "deploy/build-requirements.txt", "-d", str(making)],
                ["wheel", "-c", "constraints.txt", "-w", str(making), "torch", "numpy"],
            ):
                pip = [sys.executable, "-m", "pip", *words, "--quiet", "--disable-pip-version-check"]
                made = subprocess.run(pip, cwd=REPOSITORY, capture_output=True, text=True, timeout=600)
                if made.returncode:
                    raise CannotRun(f"pip cannot fetch what the image needs: {made.stderr.strip().splitlines()[-1]}")
            making.rename(into)
        return into

    def build(self, base: str, **arguments: str) -> str:
        secret = self._where / "pip.conf"
        secret.write_text("[global]\nno-index = true\nfind-links = /wheels\n")
        # The large stage has a name of its own: what has none is pruned, and would be built anew each time.
        self._build("dependencies", f"{IMAGE}-dependencies", base, secret, {})
        self._build("", IMAGE, base, secret, arguments)
        self("image", "prune", "--force", timeout=120)
        return IMAGE

    def _build(self, stage: str, tag: str, base: str, secret: Path, arguments: Mapping[str, str]) -> None:
        done = self(
            "build",
            "--isolation=chroot",
            f"--signature-policy={self._where / 'policy.json'}",
            f"--secret=id=pip.conf,src={secret}",
            f"--volume={self.wheels()}:/wheels:ro",
            f"--build-arg=BASE={base}",
            *(f"--build-arg={key}={value}" for key, value in arguments.items()),
            *([f"--target={stage}"] if stage else []),
            "--file=deploy/Containerfile",
            f"--tag={tag}",
            str(REPOSITORY),
            check=False,
            timeout=1500,
        )
        if done.returncode and "Unable to fetch" in done.stderr + done.stdout:
            raise CannotRun("apt-get reaches no Debian mirror from within a build")
        assert done.returncode == 0, f"{done.stdout[-4000:]}\n{done.stderr[-6000:]}"

    @contextlib.contextmanager
    def container(self, options: Sequence[str], command: Sequence[str]) -> Iterator[Container]:
        identity = self("run", "--detach", *options, IMAGE, *command).stdout.strip()
        try:
            yield Container(self, identity)
        finally:
            self("rm", "--force", "--time=0", identity)


class Container:
    def __init__(self, podman: Podman, identity: str) -> None:
        self._podman, self._identity = podman, identity

    def does(self, *command: str, check: bool = True) -> str:
        """Run beside what it is running, as the same user."""
        return self._podman("exec", self._identity, *command, check=check).stdout

    def kills(self, pid: int) -> None:
        """SIGKILL, by the number that the process has in there."""
        self.does("sh", "-c", f"kill -9 {pid}")

    def is_stopped(self, within_s: int) -> int:
        """As an orchestrator does it: its stop signal, and SIGKILL when the time is over. Its exit code."""
        self._podman("stop", f"--time={within_s}", self._identity, timeout=within_s + 30)
        return self.exit_code()

    def starts_again(self) -> None:
        self._podman("start", self._identity)

    def exit_code(self) -> int:
        return int(self._podman("wait", self._identity).stdout)

    def runs(self) -> bool:
        return self._podman("inspect", "--format={{.State.Running}}", self._identity).stdout.strip() == "true"

    def said(self) -> str:
        done = self._podman("logs", self._identity)
        return done.stdout + done.stderr
