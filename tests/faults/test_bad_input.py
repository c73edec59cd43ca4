"""What a person gets wrong about the place where nodes meet: one line says what, where and what to do, and that is all.

Who trains already is not disturbed by it. What the command line alone shows to be wrong is in tests/cli.
"""

from __future__ import annotations

import os
import re
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from elasticd_agent.model.job import REQUEUE_EXIT_CODE
from tests.etcd import Authority, EtcdServers, etcd_servers
from tests.faults.conftest import StartJob
from tests.faults.job import REPOSITORY, SCRIPTS, Job, until
from tests.faults.nodes import COLD, Nodes

StartNodes = Callable[[str], Nodes]
SOON = "join_timeout=1,last_call_timeout=0.5"


def refused(agent: Job, *words: str, code: int = 2) -> None:
    """It ends by itself, soon, with this exit code and one line with all of these in it."""
    assert agent.wait() == code, agent.err
    said = [line for line in agent.err.splitlines() if "error:" in line]
    assert len(said) == 1, agent.err
    for word in words:
        assert re.search(word, said[0]), f"{word!r} is not in: {said[0]}"
    assert "Traceback" not in agent.err


def requeued(agent: Job, *words: str) -> None:
    refused(agent, *words, code=REQUEUE_EXIT_CODE)


def start_node(job: StartJob, endpoint: str, *conf: str, backend: str = "etcd", local: bool = True) -> Job:
    flags = ["--nnodes", "1:2", "--rdzv-backend", backend, "--rdzv-endpoint", endpoint, "--rdzv-id", "job"]
    conf = conf if any(word.startswith("join_timeout") for word in conf) else (SOON, *conf)
    flags += ["--rdzv-conf", ",".join(conf), "--node-id", "a", *(["--local-addr", "127.0.0.1"] if local else [])]
    return job("tells.py", COLD, flags=flags, workers="1")


