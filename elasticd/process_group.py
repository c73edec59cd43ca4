"""Where this process stands among its ranks, and the process group it trains in, however the script was started.

Under elasticd and torchrun the environment says everything (env://); plain `python train.py` becomes a group of one,
over a store in its own memory, so that DDP works without a port. A group that the script made itself is taken as it
is. Nothing here reads a checkpoint, beats, or talks to other ranks beyond making the group.
"""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from elasticd.errors import UsageError

if TYPE_CHECKING:
    import torch

LAST_WORK_S = 0.02
"""Gloo's thread may still want the GIL to drop its last collective; if DDP's reducer is then the last to hold the
process group, it joins that thread under the GIL, for ever (pytorch/pytorch#56297). A pause lets the thread finish."""


@dataclass(frozen=True, slots=True)
class WorkerEnvironment:
    """What the environment says: `round` is 0 where no elasticd agent started this process."""

    local_rank: int
    round: int
    restarts: int
    job: str
    run: str


@dataclass(frozen=True, slots=True)
class DefaultGroup:
    """The process group as this process found or made it; `made` says which."""

    rank: int
    world_size: int
    device: torch.device
    created: bool


def read_environment(environment: Mapping[str, str] = os.environ) -> WorkerEnvironment:
    """Read elasticd's and torchrun's variables. Raises UsageError for a number that is none."""
    return WorkerEnvironment(
        local_rank=_number(environment, "LOCAL_RANK"),
        round=_number(environment, "ELASTICD_ROUND"),
        restarts=_number(environment, "TORCHELASTIC_RESTART_COUNT"),
        job=environment.get("ELASTICD_JOB") or environment.get("TORCHELASTIC_RUN_ID") or "python",
        # The token of one run. Ranks of a plain `python` script are one process, so nobody else needs to know it.
        run=environment.get("ELASTICD_RUN") or environment.get("TORCHELASTIC_RUN_ID") or secrets.token_hex(8),
    )


def join(here: WorkerEnvironment, timeout: timedelta | None) -> DefaultGroup:
    """Choose this rank's device and make the default process group, unless there is one already.

    The backend is the device's default: nccl for CUDA, gloo for the CPU. `timeout` is the group's, torch's default if
    None. Raises UsageError when the local rank has no device, and what torch raises when the group cannot be made.
    """
    import torch.distributed as dist
    from torch._C._distributed_c10d import HashStore

    device = _device(here.local_rank)
    made = not dist.is_initialized()
    if made:
        arguments: dict[str, Any] = {"backend": _backend(device)}
        if timeout is not None:
            arguments["timeout"] = timeout
        if "RANK" not in os.environ and "WORLD_SIZE" not in os.environ:
            arguments.update(store=HashStore(), rank=0, world_size=1)
        dist.init_process_group(**arguments)
    return DefaultGroup(dist.get_rank(), dist.get_world_size(), device, made)


def leave(group: DefaultGroup) -> None:
    """Destroy the process group if `join` made it and nobody has since."""
    import torch.distributed as dist

    if group.created and dist.is_initialized():
        time.sleep(LAST_WORK_S)
        dist.destroy_process_group()


def _device(local_rank: int) -> torch.device:
    import torch

    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if accelerator is None or accelerator.type == "cpu":
        return torch.device("cpu")
    count = torch.accelerator.device_count()
    if local_rank >= count:
        raise UsageError(
            f"LOCAL_RANK={local_rank} but this process sees {count} {accelerator.type} device(s); start at most one "
            "worker per device (--nproc-per-node), or look at CUDA_VISIBLE_DEVICES"
        )
    torch.accelerator.set_device_index(local_rank)
    return torch.device(accelerator.type, local_rank)


def _backend(device: torch.device) -> str:
    import torch.distributed as dist

    backend = dist.Backend.default_device_backend_map.get(device.type)
    if backend is None:
        raise UsageError(
            f"torch knows no process group backend for {device.type} devices; call init_process_group() yourself "
            "before elasticd.init()"
        )
    return str(backend)


def _number(environment: Mapping[str, str], name: str) -> int:
    text = environment.get(name, "0")
    try:
        number = int(text)
        if number < 0:
            raise ValueError
    except ValueError:
        raise UsageError(f"{name}={text!r} in the environment must be an integer that is not negative") from None
    return number
