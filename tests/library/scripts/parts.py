"""Rank 1 leaves a message in which rank 0 has not sent its part yet."""

from __future__ import annotations

import json
import resource
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist

from elasticd.process_group import DefaultGroup
from elasticd.rejoin import transport

marks, how = Path(sys.argv[1]), sys.argv[2]


def await_mark(name: str) -> None:
    deadline = time.monotonic() + 60
    while not (marks / name).exists():
        assert time.monotonic() < deadline, name
        time.sleep(0.001)


def fails(call: Callable[[], object]) -> bool:
    """Call it. True if it raises, as gloo does where a connection is closed."""
    try:
        call()
    except RuntimeError:
        return True
    return False


dist.init_process_group("gloo")
rank = dist.get_rank()
part = torch.ones(1000)
if how == "has few descriptors":
    resource.setrlimit(resource.RLIMIT_NOFILE, (int(sys.argv[3]), resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
    dist.barrier()
    print(json.dumps({"held": len(transport.disconnect())}))
elif rank == 1:
    groups = transport.of_device(part.device)
    awaited = dist.irecv(part, 0)
    assert awaited is not None
    if how == "leaves":
        groups.leave(DefaultGroup(rank, 2, part.device, created_by_join=True))
    else:
        groups.interrupt()
        assert fails(awaited.wait)
    (marks / "left").touch()
    await_mark("sent")
    groups.close_held()
    (marks / "closed").touch()
    await_mark("noticed")
else:
    await_mark("left")
    dist.send(part, 1)
    (marks / "sent").touch()
    await_mark("closed")
    deadline, notices = time.monotonic() + 60, False
    while not notices and time.monotonic() < deadline:
        notices = fails(lambda: dist.send(part, 1))
    (marks / "noticed").touch()
    print(json.dumps({"notices": notices}))
