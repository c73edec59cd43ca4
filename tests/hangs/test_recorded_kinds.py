"""What torch's recorder keeps of each collective, by role: no healthy one makes ranks differ, and every wrong one does.

RECORDED are the inputs that gloo's recorder of torch 2.13 had on ranks 0, 1 and 2 of 3, and NCCL's where its source
records the inputs of one rank only. The recorder keeps no source or destination.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from elasticd_agent.hangs.blame import Blame, blame
from elasticd_agent.hangs.explain.flight import compare_groups
from elasticd_agent.hangs.proofs import prove
from elasticd_agent.hangs.rank import RankState
from elasticd_agent.hangs.recordings import Recording, parse
from elasticd_agent.model.reports import GroupTail, RankReport

Sizes = list[list[int]]
ONE: Sizes = [[4]]
RECORDED: dict[str, tuple[str, tuple[Sizes, Sizes, Sizes]]] = {
    "all_reduce": ("gloo:all_reduce", (ONE, ONE, ONE)),
    "all_reduce of other shapes": ("gloo:all_reduce", ([[4]], [[2, 2]], [[4, 1]])),
    "all_reduce of one element": ("gloo:all_reduce", ([[]], [[1]], [[1, 1]])),
    "broadcast": ("gloo:broadcast", (ONE, ONE, ONE)),
    "reduce": ("gloo:reduce", (ONE, ONE, ONE)),
    "barrier": ("gloo:barrier", ([], [], [])),
    "all_gather": ("gloo:all_gather", (ONE, ONE, ONE)),
    "reduce_scatter of a list": ("gloo:all_reduce", (ONE, ONE, ONE)),
    "coalesced": ("gloo:all_reduce", ([[4], [2]], [[4], [2]], [[4], [2]])),
    "gather to rank 1": ("gloo:gather", (ONE, ONE, ONE)),
    "scatter from rank 1": ("gloo:scatter", ([], [[3, 4]], [])),
    "all_to_all_single of equal parts": ("gloo:all_to_all", ([[12]], [[12]], [[12]])),
    "all_to_all_single of unequal parts": ("gloo:all_to_all", ([[3]], [[6]], [[9]])),
    "NCCL's all_to_all": ("nccl:all_to_all", ([[1], [1], [1]], [[2], [2], [2]], [[3], [3], [3]])),
    "NCCL's scatter from rank 1": ("nccl:scatter", ([[0]], [[4], [4], [4]], [[0]])),
    "NCCL's gather": ("nccl:gather", ([[1]], [[2]], [[3]])),
    "NCCL's lists": ("nccl:all_gather", ([[1]], [[2]], [[3]])),
    "NCCL's reduce_scatter of a list": ("nccl:reduce_scatter", ([[1]], [[2]], [[3]])),
    "NCCL's uneven lists": ("nccl:coalesced", ([], [], [])),
}
WRONG: dict[str, tuple[str, tuple[Sizes, Sizes, Sizes]]] = {
    name: (name, (ONE, [[8]], ONE))
    for name in (
        *("gloo:all_reduce", "gloo:broadcast", "gloo:reduce", "gloo:all_gather", "nccl:all_reduce", "nccl:broadcast"),
        *("nccl:_all_gather_base", "nccl:_reduce_scatter_base", "nccl:reduce", "nccl:allreduce_coalesced"),
        *("nccl:all_gather_into_tensor_coalesced", "nccl:reduce_scatter_tensor_coalesced"),
    )
}


def recording(name: str, sizes: Sizes, number: int = 7, **more: Any) -> Recording:
    entry = {
        "collective_seq_id": number,
        "profiling_name": name,
        "process_group": ["0", "default_pg"],
        "input_sizes": sizes,
        "input_dtypes": ["Float"] * len(sizes),
        "state": "scheduled",
        "retired": False,
    }
    group = {"process_group": ["0", "default_pg"], "backend": "cpu:gloo,cuda:nccl", "unused": False, "in_job": True}
    found = parse({"version": "2.10", "entries": [entry | more], "process_groups": [group]})
    assert found is not None
    return found


def waiting(rank: int, recorded: Recording) -> RankState:
    report = RankReport(rank, rank, "step", 9, 7, idle_s=6, alive_s=0.1, state="S", where="collective")
    return RankState("a", replace(report, function="f", alone=True, groups=recorded.tails()))


@pytest.mark.parametrize("name", RECORDED)
def test_what_healthy_ranks_record_differs_in_nothing(name: str) -> None:
    """A rank that comes 20 s late has not issued it yet, and ends the wait of the others."""
    operation, sizes = RECORDED[name]
    ranks = [recording(operation, one) for one in sizes]
    assert all(one.differing is None for one in compare_groups({rank: one.tails() for rank, one in enumerate(ranks)}))
    assert prove([waiting(rank, one) for rank, one in enumerate(ranks)], []) is None
    late = RankState("a", RankReport(2, 2, where="elsewhere", state="S", alone=True))
    assert prove([*(waiting(rank, one) for rank, one in enumerate(ranks[:2])), late], []) is None


@pytest.mark.parametrize("name", WRONG)
def test_sizes_that_must_agree_are_a_proof(name: str) -> None:
    operation, sizes = WRONG[name]
    ranks = [recording(operation, one) for one in sizes]
    assert any(one.differing for one in compare_groups({rank: one.tails() for rank, one in enumerate(ranks)}))
    found = prove([waiting(rank, one) for rank, one in enumerate(ranks)], [])
    assert [rank.report.rank for rank in found.culprits] == [1]


def test_bytes_are_compared_not_types() -> None:
    """gloo and NCCL send a mask of bytes to a rank that expects booleans; of a wider type there is more."""
    byte, boolean, long = (
        recording("gloo:broadcast", [[2, 2]], input_dtypes=[name]) for name in ("Byte", "Bool", "Long")
    )
    assert prove([*map(waiting, (0, 1), (byte, boolean))], []) is None
    assert prove([*map(waiting, (0, 1), (byte, long))], []) is not None
    assert prove([waiting(0, byte), waiting(1, recording("gloo:broadcast", [[4]], input_dtypes=["Float4"]))], [])


def test_other_operation_is_a_proof_whatever_its_sizes() -> None:
    ranks = [recording("gloo:all_to_all", [[n]]) for n in (1, 2)]
    found = prove([*map(waiting, (0, 1), ranks), waiting(2, recording("gloo:scatter", []))], [])
    assert [rank.report.rank for rank in found.culprits] == [2]
    names = ("gloo:all_to_all", "gloo:scatter", "gloo:scatter", "gloo:gather", "gloo:gather")
    found = prove([waiting(rank, recording(name, ONE)) for rank, name in enumerate(names)], [])
    assert found is not None and not found.culprits, "no operation is that of most ranks"


def tails(**more: Any) -> tuple[GroupTail, ...]:
    found = parse({"version": "2.10", "entries": [], **more})
    return found.tails()


def test_group_that_was_never_used_has_a_tail() -> None:
    """Of gloo only: NCCL's recorder and gloo's do not have the same collectives."""
    group = {"process_group": ["3", "undefined"], "backend": "gloo", "unused": True, "in_job": True}
    assert tails(process_groups=[group]) == (GroupTail("group 3", 0, backend="gloo", in_job=True),)
    assert tails(process_groups=[group], comm_lib_version="2.29") == ()
    assert tails(process_groups=[group | {"backend": "nccl"}]) == ()
    assert tails(process_groups=[group | {"unused": False}]) == ()
    assert [one.members for one in tails(process_groups=[group | {"members": 77}])] == [77]
    (outside,) = tails(process_groups=[group | {"unused": False, "in_job": False}])
    assert not outside.in_job
    assert tails(process_groups="none") == tails(process_groups=[1, {}])[1:] == ()


def test_group_with_another_program_is_kept_of_many() -> None:
    groups = [
        {"process_group": [str(n), "undefined"], "backend": "gloo", "unused": True, "in_job": n < 20} for n in range(21)
    ]
    assert [tail.group for tail in tails(process_groups=groups)][:2] == ["group 20", "default group"]


def test_first_collective_of_a_group_is_compared_with_ranks_that_have_not_used_it() -> None:
    entry = {"collective_seq_id": 1, "profiling_name": "gloo:barrier", "process_group": ["3", "undefined"]}
    groups = [
        {"process_group": [n, "undefined"], "backend": "gloo", "unused": True, "in_job": True} for n in ("3", "4")
    ]
    unused = parse({"version": "2.10", "entries": [], "process_groups": groups})
    used = parse({"version": "2.10", "entries": [entry], "process_groups": [groups[0] | {"unused": False}, groups[1]]})
    (found,) = compare_groups({0: used.tails(), 1: unused.tails()})
    assert (found.group, found.missing, str(found.waiting_for)) == ("group 3", (1,), "#1 barrier")


def test_ranks_of_groups_in_the_dump_of_nccl() -> None:
    def config(**ranks: str) -> dict[str, Any]:
        described = {"g0": ["0", "default_pg"], "g1": ["1", "undefined"], "engine": ["engine", "undefined"]}
        return {name: dict(zip(("name", "desc"), described[name], strict=True), ranks=of) for name, of in ranks.items()}

    def in_job(pg_config: object) -> list[str]:
        found = parse({"version": "2.10", "comm_lib_version": "2.29", "entries": [], "pg_config": pg_config})
        return sorted(found.groups_in_job)

    assert in_job(config(g0="[0, 1, 2]", g1="[0, 2]", engine="[]")) == ["default group", "group 1"]
    assert in_job(config(g0="[]", g1="[0, 2]", engine="[0, 1]")) == []
    assert in_job(config(g0="oops")) == in_job([1]) == in_job({"": 3}) == []


def test_broadcast_from_other_sources_is_no_fault_of_the_network() -> None:
    """The sources are not recorded. All have issued it, one has finished it, and no byte is under way."""
    issued = recording("gloo:broadcast", ONE)
    finished = recording("gloo:broadcast", ONE, retired=True)
    quiet = {"window_s": 3.0, "unsent": 0}

    def judged(**more: Any) -> Blame:
        ranks = [waiting(rank, one) for rank, one in enumerate((issued, issued, finished))]
        reports = [replace(rank.report, **quiet, collectives=7) for rank in ranks]
        reports[2] = replace(reports[2], function="DDP.forward", **more)
        return blame([RankState("a", report) for report in reports], [], 1)

    found = judged()
    assert (found.cause, found.culprits, found.evidence) == ("mismatched_collectives", (), "alike")
    assert "which rank 2 on a (step 9) has finished; no byte of it is under way: its ranks may have named" in found.why
    assert "different sources" not in judged(unsent=9).why
    assert "different sources" not in judged(where="elsewhere").why
    reduces = recording("gloo:all_reduce", ONE).tails()
    assert "ranks wait in different collectives" in judged(groups=reduces, alone=False).why
    of_other_ranks = tuple(replace(tail, members=1) for tail in waiting(2, finished).report.groups)
    assert "which all of its ranks wait in" in judged(groups=of_other_ranks).why


def test_recorder_of_a_dump_that_names_none_is_that_of_its_collectives() -> None:
    assert not recording("gloo:all_reduce", ONE).not_by_gloo
    assert recording("nccl:all_reduce", ONE).not_by_gloo


@pytest.mark.parametrize(("enqueued", "done"), [("7", True), ("8", False)])
def test_status_of_a_group_counts_where_it_counts_what_is_recorded(enqueued: str, done: bool) -> None:
    """gloo's state stays "scheduled". Its status counts messages, too, which are in no record."""
    entry = {"collective_seq_id": 7, "pg_id": 0, "profiling_name": "gloo:all_reduce", "state": "scheduled"}
    status = {"0": {"last_enqueued_collective": enqueued, "last_completed_collective": "7"}}
    found = parse({"version": "2.10", "pg_status": status, "entries": [entry | {"process_group": ["0", "default_pg"]}]})
    assert found is not None
    assert found.issued_by_group["default group"][7].done is done
