"""The heartbeat thread: what it reports of a hung worker, and that no script is affected by it."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from elasticd.heartbeat import record as heartbeat
from elasticd.heartbeat.record import HeartbeatReader, HeartbeatWriter, Phase
from elasticd.heartbeat.thread import STEPPING_AFTER, STEPPING_PERIODS, HeartbeatThread


def test_thread_counts_collectives_and_waits(start: Any, wait_for: Any) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        other_port = free.getsockname()[1]
    job = start("heartbeat_ranks.py", "training", OTHER_PORT=str(other_port))
    readers = [rank.read_heartbeat for rank in job.ranks]

    def go(gate: int) -> None:
        for rank in job.ranks:
            rank.request(gate)

    def both(condition: Callable[[heartbeat.Heartbeat], bool], what: str) -> None:
        wait_for(lambda: all(condition(read()) for read in readers), what)

    both(lambda seen: seen.alive_ticks > 1, "a tick without a group")
    assert {
        (seen.collectives, seen.collectives_per_step, seen.collective_timeout_s)
        for seen in (read() for read in readers)
    } == {(-1, -1, 0.0)}
    go(1)
    both(lambda seen: seen.collectives == 6 and seen.step == 3, "three steps of two collectives")
    assert [
        (seen.collectives_per_step, seen.collectives_at_step, seen.collective_timeout_s)
        for seen in (read() for read in readers)
    ] == [(2, 6, 77)] * 2
    before = [read().wait_ticks for read in readers]
    go(2)
    wait_for(lambda: readers[0]().collectives == 8 and readers[1]().collectives == 7, "rank 1 to stop between two")
    wait_for(lambda: readers[0]().wait_ticks > before[0] + 3, "rank 0 to wait")
    assert readers[1]().wait_ticks <= before[1] + 1, "rank 1 is waited for; the tick after its last wait counts that"
    moved = [read().moved_ticks for read in readers]
    wait_for(lambda: readers[1]().moved_ticks > moved[1] + 2, "rank 1, which looks again and again, to be seen to move")
    assert readers[0]().moved_ticks == moved[0], "rank 0 is inside of a call"
    assert [flight_of(rank, wait_for) for rank in job.ranks] == [(8, False), (7, True)]
    go(3)
    wait_for(lambda: [read().collectives for read in readers] == [9, 8], "rank 1 to stop before the first of two")
    before = [read().wait_ticks for read in readers]
    wait_for(lambda: readers[0]().wait_ticks > before[0] + 3, "rank 0 to wait, with one more to issue")
    assert readers[1]().wait_ticks <= before[1] + 1, "rank 1 is waited for; the tick after its last wait counts that"
    go(4)
    both(lambda seen: seen.collectives == 10, "rank 1 to catch up")
    go(5)
    both(lambda seen: seen.collectives == -1, "the group to be destroyed")
    assert {(seen.collectives_per_step, seen.collective_timeout_s) for seen in (read() for read in readers)} == {
        (-1, 0.0)
    }
    go(6)
    both(lambda seen: seen.collectives == 1, "another group to be counted anew")
    go(7)
    assert job.codes() == [0, 0], [rank.errors() for rank in job.ranks]


def flight_of(rank: Any, wait_for: Any) -> tuple[int, bool]:
    """The last collective that the flight recorder knows, and whether it is over."""
    with HeartbeatReader(rank.beat) as reader:
        number = reader.request_dump()
        wait_for(lambda: reader.read().dump_done == number, "a dump")
    recording = json.loads(Path(f"{rank.beat}.flight").read_text())
    if "entries" not in recording:
        pytest.skip("torch records gloo's collectives from 2.8 on")
    last = recording["entries"][-1]
    assert last["profiling_name"] == "gloo:all_reduce"
    return last["collective_seq_id"], last["retired"]


def test_timeout_that_the_script_gave_a_wait(start: Any, wait_for: Any) -> None:
    """The longest one of all groups is read as well: torch enforces it."""
    job = start("heartbeat_ranks.py", "waiting_with_a_timeout")
    first, second = job.ranks
    for gate, timeout_s in enumerate((600.0, 555.0, 0.0), 1):
        before = first.read_heartbeat().wait_ticks
        wait_for(lambda before=before: first.read_heartbeat().wait_ticks > before + 3, "rank 0 to wait")
        wait_for(lambda timeout_s=timeout_s: first.read_heartbeat().wait_timeout_s == timeout_s, f"{timeout_s} s")
        assert second.read_heartbeat().wait_timeout_s == 0.0, "it waits for nobody"
        wait_for(lambda: first.read_heartbeat().collective_timeout_s == 555.0, "the longest timeout")
        second.request(gate)
    assert job.codes() == [0, 0], first.errors()


def test_messages_in_a_group_are_movement(start: Any, wait_for: Any) -> None:
    """They count in no default group, and the rank is seen at the same place before and after."""
    job = start("heartbeat_ranks.py", "receiving_in_a_group")
    first, second = job.ranks
    wait_for(lambda: first.read_heartbeat().wait_ticks > 12, "rank 0 to wait for a second")
    for gate in (1, 2):
        before = first.read_heartbeat()
        second.request(gate)
        wait_for(lambda before=before: first.read_heartbeat().moved_ticks > before.moved_ticks, "a message to be seen")
        assert first.read_heartbeat().collectives == before.collectives
    for rank in job.ranks:
        rank.request(4)
    assert job.codes() == [0, 0], first.errors()


def test_timeout_of_a_group_that_is_made(start: Any, wait_for: Any) -> None:
    """It says how long the others may take to come there."""
    job = start("heartbeat_ranks.py", "joining")
    first, second = job.ranks
    wait_for(lambda: first.read_heartbeat().collective_timeout_s == 77.0, "rank 0 to join")
    assert first.read_heartbeat().barrier == heartbeat.INIT_PROCESS_GROUP_BARRIER
    assert first.read_heartbeat().collectives == -1
    assert second.read_heartbeat().collective_timeout_s == 0.0
    second.request(1)
    wait_for(lambda: all(rank.read_heartbeat().collectives == 0 for rank in job.ranks), "the group")
    for rank in job.ranks:
        rank.request(2)
    assert job.codes() == [0, 0], first.errors()


def test_rank_that_waits_for_more_ranks_than_the_job_has_says_so(start: Any) -> None:
    """torch waits for them without a word, until its timeout."""
    job = start("heartbeat_ranks.py", "joining_too_many", "3")
    assert job.codes() == [0, 0], job.ranks[0].errors()
    for number, rank in enumerate(job.ranks):
        (event,) = rank.read_events()
        assert f"rank {number} waits in init_process_group(world_size=3), and the job has 2 ranks:" in event.reason


def test_thread_stalls_while_gil_is_held(start: Any, wait_for: Any) -> None:
    job = start("heartbeat_ranks.py", "holding_the_gil", world_size=1)
    (rank,) = job.ranks
    wait_for(lambda: rank.read_heartbeat().alive_ticks > 2, "a tick")
    rank.request(1)
    seen: list[int] = []

    def stands_still() -> bool:
        seen.append(rank.read_heartbeat().alive_ticks)
        return len(seen) > 300 and len(set(seen[-300:])) == 1  # 1.5 s, fifteen pulses

    wait_for(stands_still, "the heartbeat thread to stand still")
    assert seen[-1] > 0


def test_thread_counts_custom_process_group(start: Any, wait_for: Any) -> None:
    job = start("heartbeat_ranks.py", "a_class_of_its_own", world_size=1)
    (rank,) = job.ranks
    wait_for(lambda: rank.read_heartbeat().alive_ticks > 2, "a tick")
    for gate in (1, 2):
        alive = rank.read_heartbeat().alive_ticks
        wait_for(lambda alive=alive: rank.read_heartbeat().alive_ticks > alive + 2, "ticks")
        assert rank.read_heartbeat().collectives == -1
        rank.request(gate)
    wait_for(lambda: rank.read_heartbeat().collectives == 123, "its count")
    rank.request(3)
    assert job.codes() == [0], rank.errors()


def test_thread_survives_every_end_of_script(scripts: Path, environment: dict[str, str], tmp_path: Path) -> None:
    environment |= {"RANK": "0", "WORLD_SIZE": "1", "ELASTICD_HEARTBEAT": str(tmp_path / "beat")}
    heartbeat.create(tmp_path / "beat")
    command = [sys.executable, str(scripts / "heartbeat_ranks.py"), "exits", "3"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=90, check=True)
    assert json.loads(done.stdout) == [7, 7, 1]
    assert done.stderr.count("RuntimeError: on purpose") == 1
    for number in range(3):
        with HeartbeatReader(tmp_path / f"beat-{number}") as reader:
            assert reader.read().alive_ticks == 0, "it was ended"


# --- without torch ---

PREFIX = """
import os, sys, time
from elasticd.heartbeat import record as heartbeat
from elasticd.heartbeat.thread import HeartbeatThread
writer = heartbeat.from_environment()
thread = HeartbeatThread(writer)

