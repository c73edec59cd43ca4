"""The helper's entry: `__main__.py gather|keep SECONDS PATHS…`, the request on standard input, JSON lines on output.

It is run as a file, isolated and without site-packages; PATHS are where elasticd and elasticd_agent are. After SECONDS
the kernel ends it, should whoever started it not be there any more to do so.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from typing import Any


def main() -> None:
    what, seconds, *paths = sys.argv[1:]
    signal.setitimer(signal.ITIMER_REAL, float(seconds))  # nobody catches SIGALRM here
    sys.path += [path for path in paths if path not in sys.path]
    request = json.loads(sys.stdin.readline())
    lock = threading.Lock()

    def say(line: dict[str, Any]) -> None:
        with lock:
            os.write(1, json.dumps(line).encode() + b"\n")

    if what == "gather":
        from elasticd_agent.hangs.collector.collect import Collection
        from elasticd_agent.hangs.collector.request import CollectRequest

        Collection(CollectRequest.of(request), say).run()
    else:
        from elasticd_agent.hangs.collector.publish import publish
        from elasticd_agent.hangs.collector.request import PublishRequest

        try:
            publish(PublishRequest.of(request))
        except OSError as error:
            say({"trouble": error.strerror or str(error)})
            os._exit(1)
    say({"done": True})
    # Threads that are stuck are left where they are.
    os._exit(0)


if __name__ == "__main__":
    main()
