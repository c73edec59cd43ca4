"""What a person sees, on a real pseudo-terminal: whole lines above, a live line below, and the terminal given back."""

from __future__ import annotations

import codecs
import contextlib
import fcntl
import logging
import os
import pty
import re
import struct
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from elasticd_agent.system.nonblocking_writer import NonBlockingWriter
from elasticd_agent.telemetry.console import (
    PLAIN_PROGRESS_S,
    ConsoleLogHandler,
    LiveConsole,
    PlainConsole,
    ProgressView,
    describe,
    open_console,
)

DEADLINE = 40.0
VIEW = ProgressView(round=3, world_size=4, step=1204, steps_per_second=101.5, restarts=1)


class Screen:
    """A terminal small enough to read: rows, a cursor, a scrolled region, and the sequences the console uses."""

    token = re.compile(r"\x1b7|\x1b8|\x1b\[([0-9;]*)([A-Za-z])|\r|\n|[^\x1b\r\n]")

    def __init__(self, columns: int, rows: int) -> None:
        self.columns, self.lines = columns, [list[str]() for _ in range(rows)]
        self.row, self.column, self.saved = 0, 0, (0, 0)
        self.bottom = rows
        self.gone: list[str] = []

    def feed(self, data: str) -> None:
        for found in self.token.finditer(data):
            text, numbers, verb = found.group(0), found.group(1), found.group(2)
            values = [int(n) for n in (numbers or "").split(";") if n]
            if text == "\x1b7":
                self.saved = (self.row, self.column)
            elif text == "\x1b8":
                self.row, self.column = self.saved
            elif verb == "r":
                self.bottom = values[1] if values else len(self.lines)
                self.row = self.column = 0
            elif verb == "H":
                self.row, self.column = min(values[0], len(self.lines)) - 1, values[1] - 1
            elif verb == "A":
                self.row = max(0, self.row - values[0])
            elif verb == "K":
                self.lines[self.row].clear()
            elif verb is not None:
                assert verb == "m", found
            elif text == "\r":
                self.column = 0
            elif text == "\n":
                self.feed_line()
            else:
                line = self.lines[self.row]
                line.extend([" "] * (self.column + 1 - len(line)))
                line[self.column : self.column + 1] = [text]
                self.column += 1
                assert self.column < self.columns or self.row < self.bottom, "the live line must not wrap"

    def feed_line(self) -> None:
        if self.row == self.bottom - 1:
            self.gone.append("".join(self.lines.pop(0)))
            self.lines.insert(self.bottom - 1, list[str]())
        else:
            self.row = min(self.row + 1, len(self.lines) - 1)

    def resize(self, columns: int, rows: int) -> None:
        self.columns, self.bottom = columns, rows
        self.lines += [list[str]() for _ in range(rows - len(self.lines))]

    def text(self) -> list[str]:
        return ["".join(line).rstrip() for line in self.lines]


def eventually(true: Callable[[], bool]) -> bool:
    until = time.monotonic() + DEADLINE
    while not true():
        if time.monotonic() > until:
            return False
        time.sleep(0.02)
    return True


class Terminal:
    """A pseudo-terminal whose output a thread reads all the time."""

    def __init__(self, columns: int = 100, rows: int = 10) -> None:
        self.master, self.slave = pty.openpty()
        self.history: list[str | tuple[int, int]] = []
        self.resize(columns, rows)
        self.reader = threading.Thread(target=self.read)
        self.reader.start()

    def resize(self, columns: int, rows: int) -> None:
        self.rows = rows
        self.history.append((columns, rows))
        fcntl.ioctl(self.slave, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))

    def read(self) -> None:
        decoder = codecs.getincrementaldecoder("utf-8")()
        try:
            while data := os.read(self.master, 65536):
                self.history.append(decoder.decode(data))
        except OSError:  # EIO: nobody has the other end open any more
            return

    def screen(self) -> Screen:
        made = Screen(0, 0)
        for event in list(self.history):
            if isinstance(event, str):
                made.feed(event)
            else:
                made.resize(*event)
        return made

    def got(self) -> str:
        return "".join(event for event in list(self.history) if isinstance(event, str))

    def shows(self, true: Callable[[list[str]], bool]) -> bool:
        return eventually(lambda: true(self.screen().text()))

    def close(self) -> None:
        os.close(self.slave)
        self.reader.join(DEADLINE)
        os.close(self.master)


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Iterator[Terminal]:
    monkeypatch.setenv("TERM", "xterm-256color")
    threads = threading.active_count()
    made = Terminal()
    yield made
    made.close()
    assert threading.active_count() == threads


