"""The c10d store when its processes are stopped and killed, and where it is wrongly pointed at."""

from __future__ import annotations

import os
import resource
import signal
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path

import psutil
import pytest
from torch.distributed import TCPStore

from elasticd.errors import StoreRefused, StoreUnavailable
from elasticd_agent.store.c10d.store import C10dStore
from elasticd_agent.system.installation import import_path, program
from tests.contract.reading import answers, found, refusal

Until = Callable[[Callable[[], object], float], object]
SOON_S = 60.0
"""More than any machine needs, however crowded: importing torch takes a second of a core."""
PATIENT_S = 20.0
HASTY_S = 0.5


class Agents:
    """A host, a client of it, and one with a short timeout. `messages`: what each logged."""

    def __init__(self) -> None:
        self.messages: dict[C10dStore, list[str]] = {}
        self.host = self._store(0, serve=True)
        self.client = self._store(self.host.port)
        self.hasty = self._store(self.host.port, timeout_s=HASTY_S)
        assert all(answers(store) for store in (self.host, self.client))  # the helpers start at the same time

    def _store(self, port: int, *, serve: bool = False, timeout_s: float = PATIENT_S) -> C10dStore:
        messages: list[str] = []
        store = C10dStore(
            "127.0.0.1", port, serve=serve, timeout_s=timeout_s, start_timeout_s=SOON_S, log=messages.append
        )
        self.messages[store] = messages
        return store

    def close(self) -> None:
        for store in self.messages:
            store.close()


def helper(store: C10dStore) -> psutil.Process:
    found = store.helper
    return psutil.Process(found.process.pid)


def process(store: C10dStore, name: str) -> psutil.Process:
    """The child of its helper that is called `name`: -h hosts, -c is the client."""
    (found,) = (child for child in helper(store).children() if child.name() == f"elasticd-c10d-{name}")
    return found


def gone(found: psutil.Process) -> bool:
    try:
        return not found.is_running() or found.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def free(port: int) -> bool:
    try:
        socket.create_server(("", port)).close()
    except OSError:
        return False
    return True


@contextmanager
def stopped(pid: int) -> Iterator[None]:
    os.kill(pid, signal.SIGSTOP)
    deadline = time.monotonic() + SOON_S
    while any(thread_state(path) != "T" for path in Path(f"/proc/{pid}/task").iterdir()):
        assert time.monotonic() < deadline
    try:
        yield
    finally:
        try:
            os.kill(pid, signal.SIGCONT)
        except ProcessLookupError:  # ended meanwhile
            pass


def thread_state(path: Path) -> str:
    return (path / "stat").read_text().rpartition(")")[2].split()[0]


def frozen_host(agents: Agents, until: Until) -> None:
    hasty, messages, heard = agents.hasty, agents.messages[agents.hasty], list[str]()
    lease = agents.client.announce("n/a", b"v", 60.0)
    assert lease is not None
    hasty.watch(heard.append, "n/")
    until(lambda: answers(hasty), SOON_S)
    before, lasted = len(messages), list[float]()
    with stopped(process(agents.host, "h").pid):
        for call in (lambda: hasty.read("n/a"), lambda: hasty.delete("n/a"), lambda: hasty.list("n/")):
            began = time.monotonic()
            with pytest.raises(StoreUnavailable, match=rf"127\.0\.0\.1:{hasty.port} does not answer \(no answer"):
                call()
            lasted.append(time.monotonic() - began)
        assert len(messages) == before + 1, "an outage is logged once"
    assert statistics.median(lasted) < HASTY_S + 1.0, "torch's own client would have waited for the host"
    until(lambda: answers(hasty), SOON_S)
    assert "answers again" in messages[before + 1]
    assert lease.renew()
    heard.clear()
    assert agents.host.compare_and_swap("n/b", None, b"")
    until(lambda: "n/b" in heard or "n/" in heard, SOON_S)


def close_with_a_frozen_host_or_helper(agents: Agents, until: Until) -> None:
    with stopped(process(agents.host, "h").pid):
        assert not answers(agents.hasty)
        began = time.monotonic()
        agents.hasty.close()
        assert time.monotonic() - began < 10
    with stopped(helper(agents.host).pid):
        began = time.monotonic()
        agents.host.close()
        assert time.monotonic() - began < 10
    for store in (agents.hasty, agents.host):
        with pytest.raises(StoreUnavailable):
            store.read("k")


