"""The log of `elasticd run`: one sentence for every decision, and the progress of training now and then.

All output goes through a NonBlockingWriter: a terminal or pipe that blocks or closes never delays the agent.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, Protocol

from elasticd_agent.model.phrases import count, visible
from elasticd_agent.system.durations import in_words
from elasticd_agent.system.nonblocking_writer import NonBlockingWriter

Level = Literal["info", "warning", "error"]
PROGRESS_INTERVAL_S = 30.0
_LEVEL_PREFIXES: dict[Level, str] = {"info": "", "warning": "warning: ", "error": "error: "}


@dataclass(frozen=True, slots=True)
class ProgressView:
    """The progress of a job; None: not known yet."""

    round: int
    world_size: int
    phase: str = "running"
    target_world_size: int | None = None
    step: int | None = None
    steps_per_second: float | None = None
    checkpoint_at: float | None = None  # CLOCK_MONOTONIC
    restarts: int = 0


def describe(view: ProgressView, now: float) -> list[str]:
    """The view in words, most important first. `now` is CLOCK_MONOTONIC."""
    workers = count(view.world_size, "worker")
    if view.target_world_size is not None and view.target_world_size != view.world_size:
        workers += f" of {view.target_world_size}"
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
    """The place where sentences and progress are shown to a person."""

    def log(self, sentence: str, level: Level = "info") -> None: ...
    def progress(self, view: ProgressView) -> None: ...

    def starting(self, what: str) -> None:
        """Show `what` as the thing that takes the time now; "": nothing any more, the workers run."""

    def close(self) -> None: ...


class PlainConsole:
    """Log lines, for a terminal, a file, a pipe or a container's log. Lines may come from any thread."""

    def __init__(self, outlet: NonBlockingWriter, job: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._outlet = outlet
        self._lost = 0
        self._job = visible(job, "\t\n")
        self._clock = clock
        self._last: ProgressView | None = None
        self._due = float("-inf")

    def log(self, sentence: str, level: Level = "info") -> None:
        """Write one sentence as a line with its time and the job. A line that the output cannot take is counted, and
        the count is shown with the next one.
        """
        stamp = time.strftime("%Y-%m-%d %H:%M:%S%z")
        line = f"{stamp} elasticd[{self._job}] {_LEVEL_PREFIXES[level]}" + visible(sentence, "\t\n") + "\n"
        data = line.encode("utf-8", "backslashreplace")
        if self._lost:
            data = f"[elasticd: {self._lost} lines are missing here: the output was blocked]\n".encode() + data
        self._lost = 0 if self._outlet.put(data) else self._lost + 1

    def progress(self, view: ProgressView) -> None:
        """At most one line in PROGRESS_INTERVAL_S, and only after new steps."""
        now = self._clock()
        if view.step is None or now < self._due or (self._last is not None and view.step == self._last.step):
            return
        self._last = view
        self._due = now + PROGRESS_INTERVAL_S
        self.log(", ".join(describe(view, now)))

    def starting(self, what: str) -> None:
        if what:
            self.log(f"starting: {what}")

    def close(self) -> None:
        pass


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
