"""Records and files of ended jobs: kept for their time, whatever a host's clock says, then removed completely."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from queue import SimpleQueue

import pytest

from elasticd.errors import StoreUnavailable, UsageError
from elasticd_agent.model.keys import Keys
from elasticd_agent.model.records import Member, NodeRecord, Round
from elasticd_agent.store.memory import MemoryStore
from elasticd_daemon import job_dir, state_dir
from elasticd_daemon import keys as names
from elasticd_daemon.records import JobResult, NodeStatus, Placement, RunnerStatus, Submission
from elasticd_daemon.scheduler import job_queue as queue
from elasticd_daemon.scheduler import retention as ended
from elasticd_daemon.scheduler.scheduler import REREAD_S, Scheduler
from tests.daemon.stores import Clock, InterruptedStore

HOUR = 3600.0
FOR_EVER = {names.SUBMISSION_SEQUENCE, names.SCHEDULER_CLOCK, names.SCHEDULER, names.NODES + "a"}


class Queue:
    """One node that is always there, and schedulers that start and end."""

    def __init__(self, **settings: float) -> None:
        self.clock = Clock()
        self.memory = MemoryStore(self.clock)
        self.store = InterruptedStore(self.memory)
        self.settings = settings
        status = self.memory.announce(names.NODES + "a", NodeStatus("a", "i", 4).to_json(), 1e9)
        assert status is not None
        self.scheduler = self.next_scheduler()

    def next_scheduler(self) -> Scheduler:
        settings = {"lease_s": 3.0, **self.settings}
        self.scheduler = Scheduler(self.store, "a", f"i-{self.clock.now}", **settings)  # type: ignore[arg-type]
        return self.scheduler

    def turns(self, seconds: float, step_s: float = 1.0) -> list[str]:
        """A turn every `step_s`; the lease is as long as a step."""
        sentences = []
        for _ in range(max(1, round(seconds / step_s))):
            self.clock.now += step_s
            sentences += self.scheduler.turn(self.clock.now)
        return sentences

    def run(self, job: str, at: float = 0.0, token: str = "") -> Submission:
        """A job that ran and ended, with the keys of its own rendezvous."""
        wants = queue.submit(self.memory, Submission(job, 0, "{}", 1, 1, 1, 1, submitted_at=at, token=token))
        self.scheduler.turn(self.clock.now)
        keys = Keys(job)
        last = Round(3, (), run=str(wants.number), reason="done", outcome="succeeded", exit_code=0)
        leftover = {keys.spec: b"{}", keys.round: last.to_json(), keys.ended: b"1", keys.done(2) + "a": b""}
        for key, value in leftover.items():
            found = self.memory.read(key)
            assert self.memory.compare_and_swap(key, None if found is None else found.version, value)
        queue.record_result(self.memory, JobResult(job, wants.number, "succeeded", 0, "done", ended_at=at))
        return wants

    def left(self) -> set[str]:
        return set(self.memory.list("")) - FOR_EVER

    def jobs(self) -> set[str]:
        view = queue.read_view(self.memory)
        return {s.job for s in view.submissions} & {e.job for e in view.results} & {p.job for p in view.placements}


def test_records_expire_after_the_retention_time() -> None:
    """All of them, and no other job's."""
    over = Queue(retention_s=100.0)
    before = set(over.memory.list(""))
    over.run("llm")
    over.memory.compare_and_swap(Keys("llmer").round, None, b"other")
    over.memory.compare_and_swap("/other/llm", None, b"foreign")
    over.turns(99)
    assert over.jobs() == {"llm"}
    sentences = over.turns(REREAD_S + 3)
    assert sentences == ["the records of job llm, number 1, were removed"]
    assert over.left() - before == {Keys("llmer").round, "/other/llm"}
    assert over.memory.read(names.CLEANUP_LEASE) is None
    assert over.run("llm").number == 2, "the id is free, the number is not used again"


def test_records_of_a_job_that_still_runs_somewhere_are_kept() -> None:
    """Its node would find no record that the job was cancelled, and register it again in the store."""
    over = Queue(retention_s=0.0)
    running = NodeStatus("b", "i", 4, runners=(RunnerStatus("llm", 1, (0,), "running"),))
    slow = over.memory.announce(names.NODES + "b", running.to_json(), 1e9)
    assert slow is not None
    over.run("llm")
    over.turns(2 * REREAD_S)
    assert over.jobs() == {"llm"}
    slow.withdraw()
    over.turns(over.scheduler.adopt_timeout_s)
    assert over.jobs() == {"llm"}
    over.turns(2 * REREAD_S)  # its runner has left by itself
    assert over.jobs() == set()


