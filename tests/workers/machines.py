"""Machines as `lscpu`, `nvidia-smi topo -m` and /sys describe them, written as /sys has them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from elasticd_agent.workers.numa_binding import parse_cpu_list


@dataclass(frozen=True)
class Machine:
    nodes: Mapping[int, str]  #: the CPUs that are online, by node
    cores: int  #: of the machine; CPU n + cores is the second thread of core n
    sockets: Sequence[str]  #: their CPUs
    caches: Sequence[str] | None  #: CPUs that share a last-level cache; None: the kernel knows no caches
    gpus: Sequence[int] = ()  #: the node of each, as numa_node says

    @property
    def online(self) -> set[int]:
        return {cpu for cpus in self.nodes.values() for cpu in parse_cpu_list(cpus)}

    def write(self, system: Path) -> Path:
        def file(name: str, text: str) -> None:
            path = system / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(f"{text}\n")

        file("devices/system/node/possible", f"0-{max(self.nodes)}")
        for node, cpus in self.nodes.items():
            file(f"devices/system/node/node{node}/cpulist", cpus)
        sockets = {cpu: number for number, cpus in enumerate(self.sockets) for cpu in parse_cpu_list(cpus)}
        shared = {cpu: cpus for cpus in self.caches or () for cpu in parse_cpu_list(cpus)}
        for cpu in self.online:
            place, core = f"devices/system/cpu/cpu{cpu}", cpu % self.cores
            threads = [str(thread) for thread in (core, core + self.cores) if thread in self.online]
            file(f"{place}/topology/physical_package_id", str(sockets[cpu]))
            file(f"{place}/topology/thread_siblings_list", ",".join(threads))
            for index, (level, kind, cpus) in enumerate(
                [
                    ("1", "Data", ",".join(threads)),
                    ("1", "Instruction", ",".join(threads)),
                    ("2", "Unified", ",".join(threads)),
                    ("3", "Unified", shared.get(cpu, "")),
                ]
                if cpu in shared
                else []
            ):
                for name, text in (("level", level), ("type", kind), ("shared_cpu_list", cpus)):
                    file(f"{place}/cache/index{index}/{name}", text)
        for gpu, node in enumerate(self.gpus):
            file(f"bus/pci/devices/0000:{gpu:02x}:00.0/numa_node", str(node))
        return system


def threads(first: int, last: int, cores: int) -> str:
    """The CPUs of cores first to last, each with two threads."""
    return f"{first}-{last},{first + cores}-{last + cores}"


MACHINES = {
    # two Xeon Platinum 8480C, four GPUs at each
    "DGX H100": Machine(
        {0: threads(0, 55, 112), 1: threads(56, 111, 112)},
        112,
        [threads(0, 55, 112), threads(56, 111, 112)],
        [threads(0, 55, 112), threads(56, 111, 112)],
        [0, 0, 0, 0, 1, 1, 1, 1],
    ),
    # the same with sub-NUMA clusters: two nodes a socket, and each cluster has its part of the L3
    "SNC-2": Machine(
        {node: threads(28 * node, 28 * node + 27, 112) for node in range(4)},
        112,
        [threads(0, 55, 112), threads(56, 111, 112)],
        [threads(28 * node, 28 * node + 27, 112) for node in range(4)],
        [0, 0, 1, 1, 2, 2, 3, 3],
    ),
    # two EPYC 7742, four nodes a socket, four cores share an L3; GPUs at four of the eight nodes
    "DGX A100": Machine(
        {node: threads(16 * node, 16 * node + 15, 128) for node in range(8)},
        128,
        [threads(0, 63, 128), threads(64, 127, 128)],
        [threads(4 * ccx, 4 * ccx + 3, 128) for ccx in range(32)],
        [3, 3, 1, 1, 7, 7, 5, 5],
    ),
    # more GPUs at one socket than at the other, one of whose CPUs are partly offline
    "asymmetric": Machine(
        {0: "0-15", 1: "16-21,24-29"}, 32, ["0-15", "16-31"], ["0-7", "8-15", "16-21", "24-29"], [0, 0, 0, 1]
    ),
    # a virtual machine without a topology of its GPUs
    "one node": Machine({0: "0-7"}, 8, ["0-7"], ["0-7"], [-1, -1]),
    # two Grace CPUs, one thread a core; the GPUs' memory is a node without CPUs
    "GB200": Machine(
        {0: "0-71", 1: "72-143", 2: "", 10: "", 18: "", 26: ""},
        144,
        ["0-71", "72-143"],
        ["0-71", "72-143"],
        [0, 0, 1, 1],
    ),
}
