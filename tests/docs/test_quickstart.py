"""docs/quickstart.md, followed from the top: its own commands in the reader's shell, up to the part that needs root.

Stood in for: git, venv and pip, which have happened here, for the demo as well. Changed: etcd's address and the agent's
port, which other programs of this machine may use. tests/systemd follows the rest.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.docs.pages import ROOT, blocks
from tests.etcd import etcd_servers
from tests.faults.job import until

pytestmark = [pytest.mark.system, pytest.mark.timeout(300)]
PAGE = blocks("quickstart.md")
IN_TIME = 60.0


class Reader:
    """A shell in the folder that the first block has made."""

    def __init__(self, root: Path) -> None:
        self.bin, self.clone, self.folder = root / "bin", root / "elasticd", root / "try"
        self.bin.mkdir()
        self._shells: list[subprocess.Popen[str]] = []
        stand_ins = {
            "git": f'[ "$1 $3" = "clone elasticd" ] && mkdir elasticd && cd {ROOT} && '
            f"cp -r elasticd examples Makefile pyproject.toml constraints.txt {self.clone}",
            "python3": '[ "$*" = "-m venv venv" ] && mkdir -p venv/bin && touch venv/bin/activate',
            "pip": '[ "$*" = "install ../elasticd" ]',
            "elasticd": f'exec {sys.executable} -m elasticd_agent "$@"',
        }
        for name, script in stand_ins.items():
            (self.bin / name).write_text(f"#!/bin/sh\n{script}\n")
            (self.bin / name).chmod(0o755)
        self.env = {
            **os.environ,
            "PATH": f"{self.bin}:{os.environ['PATH']}",
            "PYTHONPATH": f"{ROOT}:{ROOT / 'agents'}",
            "ELASTICD_HTTP_PORT": "0",
        }
        (clone, self.demo), (install,) = PAGE["The demo"][0].splitlines(), PAGE["Your own environment"]
        setup = f"{clone}\n{install}\ndeclare -x OMP_NUM_THREADS && pwd"
        done = subprocess.run(["bash", "-euc", setup], cwd=root, env=self.env, capture_output=True, text=True)
        assert (done.returncode, done.stdout.split("\n")[-2:]) == (0, [str(self.folder), ""]), done.stderr
        assert "OMP_NUM_THREADS=1" in install
        self.env["OMP_NUM_THREADS"] = "1"

    def start(self, script: str, output: str) -> subprocess.Popen[str]:
        with (self.folder / output).open("w") as file:
            shell = subprocess.Popen(
                ["bash", "-uc", script],
                cwd=self.folder,
                env=self.env,
                stdout=file,
                stderr=file,
                text=True,
                start_new_session=True,
            )
        self._shells.append(shell)
        return shell

    def run(self, script: str) -> str:
        done = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", script],
            cwd=self.folder,
            env=self.env,
            capture_output=True,
            text=True,
            timeout=IN_TIME,
        )
        assert done.returncode == 0, f"{script}\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}"
        return done.stdout

    def wait_for(self, text: str, output: str, within: float = IN_TIME) -> None:
        file = self.folder / output
        until(lambda: re.search(text, file.read_text()), lambda: f"{text}:\n{file.read_text()[-3000:]}", within)

    def close(self) -> None:
        for shell in self._shells:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(shell.pid, signal.SIGINT)
        for shell in self._shells:
            shell.wait(IN_TIME)


@pytest.fixture
def reader(tmp_path: Path) -> Iterator[Reader]:
    made = Reader(tmp_path)
    yield made
    made.close()


def test_demo(reader: Reader) -> None:
    python = reader.clone / ".venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    python.chmod(0o755)
    (reader.clone / ".venv" / ".elasticd-ready").touch()
    reader.start(f"cd .. && {reader.demo}", "said")
    reader.wait_for(r"demo: recovered in \d+\.\d+ s", "said", 240)


def test_laptop(reader: Reader) -> None:
    start, kill, hang = PAGE["A laptop"]
    reader.start(start, "said")
    reader.wait_for(r"step +25", "said")
    reader.run(kill)
    reader.wait_for("rank 0 was killed by SIGKILL; restart with 2 workers on .*, from checkpoint", "said")
    reader.wait_for("round 2: training again", "said")
    assert "start cold" not in (reader.folder / "said").read_text(), "the clone's elasticd is in the script's way"
    read_pid, stop, explain = kill.splitlines()[0], *hang.splitlines()
    reader.run(f"{read_pid}\n{stop}")
    reader.wait_for("round 3: training again", "said")
    page = reader.run(explain)
    assert re.search("Round 2 hung, and rank 0 is at fault: .* is stopped", page)


def test_two_nodes(reader: Reader, tmp_path: Path) -> None:
    etcd, run = PAGE["Two nodes"]
    assert etcd.startswith("etcd --data-dir etcd-data &")
    with etcd_servers() as servers:
        run = run.replace("127.0.0.1:2379", ",".join(f"{host}:{port}" for host, port in servers.endpoints))
        reader.start(run, "a")
        reader.wait_for(r"step +25", "a")
        b = reader.start(run.replace("--node-id a", "--node-id b"), "b")
        reader.wait_for("b joined; .* 2 workers on 2 nodes, from checkpoint", "a")
        reader.wait_for("first step", "b")
        os.killpg(b.pid, signal.SIGKILL)
        reader.wait_for("b is lost: .* 1 worker on a, from checkpoint", "a")
        reader.close()


def test_service(reader: Reader) -> None:
    install, use = PAGE["A service"]
    # One shell for both blocks: the first starts the agent in the background, the second uses it once it answers.
    commands = [f"echo '$ {line}'; {line}" for line in use.splitlines()]
    wait = "for _ in $(seq 300); do {} && break; sleep 0.2; done"
    steps = [
        install,
        wait.format("elasticd nodes >/dev/null 2>&1"),
        commands[0],
        commands[1],
        wait.format("elasticd logs demo | grep -q ^step && elasticd status demo | grep -q 'checkpoint *step'"),
        *commands[2:],
        "elasticd open",
        "elasticd cancel demo",
        "kill %1; wait",
    ]
    shell = reader.start("set -em\ntrap 'kill %1 2>/dev/null || true' EXIT\n" + "\n".join(steps), "said")
    until(lambda: shell.poll() is not None, (reader.folder / "said").read_text, 120)
    said = (reader.folder / "said").read_text()
    assert shell.returncode == 0, said
    assert re.search(r"(?s)\$ elasticd submit service/job.toml\ndemo\n", said)
    assert re.search(r"(?s)\$ elasticd status demo\ndemo: running\n", said)
    assert re.search(r"(?m)^step +\d+ +loss", said.partition("$ elasticd logs")[2])
    assert re.search(r"http://127.0.0.1:\d+/login\?code=\S{20,}", said)
