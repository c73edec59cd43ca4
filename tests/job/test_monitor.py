"""Which workers have not begun the round that they were said to wait for."""

from __future__ import annotations

import pytest

from elasticd.heartbeat.record import Heartbeat
from elasticd_agent.hangs.observer import Observation
from elasticd_agent.job.monitor import find_late_ranks
from elasticd_agent.model.reports import RankReport


@pytest.mark.parametrize(
    ("started", "idle_s", "quiet_s", "absent"),
    [
        (False, 1.3, 1.0, True),
        (False, 0.9, 0.9, False),
        (False, 5.0, -1.0, False),  # unknown: the others make progress
        (False, 5.0, 0.4, False),  # it computes, reads, or waits for a processor
        (False, 10.0, 0.0, True),
        (True, 60.0, 60.0, False),  # it may hang, which is another matter
    ],
)
def test_worker_that_does_not_begin(started: bool, idle_s: float, quiet_s: float, absent: bool) -> None:
    heartbeats = (Heartbeat(), Heartbeat(started_ns=int(started)))
    ranks = tuple(RankReport(rank, rank, idle_s=idle_s, quiet_s=quiet_s) for rank in (4, 5))
    found = find_late_ranks(Observation(2, heartbeats, (), 0.0, ranks), kept=(1,))
    assert [rank.rank for rank in found] == [5] * absent, "a new process may take its time"
