"""The helper's entry: `__main__.py gather|publish SECONDS PATHS…`, the request on standard input, JSON lines on output.

It runs as a file, isolated and without site-packages; PATHS are where elasticd and elasticd_agent are. The kernel ends
it after SECONDS, in case the agent no longer exists.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from contextlib import suppress
from typing import Any

NICE_VALUE = -10
"""A nice value: ten times the usual share of a crowded processor, for a tenth of a second of work."""


def main() -> None:
    verb, seconds, *paths = sys.argv[1:]
    signal.setitimer(signal.ITIMER_REAL, float(seconds))  # SIGALRM has no handler here
    _raise_priority()
    sys.path += [path for path in paths if path not in sys.path]
    request = json.loads(sys.stdin.readline())
    lock = threading.Lock()

    def emit(message: dict[str, Any]) -> None:
        with lock:
            # Half a surrogate pair, from a name that is no UTF-8, becomes "?".
            left = memoryview(json.dumps(message, ensure_ascii=False).encode("utf-8", "replace") + b"\n")
            while left:
                left = left[os.write(1, left) :]

    if verb == "gather":
        from elasticd_agent.hangs.collector.collect import EvidenceGathering
        from elasticd_agent.hangs.collector.request import CollectRequest

        EvidenceGathering(CollectRequest.from_message(request), emit).run()
    else:
        from elasticd_agent.hangs.collector.files import publish
        from elasticd_agent.hangs.collector.request import PublishRequest

        try:
            publish(PublishRequest(**request))
        except OSError as error:
            emit({"trouble": error.strerror or str(error)})
            os._exit(1)
    emit({"done": True})
    os._exit(0)  # stuck threads are left behind


def _raise_priority() -> None:
    """Raise this process's priority if it has the right to, as root has; that of the session, too, where the kernel
    groups processes by session."""
    with suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, 0, NICE_VALUE)
    with suppress(OSError), open("/proc/self/autogroup", "wb") as autogroup:
        autogroup.write(b"%d" % NICE_VALUE)


if __name__ == "__main__":
    main()
