"""What only looking again and again can tell of a worker: ages, which only the agent's attentive time makes grow."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from elasticd import beat
from elasticd.beat import BeatWriter
from elasticd_agent.procfs import Usage
from elasticd_agent.watch import ATTENTIVE_S, Watch


@pytest.fixture
def worker(tmp_path: Path) -> tuple[Watch, BeatWriter]:
    beat.create(tmp_path / "beat")
    return Watch(1, [(0, 0)], [tmp_path / "beat"], [tmp_path / "notes"]), BeatWriter(tmp_path / "beat")


@pytest.fixture
def writer(worker: tuple[Watch, BeatWriter]) -> BeatWriter:
    return worker[1]


@pytest.fixture
def watch(worker: tuple[Watch, BeatWriter]) -> Iterator[Watch]:
    yield worker[0]
    worker[0].close()


def test_a_pulse_is_as_old_as_it_has_been_seen_to_stand_still(watch: Watch, writer: BeatWriter) -> None:
    def alive_s(now: float) -> float:
        return watch.look(now).ranks[0].alive_s

    assert alive_s(100.0) == alive_s(100.5) == -1, "there has been none"
    writer.pulse(3, 0)
    assert alive_s(101.0) == 0
    assert alive_s(101.5) == 0.5
    assert alive_s(500.0) == 0.5 + ATTENTIVE_S, "nobody looked in between"
    writer.pulse(3, 0)
    assert alive_s(500.5) == 0
    writer.still()
    assert alive_s(501.0) == alive_s(502.0) == -1, "the thread has ended: nobody holds the GIL against it"


def test_what_is_written_as_evidence_is_no_work_of_the_workers(watch: Watch, writer: BeatWriter) -> None:
    """A flight recorder is written in the middle of two samples; the answer comes when it is all there."""
    written = [0, 100, 500_000, 900_000, 900_100, 905_000, 906_000]
    answered = [0, 0, 0, 1, 1, 1, 1]
    watch.usage = lambda pids: dict.fromkeys(pids, Usage(0.0, written[0]))
    watch.started([42], 0)
    watch.state = lambda pid: "S"
    watch.look(100.0)
    found = []
    for number, answer in enumerate(answered):
        watch.usage = lambda pids, number=number: dict.fromkeys(pids, Usage(0.0, written[number]))
        writer.dumped = answer
        found.append(watch.look(101.0 + number / 2).ranks[0].io_bytes)
    assert found == [0, 100, 500_000, 100, 200, 5100, 6100]
