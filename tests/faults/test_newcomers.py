"""A new process that does not come to its entry, or does not begin its round: the other ranks train beside it."""

from __future__ import annotations

import itertools
import signal

import pytest

from tests.faults.conftest import StartJob
from tests.faults.job import Job, until
from tests.faults.test_in_place import entries

pytestmark = pytest.mark.system
WITHIN_S = 240.0
"""Three processes that hang: the limit is three times the start of the first round, if that is longer."""
WORKERS, CHECKPOINTS = "2:3", ["--checkpoint-dir", "checkpoints"]


def lose_one(job: StartJob, how: str, *flags: str) -> Job:
    """Rank 1 is killed; the others train on, and the processes that follow it do `how`."""
    run = job("stays.py", how, "400", workers=WORKERS, flags=[*CHECKPOINTS, *flags])
    run.step(20)
    run.kill(1, round=1)
    run.step(1, round=2)
    return run


def trained_once(run: Job) -> bool:
    """No step is repeated. The last one of a round may lack its line: a rank leaves `session.step()` for a pause."""
    steps = run.steps(0)
    gaps = [(after[1] - before[1], after[0] > before[0]) for before, after in itertools.pairwise(steps)]
    return all(gap == 1 or (is_new_round and gap == 2) for gap, is_new_round in gaps)


def stop(run: Job) -> None:
    """The job saves its last step, as ever."""
    run.process.send_signal(signal.SIGTERM)
    assert run.wait() == 128 + signal.SIGTERM
    last = max(run.steps(0))[1]
    saved = max(int(path.name.partition("-s")[2]) for path in run.work.glob("checkpoints/r*"))
    assert saved in (last, last + 1), "a rank may be killed before it has written its step"


@pytest.mark.parametrize(
    ("how", "why"),
    [
        ("waits", "did not come to session.run within "),
        ("fails", "exited with code 1 (OSError: no licence left) before session.run"),
        ("dies", "was killed by SIGKILL before session.run"),
    ],
)
def test_three_processes_that_do_not_come_to_their_entry(job: StartJob, how: str, why: str) -> None:
    """Where they hang, the slot is left out. Where they end, the next one starts with its round."""
    hangs = how == "waits"
    run = lose_one(job, how, *(["--startup-ceiling", "5s"] if hangs else []))
    last = "as 2 before it: the job continues without the slot" if hangs else "from now on new processes start together"
    until(lambda: last in run.err, run.report, WITHIN_S)
    for number in (2, 3):
        assert run.err.count(f"another one starts ({number} of 3)") == 1
    assert run.err.count(f"the new process of slot 1 {why}") == 3
    assert run.file("newcomer") == how * 3
    if hangs:
        at = run.steps(0)[-1][1]
        run.step(at + 50, round=2)
        assert not entries(run, 3)
    else:
        run.step(20, round=3)
    assert trained_once(run)
    stop(run)
    assert trained_once(run)


def test_process_that_stands_at_its_entry_and_does_not_begin_its_round(job: StartJob) -> None:
    """The round that waits for it is ended, and the next one has new processes: no step is lost or repeated."""
    run = lose_one(job, "stands")
    run.step(20, round=4)
    why = "round 3: the group could not be started: rank 1 said to wait for it, and did not begin it within "
    assert run.err.count(why) == 1, run.err
    assert (
        "round 3: it kept workers' processes, and has failed before its first step: the next round has new" in run.err
    )
    assert run.event("group_started", round=3)["kept"] and not run.event("group_started", round=4)["kept"]
    assert run.file("newcomer") == "stands"
    assert trained_once(run)
    stop(run)


def test_round_that_needs_the_slot_of_processes_that_hang(job: StartJob) -> None:
    """A second rank is lost: too few remain without the slot that was left out, and its process begins with them."""
    run = lose_one(job, "waits", "--startup-ceiling", "5s")
    until(lambda: "the job continues without the slot" in run.err, run.report, WITHIN_S)
    run.kill(1, round=2)
    run.step(20, round=3)
    assert entries(run, 3).keys() >= {0, 1}
    assert trained_once(run)
    stop(run)


def test_stop_that_ends_a_rank_at_once(job: StartJob) -> None:
    """A new process answers SIGTERM by its end until its first step. The others lose their peer, and do not wait."""
    run = job("stays.py", "ends", "400", workers="2", flags=[*CHECKPOINTS, "--hang-floor", "60s"])
    run.file("ends")
    stop(run)
    assert "lost its peers before all had stopped: saved and killed" in run.err