@pytest.mark.parametrize("at", [0.0, 9e10])
def test_scheduler_clock_ignores_the_time_of_day(at: float) -> None:
    over = Queue(retention_s=10 * HOUR, lease_s=2000.0, renewal_s=600.0)
    over.run("llm", at)
    for _ in range(9):
        over.turns(HOUR, 600.0)
        over.scheduler.close()
        over.next_scheduler()
    assert over.jobs() == {"llm"}
    found = over.memory.read(names.SCHEDULER_CLOCK)
    assert 7.5 * HOUR < float(found.value) <= 9 * HOUR, "a change of schedulers loses a tick or two"
    over.turns(3 * HOUR, 600.0)
    assert not over.left()


def test_clock_stands_still_without_a_scheduler() -> None:
    over = Queue(retention_s=2 * HOUR, lease_s=2000.0)
    over.run("llm")
    over.turns(HOUR, 600.0)
    over.scheduler.close()
    over.clock.now += 1e8  # the whole cluster was switched off for years
    over.next_scheduler()
    over.turns(1200.0, 600.0)
    assert over.jobs() == {"llm"}
    over.turns(HOUR, 600.0)
    assert not over.left()


@pytest.mark.parametrize("text", [None, b"", b"x", b"-1", b"9" * 300])
def test_lost_or_damaged_clock(text: bytes | None) -> None:
    """It continues at the newest time that a record has."""
    over = Queue(retention_s=5 * HOUR, lease_s=2000.0)
    over.turns(3 * HOUR, 600.0)
    over.run("llm")
    over.turns(HOUR, 600.0)
    over.scheduler.close()
    found = over.memory.read(names.SCHEDULER_CLOCK)
    assert found is not None
    if text is None:
        over.memory.delete(names.SCHEDULER_CLOCK)
    else:
        assert over.memory.compare_and_swap(names.SCHEDULER_CLOCK, found.version, text)
    over.next_scheduler()
    over.turns(4 * HOUR, 600.0)
    assert over.jobs() == {"llm"}, "not early"
    over.turns(2 * HOUR, 600.0)
    assert not over.left(), "nor much late"


def test_results_above_the_maximum() -> None:
    """The oldest are removed first."""
    over = Queue(retention_s=1e9, max_results=5)
    for n in range(20):
        over.run(f"j{n}")
        over.turns(1)
    over.turns(5)
    assert over.jobs() == {f"j{n}" for n in range(15, 20)}
    assert len(over.left()) == 5 * (3 + 4)


def test_keys_in_use_by_another_run_stay() -> None:
    """`elasticd run` may have a job of the same name in the same store."""
    over = Queue(retention_s=10.0)
    for job, other in (("run", "theirs"), ("garbage", None), ("live", "")):
        wants = over.run(job)
        found = over.memory.read(Keys(job).round)
        assert found is not None
        members = (Member("x", "i", (0,)),)
        run = str(wants.number) if other == "" else other
        value = b"{" if run is None else Round(9, members, run=run, reason="runs").to_json()
        assert over.memory.compare_and_swap(Keys(job).round, found.version, value)
    over.memory.compare_and_swap(Keys("live").node("x"), None, NodeRecord("x", "i", "x:1", (0,)).to_json())
    over.turns(20)
    assert not over.jobs()
    assert {key.split("/")[4] for key in over.left()} == {"run", "garbage", "live"}
    assert all(key.startswith("/elasticd/v1/jobs/") for key in over.left())


def test_expired_job_that_never_ran() -> None:
    over = Queue(retention_s=10.0)
    queue.submit(over.memory, Submission("huge", 0, "{}", 9, 9, 1, 1))
    queue.cancel(over.memory, "huge", "", 0.0)
    over.turns(5)
    assert over.jobs() == {"huge"}
    over.turns(7 + REREAD_S)
    assert not over.left()


def test_expired_job_whose_last_run_never_began() -> None:
    """The keys are those of a run before it, whose own result is gone."""
    over = Queue(retention_s=10.0)
    over.run("again")
    queue.submit(over.memory, Submission("again", 0, "{}", 9, 9, 1, 1, token="second"))
    queue.cancel(over.memory, "again", "", 0.0)
    over.turns(17 + REREAD_S)
    assert not over.left()


