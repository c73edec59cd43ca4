"""Decision points by themselves: interval, cost, keys in the store, and messages between ranks."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from elasticd.coordination.decisions import (
    MAX_COST_SHARE,
    MAX_INTERVAL_S,
    Action,
    Decision,
    DecisionPoints,
    next_interval_steps,
)
from elasticd.coordination.store_channel import StoreChannel, default_timeout_s
from elasticd.errors import DecisionTimeout, DirectoryInUse, ElasticdError, WireError


def store() -> Any:
    from torch.distributed import HashStore

    return HashStore()


def channels(world_size: int, timeout_s: float = 5) -> list[StoreChannel]:
    shared = store()
    return [StoreChannel(rank, world_size, shared, "elasticd/r1", timeout_s) for rank in range(world_size)]


def together(*calls: Callable[[], Any]) -> list[Any]:
    """Call all at once, as ranks do; what each returned or raised."""
    results: list[Any] = [None] * len(calls)

    def run(number: int) -> None:
        try:
            results[number] = calls[number]()
        except Exception as error:  # noqa: BLE001 - the test looks at it
            results[number] = error

    threads = [threading.Thread(target=run, args=(number,)) for number in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    return results


@given(interval=st.integers(1, 100_000), step_s=st.floats(1e-6, 1e3), cost_s=st.floats(0, 1))
def test_interval_limits_cost_and_only_doubles(interval: int, step_s: float, cost_s: float) -> None:
    found = next_interval_steps(interval, step_s, cost_s)
    assert 1 <= found <= 2 * interval
    # Never further than the cost asks for, nor than a stop may wait.
    assert found == 1 or found * step_s <= min(cost_s / MAX_COST_SHARE, MAX_INTERVAL_S) * 1.000001


@pytest.mark.parametrize(
    ("step_s", "cost_s", "settled"),
    [
        (0.001, 0.0002, 200),  # 0.2 ms of 200 ms
        (0.1, 0.0002, 2),
        (5.0, 0.0002, 1),
        (0.001, 0.1, 10_000),  # the store is slow: a stop waits 10 s, not 100
    ],
)
def test_interval_settles_at_cost_share(step_s: float, cost_s: float, settled: int) -> None:
    interval = 1
    for _ in range(20):
        interval = next_interval_steps(interval, step_s, cost_s)
    assert interval == pytest.approx(settled, abs=1)


def test_all_ranks_get_same_decisions_and_old_are_deleted() -> None:
    ranks = channels(3)
    wishes: dict[int, tuple[Action, str]] = {20: ("save", "it is time"), 30: ("stop", "enough")}
    asked = []

    def wish() -> tuple[Action, str]:
        asked.append(True)
        return wishes.get(len(asked), ("continue", ""))

    def not_asked() -> tuple[Action, str]:
        raise AssertionError("only rank 0 is asked")

    def train(rank: int) -> list[Decision]:
        decisions = DecisionPoints(ranks[rank], wish if rank == 0 else not_asked, max_stored=50)
        found = []
        for step in itertools.count(1):
            if verdict := decisions.decide_at(step):
                found.append(verdict)
                if verdict.action == "stop":
                    break
        return found

    first, second, third = together(*(lambda rank=rank: train(rank) for rank in range(3)))  # type: ignore[misc]
    assert first == second == third
    assert first[0].step == 1
    assert [verdict.next for verdict in first[:-1]] == [verdict.step for verdict in first[1:]]
    assert [(verdict.action, verdict.reason) for verdict in (first[19], first[29])] == [wishes[20], wishes[30]]


def test_old_decisions_are_deleted() -> None:
    shared = store()
    decisions = DecisionPoints(StoreChannel(0, 2, shared, "a", 5), lambda: ("continue", ""), max_stored=8)
    for step in range(1, 10_000):
        decisions.decide_at(step)
    assert shared.num_keys() <= 10


def test_invalid_decision_is_refused() -> None:
    first, second = channels(2)
    first.put("decision/1", b'{"step": 1}')
    with pytest.raises(WireError, match="step 1"):
        DecisionPoints(second, lambda: ("continue", "")).decide_at(1)


def test_wait_ends_at_deadline_and_names_missing_rank() -> None:
    ranks = channels(4, timeout_s=0.2)
    ranks[2].gather_on_rank0("random/1", b"2", "random states")
    with pytest.raises(DecisionTimeout, match=r"rank 0 waited 0\.2 s for ranks 1, 3: random states"):
        ranks[0].gather_on_rank0("random/1", b"0", "random states")
    with pytest.raises(DecisionTimeout, match=r"rank 3 waited 0\.2 s for rank 0: the plan"):
        ranks[3].on_rank0("plan", "the plan", dict)


def test_collect_is_ordered_and_leaves_no_keys() -> None:
    ranks = channels(3)
    before = ranks[0].store.num_keys()
    ranks[2].gather_on_rank0("x", b"two", "")
    ranks[1].gather_on_rank0("x", b"one", "")
    assert ranks[0].gather_on_rank0("x", b"zero", "") == [b"zero", b"one", b"two"]
    assert ranks[0].store.num_keys() == before


@pytest.mark.parametrize(
    ("raised", "on_others"),
    [
        (DirectoryInUse("held"), DirectoryInUse("on rank 0: held")),
        (OSError("no"), ElasticdError("on rank 0: OSError: no")),
    ],
)
def test_error_on_rank_0_is_raised_on_every_rank(raised: Exception, on_others: Exception) -> None:
    first, second = channels(2)

    def fail() -> dict[str, Any]:
        raise raised

    results = together(lambda: first.on_rank0("k", "it", fail), lambda: second.on_rank0("k", "it", fail))
    assert results[0] is raised
    assert type(results[1]) is type(on_others)
    assert str(results[1]) == str(on_others)


def test_second_session_reads_nothing_of_first() -> None:
    shared = store()
    old = [StoreChannel(rank, 2, shared, "a", 5) for rank in range(2)]
    old[0].on_rank0("k", "it", lambda: {"n": 1})
    new = [StoreChannel(rank, 2, shared, "a", 0.1) for rank in range(2)]
    with pytest.raises(DecisionTimeout):
        new[1].on_rank0("k", "it", dict)
    assert old[1].on_rank0("k", "it", dict) == {"n": 1}


@pytest.mark.parametrize(("timeout", "minutes"), [(None, 30), (timedelta(minutes=1), 10), (timedelta(hours=2), 120)])
def test_messages_are_waited_for_as_long_as_collectives(timeout: timedelta | None, minutes: int) -> None:
    """Also where the script has made the group. Less would end a job whose rank 0 prepares its data for longer."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1, timeout=timeout)
    try:
        assert default_timeout_s() == 60 * minutes
    finally:
        dist.destroy_process_group()
