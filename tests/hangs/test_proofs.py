"""Proofs from flight recorders: which ranks can never resume, and which one is wrong."""

from __future__ import annotations

from dataclasses import replace

import pytest

from elasticd_agent.hangs.proofs import prove
from elasticd_agent.hangs.rank import RankState
from elasticd_agent.hangs.recordings import Recording, parse
from elasticd_agent.model.reports import DEFAULT_GROUP_NAME, GroupTail, RankReport

WAITS = RankReport(
    0, 0, "step", 9, 20, idle_s=6, alive_s=0.1, state="S", where="collective", function="all_reduce", alone=True
)
EXITED = replace(WAITS, exited=True, where="", collectives=19)
D, G, H = DEFAULT_GROUP_NAME, "group 1", "group 2"


def gloo(group: str, last: int, pending: int, kind: str) -> GroupTail:
    return GroupTail(group, last, pending, ((last, kind),) if last else (), "gloo", in_job=True)


def at(*tails: tuple[str, int, int, str] | GroupTail, **more: object) -> RankReport:
    """(group, last, pending, kind of the last)"""
    groups = tuple(tail if isinstance(tail, GroupTail) else gloo(*tail) for tail in tails)
    return replace(WAITS, **{"groups": groups, "unsent": 0, "window_s": 3.0, **more})  # type: ignore[arg-type]


