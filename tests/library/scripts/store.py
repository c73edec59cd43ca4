"""The round's store as a process of its own, for ranks that a test starts with its port; touches a file when ready."""

from __future__ import annotations

import sys
from pathlib import Path

from torch.distributed import TCPStore

port, ready = sys.argv[1:]
store = TCPStore("127.0.0.1", int(port), is_master=True, wait_for_workers=False)
Path(ready).touch()
while True:
    store.wait(["never"])
