"""The thread that removes what ended jobs have left on this node's disk; what goes is `ended`'s to say."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection
from pathlib import Path

from elasticd_agent.node.scheduler import retention as ended

INTERVAL_S = 600.0
INITIAL_DELAY_S = 60.0
"""Not while the daemon is starting."""


class DiskCleaner:
    """`needed`: the (job, number) whose files must stay. Both are asked from the thread."""

    def __init__(
        self,
        state: Path,
        needed: Callable[[], Collection[tuple[str, int]]],
        keep_s: Callable[[], float],
        log: Callable[[str], None],
    ) -> None:
        self._state, self._needed, self._keep_s, self._log = state, needed, keep_s, log
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="elasticd-sweeper", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._closing.set()
        self._thread.join(1.0)  # one that hangs on a dead disk holds nobody up

    def _run(self) -> None:
        pause_s = INITIAL_DELAY_S
        while not self._closing.wait(pause_s):
            pause_s = INTERVAL_S
            for sentence in ended.remove_files(self._state, self._needed(), time.time(), self._keep_s()):
                self._log(sentence)
