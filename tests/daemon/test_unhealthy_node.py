"""A whole unhealthy node: its job leaves at a checkpoint, returns after the cool-off, and loses no step."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest

from elasticd_daemon.health.kubernetes_node import CONDITION_TYPE
from tests.daemon.conftest import MakeNode
from tests.daemon.kubernetes_api import serving
from tests.daemon.node import COLD, AgentNode, lives, until


def ill(path: Path) -> dict[str, object]:
    """Health settings with a plugin that says that the node is ill while `path` exists."""
    plugins = path.parent / "health.d"
    plugins.mkdir(mode=0o755)
    plugin = plugins / "10-link"
    plugin.write_text(f"#!/bin/sh\n[ ! -e {path} ] || {{ echo link is down; exit 1; }}\n")
    plugin.chmod(0o755)
    return {
        "all_reduce": False, "disk_free_min": "1MB", "plugins_dir": str(plugins), "every": "1s", "cooloff": "3s",
        "plugin_timeout": "900ms",
    }  # fmt: skip


def states(node: AgentNode) -> list[str]:
    kinds = ("node_healthy", "node_unhealthy", "node_quarantined")
    return [event["kind"] for event in node.events() if event["kind"] in kinds]


@pytest.mark.system
def test_unhealthy_node_returns_its_job_after_cool_off(node: MakeNode, tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    n1 = node(health=ill(broken))
    n1.job("one", "resume.py", "--steps", "100000", "--every", "100000", workers=2, checkpoint_dir=str(n1.work / "ck"))
    n1.start()
    n1.wait_for_step(50)
    workers = n1.workers("one")
    broken.touch()
    until(lambda: not any(map(lives, workers)), n1.diagnostics)
    assert n1.event("node_unhealthy")["reason"].endswith("plugin 10-link: link is down")
    left = n1.wait_for_exit("one")
    assert (left.outcome, left.step) == ("left", n1.steps()[-1][1])
    broken.unlink()
    cooling = n1.event("node_quarantined")
    assert 2 < cooling["seconds"] <= 3
    until(lambda: n1.steps()[-1][1] > left.step, n1.diagnostics)
    assert states(n1) == ["node_healthy", "node_unhealthy", "node_quarantined", "node_healthy"]
    started = n1.job_events("one", "group_started")[-1]
    assert started["mono"] >= cooling["mono"] + cooling["seconds"] - 0.1
    steps = [step for _, step in n1.steps()]
    assert steps[: left.step + 1] == list(range(1, left.step + 2))
    n1.drain()
    n1.assert_gone()


MOUNT = """
mount -t tmpfs none /run
mkdir -p /run/secrets/kubernetes.io/serviceaccount
cp "$1"/* /run/secrets/kubernetes.io/serviceaccount
shift
exec "$@"
"""
"""A service account where pods have it; then a command."""


@pytest.mark.system
@pytest.mark.skipif(os.geteuid() != 0, reason="only root may mount")
def test_condition_of_the_kubernetes_node_moves_its_job(node: MakeNode, tmp_path: Path) -> None:
    """The job leaves at a checkpoint and returns; what others found is not repeated in our own condition."""
    (tmp_path / "account").mkdir()
    health = {**ill(tmp_path / "never"), "kubernetes": "report", "cooloff": "1s"}
    with serving("n1", tmp_path / "account") as api:
        n1 = node(health=health)
        checkpoints = str(n1.work / "ck")
        n1.job("one", "resume.py", "--steps", "100000", "--every", "100000", workers=2, checkpoint_dir=checkpoints)
        n1.start(prefix=["unshare", "--mount", "sh", "-euc", MOUNT, "pod", str(tmp_path / "account")], **api.variables)
        n1.wait_for_step(50)
        until(lambda: api.condition(CONDITION_TYPE).get("status") == "False", n1.diagnostics)
        api.set("GpuMemWatch", "True", "[DCGM_FR_FAULTY_MEMORY] GPU 0")
        left = n1.wait_for_exit("one")
        reason = n1.event("node_unhealthy")["reason"]
        assert reason.endswith("kubernetes: GpuMemWatch: [DCGM_FR_FAULTY_MEMORY] GPU 0")
        assert (left.outcome, left.step) == ("left", n1.steps()[-1][1])
        api.set("GpuMemWatch", "False")
        until(lambda: n1.steps()[-1][1] > left.step, n1.diagnostics)
        assert api.condition(CONDITION_TYPE)["status"] == "False"
        assert len(api.patches) == 1
        n1.drain()
        n1.assert_gone()


@pytest.mark.system
def test_killed_agent_keeps_the_quarantine(node: MakeNode, tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    n1 = node(health={**ill(broken), "cooloff": "1h", "cooloff_max": "2h"}).start()
    n1.event("node_healthy")
    broken.touch()
    n1.event("node_unhealthy")
    n1.kill()
    broken.unlink()
    n1.start()
    n1.event("node_quarantined")
    assert json.loads((n1.state / "health.json").read_bytes())["streak"] == 1
    n1.settings["health"] |= {"plugins_dir": "/none"}  # a reload changes what is looked at, not what was
    n1.write()
    n1.signal(signal.SIGHUP)
    n1.wait_for_log("SIGHUP: health.plugins_dir")
    n1.drain()
    n1.assert_gone()


@pytest.mark.system
def test_repeated_failures_of_a_job_quarantine_the_node(nodes: MakeNode, tmp_path: Path) -> None:
    script = tmp_path / "fails_on_one_node.py"
    script.write_text(
        "import os, sys, time\ntime.sleep(0.2)\nsys.exit(3) if 'ILL' in os.environ else time.sleep(1000)\n"
    )
    health = {**ill(tmp_path / "never"), "strikes": 1, "cooloff": "1h", "cooloff_max": "1h"}
    n1, n2 = nodes("n1", slots=1), nodes("n2", slots=1, health=health)
    n1.job("both", str(script), COLD, nodes="1:2", workers=1, max_restarts=50)
    n2.start(ILL="yes")
    n1.start()
    reported = n2.event("node_quarantined")["reason"]
    assert "as root cause once within 60 minutes" in reported
    assert "quarantined slot 0" in reported
    until(lambda: n2.wait_for_exit("both").outcome == "left", n2.diagnostics)
    until(lambda: n1.job_events("both", "round_published")[-1]["nodes"] == ["n1"], n1.diagnostics)
    assert lives(n1.workers("both")[-1])
    assert states(n1) == ["node_healthy"]
