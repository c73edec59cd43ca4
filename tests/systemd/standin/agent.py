"""Plays the agent under its unit, in the ways in which a good agent never behaves: `agent.py STATE`.

It keeps one runner, a process in a session of its own, and finds it again when it is started anew. Files in STATE tell
it to misbehave: `refuses` (exit code 2), `mute` (never ready), `stubborn` (goes on after SIGTERM).
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from types import FrameType

from elasticd_daemon.sd_notify import take_notifier

STATE = Path(sys.argv[1])
SIGNALS = (signal.SIGTERM,)
asked: list[int] = []


def heard(number: int, frame: FrameType | None) -> None:
    asked.append(number)
    with (STATE / "heard").open("a") as file:
        file.write(f"{signal.Signals(number).name}\n")


def runner() -> int:
    """The one that is there, or a new one."""
    known = STATE / "runner"
    with suppress(OSError, ValueError):
        pid = int(known.read_text())
        os.kill(pid, 0)
        return pid
    forever = [sys.executable, "-Ic", "import time; time.sleep(1e6)"]
    pid = subprocess.Popen(forever, start_new_session=True, stdin=subprocess.DEVNULL).pid
    known.write_text(str(pid))
    return pid


def main() -> int:
    for number in SIGNALS:
        signal.signal(number, heard)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
    notifier = take_notifier(os.environ)
    if (STATE / "refuses").exists():
        return 2
    pid = runner()
    if not (STATE / "mute").exists():
        notifier.ready(f"keeps {pid}")
    while True:
        notifier.feed()
        if signal.SIGTERM in asked and not (STATE / "stubborn").exists():
            notifier.stopping(10, "drains")
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            return 0
        time.sleep(0.02)


sys.exit(main())