SAME = at((D, 20, 20, "all_reduce"))
BEHIND = at((D, 19, 0, "all_reduce"))
RECEIVES = at((D, 19, 0, "all_reduce"), function="recv")
NCCL = (GroupTail(D, 19, 0, ((19, "all_reduce"),), "nccl", True),)
BY_NCCL = replace(SAME, groups=(replace(SAME.groups[0], backend="nccl"),))
OTHER_BY_NCCL = replace(SAME, groups=(GroupTail(D, 20, 20, ((20, "broadcast"),), "nccl", True),))
NO_G, NO_H = gloo(G, 0, 0, ""), gloo(H, 0, 0, "")
OUTSIDE = GroupTail("engine", 1, 1, ((1, "broadcast"),), "gloo", in_job=False)
OF_OTHERS = replace(SAME, groups=(replace(SAME.groups[0], in_job=False),))
PAIR, OTHER_PAIR = (
    replace(gloo(G, last, pending, "x"), members=pair) for last, pending, pair in ((7, 7, 1), (6, 0, 2))
)
IN_SAVE = replace(BEHIND, where="elsewhere", function="", wait_call="save()", wait_rank=1)
CASES = {
    "NCCL's recorder of all ranks": ([BY_NCCL, BY_NCCL, OTHER_BY_NCCL], [2]),
    "NCCL's recorder of some ranks, gloo's of another": ([BY_NCCL, BY_NCCL, at((D, 20, 20, "broadcast"))], None),
    "alike": ([SAME, SAME, SAME], None),
    "two groups of one name": (
        [
            at((D, 19, 0, "y"), PAIR),
            at((D, 19, 0, "y"), replace(PAIR, last=6, pending=0), where="elsewhere"),
            at((D, 20, 20, "y"), OTHER_PAIR),
            at((D, 20, 20, "y"), OTHER_PAIR),
        ],
        None,
    ),
    "another collective": ([SAME, at((D, 20, 20, "broadcast")), SAME], [1]),
    "another collective, two ranks": ([SAME, at((D, 20, 20, "broadcast"))], []),
    "a root that is done": ([at((D, 21, 21, "all_reduce")), SAME, SAME], None),
    "behind, and outside": ([SAME, replace(BEHIND, where="elsewhere")], None),
    "behind, without a stack": ([SAME, replace(BEHIND, where="")], None),
    "behind, and its Python moves": ([at((D, 20, 20, "x")), at((D, 19, 19, "x"), moved_s=0.1)], None),
    "no recording": ([SAME, replace(WAITS)], None),
    "another collective in a group of two ranks": (
        [
            at((D, 19, 0, "y"), (G, 7, 7, "all_reduce")),
            at((D, 19, 0, "y"), (G, 7, 7, "all_gather"), deviation="other"),
            SAME,
            SAME,
        ],
        [1],
    ),
    "two groups crossed": ([at((G, 7, 7, "x"), (H, 4, 0, "x")), at((G, 6, 0, "x"), (H, 5, 5, "x"))], []),
    "sub-group skip": (
        [at((D, 19, 0, "y"), (G, 7, 7, "x")), at((D, 20, 20, "y"), (G, 6, 0, "x"), deviation="skipped"), SAME],
        [1],
    ),
    "another pending one may end": ([at((G, 7, 7, "x"), (H, 5, 5, "x")), at((G, 6, 0, "x"), (H, 5, 5, "x"))], None),
    "receives from a rank": ([at((G, 7, 7, "x"), function="recv"), at((G, 6, 0, "x"), (H, 5, 5, "x"))], None),
    "receives, while others reduce": ([SAME, RECEIVES, SAME], [1]),
    "receives and reduces, two ranks": ([SAME, RECEIVES], []),
    "all receive": ([RECEIVES, replace(RECEIVES, function="send_object_list")], []),
    "receives from its own": ([RECEIVES], None),
    "receives, bytes are under way": ([replace(SAME, unsent=9), RECEIVES, SAME], None),
    "receives, bytes flow": ([SAME, replace(RECEIVES, io_bytes=1 << 20), SAME], None),
    "receives, sockets are unknown": ([SAME, RECEIVES, replace(SAME, unsent=-1)], None),
    "receives, bytes were not sampled": ([SAME, replace(RECEIVES, window_s=0.0), SAME], None),
    "receives by NCCL": ([SAME, replace(RECEIVES, groups=NCCL), SAME], None),
    "receives, one has no recording": ([SAME, RECEIVES, replace(SAME, groups=())], None),
    "receives, one computes": ([SAME, RECEIVES, replace(BEHIND, where="elsewhere")], None),
    "receives, one has no stack": ([SAME, RECEIVES, replace(BEHIND, where="")], None),
    "receives, one is at a barrier": ([SAME, RECEIVES, replace(BEHIND, where="barrier", phase="barrier")], []),
    "receives in another thread, too": ([SAME, replace(RECEIVES, alone=False), SAME], None),
    "receives, and its Python moves": ([SAME, replace(RECEIVES, moved_s=0.1), SAME], None),
    "receives, and its reduction is under way": ([SAME, replace(RECEIVES, groups=SAME.groups), SAME], None),
    "all receive, and reductions of two are under way": ([replace(RECEIVES, groups=SAME.groups)] * 2 + [RECEIVES], []),
    "all receive, one has exited": ([RECEIVES, RECEIVES, EXITED], None),
    "another thread of the script": ([at((D, 20, 20, "x"), alone=False), at((D, 20, 20, "y"), alone=False)], None),
    "left too early": ([SAME, EXITED], [1]),
    "two groups crossed at their first use": ([at((G, 1, 1, "x"), NO_H), at((H, 1, 1, "x"), NO_G), SAME], []),
    "first collective of a sub-group skipped": (
        [at((D, 19, 0, "all_reduce"), (G, 1, 1, "x")), at((D, 20, 20, "all_reduce"), NO_G), SAME],
        [1],
    ),
    "first collective of a sub-group, no tail": (
        [at((D, 19, 0, "all_reduce"), (G, 1, 1, "x")), at((D, 20, 20, "all_reduce")), SAME],
        None,
    ),
    "first collective of a sub-group late": (
        [at((D, 19, 0, "all_reduce"), (G, 1, 1, "x")), at((D, 19, 0, "all_reduce"), NO_G, where="elsewhere"), SAME],
        None,
    ),
    "receives from another program": ([SAME, at((D, 19, 0, "x"), OUTSIDE, function="recv"), SAME], None),
    "reduces with another program": ([at((D, 19, 0, "x"), OUTSIDE), SAME, SAME], None),
    "members unknown": ([OF_OTHERS, replace(OF_OTHERS, groups=BEHIND.groups), OF_OTHERS], None),
    "waits by a line of source": ([at((D, 19, 19, "x"), function="store.wait"), SAME, SAME], None),
    "monitored barrier": ([at((D, 19, 19, "x"), function="monitored_barrier"), SAME, SAME], None),
    "computes on its device": (
        [at((D, 20, 20, "x"), where="device"), at((D, 20, 20, "y")), at((D, 20, 20, "y"))],
        None,
    ),
    "in a call of the session": ([IN_SAVE, SAME], []),
    "in a call of the session, the other one is late": ([IN_SAVE, replace(SAME, where="elsewhere")], None),
    "in a call of the session, the other one has exited": ([IN_SAVE, EXITED], []),
    "in a call of the session, and a reduction is under way": ([replace(IN_SAVE, groups=SAME.groups), EXITED], []),
    "paused for the next round": ([replace(BEHIND, phase="barrier", barrier="pause"), SAME], None),
    "left, counts are NCCL's": ([replace(SAME, nccl_groups=((1, 30, 30),)), EXITED], None),
    "left, count unknown": ([SAME, replace(EXITED, collectives=-1)], None),
}


