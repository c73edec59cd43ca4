"""How much of a window each rank waited: nothing of the start, nothing of another group."""

from __future__ import annotations

from elasticd.heartbeat.record import Heartbeat
from elasticd_agent.hangs.observer import Observation
from elasticd_agent.hangs.wait_share import WINDOW_S, WaitCounter
from elasticd_agent.model.reports import RankReport


def observation(at: float, *counts: tuple[int, int], stepped: bool = True) -> Observation:
    beats = tuple(
        Heartbeat(first_step_ns=int(stepped), alive_ticks=alive, wait_ticks=waited) for alive, waited in counts
    )
    ranks = tuple(RankReport(4 + i, i) for i in range(len(counts)))
    return Observation(1, beats, (), 0.0, ranks, observed_s=at)


def test_a_window_counts_from_the_first_step() -> None:
    paces = WaitCounter()
    assert paces.update(observation(0.0, (500, 9), stepped=False)) is None
    assert paces.update(observation(100.0, (1000, 10))) is None, "the window begins here"
    assert paces.update(observation(100.0 + WINDOW_S - 0.1, (1590, 300))) is None
    assert paces.update(observation(100.0 + WINDOW_S, (1600, 310))) == ((4, 600, 300),)
    assert paces.update(observation(100.0 + 2 * WINDOW_S, (2200, 310))) == ((4, 600, 0),), (
        "the next one follows at once"
    )


def test_every_rank_is_told() -> None:
    paces = WaitCounter()
    paces.update(observation(1.0, (0, 0), (10, 5)))
    assert paces.update(observation(1.0 + WINDOW_S, (600, 60), (610, 505))) == ((4, 600, 60), (5, 600, 500))


def test_a_new_group_begins_a_new_window() -> None:
    paces = WaitCounter()
    paces.update(observation(1.0, (0, 0)))
    paces.begin()
    assert paces.update(observation(1.0 + WINDOW_S, (600, 60))) is None
    assert paces.update(observation(1.0 + 2 * WINDOW_S, (1200, 120))) == ((4, 600, 60),)
