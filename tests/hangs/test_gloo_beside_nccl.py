"""Groups of gloo beside NCCL's: a rank that may wait in gloo is judged by gloo's recorder as well, or by none."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import pytest

from elasticd.heartbeat.recorders import GroupCountReader
from elasticd.heartbeat.thread import write_flight_recording
from elasticd_agent.hangs import recordings
from elasticd_agent.hangs.verdict import Hang, judge
from elasticd_agent.model.job import Policy
from elasticd_agent.model.reports import HangReport, RankReport
from tests.library.fake_recorders import FakeTorch, Kind

ALL, PAIR = (0, 1, 2), (0, 1)
WAITS = RankReport(0, 0, "step", 9, 20, idle_s=6, alive_s=0.1, state="S", window_s=3.0, moved_s=6, alone=True)
Layout = Literal["one group", "two groups"]
"""`cpu:gloo,cuda:nccl`, or a group of each."""
EACH = [
    pytest.mark.parametrize("kind", ["nccl", "nccl2"]),
    pytest.mark.parametrize("layout", ["one group", "two groups"]),
    pytest.mark.parametrize("recorded", [True, False], ids=["", "no recorder of gloo"]),
]


@dataclass(frozen=True)
class Rank:
    """What it has (issued, finished): in NCCL's group of all, in that of ranks 0 and 1, by gloo."""

    world: tuple[int, int]
    pair: tuple[int, int] | None
    gloo: tuple[int, int]
    where: str
    function: str = ""

    def report(
        self, monkeypatch: pytest.MonkeyPatch, folder: Path, kind: Kind, layout: Layout, recorded: bool
    ) -> RankReport:
        """`recorded`: torch before 2.8 has no recorder of gloo."""
        torch = FakeTorch()
        devices = ("cpu", "cuda") if layout == "one group" else ("cuda",)
        world = torch.group("0", ALL, kind, _device_types=devices).at(*self.world)
        if self.pair is not None:
            torch.group("1", PAIR, kind).at(*self.pair)
        (world.gloo or torch.group("2", ALL, "gloo")).at(*self.gloo)
        torch.install(monkeypatch, records_gloo=recorded)
        write_flight_recording(f"{folder}/flight", "0", str(len(ALL)))
        found = recordings.parse(json.loads(Path(folder, "flight").read_bytes()))
        facts: dict[str, Any] = {"where": self.where, "function": self.function, "groups": found.tails()}
        return replace(WAITS, nccl_groups=GroupCountReader().read(8), device_s=6.0, **facts)


IN_NCCL = Rank((9, 8), (2, 2), (4, 4), "device", "train.py:7 item")
IN_GLOO = Rank((8, 8), (3, 2), (5, 4), "collective", "all_reduce")
"""It has begun one of the pair before, which rank 0 has not: that ends once rank 0 resumes."""
READS = Rank((8, 8), None, (4, 4), "elsewhere", "data.py:3 read")


def verdict(found: Sequence[RankReport]) -> Hang | None:
    ranks = tuple(replace(one, rank=number, slot=number) for number, one in enumerate(found))
    judged = judge([HangReport(1, "a", ranks, deadline_s=3.0, gathered=True, turn=1)], ["a"], Policy())
    return judged if isinstance(judged, Hang) else None


def parametrized(test: Any) -> Any:
    for mark in EACH:
        test = mark(test)
    return test


@parametrized
@pytest.mark.parametrize("begun", [8, 9])
@pytest.mark.parametrize("first", ["device", "collective"])
def test_rank_that_waits_in_gloo_for_a_healthy_one(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, kind: Kind, layout: Layout, recorded: bool, begun: int, first: str
) -> None:
    """Rank 0 is done with the broadcast by gloo in which rank 1 waits for rank 2; then rank 1 goes to rank 0."""
    cases = [replace(IN_NCCL, gloo=(5, 5), where=first, function="barrier"), IN_GLOO, replace(READS, world=(begun, 8))]
    assert verdict([one.report(monkeypatch, tmp_path, kind, layout, recorded) for one in cases]) is None


@parametrized
def test_slow_collective_of_gloo(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, kind: Kind, layout: Layout, recorded: bool
) -> None:
    """Ranks 1 and 2 exchange data by gloo, and rank 0 waits for them on its device."""
    sender = replace(IN_GLOO, pair=None)
    cases = [replace(IN_NCCL, pair=None, gloo=(5, 5)), sender, sender]
    found = [one.report(monkeypatch, tmp_path, kind, layout, recorded) for one in cases]
    assert verdict(found) is None
    later = [replace(one, idle_s=100, device_s=100, moved_s=100, sockets_s=99) for one in found]
    assert verdict([*later[:2], replace(later[2], sockets_s=0.4)]) is None, "it moves data"
    still = verdict(later)
    assert [one.rank for one in still.culprits] == [1, 2]


@parametrized
def test_dead_lock_of_gloo_and_nccl(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, kind: Kind, layout: Layout, recorded: bool
) -> None:
    """A proof where both recorders are known."""
    cases = [IN_NCCL, IN_GLOO, replace(IN_NCCL, pair=None)]
    found = verdict([one.report(monkeypatch, tmp_path, kind, layout, recorded) for one in cases])
    assert (found is not None) == recorded
    if found is not None:
        assert found.kills_group
        assert "rank 1 waits in all_reduce of 4 float (#5 of " in found.why
