"""Says who it is, then a line now and then, until there is a file `go` in its directory. It needs no torch."""

import os
import sys
import time
from pathlib import Path

rank = os.environ["RANK"]
print(f"rank {rank} of {os.environ['WORLD_SIZE']} is here", flush=True)
print(f"rank {rank} complains", file=sys.stderr, flush=True)
count = 0
while not (Path(os.environ["WORK"]) / "go").exists():
    count += 1
    print(f"rank {rank} line {count}", flush=True)
    time.sleep(0.05)
print(f"rank {rank} is done", flush=True)
