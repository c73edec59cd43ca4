"""--numa-binding: the CPUs that each slot's worker runs on, near its GPU, as torch.numa.binding (2.13) chooses them.

What torch raises an error for leaves a worker unbound here, with a sentence, since binding makes a job faster and not
more correct. Slots without a GPU, which torch refuses, are spread over the nodes.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from elasticd_agent.model.phrases import count, listing, plural, ranges
from elasticd_agent.system.gpus.nvml import NvmlClient, find_pynvml

SYSFS = Path("/sys")
_NVML_TIMEOUT_S = 10.0
"""Initialising NVML takes a second or two where the driver does not stay loaded; workers wait for the template
meanwhile."""


@dataclass(frozen=True, slots=True)
class Cpu:
    """The place of a CPU. Cores and caches are called by the lowest of their CPUs."""

    node: int
    socket: int
    core: int
    cache: int  #: the last level


Binding = tuple[dict[int, tuple[int, ...]], list[str]]
"""The CPUs of each slot, none for one that is not bound, and sentences for the log."""


def plan_binding(mode: str, slots: int, gpus: Sequence[str], system: Path = SYSFS) -> Binding:
    """The binding of a job with these GPUs, as in CUDA_VISIBLE_DEVICES; none: it uses none."""
    allowed = os.sched_getaffinity(0)
    option = f"--numa-binding {mode}"
    try:
        topology = read_topology(system)
    except (OSError, ValueError) as error:
        return {}, [f"{option} has no effect: {system} does not say which CPUs are near each other: {error}"]
    if not gpus:
        return choose_cpus(mode, topology, allowed, spread_over_nodes(topology, allowed, slots), slots)
    buses = _pci_addresses(gpus)
    if isinstance(buses, str):
        return {}, [f"{option} has no effect: the places of the GPUs are not known: {buses}"]
    return choose_cpus(mode, topology, allowed, [_numa_node_of(bus, topology, system) for bus in buses], slots)


# ---- what the machine says


def read_topology(system: Path = SYSFS) -> dict[int, Cpu]:
    """The CPUs that are online. Raises OSError and ValueError."""
    topology = {}
    for directory in (system / "devices/system/node").glob("node[0-9]*"):
        for cpu in parse_cpu_list((directory / "cpulist").read_text(encoding="ascii")):
            place = system / f"devices/system/cpu/cpu{cpu}"
            topology[cpu] = Cpu(
                int(directory.name[4:]),
                int((place / "topology/physical_package_id").read_text(encoding="ascii")),
                min(parse_cpu_list((place / "topology/thread_siblings_list").read_text(encoding="ascii"))),
                _last_level_cache(place / "cache"),
            )
    if not topology:
        raise FileNotFoundError("it has no NUMA nodes")
    return topology


def _last_level_cache(caches: Path) -> int:
    """-1 where the kernel knows no caches, as in some virtual machines: one for all."""
    levels = {-1: -1}
    for cache in caches.glob("index[0-9]*"):
        if (cache / "type").read_text(encoding="ascii").strip() in ("Unified", "Data"):
            levels[int((cache / "level").read_text(encoding="ascii"))] = min(
                parse_cpu_list((cache / "shared_cpu_list").read_text(encoding="ascii"))
            )
    return levels[max(levels)]


def parse_cpu_list(text: str) -> set[int]:
    """The numbers in "0-3,8"."""
    parts = (part.partition("-") for part in text.strip().split(",") if part)
    return {cpu for first, _, last in parts for cpu in range(int(first), int(last or first) + 1)}


def _pci_addresses(gpus: Sequence[str]) -> list[str] | str:
    """The GPUs' addresses on the PCI bus, "" for one that has none; or why they are not known."""
    if not find_pynvml():
        return "pynvml is not installed: pip install nvidia-ml-py"
    nvml = NvmlClient([])
    try:
        answer = nvml.request({"do": "buses", "gpus": list(gpus)}, _NVML_TIMEOUT_S)
    finally:
        nvml.close()
    return list(answer["buses"]) if answer.get("buses") else answer.get("trouble", "NVML does not know them")


def _numa_node_of(bus: str, topology: Mapping[int, Cpu], system: Path) -> int | None:
    """The GPU's node; None if the kernel does not know it, as in some virtual machines, and there are several."""
    node = -1
    with suppress(OSError, ValueError):
        node = int((system / "bus/pci/devices" / bus.lower()[-12:] / "numa_node").read_text(encoding="ascii"))
    every = {cpu.node for cpu in topology.values()}
    return node if node >= 0 else every.pop() if len(every) == 1 else None


