"""A quick part of `python -m tests.killed_saves`: kills at every system call of some lives, and damaged files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.killed_saves import durability, tracer
from tests.killed_saves.situations import SITUATIONS
from tests.killed_saves.tracer import Call, Trace

PROGRAM = Path(__file__).parents[1] / "killed_saves" / "__main__.py"
PART = ["the first save of all", "the same step again", "a restore of an older step", "damage: one file"]


@pytest.mark.skipif(not tracer.supported, reason="the tracer knows the system calls of x86_64")
def test_kill_at_any_call_and_damage_of_any_file_cost_nothing_committed(start: Any) -> None:
    job = start(str(PROGRAM), "--kills", "1", "--damage", "0.004", *PART, world_size=1)
    assert job.codes(timeout=100) == [0], (job.ranks[0].folder / "out").read_text() + job.ranks[0].errors()
    rows = [json.loads(line) for line in (job.ranks[0].folder / "out").read_text().splitlines()]
    assert [row["wrong"] for row in rows] == [[]] * len(PART)
    assert all(row["killed"] and row["points"] > 150 and row["directories"] >= 9 for row in rows[:-1])
    assert rows[-1]["damages"] > 20


@pytest.mark.system
@pytest.mark.timeout(900)
@pytest.mark.skipif(not tracer.supported, reason="the tracer knows the system calls of x86_64")
def test_kill_at_any_call_of_every_other_life_costs_nothing_committed(start: Any) -> None:
    names = [each.name for each in SITUATIONS if each.name not in PART]
    job = start(str(PROGRAM), "--kills", "1", "--damage", "0.002", *names, "damage: sharded", world_size=1)
    assert job.codes(timeout=800) == [0], (job.ranks[0].folder / "out").read_text() + job.ranks[0].errors()
    rows = [json.loads(line) for line in (job.ranks[0].folder / "out").read_text().splitlines()]
    assert [row["wrong"] for row in rows] == [[]] * (len(names) + 1)
    assert all(row["killed"] and row["points"] > 150 and row["directories"] >= 7 for row in rows[:-1])
    assert rows[-1]["damages"] > 20


@pytest.mark.system
@pytest.mark.timeout(600)
@pytest.mark.skipif(not tracer.supported, reason="the tracer knows the system calls of x86_64")
def test_kill_of_the_launchers_writer_at_any_call_costs_no_state(start: Any) -> None:
    names = [f"writer: {handover}" for handover in ("a worker's state that prunes", "sharded: the workers' states")]
    job = start(str(PROGRAM), "--kills", "30", *names, world_size=1)
    assert job.codes(timeout=500) == [0], (job.ranks[0].folder / "out").read_text() + job.ranks[0].errors()
    rows = [json.loads(line) for line in (job.ranks[0].folder / "out").read_text().splitlines()]
    assert [row["wrong"] for row in rows] == [[]] * len(names)
    assert all(row["killed"] >= 30 and row["points"] > 300 and row["directories"] >= 5 for row in rows)


def test_commit_of_a_file_that_is_not_durable_is_a_breach() -> None:
    """The check of the order of calls would find a missing fsync."""

    def made(*calls: tuple[int, tuple[str, ...]]) -> Trace:
        return Trace([Call(0, number, paths, is_new=True, flags=0o100, result=0) for number, paths in calls])

    opened, written, synced = (257, ("/d/.s/state.pt",)), (1, ("/d/.s/state.pt",)), (74, ("/d/.s/state.pt",))
    folder, commit, parent = (74, ("/d/.s",)), (82, ("/d/.s", "/d/r1-s1")), (74, ("/d",))
    assert durability.breaches(made(opened, written, synced, folder, commit, parent), "/d") == []
    for missing in (synced, folder, parent):
        calls = [each for each in (opened, written, synced, folder, commit, parent) if each != missing]
        assert durability.breaches(made(*calls), "/d"), missing
