"""This process's rank and its default process group, whatever started the script.

Under elasticd and torchrun the environment has everything (env://); plain `python train.py` becomes a group of one,
over a store in its own memory, so that DDP works without a port. A group that the script made itself is used as it is.

Objects go between ranks without numpy, which torch's own collectives for them need and torch does not depend on.
"""

from __future__ import annotations

import ctypes
import os
import pickle
import secrets
import socket
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from elasticd.errors import UsageError

if TYPE_CHECKING:
    import torch

SLEEP_BEFORE_DESTROY_S = 0.02
"""A sleep before the group is destroyed. Gloo's thread may still need the GIL to release its last collective; if DDP's
reducer then holds the last reference to the process group, it joins that thread under the GIL, for ever
(pytorch/pytorch#56297). The sleep lets the thread finish."""

_TORCHRUN_DEFAULT_ID = "none"
_groups_made: Counter[tuple[str | None, ...]] = Counter()
"""The number of default groups that `join` has made, by the address and port of their store and by round."""


@dataclass(frozen=True, slots=True)
class WorkerEnvironment:
    """This process, as elasticd's and torchrun's variables describe it."""

    local_rank: int
    round: int  #: 0 where no elasticd agent started this process
    restarts: int
    job: str
    run: str  #: the token of one run of the job
    nodes: int = 1  #: the nodes of this round, as far as the launcher says
    node: int = 0  #: this one, by its first rank
    restarts_without_progress: int = 0  #: restarts in a row without a new step or checkpoint, this one included


@dataclass(frozen=True, slots=True)
class DefaultGroup:
    """The default process group."""

    rank: int
    world_size: int
    device: torch.device
    created_by_join: bool  #: true if `join` made it; False: the script had
    number: int = 1  #: counts those that `join` has made in this process and round


def read_environment(environment: Mapping[str, str] = os.environ) -> WorkerEnvironment:
    """Raises UsageError for a variable that must be a number and is not."""
    run = environment.get("ELASTICD_RUN") or environment.get("TORCHELASTIC_RUN_ID")
    if run == _TORCHRUN_DEFAULT_ID:  # other runs have it, too: the parent is this one's agent
        run = f"{socket.gethostname()}-{os.getppid()}"
    return WorkerEnvironment(
        local_rank=_read_number(environment, "LOCAL_RANK"),
        round=_read_number(environment, "ELASTICD_ROUND"),
        restarts=_read_number(environment, "TORCHELASTIC_RESTART_COUNT"),
        job=environment.get("ELASTICD_JOB") or environment.get("TORCHELASTIC_RUN_ID") or "python",
        # A plain `python` script is one process, so no other one needs the random token.
        run=run or secrets.token_hex(8),
        nodes=_read_number(environment, "GROUP_WORLD_SIZE") or 1,
        node=_read_number(environment, "GROUP_RANK"),
        restarts_without_progress=_read_number(environment, "ELASTICD_RESTARTS_WITHOUT_PROGRESS"),
    )


def join(environment: WorkerEnvironment, timeout: timedelta | None, device: torch.device | None = None) -> DefaultGroup:
    """Choose this rank's device and make the default process group, unless there is one already.

    The backend is the device's default: nccl for CUDA, gloo for the CPU. `timeout` is the group's, torch's default if
    None; a process that stays keeps its `device`, also where its local rank is another one. Raises UsageError when the
    local rank has no device, and what torch raises when the group cannot be made.
    """
    import torch.distributed as dist
    from torch._C._distributed_c10d import HashStore

    device = device or _set_device(environment.local_rank)
    created, number = not dist.is_initialized(), 1
    if created:
        arguments: dict[str, Any] = {"backend": _default_backend(device)}
        if timeout is not None:
            arguments["timeout"] = timeout
        if device.type == "cuda":  # NCCL connects here, where start-up is waited for, and new_group() can split
            arguments["device_id"] = device
        if "RANK" not in os.environ and "WORLD_SIZE" not in os.environ:
            arguments.update(store=HashStore(), rank=0, world_size=1)
        else:
            where = os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT"), str(environment.round)
            _groups_made[where] += 1
            number = _groups_made[where]
            if number > 1:
                store, rank, world_size = _meet_under(f"elasticd/group/{number}", timeout)
                arguments.update(store=store, rank=rank, world_size=world_size)
        dist.init_process_group(**arguments)
    return DefaultGroup(dist.get_rank(), dist.get_world_size(), device, created, number)


