"""The thread that removes what ended jobs have left on this node's disk; what goes is `ended`'s to say."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection
from pathlib import Path

from elasticd_agent.node.scheduler import retention as ended

EVERY_S = 600.0
FIRST_S = 60.0
"""Not while the daemon is starting."""


class Sweeper:
    """`needed`: the (job, number) whose files must stay. Both are asked from the thread."""

    def __init__(
        self,
        state: Path,
        needed: Callable[[], Collection[tuple[str, int]]],
        keep_s: Callable[[], float],
        say: Callable[[str], None],
    ) -> None:
        self._state, self._needed, self._keep_s, self._say = state, needed, keep_s, say
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="elasticd-sweeper", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._over.set()
        self._thread.join(1.0)  # one that hangs on a dead disk holds nobody up

    def _run(self) -> None:
        pause_s = FIRST_S
        while not self._over.wait(pause_s):
            pause_s = EVERY_S
            for sentence in ended.sweep(self._state, self._needed(), time.time(), self._keep_s()):
                self._say(sentence)
