"""`elasticd doctor` on the command line."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from elasticd_daemon.cli.doctor import agent_is_root, check_link_protection, runs_jobs
from elasticd_daemon.job_dir import job_files
from elasticd_daemon.runners import liveness
from tests.daemon.health.conftest import Node


def doctor(node: Node, *argv: str, config: str = "") -> subprocess.CompletedProcess[str]:
    path = node.tmp / "agent.toml"
    path.write_text(
        f"node = 'node-1'\nslots = 2\nstate_dir = '{node.directory}'\n"
        f"[health]\nplugins_dir = '{node.plugins}'\ndisk_free_min = '1'\n{config}"
    )
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    return subprocess.run(
        [sys.executable, "-m", "elasticd_agent", "doctor", "--config", str(path), *argv],
        capture_output=True,
        text=True,
        timeout=110,
        env=environ,
    )


def test_healthy_node(node: Node) -> None:
    node.plugin("10-link", "echo link is up")
    answer = doctor(node, "--all-reduce")
    protects = "0\n" not in {Path(f"/proc/sys/fs/protected_{kind}links").read_text() for kind in ("hard", "sym")}
    assert (answer.returncode, answer.stderr) == (0 if protects or os.geteuid() else 1, "")
    lines = [line.split() for line in answer.stdout.splitlines()]
    assert lines[0] == ["CHECK", "RESULT", "SECONDS", "WHY"]
    results = {" ".join(line[:2]): line for line in lines}
    assert results["plugin 10-link"][2:3] + results["plugin 10-link"][4:] == ["passed", "link", "is", "up"]
    assert results["all-reduce passed"][3:6] == ["2", "slots,", "gloo,"]


def test_failing_node_and_json(node: Node) -> None:
    node.plugin("10-link", "echo link is down; exit 1")
    answer = doctor(node, "--json")
    assert (answer.returncode, answer.stderr) == (1, "")
    found = json.loads(answer.stdout)
    by_check = {reading["check"]: reading for reading in found["results"]}
    assert found["healthy"] is False
    assert (by_check["plugin 10-link"]["outcome"], by_check["plugin 10-link"]["why"]) == ("failed", "link is down")
    assert by_check["all-reduce"]["why"] == "jobs may be running here; --all-reduce runs it"
    assert by_check[f"disk {node.directory}"]["outcome"] == "passed"
    assert os.listdir(node.directory) == []


@pytest.mark.parametrize(
    ("value", "root", "outcome"),
    [
        ("1", True, "passed"),
        ("2", True, "passed"),
        ("0", True, "failed"),
        ("0", False, "skipped"),
        (None, True, "skipped"),
    ],
)
def test_link_protection(tmp_path: Path, value: str | None, root: bool, outcome: str) -> None:
    """Without a configuration, too: jobs may name any user that root's agent may become."""
    if value is not None:
        for name in ("protected_hardlinks", "protected_symlinks"):
            (tmp_path / name).write_text(f"{value}\n")
    assert [one.outcome for one in check_link_protection(root, tmp_path)] == [outcome] * 2


def test_memory_of_running_jobs_is_not_the_nodes_fault(tmp_path: Path) -> None:
    """Also of a run whose runner is gone, as long as one of its processes is there."""
    assert not runs_jobs(tmp_path)
    files = job_files(tmp_path, "llm", 7)
    files.agent_folder.mkdir(parents=True)
    assert not runs_jobs(tmp_path)
    lock = liveness.take_lock(files.lock)
    assert runs_jobs(tmp_path)
    os.close(lock)
    assert not runs_jobs(tmp_path)


def test_agent_of_another_user_than_the_operators(tmp_path: Path) -> None:
    """`sudo elasticd doctor` on a node whose agent has a user of its own."""
    assert agent_is_root(tmp_path) == agent_is_root(tmp_path / "none") == (os.geteuid() == 0)
    if os.geteuid() == 0:
        os.chown(tmp_path, 1000, 1000)
        assert not agent_is_root(tmp_path)


def test_usage_errors_are_one_line(node: Node) -> None:
    for argv, config, why in (
        (["--nothing"], "", "unrecognized arguments: --nothing"),
        ([], "nothing = 1", "nothing"),
        (["--config", str(Path("/none.toml"))], "", "/none.toml"),
    ):
        answer = doctor(node, *argv, config=config)
        assert (answer.returncode, answer.stdout, len(answer.stderr.splitlines())) == (2, "", 1)
        assert answer.stderr.startswith("elasticd doctor: error: ")
        assert why in answer.stderr
