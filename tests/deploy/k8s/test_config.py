"""The agent.toml that pods read: what elasticd makes of it, with the page's certificates and a pod's variables."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from elasticd.errors import UsageError
from elasticd_daemon.config.load import load
from elasticd_daemon.config.store_options import store_rendezvous
from tests.deploy.k8s.machine import AgentPod, Machine
from tests.deploy.k8s.manifests import DAEMONS, overlay


@pytest.fixture(scope="module")
def machine() -> Iterator[Machine]:
    root = Path(tempfile.mkdtemp(prefix="elasticd-k8s-"))
    root.chmod(0o755)
    made = Machine(root)
    yield made
    made.end()


@pytest.mark.parametrize("name", DAEMONS)
def test_agent_accepts_the_configuration(machine: Machine, name: str) -> None:
    pod = AgentPod(machine, overlay(name), f"{name}.example.com", {})
    bound = {"ELASTICD_HTTP_BIND": "10.1.2.3"} if name == "host-network" else {}
    found = load(Path(pod.config), {**pod.env, **bound})
    assert (found.node, found.local_addr, found.slots) == (f"{name}.example.com", "127.0.0.1", 1)
    where = store_rendezvous(found)
    assert (len(where.endpoints), where.tls.cert is not None) == (3, True)
    assert found.http.bind == bound.get("ELASTICD_HTTP_BIND", "0.0.0.0")
    assert found.user is None, "jobs run as the agent's own user: it is not root, and may be nobody else"


def test_secret_readable_by_others_is_refused(machine: Machine) -> None:
    """Why each Secret's volume has a defaultMode."""
    pod = AgentPod(machine, overlay("etcd"), "gpu-1", {})
    token = machine.root / "secrets" / "elasticd-token" / "token"
    os.chmod(token, 0o644)
    with pytest.raises(UsageError, match=r"http\.token_file: .*anybody can read it"):
        load(Path(pod.config), pod.env)
    os.chmod(token, 0o440)
    load(Path(pod.config), pod.env)
