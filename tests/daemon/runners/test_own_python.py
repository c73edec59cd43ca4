"""A job in a virtual environment with torch and without elasticd; with its own PATH and libraries."""

from __future__ import annotations

import json
import os
import site
import subprocess
import sys
from pathlib import Path

import pytest

from tests.daemon.conftest import MakeNode
from tests.daemon.node import AgentNode

SCRIPT = """
import importlib.util, json, os, sys
import torch, torch.distributed as dist

import onlyhere

dist.init_process_group("gloo")
total = torch.ones(1)
dist.all_reduce(total)
seen = {
    "prefix": sys.prefix,
    "elasticd": importlib.util.find_spec("elasticd") is not None,
    "onlyhere": onlyhere.WHAT,
    "total": total.item(),
    "cwd": os.getcwd(),
    "argv": sys.argv[1:],
    "uid": os.getuid(),
    "env": dict(os.environ),
}
with open(f"{os.environ['WORK']}/seen-{dist.get_rank()}.json", "w") as file:
    json.dump(seen, file)
dist.destroy_process_group()
"""


@pytest.fixture(scope="module")
def venv(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Another environment with the same torch, by a path to it, and with a module that no other has.

    elasticd is installed here by a .pth file, which counts in the environment it is in only.
    """
    home = tmp_path_factory.mktemp("own") / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", home], check=True, timeout=60)
    (packages,) = home.glob("lib/python3*/site-packages")
    (packages / "borrowed.pth").write_text("\n".join(site.getsitepackages()) + "\n")
    (packages / "onlyhere.py").write_text('WHAT = "the job\'s own"\n')
    look = "from importlib.util import find_spec; print(*map(bool, map(find_spec, ['torch', 'elasticd'])))"
    found = subprocess.check_output([home / "bin" / "python", "-c", look], text=True, timeout=60, cwd="/")
    assert found == "True False\n", "torch and elasticd are installed side by side here: this would prove nothing"
    return home


def _own(node: AgentNode, venv: Path, **how: object) -> None:
    script = node.work / "own.py"
    script.write_text(SCRIPT)
    env = {"PYTHONPATH": "", "PATH": f"/own/bin:{os.environ['PATH']}", "LD_LIBRARY_PATH": "/own/lib", "WEIGHT": "7"}
    node.job("own", str(script), "--lr", "0.1", python=str(venv / "bin" / "python"), env=env, workers=2, **how)


def _seen(node: AgentNode, rank: int = 0) -> dict[str, object]:
    seen = json.loads((node.work / f"seen-{rank}.json").read_text())
    assert isinstance(seen, dict)
    return seen


@pytest.mark.system
def test_launcher_in_another_python_environment(node: MakeNode, venv: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ELASTICD_LEASE", "4s")
    monkeypatch.setenv("MACHINE", "its own")
    n1 = node()
    _own(n1, venv)
    n1.start()
    runner = n1.runner("own")
    environ = Path(f"/proc/{runner}/environ").read_bytes().split(b"\0")
    last = n1.wait_for_exit("own")
    assert (last.outcome, last.exit_code) == ("succeeded", 0), n1.diagnostics()
    seen = _seen(n1)
    env = seen["env"]
    assert isinstance(env, dict)
    assert seen["prefix"] == str(venv)
    assert (seen["elasticd"], seen["onlyhere"], seen["total"]) == (False, "the job's own", 2)
    assert (seen["cwd"], seen["argv"]) == (str(n1.work), ["--lr", "0.1"])
    assert (env["LD_LIBRARY_PATH"], env["WEIGHT"], env["MACHINE"]) == ("/own/lib", "7", "its own")
    assert env["PATH"].startswith("/own/bin:")
    assert env.get("PYTHONPATH", "") == "", "neither the daemon's nor the launcher's"
    assert "ELASTICD_LEASE" not in env
    # What is the job's does not reach the interpreter that looks after it.
    assert not [line for line in environ if line.startswith((b"LD_LIBRARY_PATH=/own", b"WEIGHT=", b"PATH=/own"))]
    assert [event["warm"] for event in n1.job_events("own", "group_started")] == [True], n1.diagnostics()
    assert n1.drain() == 0


def test_missing_interpreter_is_refused_by_its_key(node: MakeNode, tmp_path: Path) -> None:
    n1 = node()
    n1.job("own", "plain.py", python="/no/such/python", workers=1)
    n1.job("lost", "plain.py", workers=1)
    n1.jobs[-1]["command"] = ["nowhere.py"]
    n1.start()
    last = n1.wait_for_exit("own")
    assert last.outcome == "refused"
    assert last.reason == "python: the Python interpreter '/no/such/python' cannot be found or executed"
    assert n1.wait_for_exit("lost", 2).reason == f"command: the script 'nowhere.py' does not exist in {str(n1.work)!r}"
    assert n1.drain() == 0