def restarted_host(agents: Agents, until: Until) -> None:
    client, messages = agents.client, agents.messages[agents.client]
    lease = client.announce("n/e", b"v", 60.0)
    assert lease is not None
    assert client.compare_and_swap("round", None, b"1")
    before = client.read("round")
    assert before is not None
    heard: list[str] = []
    client.watch(heard.append, "round")
    already = len(messages)
    server = process(agents.host, "h")
    server.kill()
    until(lambda: gone(server), SOON_S)
    until(lambda: answers(client) and answers(agents.host), SOON_S)
    assert client.list("") == {}
    assert lease.renew() is False
    assert lease.renew() is False
    assert not client.compare_and_swap("round", before.version, b"2"), "of another time"
    assert client.compare_and_swap("round", None, b"1")
    after = client.read("round")
    assert after.version > before.version
    assert not client.compare_and_swap("round", before.version, b"2"), "the same value, of another time"
    until(lambda: heard, SOON_S)
    assert len(messages) == already + 2, "the outage and its end, once each"


def killed_helper_or_client(agents: Agents, until: Until) -> None:
    assert agents.host.compare_and_swap("k", None, b"1")
    lease = agents.client.announce("n/k", b"v", 60.0)
    assert lease is not None
    for victim in (process(agents.client, "c"), helper(agents.client)):
        with_it = [victim, *victim.children()]
        victim.kill()
        until(lambda ended=with_it: all(map(gone, ended)), SOON_S)
        until(lambda: answers(agents.client), SOON_S)
        assert found(agents.client, "k").value == b"1"
        assert lease.renew(), "the lease is the agent's, not its helper's"


def reconnect_without_file_descriptors(agents: Agents, until: Until) -> None:
    before, messages = resource.getrlimit(resource.RLIMIT_NOFILE), agents.messages[agents.client]
    victim, outages = process(agents.client, "c").pid, len(messages)
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, before[1]))
    try:
        os.kill(victim, signal.SIGKILL)
        until(lambda: len(messages) > outages and "Too many open files" in refusal(agents.client), SOON_S)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
    until(lambda: answers(agents.client), SOON_S)


def killed_agent(agents: Agents, until: Until) -> None:
    """An agent killed without a word: its lease ends, its helper goes, and, was it the host, its port is free."""
    code = (
        "import sys, time\n"
        "from elasticd_agent.store.c10d.store import C10dStore\n"
        "times = {'timeout_s': 20.0, 'start_timeout_s': 60.0}\n"
        "mine = C10dStore('127.0.0.1', 0, serve=True, **times)\n"
        "theirs = C10dStore('127.0.0.1', int(sys.argv[1]), serve=False, **times)\n"
        "lease = theirs.announce('n/killed', b'', 2.0)\n"
        "assert mine.read('k') is None\n"
        "print(mine.port, flush=True)\n"
        "while lease.renew():\n"
        "    time.sleep(0.5)\n"
    )
    paths = os.pathsep.join(str(Path(__file__).parents[2] / part) for part in (".", "agents"))
    command = [sys.executable, "-c", code, str(agents.host.port)]
    with subprocess.Popen(command, env={**os.environ, "PYTHONPATH": paths}, stdout=subprocess.PIPE) as agent:
        port = int(agent.stdout.readline())
        theirs = psutil.Process(agent.pid).children(recursive=True)
        agent.kill()
    assert len(theirs) == 5, "two helpers, two clients, one host"
    until(lambda: agents.host.read("n/killed") is None, SOON_S)
    until(lambda: all(map(gone, theirs)), SOON_S)
    until(lambda: free(port), SOON_S)


@pytest.mark.system
def test_faults_in_sequence(until: Until) -> None:
    """In one test, since each helper's start imports torch. None may be felt by the next."""
    with closing(Agents()) as agents:
        for trouble in (
            frozen_host,
            killed_helper_or_client,
            reconnect_without_file_descriptors,
            restarted_host,
            killed_agent,
            close_with_a_frozen_host_or_helper,
        ):
            until(lambda: answers(agents.client) and answers(agents.host), SOON_S)
            trouble(agents, until)


# --- where it is wrongly pointed at ---------------------------------------------------------------------------------


