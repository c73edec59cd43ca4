"""The node's limits: the runner checks the job's paths before it starts anything, the agent makes a control group."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import pytest
from msgspec.structs import replace

from elasticd.errors import StoreRefused, StoreUnavailable, UsageError
from elasticd_agent.config.quantities import Size
from elasticd_agent.system.processes import cgroups
from elasticd_agent.system.processes.cgroups import LimitsUnavailable
from elasticd_daemon.config.agent_settings import Limits
from elasticd_daemon.config.allow_lists import cgroup_limits
from elasticd_daemon.config.job_file import JobFile, JobLimits, to_json
from elasticd_daemon.job_dir import job_files
from elasticd_daemon.runners import main
from elasticd_daemon.runners.manager import RunnerManager
from elasticd_daemon.runners.spawn import Account, NodeRefusesJob
from elasticd_daemon.runners.spec import RunnerSpec, StoreSecrets, read_exit


@pytest.mark.parametrize(
    ("limits", "why"), [({"commands": ("/none/",)}, "command: "), ({"directories": ("/none",)}, "workdir: ")]
)
def test_runner_refuses_paths_beyond_the_limits(tmp_path: Path, limits: dict[str, tuple[str, ...]], why: str) -> None:
    files = job_files(tmp_path, "j", 1)
    files.root.mkdir(parents=True)
    (tmp_path / "x.py").write_text("")
    job = to_json(JobFile(command=("x.py",), workdir=tmp_path))
    spec = RunnerSpec("j", 1, "n1", (0,), job, commands=limits.get("commands"), directories=limits.get("directories"))
    assert main.run_to_end(spec, StoreSecrets(), files, ()) == 2
    ended = read_exit(files)
    assert (ended.outcome, ended.reason.startswith(why)) == ("refused", True)
    assert not files.logs.exists(), "nothing was started"


@pytest.mark.parametrize(
    ("error", "outcome"),
    [(UsageError, "refused"), (StoreRefused, "left"), (StoreUnavailable, "left"), (OSError, "left")],
)
def test_node_does_not_refuse_a_job_for_what_is_in_the_store(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: type[Exception], outcome: str
) -> None:
    """A record that nobody can decode, a password that is just being changed, no room: the node tries again."""

    def fails(*args: object) -> int:
        raise error("why")

    monkeypatch.setattr(main, "_run", fails)
    files = job_files(tmp_path, "j", 1)
    files.root.mkdir(parents=True)
    main.run_to_end(RunnerSpec("j", 1, "n1", (0,), "{}"), StoreSecrets(), files, ())
    ended = read_exit(files)
    assert (ended.outcome, ended.reason) == (outcome, "why")


def test_lower_limit_counts() -> None:
    job = JobFile(command=("x",), workdir=Path("/"), limits=JobLimits(memory=Size(10), cpu_weight=50))
    node = Limits(job_memory_bytes=Size(20), job_pids=7, job_cpu_weight=30)
    assert cgroup_limits(node, job) == {"memory": 10, "pids": 7, "cpu": 30}
    assert cgroup_limits(Limits(), replace(job, limits=JobLimits())) == {}


def test_node_without_control_groups_refuses_a_limited_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def none(name: str, limits: dict[str, int]) -> Path:
        raise LimitsUnavailable("no group here")

    monkeypatch.setattr(cgroups, "make_job_group", none)
    with closing(RunnerManager(tmp_path, lambda: None, print)) as runners:
        spec = RunnerSpec("j", 1, "n1", (0,), "{}")
        with pytest.raises(NodeRefusesJob, match="cannot limit the memory of a job: no group here"):
            runners.start(spec, Account.of(None), StoreSecrets(), limits={"memory": 1})
    assert not job_files(tmp_path, "j", 1).root.exists()
