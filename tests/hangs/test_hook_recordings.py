"""From torch's recorders to a proof and a comparison: of ProcessGroupNCCL, of nccl2 by its hook, of unknown groups."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from elasticd.heartbeat.thread import write_flight_recording
from elasticd_agent.hangs import recordings
from elasticd_agent.hangs.explain.flight import compare_groups
from elasticd_agent.hangs.proofs import prove
from elasticd_agent.hangs.rank import RankState
from elasticd_agent.model.reports import RankReport
from tests.library.fake_recorders import FakeTorch, Kind

ALL = (0, 1, 2)
RECORDED: tuple[Kind, ...] = ("nccl", "nccl2")
WAITS = RankReport(0, 0, "step", 9, 20, idle_s=6, alive_s=0.1, state="S", where="collective", alone=True)
WAITS = replace(WAITS, function="all_reduce", unsent=0, window_s=3.0)


def dump(made: Callable[[FakeTorch], object]) -> recordings.Recording:
    """What one rank's heartbeat thread writes, as the agent reads it."""
    torch = FakeTorch()
    made(torch)
    with pytest.MonkeyPatch.context() as patch, TemporaryDirectory() as folder:
        torch.install(patch)
        write_flight_recording(f"{folder}/flight", "0", str(len(ALL)))
        content = Path(folder, "flight").read_bytes()
    found = recordings.parse(json.loads(content))
    assert found is not None
    return found


def proven(recorded: Sequence[recordings.Recording], function: str = "all_reduce") -> list[int] | None:
    ranks = [
        RankState("a", replace(WAITS, rank=n, slot=n, function=function, groups=one.tails()))
        for n, one in enumerate(recorded)
    ]
    found = prove(ranks, [], all_ranks_known=True)
    return None if found is None else [rank.report.rank for rank in found.culprits]


@pytest.mark.parametrize("kind", RECORDED)
def test_ranks_that_wait_in_another_group(kind: Kind) -> None:
    """They have skipped a collective of a smaller group: their next one is one of all ranks."""
    skipped = dump(lambda torch: (torch.group("0", ALL, kind).at(20, 19), torch.group("1", ALL, kind).at(4, 4)))
    waiting = dump(lambda torch: (torch.group("0", ALL, kind).at(19, 19), torch.group("1", ALL, kind).at(5, 4)))
    assert proven([skipped, waiting, skipped]) == [0, 2]
    groups = compare_groups({0: skipped.tails(), 1: waiting.tails(), 2: skipped.tails()})
    assert {one.group: one.missing for one in groups} == {"default group": (1,), "group 1": (0, 2)}


@pytest.mark.parametrize("kind", RECORDED)
def test_recordings_of_two_recorders_prove_nothing(kind: Kind) -> None:
    others = dump(lambda torch: torch.group("0", ALL, kind).at(1, 0))
    gloo = dump(lambda torch: torch.group("0", ALL, "gloo").at(5, 5))
    assert proven([others, others, gloo]) is None


def test_message_of_a_hook_completes_no_collective() -> None:
    """Its status has the numbers of all operations."""

    def made(torch: FakeTorch) -> None:
        group = torch.group("0", ALL, "nccl2").at(2, 2)
        group.issue(9, p2p=True)
        group.complete(9)
        group.at(4, 2)

    [found] = dump(made).tails()
    assert (found.last, found.pending, found.backend) == (4, 3, "nccl2")


def test_end_that_is_not_reported_is_no_wait() -> None:
    """All entries of such a hook are retired when they are issued: nothing says that one is pending."""
    found = dump(lambda torch: torch.group("0", ALL, "nccl2", reports_completion=False).at(4, 2))
    assert [(one.last, one.pending, one.unrecorded) for one in found.tails()] == [(0, 0, True), (4, 0, False)]
    assert proven([found, found]) is None


@pytest.mark.parametrize("function", ["recv", "all_reduce"])
@pytest.mark.parametrize("kind", ["nccl2 of 2.14", "nccl2"])
def test_nothing_is_proven_of_a_rank_with_an_unknown_group(kind: Kind, function: str) -> None:
    """Ranks that receive through nccl2 in a group `cpu:gloo,cuda:nccl`, beside gloo's groups, were "proven" hung."""

    def made(torch: FakeTorch, count: int) -> None:
        torch.group("0", ALL, kind, reports_completion=False, _device_types=("cpu", "cuda"))
        torch.group("1", ALL, "gloo").at(count, min(count, 5))

    waiting, behind = (dump(lambda torch, count=count: made(torch, count)) for count in (6, 5))
    assert proven([waiting, behind], function) is None
    assert [one.backend for one in waiting.tails() if one.unrecorded] == ["nccl2"]


def test_gloo_alone_is_proven_as_before() -> None:
    received = dump(lambda torch: torch.group("1", ALL, "gloo").at(5, 5))
    assert proven([received, received], "recv") == []


def test_recording_of_torch_itself_has_no_name_of_the_recorder() -> None:
    """A hook writes one at an abort, which is a pickle: entries have the backend's name, and NCCL's a version."""
    torch = FakeTorch()
    torch.group("0", ALL, "nccl2").at(2, 1)
    for recorder, nccl in (("nccl2", True), ("gloo", False)):
        found = recordings.parse(json.loads(torch.dump(recorder, True, False)))
        assert found.not_by_gloo is nccl
