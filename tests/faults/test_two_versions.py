"""Agents of two versions in one job: a minor apart they train together, a major apart one of them is refused."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

from elasticd_agent.model.codec import VERSION
from elasticd_agent.model.keys import Keys
from elasticd_agent.store.etcd.store import EtcdStore
from tests.etcd import EtcdServers
from tests.faults.job import until
from tests.faults.nodes import Nodes
from tests.faults.other_version import FIELD, neighbour

StartNodes = Callable[[str], Nodes]
MAJOR, MINOR = map(int, VERSION.split("."))
NEWER, ANOTHER = f"{MAJOR}.{MINOR + 1}", f"{MAJOR + 1}.0"


def stored(etcd: EtcdServers, key: str) -> dict[str, Any]:
    """The record under that key, {} where there is none."""
    store = EtcdStore(etcd.endpoints)
    try:
        found = store.read(key)
        record: dict[str, Any] = json.loads(found.value) if found is not None else {}
        return record
    finally:
        store.close()


def test_agents_one_minor_version_apart(nodes: StartNodes, etcd: EtcdServers, tmp_path: Path) -> None:
    """One minor version apart each plans what the other one runs."""
    both = nodes("1:2")
    keys = Keys(both.job)
    newer = {"PYTHONPATH": neighbour(tmp_path / "newer", NEWER)}
    together = ["--rdzv-conf", "last_call_timeout=60"]
    b = both.agent("b", "tells.py", env=newer, flags=together)
    until(lambda: stored(etcd, keys.planner).get("id") == "b", "b plans")
    a = both.agent("a", "tells.py", flags=together)
    b.file("told-0")
    a.file("told-1")
    # the newer one plans, and knows more of the older one than that says itself
    first = stored(etcd, keys.round)
    assert (first["version"], first[FIELD], [m[FIELD] for m in first["members"]]) == (NEWER, "good", ["good"] * 2)
    assert FIELD not in stored(etcd, keys.node("a"))
    b.process.send_signal(signal.SIGKILL)
    b.process.wait()
    b.assert_gone()
    # the older one plans, and keeps what it does not understand
    a.file("told-0")
    last = stored(etcd, keys.round)
    assert [m["node"] for m in last["members"]] == ["a"]
    assert last["number"] > first["number"]
    assert (last["version"], last[FIELD]) == (NEWER, "good")
    (a.work / "enough").touch()
    assert a.wait() == 0
    assert "understood" not in a.err + b.err


def test_another_major_version(nodes: StartNodes, etcd: EtcdServers, tmp_path: Path) -> None:
    """Another major version is refused in one line and overwrites nothing."""
    both = nodes("1:2")
    keys = Keys(both.job)
    a = both.agent("a", "tells.py")
    a.file("told-0")
    before = [stored(etcd, key) for key in (keys.round, keys.spec, keys.planner)]
    c = both.agent("c", "tells.py", env={"PYTHONPATH": neighbour(tmp_path / "other", ANOTHER)})
    assert c.wait() == 2
    said = [line for line in c.err.splitlines() if "error:" in line]
    assert len(said) == 1, c.err
    assert f"version {VERSION} cannot be read by this elasticd, which speaks {ANOTHER}; run the same" in said[0]
    assert [stored(etcd, key) for key in (keys.round, keys.spec, keys.planner)] == before
    until(lambda: not stored(etcd, keys.node("c")), "nothing of c in the store")
    (a.work / "enough").touch()
    assert a.wait() == 0
    assert len(a.events("round_published")) == 1
