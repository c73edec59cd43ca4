"""The thread that removes the files of ended jobs from this node's disk; `scheduler.retention` selects them."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection
from pathlib import Path

from elasticd_agent.node.scheduler import retention

INTERVAL_S = 600.0
INITIAL_DELAY_S = 60.0
"""The start of the agent has priority."""


class DiskCleaner:
    """The thread calls `in_use` for the (job, number) whose files must be kept, and `keep_s` for the retention time."""

    def __init__(
        self,
        state: Path,
        in_use: Callable[[], Collection[tuple[str, int]]],
        keep_s: Callable[[], float],
        log: Callable[[str], None],
    ) -> None:
        self._state = state
        self._in_use = in_use
        self._keep_s = keep_s
        self._log = log
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="elasticd-cleanup", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._closing.set()
        self._thread.join(1.0)  # it may hang on a dead disk

    def _run(self) -> None:
        pause_s = INITIAL_DELAY_S
        while not self._closing.wait(pause_s):
            pause_s = INTERVAL_S
            for sentence in retention.remove_files(self._state, self._in_use(), time.time(), self._keep_s()):
                self._log(sentence)
