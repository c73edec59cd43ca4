"""The allow-lists: what they let through, and that neither `..`, nor a link, nor a variable leads around them."""

from __future__ import annotations

import os
import pwd
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from elasticd_agent.model.job import Rendezvous
from elasticd_daemon.config.agent_settings import Limits, NodeSettings
from elasticd_daemon.config.allow_lists import refusal
from elasticd_daemon.config.job_file import JobFile, decode_job, to_json
from elasticd_daemon.records import Submission
from elasticd_daemon.runners.reconcile import RunnerStart
from elasticd_daemon.runners.spawn import SpecBuilder
from tests.daemon.health.test_directories import DeadMount, needs_root

ME = pwd.getpwuid(os.geteuid()).pw_name


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """allowed/train.py, allowed/pkg/run.py, allowed/tool; other/evil.py; links between them, in both directions."""
    for name in ("allowed/train.py", "allowed/pkg/run.py", "allowed/tool", "other/evil.py", "allowed-not/evil.py"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("")
        path.chmod(0o755)
    (tmp_path / "allowed" / "out.py").symlink_to(tmp_path / "other" / "evil.py")
    (tmp_path / "allowed" / "outside").symlink_to(tmp_path / "other")
    (tmp_path / "other" / "in.py").symlink_to(tmp_path / "allowed" / "train.py")
    (tmp_path / "other" / "pkg").symlink_to(tmp_path / "allowed" / "pkg")
    (tmp_path / "alias").symlink_to(tmp_path / "allowed")
    return tmp_path


def _job(tree: Path, script: str, **more: Any) -> JobFile:
    job: dict[str, Any] = {"command": [script.replace("TREE", str(tree))], "workdir": str(tree / "allowed")}
    return decode_job({**job, **{key: _in(tree, value) for key, value in more.items()}})


def _in(tree: Path, value: Any) -> Any:
    return value.replace("TREE", str(tree)) if isinstance(value, str) else value


def _said(tree: Path, limits: Limits, job: JobFile, user: str | None = None) -> str | None:
    wrong = refusal(limits, job, user)
    return None if wrong is None else str(wrong).replace(str(tree), "TREE")


COMMANDS = "this node's [limits] commands: TREE/allowed/ and TREE/other/one"


@pytest.mark.parametrize(
    ("script", "more", "says"),
    [
        ("train.py", {}, None),
        ("TREE/allowed/train.py", {"workdir": "/tmp"}, None),
        ("TREE/alias/train.py", {}, None),
        ("TREE/other/in.py", {}, None),
        ("TREE/other/../allowed/train.py", {}, None),
        ("pkg.run", {"module": True}, None),
        ("./tool", {"no_python": True}, None),
        ("train.py", {"python": sys.executable}, None),
        ("train.py", {"env": {"JOB_WEIGHT": "1", "NCCL_DEBUG": "INFO"}}, None),
        (
            "../other/evil.py",
            {},
            "command: 'TREE/allowed/../other/evil.py' (which is 'TREE/other/evil.py') is not one of",
        ),
        (
            "TREE/allowed/../other/evil.py",
            {},
            "command: 'TREE/allowed/../other/evil.py' (which is 'TREE/other/evil.py')",
        ),
        ("TREE/allowed-not/evil.py", {}, f"command: 'TREE/allowed-not/evil.py' is not one of {COMMANDS}"),
        ("out.py", {}, f"command: 'TREE/allowed/out.py' (which is 'TREE/other/evil.py') is not one of {COMMANDS}"),
        ("TREE/allowed/outside/evil.py", {}, "command: 'TREE/allowed/outside/evil.py' (which is 'TREE/other/evil.py')"),
        ("evil.py", {"workdir": "TREE/other"}, f"command: 'TREE/other/evil.py' is not one of {COMMANDS}"),
        ("TREE/other/one/two", {}, f"command: 'TREE/other/one/two' is not one of {COMMANDS}"),
        ("pkg.run", {"module": True, "workdir": "TREE/other"}, "command: -m pkg.run leads out of workdir by a link"),
        ("os", {"module": True}, "command: -m os is not below workdir, so it cannot be seen to be one of"),
        ("/bin/sh", {"no_python": True}, "command: '/bin/sh'"),
        ("sh", {"no_python": True}, "command: '"),
        ("train.py", {"python": "/bin/sh"}, "python: '/bin/sh'"),
        ("train.py", {"python": "TREE/other/evil.py"}, f"python: 'TREE/other/evil.py' is not one of {COMMANDS}"),
        ("train.py", {"preload": ["evil"]}, "preload: runs other modules than the command; it cannot be given where"),
        *(
            (
                "train.py",
                {"env": {name: "x"}},
                f"env.{name}: could make a command run other code; it cannot be given where",
            )
            for name in (
                *("LD_PRELOAD", "LD_LIBRARY_PATH", "LD_AUDIT", "PYTHONPATH", "PYTHONSTARTUP", "PATH", "BASH_ENV"),
                *("OPENSSL_CONF", "NCCL_NET_PLUGIN", "CUDA_INJECTION64_PATH", "CC", "TRITON_PTXAS_PATH"),
                *(
                    "GCC_EXEC_PREFIX",
                    "NODE_OPTIONS",
                    "BASH_FUNC_python%%",
                    "OMP_TOOL_LIBRARIES",
                    "NCCL_NET",
                    "PERL5OPT",
                ),
            )
        ),
        (
            "train.py",
            {"env": {"NCCL_DEBUG": "INFO", "OMP_NUM_THREADS": "1", "NCCL_IB_HCA": "mlx5", "JOB_LR": "1"}},
            None,
        ),
    ],
)
def test_commands(tree: Path, script: str, more: dict[str, Any], says: str | None) -> None:
    limits = Limits(commands=(f"{tree}/allowed/", f"{tree}/other/one"))
    said = _said(tree, limits, _job(tree, script, **more))
    assert said == says if says is None else said is not None and said.startswith(says)


@pytest.mark.parametrize(
    ("more", "says"),
    [
        ({}, None),
        ({"workdir": "TREE/alias/pkg"}, None),
        ({"checkpoint_dir": "TREE/allowed/ck/not/yet/there"}, None),
        (
            {"workdir": "TREE/other"},
            "workdir: 'TREE/other' is not below one of this node's [limits] directories: TREE/allowed and "
            "s3://bucket/team-a",
        ),
        ({"workdir": "TREE/allowed-not"}, "workdir: 'TREE/allowed-not' is not below one of"),
        (
            {"workdir": "TREE/allowed/../other"},
            "workdir: 'TREE/allowed/../other' (which is 'TREE/other') is not below one of",
        ),
        (
            {"workdir": "TREE/allowed/outside"},
            "workdir: 'TREE/allowed/outside' (which is 'TREE/other') is not below one of",
        ),
        ({"checkpoint_dir": "TREE/allowed/outside/new"}, "checkpoint_dir: 'TREE/allowed/outside/new' (which is"),
        ({"checkpoint_dir": "/"}, "checkpoint_dir: '/' is not below one of"),
        ({"checkpoint_dir": "s3://bucket/team-a/run"}, None),
        ({"checkpoint_dir": "/x/s3:/bucket/team-a/run"}, None),
        ({"checkpoint_dir": "s3://bucket/team-b"}, "checkpoint_dir: 's3://bucket/team-b' is not below one of"),
        ({"checkpoint_dir": "TREE/allowed/s3:/bucket/team-b"}, "checkpoint_dir: 's3://bucket/team-b' is not below"),
        ({"checkpoint_dir": "s3://bucket/team-a-not"}, "checkpoint_dir: 's3://bucket/team-a-not' is not below one of"),
    ],
)
def test_directories(tree: Path, more: dict[str, Any], says: str | None) -> None:
    allowed = (tree / "allowed", Path("s3://bucket/team-a"))
    said = _said(tree, Limits(directories=allowed), _job(tree, "train.py", **more))
    assert said == says if says is None else said is not None and said.startswith(says)


@needs_root
def test_dead_file_system_costs_no_more_than_the_deadline(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if not os.access("/dev/fuse", os.R_OK | os.W_OK):
        pytest.skip("there is no /dev/fuse")
    (tree / "dead").mkdir()
    with closing(DeadMount(tree / "dead")) as dead:
        _submit_on_dead_mount(tree, dead, monkeypatch)


def _submit_on_dead_mount(tree: Path, dead: DeadMount, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("elasticd_daemon.config.allow_lists.PATHS_TIMEOUT_S", 0.3)
    job = _job(tree, "train.py", workdir=str(dead.path / "work"))
    said = _said(tree, Limits(directories=(tree,)), job)
    assert said == "workdir: its file system or that of the command does not answer"
    assert dead.requested, "nobody asked the dead mount"
    settings = NodeSettings(node="n", limits=Limits(directories=(tree,), commands=(f"{dead.path}/",)))
    builder = SpecBuilder(settings, Rendezvous(), ())
    start = RunnerStart(Submission("j", 1, to_json(job), 1, 1, 1, 1), (0,))
    requested = dead.requested
    spec = builder.build(start)
    assert builder.account(spec).name == ME
    assert dead.requested == requested, "the agent's main loop asks no file system; the runner does"
    assert spec.directories == (str(tree),)


def test_users(tree: Path) -> None:
    only = Limits(users=("trainer",))
    assert _said(tree, only, _job(tree, "train.py", user="trainer")) is None
    assert _said(tree, only, _job(tree, "train.py"), user="trainer") is None
    assert (
        _said(tree, only, _job(tree, "train.py", user="root"), user="trainer")
        == "user: 'root' is not one of this node's [limits] users: trainer"
    )
    assert _said(tree, only, _job(tree, "train.py")) == (
        f"user: is not given, and {ME!r}, the user of the job, is not one of this node's [limits] users: trainer"
    )
    assert _said(tree, Limits(users=(ME,)), _job(tree, "train.py")) is None


def test_a_user_is_a_name_and_never_a_number(tree: Path) -> None:
    number = str(pwd.getpwnam("nobody").pw_uid)
    assert refusal(Limits(users=("nobody",)), _job(tree, "train.py", user=number), None) is not None


def test_an_empty_list_lets_nothing_through(tree: Path) -> None:
    job = _job(tree, "train.py", user=ME)
    assert _said(tree, Limits(commands=()), job) == (
        "command: 'TREE/allowed/train.py' is not one of this node's [limits] commands: none"
    )
    assert _said(tree, Limits(users=()), job) == f"user: {ME!r} is not one of this node's [limits] users: none"
    assert _said(tree, Limits(directories=()), job) == (
        "workdir: 'TREE/allowed' is not below one of this node's [limits] directories: none"
    )
    assert refusal(Limits(), job, None) is None
