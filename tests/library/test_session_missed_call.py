"""A session call that not all ranks make is named in seconds, at a waiting rank; a late rank is never accused."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import pytest

from elasticd.coordination.missed_call import MissedCallDetector
from elasticd.coordination.rank_status import RankStatus, StatusPublisher, StatusReader
from elasticd.errors import DecisionTimeout, MissedCall

PATIENCE_S = 90.0
"""For a busy machine: on a quiet one it takes 3 to 4 s, and without the proof 600 s."""
MISUSES = {
    "save on rank 0": {0: "rank 1 has not called save() at step 10; all ranks must. Rank 1 has waited in"},
    "save on rank 1": {1: "rank 0 has not called save() at step 10; all ranks must. Rank 0 has waited in"},
    "barrier on rank 0": {0: "rank 1 has not called barrier('x') at step 10; all ranks must. Rank 1 has waited in"},
    "checkpoint on rank 0": {0: "rank 1 has not called checkpoint(every 11 steps) at step 11; all ranks must. Rank 1"},
    # Each waits for the other, and one that has the error has left before the other sees that it waits.
    "save, and barrier": {
        0: "rank 1 has not called save() at step 10; all ranks must. Rank 1 waits in barrier('y')",
        1: "rank 0 has not called barrier('y') at step 10; all ranks must. Rank 0 waits in save()",
    },
    "rank 1 has ended": {0: "rank 1 has not called save() at step 10; all ranks must. Rank 1 has closed its session"},
    "rank 1 steps on": {0: "rank 1 has not called save() at step 10; all ranks must. Rank 1 is at step"},
    "step on rank 1": {1: "rank 0 has not called step() at step 0; all ranks must. Rank 0 has waited in DDP's"},
}
"""The error of the waiting rank: of any of them."""
HEALTHY = {
    "late: sleeps": 2,
    "late: computes": 2,
    "late: its peer": 3,
    "late: its group": 3,
    "late: after a collective": 2,
    "late: in a barrier": 2,
}


def test_missed_call_is_named_at_the_waiting_rank(start: Any, tmp_path: Path, wait_for: Any) -> None:
    jobs = {case: start("missed_call.py", {"case": case, "directory": str(tmp_path / case)}) for case in MISUSES}
    deadline = time.monotonic() + PATIENCE_S
    for case, messages in MISUSES.items():
        waiting = {rank: jobs[case].ranks[rank] for rank in messages}

        def ended(waiting: dict[int, Any] = waiting) -> list[tuple[int, dict[str, Any]]]:
            ends = [(rank, at.result()) for rank, at in waiting.items() if (at.folder / "code").exists()]
            # A rank whose peer has left with the error has a broken connection.
            return [end for end in ends if end[1]["error"] != "peer" or len(ends) == len(waiting)]

        rank, seen = wait_for(ended, f"the end of rank {' or '.join(map(str, waiting))}: {case}", deadline)[0]
        assert seen["error"] == "MissedCall", (case, seen)
        assert seen["message"].startswith(messages[rank]), (case, seen)
        assert "outside of conditions that differ" in seen["message"]


@pytest.mark.system
def test_late_rank_is_not_accused(start: Any, tmp_path: Path) -> None:
    jobs = {
        case: start("missed_call.py", {"case": case, "directory": str(tmp_path / case)}, world_size=ranks)
        for case, ranks in HEALTHY.items()
    }
    for case, job in jobs.items():
        assert job.codes(PATIENCE_S) == [0] * len(job.ranks), case
        results = job.results()
        assert [seen["error"] for seen in results] == [None] * len(job.ranks), (case, results)
        assert max(seen["seconds"] for seen in results) > 5, "nobody was late"


def test_wait_for_missing_rank_is_in_the_heartbeat(start: Any, tmp_path: Path, wait_for: Any) -> None:
    """The call, the first rank and their number, from the first second of the wait to its end. Nothing is printed."""
    job = start("missed_call.py", {"case": "late: sleeps", "directory": str(tmp_path / "shared")})
    beat = wait_for(lambda: (seen := job.ranks[0].read_heartbeat()).wait_call and seen, "a wait in the heartbeat")
    assert (beat.wait_call, beat.wait_rank, beat.wait_count, beat.step) == ("save()", 1, 1, 10)
    job.results()
    assert job.ranks[0].read_heartbeat().wait_call == ""
    assert "waitForInput" not in job.ranks[0].errors()


def test_rank_that_ends_before_it_has_a_connection_says_so() -> None:
    """torch connects for 5 to 10 s where DNS does not answer: it asks for the name of the store's address."""
    from torch.distributed import HashStore

    store, answered, calls = HashStore(), threading.Event(), []
    publisher = StatusPublisher(lambda: answered.wait(30) and store, "p/", 1, 2, lambda: RankStatus(10, "step"))
    publisher.start(store)
    publisher.submit(calls.append)
    publisher.close()
    statuses = StatusReader("p/")
    statuses.read(store, [1])
    answered.set()
    assert statuses.last_with_number(1) == (2, RankStatus(10, "exit"))
    assert calls == [store]


