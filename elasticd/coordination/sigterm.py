"""SIGTERM as a wish instead of an end, for a script whose loop looks at `session.should_stop`.

Only while SIGTERM still has its default action and only from the main thread is a handler put in, and only once the
script steps: before that a SIGTERM ends it as ever. The handler sets a flag. A second SIGTERM ends the process, unless
a launcher started it: batch systems signal every process of a job, the launcher passes its own signal on, and it is the
launcher that kills whoever takes too long. Children the script forks get the default action back, or nobody could
terminate them.
"""

from __future__ import annotations

import os
import signal
import threading
from types import FrameType


class SigtermHandler:
    """Whether SIGTERM has come since `listen()`."""

    def __init__(self) -> None:
        self.received = False
        self._listening = False

    def install(self) -> None:
        """Put the handler in, unless the script has its own or this is not the main thread."""
        if (
            threading.current_thread() is not threading.main_thread()
            or signal.getsignal(signal.SIGTERM) != signal.SIG_DFL
        ):
            return
        signal.signal(signal.SIGTERM, self._on_signal)
        os.register_at_fork(after_in_child=self.close)
        self._listening = True

    def close(self) -> None:
        """Give SIGTERM its default action back, if the handler is still ours."""
        if self._listening and signal.getsignal(signal.SIGTERM) == self._on_signal:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
        self._listening = False

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self.received and "TORCHELASTIC_RUN_ID" not in os.environ:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGTERM)
        self.received = True