# ---- the choice


def spread_over_nodes(topology: Mapping[int, Cpu], allowed: Collection[int], slots: int) -> list[int | None]:
    """A node for each slot without a GPU: as many slots on each, neighbours together."""
    nodes = sorted({place.node for cpu, place in topology.items() if cpu in allowed})
    return [nodes[slot * len(nodes) // slots] for slot in range(slots)] if nodes else []


def choose_cpus(
    mode: str, topology: Mapping[int, Cpu], allowed: Collection[int], nodes: Sequence[int | None], slots: int
) -> Binding:
    """`nodes`: that of each GPU, None where it is unknown; a slot has the GPU with its number. `allowed`: the CPUs that
    this process may use."""
    usable = {cpu: place for cpu, place in topology.items() if cpu in allowed}
    cpus: dict[int, tuple[int, ...]] = {}
    unbound: dict[str, list[int]] = {}
    for slot in range(slots):
        node = nodes[slot] if slot < len(nodes) else None
        if node is None:
            why = "the kernel does not know the NUMA node of its GPU" if slot < len(nodes) else "there is no GPU for it"
        else:
            same_node = [gpu for gpu, other in enumerate(nodes) if other == node]
            chosen = _cpus_of_gpu(mode, usable, node, same_node.index(slot), len(same_node))
            if not isinstance(chosen, str):
                cpus[slot] = tuple(sorted(chosen))
                continue
            why = chosen
        unbound.setdefault(why, []).append(slot)
    return cpus, list(_sentences(mode, len(topology), len(usable), cpus, unbound))


def _cpus_of_gpu(mode: str, usable: Mapping[int, Cpu], node: int, at: int, sharers: int) -> set[int] | str:
    """The CPUs for the GPU at place `at` among those of its node, or why there are none."""
    near = {cpu: place for cpu, place in usable.items() if place.node == node}
    if not near:
        return f"this process may use no CPU of NUMA node {node}"
    if mode == "node":
        return {*near}
    if mode == "socket":  # all nodes whose first CPU is on it: a node may span sockets
        firsts = {usable[cpu].node: cpu for cpu in sorted(usable, reverse=True)}
        socket = usable[firsts[node]].socket
        return {cpu for cpu, place in usable.items() if usable[firsts[place.node]].socket == socket}
    if mode == "exclusive":
        cores = sorted({place.core for place in near.values()})
        each, more = divmod(len(cores), sharers)
        if not each:
            return f"NUMA node {node} has {count(sharers, 'GPU')}, and {count(len(cores), 'core')} for them"
        first = at * each + min(at, more)
        own = cores[first : first + each + (at < more)]
        return {cpu for cpu, place in near.items() if place.core in own}
    caches: dict[int, set[int]] = {}
    for cpu, place in near.items():
        caches.setdefault(place.cache, set()).add(cpu)
    complexes = sorted(caches.items(), key=lambda cache: (-len(cache[1]), cache[0]))
    return complexes[at % len(complexes)][1]


def _sentences(
    mode: str, online: int, usable: int, cpus: Mapping[int, tuple[int, ...]], unbound: Mapping[str, Sequence[int]]
) -> Iterator[str]:
    if cpus:
        slots: dict[tuple[int, ...], list[int]] = {}
        for slot, chosen in cpus.items():
            slots.setdefault(chosen, []).append(slot)
        where = listing(
            f"{_describe_numbers('slot', of)} to {_describe_numbers('CPU', chosen)}" for chosen, of in slots.items()
        )
        yield f"--numa-binding {mode} binds workers: {where}"
        if usable < online:
            yield (
                f"this process may use {usable} of {online} CPUs (a cpuset or an affinity): each worker is bound to "
                f"those of them that --numa-binding {mode} chooses"
            )
    for why, of in unbound.items():
        yield f"--numa-binding {mode} leaves {_describe_numbers('slot', of)} unbound: {why}"


def _describe_numbers(what: str, numbers: Sequence[int]) -> str:
    """ "slot 0", "CPUs 0-3,8"."""
    return f"{plural(len(numbers), what)} {','.join(ranges(numbers))}"