def failure(**given: object) -> Exception:
    with ExitStack() as cleanup:
        store = C10dStore(**{"host": "127.0.0.1", "serve": False, "start_timeout_s": SOON_S, **given})  # type: ignore[arg-type]
        cleanup.callback(store.close)
        with pytest.raises((StoreUnavailable, StoreRefused)) as caught:
            store.read("k")
    return caught.value


def test_port_in_use() -> None:
    with socket.create_server(("", 0)) as other:
        port = other.getsockname()[1]
        refused = failure(port=port, serve=True)
    assert isinstance(refused, StoreRefused)
    assert f"port {port}: Address already in use" in str(refused)
    assert "--rdzv-endpoint" in str(refused)


def test_python_without_torch_and_no_python(tmp_path: Path) -> None:
    bare = tmp_path / "python"
    bare.write_text(f'#!/bin/sh\nexec {sys.executable} -S "$@"\n')
    bare.chmod(0o700)
    refused = failure(port=1, python=str(bare))
    assert isinstance(refused, StoreRefused)
    assert f"{bare} has no torch" in str(refused)
    refused = failure(port=1, python=str(tmp_path / "none"))
    assert isinstance(refused, StoreRefused)
    assert "No such file" in str(refused)


def test_host_that_starts_later(until: Until) -> None:
    """Its port is still another's for a moment, as when the agent of before is still ending."""
    with ExitStack() as cleanup:
        other = socket.create_server(("", 0))
        cleanup.callback(other.close)
        port = other.getsockname()[1]
        host = C10dStore("127.0.0.1", port, serve=True, timeout_s=PATIENT_S, start_timeout_s=SOON_S)
        cleanup.callback(host.close)
        other.close()
        early = C10dStore("127.0.0.1", port, serve=False, timeout_s=PATIENT_S, start_timeout_s=SOON_S)
        cleanup.callback(early.close)
        assert early.read("k") is None


def test_host_that_never_starts(until: Until) -> None:
    with ExitStack() as cleanup:
        reserved = cleanup.enter_context(socket.socket())
        reserved.bind(("127.0.0.1", 0))  # nobody listens there
        port = reserved.getsockname()[1]
        messages: list[str] = []
        store = C10dStore("127.0.0.1", port, serve=False, start_timeout_s=1.5, log=messages.append)
        cleanup.callback(store.close)
        began = time.monotonic()
        with pytest.raises(StoreUnavailable, match=rf"127\.0\.0\.1:{port} does not answer.*host's agent runs"):
            store.read("k")
        assert 1.4 < time.monotonic() - began < SOON_S
        until(lambda: "Connection refused" in unavailable(store), SOON_S)
        assert len(messages) == 1


def unavailable(store: C10dStore) -> str:
    with pytest.raises(StoreUnavailable) as caught:
        store.read("k")
    return str(caught.value)


def test_another_server_at_the_port() -> None:
    def babble(server: socket.socket) -> None:
        while True:
            try:
                peer, _ = server.accept()
            except OSError:
                return
            with peer:
                try:
                    peer.recv(100)
                    peer.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")
                except OSError:
                    pass

    with socket.create_server(("127.0.0.1", 0)) as server:
        talking = threading.Thread(target=babble, args=(server,))
        talking.start()
        try:
            found = failure(port=server.getsockname()[1], start_timeout_s=1.5)
        finally:
            server.shutdown(socket.SHUT_RDWR)
            talking.join(SOON_S)
    assert isinstance(found, StoreUnavailable)


@pytest.fixture(scope="module")
def theirs() -> TCPStore:
    """Made before a test looks at its descriptors: torch keeps some of a server's for good."""
    return TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


def test_foreign_tcp_store_is_refused(theirs: TCPStore) -> None:
    """torchrun's own rendezvous, say."""
    refused = failure(port=theirs.port)
    assert isinstance(refused, StoreRefused)
    assert f"127.0.0.1:{theirs.port}: a TCPStore answers there, but it is not served by elasticd" in str(refused)


def test_helper_abandoned_during_the_import_is_silent() -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    command = [
        sys.executable,
        "-u",
        program("c10d_fork_server"),
        str(theirs.fileno()),
        str(os.getpid()),
        *import_path(),
    ]
    with subprocess.Popen(command, pass_fds=[theirs.fileno()], stderr=subprocess.PIPE) as helper:
        theirs.close()
        ours.close()
        assert helper.communicate(timeout=60) == (None, b"")
    assert helper.returncode == 0
