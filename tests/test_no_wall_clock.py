"""Nothing that decides looks at the wall clock: it jumps, and two machines never agree about it."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import elasticd_agent

HERE = Path(elasticd_agent.__file__).parent
DECIDE = [
    "config/rendezvous_options", "hangs/deadlines", "hangs/judge", "hangs/observer", "hangs/verdict",
    "job/loop", "job/run", "job/state_machine", "rendezvous/member", "rendezvous/membership",
    "rendezvous/membership_client", "rendezvous/peers", "rendezvous/plan", "rendezvous/planner", "rendezvous/probe",
    "rendezvous/restart_budget", "rendezvous/spec_check", "rendezvous/succession", "rendezvous/takeover",
    "rendezvous/view", "store/c10d/client_process", "store/c10d/connection",
    "store/c10d/store", "store/etcd/store", "store/memory", "workers/launcher/owner", "workers/manager",
]  # fmt: skip
WALL = {"time", "time_ns", "localtime", "gmtime", "strftime", "now", "utcnow", "today", "CLOCK_REALTIME"}


@pytest.mark.parametrize("module", DECIDE)
def test_it_never_asks_what_time_it_is(module: str) -> None:
    tree = ast.parse((HERE / f"{module}.py").read_text())
    clocks = {"time", "datetime", "date"}
    asked = [
        f"line {node.lineno}: {node.value.id}.{node.attr}"
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute)
        and isinstance(node.value, ast.Name)
        and node.value.id in clocks
        and node.attr in WALL
    ]
    assert asked == []
