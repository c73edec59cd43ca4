"""Months in compressed form: 10^5 turns, 10^3 placements, nodes that join and leave; memory and store do not grow.

The short form is part of every test run. Whenever all jobs have ended and been cleaned away, the blocks of memory that
Python has allocated, the store's keys, files, fds and threads must be what they were the first time.
"""

from __future__ import annotations

import gc
import os
import sys
import tempfile
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from elasticd_agent.store.file import FileStore
from elasticd_agent.store.memory import MemoryStore
from elasticd_daemon import keys as names
from elasticd_daemon.scheduler import job_queue as queue
from tests.daemon.conftest import MakeNode
from tests.daemon.fleet import ADOPT_S, STEP_S, Fleet
from tests.daemon.node import COLD
from tests.daemon.stores import Clock

NODES = 4
KEEP_S = 120.0
SLACK_BLOCKS = 500
"""What is remembered of nothing. One job's records and what four daemons know of it are some 400."""

MAX_FILE_BYTES = 8 << 20
"""SQLite's log is 4 MB, and its file keeps the pages of what was deleted."""


HEAP_BYTES = 64 << 20
"""glibc reserves so many for each heap but the first, at a multiple of it."""


@dataclass(frozen=True, slots=True)
class Footprint:
    keys: frozenset[str]
    files: frozenset[str]
    fds: int
    threads: int
    blocks: int


@pytest.fixture(params=["memory", "kept"])
def store(request: pytest.FixtureRequest) -> Iterator[tuple[MemoryStore, Clock, Path]]:
    clock = Clock()
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix=f"elasticd-months-{os.getpid()}-") as folder:
        path = Path(folder) / "kept"
        made = FileStore(path, clock) if request.param == "kept" else MemoryStore(clock)
        yield made, clock, path
        made.close()


def quiet(fleet: Fleet, path: Path) -> Footprint:
    """End everything, let it be cleaned away, and look at what is there."""
    fleet.heal()
    for wants in fleet.view().unfinished():
        queue.cancel(fleet.memory, wants.job, "", 0.0)
    for _ in range(int((ADOPT_S + KEEP_S + 60.0) / STEP_S)):
        fleet.step()
    assert not [runner for machine in fleet.machines for runner in machine.runners]
    fleet.empty_store()
    gc.collect()
    files = frozenset(p.name for p in path.parent.iterdir())
    assert sum(p.stat().st_size for p in path.parent.iterdir()) < MAX_FILE_BYTES
    return Footprint(
        frozenset(fleet.memory.list("")),
        files,
        len(os.listdir("/proc/self/fd")),
        threading.active_count(),
        sys.getallocatedblocks(),
    )


def live_through(store: tuple[MemoryStore, Clock, Path], turns: int, chapters: int) -> None:
    memory, clock, path = store
    fleet = Fleet(7, NODES, memory, clock, retention_s=KEEP_S, steady=1)
    placed = submitted = begun = 0
    before: list[Footprint] = []
    for chapter in range(chapters):
        while begun < turns * (chapter + 1) / chapters:
            fleet.random_fault()
            for _ in range(fleet.chance.choice((1, 2, 4, 20))):
                fleet.step()
                begun += NODES
        placed += sum(" runs on " in sentence for sentence in fleet.sentences)
        submitted += len(fleet.submitted)
        before.append(quiet(fleet, path))
    assert placed >= turns / 120, placed
    assert submitted >= turns / 1000, submitted
    steady = {
        names.SUBMISSION_SEQUENCE,
        names.SCHEDULER_CLOCK,
        names.SCHEDULER,
        *(names.NODES + m.node for m in fleet.machines),
    }
    first, *others = before
    for later in others:
        assert later.keys <= steady, "keys"
        assert (later.files, later.fds, later.threads) == (first.files, first.fds, first.threads)
    blocks = [footprint.blocks for footprint in before]  # up and down with what the last leader remembers
    assert min(blocks[chapters // 2 :]) < min(blocks[: chapters // 2]) + SLACK_BLOCKS, blocks


def test_one_week(store: tuple[MemoryStore, Clock, Path]) -> None:
    live_through(store, 4_000, 2)


@pytest.mark.system
@pytest.mark.timeout(600)
def test_three_months(store: tuple[MemoryStore, Clock, Path]) -> None:
    live_through(store, 110_000, 6)


def heaps_of_threads(pid: int) -> int:
    ranges = [line.split()[0].split("-") for line in Path(f"/proc/{pid}/maps").read_text().splitlines()]
    starts, ends = [int(start, 16) for start, _ in ranges], {int(end, 16) for _, end in ranges}
    return sum(start % HEAP_BYTES == 0 and start + HEAP_BYTES in ends for start in starts)


def test_threads_of_agents_and_runners_share_one_heap(nodes: MakeNode) -> None:
    one = nodes("n1")
    one.job("llm", "plain.py", COLD, "sleep", workers=1)
    one.start()
    one.workers("llm")
    for pid in (one.pid, one.runner("llm")):
        assert len(os.listdir(f"/proc/{pid}/task")) > 5
        assert heaps_of_threads(pid) == 0
