"""CPUs and GPUs for `--nproc-per-node gpu|cpu|auto`, counted without importing torch or loading a driver."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path


def cpu_count() -> int:
    """CPUs this process may use, as torch counts them for --nproc-per-node cpu."""
    return len(os.sched_getaffinity(0))


def visible_gpus(environ: Mapping[str, str], dev: Path = Path("/dev")) -> tuple[str, ...]:
    """The NVIDIA GPUs that CUDA would use, in its order, as CUDA_VISIBLE_DEVICES spells them."""
    present = sum(1 for node in dev.glob("nvidia[0-9]*") if re.fullmatch(r"nvidia\d+", node.name))
    chosen = environ.get("CUDA_VISIBLE_DEVICES")
    if chosen is None:
        return tuple(str(index) for index in range(present))
    return _parse_visible_devices(chosen, present)


def _parse_visible_devices(chosen: str, present: int) -> tuple[str, ...]:
    """CUDA's reading: the list ends before the first entry without a device, and a repeated entry voids it."""
    taken: list[str] = []
    for entry in (part.strip() for part in chosen.split(",")):
        if entry.startswith(("GPU-", "MIG-")):
            name = entry  # a UUID, which only the driver can look up
        elif re.fullmatch(r"\+?\d+", entry) and int(entry) < present:
            name = str(int(entry))
        else:
            break
        if name in taken:
            return ()
        taken.append(name)
    return tuple(taken) if present else ()
