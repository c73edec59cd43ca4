"""This process's rank and its default process group, whatever started the script.

Under elasticd and torchrun the environment has everything (env://); plain `python train.py` becomes a group of one,
over a store in its own memory, so that DDP works without a port. A group that the script made itself is used as it is.
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

LAST_COLLECTIVE_S = 0.02
"""A sleep before the group is destroyed. Gloo's thread may still need the GIL to release its last collective; if DDP's
reducer then holds the last reference to the process group, it joins that thread under the GIL, for ever
(pytorch/pytorch#56297). The sleep lets the thread finish."""


@dataclass(frozen=True, slots=True)
class WorkerEnvironment:
    """What elasticd's and torchrun's variables say of this process."""

    local_rank: int
    round: int
    """0 where no elasticd agent started this process."""
    restarts: int
    job: str
    run: str
    """The token of one run of the job."""
    nodes: int = 1
    """In this round, as far as the launcher says."""
    node: int = 0
    """This one, by its first rank."""
    failed_restarts: int = 0
    """Restarts in a row without a new step or checkpoint, this one included."""


@dataclass(frozen=True, slots=True)
class DefaultGroup:
    """The default process group."""

    rank: int
    world_size: int
    device: torch.device
    created: bool
    """By `join`; False: the script had made it."""


def read_environment(environment: Mapping[str, str] = os.environ) -> WorkerEnvironment:
    """Raises UsageError for a variable that must be a number and is not."""
    return WorkerEnvironment(
        local_rank=_number(environment, "LOCAL_RANK"),
        round=_number(environment, "ELASTICD_ROUND"),
        restarts=_number(environment, "TORCHELASTIC_RESTART_COUNT"),
        job=environment.get("ELASTICD_JOB") or environment.get("TORCHELASTIC_RUN_ID") or "python",
        # A plain `python` script is one process, so no other one needs the random token.
        run=environment.get("ELASTICD_RUN") or environment.get("TORCHELASTIC_RUN_ID") or secrets.token_hex(8),
        nodes=_number(environment, "GROUP_WORLD_SIZE") or 1,
        node=_number(environment, "GROUP_RANK"),
        failed_restarts=_number(environment, "ELASTICD_RESTARTS_WITHOUT_PROGRESS"),
    )


def join(environment: WorkerEnvironment, timeout: timedelta | None) -> DefaultGroup:
    """Choose this rank's device and make the default process group, unless there is one already.

    The backend is the device's default: nccl for CUDA, gloo for the CPU. `timeout` is the group's, torch's default if
    None. Raises UsageError when the local rank has no device, and what torch raises when the group cannot be made.
    """
    import torch.distributed as dist
    from torch._C._distributed_c10d import HashStore

    device = _device(environment.local_rank)
    created = not dist.is_initialized()
    if created:
        arguments: dict[str, Any] = {"backend": _backend(device)}
        if timeout is not None:
            arguments["timeout"] = timeout
        if device.type == "cuda":  # NCCL connects here, where start-up is waited for, and new_group() can split
            arguments["device_id"] = device
        if "RANK" not in os.environ and "WORLD_SIZE" not in os.environ:
            arguments.update(store=HashStore(), rank=0, world_size=1)
        dist.init_process_group(**arguments)
    return DefaultGroup(dist.get_rank(), dist.get_world_size(), device, created)


def leave(group: DefaultGroup) -> None:
    """Destroy the process group if `join` made it and it still exists."""
    import torch.distributed as dist

    if group.created and dist.is_initialized():
        time.sleep(LAST_COLLECTIVE_S)
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
            "worker per device (--nproc-per-node), or check CUDA_VISIBLE_DEVICES"
        )
    torch.accelerator.set_device_index(local_rank)
    return torch.device(accelerator.type, local_rank)


def _backend(device: torch.device) -> str:
    import torch.distributed as dist

    backend = dist.Backend.default_device_backend_map.get(device.type)
    if backend is None:
        raise UsageError(
            f"torch has no default process group backend for {device.type} devices; call init_process_group() yourself "
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
