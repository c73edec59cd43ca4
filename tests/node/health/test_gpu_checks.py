"""GPUs through a fake NVML in a real process: sick ones, lost ones, events, and a driver that does not answer."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from elasticd_agent.node.health import checks
from elasticd_agent.node.health import gpu_checks as gpus
from elasticd_agent.system import procfs
from elasticd_agent.system.nvml import NvmlClient
from tests.node.health.conftest import Node, Says, until


@pytest.fixture
def gpu_node(node: Node, nvml: Says) -> Node:
    return node.with_targets(devices=("0", "1"))


def test_two_that_are_well(gpu_node: Node) -> None:
    found = gpu_node.run()
    assert found["gpus"].why == "2 × Fake 100"
    assert {
        name: found[name].outcome for name in ("gpus", "gpu ecc", "gpu rows", "gpu heat", "gpu xid")
    } == dict.fromkeys(("gpus", "gpu ecc", "gpu rows", "gpu heat", "gpu xid"), "good")


@pytest.mark.parametrize(
    ("facts", "check", "why"),
    [
        ({"ecc": 3}, "gpu ecc", "has had 3 uncorrectable memory errors since it was last reset; reset it"),
        ({"remapped": [0, 1, True, False]}, "gpu rows", "has a faulty row of memory to remap, which needs a reset"),
        (
            {"remapped": [0, 9, True, True]},
            "gpu rows",
            "could not remap a faulty row of memory; it should be replaced",
        ),
        ({"throttle": 0x48}, "gpu heat", "is slowed down at 60 °C: too hot (hardware thermal slowdown)"),
        ({"throttle": 0x80}, "gpu heat", "is slowed down at 60 °C: short of power (hardware power brake)"),
    ],
)
def test_a_sick_one_is_named_with_what_is_wrong(
    gpu_node: Node, nvml: Says, facts: dict[str, Any], check: str, why: str
) -> None:
    nvml([], [], facts={"1": facts})
    found = gpu_node.run()
    assert (found[check].outcome, found[check].why) == ("bad", f"GPU 1 (00000000:01:00.0) {why}")
    assert [name for name in found if found[name].outcome == "bad"] == [check]


@pytest.mark.parametrize("throttle", [0x1, 0x4, 0x20])  # idle, power cap, slowed down by software
def test_what_a_gpu_does_at_full_load_is_no_trouble(gpu_node: Node, nvml: Says, throttle: int) -> None:
    nvml([], [], facts={"0": {"throttle": throttle}})
    assert gpu_node.run()["gpu heat"].outcome == "good"


def test_one_that_has_fallen_off_the_bus(gpu_node: Node, nvml: Says) -> None:
    gpu_node.run()
    nvml([], None)
    found = gpu_node.run()["gpus"]
    assert (found.outcome, found.why) == ("bad", "GPU 1 does not answer: GPU is lost")


def test_one_that_is_gone_after_a_reboot_is_missed(gpu_node: Node, nvml: Says) -> None:
    nvml([])
    why = "1 GPUs are here, 2 were expected (health.gpus says how many there should be)"
    assert gpu_node.with_targets(devices=("0",)).run(most_gpus=2)["gpus"].why == why


def test_where_somebody_says_how_many_there_should_be_that_counts(gpu_node: Node) -> None:
    assert gpu_node.with_targets(expected_gpus=2).run(most_gpus=8)["gpus"].outcome == "good"


def test_only_those_it_may_use_are_judged(gpu_node: Node, nvml: Says) -> None:
    nvml([], [], [], facts={"1": {"ecc": 1}})
    gpu_node.with_targets(devices=("0", "2"), visible_gpus=("0", "2"))
    assert not [reading for reading in gpu_node.run(most_gpus=3).values() if reading.outcome == "bad"]


@pytest.mark.parametrize(
    ("broken", "why"),
    [
        ("init", "NVML: Driver Not Loaded; 2 GPUs were expected"),
        ("dies", "the NVML process ended by itself"),
        ("hangs", "NVML did not answer within 0.5 s"),
    ],
)
def test_a_driver_in_trouble_is_trouble_until_it_is_not(
    gpu_node: Node, nvml: Says, monkeypatch: pytest.MonkeyPatch, broken: str, why: str
) -> None:
    monkeypatch.setattr(checks, "NVML_TIMEOUT_S", 0.5 if broken == "hangs" else 30.0)
    nvml([], [], broken=broken)
    for _ in range(2):
        began = time.monotonic()
        found = gpu_node.run()["gpus"]
        assert time.monotonic() - began < 15
        assert found.outcome == "bad"
        assert found.why.startswith(why)
    nvml([], [])
    monkeypatch.setattr(checks, "NVML_TIMEOUT_S", 30.0)  # starting the process may take longer on a busy machine
    assert gpu_node.run()["gpus"].why == "2 × Fake 100"


def test_a_process_that_was_stopped_is_given_up_and_followed_by_another(
    gpu_node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu_node.run()
    helper = gpu_node.checks()._nvml._helper
    assert helper is not None
    os.kill(helper.pid, signal.SIGSTOP)
    with monkeypatch.context() as impatient:
        impatient.setattr(checks, "NVML_TIMEOUT_S", 0.3)
        assert gpu_node.run()["gpus"].outcome == "bad"
    assert gpu_node.run()["gpus"].outcome == "good"


def test_a_daemon_that_is_killed_leaves_nobody_in_the_driver(gpu_node: Node, nvml: Says) -> None:
    nvml([], [], broken="hangs")
    program = "from elasticd_agent.system.nvml import NvmlClient; NvmlClient('events').request({'do': 'gpus'}, 60)"
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen([sys.executable, "-c", program], env=environ) as daemon:
        children = Path(f"/proc/{daemon.pid}/task/{daemon.pid}/children")
        asker = int(until(lambda: children.read_text().split(), "NVML process")[0])
        until(lambda: (gpu_node.tmp / "asked").exists(), "question to the driver")
        daemon.kill()
        daemon.wait(10)
    until(lambda: procfs.state(asker) in ("", "Z"), "end of the NVML process")


def happens(tmp: Path, line: str) -> None:
    with open(tmp / "events", "a") as events:
        events.write(f"{line}\n")


def listening(node: Node) -> None:
    node.run()
    until(lambda: (node.tmp / "registered").exists(), "registration for events")
    time.sleep(0.1)  # the set was made before, and counts from there; it is only the wait that begins now


def test_an_event_is_heard_at_once_and_told_once(gpu_node: Node) -> None:
    listening(gpu_node)
    happens(gpu_node.tmp, "1 8 79")
    happens(gpu_node.tmp, "0 2 0")
    until(lambda: len(gpu_node.heard) == 2, "event")
    found = gpu_node.run()["gpu xid"]
    assert found.certain
    assert found.why == "GPU 1 had XID 79; see dmesg, and XID 79 in NVIDIA's list of XID errors (and 1 more)"
    assert gpu_node.run()["gpu xid"].outcome == "good"


def test_an_event_of_a_gpu_that_cannot_say_its_name_counts(gpu_node: Node, nvml: Says) -> None:
    listening(gpu_node)
    nvml([], None)
    happens(gpu_node.tmp, "1 8 79")
    until(lambda: gpu_node.heard, "event")
    assert gpu_node.run()["gpu xid"].why.startswith("a GPU that does not say any more which one it is had XID 79")


def test_what_programs_do_to_themselves_is_not_the_gpus_fault(gpu_node: Node) -> None:
    listening(gpu_node)
    for xid in gpus.APPLICATION_XIDS:
        happens(gpu_node.tmp, f"0 8 {xid}")
    happens(gpu_node.tmp, "0 8 94")
    until(lambda: gpu_node.heard, "event")
    found = gpu_node.run()["gpu xid"]
    assert "XID 94" in found.why
    assert "more" not in found.why


def test_a_machine_without_gpus_asks_nobody(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(NvmlClient, "request", lambda *_: pytest.fail("it was asked"))
    found = node.run()
    assert found["gpus"].why == "this machine has no GPUs"
    assert not [name for name in found if name.startswith("gpu ")]


def test_without_pynvml_it_says_what_to_install(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [path for path in sys.path if not (Path(path) / "pynvml.py").exists()])
    found = node.with_targets(devices=("0",)).run()["gpus"]
    assert found.outcome == "skipped"
    assert "pip install 'elasticd[gpu]'" in found.why
