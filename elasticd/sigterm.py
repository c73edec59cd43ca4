"""SIGTERM as a request to stop."""

from __future__ import annotations

import os
import signal
import threading
import time
from types import FrameType

TOGETHER_S = 0.3
"""Signals this close together are one request: timeout(1) sends its signal to its child and to the child's group."""


class SigtermHandler:
    """SIGTERM as a request to stop, for a script whose loop reads `session.should_stop`.

    The handler is installed only while SIGTERM still has its default action, only from the main thread, and only once
    the script steps: before that, SIGTERM ends it as usual. A second SIGTERM, TOGETHER_S after the first at the
    earliest, ends the process, unless a launcher started it: batch systems signal every process of a job, the
    launcher passes its own signal on, and it kills a worker that takes too long. Forked children get the default
    action back; otherwise nothing could terminate them.
    """

    def __init__(self) -> None:
        self.received = False
        self._received_at = 0.0
        self._installed = False

    def install(self) -> None:
        if (
            threading.current_thread() is not threading.main_thread()
            or signal.getsignal(signal.SIGTERM) != signal.SIG_DFL
        ):
            return
        signal.signal(signal.SIGTERM, self._on_signal)
        os.register_at_fork(after_in_child=self.close)
        self._installed = True

    def close(self) -> None:
        """Restore SIGTERM's default action, if the handler is still ours."""
        if self._installed and signal.getsignal(signal.SIGTERM) == self._on_signal:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
        self._installed = False

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if not self.received:
            self.received, self._received_at = True, time.monotonic()
        elif "TORCHELASTIC_RUN_ID" not in os.environ and time.monotonic() >= self._received_at + TOGETHER_S:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGTERM)
