"""The terminal or log of `elasticd run`: one sentence for every decision, and the progress of training.

On a terminal the last row is taken out of the scrolled region (DECSTBM, as apt's progress bar does) and holds the live
line. Sentences, and the workers' own output, which does not pass through the agent, scroll above it. Without a terminal
there are plain log lines. All output goes through a NonBlockingWriter: a terminal or pipe that blocks or closes never
delays the agent. Only SIGKILL leaves the row reserved; `reset` frees it. A worker that draws on the whole screen
(curses) conflicts with the live line: run it with `2>&1 | cat`.
"""

from __future__ import annotations

import atexit
import io
import logging
import os
import re
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, Protocol

from elasticd_agent.model.phrases import count
from elasticd_agent.system.durations import in_words
from elasticd_agent.system.nonblocking_writer import CAPACITY, NonBlockingWriter

Level = Literal["info", "warning", "error"]
PLAIN_PROGRESS_S = 30.0
# 2 Hz: more would be noise to the eye, and each frame moves the cursor for a moment.
LIVE_REFRESH_S = 0.5
_SMALLEST = (40, 4)
_LEVELS: dict[Level, str] = {"info": "", "warning": "warning: ", "error": "error: "}
_COLORS: dict[Level, str] = {"info": "", "warning": "\x1b[33m", "error": "\x1b[1;31m"}
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


@dataclass(frozen=True, slots=True)
class ProgressView:
    """The progress of a job; None: not known yet."""

    round: int
    world_size: int
    phase: str = "running"
    target: int | None = None
    step: int | None = None
    steps_per_second: float | None = None
    checkpoint_at: float | None = None  # CLOCK_MONOTONIC
    restarts: int = 0


def describe(view: ProgressView, now: float) -> list[str]:
    """The view in words, most important first. `now` is CLOCK_MONOTONIC."""
    workers = count(view.world_size, "worker")
    if view.target is not None and view.target != view.world_size:
        workers += f" of {view.target}"
    parts = [f"round {view.round}" + ("" if view.phase == "running" else f" {view.phase}"), workers]
    if view.step is not None:
        parts.append(f"step {view.step:,}")
    if view.steps_per_second is not None:
        parts.append(f"{view.steps_per_second:.3g} steps/s" if view.steps_per_second < 100 else
                     f"{view.steps_per_second:,.0f} steps/s")  # fmt: skip
    if view.checkpoint_at is not None:
        parts.append(f"checkpoint {in_words(now - view.checkpoint_at)} ago")
    parts.append(count(view.restarts, "restart") if view.restarts else "no restarts")
    return parts


class Console(Protocol):
    def log(self, sentence: str, level: Level = "info") -> None: ...
    def progress(self, view: ProgressView) -> None: ...

    def starting(self, what: str) -> None:
        """Show `what` as the thing that takes the time now; "": nothing any more, the workers run."""

    def close(self) -> None: ...


class _LineWriter:
    """Writes whole lines, from any thread, and reports how many were dropped."""

    def __init__(self, outlet: NonBlockingWriter) -> None:
        self._outlet = outlet
        self._lost = 0

    def put(self, line: str) -> None:
        data = (line + "\n").encode("utf-8", "backslashreplace")
        if self._lost:
            data = f"[elasticd: {self._lost} lines are missing here: the output was blocked]\n".encode() + data
        self._lost = 0 if self._outlet.put(data) else self._lost + 1