@pytest.mark.parametrize("name", CASES)
def test_proof(name: str) -> None:
    reports, expected = CASES[name]
    ranks = [RankState("a", replace(one, rank=number, slot=number)) for number, one in enumerate(reports)]
    found = prove(
        [r for r in ranks if not r.report.exited], [r for r in ranks if r.report.exited], all_ranks_known=True
    )
    assert (None if found is None else [rank.report.rank for rank in found.culprits]) == expected
    assert found is None or ("wait" in found.why and found.cause.endswith(("collective", "collectives")))


def test_receiver_on_one_of_two_nodes_may_hear_from_the_other() -> None:
    ranks = [RankState("a", replace(one, rank=number)) for number, one in enumerate([SAME, RECEIVES])]
    assert prove(ranks, [], all_ranks_known=False) is None
    assert prove(ranks, [], all_ranks_known=True) is not None


def test_crossed_groups_are_named() -> None:
    first, second = CASES["two groups crossed"][0]
    found = prove([RankState("a", first), RankState("a", replace(second, rank=1))], [])
    assert found.why == (
        "rank 0 waits in x (#7 of group 1), which rank 1 has not issued; "
        "rank 1 waits in x (#5 of group 2), which rank 0 has not issued"
    )


def recorded(*operations: str) -> Recording:
    entries = [
        {
            "collective_seq_id": n,
            "profiling_name": f"gloo:{name}",
            "process_group": ["0", "default_pg"],
            "retired": n < 30,
        }
        for n, name in enumerate(operations, start=1)
    ]
    found = parse({"version": "2.10", "entries": entries})
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("last", "expected"),
    [([], ""), (["broadcast", "barrier"], "skipped"), (["reduce"], "other"), (["barrier"], "other")],
)
def test_deviation_from_the_usual_order(last: list[str], expected: str) -> None:
    assert recorded(*["broadcast", "all_reduce", "barrier"] * 10, *last).deviation() == expected
    assert recorded(*last, "barrier").deviation() == "", "too few to know the order"


def test_first_use_of_a_group_is_no_deviation() -> None:
    usual = recorded(*["broadcast", "all_reduce", "barrier"] * 10)
    first = replace(usual, issue_order=(*usual.issue_order, (G, "all_reduce"), *usual.issue_order[:2]))
    assert first.deviation() == ""


@pytest.mark.parametrize("data", [{}, {"entries": "none", "version": 1}])
def test_data_that_is_no_recording(data: dict[str, object]) -> None:
    assert parse(data) is None


@pytest.mark.parametrize(
    ("deviation", "cause"), [("skipped", "missed_collective"), ("other", "mismatched_collectives")]
)
def test_cause_of_another_collective(deviation: str, cause: str) -> None:
    reports = [SAME, at((D, 20, 20, "broadcast"), deviation=deviation), SAME]
    found = prove([RankState("a", replace(one, rank=number)) for number, one in enumerate(reports)], [])
    assert found.cause == cause


