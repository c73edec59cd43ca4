"""What ends a job for good: its own mistakes at once, crashes without progress soon, a hard total exactly."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.faults.conftest import StartJob
from tests.faults.job import Fault

COLD = "${local_rank}"

MISTAKES = {
    "import no_such_module": "ModuleNotFoundError: No module named 'no_such_module'",
    "import math\nmath.sqrt(-1)": "ValueError: math domain error",
    "def main(:\n    pass": "SyntaxError: invalid syntax",
    "import argparse\nargparse.ArgumentParser().parse_args(['--wrong'])": "exited with code 2",
}


@pytest.mark.parametrize("source", MISTAKES)
def test_user_error_is_not_restarted(job: StartJob, tmp_path: Path, source: str) -> None:
    """A mistake of the script is shown and not tried again."""
    script = tmp_path / "mistake.py"
    script.write_text(source)
    run = job(script, COLD)
    assert run.wait() == 1
    ended = run.event("job_ended", outcome="failed", exit_code=1, restarts=0)
    assert ended["reason"].startswith("an error in the script, not restarted: all 2 ranks on ")
    assert MISTAKES[source].partition(":")[0] in ended["reason"]
    if "argparse" not in source:  # which leaves no traceback, and says what was wrong itself
        assert MISTAKES[source] in run.err.partition("the traceback of the rank that failed first")[2]
    assert not run.events("round_published", round=2)


def test_a_mistake_under_the_warm_launcher(job: StartJob, tmp_path: Path) -> None:
    script = tmp_path / "mistake.py"
    script.write_text("import torch\ntorch.zeros(2) @ torch.zeros(3)")
    run = job(script)
    assert run.wait() == 1
    assert "RuntimeError" in run.event("job_ended", outcome="failed", restarts=0)["reason"]
    assert "mistake.py" in run.err.partition("the traceback of the rank that failed first")[2]
    assert run.event("group_started")["warm"]


def test_crash_without_progress_ends_the_job(job: StartJob) -> None:
    """A crash that repeats without progress is given up after three restarts."""
    run = job("plain.py", COLD, "sleep", faults=[Fault(1, 0, "exit 3", times=4)])
    assert run.wait() == 1
    reason = run.event("job_ended", outcome="failed", exit_code=1, restarts=3)["reason"]
    assert reason == "3 restarts without progress before any step was done: rank 1 exited with code 3"
    assert reason in run.err
    failed = [event["mono"] for event in run.events("worker_exited", requested=False)]
    published = [event["mono"] for event in run.events("round_published")][1:]
    waits = [again - fault for fault, again in zip(failed, published, strict=False)]
    assert [round(wait - 0.4) for wait in waits] == [0, 1, 2]


@pytest.mark.parametrize("most", [0, 1])
def test_max_restarts_is_a_hard_total(job: StartJob, most: int) -> None:
    faults = [Fault(1, 0, "SIGKILL", times=most + 1)]
    run = job("plain.py", COLD, "sleep", faults=faults, flags=["--max-restarts", str(most)])
    assert run.wait() == 1
    reason = run.event("job_ended", outcome="failed", exit_code=1, restarts=most)["reason"]
    assert reason == f"{most} of {most} restarts used (--max-restarts): rank 1 was killed by SIGKILL"


def test_max_restarts_despite_progress(job: StartJob) -> None:
    run = job("train.py", "9", faults=[Fault(0, 5, "SIGKILL", times=2)], flags=["--max-restarts", "1"])
    assert run.wait() == 1
    assert run.event("job_ended", outcome="failed", restarts=1)


def test_restarts_an_hour_have_a_bound_even_with_progress(job: StartJob) -> None:
    faults = [Fault(0, 4, "SIGKILL", times=3)]
    run = job("train.py", "9", faults=faults, flags=["--max-restarts-per-hour", "2"])
    assert run.wait() == 1
    reason = run.event("job_ended", outcome="failed", restarts=2)["reason"]
    assert reason.startswith("more than 2 restarts an hour, 2 in all (--max-restarts-per-hour): rank 0 was killed")
