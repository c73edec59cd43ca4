"""A worker that meets the others once, says so in a file, and then waits to be restarted until it is alone."""

import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

WAIT_S = 60.0

folder = Path(sys.argv[1])
dist.init_process_group("gloo")
met = torch.ones(1)
dist.all_reduce(met)
note = folder / f"{int(met)}-{dist.get_rank()}"
note.with_suffix(".new").write_text(f"{os.getpid()} {os.getppid()}")
note.with_suffix(".new").rename(note)
if int(met) > 1:
    # No collective: nothing but its agent can tell this worker that its peer is gone.
    time.sleep(WAIT_S)
    sys.exit("nobody came")
dist.destroy_process_group()
