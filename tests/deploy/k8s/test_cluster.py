"""The rendered manifests, run for real on this machine: etcd, agents and jobs by the arguments and files they name."""

from __future__ import annotations

import json
import os
import signal
import socket
import ssl
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.deploy.k8s.machine import AgentPod, Etcd, Machine, free_ports, probe, replaced
from tests.deploy.k8s.manifests import K8S, agents, expanded, of_kind, overlay, pods, rendered, writable
from tests.faults.job import until

pytestmark = pytest.mark.system


@pytest.fixture
def machine() -> Iterator[Machine]:
    # Not pytest's own: a pod's user cannot pass through that.
    root = Path(tempfile.mkdtemp(prefix="elasticd-k8s-"))
    root.chmod(0o755)
    made = Machine(root)
    yield made
    made.end()


@pytest.mark.timeout(300)
def test_sample_job_survives_killed_agents_and_pods(machine: Machine) -> None:
    found = overlay("etcd")
    etcd = Etcd(machine, found)
    assert not let_in(etcd, machine), "without a certificate nobody is let in"
    first, second = (AgentPod(machine, found, node, etcd.here).start() for node in ("gpu-1", "gpu-2"))
    for pod in (first, second):
        assert "nothing is wrong with it" in machine.ask("config", "check", pod.config)
        if machine.user:
            assert {Path(f"/proc/{pid}").stat().st_uid for pid in pod.process.pids()} == {10001}  # type: ignore[union-attr]
        if machine.read_only:
            mounts = [line.split() for line in Path(f"/proc/{pod.agent}/mounts").read_text().splitlines()]
            root = [options.split(",") for _, where, _, options, *_ in mounts if where == "/"]
            assert "ro" in root[-1]
    listed = json.loads(first.asked("nodes", "--json"))["nodes"]
    assert {row["node"]: row["address"] for row in listed} == {
        pod.node: f"127.0.0.1:{pod.port}" for pod in (first, second)
    }

    # The Job hands it in, over TLS, with the token.
    (job,) = pods(rendered("sample-job"))
    maps = {o["metadata"]["name"]: o["data"] for o in of_kind(rendered("sample-job"), "ConfigMap")}
    job_toml = replaced(maps["elasticd-sample-job"]["job.toml"], first.here)
    files = {**maps["elasticd-sample-script"], "job.toml": job_toml}
    mounts = machine.volumes(job, job.container("script"), "job", files)
    script = [replaced(word, mounts) for word in job.container("script")["command"]]
    subprocess.run([*machine.user, *script], check=True, timeout=20)
    mounts = machine.volumes(job, job.container("submit"), "job", files)
    asked = {**mounts, "elasticd-agent:9411": f"localhost:{second.port}"}
    assert machine.ask(*(replaced(word, asked) for word in expanded(job.container("submit"), {}))) == "sample\n"
    until(lambda: trains(first, nodes=2), lambda: f"two nodes that train\n{machine.told}", 120)

    # What the other node's rank wrote is fetched by one agent from the other, by the one name of their certificate.
    for pod in (first, second):
        for rank in ("0", "1"):
            assert "elasticd" in pod.asked("logs", "sample", "--rank", rank, "--stream", "elasticd")

    # The agent dies: the container goes on, and so does the job, in the same round.
    before = status(second)
    killed = first.agent
    os.kill(killed, signal.SIGKILL)
    until(lambda: alive(first) and first.agent != killed, lambda: f"another agent\n{machine.told}")
    first.answers()
    until(lambda: trains(second, nodes=2, beyond=step(before)), lambda: f"more steps\n{machine.told}")
    assert rounds(status(second)) == rounds(before), "nobody noticed"

    # The pod is deleted, and comes back on its node: drained, and the same node again.
    incarnation = identity(first)
    assert first.process.stop(180) == 0
    assert not first.process.pids()
    at = step(status(second))
    until(lambda: trains(second, nodes=1, beyond=at), lambda: f"steps without it\n{machine.told}")
    first.start()
    assert identity(first) == incarnation
    until(lambda: trains(second, nodes=2), lambda: f"both again\n{machine.told}", 120)

    # The container is killed with all that is in it, as for want of memory.
    first.process.kill()
    at = step(status(second))
    until(lambda: trains(second, nodes=1, beyond=at), lambda: f"steps without it\n{machine.told}", 120)
    first.start()
    until(lambda: trains(second, nodes=2), lambda: f"both again\n{machine.told}", 120)

    second.asked("cancel", "sample")
    for pod in (first, second):
        assert pod.process.stop(120) == 0, machine.told


