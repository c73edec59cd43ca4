"""What explain's pages are made of: stacks, flight recordings, kernel functions and GPUs, each by a table."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from elasticd_agent.hangs.collector.record import NodeEvidence, RankEvidence
from elasticd_agent.hangs.explain import flight, load, phrases
from elasticd_agent.hangs.explain.event_log import RunLog
from elasticd_agent.hangs.explain.locate import find_folders
from elasticd_agent.hangs.explain.model import Explanation, RankFacts, StackGroup
from elasticd_agent.hangs.explain.text import FoldedFrames, fold_frames, page
from elasticd_agent.hangs.recordings import parse
from elasticd_agent.hangs.stacks import Frame, ProcessStacks, ThreadStack
from elasticd_agent.model.reports import GroupTail, RankLocation, RecordedVerdict
from tests.log_lines import raw_line

SITE = "/venv/lib/python3.12/site-packages"
PYTHON = "/usr/lib/python3.12"
MAIN = ThreadStack(
    "MainThread",
    "71",
    (
        Frame("_engine_run_backward", f"{SITE}/torch/autograd/graph.py", 979),
        Frame("backward", f"{SITE}/torch/autograd/__init__.py", 395),
        Frame("Tensor.backward", f"{SITE}/torch/_tensor.py", 623),
        Frame("step", "/home/ann/llama/src/train.py", 44),
        Frame("<module>", "/home/ann/llama/src/train.py", 61),
        Frame("_run_code", f"{PYTHON}/runpy.py", 88),
    ),
    "idle",
)
LOADER = ThreadStack("loader", "74", (Frame("read", "/home/ann/llama/src/data.py", 7),), "active+gil")
CHILD = ThreadStack("", "80", (Frame("__getitem__", "/home/ann/llama/src/data.py", 19),), "idle")
STACKS = (ProcessStacks(71, "python", (MAIN, LOADER)), ProcessStacks(80, "pt_data_worker", (CHILD,)))


def test_record_that_is_too_long_keeps_main_threads() -> None:
    frames = 500 * (Frame("f", "/a/long/path/of/some/module.py", 1),)
    process = ProcessStacks(1, "python", tuple(ThreadStack("", str(n), frames) for n in range(256)))
    record = NodeEvidence(1, "a", "", 1.0, (RankEvidence(0, processes=(process, process)),)).shortened()
    assert NodeEvidence.from_json(record.to_json()) == record
    assert [len(thread.frames) for thread in record.ranks[0].threads] == [500]
    assert "only the main ones" in record.troubles[0]


def test_shown_frames_fold_libraries() -> None:
    shown = fold_frames(MAIN)
    assert [one.function if isinstance(one, Frame) else one for one in shown] == [
        "_engine_run_backward",
        FoldedFrames(2, ("torch",)),
        "step",
        "<module>",
        FoldedFrames(1, ("python",)),
    ]


def test_frames_of_a_script_that_is_an_installed_package_are_shown() -> None:
    """They are the outermost package's. Threads of other packages serve it."""
    files = "torch/graph.py", "torch/_tensor.py", "torch/_tensor.py", "trainer/loop.py", "trainer/__main__.py"
    main, sender, saver = (
        ThreadStack("", name, tuple(Frame("f", f"{SITE}/{file}", 1) for file in names))
        for name, names in (("1", files), ("2", ["metrics/sender.py"]), ("3", ["trainer/save.py"]))
    )
    rank = RankFacts(0, culprit=True, processes=(ProcessStacks(71, "python", (main, sender, saver)),))
    group = StackGroup((0,), rank, main, is_minority=False)
    told = page(Explanation(1, "hang", "here", "it hung", ranks=(rank,), stack_groups=(group,)))
    assert "… 2 frames of torch\n      > f  trainer/loop.py:1\n      > f  trainer/__main__.py:1\n" in told
    assert "> f  trainer/save.py:1" in told
    assert "metrics" not in told


