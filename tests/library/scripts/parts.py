"""Rank 1 leaves a collective in which rank 0 has not sent its part yet."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

from elasticd.rejoin import transport

marks = Path(sys.argv[1])


def await_mark(name: str) -> None:
    deadline = time.monotonic() + 60
    while not (marks / name).exists():
        assert time.monotonic() < deadline, name
        time.sleep(0.001)


dist.init_process_group("gloo")
rank = dist.get_rank()
part = torch.ones(1000)
if rank == 1:
    groups = transport.of_device(part.device)
    awaited = dist.irecv(part, 0)
    groups.interrupt()
    try:
        awaited.wait()
        left = False
    except RuntimeError:
        left = True
    (marks / "left").touch()
    await_mark("sent")
    groups.close_left()
    (marks / "closed").touch()
    await_mark("noticed")
    print(json.dumps({"left": left}))
else:
    await_mark("left")
    dist.send(part, 1)
    (marks / "sent").touch()
    await_mark("closed")
    deadline, notices = time.monotonic() + 60, False
    while not notices and time.monotonic() < deadline:
        try:
            dist.send(part, 1)
            time.sleep(0.001)
        except RuntimeError:
            notices = True
    (marks / "noticed").touch()
    print(json.dumps({"notices": notices}))
