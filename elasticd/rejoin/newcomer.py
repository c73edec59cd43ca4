"""The process group of a newcomer: a process that runs the script ahead of the round in which it will take part.

Up to `session.run` a newcomer is alone, while the others train. The group has its provisional rank and world size. It
passes what the constructor of DistributedDataParallel asks of the others: whether their parameters have the same
shapes, and rank 0's values, which are restored in the round anyway. Every other collective raises UsageError: its
result would be wrong. A script that needs one before `session.run` changes its ranks by restarts.
"""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from types import FrameType
from typing import Any

from elasticd import process_group
from elasticd.errors import UsageError

VARIABLE = "ELASTICD_NEWCOMER"
"""Set by the launcher in the environment of a newcomer, which has no round, and so no store."""
_BACKEND = "elasticd_newcomer"
_OPERATIONS = (
    *("allreduce", "allreduce_coalesced", "reduce", "broadcast", "barrier", "send", "recv", "recv_anysource"),
    *("allgather", "_allgather_base", "allgather_coalesced", "allgather_into_tensor_coalesced", "gather", "scatter"),
    *("reduce_scatter", "_reduce_scatter_base", "reduce_scatter_tensor_coalesced", "alltoall", "alltoall_base"),
)


def is_newcomer() -> bool:
    return VARIABLE in os.environ


def join(environment: process_group.WorkerEnvironment) -> process_group.DefaultGroup:
    """Make the provisional group. Raises UsageError where the script has made one."""
    import torch.distributed as dist
    from torch._C._distributed_c10d import HashStore

    if dist.is_initialized():
        raise UsageError(refusal("init_process_group()"))
    if not hasattr(dist.Backend, _BACKEND.upper()):
        dist.Backend.register_backend(_BACKEND, _make_group, extended_api=True, devices=["cpu", "cuda"])
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group(_BACKEND, store=HashStore(), rank=rank, world_size=world_size)
    return replace(process_group.join(environment, None), created_by_join=True)


def refusal(call: str) -> str:
    return (
        f"{call} before session.run(): this process joins a job that runs, and has no other ranks before that call. "
        "Move what needs them into the function that session.run() calls; until then the job changes its ranks by "
        "restarts"
    )


def _make_group(options: Any, _: Any) -> Any:
    """torch's class for process groups is loaded here: the launcher reads the library without torch."""
    import torch.distributed as dist

    def operation(name: str) -> Any:
        def call(group: Any, *args: Any, **kwargs: Any) -> Any:
            if not _is_in_ddp_constructor(sys._getframe(1)):
                raise UsageError(refusal(name.strip("_")))
            if name == "allgather":
                for outputs, own in zip(args[0], args[1], strict=True):
                    for output in outputs:
                        output.copy_(own)
            return _finished_work()

        return call

    made = type("NewcomerGroup", (dist.ProcessGroup,), {name: operation(name) for name in _OPERATIONS})
    return made(options.group_rank, options.group_size)


def _is_in_ddp_constructor(frame: FrameType | None) -> bool:
    """A collective of DistributedDataParallel's constructor."""
    from torch.nn.parallel import DistributedDataParallel

    while frame is not None:
        if frame.f_code.co_name == "__init__" and isinstance(frame.f_locals.get("self"), DistributedDataParallel):
            return True
        frame = frame.f_back
    return False


def _finished_work() -> Any:
    import torch
    from torch._C import _distributed_c10d

    c10d: Any = _distributed_c10d
    future: Any = torch.futures.Future()
    future.set_result([])
    return c10d._create_work_from_future(future)