@pytest.mark.timeout(240)
def test_rendezvous_at_the_store_pod_without_etcd(machine: Machine) -> None:
    found = overlay("c10d")
    store_port, *ports = free_ports(3)
    pod = agents(found)
    container = pod.container("agent")
    beside = next(p for p in pods(found) if p.name == "Deployment elasticd-store").container("store")
    here = {"elasticd-store:29400": f"127.0.0.1:{store_port}", "29400": str(store_port)}
    store = machine.elasticd([replaced(word, here) for word in beside["args"]], "store", {})
    started, logs = [], []
    for node, port in zip(("gpu-1", "gpu-2"), ports, strict=True):
        script = {"train.py": (K8S / "sample-script" / "train.py").read_text()}
        mounts = machine.volumes(pod, container, node, script)
        if machine.user:
            os.chown(mounts["/var/lib/elasticd"], 10001, 10001)
        # One CPU worker stands for a node's GPUs.
        own = {**here, **mounts, "=9411": f"={port}", "--nproc-per-node=auto": "--nproc-per-node=1"}
        words = expanded(container, {"ELASTICD_NODE": node, "ELASTICD_LOCAL_ADDR": "127.0.0.1"})
        env = {"HOME": mounts["/tmp"], "TMPDIR": mounts["/tmp"]}
        places = sorted(mounts[path] for path in writable(pod, container) & set(mounts))
        started.append(machine.elasticd([replaced(word, own) for word in words], node, env, places))
        logs.append(Path(mounts["/var/lib/elasticd"], "events.jsonl"))
        for kind in ("startupProbe", "livenessProbe", "readinessProbe"):
            url = probe(container, kind, port)
            machine.until_it_answers(url)
    # The first one was in a round before the second one was there.
    until(lambda: all(events(log, "first_step", round=2) for log in logs), lambda: f"two nodes\n{machine.told}", 120)
    assert events(logs[0], "round_published")[-1]["world_size"] == 2
    # The store's pod moves: empty, and nobody starts again.
    at = len(events(logs[0], "round_published"))
    store.kill()
    until(lambda: all(events(log, "store_unavailable") for log in logs), lambda: f"an outage\n{machine.told}")
    machine.elasticd([replaced(word, here) for word in beside["args"]], "store", {})
    until(lambda: all(events(log, "store_available") for log in logs), lambda: f"its end\n{machine.told}", 120)
    assert len(events(logs[0], "round_published")) == at
    # A pod is deleted: it leaves at a checkpoint, the other one goes on.
    started[1].process.terminate()
    until(lambda: started[1].process.poll() is not None, lambda: f"its end\n{machine.told}", 150)
    until(lambda: len(events(logs[0], "round_published")) > at, lambda: f"a round without it\n{machine.told}")
    assert len(events(logs[0], "round_published")[-1]["nodes"]) == 1
    assert started[0].process.poll() is None


# --- asking -----------------------------------------------------------------------------------------------------------


def status(pod: AgentPod) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(pod.asked("status", "sample", "--json"))
    return found


def step(found: dict[str, Any]) -> int:
    return int((found.get("progress") or {}).get("step") or 0)


def rounds(found: dict[str, Any]) -> list[int]:
    return [one["round"] for one in found["progress"]["rounds"]]


def trains(pod: AgentPod, *, nodes: int, beyond: int = 0) -> bool:
    found = status(pod)
    return found["state"] == "running" and (found["progress"] or {}).get("world_size") == nodes and step(found) > beyond


def alive(pod: AgentPod) -> bool:
    try:
        return pod.agent > 0
    except ValueError:  # between two
        return False


def identity(pod: AgentPod) -> dict[str, str]:
    found: dict[str, str] = json.loads(Path(pod.here["/var/lib/elasticd"], "node.json").read_text())
    return found


def let_in(etcd: Etcd, machine: Machine) -> bool:
    """By its client port, as somebody who trusts the authority, but has no certificate of its own."""
    host, port = etcd.here["elasticd-etcd-0.elasticd-etcd.elasticd.svc:2379"].split(":")
    context = ssl.create_default_context(cafile=str(machine.root / "pki" / "ca.crt"))
    with socket.create_connection((host, int(port)), 5) as plain:
        try:
            with context.wrap_socket(plain, server_hostname=host) as tls:
                tls.sendall(b"GET /version HTTP/1.1\r\nHost: x\r\n\r\n")
                return bool(tls.recv(1))
        except ssl.SSLError:
            return False


def events(log: Path, kind: str, **having: Any) -> list[dict[str, Any]]:
    whole = log.read_text().rpartition("\n")[0] if log.exists() else ""
    found = map(json.loads, whole.splitlines())
    wanted = {"kind": kind, **having}
    return [event for event in found if wanted.items() <= event.items()]
