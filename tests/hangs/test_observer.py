"""Ages of a worker, which grow with observed time only."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from elasticd.heartbeat import record as beat
from elasticd.heartbeat.record import HeartbeatWriter
from elasticd_agent.hangs.observer import MAX_LOOK_GAP_S, GroupObserver
from elasticd_agent.system.processes.process_usage import TreeUsage
from tests.faults.job import until


@pytest.fixture
def worker(tmp_path: Path) -> tuple[GroupObserver, HeartbeatWriter]:
    beat.create(tmp_path / "beat")
    observer = GroupObserver(1, [(0, 0)], [tmp_path / "beat"], [tmp_path / "notes"])
    observer.set_processes([os.getpid()], 0)
    return observer, HeartbeatWriter(tmp_path / "beat")


@pytest.fixture
def writer(worker: tuple[GroupObserver, HeartbeatWriter]) -> HeartbeatWriter:
    return worker[1]


@pytest.fixture
def watch(worker: tuple[GroupObserver, HeartbeatWriter]) -> Iterator[GroupObserver]:
    yield worker[0]
    worker[0].close()


def test_heartbeat_age_counts_observed_time(watch: GroupObserver, writer: HeartbeatWriter) -> None:
    def alive_s(now: float) -> float:
        return watch.observe(now).ranks[0].alive_s

    assert alive_s(100.0) == alive_s(100.5) == -1, "there has been none"
    writer.tick(3, 0)
    assert alive_s(101.0) == 0
    assert alive_s(101.5) == 0.5
    assert alive_s(500.0) == 0.5 + MAX_LOOK_GAP_S, "nobody looked in between"
    writer.tick(3, 0)
    assert alive_s(500.5) == 0
    writer.on_thread_stop()
    assert alive_s(501.0) == alive_s(502.0) == -1, "the thread has ended: nobody holds the GIL against it"


def test_rank_without_a_process_does_not_grow_older(watch: GroupObserver) -> None:
    """Its launcher imports torch."""
    watch.set_processes([], 0)
    assert [watch.observe(100.0 + 0.5 * look).idle_s for look in range(20)][-1] < 1.0
    watch.set_processes([os.getpid()], 0)
    assert watch.observe(110.0).idle_s >= 0.5


def test_count_of_an_exited_rank_is_that_of_its_last_tick(watch: GroupObserver, writer: HeartbeatWriter) -> None:
    """After os._exit there is none, and the rank may have issued more than its last count."""
    writer.tick(7, 0)
    assert watch.observe(100.0).ranks[0].collectives == 7
    watch.worker_exited(0)
    assert watch.observe(101.0).ranks[0].collectives == -1
    writer.on_thread_stop()
    assert watch.observe(102.0).ranks[0].collectives == 7


def test_device_age_counts_since_counts_changed(watch: GroupObserver, writer: HeartbeatWriter) -> None:
    def device_s(now: float) -> float:
        return watch.observe(now).ranks[0].device_s

    writer.step(1)
    assert device_s(100.0) == device_s(100.5) == -1
    for at, completed in ((101.0, 6), (102.0, 7)):
        writer.write_groups(((1, 9, completed),))
        assert device_s(at) == 0
        assert device_s(at + 0.5) == 0.5
    writer.step(2)
    assert device_s(103.0) == -1, "what was read before a step says nothing after it"


def test_ranks_that_are_all_stopped_do_not_grow_older(watch: GroupObserver, writer: HeartbeatWriter) -> None:
    """A scheduler resumes them: what they waited for then is as old as before. Nor does their GIL."""
    writer.step(1)
    writer.tick(3, 0)
    watch.read_state = lambda pid: "S"
    before = [watch.observe(at).ranks[0] for at in (100.0, 101.0)][-1]
    watch.read_state = lambda pid: "T"
    stopped = [watch.observe(102.0 + at).ranks[0] for at in range(31)][-1]
    assert stopped.stopped_s == 30.0
    assert stopped.idle_s == before.idle_s
    assert stopped.alive_s <= before.alive_s
    watch.read_state = lambda pid: "S"
    assert watch.observe(133.0).ranks[0].idle_s == before.idle_s + 1.0


def test_ranks_that_are_continued_one_after_the_other(tmp_path: Path) -> None:
    """The last one is no rank that is stopped while others run, until it has been that for a while."""
    files = [tmp_path / f"beat-{rank}" for rank in (0, 1)]
    for file in files:
        beat.create(file)
    watch = GroupObserver(1, [(0, 0), (1, 1)], files, [tmp_path / f"notes-{rank}" for rank in (0, 1)])
    watch.set_processes([1, 2], 0)
    watch.read_usage = lambda pids, port: {}
    stopped = {1, 2}
    watch.read_state = lambda pid: "T" if pid in stopped else "S"
    ages = [watch.observe(100.0 + at).ranks[1].stopped_s for at in range(31)]
    stopped.remove(1)
    ages += [watch.observe(131.0 + at / 4).ranks[1].stopped_s for at in range(3)]
    watch.close()
    assert ages[-4:] == [30.0, 0.0, 0.25, 0.5]


def test_rank_that_is_stopped_for_a_part_of_each_moment_runs(watch: GroupObserver, writer: HeartbeatWriter) -> None:
    """As by cpulimit: each look may find it stopped, and its heartbeat shows that it ran in between."""
    watch.read_state = lambda pid: "T"
    for look in range(20):
        writer.tick(3, 0)
        assert watch.observe(100.0 + look / 4).ranks[0].stopped_s == 0.0
    assert [watch.observe(105.0 + look / 4).ranks[0].stopped_s for look in range(3)] == [0.25, 0.5, 0.75]


@pytest.mark.parametrize(
    ("moved", "pids", "busy", "moves"),
    [(0, (), False, False), (50, (), False, False), (500, (), True, True), (0, (7,), True, False)],
    ids=["nothing", "a keep-alive", "an answer", "another child"],
)
def test_little_that_shows_a_wait_for_others(
    watch: GroupObserver, writer: HeartbeatWriter, moved: int, pids: tuple[int, ...], busy: bool, moves: bool
) -> None:
    """A pool of threads asks a server, a child follows the other: the rank is not idle."""
    writer.step(1)
    watch.read_usage = lambda known, port: dict.fromkeys(known, TreeUsage(0.0, 0, pids=frozenset({1})))
    assert [watch.observe(100.0 + at).ranks[0] for at in range(10)][-1].quiet_s > 5
    after = TreeUsage(0.0, 0, tcp_moved_bytes=moved, pids=frozenset({1, *pids}))
    watch.read_usage = lambda known, port: dict.fromkeys(known, after)
    seen = [watch.observe(110.0 + at).ranks[0] for at in range(10)]
    assert (min(one.quiet_s for one in seen) < 1) == busy
    assert (min(one.sockets_s for one in seen) < 1) == moves
    assert seen[-1].quiet_s > 5


@pytest.mark.parametrize("queued", [None, 0])
def test_sockets_that_the_kernel_does_not_show(
    watch: GroupObserver, writer: HeartbeatWriter, queued: int | None
) -> None:
    """As in a sandbox, or without its module for them."""
    writer.step(1)
    watch.read_usage = lambda known, port: dict.fromkeys(known, TreeUsage(0.0, 0, tcp_queued_bytes=queued))
    seen = [watch.observe(100.0 + at).ranks[0].shows_sockets for at in range(5)]
    assert (seen[0], seen[-1]) == (True, queued is not None)


def test_requested_dump_is_no_work(watch: GroupObserver, writer: HeartbeatWriter) -> None:
    """A flight recorder is written in the middle of two samples; the answer comes when it is all there."""
    written = [0, 100, 500_000, 900_000, 900_100, 905_000, 906_000]
    answered = [0, 0, 0, 1, 1, 1, 1]
    watch.read_usage = lambda pids, port: dict.fromkeys(pids, TreeUsage(0.0, written[0]))
    watch.set_processes([42], 0)
    watch.read_state = lambda pid: "S"
    watch.observe(100.0)
    found = []
    for number, answer in enumerate(answered):
        watch.read_usage = lambda pids, port, number=number: dict.fromkeys(pids, TreeUsage(0.0, written[number]))
        writer.dump_done = answer
        found.append(watch.observe(101.0 + number / 2).ranks[0].io_bytes)
    assert found == [0, 100, 500_000, 100, 200, 5100, 6100]


@pytest.mark.parametrize(("throttled_s", "busy"), [(0.4, True), (0.1, False)], ids=["a quota", "hardly a quota"])
def test_time_under_a_quota_is_work(watch: GroupObserver, throttled_s: float, busy: bool) -> None:
    """In each half second the control group is stopped for so long, and the rank uses next to nothing."""
    watch.read_state = lambda pid: "S"
    for look in range(8):
        watch.read_usage = lambda pids, port, look=look: dict.fromkeys(
            pids, TreeUsage(0.001 * look, 0, throttled_s=throttled_s * look)
        )
        (rank,) = watch.observe(100.0 + look / 2).ranks
    assert rank.window_s > 0
    assert (rank.cpu_s >= rank.window_s) is busy
    assert (rank.quiet_s == 0.0) is busy


def test_child_that_trains_is_observed(watch: GroupObserver, tmp_path: Path) -> None:
    """As a shell does that was started with --no-python."""
    beat = f"HeartbeatWriter({str(tmp_path / 'beat')!r})"
    train = f"import time; from elasticd.heartbeat.record import HeartbeatWriter; {beat}; time.sleep(60)"
    shell = subprocess.Popen(["sh", "-c", '"$@"; true', "sh", sys.executable, "-c", train], start_new_session=True)
    try:
        watch.set_processes([shell.pid], 0)
        until(lambda: watch.observe(time.monotonic()).training_pids != (shell.pid,), "the child to be found")
        (child,) = watch.observe(time.monotonic()).training_pids
        os.kill(child, signal.SIGSTOP)
        until(lambda: watch.observe(time.monotonic()).ranks[0].stopped_s > 0, "the child to be seen stopped")
        os.kill(child, signal.SIGKILL)
        until(lambda: watch.observe(time.monotonic()).training_pids == (shell.pid,), "the child to be gone")
    finally:
        os.killpg(shell.pid, signal.SIGKILL)
        shell.wait()
