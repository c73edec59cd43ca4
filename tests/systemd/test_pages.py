"""The pages' commands for a machine with systemd, as printed, on a machine that has booted: with sudo, with PATH.

Stood in for: apt-get, git and the package index, since the machine has no network, and the editor of sudoedit.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.docs.pages import blocks
from tests.systemd.conftest import REPOSITORY
from tests.systemd.machine import Nspawn
from tests.systemd.test_agent import UNIT

STAND_INS = {
    "curl": "exec python3 -c 'import sys, urllib.request as r; print(r.urlopen(sys.argv[2]).read().decode())' \"$@\"",
    "sudo": '[ "$1" != -u ] || { u=$2; shift 2; set -- setpriv --reuid=$u --regid=$u --init-groups "$@"; }; exec "$@"',
    "sudoedit": 'test -w "$1"',
    "apt-get": '[ "$*" = "install -y git python3-venv curl" ]',
    "git": '[ "$1 $3" = "clone elasticd" ] && cp -r /root/checkout elasticd',
}
INTERACTIVE = re.compile(r"^(journalctl .*-f|elasticd status .*--watch)( |$)")
# pip finds what builds elasticd here instead of in the index: as an operator without a network does.
ENV = [
    "PIP_NO_INDEX=1",
    "PIP_NO_DEPS=1",
    "PIP_FIND_LINKS=/root/wheels",
    "PIP_DISABLE_PIP_VERSION_CHECK=1",
    "HOME=/root",
]


@pytest.fixture(scope="module")
def fresh(machine: Nspawn, tmp_path_factory: pytest.TempPathFactory) -> Nspawn:
    """A bare machine, with this checkout where `git clone` takes it from, and torch where the venv finds it."""
    for name, script in STAND_INS.items():
        machine.write(f"/usr/local/sbin/{name}", f"#!/bin/sh\n{script}\n", 0o755)
    machine.file("/usr/local/bin/python3").symlink_to(sys.executable)
    machine.run("python3", "-m", "venv", "/opt/elasticd/venv", env=["HOME=/root"])
    packages = next(path for path in sys.path if path.endswith("site-packages"))
    site = Path(os.__file__).parent.name
    machine.write(f"/opt/elasticd/venv/lib/{site}/site-packages/machine.pth", f"{packages}\n")
    # The venv's own would hide the version that requirements.txt asks for.
    machine.run("/opt/elasticd/venv/bin/pip", "uninstall", "--quiet", "--yes", "setuptools", env=["HOME=/root"])
    for folder in ("deploy", "examples", "elasticd", "agents", "docs/man"):
        caches = shutil.ignore_patterns("__pycache__")
        shutil.copytree(REPOSITORY / folder, machine.file("/root/checkout") / folder, ignore=caches)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(REPOSITORY / name, machine.file("/root/checkout"))
    # Not there at once: pip resolves /proc/PID/root to this machine's own root.
    wheels = tmp_path_factory.mktemp("wheels")
    builders = ["--require-hashes", "-r", REPOSITORY / "deploy/build-requirements.txt", "-d", wheels]
    subprocess.run([sys.executable, "-m", "pip", "download", "--quiet", *builders], check=True, timeout=300)
    shutil.copytree(wheels, machine.file("/root/wheels"))
    return machine


def follow(machine: Nspawn, block: str, folder: str) -> str:
    """Each line by itself, as a person types it; one that would wait for Ctrl-C gets two seconds."""
    said = ""
    for line in block.replace("\\\n", " ").splitlines():
        words = re.sub(r"\s+#.*", "", line)
        limit = "timeout 2 " if INTERACTIVE.match(words.removeprefix("sudo ")) else ""
        deadline = time.monotonic() + 20
        while True:
            typed = f"umask 077; cd {folder} && {limit}{words}"  # as hardened machines have it for root
            done = machine.run("bash", "-c", typed, env=ENV, check=False, timeout=150)
            # An upgrade takes the agent away for about a second, which docs/operations.md says.
            if "no agent answers" not in done.stderr or time.monotonic() > deadline:
                break
        assert done.returncode in ((0, 124) if limit else (0,)), (
            f"{line}\n{done.stdout}\n{done.stderr}\n{machine.journal(UNIT)[-3000:]}"
        )
        said += done.stdout
    return said


def test_bare_machine_to_a_job_and_the_dashboard(
    fresh: Nspawn, until: Callable[[Callable[[], object], float], object]
) -> None:
    install, look = blocks("quickstart.md")["A service under systemd"]
    said = follow(fresh, install, "/root")
    # What install.sh prints is what works: the same commands, and the page is open with the last one's URL.
    printed = re.findall(r"^ +sudo (elasticd \S+)", said, re.MULTILINE)
    assert printed == ["elasticd nodes", "elasticd submit", "elasticd open"]
    (url,) = re.findall(r"^http://127.0.0.1:9411/login\?code=\S+$", said, re.MULTILINE)
    visit = "import http.cookiejar as c, sys, urllib.request as r; jar = r.HTTPCookieProcessor(c.CookieJar()); "
    visit += "print(r.build_opener(jar).open(sys.argv[1], timeout=10).read().decode())"
    assert "example" in fresh.output_of("python3", "-c", visit, url)
    modes = fresh.output_of("stat", "-c", "%n %U:%G %a", "/etc/elasticd/token").splitlines()
    assert modes == ["/etc/elasticd/token root:elasticd 640"]
    until(lambda: "checkpoint  step" in fresh.output_of("elasticd", "status", "example"), 90)
    said = follow(fresh, look, "/root")
    assert "active (running)" in said
    assert "example: running" in said
    assert "elasticd_node_info{" in said


def test_systemd_page(fresh: Nspawn) -> None:
    (commands,) = blocks("systemd.md")["The agent as a systemd service"]
    said = follow(fresh, commands, "/root/elasticd")
    assert "replaces itself, and jobs continue" in said
    assert re.search(r"^machine +(ready|starting)", said, re.MULTILINE)  # its checks take seconds after a restart


def test_operations_page(fresh: Nspawn) -> None:
    install, job = blocks("operations.md")["Install"]
    fresh.write(
        "/root/elasticd/job.toml",
        fresh.file("/opt/elasticd/example/job.toml").read_text().replace('"example"', '"llama"', 1),
    )
    follow(fresh, "elasticd cancel example", "/root")
    said = follow(fresh, f"{install}\n{job}\n{blocks('operations.md')['Upgrade'][0]}", "/root/elasticd")
    assert "llama" in said


def test_uninstall_removes_what_install_put_outside_of_its_prefix(fresh: Nspawn) -> None:
    """The man page is where man looks."""
    find = ["find", "/usr/local/share", "-type", "f", "-name", "*elasticd*", "-size", "+1k", "-perm", "644"]
    assert sorted(fresh.output_of(*find).splitlines()) == ["/usr/local/share/man/man1/elasticd.1"]
    fresh.run("/root/elasticd/deploy/systemd/uninstall.sh", "--purge", timeout=120)
    assert fresh.output_of(*find) == ""
    assert fresh.run("sh", "-c", "command -v elasticd || test -e /opt/elasticd", check=False).returncode == 1
