"""GPU facts in a folder of evidence -> what each GPU was doing, and what is wrong with it.

It exists because a GPU that fell off the bus looks like a hang of whoever waits for it. It takes any flat object per
GPU: facts it does not know are shown as they are.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from elasticd_agent.hangs.explain.locate import EvidenceFolder
from elasticd_agent.hangs.explain.model import GpuFacts
from elasticd_agent.system import bounded_io as files

MOST_GPUS = 64
_MOST_FACTS = 16
_BAD = ("xid", "ecc", "uncorrected", "lost", "error", "remap", "retired")
_GOOD = ("0", "", "[]", "False", "none", "None", "0x0")


def read_gpus(place: EvidenceFolder, add_trouble: Callable[[str], None]) -> tuple[GpuFacts, ...]:
    """The GPUs of every node whose facts are here; `wrong` is told what could not be read."""
    found: list[GpuFacts] = []
    for name in place.names:
        if not (name.startswith("gpu") and name.endswith(".json")):
            continue
        data, trouble = files.read_json(place.path / name)
        add_trouble(trouble)
        node = name.removeprefix("gpu").removesuffix(".json").lstrip("-")
        if data is not None and isinstance(data.get("trouble"), str):
            add_trouble(f"{name}: {data['trouble'][:200]}")
        for index, one in enumerate(_each(data or {})[:MOST_GPUS]):
            found.append(_gpu(one, f"{node} " if node else "", index))
    return tuple(found)


def _each(data: dict[str, Any]) -> list[dict[str, Any]]:
    for value in (data.get("gpus"), data.get("devices")):
        if isinstance(value, list):
            return [one for one in value if isinstance(one, dict)]
    return [one for one in data.values() if isinstance(one, dict)]


def _gpu(one: dict[str, Any], node: str, index: int) -> GpuFacts:
    facts = tuple(
        (name, str(value)[:200])
        for name, value in one.items()
        if value is not None and not isinstance(value, dict) and name not in ("index", "name")
    )[:_MOST_FACTS]
    # Names are NVML's, near enough: what is not 0 in one of these is what one looks for.
    bad = [f"{name} {value}" for name, value in facts if any(word in name for word in _BAD) and value not in _GOOD]
    number, model = one.get("index", index), one.get("name")
    return GpuFacts(
        f"{node}GPU {number}" + (f" ({model[:80]})" if isinstance(model, str) else ""), facts, ", ".join(bad)
    )