def test_records_that_cannot_be_removed() -> None:
    """They cost few requests and block no other job."""
    over = Queue(retention_s=10.0)
    for n in range(10):
        over.run(f"j{n}")
    broken = [f"j{n}" for n in range(6)]
    for job in broken:
        found = over.memory.read(names.SUBMISSIONS + job)
        assert over.memory.compare_and_swap(names.SUBMISSIONS + job, found.version, b"{")
    over.turns(20 + REREAD_S)
    assert {e.job for e in queue.read_view(over.memory).results} == set(broken)
    over.store.requests.clear()
    over.turns(300)
    assert len([verb for verb, _ in over.store.requests if verb not in ("renew", "list")]) == 0
    for job in broken:
        over.memory.delete(names.SUBMISSIONS + job)
    over.turns(700)
    assert not over.left()


def test_expired_result_without_submission() -> None:
    over = Queue(retention_s=10.0)
    over.run("llm")
    over.memory.delete(names.SUBMISSIONS + "llm")
    over.turns(12 + REREAD_S)
    assert not over.left()


def each_request(prepare: Callable[[Queue], object]) -> int:
    """How many requests one removal makes."""
    over = Queue()
    prepare(over)
    over.store.requests.clear()
    (ending,) = queue.read_view(over.memory).results
    assert ended.remove_records(over.store, ending, "a", 3.0)
    return len(over.store.requests)


def test_submission_during_the_removal() -> None:
    """At every request: the new job is refused, or it is kept."""
    count = each_request(lambda over: over.run("llm"))
    outcomes = set()
    for at in range(1, count + 1):
        over = Queue()
        over.run("llm")
        (ending,) = queue.read_view(over.memory).results
        answers: list[Submission | UsageError] = []
        over.store.requests.clear()
        over.store.before = lambda n, verb, key, at=at, over=over, to=answers: (
            to.append(attempt(over)) if n == at else None
        )
        removed = ended.remove_records(over.store, ending, "a", 3.0)
        (answer,) = answers
        if isinstance(answer, Submission):
            assert queue.read_view(over.memory).unfinished() == (answer,), "it was accepted, so it must be there"
            outcomes.add("new" if removed else "lost")
        else:
            assert "are being removed; try again in a few seconds" in str(answer)
            assert removed
            assert not over.left()
            outcomes.add("refused")
            answer = attempt(over)
            assert isinstance(answer, Submission)
        assert answer.number > 1
        assert over.memory.read(names.CLEANUP_LEASE) is None
    assert outcomes == {"lost", "refused"}


def attempt(over: Queue) -> Submission | UsageError:
    try:
        return over_again(over)
    except UsageError as error:
        return error


def over_again(over: Queue) -> Submission:
    return queue.submit(over.memory, Submission("llm", 0, "{}", 1, 1, 1, 1))


def test_scheduler_dies_during_the_removal() -> None:
    count = each_request(lambda over: over.run("llm"))
    for at in range(1, count + 1):
        over = Queue(retention_s=10.0)
        over.run("llm")
        over.scheduler.turn(over.clock.now)
        (ending,) = queue.read_view(over.memory).results

        def dies(n: int, verb: str, key: str, at: int = at) -> None:
            if n >= at:
                raise StoreUnavailable("the agent is dead")

        over.store.requests.clear()
        over.store.before = dies
        with pytest.raises(StoreUnavailable):
            ended.remove_records(over.store, ending, "a", 3.0)
        over.store.before = lambda n, verb, key: None
        over.turns(20)
        assert not over.left(), f"after request {at}"


# ---- files


def folder(state: Path, name: str, age_s: float, *, now: float = 1e9) -> Path:
    files = job_dir.JobFiles(state / "jobs" / name)
    files.logs.mkdir(parents=True)
    (files.logs / "rank-0.log").write_text("hello")
    files.agent_folder.mkdir(parents=True)
    files.runner_spec.write_text("{}")
    files.lock.write_text("1")
    files.end_mark.touch()
    os.utime(files.end_mark, (now - age_s, now - age_s))
    return files.root