@contextlib.contextmanager
def live(terminal: Terminal) -> Iterator[LiveConsole]:
    outlet = NonBlockingWriter(terminal.slave)
    console = LiveConsole(outlet, terminal.slave, "job-1", refresh_s=0.02)
    try:
        yield console
    finally:
        console.close()
        outlet.close()


def test_lines_scroll_above_the_live_line_and_the_last_row_is_given_back(terminal: Terminal) -> None:
    os.write(terminal.slave, b"$ elasticd run train.py\n" * 12)
    with live(terminal) as console:
        console.log("round 3: 4 workers start")
        console.progress(VIEW)
        assert terminal.shows(lambda text: "round 3 · 4 workers · step 1,204" in text[-1])
        # A worker writes straight to the terminal, as it does without --log-dir.
        scripts = [f"for i in 1 2 3 4 5 6 7 8 9; do echo w{n}-$i; done" for n in range(2)]
        workers = [subprocess.Popen(["sh", "-c", script], stdout=terminal.slave) for script in scripts]
        assert [worker.wait(DEADLINE) for worker in workers] == [0, 0]
        console.log("rank 1 was killed by SIGKILL; round 4 goes on", "warning")
        assert terminal.shows(lambda text: any("round 4 goes on" in line for line in text[:-1]))
        screen = terminal.screen()
        assert "elasticd" in screen.text()[-1]
        above = screen.gone + screen.text()[:-1]
        printed = [f"w{n}-{i}" for n in range(2) for i in range(1, 10)]
        assert sorted(line for line in above if line.startswith("w")) == printed
        assert not any("steps/s" in line for line in above), "the live line never scrolls away into the lines above"
    assert terminal.shows(lambda text: not any("steps/s" in line for line in text))
    assert terminal.screen().bottom == terminal.rows, "everything scrolls again"


def test_the_live_line_follows_a_terminal_that_changes_its_size(terminal: Terminal) -> None:
    with live(terminal) as console:
        console.progress(VIEW)
        assert terminal.shows(lambda text: "step 1,204" in text[-1])
        terminal.resize(48, 20)
        assert terminal.shows(lambda text: len(text) == 20 and text[-1].endswith("…"))
        assert not any("round 3" in line for line in terminal.screen().text()[:-1])
        assert terminal.screen().bottom == 19


def test_it_is_refreshed_and_ages_by_itself(terminal: Terminal) -> None:
    with live(terminal) as console:
        console.progress(ProgressView(round=1, world_size=1, step=5, checkpoint_at=time.monotonic() - 58.5))
        assert terminal.shows(lambda text: "checkpoint 59 s ago" in text[-1])
        assert terminal.shows(lambda text: "checkpoint 1 min ago" in text[-1])


def test_the_start_is_counted_until_it_is_over(terminal: Terminal) -> None:
    """Views come from the first round on, when there are no workers yet."""
    with live(terminal) as console:
        console.starting("importing torch")
        console.progress(VIEW)
        assert terminal.shows(lambda text: re.search(r"starting: importing torch, 0\.[1-9] s", text[-1]) is not None)
        console.starting("")
        assert terminal.shows(lambda text: "round 3" in text[-1] and "starting" not in text[-1])


def test_a_job_without_progress_never_touches_the_last_row(terminal: Terminal) -> None:
    with live(terminal) as console:
        console.log("error in train.py")
        console.close()
    assert terminal.shows(lambda text: "error in train.py" in text[0])
    assert "\x1b" not in terminal.got()


EXITS = {
    "falls off its end": "",
    "raises": "raise SystemError",
    "sys.exit": "sys.exit(3)",
    "is interrupted": "os.kill(os.getpid(), 2); time.sleep(5)",
}