def until(condition):
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)

def alive():
    with heartbeat.HeartbeatReader(os.environ["ELASTICD_HEARTBEAT"]) as reader:
        return reader.read().alive_ticks
"""


@pytest.fixture
def python(environment: dict[str, str], tmp_path: Path) -> Callable[[str], subprocess.Popen[str]]:
    """Starts a script that may use what PREFIX gives; it ends well by itself."""
    heartbeat.create(tmp_path / "beat")

    def start(script: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-c", PREFIX + textwrap.dedent(script)]
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        return subprocess.Popen(
            command, env=environment | {"ELASTICD_HEARTBEAT": str(tmp_path / "beat")}, text=True, **pipes
        )

    return start


def ended(process: subprocess.Popen[str]) -> str:
    out, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (0, "")
    return out


def test_script_sees_only_one_more_thread(python: Any) -> None:
    ended(
        python("""
        import signal, threading
        def seen():
            return set(os.listdir("/proc/self/fd")), threading.enumerate(), signal.pthread_sigmask(signal.SIG_BLOCK, ())
        def tasks():
            return {open(f"/proc/self/task/{task}/comm").read() for task in os.listdir("/proc/self/task")}
        before = seen(), tasks()
        thread.start()
        thread.start()
        until(lambda: alive() > 1 and tasks() - before[1] == {"elasticd-heartb\\n"})
        assert seen() == before[0]
        assert len(os.listdir("/proc/self/task")) == 2
        assert "torch" not in sys.modules
        """)
    )


def test_thread_takes_no_signals(python: Any) -> None:
    """Whoever blocks a signal in all the threads he knows, to wait for it, must be the one who gets it."""
    ended(
        python("""
        import signal
        thread.start()
        until(alive)
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
        os.kill(os.getpid(), signal.SIGUSR1)
        assert signal.sigtimedwait({signal.SIGUSR1}, 30).si_signo == signal.SIGUSR1
        """)
    )


def test_forked_child_has_no_thread(python: Any) -> None:
    ended(
        python("""
        import warnings
        warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12 warns of a fork beside any thread
        thread.start()
        until(lambda: alive() > 1)
        child = os.fork()
        thread.start()
        if not child:
            assert len(os.listdir("/proc/self/task")) == 1
            sys.exit(5)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 5
        before = alive()
        until(lambda: alive() > before)
        """)
    )


def test_child_forked_before_start_never_starts_thread(python: Any) -> None:
    ended(
        python("""
        child = os.fork()
        thread.start()
        if not child:
            assert len(os.listdir("/proc/self/task")) == 1
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        until(alive)
        """)
    )


def test_script_runs_when_thread_cannot_start(python: Any) -> None:
    ended(
        python("""
        import _thread
        _thread.stack_size(1 << 46)
        thread.start()
        assert alive() == 0
        """)
    )


def test_hang_in_exit_handler_is_reported(python: Any, tmp_path: Path, wait_for: Any) -> None:
    with (
        python("""
        import atexit
        atexit.register(sys.stdin.read)
        thread.start()
        """) as process,
        HeartbeatReader(tmp_path / "beat") as reader,
    ):
        wait_for(lambda: reader.read().phase is Phase.EXIT, "the script to be over")
        alive = reader.read().alive_ticks
        wait_for(lambda: reader.read().alive_ticks > alive, "a heartbeat in the exit handler")
        ended(process)
        assert reader.read().alive_ticks == 0


def test_exception_is_reported_during_exit_handlers(python: Any, tmp_path: Path, wait_for: Any) -> None:
    with (
        python("""
        import atexit
        atexit.register(os._exit, 3)
        atexit.register(sys.stdin.read)
        thread.start()
        raise ValueError("a fault")
        """) as process,
        HeartbeatReader(tmp_path / "beat") as reader,
    ):
        report = wait_for(lambda: reader.read().exit_report, "its report")
        assert (report.kind, report.type, report.message) == ("exception", "ValueError", "a fault")
        assert reader.read().phase is Phase.EXIT
        assert process.poll() is None
        process.communicate(timeout=30)
        assert process.returncode == 3


def test_threads_that_outlive_main_thread_may_train(python: Any, tmp_path: Path, wait_for: Any) -> None:
    with (
        python("""
        import threading
        def train():
            sys.stdin.readline()
            writer.step(1)
            sys.stdin.readline()
        threading.Thread(target=train).start()
        thread.start()
        """) as process,
        HeartbeatReader(tmp_path / "beat") as reader,
    ):
        wait_for(lambda: reader.read().phase is Phase.EXIT, "the main thread to return")
        process.stdin.write("step\n")
        process.stdin.flush()
        wait_for(lambda: reader.read().phase is Phase.STEP, "a step")
        alive = reader.read().alive_ticks
        wait_for(lambda: reader.read().alive_ticks > alive + 2, "ticks")
        assert reader.read().phase is Phase.STEP
        ended(process)


def test_dump_without_flight_recorder_writes_no_file(python: Any, tmp_path: Path, wait_for: Any) -> None:
    with (
        python("""
        thread = HeartbeatThread(writer, os.environ["ELASTICD_HEARTBEAT"] + ".flight")
        thread.start()
        sys.stdin.read()
        """) as process,
        HeartbeatReader(tmp_path / "beat") as reader,
    ):
        for expected in (1, 2):
            assert reader.request_dump() == expected
            wait_for(lambda number=expected: reader.read().dump_done == number, "an answer")
        assert not (tmp_path / "beat.flight").exists()
        assert reader.read().request == 0, "the other word is untouched"
        ended(process)


def test_half_the_ticks_while_steps_are_short(tmp_path: Path) -> None:
    """Each counts twice; the first one without progress is followed by all of them again."""
    heartbeat.create(tmp_path / "beat")
    writer = HeartbeatWriter(tmp_path / "beat")
    ticker = HeartbeatThread(writer)
    with HeartbeatReader(tmp_path / "beat") as reader:
        for step in range(STEPPING_AFTER):
            assert ticker.periods_per_tick == 1
            writer.step(step)
            ticker.tick()
        assert (ticker.periods_per_tick, reader.read().alive_ticks) == (STEPPING_PERIODS, STEPPING_AFTER)
        writer.step(STEPPING_AFTER)
        ticker.tick()
        assert reader.read().alive_ticks == STEPPING_AFTER + STEPPING_PERIODS
        ticker.tick()
        assert ticker.periods_per_tick == 1
        ticker.tick()
        assert reader.read().alive_ticks == STEPPING_AFTER + 2 * STEPPING_PERIODS + 1


def test_last_tick_counts_what_was_issued_before_the_exit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a rank that has exited nothing else tells what it has not issued."""
    heartbeat.create(tmp_path / "beat")
    ticker = HeartbeatThread(HeartbeatWriter(tmp_path / "beat"), period_s=1000.0)
    issued = [7]
    first = threading.Event()
    monkeypatch.setattr(ticker, "_observe_collectives", lambda: issued[-1])
    monkeypatch.setattr(ticker, "update_groups", lambda _: first.set())
    ticker.start()
    assert first.wait(30)
    issued.append(8)
    ticker.stop()
    with HeartbeatReader(tmp_path / "beat") as reader:
        seen = reader.read()
    assert (seen.collectives, seen.alive_ticks) == (8, 0)
