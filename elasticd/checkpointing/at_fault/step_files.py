"""The files of commit records, and what a round finds in those of the round before."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch.amp import GradScaler
from torch.nn import Module
from torch.optim import Optimizer

from elasticd.checkpointing.at_fault import step_record
from elasticd.checkpointing.memory.buffers import SaveKey
from elasticd.checkpointing.state import training_state
from elasticd.checkpointing.state.training_state import RandomState
from elasticd.errors import WireError
from elasticd.heartbeat.record import HeartbeatReader, StepSource


def record_path(kind: str, rank: int, round: int | None = None) -> str:
    """The path of a rank's record. It lies beside the heartbeat records and has their life time: this round and the
    next.
    """
    directory = Path(os.environ["ELASTICD_HEARTBEAT"]).parent
    return str((directory if round is None else directory.with_name(f"round-{round}")) / f"{kind}-{rank}")


def last_step_on_node(round: int) -> int:
    """The last step of the sessions that were on this node in a round; 0 for none."""
    last = 0
    for path in Path(record_path("heartbeat", 0, round)).parent.glob("heartbeat-*"):
        with contextlib.suppress(OSError, WireError), HeartbeatReader(path) as reader:
            heartbeat = reader.read()
            last = max(last, heartbeat.step if heartbeat.source == StepSource.SESSION else 0)
    return last


def kept_restored_random_state(rank: int, step: int, round: int) -> RandomState | None:
    """The random state with which a rank of that round trained on after it had resumed without one, if it ran here."""
    record = step_record.read(record_path("resumed", rank, round), step, [])
    return record.random_state if record is not None else None


def keep_restored_random_state(rank: int, step: int, device: torch.device) -> None:
    """Keep the random state of a round that has resumed from a state without it: should it commit no step, the next one
    resumes from that.
    """
    step_record.StepRecord(record_path("resumed", rank), [], [], device_if_gpu(device)).commit(step)


def refused_states(round: int | None = None) -> set[SaveKey]:
    """The states in memory that a round has refused, as far as this node knows: the round and the number of each save.

    `round`: None is this one.
    """
    try:
        data = Path(record_path("refused", 0, round)).read_bytes() if "ELASTICD_HEARTBEAT" in os.environ else b"[]"
        return {(saved_in, number) for saved_in, number in json.loads(data)}
    except (OSError, ValueError, TypeError):
        return set()


def refuse_states(saved: Iterable[SaveKey]) -> None:
    """Keep on this node that these states are not used by this round: of the next one, the reason is not known."""
    states = sorted(refused_states().union(saved))
    if states and "ELASTICD_HEARTBEAT" in os.environ:
        with contextlib.suppress(OSError):
            Path(record_path("refused", 0)).write_bytes(json.dumps(states).encode())


def opened_directories(round: int | None = None) -> list[str]:
    """The checkpoint directories that rank 0 has opened in a round, if it ran on this node.

    `round`: None is this one.
    """
    if not os.environ.get("ELASTICD_HEARTBEAT"):
        return []
    try:
        directories: list[str] = json.loads(Path(record_path("directories", 0, round)).read_bytes())
    except (OSError, ValueError):
        return []
    return directories


def note_directory(directory: Path) -> None:
    """Keep for the next round that rank 0 has opened this one."""
    if os.environ.get("ELASTICD_HEARTBEAT"):
        with contextlib.suppress(OSError):
            opened = [*opened_directories(), os.fsdecode(directory)]
            Path(record_path("directories", 0)).write_text(json.dumps(opened), encoding="ascii")


def device_if_gpu(device: torch.device) -> torch.device | None:
    """The device if it is one whose generator is recorded."""
    return device if device.type == "cuda" else None


SCALER_ATTRIBUTES = {"scale": "_scale", "_growth_tracker": "_growth_tracker"}
"""The keys of a GradScaler's state that are tensors, and their attributes: None before the first use."""


def is_on_gpu(tensor: torch.Tensor | None) -> bool:
    return tensor is not None and not is_on_host(tensor)


def is_on_host(tensor: torch.Tensor) -> bool:
    """A commit record has it; what is on a device is kept there."""
    return tensor.device.type == "cpu"


def buffer_places(attached: Mapping[str, Any]) -> Iterator[tuple[tuple[str, Any], step_record.BufferPlace]]:
    """The places of the buffers in the state of attached modules, by the module's name and the key.

    Also what a GradScaler keeps on a GPU. And behind all of these what optimizers keep in the host's memory for
    parameters on a GPU, such as the number of steps: it is that of the last commit, however far the GPU is behind. Its
    key is the parameter's number and the name.
    """

    for name, obj in attached.items():
        if isinstance(obj, GradScaler):
            attributes = vars(obj)
            yield from (
                ((name, key), (attributes, where))
                for key, where in SCALER_ATTRIBUTES.items()
                if is_on_gpu(attributes.get(where))
            )
        if not isinstance(obj, Module):
            continue
        for path, module in training_state.unwrap(obj).named_modules(remove_duplicate=False):
            for key, value in module._buffers.items():
                if value is not None and key not in module._non_persistent_buffers_set:
                    yield (
                        (name, training_state.uncompiled_key(f"{path}.{key}" if path else key)),
                        (module._buffers, key),
                    )
    for name, optimizer in attached.items():
        if isinstance(optimizer, Optimizer):
            parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
            for number, parameter in enumerate(parameters):
                values = {} if is_on_host(parameter) else optimizer.state.get(parameter, {})
                keys = [key for key, value in values.items() if hasattr(value, "device") and is_on_host(value)]
                yield from (((name, (number, key)), (values, key)) for key in keys)
