"""Answers of NCCL's RAS: those of its documentation and its source, and broken ones."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from elasticd_agent.hangs.collector.ras import ProcessLaunchCount, parse_differences
from elasticd_agent.model.reports import LaunchCount
from elasticd_agent.workers.environment import ras_port

HERE = Path(__file__).parent / "ras"


def rank(number: int, pid: int, *, host: str = "127.0.0.1", finalized: bool = False, **counts: int) -> dict[str, Any]:
    """As the documentation of NCCL 2.29.1 has it."""
    status = {"init_state": 0, "async_error": 0, "finalize_called": finalized, "destroy_flag": False}
    every = dict.fromkeys(("Broadcast", "Reduce", "AllGather", "ReduceScatter", "AllReduce"), 0) | counts
    devices = {"cuda_dev": number, "nvml_dev": number}
    return {"rank": number, "host": host, "pid": pid, **devices, "status": status, "collective_counts": every}


def answer(*ranks: dict[str, Any], missing: int = 0) -> bytes:
    communicator = {
        "hash": "0xae94423cfbb2ef4a",
        "secondary_hash": "0xb7e7187447156001:0xb8242ed28a71381e",
        "size": len(ranks) + missing,
        "ranks_count": len(ranks),
        "missing_ranks_count": missing,
        "ranks": list(ranks),
        "missing_ranks": [{"rank": 9, "pid": 9, "status": {"unresponsive": True}}] * missing,
    }
    whole = {"nccl_version": "2.29.1", "communicators_count": 1, "communicators": [communicator]}
    return b"SERVER PROTOCOL 2\nOK\nOK\n" + json.dumps(whole, indent=2).encode() + b"\n"


def test_json_has_every_rank_where_counts_differ() -> None:
    name = "ae94423cfbb2ef4a:0xb7e7187447156001:0xb8242ed28a71381e"
    whole = answer(rank(0, 70, AllReduce=42, Broadcast=3), rank(1, 71, AllReduce=41, Broadcast=3), missing=1)
    found = parse_differences(whole)
    assert found == [
        ProcessLaunchCount("127.0.0.1", 70, LaunchCount(name, "AllReduce", 42, 42)),
        ProcessLaunchCount("127.0.0.1", 71, LaunchCount(name, "AllReduce", 41, 42)),
    ]
    assert parse_differences(whole[whole.index(b"{") :]) == found
    assert parse_differences(answer(rank(0, 70, AllReduce=42), rank(1, 71, AllReduce=42), missing=1)) == []


def test_a_communicator_that_is_torn_down_and_messages_between_two_ranks_say_nothing() -> None:
    assert parse_differences(answer(rank(0, 70, AllReduce=42), rank(1, 71, AllReduce=41, finalized=True))) == []
    assert parse_differences(answer(rank(0, 70, SendRecv=42), rank(1, 71, SendRecv=41))) == []
    assert [process.pid for process in parse_differences(answer(rank(0, 0, AllReduce=42), rank(1, 71)))] == [71], (
        "0 is no process"
    )


def test_text_names_the_minority() -> None:
    text = (HERE / "text-2.24.txt").read_bytes()
    found = parse_differences(text)
    assert parse_differences(text + b"\n{\n") == found
    assert [process.pid for process in found] == [483072, 483074, 483075, 483076, 483077, 483079]
    assert {(process.host, process.count) for process in found} == {
        ("172.16.64.210", LaunchCount("27a079b828ff1a75", "collective", 6649, 6650))
    }
    assert parse_differences((HERE / "text-2.27.txt").read_bytes()) == [
        ProcessLaunchCount("127.0.0.1", 42, LaunchCount("cf264af53edbe986", operation, launched, most))
        for operation, launched, most in (("Broadcast", 0, 7), ("AllReduce", 6649, 6650))
    ]


def test_broken_answers_say_nothing_wrong() -> None:
    whole = [answer(rank(0, 70, AllReduce=2), rank(1, 71)), *(path.read_bytes() for path in HERE.iterdir())]
    for one in whole:
        known = {(process.pid, process.count.operation) for process in parse_differences(one)}
        for end in range(0, len(one), 7):
            assert {(process.pid, process.count.operation) for process in parse_differences(one[:end])} <= known
    source = random.Random(1)
    for _ in range(300):
        changed = bytearray(whole[0])
        for _ in range(3):
            changed[source.randrange(len(changed))] = source.randrange(256)
        parse_differences(bytes(changed))
    assert (
        parse_differences(b"")
        == parse_differences(b"{\n" + b"[" * 100_000)
        == parse_differences(b'{\n"communicators": [1, {"ranks": [{}, 2]}]}')
        == []
    )


@pytest.mark.parametrize(
    ("env", "port"),
    [
        ({}, 28028),
        ({"NCCL_RAS_ENABLE": "0"}, 0),
        ({"NCCL_RAS_ADDR": "localhost:12345"}, 12345),
        ({"NCCL_RAS_ADDR": "127.0.0.2:12345"}, 0),
        ({"NCCL_RAS_ADDR": "[::1]:12345"}, 12345),
        ({"NCCL_RAS_ADDR": "10.0.0.7:28028"}, 0),
        ({"NCCL_RAS_ADDR": "localhost"}, 0),
        ({"NCCL_RAS_ADDR": "localhost:99999"}, 0),
    ],
    ids=str,
)
def test_only_the_loopback_is_asked(env: dict[str, str], port: int) -> None:
    assert ras_port(env) == port