@pytest.mark.parametrize(
    ("file", "at", "library"),
    [
        ("/home/ann/llama/src/train.py", "…/src/train.py:44", ""),
        ("/job/train.py", "/job/train.py:44", ""),
        (f"{SITE}/torch/_tensor.py", "torch/_tensor.py:44", "torch"),
        (f"{SITE}/six.py", "six.py:44", "six"),
        ("/home/ann/pytorch/torch/_tensor.py", "torch/_tensor.py:44", "torch"),
        (f"{PYTHON}/runpy.py", "runpy.py:44", "python"),
        ("<frozen runpy>", "<frozen runpy>:44", "python"),
        ("/repository/elasticd/heartbeat/thread.py", "elasticd/heartbeat/thread.py:44", "elasticd"),
    ],
)
def test_frame_place_and_library(file: str, at: str, library: str) -> None:
    frame = Frame("f", file, 44)
    assert (frame.path_and_line, frame.library) == (at, library)


# --- flight recordings ------------------------------------------------------------------------------------------------


def entry(
    number: int, operation: str = "nccl:all_reduce", sizes: object = None, done: bool = True, **more: Any
) -> dict[str, Any]:
    return {
        "pg_id": 0,
        "process_group": ["0", "default_pg"],
        "collective_seq_id": number,
        "profiling_name": operation,
        "input_sizes": [[3, 4]] if sizes is None else sizes,
        "input_dtypes": ["Float"],
        "state": "completed" if done else "started",
        **more,
    }


def compared(*ranks: list[dict[str, Any]]) -> list[flight.GroupComparison]:
    recordings = [parse({"version": "2.9", "entries": entries}) for entries in ranks]
    return flight.compare_groups({rank: one.tails() for rank, one in enumerate(recordings) if one is not None})


def test_missing_rank_of_a_collective() -> None:
    [group] = compared([entry(7), entry(8, done=False)], [entry(7)], [entry(7), entry(8, done=False)])
    assert group.group == "default group"
    assert str(group.waiting_for) == "#8 all_reduce of 3×4 float"
    assert group.missing == (1,)
    assert sorted(group.pending) == [0, 2]


def test_waiting_rank_is_not_missing() -> None:
    [group] = compared([entry(7, done=False)], [entry(7), entry(8, done=False)])
    assert (group.missing, group.waiting_for) == ((), None)


def test_first_difference_counts() -> None:
    [group] = compared([entry(7), entry(8), entry(9)], [entry(7), entry(8, "nccl:broadcast"), entry(9)], [entry(8)])
    assert group.differing == {"#8 all_reduce of 3×4 float": (0, 2), "#8 broadcast of 3×4 float": (1,)}
    [group] = compared([entry(8)], [entry(8, sizes=[[5]])])
    assert group.differing == {"#8 all_reduce of 3×4 float": (0,), "#8 all_reduce of 5 float": (1,)}


def test_ring_buffer_without_beginning_is_no_difference() -> None:
    [group] = compared([entry(n) for n in range(100)], [entry(n) for n in range(90, 100)])
    assert (group.differing, group.missing) == (None, ())


def test_groups_are_separate_and_p2p_is_ignored() -> None:
    more = {"process_group": ["3", "tensor"], "pg_id": 3}
    groups = compared([entry(1), entry(5, **more)], [entry(1), entry(6, **more), entry(9, is_p2p=True)])
    assert [(group.group, group.missing) for group in groups] == [("tensor (group 3)", (0,)), ("default group", ())]


def test_groups_with_one_description_are_separate() -> None:
    first, second = ({"process_group": [name, "undefined"], "pg_id": 1} for name in "12")
    ranks = [[entry(7, **first), entry(8, done=False, **first)], [entry(7, **first)], [entry(8, **second)]]
    groups = compared(*ranks, [entry(8, **second)])
    assert [(group.group, group.missing, list(group.last)) for group in groups] == [
        ("group 1", (1,), [0, 1]),
        ("group 2", (), [2, 3]),
    ]
    many = [entry(8, process_group=[f"{n}", "mesh_tp"]) for n in range(10, 25)]
    groups = compared([*many, entry(9, process_group=["99", "mesh_tp"])], [entry(8, process_group=["99", "mesh_tp"])])
    assert len(groups) == 16
    assert (groups[0].group, groups[0].missing) == ("mesh_tp (group 99)", (1,))