@contextmanager
def somebody_else() -> Iterator[int]:
    """A port where something answers that is no store."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            while True:
                try:
                    caller, _ = listener.accept()
                except OSError:
                    return
                with caller:
                    caller.sendall(b"SSH-2.0-OpenSSH_9.2\r\n")

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield listener.getsockname()[1]
        finally:
            listener.shutdown(socket.SHUT_RDWR)
            thread.join(20)


# ---- the store


def test_endpoint_without_a_listener(job: StartJob) -> None:
    """Nobody listens there."""
    both = [start_node(job, "127.0.0.1:1"), start_node(job, "127.0.0.1:1", "is_host=0", backend="c10d")]
    for agent in both:
        requeued(agent, r"no answer from the store within \d s", r"127\.0\.0\.1:1 ")


@pytest.mark.parametrize("backend", ["etcd", "c10d"])
def test_unknown_host_name(job: StartJob, backend: str) -> None:
    requeued(start_node(job, "nowhere.invalid", backend=backend, local=False), r"nowhere\.invalid", "retried for 1 s")


def test_signal_while_a_host_name_is_unknown(job: StartJob) -> None:
    agent = start_node(job, "nowhere.invalid", "join_timeout=600", local=False)
    until(lambda: "retrying for 600 s" in agent.err, "the line about the unknown name")
    agent.process.send_signal(signal.SIGTERM)
    assert agent.wait() == 128 + signal.SIGTERM


def test_endpoint_of_another_service(job: StartJob) -> None:
    """Something else listens there."""
    with somebody_else() as port:
        refused(start_node(job, f"127.0.0.1:{port}"), f"127.0.0.1:{port} is not an etcd v3 server")


def test_tls_on_one_side_only(job: StartJob, etcd: EtcdServers, tmp_path: Path) -> None:
    with etcd_servers(tls=Authority(tmp_path).server()) as secure:
        ours, theirs = start_node(job, f"https://127.0.0.1:{etcd.port}"), start_node(job, f"127.0.0.1:{secure.port}")
        refused(ours, "does not use TLS", "http://")
        refused(theirs, "uses TLS", "https://")


def test_a_certificate_that_has_expired(job: StartJob, tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    with etcd_servers(tls=authority.server()) as etcd:
        etcd.certify(authority.server(expired=True))
        etcd.restart()
        refused(start_node(job, f"https://127.0.0.1:{etcd.port}", f"cacert={authority.ca}"), "certificate has expired")


def test_a_wrong_password_and_none(job: StartJob) -> None:
    with etcd_servers() as etcd:
        etcd.ask_for_passwords("agent", "secret", "/elasticd/")
        endpoint = f"127.0.0.1:{etcd.port}"
        wrong, none = start_node(job, endpoint, "user=agent,password=wrong"), start_node(job, endpoint)
        refused(wrong, "user or the password is wrong")
        refused(none, "user", "password")
        right = start_node(job, endpoint, "user=agent,password=secret")
        right.file("told-0")
        (right.work / "enough").touch()
        assert right.wait() == 0


# ---- the job


def test_another_jobs_id(nodes: StartNodes) -> None:
    both = nodes("1:2")
    a = both.agent("a", "tells.py")
    a.file("told-0")
    both.nnodes = "1:3"
    refused(
        both.agent("b", "tells.py"), f"job '{both.job}' runs with a different command: --nnodes MAX is 3 here, 2 there"
    )
    both.nnodes = "1:2"
    refused(both.agent("b", "plain.py"), "the script is 'plain.py' here, 'tells.py' there")
    (a.work / "enough").touch()
    assert a.wait() == 0
    assert len(a.events("round_published")) == 1


@pytest.mark.system
def test_id_of_an_ended_job(nodes: StartNodes) -> None:
    """An ended jobs id is told how it ended and another run begins anew."""
    one = nodes("1:2")
    a = one.agent("a", "tells.py")
    a.file("told-0")
    assert one.enough() == [0]
    ended = a.event("job_ended")
    late = one.agent("late", "tells.py")
    assert late.wait() == 0
    assert late.event("job_ended")["reason"] == ended["reason"]
    assert not late.events("group_started")
    assert "run 0 of job 'test_id_of_an_ended_job' ended before this node came" in late.err
    other = one.agent("other", "tells.py", flags=["--max-restarts", "7"])
    assert other.file("told-0")
    assert other.event("round_published")["round"] > ended["round"]
    (other.work / "enough").touch()
    assert other.wait() == 0
    again = one.agent("again", "tells.py", flags=["--run", "2"])
    again.file("told-0")
    assert again.event("round_published")["round"] > ended["round"]
    (again.work / "enough").touch()
    assert again.wait() == 0


@pytest.mark.system
@pytest.mark.parametrize(
    ("option", "said"), [("--checkpoint-dir", "is held by run '0' of job"), ("--log-dir", "run 0 pid")]
)
def test_later_run_waits_for_the_directory_of_the_earlier_one(
    option: str, said: str, nodes: StartNodes, tmp_path: Path
) -> None:
    both = nodes("1:2")
    shared = [option, str(tmp_path / "shared")]
    a = both.agent("a", "tells.py", flags=shared)
    a.file("told-0")
    b = both.agent("b", "tells.py", flags=[*shared, "--run", "1"])
    until(lambda: said in b.err, "the line about the directory")
    refused(both.agent("c", "tells.py", flags=[*shared, "--rdzv-id", "another"]), said)
    (a.work / "enough").touch()
    assert a.wait() == 0
    b.file("told-0")
    (b.work / "enough").touch()
    assert b.wait() == 0


def test_two_agents_with_the_same_node_id(nodes: StartNodes) -> None:
    both = nodes("1:2")
    a = both.agent("a", "tells.py")
    a.file("told-0")
    refused(both.agent("a", "tells.py"), "another agent takes part in this job as node 'a'", "--node-id")
    (a.work / "enough").touch()
    assert a.wait() == 0
    assert len(a.events("round_published")) == 1


def test_checkpoint_directory_that_is_not_shared(nodes: StartNodes, tmp_path: Path) -> None:
    """A checkpoint directory that is not shared is said once and loudly."""
    both = nodes("2")
    agents = [both.agent(n, "tells.py", flags=["--checkpoint-dir", str(tmp_path / f"of-{n}")]) for n in "ab"]
    for agent in agents:
        agent.event("group_started")
    assert both.enough() == [0, 0]
    assert sum(agent.err.count("THE CHECKPOINT DIRECTORY IS NOT SHARED") for agent in agents) == 1


def test_shared_checkpoint_directory(nodes: StartNodes, tmp_path: Path) -> None:
    """One that is shared is not complained about and one node without is refused."""
    both = nodes("2:3")
    shared = ["--checkpoint-dir", str(tmp_path / "shared")]
    agents = [both.agent(name, "tells.py", flags=shared) for name in "ab"]
    for agent in agents:
        agent.event("group_started")
    refused(both.agent("c", "tells.py"), "--checkpoint-dir is not given here, given there")
    for agent in agents:
        (agent.work / "enough").touch()
    assert [agent.wait() for agent in agents] == [0, 0]
    assert "SHARED" not in agents[0].err + agents[1].err


# ---- the machine


@pytest.mark.system
def test_a_wall_clock_that_jumps_changes_nothing(nodes: StartNodes, tmp_path: Path) -> None:
    (tmp_path / "clock").mkdir()
    (tmp_path / "clock" / "sitecustomize.py").write_bytes((SCRIPTS / "jumping_clock.py").read_bytes())
    both = nodes("2")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    # c10d: gRPC's own core would go on by the true clock and be at odds with Python's.
    agents = [
        both.agent(
            name,
            "tells.py",
            flags=[*("--rdzv-backend", "c10d"), *("--rdzv-endpoint", f"127.0.0.1:{port}"), "--rdzv-conf", conf],
            path=tmp_path / "clock",
        )
        for name, conf in (("a", "is_host=1"), ("b", "is_host=0"))
    ]
    for agent in agents:
        agent.event("group_started")
    assert both.enough() == [0, 0]
    for agent in agents:
        assert len(agent.events("round_published")) == 1
        assert not agent.events("store_unavailable")
        monos = [event["mono"] for event in agent.events()]
        assert monos == sorted(monos)


def test_machine_without_a_temporary_directory(job: StartJob, tmp_path: Path) -> None:
    """As a container whose root is read-only, with no more than /dev/shm."""
    (tmp_path / "sitecustomize.py").write_text(
        "import tempfile\ndef gettempdir():\n    raise FileNotFoundError(2, 'no usable directory')\n"
        "tempfile.gettempdir = gettempdir\n"
    )
    env = {"PYTHONPATH": os.pathsep.join(map(str, (tmp_path, REPOSITORY, REPOSITORY / "agents")))}
    agent = job("tells.py", COLD, workers="1", env=env)
    agent.file("told-0")
    (agent.work / "enough").touch()
    assert agent.wait() == 0, agent.err
    refused(job("tells.py", COLD, flags=["--tee", "3"], workers="1", env=env), "worker logs have no place", "--log-dir")