def test_sentence_names_eight_ranks() -> None:
    for waiting, names in ((8, "ranks 0, 1, 2, 3, 4, 5, 6, 7 wait"), (9, "ranks 0, 1, 2, 3, 4, 5, 6, 7 … wait")):
        reports = [*[SAME] * waiting, at((D, 20, 20, "broadcast"))]
        found = prove([RankState("a", replace(one, rank=number)) for number, one in enumerate(reports)], [])
        assert found is not None and found.why.startswith(f"{names} in all_reduce (#20 of the default group)")


def entries(number: int, operations: str, group: str = "0", finished: int = 99) -> list[dict[str, object]]:
    """The collectives of the process' group of that number: one letter each."""
    described = "default_pg" if group == "0" else "undefined"
    return [
        {"pg_id": number, "collective_seq_id": n, "profiling_name": f"gloo:{name}", "retired": n <= finished}
        | {"process_group": [group, described]}
        for n, name in enumerate(operations, start=1)
    ]


def table(**unused: bool) -> list[dict[str, object]]:
    """The groups that there are: g0, the default one, g1, ..."""
    named = {name[1:]: value for name, value in unused.items()}
    return [
        {"process_group": [name, "default_pg" if name == "0" else "undefined"], "backend": "gloo", "in_job": True}
        | {"unused": value}
        for name, value in named.items()
    ]


def waiting_ranks(*recordings: tuple[list[dict[str, object]], list[dict[str, object]]]) -> list[RankState]:
    parsed = (parse({"version": "2.10", "entries": own, "process_groups": groups}) for own, groups in recordings)
    tails = [one.tails() for one in parsed if one is not None]
    return [RankState("a", replace(WAITS, rank=rank, groups=groups)) for rank, groups in enumerate(tails)]


def test_collectives_of_groups_before_prove_nothing() -> None:
    """In an earlier round rank 1 was in a group whose name another one has now, and issued less there than that has."""
    before = entries(1, "aaa", "1")
    members = ([*entries(2, "aaaa", "0"), *entries(3, "xxxxx", "1", finished=4)], table(g0=False, g1=False))
    other = ([*before, *entries(2, "aaaaa", "0", finished=4)], table(g0=False))
    assert prove(waiting_ranks(members, other, members), []) is None


def test_groups_that_were_made_anew_are_crossed() -> None:
    """They had issued more before: that says nothing about now."""
    before = [*entries(0, "a" * 50, "0", finished=49), *entries(1, "x" * 50, "1")]
    groups = table(g0=False, g1=False)
    first = ([*before, *entries(2, "aa", "0", finished=1), *entries(3, "x", "1")], groups)
    second = ([*before, *entries(2, "a", "0"), *entries(3, "xx", "1", finished=1)], groups)
    found = prove(waiting_ranks(first, second), [])
    assert found is not None
    assert found.why.startswith("rank 0 waits in a (#2 of the default group), which rank 1 has not issued")
    unused = (before, table(g0=True, g1=True))
    found = prove(waiting_ranks(unused, first), [])
    assert found is None, "it waits for nothing of this round"
    tails = {tail.group: tail for tail in waiting_ranks(unused)[0].report.groups}
    assert {name: (tail.last, tail.pending) for name, tail in tails.items()} == {D: (0, 0), G: (0, 0)}


def test_entries_without_a_number_are_left_out_and_three_sizes_are_shown() -> None:
    entry = {"profiling_name": "gloo:all_reduce", "process_group": ["0", "default_pg"], "input_sizes": [[4], [2, 3], 5]}
    found = parse({"version": "2.10", "entries": [{**entry, "collective_seq_id": n} for n in (1, "x", None, True)]})
    assert [tail.kinds for tail in found.tails()] == [((1, "all_reduce of 4, 2×3, 5"),)]


def test_tail_has_the_unfinished_collective() -> None:
    (tail,) = recorded(*["broadcast", "all_reduce", "barrier"] * 10, "all_reduce").tails()
    assert (tail.group, tail.last, tail.pending, dict(tail.kinds)[30]) == (D, 31, 30, "barrier")
    (tail,) = recorded(*["broadcast", "all_reduce", "barrier"] * 20).tails()
    kinds = dict(tail.kinds)
    assert (tail.last, tail.pending) == (60, 30)
    assert [kinds[n] for n in (29, 30, 31, 60)] == ["all_reduce", "barrier", "broadcast", "barrier"]