def test_gloo_is_compared_only_where_no_rank_has_another_recorder() -> None:
    waits = GroupTail("default group", 8, 8, ((7, "all_reduce"), (8, "all_reduce")), "nccl")
    behind = replace(waits, last=7, pending=0, kinds=((7, "all_reduce"),))
    gloo = GroupTail("group 2", 3, kinds=((3, "barrier"),), backend="gloo")
    (group,) = flight.compare_groups({0: (waits, gloo), 1: (behind, gloo)})
    assert (group.group, group.missing) == ("default group", (1,))
    assert [last is not None and last.done for last in group.last.values()] == [False, True]
    pending = replace(gloo, group="group 3", pending=3)
    assert [group.group for group in flight.compare_groups({0: (gloo, pending), 1: (gloo, pending)})] == [
        "group 3",
        "group 2",
    ]


def test_groups_of_one_name_and_of_other_ranks_are_compared_apart() -> None:
    """As the pairs of a mesh."""
    pair = GroupTail("mesh_tp", 7, 7, ((7, "all_reduce"),), "nccl", members=1)
    other = replace(pair, last=6, pending=0, kinds=((6, "all_reduce"),), members=2)
    groups = flight.compare_groups({0: (pair,), 1: (pair,), 2: (other,), 3: (other,)})
    assert [(group.group, group.missing) for group in groups] == [("mesh_tp", ()), ("mesh_tp", ())]


def test_culprit_that_waits_in_another_group() -> None:
    """Nobody counts the collectives of other groups: the odd one of the default group may have done nothing wrong."""
    more = {"process_group": ["1", "tp"], "pg_id": 1}
    ranks = [[entry(60), entry(8, done=False, **more)], [entry(61, done=False), entry(7, **more)]]
    verdict = RecordedVerdict(
        1, "missed_collective", (RankLocation("a", 0, 0),), "rank 0 has issued fewer", "restart", 1.0, 1.0
    )
    hung = Explanation(1, "hang", "here", "it hung", ranks=(RankFacts(0, culprit=True), RankFacts(1)), verdict=verdict)
    told = " ".join(page(replace(hung, group_comparisons=tuple(compared(*ranks)))).split())
    assert "but rank 0 waits in tp (group 1) for rank 1, which has not issued #8 all_reduce of 3×4 float there" in told
    ranks = [[entry(60)], [entry(61, done=False)]]
    told = page(replace(hung, group_comparisons=tuple(compared(*ranks))))
    assert "\nbut " not in told


def test_done_entries_of_gloo() -> None:
    """Retired ones, and those up to the last completed one."""
    entries = [entry(n, "gloo:all_reduce", done=False, retired=n == 1) for n in (1, 2, 3)]
    found = parse({"entries": entries, "pg_status": {"0": {"last_completed_collective": "2"}}})
    assert [one.done for one in found.issued_by_group["default group"].values()] == [True, True, False]


@pytest.mark.parametrize("backend", ["gloo", "nccl"])
def test_sends_and_receives_in_the_status(backend: str) -> None:
    """Their numbers are there: of a pipeline nothing is known to be done by it."""
    entries = [entry(n, f"{backend}:all_reduce", done=n == 1) for n in (1, 2)]
    found = parse(
        {"entries": entries, "pg_status": {"0": {f"last_{what}_collective": "9" for what in ("enqueued", "completed")}}}
    )
    assert [one.done for one in found.issued_by_group["default group"].values()] == [True, False]


def test_retired_entry_of_nccl_is_not_done() -> None:
    found = parse({"entries": [entry(4, done=False, retired=True)], "pg_status": {"0": None, "1": {}}})
    assert [one.done for one in found.issued_by_group["default group"].values()] == [False]


@pytest.mark.parametrize(
    "data", [{}, {"version": "2.10"}, {"entries": 7}, {"entries": [7, {}, {"collective_seq_id": "x"}]}]
)
def test_parse_without_recording(data: dict[str, Any]) -> None:
    found = parse(data)
    assert found is None or not found.issued_by_group


