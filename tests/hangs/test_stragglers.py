"""A rank that its peers wait for is found, by its factor; noise, and ranks nobody can count, are not."""

from __future__ import annotations

import random

import pytest

from elasticd_agent.hangs.stragglers import RankWaitCounts, find_stragglers
from elasticd_agent.model.job import Policy

TABLE: list[tuple[str, list[RankWaitCounts], list[tuple[int, float]]]] = [
    ("twice as slow as its peer", [RankWaitCounts(0, 600, 300), RankWaitCounts(1, 600, 0)], [(1, 2.0)]),
    ("all alike", [RankWaitCounts(rank, 600, 60) for rank in range(4)], []),
    ("nobody waits: nothing is known of what is usual", [RankWaitCounts(rank, 600, 0) for rank in range(4)], []),
    ("one and a half is not more", [RankWaitCounts(0, 600, 200), RankWaitCounts(1, 600, 0)], []),
    (
        "two of four",
        [
            RankWaitCounts(0, 600, 400),
            RankWaitCounts(1, 600, 0),
            RankWaitCounts(2, 600, 400),
            RankWaitCounts(3, 600, 300),
        ],
        [(1, 3.0)],
    ),
    (
        "two that differ",
        [RankWaitCounts(0, 600, 450)] * 1
        + [RankWaitCounts(n, 600, 450) for n in (1, 2)]
        + [RankWaitCounts(3, 600, 0), RankWaitCounts(4, 600, 300)],
        [(3, 4.0), (4, 2.0)],
    ),
    (
        "a fast one among slow ones is no reason",
        [RankWaitCounts(0, 600, 400), *(RankWaitCounts(n, 600, 0) for n in (1, 2, 3))],
        [],
    ),
    (
        "the slowest first",
        [RankWaitCounts(0, 600, 300), RankWaitCounts(1, 600, 0), *(RankWaitCounts(n, 600, 450) for n in (2, 3, 4))],
        [(1, 4.0), (0, 2.0)],
    ),
    ("a window of seconds says nothing", [RankWaitCounts(0, 90, 45), RankWaitCounts(1, 90, 0)], []),
    ("a rank without pulses is left out", [RankWaitCounts(0, 600, 300), RankWaitCounts(1, 0, 0)], []),
    ("one rank has no peers", [RankWaitCounts(0, 600, 0)], []),
    ("a peer that always waits", [RankWaitCounts(0, 600, 600), RankWaitCounts(1, 600, 0)], [(1, 600.0)]),
]


@pytest.mark.parametrize(("name", "ranks", "found"), TABLE, ids=[name for name, _, _ in TABLE])
def test_who_is_slow(name: str, ranks: list[RankWaitCounts], found: list[tuple[int, float]]) -> None:
    assert find_stragglers(ranks, Policy()) == tuple((rank, pytest.approx(factor)) for rank, factor in found)
    assert find_stragglers(ranks[::-1], Policy()) == find_stragglers(ranks, Policy()), "in whatever order they come"


def test_a_factor_of_the_policys() -> None:
    ranks = [RankWaitCounts(0, 600, 300), RankWaitCounts(1, 600, 0)]
    assert find_stragglers(ranks, Policy(slow_factor=2.5)) == ()
    assert find_stragglers(ranks, Policy(slow_factor=1.1)) != ()


def test_chance_alone_makes_nobody_slow() -> None:
    """Eight equal ranks that wait a fifth of the time, looked at for ten seconds, a thousand times."""
    draw = random.Random(3)
    for _ in range(1000):
        ranks = [RankWaitCounts(rank, 100, sum(draw.random() < 0.2 for _ in range(100))) for rank in range(8)]
        assert find_stragglers(ranks, Policy()) == ()