class PlainConsole:
    """Log lines, for a file, a pipe or a container's log."""

    def __init__(self, outlet: NonBlockingWriter, job: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._lines = _LineWriter(outlet)
        self._job = _visible(job)
        self._clock = clock
        self._last: ProgressView | None = None
        self._due = float("-inf")

    def log(self, sentence: str, level: Level = "info") -> None:
        stamp = time.strftime("%Y-%m-%d %H:%M:%S%z")
        self._lines.put(f"{stamp} elasticd[{self._job}] {_LEVELS[level]}{_visible(sentence)}")

    def progress(self, view: ProgressView) -> None:
        """At most one line in PLAIN_PROGRESS_S, and only after new steps."""
        now = self._clock()
        if view.step is None or now < self._due or (self._last is not None and view.step == self._last.step):
            return
        self._last = view
        self._due = now + PLAIN_PROGRESS_S
        self.log(", ".join(describe(view, now)))

    def starting(self, what: str) -> None:
        if what:
            self.log(f"starting: {what}")

    def close(self) -> None:
        pass


class LiveConsole:
    """Sentences above, one live line at the bottom, redrawn by its own thread."""

    def __init__(self, outlet: NonBlockingWriter, fd: int, job: str, refresh_s: float = LIVE_REFRESH_S) -> None:
        self._outlet = outlet
        self._fd = fd
        self._job = _visible(job)
        self._refresh_s = refresh_s
        self._lines = _LineWriter(outlet)
        self._color = not os.environ.get("NO_COLOR")
        self._view: ProgressView | None = None
        self._starting: tuple[str, float] | None = None
        self._rows = 0
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="elasticd-live", daemon=True)
        self._thread.start()
        atexit.register(self.close)

    def log(self, sentence: str, level: Level = "info") -> None:
        text = f"{time.strftime('%H:%M:%S%z')} elasticd: {_LEVELS[level]}{_visible(sentence)}"
        colored = self._color and _COLORS[level]
        self._lines.put(f"{_COLORS[level]}{text}\x1b[0m" if colored else text)

    def progress(self, view: ProgressView) -> None:
        """The content of the live line from its next frame on; the first view takes the last row."""
        self._view = view

    def starting(self, what: str) -> None:
        """The live line counts its seconds; views come already, but say nothing of it."""
        self._starting = (what, time.monotonic()) if what else None

    def close(self) -> None:
        """Release the last row, cleared. Idempotent."""
        atexit.unregister(self.close)
        self._ended.set()
        self._thread.join(1.0)
        if self._rows:
            self._outlet.put(_release(self._rows))
            self._outlet.flush(0.5)
            self._rows = 0

    def _run(self) -> None:
        while not self._ended.wait(self._refresh_s):
            parts = self._parts(time.monotonic())
            # In the background the last row belongs to another job; while the terminal lags, a frame adds nothing.
            if parts and _foreground(self._fd) and self._outlet.room() > CAPACITY // 2:
                try:
                    columns, rows = os.get_terminal_size(self._fd)
                except OSError:
                    continue
                self._draw(parts, columns, rows)

    def _parts(self, now: float) -> list[str]:
        if (starting := self._starting) is not None:
            what, since = starting
            return [self._job, f"starting: {what}, {in_words(now - since)}"]
        return [] if self._view is None else [self._job, *describe(self._view, now)]

    def _draw(self, parts: list[str], columns: int, rows: int) -> None:
        before = b""
        if rows != self._rows:
            before = (_release(self._rows) if self._rows else b"") + _reserve(rows)
        line = _render(parts, columns - 1)
        # One piece, one write: another writer's bytes never land while the cursor is away.
        if self._outlet.put(before + f"\x1b7\x1b[{rows};1H\x1b[2K{line}\x1b[0m\x1b8".encode()):
            self._rows = rows


def _render(parts: list[str], width: int) -> str:
    """One row of at most `width` cells."""
    # Imported here, off the deciding thread and only for a terminal: rich costs 38 ms.
    from rich.console import Console as Renderer
    from rich.text import Text

    text = Text.assemble((" elasticd ", "reverse"), "  ", parts[0])
    for part in parts[1:]:
        text.append(" · ", style="dim").append(part)
    text.truncate(width, overflow="ellipsis")
    renderer = Renderer(file=io.StringIO(), force_terminal=True, width=width, legacy_windows=False, highlight=False)
    with renderer.capture() as captured:
        renderer.print(text, end="", soft_wrap=True)
    return captured.get()


def _reserve(rows: int) -> bytes:
    """Scroll only the rows above the last one, with the cursor among them even if it was in the last one."""
    # Up before the position is saved: some terminals restore a position outside the region into it, some do not.
    return f"\n\x1b[1A\x1b7\x1b[1;{rows - 1}r\x1b8".encode()


def _release(rows: int) -> bytes:
    """Scroll everything again, and clear the last row."""
    return f"\x1b7\x1b[r\x1b[{rows};1H\x1b[2K\x1b8".encode()


def _foreground(fd: int) -> bool:
    try:
        return os.tcgetpgrp(fd) == os.getpgrp()
    except OSError:  # not our controlling terminal: no other job is in the foreground there
        return True


def _visible(text: str) -> str:
    """The text with control characters made visible, so that no exception's message can steer the terminal."""
    return _CONTROL.sub(lambda found: repr(found.group())[1:-1], text)


class QuietConsole:
    """The warnings and errors of another console."""

    def __init__(self, console: Console) -> None:
        self._console = console

    def log(self, sentence: str, level: Level = "info") -> None:
        if level != "info":
            self._console.log(sentence, level)

    def progress(self, view: ProgressView) -> None:
        pass

    def starting(self, what: str) -> None:
        pass

    def close(self) -> None:
        self._console.close()


def open_console(outlet: NonBlockingWriter, fd: int, job: str) -> PlainConsole | LiveConsole:
    """Live when `fd` (where `outlet` goes) is a terminal that can move its cursor and has room, else plain."""
    try:
        columns, rows = os.get_terminal_size(fd)
    except OSError:
        return PlainConsole(outlet, job)
    able = os.environ.get("TERM", "dumb") != "dumb" and columns >= _SMALLEST[0] and rows >= _SMALLEST[1]
    return LiveConsole(outlet, fd, job) if able else PlainConsole(outlet, job)


class ConsoleLogHandler(logging.Handler):
    """Shows the warnings and errors of elasticd's loggers on the console."""

    def __init__(self, console: Console) -> None:
        super().__init__(logging.WARNING)
        self._console = console

    def emit(self, record: logging.LogRecord) -> None:
        try:
            self._console.log(record.getMessage(), "error" if record.levelno >= logging.ERROR else "warning")
        except Exception:  # noqa: BLE001 logging's own contract: a broken record must not break its caller
            self.handleError(record)
