"""How much of a window each rank waited: nothing of the start, nothing of another group."""

from __future__ import annotations

from elasticd.heartbeat.record import Beat
from elasticd_agent.hangs.observer import Seen
from elasticd_agent.hangs.wait_share import WINDOW_S, Paces
from elasticd_agent.model.reports import RankSeen


def look(at: float, *counts: tuple[int, int], stepped: bool = True) -> Seen:
    beats = tuple(Beat(first_step_ns=int(stepped), alive=alive, waited=waited) for alive, waited in counts)
    ranks = tuple(RankSeen(4 + i, i) for i in range(len(counts)))
    return Seen(1, beats, (), 0.0, ranks, attentive_s=at)


def test_a_window_counts_from_the_first_step() -> None:
    paces = Paces()
    assert paces.look(look(0.0, (500, 9), stepped=False)) is None
    assert paces.look(look(100.0, (1000, 10))) is None, "the window begins here"
    assert paces.look(look(100.0 + WINDOW_S - 0.1, (1590, 300))) is None
    assert paces.look(look(100.0 + WINDOW_S, (1600, 310))) == ((4, 600, 300),)
    assert paces.look(look(100.0 + 2 * WINDOW_S, (2200, 310))) == ((4, 600, 0),), "the next one follows at once"


def test_every_rank_is_told() -> None:
    paces = Paces()
    paces.look(look(1.0, (0, 0), (10, 5)))
    assert paces.look(look(1.0 + WINDOW_S, (600, 60), (610, 505))) == ((4, 600, 60), (5, 600, 500))


def test_a_new_group_begins_a_new_window() -> None:
    paces = Paces()
    paces.look(look(1.0, (0, 0)))
    paces.begin()
    assert paces.look(look(1.0 + WINDOW_S, (600, 60))) is None
    assert paces.look(look(1.0 + 2 * WINDOW_S, (1200, 120))) == ((4, 600, 60),)
