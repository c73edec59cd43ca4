"""Of what several nodes know of a job, one answer."""

from __future__ import annotations

from typing import Any

from elasticd_agent.node.api.merge import MOST_ROUNDS, merge_progress


def row(node: str, **more: Any) -> dict[str, Any]:
    return {"node": node, "round": 3, "step": 10, "checkpoint": None, "rounds": [], "ranks": [], "track": None, **more}


def test_nobody_knows_anything() -> None:
    assert merge_progress([], {}) is None


def test_the_first_ones_word_counts_and_the_others_complete_it() -> None:
    a = row("a", rounds=[{"round": 2, "reason": "a's"}, {"round": 3}], ranks=[{"rank": 0}], track=[[50.0, 2, 1]])
    b = row(
        "b",
        step=11,
        checkpoint={"round": 3, "step": 9},
        rounds=[{"round": 1}, {"round": 2, "reason": "b's"}],
        ranks=[{"rank": 1}],
        track=[[10.0, 1, 1]],
    )
    one = merge_progress([a, b], {"c": "it did not answer"})
    assert one is not None
    assert (one["node"], one["step"], one["checkpoint"]) == ("a", 11, {"round": 3, "step": 9})
    assert one["rounds"] == [{"round": 1}, {"round": 2, "reason": "a's"}, {"round": 3}]
    assert one["ranks"] == [{"rank": 0}, {"rank": 1}]
    assert one["track"] == [[10.0, 1, 1]]
    assert one["silent"] == {"c": "it did not answer"}


def test_ranks_of_an_older_round_are_other_ranks() -> None:
    late = row("b", round=2, ranks=[{"rank": 0, "node": "b"}])
    one = merge_progress([row("a", ranks=[{"rank": 0, "node": "a"}]), late], {})
    assert one is not None and one["ranks"] == [{"rank": 0, "node": "a"}]


def test_nonsense_of_one_node_costs_nothing_of_the_others() -> None:
    nonsense = row("b", round="x", step="y", checkpoint=7, rounds={"round": 1}, ranks=["r", 3], track="t")
    one = merge_progress([row("a", rounds=[{"round": n} for n in range(1, 200)], track=["p"]), nonsense], {})
    assert one is not None
    assert len(one["rounds"]) == MOST_ROUNDS and one["rounds"][-1] == {"round": 199}