@pytest.mark.parametrize("how", EXITS, ids=str)
def test_the_terminal_is_given_back_however_the_agent_ends(terminal: Terminal, how: str) -> None:
    code = (
        "import os, sys, time; from elasticd_agent.telemetry.console import *\n"
        "from elasticd_agent.system.nonblocking_writer import NonBlockingWriter\n"
        "console = open_console(NonBlockingWriter(2), 2, 'j'); console.progress(ProgressView(7, 2, step=1))\n"
        "sys.stdin.read()\n"
    )
    program = [sys.executable, "-c", code + EXITS[how]]
    child = subprocess.Popen(program, stdin=subprocess.PIPE, stderr=terminal.slave, start_new_session=True)
    drawn = eventually(lambda: "round 7" in terminal.got())
    child.communicate(timeout=DEADLINE)
    assert drawn
    assert terminal.shows(lambda text: not any("round 7" in line for line in text))
    assert terminal.screen().bottom == terminal.rows


def test_a_stopped_terminal_never_stops_the_agent(terminal: Terminal) -> None:
    termios.tcflow(terminal.slave, termios.TCOOFF)
    with live(terminal) as console:
        console.progress(VIEW)
        begun = time.monotonic()
        for i in range(3000):
            console.log(f"sentence {i} " + "x" * 1000)
        assert time.monotonic() - begun < DEADLINE
        termios.tcflow(terminal.slave, termios.TCOON)
        assert console._outlet.flush(DEADLINE)
        console.log("and now again")
        assert eventually(lambda: bool(re.search(r"lines are missing here.*\n.*and now again", terminal.got())))


def test_a_terminal_that_went_away_never_stops_the_agent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 10, 100, 0, 0))
    outlet = NonBlockingWriter(slave)
    console = LiveConsole(outlet, slave, "j", refresh_s=0.01)
    os.close(master)
    console.progress(VIEW)
    until = time.monotonic() + DEADLINE
    while not outlet.broken and time.monotonic() < until:
        console.log("is anybody there?")
    assert outlet.broken
    console.close()
    assert outlet.close()
    os.close(slave)


def plain(write: Callable[[PlainConsole], None], clock: Callable[[], float] = time.monotonic) -> list[str]:
    reader, writer = os.pipe()
    outlet = NonBlockingWriter(writer)
    os.close(writer)
    write(PlainConsole(outlet, "job-1", clock))
    assert outlet.close()
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
        now = PLAIN_PROGRESS_S - 1
        console.progress(ProgressView(1, 2, step=50))
        now = PLAIN_PROGRESS_S
        console.progress(ProgressView(1, 2, step=51))
        now = 3 * PLAIN_PROGRESS_S
        console.progress(ProgressView(1, 2, step=51))

    lines = plain(write, lambda: now)
    assert [re.findall(r"step (\d+)", line)[0] for line in lines] == ["1", "51"]


def test_nothing_that_is_said_can_steer_the_terminal() -> None:
    lines = plain(lambda console: console.log("ValueError: \x1b[2J\x07\r\x9b31m ü\udcff\n  line two"))
    assert lines[0].endswith(r"ValueError: \x1b[2J\x07\r\x9b31m ü\udcff")
    assert lines[1] == "  line two"


def test_the_view_in_words() -> None:
    assert describe(VIEW, 0.0) == ["round 3", "4 workers", "step 1,204", "102 steps/s", "1 restart"]
    early = ProgressView(round=1, world_size=1, phase="starting", target=2, checkpoint_at=10.0, steps_per_second=0.5)
    assert describe(early, 3700.0) == [
        "round 1 starting", "1 worker of 2", "0.5 steps/s", "checkpoint 1 h 1 min ago", "no restarts",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("term", "size", "kind"),
    [
        ("xterm", (80, 24), LiveConsole),
        ("dumb", (80, 24), PlainConsole),
        ("xterm", (0, 0), PlainConsole),
        ("xterm", (80, 2), PlainConsole),
    ],
)
def test_live_only_where_a_live_line_works(
    term: str, size: tuple[int, int], kind: type, terminal: Terminal, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TERM", term)
    terminal.resize(*size)
    outlet = NonBlockingWriter(terminal.slave)
    console = open_console(outlet, terminal.slave, "j")
    assert type(console) is kind
    console.close()
    outlet.close()


def test_a_file_gets_plain_lines(tmp_path: Path) -> None:
    with open(tmp_path / "log", "wb") as file:
        outlet = NonBlockingWriter(file.fileno())
        assert type(open_console(outlet, file.fileno(), "j")) is PlainConsole
        outlet.close()


def test_rich_is_imported_only_for_a_live_line() -> None:
    code = "import sys, elasticd_agent.telemetry.console; print('rich' in sys.modules)"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=30)
    assert ran.stdout.strip() == "False", ran.stderr


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
