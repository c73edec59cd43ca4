"""GPUs through a fake NVML in a real process: failing and lost ones, events, and a driver that does not answer."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest
from msgspec.structs import replace

from elasticd_agent.system.gpus.nvml import NvmlClient
from elasticd_agent.system.processes import procfs
from elasticd_daemon.health import checks
from elasticd_daemon.health import gpu_checks as gpus
from tests.daemon.health.conftest import PATIENCE_S, Node, Says, until


@pytest.fixture
def gpu_node(node: Node, nvml: Says, monkeypatch: pytest.MonkeyPatch) -> Node:
    monkeypatch.setattr(checks, "NVML_TIMEOUT_S", PATIENCE_S)  # a busy machine starts its process late
    return node.with_settings(gpus_of_slots=("0", "1"))


def test_healthy_gpus(gpu_node: Node) -> None:
    found = gpu_node.run()
    assert found["gpus"].why == "2 × Fake 100"
    assert {
        name: found[name].outcome for name in ("gpus", "gpu ecc", "gpu rows", "gpu heat", "gpu xid")
    } == dict.fromkeys(("gpus", "gpu ecc", "gpu rows", "gpu heat", "gpu xid"), "passed")


@pytest.mark.parametrize(
    ("facts", "check", "why"),
    [
        ({"ecc": 3}, "gpu ecc", "had 3 uncorrectable memory errors since its last reset; reset it"),
        ({"remapped": [0, 1, True, False]}, "gpu rows", "has a faulty memory row to remap; reset it"),
        ({"remapped": [0, 9, True, True]}, "gpu rows", "could not remap a faulty memory row; replace it"),
        ({"throttle": 0x48}, "gpu heat", "is slowed down at 60 °C: too hot (hardware thermal slowdown)"),
        ({"fabric": [3, 999]}, "gpu fabric", "was refused by the fabric manager (status 999)"),
        ({"throttle": 0x80}, "gpu heat", "is slowed down at 60 °C: short of power (hardware power brake)"),
    ],
)
def test_failing_gpu_is_named_with_the_reason(
    gpu_node: Node, nvml: Says, facts: dict[str, Any], check: str, why: str
) -> None:
    nvml([], [], facts={"1": facts})
    found = gpu_node.run()
    assert (found[check].outcome, found[check].why) == ("failed", f"GPU 1 (00000000:01:00.0) {why}")
    assert [name for name in found if found[name].outcome == "failed"] == [check]


def test_usage_is_that_of_the_gpus_that_answer(gpu_node: Node, nvml: Says) -> None:
    nvml([], None)
    gpu_node.run()
    assert [(gpu.gpu, gpu.memory_total_bytes) for gpu in gpu_node.checks().gpu_usage] == [(0, 80 << 30)]


def test_lost_nvlink_is_missed(gpu_node: Node, nvml: Says) -> None:
    """One that was never active may lead nowhere, as with bridges between some of the GPUs."""
    nvml([], [], facts={"0": {"links": "1111"}, "1": {"links": "0011"}})
    assert gpu_node.run()["gpu nvlink"].outcome == "passed"
    nvml([], [], facts={"0": {"links": "1101"}, "1": {"links": "0011"}})
    found = gpu_node.run()["gpu nvlink"]
    why = "GPU 0 (00000000:00:00.0) has lost 1 of 4 NVLinks; see nvidia-smi nvlink -s"
    assert (found.outcome, found.why) == ("failed", why)


@pytest.mark.parametrize(
    ("facts", "note"),
    [
        ({"persistence": 0}, "persistence mode is off"),
        ({"mig": 1}, "MIG is on"),
        ({"fabric": [2, 0]}, "the fabric manager has not set up all GPUs"),
    ],
)
def test_settings_are_noted_and_cost_no_node(gpu_node: Node, nvml: Says, facts: dict[str, Any], note: str) -> None:
    nvml([], [], facts={"1": facts})
    found = gpu_node.run()
    assert found["gpus"].why.startswith(f"2 × Fake 100 – {note}")
    assert not [one for one in found.values() if one.outcome == "failed"]


@pytest.mark.parametrize("throttle", [0x1, 0x4, 0x20])  # idle, power cap, slowed down by software
def test_slowdown_at_full_load_is_ignored(gpu_node: Node, nvml: Says, throttle: int) -> None:
    nvml([], [], facts={"0": {"throttle": throttle}})
    assert gpu_node.run()["gpu heat"].outcome == "passed"


def test_gpu_off_the_bus(gpu_node: Node, nvml: Says) -> None:
    gpu_node.run()
    nvml([], None)
    found = gpu_node.run()["gpus"]
    assert (found.outcome, found.why) == ("failed", "GPU 1 does not answer: GPU is lost")


def test_gpu_lost_in_a_reboot_is_missed(gpu_node: Node, nvml: Says) -> None:
    nvml([])
    why = "1 GPUs found, 2 expected (health.gpus sets the number)"
    assert gpu_node.with_settings(gpus_of_slots=("0",)).run(most_gpus=2)["gpus"].why == why


def test_configured_gpu_count_wins(gpu_node: Node) -> None:
    assert gpu_node.with_health(gpus=2).run(most_gpus=8)["gpus"].outcome == "passed"


def test_only_visible_gpus_are_judged(gpu_node: Node, nvml: Says) -> None:
    nvml([], [], [], facts={"1": {"ecc": 1}})
    gpu_node.environ["CUDA_VISIBLE_DEVICES"] = "0,2"
    gpu_node.with_settings(gpus_of_slots=("0", "2"))
    assert not [reading for reading in gpu_node.run(most_gpus=3).values() if reading.outcome == "failed"]


@pytest.mark.parametrize(
    ("broken", "why"),
    [
        ("init", "NVML: Driver Not Loaded; 2 GPUs were expected"),
        ("dies", "the NVML process ended by itself"),
        ("hangs", "NVML did not answer within 0.5 s"),
    ],
)
def test_broken_driver_fails_until_it_recovers(
    gpu_node: Node, nvml: Says, monkeypatch: pytest.MonkeyPatch, broken: str, why: str
) -> None:
    monkeypatch.setattr(checks, "NVML_TIMEOUT_S", 0.5 if broken == "hangs" else PATIENCE_S)
    nvml([], [], broken=broken)
    for _ in range(2):
        found = gpu_node.run()["gpus"]
        assert found.outcome == "failed"
        assert found.why.startswith(why)
    nvml([], [])
    monkeypatch.setattr(checks, "NVML_TIMEOUT_S", PATIENCE_S)
    assert gpu_node.run()["gpus"].why == "2 × Fake 100"


def test_stopped_nvml_process_is_replaced(gpu_node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    gpu_node.run()
    (helper,) = (child for child in psutil.Process().children() if "nvml" in " ".join(child.cmdline()))
    helper.suspend()
    with monkeypatch.context() as impatient:
        impatient.setattr(checks, "NVML_TIMEOUT_S", 0.3)
        assert gpu_node.run()["gpus"].outcome == "failed"
    assert gpu_node.run()["gpus"].outcome == "passed"


def test_killed_agent_leaves_no_nvml_process(gpu_node: Node, nvml: Says) -> None:
    nvml([], [], broken="hangs")
    program = "from elasticd_agent.system.gpus.nvml import NvmlClient; NvmlClient(()).request({'do': 'gpus'}, 60)"
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen([sys.executable, "-c", program], env=environ) as daemon:
        children = Path(f"/proc/{daemon.pid}/task/{daemon.pid}/children")
        asker = int(until(lambda: children.read_text().split(), "NVML process")[0])
        until(lambda: (gpu_node.tmp / "asked").exists(), "question to the driver")
        daemon.kill()
        daemon.wait(60)
    until(lambda: procfs.state(asker) in ("", "Z"), "end of the NVML process")


def happens(tmp: Path, line: str) -> None:
    with open(tmp / "events", "a") as events:
        events.write(f"{line}\n")


def listening(node: Node) -> None:
    node.run()
    until(lambda: (node.tmp / "registered").exists(), "registration for events")


def test_gpu_event_is_reported_at_once_and_only_once(gpu_node: Node) -> None:
    listening(gpu_node)
    happens(gpu_node.tmp, "1 8 79")
    happens(gpu_node.tmp, "0 2 0")
    until(lambda: len(gpu_node.received) == 2, "event")
    found = gpu_node.run()["gpu xid"]
    assert found.certain
    assert found.why == "GPU 1 had XID 79; see dmesg, and XID 79 in NVIDIA's list of XID errors (and 1 more)"
    assert gpu_node.run()["gpu xid"].outcome == "passed"


def test_event_of_a_gpu_without_index_counts(gpu_node: Node, nvml: Says) -> None:
    listening(gpu_node)
    nvml([], None)
    happens(gpu_node.tmp, "1 8 79")
    until(lambda: gpu_node.received, "event")
    assert gpu_node.run()["gpu xid"].why.startswith("a GPU that has lost its index had XID 79")


def test_application_xids_are_ignored(gpu_node: Node) -> None:
    listening(gpu_node)
    for xid in gpus.APPLICATION_XIDS:
        happens(gpu_node.tmp, f"0 8 {xid}")
    happens(gpu_node.tmp, "0 8 94")
    until(lambda: gpu_node.received, "event")
    found = gpu_node.run()["gpu xid"]
    assert "XID 94" in found.why
    assert "more" not in found.why


def test_machine_without_gpus_starts_no_nvml_process(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(NvmlClient, "request", lambda *_: pytest.fail("it was asked"))
    found = node.run()
    assert found["gpus"].why == "this machine has no GPUs"
    assert not [name for name in found if name.startswith("gpu ")]


def test_missing_pynvml_names_the_package(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [path for path in sys.path if not (Path(path) / "pynvml.py").exists()])
    found = node.with_settings(gpus_of_slots=("0",)).run()["gpus"]
    assert found.outcome == "skipped"
    assert "pip install 'elasticd[gpu]'" in found.why


def test_machine_that_has_lost_all_gpus_needs_no_pynvml(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    """As after a boot without a driver: its CPUs would be slots, and jobs for GPUs would start there."""
    monkeypatch.setattr(sys, "path", [path for path in sys.path if not (Path(path) / "pynvml.py").exists()])
    found = node.run(most_gpus=2)["gpus"]
    assert (found.outcome, found.why) == ("failed", "0 GPUs found, 2 expected (health.gpus sets the number)")


@pytest.mark.parametrize(("chosen", "outcome"), [("0,1", "failed"), ("", "skipped")])
def test_gpus_that_are_named_and_all_lost_are_missed(node: Node, nvml: Says, chosen: str, outcome: str) -> None:
    """An agent that is to use no GPU misses none."""
    nvml(broken="init")
    node.environ["CUDA_VISIBLE_DEVICES"] = chosen
    assert node.run(most_gpus=2)["gpus"].outcome == outcome


def test_gpus_that_appear_after_the_agents_start_are_not_used(node: Node, nvml: Says) -> None:
    """As where the driver's module is built after a boot with a new kernel: the agent's slots are CPUs."""
    nvml()
    assert node.run(most_gpus=2)["gpus"].outcome == "failed"
    nvml([], [])
    node.checks().update(replace(node.settings, gpus_of_slots=("0", "1")))
    found = node.run(most_gpus=2)["gpus"]
    why = "2 GPUs found, but 0 at the agent's start: replace it (SIGUSR2)"
    assert (found.outcome, found.why) == ("failed", why)


def test_parts_of_a_gpu_are_not_counted_as_gpus(gpu_node: Node, nvml: Says) -> None:
    nvml([])
    gpu_node.environ["CUDA_VISIBLE_DEVICES"] = "MIG-1,MIG-2"
    assert gpu_node.with_settings(gpus_of_slots=("MIG-1", "MIG-2")).run(most_gpus=2)["gpus"].outcome == "passed"
