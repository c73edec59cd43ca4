"""SIGHUP to a real agent: errors change nothing, changes apply at once, and those that need a restart are named."""

from __future__ import annotations

import json
import re
import signal
import sys

import pytest

from tests.daemon.conftest import MakeNode
from tests.daemon.node import COLD, lives, until
from tests.etcd import EtcdServers


@pytest.mark.system
def test_reload_is_atomic_and_names_changes_that_need_a_restart(node: MakeNode) -> None:
    n1 = node()
    n1.job("first", "plain.py", COLD, "sleep", workers=1)
    n1.start()
    workers = n1.workers("first")
    until(lambda: (n1.work / "ready-0").exists(), n1.diagnostics)

    n1.config.write_text(n1.config.read_text() + "slot = 3\n")
    n1.signal(signal.SIGHUP)
    line = n1.wait_for_log("the configuration was not reloaded")
    assert line.endswith(f"{n1.config}: slot: is not a key; did you mean slots?")

    # A job may use the directory of this node's jobs and no other from now on; its slots are another matter.
    n1.settings |= {"limits": {"directories": [str(n1.work)]}, "slots": 3}
    n1.write()
    n1.signal(signal.SIGHUP)
    line = n1.wait_for_log("SIGHUP: slots: 3 instead of 2 takes effect at the next start")
    assert 'limits.directories: ["/' in line
    n1.job("second", "plain.py", COLD, "sleep", workers=1)
    n1.submit_jobs()
    outside = n1.job_table("outside", "plain.py", COLD, "sleep", workers=1, checkpoint_dir="/elsewhere")
    reply = n1.unix().post("/v1/jobs", json.dumps(outside).encode())
    assert (reply.code, "'/elsewhere' is not below one of this node's [limits] directories" in reply.why) == (400, True)
    assert lives(n1.workers("second", 2)[0])
    assert n1.workers("first") == workers
    assert lives(workers[0])
    assert n1.drain() == 0
    n1.assert_gone()


def test_replacement_that_would_lose_the_running_jobs_is_refused(node: MakeNode) -> None:
    """In another state directory it would start them a second time on the same GPUs; as another node, stop them."""
    n1 = node()
    n1.job("one", "plain.py", COLD, "sleep", workers=1)
    n1.start()
    until(lambda: (n1.work / "ready-0").exists(), n1.diagnostics)
    right = dict(n1.settings)
    for key, other in (("state_dir", n1.root / "moved"), ("node", "n2")):
        n1.settings = {**right, key: other}
        n1.write()
        n1.signal(signal.SIGUSR2)
        n1.wait_for_log(f"this agent keeps running: with another {key} it would not find the jobs that run here", 20)
        n1.signal(signal.SIGHUP)
        n1.until(
            lambda key=key: re.search(
                rf"SIGHUP: {key}: .* takes effect at the next start \(systemctl restart, which drains\)", n1.log
            ),
            key,
        )
        assert len(n1.workers("one")) == 1
        assert lives(n1.workers("one")[0])
    assert n1.drain() == 0
    n1.assert_gone()


@pytest.mark.system
def test_jobs_that_a_change_of_the_store_leaves_behind_are_named(node: MakeNode, etcd: EtcdServers) -> None:
    """The drain that comes with the restart has put them back into a queue that nobody reads any more."""
    n1 = node(labels=["a"], local_addr="127.0.0.1")
    n1.job("runs", "plain.py", COLD, "slow", workers=1)
    n1.job("waits", "plain.py", COLD, "slow", workers=1, node_labels=["b"])
    n1.start()
    until(lambda: (n1.work / "ready-0").exists(), n1.diagnostics)
    assert n1.drain() == 0
    n1.settings["store"] = {"backend": "etcd", "endpoints": [f"127.0.0.1:{etcd.port}"]}
    n1.start()
    n1.wait_for_log(f"does not use {n1.state / 'store.sqlite'} any more, where runs and waits have not ended")
    assert n1.drain() == 0


def test_request_to_stop_that_waits_at_the_start_is_an_orderly_end(node: MakeNode) -> None:
    """As of an agent that systemd stops while it replaces itself."""
    waits = "import os, signal, sys; signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM]); "
    waits += "signal.raise_signal(signal.SIGTERM); os.execv(sys.argv[1], sys.argv[1:])"
    agent = node("n1")
    agent.start(prefix=[sys.executable, "-c", waits])
    assert agent.wait() == 0
    assert agent.events("agent_ended")


def test_replacement_by_a_version_that_does_not_start_is_refused(node: MakeNode) -> None:
    """The agent would be gone, for a wrong key or half an upgrade, and systemd does not restart after exit code 2."""
    n1 = node()
    installed = n1.root / "installed"
    installed.mkdir()
    n1.path.insert(0, str(installed))
    n1.start()
    right = n1.config.read_text()

    n1.config.write_text(right + "nonsense = 1\n")
    n1.signal(signal.SIGUSR2)
    assert "nonsense: is not a key" in n1.wait_for_log("SIGUSR2: this agent keeps running")
    n1.config.write_text(right)

    (installed / "elasticd_agent.py").write_text("raise ImportError('half of it')\n")
    n1.signal(signal.SIGUSR2)
    assert "SIGUSR2: this agent keeps running" in n1.wait_for_log("ImportError: half of it")
    (installed / "elasticd_agent.py").unlink()

    n1.upgrade()
    assert n1.drain() == 0
