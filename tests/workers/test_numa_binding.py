"""--numa-binding: torch's choice of CPUs on every kind of machine, and a sentence where torch would end the job."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from elasticd_agent.workers.numa_binding import Binding, choose_cpus, plan_binding, read_topology, spread_over_nodes
from tests.workers.machines import MACHINES, Machine

MODES = ("node", "socket", "exclusive", "core-complex")


def bound(
    mode: str, machine: Machine, system: Path, slots: int | None = None, allowed: set[int] | None = None
) -> Binding:
    nodes: list[int | None] = [max(node, 0) for node in machine.gpus]
    topology = read_topology(system)
    return choose_cpus(mode, topology, machine.online if allowed is None else allowed, nodes, slots or len(nodes))


@pytest.fixture(params=MACHINES)
def machine(request: pytest.FixtureRequest) -> Machine:
    return MACHINES[request.param]


def cpusets(machine: Machine) -> Iterator[set[int]]:
    """All CPUs, as many as a Kubernetes cpuset leaves, and all but one node's first core."""
    yield machine.online
    yield {cpu for cpu in machine.online if cpu % 8 > 2}
    yield {cpu for cpu in machine.online if cpu % machine.cores}


def test_the_cpus_are_those_that_torch_chooses(
    machine: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    theirs: Any = pytest.importorskip("torch.numa.binding", reason="torch 2.9 and newer")
    system = machine.write(tmp_path)
    listed = SimpleNamespace(listdir=lambda path: os.listdir(system / path.removeprefix("/sys/")), path=os.path)
    monkeypatch.setattr(theirs, "open", lambda path: (system / path.removeprefix("/sys/")).open(), raising=False)
    gpu = "gpu" if hasattr(theirs, "_get_gpu_count") else "device"  # torch 2.15 names other devices, too
    monkeypatch.setattr(theirs, f"_get_{gpu}_count", lambda: len(machine.gpus))
    node_of = lambda **slot: max(machine.gpus[slot[f"{gpu}_index"]], 0)  # noqa: E731
    monkeypatch.setattr(theirs, f"_get_numa_node_index_for_{gpu}_index", node_of)
    compared = 0
    for allowed in cpusets(machine):
        listed.sched_getaffinity = lambda pid, allowed=allowed: allowed
        monkeypatch.setattr(theirs, "os", listed)
        for mode in MODES:
            ours, says = bound(mode, machine, system, allowed=allowed)
            options = theirs.NumaOptions(theirs.AffinityMode(mode))
            for slot in range(len(machine.gpus)):
                try:
                    chosen = theirs._get_logical_cpus_to_bind_to(**{f"{gpu}_index": slot}, numa_options=options)
                except (RuntimeError, ValueError):  # it ends the job
                    chosen = set()
                if mode == "socket" and "" in machine.nodes.values():
                    continue  # nodes without CPUs are too much for torch
                assert set(ours.get(slot, ())) == chosen, (mode, slot, says)
                compared += bool(chosen)
    assert compared > 3 * len(machine.gpus)


def test_a_gpu_of_two_dies_of_four_clusters(tmp_path: Path) -> None:
    """What the page says, in numbers."""
    machine = MACHINES["DGX A100"]
    system = machine.write(tmp_path)
    cpus, says = bound("core-complex", machine, system)
    assert (cpus[0], cpus[1]) == ((48, 49, 50, 51, 176, 177, 178, 179), (52, 53, 54, 55, 180, 181, 182, 183))
    assert says[0].startswith("--numa-binding core-complex binds workers: slot 0 to CPUs 48-51,176-179, slot 1 to CPUs")
    cpus, says = bound("node", machine, system)
    assert says == [
        "--numa-binding node binds workers: slots 0-1 to CPUs 48-63,176-191, slots 2-3 to CPUs 16-31,144-159, "
        "slots 4-5 to CPUs 112-127,240-255 and slots 6-7 to CPUs 80-95,208-223"
    ]


def test_a_cpuset_that_is_smaller_than_the_node(tmp_path: Path) -> None:
    machine = MACHINES["DGX H100"]
    cpus, says = bound("exclusive", machine, machine.write(tmp_path), allowed={0, 1, 2, 112, 113, 56, 57, 58, 59})
    assert {slot: cpus[slot] for slot in cpus} == {4: (56,), 5: (57,), 6: (58,), 7: (59,)}
    assert says[1:] == [
        "this process may use 9 of 224 CPUs (a cpuset or an affinity): each worker is bound to those of them that "
        "--numa-binding exclusive chooses",
        "--numa-binding exclusive leaves slots 0-3 unbound: NUMA node 0 has 4 GPUs, and 3 cores for them",
    ]


def test_what_leaves_slots_unbound(tmp_path: Path) -> None:
    topology = read_topology(MACHINES["DGX H100"].write(tmp_path))
    cpus, says = choose_cpus("node", topology, set(range(56)), [0, 1, None], slots=4)
    assert cpus == {0: tuple(range(56))}
    assert says[2:] == [
        "--numa-binding node leaves slot 1 unbound: this process may use no CPU of NUMA node 1",
        "--numa-binding node leaves slot 2 unbound: the kernel does not know the NUMA node of its GPU",
        "--numa-binding node leaves slot 3 unbound: there is no GPU for it",
    ]


def test_slots_without_gpus_are_spread_over_the_nodes(tmp_path: Path) -> None:
    machine = MACHINES["GB200"]
    topology = read_topology(machine.write(tmp_path))
    assert spread_over_nodes(topology, machine.online, 3) == [0, 0, 1], "the nodes without CPUs have none"
    assert spread_over_nodes(topology, set(range(100, 104)), 2) == [1, 1]
    assert spread_over_nodes(topology, set(), 2) == []


def test_a_virtual_machine_without_caches(tmp_path: Path) -> None:
    machine = Machine({0: "0-3"}, 4, ["0-3"], None, [0, 0])
    cpus, _ = bound("core-complex", machine, machine.write(tmp_path))
    assert cpus == {0: (0, 1, 2, 3), 1: (0, 1, 2, 3)}


def test_nvml_says_where_the_gpus_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    machine = MACHINES["asymmetric"]
    system = machine.write(tmp_path / "sys")
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1] / "system" / "nvml"))
    monkeypatch.setenv("FAKE_NVML", str(tmp_path))
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: machine.online)

    def told(**nvml: Any) -> None:
        (tmp_path / "gpus.json").write_text(json.dumps({"gpus": [[], [], [], []], "broken": "", **nvml}))

    told()
    cpus, says = plan_binding("node", 2, ("3", "GPU-0000"), system)
    assert cpus == {0: (16, 17, 18, 19, 20, 21, 24, 25, 26, 27, 28, 29), 1: tuple(range(16))}, says
    told(facts={"3": {"name": "another model"}})
    for gpus, broken, why in (
        (("3", "0"), "", "NVML does not know them"),
        (("GPU-0000",), "init", "Driver Not Loaded"),
    ):
        told(broken=broken, facts={"3": {"name": "another model"}})
        cpus, says = plan_binding("node", 1, gpus, system)
        assert not cpus
        assert says[0].startswith("--numa-binding node has no effect: the places of the GPUs are not known: ")
        assert why in says[0]


def test_a_machine_without_a_topology(tmp_path: Path) -> None:
    cpus, (sentence,) = plan_binding("node", 2, (), tmp_path)
    assert not cpus
    assert sentence.startswith(f"--numa-binding node has no effect: {tmp_path} does not say which CPUs")