# --- the event log ----------------------------------------------------------------------------------------------------


def test_run_is_the_last_one_that_had_the_round_in_time() -> None:
    log = [
        json.loads(raw_line(kind, wall, number, **({"outcome": "failed"} if kind == "job_ended" else values)))
        for kind, wall, number, values in (
            ("round_published", 1000.0, 1, {}),
            ("group_started", 1001.0, 1, {"ranks": [0, 1]}),
            ("round_published", 1100.0, 2, {}),
            ("group_started", 1101.0, 2, {"ranks": [2]}),
            ("job_ended", 1200.0, 2, {}),
            ("round_published", 2000.0, 1, {}),
            ("job_ended", 2100.0, 1, {}),
        )
    ]

    def times(round: int, at: float) -> list[float]:
        return [line.wall for line in RunLog.run_with_round(log, round, at).lines]

    first = [1000.0, 1001.0, 1100.0, 1101.0, 1200.0]
    assert times(2, 0) == times(1, 1150.0) == first
    assert times(1, 0) == times(1, 2050.0) == [2000.0, 2100.0]
    assert times(9, 0) == []
    assert set(RunLog.run_with_round(log, 2, 0).node_by_rank()) == {2}


# --- words ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("functions", "what"),
    [
        (["pipe_read"], "pipe"),
        (["anon_pipe_read"], "pipe"),
        (["wait_for_partner"], "FIFO"),
        (["rpc_wait_bit_killable"], "NFS"),
        (["folio_wait_bit_common", "[<0>] nfs_wait_on_request+0x4c/0x70 [nfs]"], "NFS"),
        (["folio_wait_bit_common", "[<0>] ext4_sync_file+0x1a"], "disk"),
        (["request_wait_answer"], "FUSE"),
        (["poll_schedule_timeout.constprop.0"], "files or sockets"),
        (["futex_wait_queue"], "lock"),
        (["__do_wait"], "child process"),
        (["uvm_gpu_replayable_faults"], "NVIDIA"),
        (["do_something_new"], ""),
        ([""], ""),
    ],
)
def test_kernel_functions_in_words(functions: list[str], what: str) -> None:
    found = phrases.kernel_wait_target(functions)
    assert what in found
    assert bool(what) == bool(found)


def test_remarks_on_uninterruptible_wait() -> None:
    """Even of a rank that is not blamed."""
    rank = RankFacts(3, state="D", wchan="rpc_wait_bit_killable", call="read of /data/shard-7")
    assert phrases.remarks(rank) == (
        "blocked in the kernel (state D): SIGKILL may not end it before that is over",
        "in the kernel, waiting for an NFS server (read of /data/shard-7, rpc_wait_bit_killable)",
    )


def test_holder_of_the_gil_is_named() -> None:
    (remark,) = phrases.remarks(RankFacts(1, culprit=True, state="S", processes=STACKS))
    assert remark == "thread 'loader' holds Python's lock (GIL), in read (…/src/data.py:7)"


def test_faulty_gpu_is_marked(tmp_path: Path) -> None:
    evidence = tmp_path / "round-1" / "evidence"
    evidence.mkdir(parents=True)
    sick = {"index": 0, "name": "H200", "utilization_percent": 100, "ecc_uncorrected": 2, "last_xid": "79: fallen off"}
    well = {"index": 1, "name": "H200", "utilization_percent": 0, "ecc_uncorrected": 0, "remap_pending": 0}
    for node, gpus, troubles in (("node-a", (sick, well), ()), ("node-b", (), ("NVML: Driver Not Loaded",))):
        record = NodeEvidence(1, node, "", 1.0, (), gpus, troubles)
        (evidence / record.file_name).write_bytes(record.to_json())
    found = load.explain(find_folders(tmp_path)[0])
    assert found.troubles == ("node-b: NVML: Driver Not Loaded",)
    told = page(Explanation(1, "hang", "here", "it hung", gpus=found.gpus))
    assert "\n> node-a GPU 0 (H200): ecc_uncorrected 2, last_xid 79: fallen off, busy 100 %\n" in told
    assert "\n  node-a GPU 1 (H200): busy 0 %\n" in told
