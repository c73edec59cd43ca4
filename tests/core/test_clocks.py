"""Nothing that decides looks at the wall clock: it jumps, and two machines never agree about it."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import elasticd_agent

HERE = Path(elasticd_agent.__file__).parent
DECIDE = [
    "agreement", "budget", "core", "coordinator", "hang", "judging", "knock", "learning", "lines", "loop", "meeting",
    "membership", "plan", "planner", "presence", "reach", "rendezvous", "run", "view", "watch", "workers",
    "launcher/owner", "store/c10d", "store/c10d_client", "store/c10d_link", "store/etcd", "store/memory",
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