def test_rank_that_leaves_its_round_uses_the_store_no_more() -> None:
    from torch.distributed import HashStore

    store, calls = HashStore(), []
    publisher = StatusPublisher(lambda: store, "p/", 1, 2, lambda: RankStatus(10, "step"))
    publisher.start(store)
    publisher.publish_no_more()
    publisher.submit(calls.append, now=True)
    publisher.close()
    statuses = StatusReader("p/")
    statuses.read(store, [1])
    assert statuses.last_with_number(1) == (1, RankStatus(10, "step"))
    assert not calls


MINE = RankStatus(40, "step", issued=100, issued_in_step=2)
BLOCKED: dict[str, Any] = {"collective": "all_reduce", "duration_s": 2.0}
WAITS: dict[str, Any] = {"wait": 3, "call": "barrier('y')", "key": "barrier/1/outcome"}


class Published:
    """The statuses of rank 1 that one reader finds, one at each look, and the keys there are."""

    def __init__(self, statuses: list[RankStatus], keys: tuple[str, ...] = ()) -> None:
        self.statuses = statuses
        self.keys = keys

    def check(self, keys: list[str]) -> bool:
        return keys[0] in self.keys

    def last_with_number(self, rank: int) -> tuple[int, RankStatus | None]:
        assert rank == 1
        return len(self.statuses), self.statuses.pop(0) if self.statuses else None


@pytest.mark.parametrize(
    ("statuses", "proof"),
    [
        ([], ""),
        ([RankStatus(40, "eval", duration_s=300)] * 3, ""),
        ([RankStatus(40, "exit")], "closed its session"),
        ([RankStatus(40, "exit", failed=True)], "ended by an exception before save() at step 40"),
        ([RankStatus(40, "step", issued_in_step=3, **BLOCKED)], "waited in all_reduce for 2 s"),
        # As many collectives as this rank: it is late in one that this rank has left already.
        ([RankStatus(40, "step", issued_in_step=2, **BLOCKED)] * 3, ""),
        ([RankStatus(40, "step", issued_in_step=3, collective="all_reduce", duration_s=1)] * 3, ""),
        ([RankStatus(39, "step", issued_in_step=3, **BLOCKED)] * 3, ""),
        ([RankStatus(40, "step", issued_in_step=3, duration_s=9)] * 3, ""),
        ([RankStatus(45, "step")] * 3, ""),  # ranks that count differently
        ([RankStatus(45, "step"), RankStatus(46, "step")], "is at step 46"),
        ([RankStatus(41, "step", issued=101)], "is at step 41"),  # with NCCL no rank waits on its host
        ([RankStatus(38, "step"), RankStatus(39, "step")], ""),
        ([RankStatus(40, "barrier", **WAITS)] * 2, "waits in barrier('y') at step 40 for this rank"),
        ([RankStatus(40, "barrier", **WAITS)], ""),
        ([RankStatus(40, "barrier", **WAITS), RankStatus(40, "barrier", **{**WAITS, "wait": 4})], ""),
        ([RankStatus(40, "step", **WAITS, ranks=(2,))] * 3, ""),  # for another rank
        ([RankStatus(40, "step", **{**WAITS, "key": "random/1/*"}, ranks=(0, 2))] * 3, ""),  # this rank has written it
        ([RankStatus(40, "step", **{**WAITS, "key": "random/2/*"}, ranks=(0, 2))] * 2, "for this rank"),
    ],
)
def test_only_proof_accuses_a_rank(statuses: list[RankStatus], proof: str) -> None:
    published: Any = Published(list(statuses), keys=("p/random/1/0",))
    missed = MissedCallDetector("save()", 0, "p/", lambda: MINE)
    found = [missed.find(published, [1], published, lambda rank: False) for _ in statuses]
    assert found[:-1] == [None] * len(found[:-1])
    error = found[-1] if found else None
    assert (proof in str(error)) if proof else error is None
    assert error is None or isinstance(error, DecisionTimeout if "exception" in proof else MissedCall)


def test_rank_that_comes_meanwhile_is_not_accused() -> None:
    published: Any = Published([RankStatus(40, "exit")])
    assert (
        MissedCallDetector("save()", 0, "p/", lambda: MINE).find(published, [1], published, lambda rank: True) is None
    )


def test_steps_prove_nothing_about_a_barrier() -> None:
    published: Any = Published([RankStatus(45, "step"), RankStatus(46, "step", issued=101)])
    missed = MissedCallDetector("barrier('x')", 0, "p/", lambda: MINE, any_step=True)
    assert [missed.find(published, [1], published, lambda rank: False) for _ in range(2)] == [None, None]
