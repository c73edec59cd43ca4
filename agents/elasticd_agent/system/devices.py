"""How many workers this machine is good for, without importing torch.

It exists because `--nproc-per-node gpu|cpu|auto` is answered before any worker runs, by a process that never loads
torch or a driver. It counts device files (a container sees only its own) and minds CUDA_VISIBLE_DEVICES.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path


def cpu_count() -> int:
    """CPUs this process may run on, as torch counts them for --nproc-per-node cpu."""
    return len(os.sched_getaffinity(0))


def visible_gpus(environ: Mapping[str, str], dev: Path = Path("/dev")) -> tuple[str, ...]:
    """The NVIDIA GPUs CUDA would use, in its order, as CUDA_VISIBLE_DEVICES spells them."""
    present = _gpus_present(environ, dev)
    chosen = environ.get("CUDA_VISIBLE_DEVICES")
    if chosen is None:
        return tuple(str(index) for index in range(present))
    return _chosen(chosen, present)


def _chosen(chosen: str, present: int) -> tuple[str, ...]:
    """CUDA's own reading: the list ends before the first entry that names no device; a repeated one voids it."""
    taken: list[str] = []
    for entry in (part.strip() for part in chosen.split(",")):
        if entry.startswith(("GPU-", "MIG-")):
            name = entry  # a UUID: whether it exists only the driver knows
        elif re.fullmatch(r"\+?\d+", entry) and int(entry) < present:
            name = str(int(entry))
        else:
            break
        if name in taken:
            return ()
        taken.append(name)
    return tuple(taken) if present else ()


def _gpus_present(environ: Mapping[str, str], dev: Path) -> int:
    count = sum(1 for node in dev.glob("nvidia[0-9]*") if re.fullmatch(r"nvidia\d+", node.name))
    if count or not (dev / "dxg").exists():
        return count
    import subprocess  # only here: half of what the command line's answer would cost

    try:  # WSL has one device file for all GPUs; only the driver's own tool can count them
        listing = subprocess.run(
            ["nvidia-smi", "-L"], capture_output=True, text=True, timeout=10, check=True, env=dict(environ)
        )
    except (OSError, subprocess.SubprocessError):
        return 0
    return sum(1 for line in listing.stdout.splitlines() if line.startswith("GPU "))
