"""The random states of ranks that are renumbered across nodes, when their job becomes smaller and larger."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.faults.job import Fault, Job, until
from tests.faults.nodes import Nodes

pytestmark = pytest.mark.system


def digests(name: str, *runs: Job) -> dict[tuple[int, int, int], str]:
    """By round, rank and step."""
    paths = [run.work / name for run in runs if (run.work / name).exists()]
    lines = [line.split() for path in paths for line in path.read_text().splitlines()]
    return {(int(round), int(rank), int(step)): found for round, rank, step, found in lines}


def test_each_rank_has_the_stream_of_its_number(nodes: Callable[[str], Nodes], tmp_path: Path) -> None:
    """Rank 1 dies on the first node: the second node's first rank takes its number, and gives it back."""
    group, flags = nodes("2"), ["--checkpoint-dir", str(tmp_path / "checkpoints")]
    faults = [Fault(1, 13, "SIGKILL", 1)]
    runs = [group.agent(n, "drawing.py", workers="1:2", faults=faults, flags=flags, warm=True) for n in "ab"]
    entered = until(lambda: {at: s for at, s in digests("entered", *runs).items() if at[0] == 3}, runs[0].report, 180)
    until(lambda: max(digests("drawn", *runs))[2] > max(entered)[2] + 3, "steps of the third round", 180)
    for run in runs:
        run.process.send_signal(signal.SIGTERM)
    lost = [run for run in runs if (run.work / "fired").exists()]
    assert len(lost) == 1
    for run in runs:
        run.faults = run.faults if run in lost else ()
    assert [run.wait() for run in runs] == [128 + signal.SIGTERM] * 2
    drawn, entered = digests("drawn", *runs), digests("entered", *runs)
    for round, ranks, before in ((2, 3, 4), (3, 4, 3)):
        for rank in range(min(ranks, before)):
            ((_, _, step),) = [at for at in entered if at[:2] == (round, rank)]
            assert entered[round, rank, step] == drawn[round - 1, rank, step], (round, rank, step)
    resumed = [event["reason"] for run in runs for event in run.events("resumed")]
    assert not [reason for reason in resumed if "is lost" in reason], resumed
