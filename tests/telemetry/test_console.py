"""The lines of a job's log: whole ones, at a bounded rate, whatever their reader does."""

from __future__ import annotations

import logging
import os
import pty
import re
import time
from collections.abc import Callable

from elasticd_agent.system.nonblocking_writer import NonBlockingWriter
from elasticd_agent.telemetry.console import (
    PROGRESS_INTERVAL_S,
    ConsoleLogHandler,
    PlainConsole,
    ProgressView,
    describe,
)

DEADLINE = 40.0
VIEW = ProgressView(round=3, world_size=4, step=1204, steps_per_second=101.5, restarts=1)


def test_reader_that_stops_never_stops_the_agent() -> None:
    reader, writer = os.pipe()
    outlet = NonBlockingWriter(writer)
    os.close(writer)
    console = PlainConsole(outlet, "j")
    begun = time.monotonic()
    for i in range(3000):
        console.log(f"sentence {i} " + "x" * 1000)
    assert time.monotonic() - begun < DEADLINE
    with open(reader, "rb") as file:
        os.set_blocking(reader, False)
        said = b""
        while b"and now again" not in said and time.monotonic() < begun + DEADLINE:
            said += file.read() or b""
            if outlet.flush(0.05):
                console.log("and now again")
        assert re.search(rb"lines are missing here.*\n.*and now again", said)
        assert outlet.close(DEADLINE)


def test_terminal_that_went_away_never_stops_the_agent() -> None:
    master, slave = pty.openpty()
    outlet = NonBlockingWriter(slave)
    console = PlainConsole(outlet, "j")
    os.close(master)
    until = time.monotonic() + DEADLINE
    while not outlet.broken and time.monotonic() < until:
        console.log("is anybody there?")
    assert outlet.broken
    assert outlet.close(DEADLINE)
    os.close(slave)


def plain(write: Callable[[PlainConsole], None], clock: Callable[[], float] = time.monotonic) -> list[str]:
    reader, writer = os.pipe()
    outlet = NonBlockingWriter(writer)
    os.close(writer)
    write(PlainConsole(outlet, "job-1", clock))
    assert outlet.close(DEADLINE)
    with open(reader, encoding="utf-8") as file:
        return file.read().splitlines()


def test_plain_lines_carry_time_job_and_level() -> None:
    def write(console: PlainConsole) -> None:
        console.log("round 1: a start")
        console.log("rank 1 was killed by SIGKILL", "warning")
        console.log("no more restarts", "error")

    lines = plain(write)
    assert all(re.match(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d[+-]\d{4} elasticd\[job-1\] ", line) for line in lines)
    assert [line.split("] ")[1] for line in lines] == [
        "round 1: a start", "warning: rank 1 was killed by SIGKILL", "error: no more restarts",
    ]  # fmt: skip


def test_plain_progress_comes_now_and_then_and_only_when_there_was_some() -> None:
    now = 0.0

    def write(console: PlainConsole) -> None:
        nonlocal now
        for step in [None, 1, 2, 3]:
            console.progress(ProgressView(1, 2, step=step))
        now = PROGRESS_INTERVAL_S - 1
        console.progress(ProgressView(1, 2, step=50))
        now = PROGRESS_INTERVAL_S
        console.progress(ProgressView(1, 2, step=51))
        now = 3 * PROGRESS_INTERVAL_S
        console.progress(ProgressView(1, 2, step=51))

    lines = plain(write, lambda: now)
    assert [re.findall(r"step (\d+)", line)[0] for line in lines] == ["1", "51"]


def test_nothing_that_is_said_can_steer_the_terminal() -> None:
    lines = plain(lambda console: console.log("ValueError: \x1b[2J\x07\r\x9b31m ü\udcff\n  line two"))
    assert lines[0].endswith(r"ValueError: \x1b[2J\x07\r\x9b31m ü\udcff")
    assert lines[1] == "  line two"


def test_the_view_in_words() -> None:
    assert describe(VIEW, 0.0) == ["round 3", "4 workers", "step 1,204", "102 steps/s", "1 restart"]
    early = ProgressView(
        round=1, world_size=1, phase="starting", target_world_size=2, checkpoint_at=10.0, steps_per_second=0.5
    )
    assert describe(early, 3700.0) == [
        "round 1 starting", "1 worker of 2", "0.5 steps/s", "checkpoint 1 h 1 min ago", "no restarts",
    ]  # fmt: skip


def test_what_modules_log_is_said() -> None:
    def write(console: PlainConsole) -> None:
        handler, logger = ConsoleLogHandler(console), logging.getLogger("elasticd.test_console")
        logger.propagate = False
        logger.addHandler(handler)
        logger.warning("event log %s", "full")
        logger.error("bad")
        logger.info("not said")
        logger.removeHandler(handler)

    assert [line.split("] ")[1] for line in plain(write)] == ["warning: event log full", "error: bad"]