def test_files_expire(tmp_path: Path) -> None:
    old, young, needed, killed = (
        folder(tmp_path, name, age_s)
        for name, age_s in (("a.b.1", 200.0), ("b.2", 50.0), ("c.3", 200.0), ("d.4", 200.0))
    )
    for other in ("jobs/readme.txt", "jobs/not-a-run", "jobs/x.y", "kept"):
        (tmp_path / other).write_text("not a run")
    sentences = ended.remove_files(tmp_path, {("c", 3)}, 1e9, 100.0)
    assert sentences == [
        "the files of a.b.1 were removed: ended 0 h ago",
        "the files of d.4 were removed: ended 0 h ago",
    ]
    assert [p.exists() for p in (old, young, needed, killed)] == [False, True, True, False]
    assert len(list((tmp_path / "jobs").iterdir())) == 5
    assert sorted(path.name for path in (tmp_path / "runners").iterdir()) == ["b.2", "c.3"]
    assert ended.remove_files(tmp_path, {("c", 3)}, 1e9, 100.0) == []
    assert ended.remove_files(tmp_path / "nothing", set(), 1e9, 100.0) == []


def test_files_of_a_live_runner(tmp_path: Path) -> None:
    root = folder(tmp_path, "llm.1", 1e6)
    with job_dir.JobFiles(root).lock.open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert ended.remove_files(tmp_path, set(), 1e9, 100.0, max_folders=0) == []
        assert root.exists()
    assert ended.remove_files(tmp_path, set(), 1e9, 100.0)
    assert not root.exists()


def test_run_folders_above_the_maximum(tmp_path: Path) -> None:
    for n in range(10):
        folder(tmp_path, f"j.{n}", 100.0 - n)
    sentences = ended.remove_files(tmp_path, set(), 1e9, 1e6, max_folders=4)
    assert len(sentences) == 6
    assert all("more than 4 runs" in sentence for sentence in sentences)
    assert sorted(p.name for p in (tmp_path / "jobs").iterdir()) == [f"j.{n}" for n in range(6, 10)]


def test_files_from_the_future(tmp_path: Path) -> None:
    """The clock was corrected, or the job's user has changed the times of its files, to fill the disk."""
    root = folder(tmp_path, "j.1", -1e6)
    (root / "exit.json").touch()
    for path in (root, root / "exit.json"):
        os.utime(path, (4e9, 4e9))
    assert ended.remove_files(tmp_path, set(), 1e9, 100.0) == []
    assert ended.remove_files(tmp_path, set(), 1e9 + 99.0, 100.0) == []
    assert root.exists()
    assert len(ended.remove_files(tmp_path, set(), 1e9 + 100.0, 100.0)) == 1
    assert not root.exists()


def test_links_are_not_followed(tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "precious").write_text("x")
    root = folder(tmp_path, "j.1", 200.0)
    (root / "link").symlink_to(elsewhere)
    (tmp_path / "jobs" / "k.2").symlink_to(elsewhere)
    assert len(ended.remove_files(tmp_path, set(), 1e9, 100.0)) == 1
    assert not root.exists()
    assert (elsewhere / "precious").exists()


def test_deeply_nested_files(tmp_path: Path) -> None:
    """More than Python's stack, a path and the table of descriptors take."""
    root, other = folder(tmp_path, "deep.1", 300.0), folder(tmp_path, "other.2", 200.0)
    fd = os.open(root, os.O_RDONLY)
    for _ in range(3000):
        os.mkdir("d", dir_fd=fd)
        below = os.open("d", os.O_RDONLY, dir_fd=fd)
        os.close(fd)
        fd = below
    os.close(fd)
    assert [sentence.rpartition(" were ")[0] for sentence in ended.remove_files(tmp_path, set(), 1e9, 100.0)] == [
        "the files of deep.1",
        "the files of other.2",
    ]
    assert not root.exists() and not other.exists()


def test_cleaner_survives_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*args: object) -> list[str]:
        raise RuntimeError("unexpected")

    monkeypatch.setattr(ended, "remove_files", fails)
    monkeypatch.setattr(state_dir, "FIRST_CLEANUP_S", 0.0)
    monkeypatch.setattr(state_dir, "CLEANUP_INTERVAL_S", 0.0)
    lines = SimpleQueue[str]()
    with closing(state_dir.DiskCleaner(tmp_path, tuple, lambda: 1.0, lines.put)):
        for _ in range(2):
            assert "RuntimeError('unexpected')" in lines.get(timeout=30)


def test_stamp_results_with_placements_of_other_runs() -> None:
    view = ended.ClusterView(
        placements=(Placement("j", 3, (), "pending"), Placement("k", 9, (), "pending")),
        results=(JobResult("j", 5, "cancelled", 143, "cancelled"), JobResult("k", 5, "failed", 1, "")),
    )
    (seen,) = ended.stamp_ended_placements(view, 7.0)
    assert (seen.job, seen.number, seen.ended_s, seen.reason) == ("j", 5, 7.0, "cancelled")
