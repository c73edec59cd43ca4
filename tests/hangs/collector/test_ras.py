"""The collector asks a RAS in Python: an answer that does not change counts, in bounded time."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Protocol

import pytest

from elasticd_agent.hangs.collector import ras_client
from elasticd_agent.hangs.evidence import EvidenceTarget
from elasticd_agent.model.reports import LaunchCount
from tests.hangs.stuck_worker import MakeEvidence, Posted, StartWorker
from tests.hangs.test_ras import HERE, answer, rank

Answers = Callable[[int], bytes | None]
ME = os.getpid()


class StartRas(Protocol):
    def __call__(self, answers: Sequence[bytes | None]) -> int: ...


@pytest.fixture
def ras() -> Iterator[StartRas]:
    """Serves these answers, the last one again and again; None is a process that is stopped. Returns the port."""
    ends: list[Callable[[], None]] = []

    def start(answers: Sequence[bytes | None]) -> int:
        listener = socket.create_server(("127.0.0.1", 0))
        kept: list[socket.socket] = []
        ended = threading.Event()

        def serve() -> None:
            for at in range(1000):
                connection, _ = listener.accept()
                kept.append(connection)
                if ended.is_set():
                    return
                said = answers[min(at, len(answers) - 1)]
                if said is not None:
                    request = b""
                    while not request.endswith(b"VERBOSE STATUS\n"):
                        data = connection.recv(1024)
                        assert data, "the request ends early"
                        request += data
                    assert request.startswith(b"CLIENT PROTOCOL 2\n")
                    connection.sendall(said)
                    connection.close()

        thread = threading.Thread(target=serve)
        thread.start()

        def end() -> None:
            ended.set()
            socket.create_connection(listener.getsockname()).close()
            thread.join(20)
            listener.close()
            for one in kept:
                one.close()

        ends.append(end)
        port: int = listener.getsockname()[1]
        return port

    yield start
    for end in ends:
        end()


def differ(pid: int, launched: int, host: str = "127.0.0.1") -> bytes:
    return answer(rank(0, 1, AllReduce=42), rank(1, pid, host=host, AllReduce=launched))


def asked(port: int, within_s: float = 30.0) -> list[tuple[int, int]]:
    """(launched, most) of this process."""
    found = ras_client.unchanged_counts(port, {ME}, time.monotonic() + within_s)
    return [(count.launched, count.most) for count in found.get(ME, ())]


def test_two_answers_must_agree(ras: StartRas) -> None:
    assert asked(ras([differ(ME, 41)])) == [(41, 42)]
    assert asked(ras([differ(ME, 40), differ(ME, 41)])) == [], "it launches"


def test_another_process_is_asked_where_one_is_stopped(ras: StartRas) -> None:
    assert asked(ras([None, differ(ME, 41)]), 10.0) == [(41, 42)]


def test_numbers_of_other_jobs_and_hosts_do_not_count(ras: StartRas) -> None:
    assert asked(ras([differ(1, 41)])) == []
    assert asked(ras([differ(ME, 41, host="192.0.2.1")])) == []


def test_a_ras_that_does_not_answer_costs_its_time_only(ras: StartRas) -> None:
    began = time.monotonic()
    assert asked(ras([None]), 1.0) == []
    assert time.monotonic() - began < 20
    assert asked(1) == [], "nobody listens"


def test_evidence_has_the_counts_of_a_stuck_worker(
    takes: MakeEvidence, worker: StartWorker, posted: Posted, ras: StartRas, tmp_path: Path
) -> None:
    pid = worker("import time; print('ready', flush=True); time.sleep(1e6)")
    text = (HERE / "text-2.27.txt").read_text().replace("process 42 ", f"process {pid} ")
    evidence = takes(100.0, spy="", nvml=None, ras=ras([text.encode()]))
    assert evidence.start_gathering(1, [EvidenceTarget(0, pid)], tmp_path / "log", "")
    (found,) = posted.get(timeout=60).ranks
    assert found.launches == (
        LaunchCount("cf264af53edbe986", "Broadcast", 0, 7),
        LaunchCount("cf264af53edbe986", "AllReduce", 6649, 6650),
    )
