"""The runner checks the job's paths against the node's limits before it starts anything."""

from __future__ import annotations

from pathlib import Path

import pytest

from elasticd_agent.config.job_file import JobFile, to_json
from elasticd_agent.model.job_dir import job_files
from elasticd_agent.node.runners import main
from elasticd_agent.node.runners.spec import RunnerSpec, StoreSecrets, read_exit


@pytest.mark.parametrize(
    ("limits", "why"),
    [
        ({"commands": ("/none/",)}, "command: "),
        ({"directories": ("/none",)}, "workdir: "),
    ],
)
def test_runner_refuses_paths_beyond_the_limits(tmp_path: Path, limits: dict[str, tuple[str, ...]], why: str) -> None:
    files = job_files(tmp_path, "j", 1)
    files.root.mkdir(parents=True)
    (tmp_path / "x.py").write_text("")
    job = to_json(JobFile(command=("x.py",), workdir=tmp_path))
    spec = RunnerSpec("j", 1, "n1", (0,), job, commands=limits.get("commands"), directories=limits.get("directories"))
    assert main._run_to_end(spec, StoreSecrets(), files, ()) == 2
    ended = read_exit(files)
    assert ended is not None
    assert (ended.outcome, ended.reason.startswith(why)) == ("refused", True)
    assert not files.logs.exists(), "nothing was started"
