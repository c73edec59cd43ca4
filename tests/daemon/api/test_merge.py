"""One answer from what several nodes know of a job."""

from __future__ import annotations

from dataclasses import replace

from elasticd_daemon.api.node_files import MAX_SHOWN_ROUNDS, merge_progress
from elasticd_daemon.api.schema import CheckpointStatus, JobProgress, RankProgress, RoundStatus


def rounds(*numbers: int, reason: str = "") -> tuple[RoundStatus, ...]:
    return tuple(RoundStatus(number, reason=reason) for number in numbers)


def test_without_any_answer() -> None:
    assert merge_progress([], {}) is None


def test_first_node_counts_and_others_complete_it() -> None:
    a = JobProgress("a", 3, step=10, rounds=rounds(2, 3, reason="a's"), ranks=(RankProgress(0),),
                    step_samples=((50.0, 2, 1),))  # fmt: skip
    b = JobProgress("b", 3, step=11, checkpoint=CheckpointStatus(9, 3), rounds=rounds(1, 2, reason="b's"),
                    ranks=(RankProgress(1),), step_samples=((10.0, 1, 1),))  # fmt: skip
    one = merge_progress([a, b], {"c": "it did not answer"})
    assert (one.node, one.step, one.checkpoint) == ("a", 11, CheckpointStatus(9, 3))
    assert [(each.round, each.reason) for each in one.rounds] == [(1, "b's"), (2, "a's"), (3, "a's")]
    assert one.ranks == (RankProgress(0), RankProgress(1))
    assert one.step_samples == ((10.0, 1, 1),)
    assert one.unreachable == {"c": "it did not answer"}


def test_leader_says_what_a_fault_cost() -> None:
    lost = RoundStatus(2, nodes=("a", "b"), leader="b")
    seen = [replace(lost, at=at, lost_seconds=lost_s) for at, lost_s in ((10.0, 0.4), (99.0, 0.2))]
    one = merge_progress([JobProgress(node, 2, rounds=(seen[i],)) for i, node in enumerate("ab")], {})
    assert [(each.at, each.lost_seconds) for each in one.rounds] == [(10.0, 0.2)], (
        "all else is by the first one's clock"
    )


def test_round_says_which_rank_saved_its_state_and_how_many_kept_their_process() -> None:
    seen = {"a": RoundStatus(2, world_size=4, kept=2), "b": RoundStatus(2, resumed_step=40, donor=3, kept=1)}
    one = merge_progress([JobProgress(node, 2, rounds=(each,)) for node, each in seen.items()], {})
    saved = "resumed from step 40, saved by rank 3 after the fault"
    assert [each.origin_phrases for each in one.rounds] == [[saved, "3 of 4 ranks kept the process"]]


def test_ranks_of_an_older_round_are_dropped() -> None:
    rows = [JobProgress("a", 3, ranks=(RankProgress(0, "a"),)), JobProgress("b", 2, ranks=(RankProgress(0, "b"),))]
    one = merge_progress(rows, {})
    assert one is not None and one.ranks == (RankProgress(0, "a"),)


def test_newest_rounds_are_kept() -> None:
    one = merge_progress([JobProgress("a", 3, rounds=rounds(*range(1, 200)))], {})
    assert one is not None and len(one.rounds) == MAX_SHOWN_ROUNDS and one.rounds[-1].round == 199
