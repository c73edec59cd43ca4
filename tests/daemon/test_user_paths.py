"""The agent's main loop waits for no file system of a job's user: a dead one would stop the node.

Only the runner, a process of its own, looks at a job's paths, and for the HTTP threads a process or a thread with a
deadline.
"""

from __future__ import annotations

import ast
import os
import typing
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

import elasticd_daemon
from elasticd_daemon.config.job_file import JobFile
from tests.daemon.conftest import MakeNode
from tests.daemon.health.test_directories import DeadMount, needs_root
from tests.daemon.node import COLD

HERE = Path(elasticd_daemon.__file__).parent
OTHER_PROCESSES = {"runners/main.py"}
"""Run in a job's runner."""
RULES = "user_refusal", "cgroup_limits"
"""Of config/allow_lists.py, for the main loop."""
PATHS = {name for name, kind in typing.get_type_hints(JobFile).items() if "Path" in str(kind)} | {"command", "python"}
LOOKS = {"path_refusal", "refusal", "preflight", "find_script"}
"""They look at a job's files."""
WAITS = {"run", "call", "check_call", "check_output"}
"""For a process, which a job's user may stop if it is his."""
FOR_OTHER_THREADS = {
    "agent.py installed_version_error: subprocess.run",  # the agent's own user's
    "runners/spawn.py check_interpreter: subprocess.run",  # in the runner
    "scheduler/retention.py _remove_folder: subprocess.run",
    "agent.py _open_api: refusal",
    "agent.py check: refusal",
}


def main_loop() -> Iterator[tuple[str, ast.AST]]:
    """The code of the main loop: the agent without its HTTP threads and health checks."""
    for path in sorted(path for part in ("", "runners", "scheduler") for path in (HERE / part).glob("*.py")):
        if (name := str(path.relative_to(HERE))) not in OTHER_PROCESSES:
            yield name, ast.parse(path.read_text())
    limits = ast.parse((HERE / "config" / "allow_lists.py").read_text())
    yield from (
        ("config/allow_lists.py", it) for it in limits.body if isinstance(it, ast.FunctionDef) and it.name in RULES
    )


def looks(tree: ast.AST) -> set[str]:
    """Where a path of a job is read, by attribute or by name, and where a function is called that looks at its files or
    waits for a process.

    Each as FUNCTION: WHAT.
    """
    found = set()
    for function in (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)):
        for node in ast.walk(function):
            match node:
                case ast.Attribute(attr=name) if name in PATHS:
                    found.add(f"{function.name}: {ast.unparse(node)}")
                case ast.Constant(value=str(name)) if name in PATHS:
                    found.add(f"{function.name}: {name!r}")
                case ast.Call(func=ast.Name(id=name) | ast.Attribute(attr=name)) if name in LOOKS:
                    found.add(f"{function.name}: {ast.unparse(node.func)}")
                case ast.Call(func=ast.Attribute(value=ast.Name(id="subprocess"), attr=name)) if name in WAITS:
                    found.add(f"{function.name}: subprocess.{name}")
    return found


def test_main_loop_looks_at_no_path_of_a_job() -> None:
    assert {f"{name} {what}" for name, tree in main_loop() for what in looks(tree)} == FOR_OTHER_THREADS


@pytest.mark.parametrize(
    ("code", "what"),
    [
        ("os.path.realpath(job.workdir)", "job.workdir"),
        ("from_json(spec.job_file).checkpoint_dir.exists()", "from_json(spec.job_file).checkpoint_dir"),
        ("open(json.loads(spec.job_file)['workdir'])", "'workdir'"),
        ("os.stat(job.command[0])", "job.command"),
        ("limits.path_refusal(settings.limits, job)", "limits.path_refusal"),
        ("subprocess.run(['true'], user=account.uid)", "subprocess.run"),
    ],
)
def test_the_search_finds(code: str, what: str) -> None:
    assert looks(ast.parse(f"def f():\n    {code}")) == {f"f: {what}"}


@needs_root
@pytest.mark.system
def test_job_on_a_dead_file_system_stops_only_itself(node: MakeNode, tmp_path: Path) -> None:
    if not os.access("/dev/fuse", os.R_OK | os.W_OK):
        pytest.skip("there is no /dev/fuse")
    one = node("n1", slots=2)
    api = one.unix()
    (tmp_path / "dead").mkdir()
    with closing(DeadMount(tmp_path / "dead")) as dead:
        stuck = {"workdir": str(dead.path / "work"), "checkpoint_dir": str(dead.path / "saved")}
        one.jobs.append(one.job_table("stuck", "chatty.py", COLD, workers=1) | stuck)
        one.job("well", "chatty.py", COLD, workers=1)
        one.start()
        one.runner("stuck")
        one.until(lambda: dead.requested, "the runner to ask the dead file system")
        one.workers("well", 2)
        (one.work / "go").touch()
        assert one.wait_for_exit("well", 2).outcome == "succeeded"
        assert api.post("/v1/jobs/stuck/cancel").code == 200
        one.event("runner_stop_requested", name="stuck")
        page = api.get("/metrics").body.decode()
        lag = next(line for line in page.splitlines() if line.startswith("elasticd_node_loop_lag_seconds{"))
        assert float(lag.split()[-1]) < 2, lag
    one.until(lambda: not one.job_is_running("stuck"), "the runner to end")
    assert one.drain() == 0
