"""Meets the other ranks over gloo, adds up everybody's rank + 1, and writes what it saw of its environment.

The last rank ends last: when the test says so, and not before it has used the store once more.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

SEEN = ("RANK", "LOCAL_RANK", "GROUP_RANK", "ROLE_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")

work, round_ = Path(sys.argv[1]), os.environ["ELASTICD_ROUND"]
dist.init_process_group("gloo")
total = torch.tensor([dist.get_rank() + 1])
dist.all_reduce(total)
said = {name: os.environ[name] for name in SEEN}
if dist.get_rank() == dist.get_world_size() - 1:
    while not (work / f"alone-{round_}").exists():
        time.sleep(0.01)
    dist.TCPStore(said["MASTER_ADDR"], int(said["MASTER_PORT"]), is_master=False).add("alone", 1)
(work / f"sum-{round_}-{said['RANK']}").write_text(json.dumps({**said, "total": int(total.item())}))
dist.destroy_process_group()
