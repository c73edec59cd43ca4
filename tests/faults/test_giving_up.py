"""What ends a job for good: its own mistakes at once, crashes without progress soon, a hard total exactly."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.faults.conftest import StartJob
from tests.faults.job import Fault, until
from tests.faults.nodes import Nodes

COLD = "${local_rank}"

MEET = """
import os, sys, time
from pathlib import Path
from urllib.error import URLError
number = int(os.environ["ELASTICD_ROUND"])
Path(os.environ["WORK"], f"here-{number}-" + os.environ["RANK"]).touch()
while len(list(Path(os.environ["WORK"]).glob(f"here-{number}-*"))) < 2:  # on a busy machine one starts late
    time.sleep(0.01)
"""
IMPORTS = "import os, time\ntime.sleep(2 + int(os.environ['RANK']))\n"  # as from a slow disk: not at the same time
MISTAKES = {
    f"{MEET}import no_such_module": "ModuleNotFoundError: No module named 'no_such_module'",
    f"{IMPORTS}import no_such_module": "ModuleNotFoundError: No module named 'no_such_module'",
    f"{MEET}print(undefined)": "NameError: name 'undefined' is not defined",
    "def main(:\n    pass": "SyntaxError: invalid syntax",
    f"{MEET}import argparse\nargparse.ArgumentParser().parse_args(['--wrong'])": "exited with code 2",
}


@pytest.mark.parametrize("source", MISTAKES, ids=["module", "slow imports", "name", "syntax", "arguments"])
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


ATTEMPT = """
if number <= int(sys.argv[2]):
    raise {error}
"""


@pytest.mark.parametrize(
    ("error", "failing", "flags", "code", "restarts", "why"),
    [
        pytest.param("FileNotFoundError(2, 'No such file', '/data/train')", 3, [], 0, 3, "", marks=pytest.mark.system),
        ("URLError('[Errno -3] Temporary failure in name resolution')", 2, [], 0, 2, ""),
        pytest.param(
            "RuntimeError('No CUDA GPUs are available')",
            4,
            [],
            1,
            3,
            "3 restarts without progress",
            marks=pytest.mark.system,
        ),
        pytest.param("ValueError('bad')", 1, [], 0, 1, "", marks=pytest.mark.system),
        ("ValueError('bad')", 2, [], 1, 1, "an error in the script, twice before the first step: all 2 ranks"),
        pytest.param("ValueError(f'bad {number}')", 2, [], 0, 2, "", marks=pytest.mark.system),
        pytest.param("ValueError('bad')", 2, ["--max-restarts", "2"], 0, 2, "", marks=pytest.mark.system),
        ("ValueError('bad')", 3, ["--max-restarts", "2"], 1, 2, "2 of 2 restarts used (--max-restarts)"),
        ("NameError('bad')", 1, ["--max-restarts", "1"], 0, 1, ""),
    ],
)
def test_error_of_all_ranks_before_the_first_step(
    job: StartJob, tmp_path: Path, error: str, failing: int, flags: list[str], code: int, restarts: int, why: str
) -> None:
    """In the first `failing` rounds all ranks raise it."""
    script = tmp_path / "attempt.py"
    script.write_text(MEET + ATTEMPT.format(error=error))
    run = job(script, COLD, str(failing), flags=flags)
    assert run.wait() == code
    ended = run.event("job_ended", restarts=restarts)
    assert ended["reason"].startswith(why or "2 workers ended with code 0"), ended["reason"]


@pytest.mark.system
def test_missing_file_on_all_ranks_in_round_2(job: StartJob) -> None:
    """The job has trained, so the file was there before and may be there again."""
    gone = [Fault(rank, 0, "raise FileNotFoundError", round=2) for rank in (0, 1)]
    run = job("train.py", "6", faults=[Fault(1, 3, "SIGKILL"), *gone])
    assert run.wait() == 0
    assert run.event("job_ended", outcome="succeeded", restarts=2)


@pytest.mark.system
def test_out_of_gpu_memory_twice_at_one_step(job: StartJob) -> None:
    run = job("train.py", "9", faults=[Fault(1, 4, "raise torch.OutOfMemoryError", times=2)])
    assert run.wait() == 1
    reason = run.event("job_ended", outcome="failed", restarts=1)["reason"]
    assert reason.startswith("an error in the script, twice after step 3: rank 1 exited with code 1 (torch.OutOfMemory")
    assert "train.py" in run.err.partition("the traceback of the rank that failed first")[2]
    assert run.event("group_started")["warm"]


@pytest.mark.parametrize(
    ("kind", "restarts", "reason"),
    [
        ("unloadable", 0, "an error in the script, not restarted: rank "),
        pytest.param("apart", 1, "an error in the script, twice", marks=pytest.mark.system),
    ],
)
def test_state_that_the_first_save_refuses(
    job: StartJob, tmp_path: Path, kind: str, restarts: int, reason: str
) -> None:
    """At once where every start would come to it; states that differ between ranks may have done so by chance."""
    run = job("kinds.py", kind, flags=["--checkpoint-dir", str(tmp_path / "checkpoints")])
    assert run.wait() == 1
    ended = run.event("job_ended", outcome="failed", exit_code=1, restarts=restarts)
    assert ended["reason"].startswith(reason)
    assert ("own.value is numpy.float32" if kind == "unloadable" else "the state of own on rank 1 differs") in run.err


@pytest.mark.system
def test_crash_of_a_plain_script_always_at_one_step(job: StartJob) -> None:
    """A script without a session counts its steps from 1 in each round: to come there again is no progress."""
    run = job("train.py", "9", faults=[Fault(1, 5, "exit 3", times=4)])
    assert run.wait() == 1
    reason = run.event("job_ended", outcome="failed", restarts=3)["reason"]
    assert reason == "3 restarts without progress beyond step 4: rank 1 exited with code 3"


RAISED_BY_EITHER = """
import os, time, torch
optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1)
for _ in range(3):
    optimizer.step()
