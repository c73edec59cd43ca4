"""What SIGTERM does to a script with a session, case by case; the exit code says whether it was right."""

from __future__ import annotations

import os
import signal
import sys
import time

import elasticd
from elasticd.sigterm import TOGETHER_S


def note(number: int, frame: object) -> None:
    seen.append(number)


seen: list[int] = []
case = sys.argv[1]
session = elasticd.init()
if case == "before the first step":
    os.kill(os.getpid(), signal.SIGTERM)
if case == "own handler":
    signal.signal(signal.SIGTERM, note)
session.step()
if case == "fork":
    if (pid := os.fork()) == 0:
        os.kill(os.getpid(), signal.SIGTERM)
        os._exit(0)
    assert os.WTERMSIG(os.waitpid(pid, 0)[1]) == signal.SIGTERM
    sys.exit(0)
os.kill(os.getpid(), signal.SIGTERM)
if case == "twice under a launcher":
    os.environ["TORCHELASTIC_RUN_ID"] = "job"
if case == "twice":
    time.sleep(2 * TOGETHER_S)
if case.startswith("twice"):
    os.kill(os.getpid(), signal.SIGTERM)
session.step()
assert session.should_stop == (case in ("defaults", "twice at once", "twice under a launcher"))
assert seen == ([signal.SIGTERM] if case == "own handler" else [])
session.close()
assert (signal.getsignal(signal.SIGTERM) == signal.SIG_DFL) == (case != "own handler")
