"""Stragglers: counts of waits window by window, and the ranks that their peers wait for."""

from __future__ import annotations

import random

import pytest

from elasticd.heartbeat.record import Heartbeat
from elasticd_agent.hangs.observer import Observation
from elasticd_agent.hangs.stragglers import WINDOW_S, PersistentStragglers, WaitCounter, find_stragglers
from elasticd_agent.model.job import Policy
from elasticd_agent.model.reports import RankReport

TABLE: list[tuple[str, list[tuple[int, int, int]], list[tuple[int, float]]]] = [
    ("twice as slow as its peer", [(0, 600, 300), (1, 600, 0)], [(1, 2.0)]),
    ("all alike", [(rank, 600, 60) for rank in range(4)], []),
    ("no rank waits: the usual share is unknown", [(rank, 600, 0) for rank in range(4)], []),
    ("one and a half is not more", [(0, 600, 200), (1, 600, 0)], []),
    ("two of four", [(0, 600, 400), (1, 600, 0), (2, 600, 400), (3, 600, 300)], [(1, 3.0)]),
    (
        "two that differ",
        [(0, 600, 450)] * 1 + [(n, 600, 450) for n in (1, 2)] + [(3, 600, 0), (4, 600, 300)],
        [(3, 4.0), (4, 2.0)],
    ),
    ("one fast rank among slow ones", [(0, 600, 400), *((n, 600, 0) for n in (1, 2, 3))], []),
    ("the slowest first", [(0, 600, 300), (1, 600, 0), *((n, 600, 450) for n in (2, 3, 4))], [(1, 4.0), (0, 2.0)]),
    ("a window of seconds", [(0, 90, 45), (1, 90, 0)], []),
    ("a rank without ticks", [(0, 600, 300), (1, 0, 0)], []),
    ("one rank has no peers", [(0, 600, 0)], []),
    ("a peer that always waits", [(0, 600, 600), (1, 600, 0)], [(1, 600.0)]),
    ("identical work, little of it", [(0, 600, 570), (1, 600, 549)], []),
    ("seconds, but all work little", [(0, 6000, 5900), (1, 6000, 5500)], []),
    ("less than three seconds a minute", [(0, 600, 560), (1, 600, 533)], []),
]


@pytest.mark.parametrize(("name", "ranks", "found"), TABLE, ids=[name for name, _, _ in TABLE])
def test_stragglers_table(name: str, ranks: list[tuple[int, int, int]], found: list[tuple[int, float]]) -> None:
    """Ranks that peers wait for are found by their factor; noise, and ranks that cannot be counted, are not."""
    assert find_stragglers(ranks, Policy()) == tuple((rank, pytest.approx(factor)) for rank, factor in found)
    assert find_stragglers(ranks[::-1], Policy()) == find_stragglers(ranks, Policy()), "the order does not matter"


def test_two_windows_in_a_row_make_a_straggler() -> None:
    slow, other, calm = ((0, 600, 300), (1, 600, 0)), ((0, 600, 301), (1, 600, 1)), ((0, 600, 300), (1, 600, 300))
    stragglers = PersistentStragglers(Policy())
    found = [[rank for rank, _ in stragglers.update(counts)] for counts in (slow, slow, other, other, calm, slow, ())]
    assert found == [[], [], [1], [1], [], [], []]


def test_slow_factor_of_the_policy() -> None:
    ranks = [(0, 600, 300), (1, 600, 0)]
    assert find_stragglers(ranks, Policy(slow_factor=2.5)) == ()
    assert find_stragglers(ranks, Policy(slow_factor=1.1)) != ()


def test_chance_makes_no_straggler() -> None:
    """Eight equal ranks that wait a fifth of the time, looked at for ten seconds, a thousand times."""
    draw = random.Random(3)
    for _ in range(1000):
        ranks = [(rank, 100, sum(draw.random() < 0.2 for _ in range(100))) for rank in range(8)]
        assert find_stragglers(ranks, Policy()) == ()


def observation(at: float, *counts: tuple[int, int], stepped: bool = True) -> Observation:
    beats = tuple(
        Heartbeat(first_step_ns=int(stepped), alive_ticks=alive, wait_ticks=waited) for alive, waited in counts
    )
    ranks = tuple(RankReport(4 + i, i) for i in range(len(counts)))
    return Observation(1, beats, (), 0.0, ranks, observed_s=at)


def test_window_begins_at_first_step() -> None:
    counter = WaitCounter()
    assert counter.update(observation(0.0, (500, 9), stepped=False)) is None
    assert counter.update(observation(100.0, (1000, 10))) is None, "the window begins here"
    assert counter.update(observation(100.0 + WINDOW_S - 0.1, (1590, 300))) is None
    assert counter.update(observation(100.0 + WINDOW_S, (1600, 310))) == ((4, 600, 300),)
    assert counter.update(observation(100.0 + 2 * WINDOW_S, (2200, 310))) == ((4, 600, 0),), (
        "the next one follows at once"
    )


def test_window_counts_every_rank() -> None:
    counter = WaitCounter()
    counter.update(observation(1.0, (0, 0), (10, 5)))
    assert counter.update(observation(1.0 + WINDOW_S, (600, 60), (610, 505))) == ((4, 600, 60), (5, 600, 500))


def test_new_group_begins_new_window() -> None:
    counter = WaitCounter()
    counter.update(observation(1.0, (0, 0)))
    counter.group_started()
    assert counter.update(observation(1.0 + WINDOW_S, (600, 60))) is None
    assert counter.update(observation(1.0 + 2 * WINDOW_S, (1200, 120))) == ((4, 600, 60),)