time.sleep(0 if int(os.environ["RANK"]) == int(os.environ["ELASTICD_ROUND"]) % 2 else 3600)
raise TypeError(f"no argument 'device' in <Hook object at {0x7F0000000000 + 16 * os.getpid():#x}>")
"""


@pytest.mark.system
def test_error_that_names_an_object_by_its_address(job: StartJob, tmp_path: Path) -> None:
    """It is the same error in each round, whichever rank is the first to raise it."""
    script = tmp_path / "either.py"
    script.write_text(RAISED_BY_EITHER)
    run = job(script)
    assert run.wait() == 1
    reason = run.event("job_ended", outcome="failed", restarts=3)["reason"]
    assert reason.startswith("3 restarts without progress beyond step 3: rank ")


@pytest.mark.system
def test_script_that_refuses_a_smaller_world(nodes: Callable[[str], Nodes]) -> None:
    """After one refused round the job waits for the old size: until a node joins, or for --replace-timeout."""
    both = nodes("1:2")
    flags = ["--replace-timeout", "300s", "--rdzv-conf", "last_call_timeout=30"]
    agents = [both.agent(name, "fixed.py", "2", "400", flags=flags, warm=True) for name in "ab"]
    lost, kept = agents
    kept.event("first_step", round=1)
    lost.process.kill()
    waiting = "the script has refused to start with less than 2 workers, and there is room for 1"
    until(lambda: waiting in kept.err, lambda: kept.err)
    assert "this script needs 2 ranks, not 1" in kept.err
    assert kept.event("round_published", round=2)["world_size"] == 1
    third = both.agent("c", "fixed.py", "2", "400", flags=flags, warm=True)
    again = kept.event("round_published", round=3)
    assert (again["world_size"], again["cause"]) == (2, "resize")
    kept.event("first_step", round=3)
    third.process.kill()
    until(lambda: kept.err.count(waiting) > 1, lambda: kept.err)
    assert not kept.events("round_published", round=4, world_size=1), "it is known by now"


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
    assert all(backoff <= wait < backoff + 10 for backoff, wait in enumerate(waits)), waits


@pytest.mark.parametrize("most", [0, 1])
def test_max_restarts_is_a_hard_total(job: StartJob, most: int) -> None:
    faults = [Fault(1, 0, "SIGKILL", times=most + 1)]
    run = job("plain.py", COLD, "sleep", faults=faults, flags=["--max-restarts", str(most)])
    assert run.wait() == 1
    reason = run.event("job_ended", outcome="failed", exit_code=1, restarts=most)["reason"]
    assert reason == f"{most} of {most} restarts used (--max-restarts): rank 1 was killed by SIGKILL"


@pytest.mark.system
def test_restarts_an_hour_have_a_bound_even_with_progress(job: StartJob) -> None:
    faults = [Fault(0, 4, "SIGKILL", times=3)]
    run = job("train.py", "9", faults=faults, flags=["--max-restarts-per-hour", "2"])
    assert run.wait() == 1
    reason = run.event("job_ended", outcome="failed", restarts=2)["reason"]
    assert reason.startswith("more than 2 restarts an hour, 2 in all (--max-restarts-per-hour): rank 0 was killed")


SAVES_ON_RANK_0 = """
import os, sys, time
from pathlib import Path
import torch
from torch.nn.parallel import DistributedDataParallel
import elasticd

session = elasticd.init()
model = DistributedDataParallel(torch.nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
session.attach(model=model, optimizer=optimizer)
session.restore()
while session.steps < 200:
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    session.step()
    time.sleep(0.02)
    if session.steps % 25 == 0 and session.rank == 0:
        with (Path(os.environ["WORK"]) / "saves").open("a") as file:
            print(time.monotonic(), file=file)
        session.save()
os._exit(0)
"""


@pytest.mark.system
def test_save_on_one_rank_ends_the_job_at_the_second_time(job: StartJob, tmp_path: Path) -> None:
    """Each time in seconds and with its name, not as a hang."""
    script = tmp_path / "saves_on_rank_0.py"
    script.write_text(SAVES_ON_RANK_0)
    run = job(script, flags=["--checkpoint-dir", str(tmp_path / "checkpoints"), "--log-dir", str(tmp_path / "log")])
    assert run.wait(within=120) == 1
    ended = run.event("job_ended", outcome="failed", restarts=1)
    assert "rank 1 has not called save() at step 50; all ranks must" in ended["reason"]
    assert run.events("hang_detected") == []
    saves = [float(line) for line in run.file("saves").split()]
    exits = [min(e["mono"] for e in run.events("worker_exited", round=number)) for number in (1, 2)]
    assert len(saves) == 2
    assert max(end - begin for begin, end in zip(saves, exits, strict=True)) < 10
