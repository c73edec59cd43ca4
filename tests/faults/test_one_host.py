"""Several agents of one job on one host: each has a name of its own, and a refused one never hosts the store."""

from __future__ import annotations

import socket

import pytest

from tests.faults.conftest import StartJob
from tests.faults.job import Job, until
from tests.faults.nodes import COLD

HOST = socket.gethostname()


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
        return port


def start(job: StartJob, port: int, *flags: str, conf: str = "last_call_timeout=1", nnodes: str = "2") -> Job:
    meet = ["--nnodes", nnodes, "--rdzv-backend", "c10d", "--rdzv-id", "job", "--rdzv-endpoint", f"localhost:{port}"]
    return job("tells.py", COLD, flags=[*meet, "--rdzv-conf", conf, *flags], workers="1")


def finish(*agents: Job) -> None:
    for agent in agents:
        (agent.work / "enough").touch()
    assert [agent.wait() for agent in agents] == [0] * len(agents)


@pytest.mark.system
def test_agents_without_a_name_that_start_at_the_same_time(job: StartJob) -> None:
    port = free_port()
    agents = [start(job, port, nnodes="3") for _ in range(3)]
    nodes = [set(agent.event("round_published")["nodes"]) for agent in agents]
    assert nodes == [{HOST, f"{HOST}-2", f"{HOST}-3"}] * 3
    for agent in agents:
        agent.event("group_started")
    finish(*agents)


def test_refused_agent_that_would_have_hosted_the_store(job: StartJob) -> None:
    port = free_port()
    agents = [start(job, port, "--node-id", "a", conf="is_host=0,last_call_timeout=1")]
    agents[0].event("launcher_ready")  # it has claimed its name, and waits for a store that nobody hosts
    agents.append(start(job, port, "--node-id", "a"))
    agents[1].event("launcher_ready")
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port), 20)
    host = start(job, port, "--node-id", "b")
    refused = until(lambda: next((agent for agent in agents if agent.process.poll() is not None), None), "a refusal")
    agents.remove(refused)
    assert refused.wait() == 2, refused.err
    assert "another agent takes part in this job as node 'a'" in refused.err
    for agent in (host, *agents):
        assert set(agent.event("round_published")["nodes"]) == {"a", "b"}
        agent.event("group_started")
    finish(host, *agents)