def _meet_under(prefix: str, timeout: timedelta | None) -> tuple[Any, int, int]:
    """Store, rank and world size of a later group of one process and round: its store has the addresses of the first
    under torch's keys, and a rank that connects to them waits for one that has gone.
    """
    from torch._C._distributed_c10d import PrefixStore
    from torch.distributed import DistNetworkError
    from torch.distributed.distributed_c10d import default_pg_timeout
    from torch.distributed.rendezvous import rendezvous

    timeout = timeout or default_pg_timeout
    deadline = time.monotonic() + timeout.total_seconds()
    while True:
        try:
            store, rank, world_size = next(rendezvous("env://", timeout=timeout))
            if rank == 0:
                store.set(f"{prefix}/serves", "")
            store.wait([f"{prefix}/serves"])
        except DistNetworkError:  # rank 0 ends the store of the group before, in which another rank was or connects
            if os.environ["RANK"] == "0" or time.monotonic() > deadline:
                raise
        else:
            return PrefixStore(prefix, store), rank, world_size


def leave(group: DefaultGroup) -> None:
    """Destroy the process group if `join` made it and it still exists."""
    import torch.distributed as dist

    if group.created_by_join and dist.is_initialized():
        time.sleep(SLEEP_BEFORE_DESTROY_S)
        dist.destroy_process_group()


def gather_objects(mine: Any, group: DefaultGroup) -> list[Any]:
    """Rank 0 gets every rank's object, the others nothing. All ranks call it."""
    import torch
    import torch.distributed as dist

    if group.world_size == 1:
        return [mine]
    device = _object_device(group)
    data = pickle.dumps(mine)
    sizes = torch.zeros(group.world_size, dtype=torch.int64, device=device)
    dist.all_gather(list(sizes.view(-1, 1).unbind()), torch.tensor([len(data)], device=device))
    own = _padded_tensor(data, int(sizes.max())).to(device)
    gathered = [torch.empty_like(own) for _ in range(group.world_size)] if group.rank == 0 else None
    dist.gather(own, gathered)
    return [
        pickle.loads(host_bytes(pickled)[:size]) for pickled, size in zip(gathered or (), sizes.tolist(), strict=False)
    ]


def scatter_objects(every: list[Any], group: DefaultGroup) -> Any:
    """Each rank gets its object of rank 0's list; the other ranks' lists are not read. All ranks call it."""
    import torch
    import torch.distributed as dist

    if group.world_size == 1:
        return every[0]
    device = _object_device(group)
    data = [pickle.dumps(content) for content in every] if group.rank == 0 else [b""] * group.world_size
    sizes = torch.tensor(list(map(len, data)), dtype=torch.int64, device=device)
    dist.broadcast(sizes, src=0)
    most = int(sizes.max())
    mine = torch.empty(most, dtype=torch.uint8, device=device)
    dist.scatter(mine, [_padded_tensor(content, most).to(device) for content in data] if group.rank == 0 else None)
    return pickle.loads(host_bytes(mine)[: int(sizes[group.rank])])


def host_bytes(tensor: torch.Tensor) -> memoryview:
    """The bytes of a dense tensor, copied to the host where they are elsewhere. The view keeps the tensor."""
    host = tensor.detach().contiguous().cpu()
    buffer = (ctypes.c_char * host.nbytes).from_address(host.data_ptr())
    buffer.tensor = host  # type: ignore[attr-defined]
    return memoryview(buffer).cast("B") if host.nbytes else memoryview(b"")


def _padded_tensor(data: bytes, size: int) -> torch.Tensor:
    import torch

    return torch.frombuffer(bytearray(data.ljust(size, b"\0")), dtype=torch.uint8)


def _object_device(group: DefaultGroup) -> torch.device:
    """The device on which the group's backend takes tensors; the host where it can."""
    import torch
    import torch.distributed as dist

    return torch.device("cpu") if "cpu:" in dist.get_backend_config() else group.device


def _set_device(local_rank: int) -> torch.device:
    import torch

    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if accelerator is None or accelerator.type == "cpu":
        return torch.device("cpu")
    if "LOCAL_RANK" not in os.environ:  # the script starts its ranks, and has chosen the device of each
        return torch.device(accelerator.type, torch.accelerator.current_device_index())
    count = torch.accelerator.device_count()
    if local_rank >= count:
        raise UsageError(
            f"LOCAL_RANK={local_rank} but this process sees {count} {accelerator.type} device(s); start at most one "
            "worker per device (--nproc-per-node), or check CUDA_VISIBLE_DEVICES"
        )
    torch.accelerator.set_device_index(local_rank)
    return torch.device(accelerator.type, local_rank)


def _default_backend(device: torch.device) -> str:
    import torch.distributed as dist

    backend = dist.Backend.default_device_backend_map.get(device.type)
    if backend is None:
        raise UsageError(
            f"torch has no default process group backend for {device.type} devices; call init_process_group() yourself "
            "before elasticd.init()"
        )
    return str(backend)


def _read_number(environment: Mapping[str, str], name: str) -> int:
    text = environment.get(name, "0")
    try:
        number = int(text)
        if number < 0:
            raise ValueError
    except ValueError:
        raise UsageError(f"{name}={text!r} in the environment must be an integer that is not negative") from None
    return number
