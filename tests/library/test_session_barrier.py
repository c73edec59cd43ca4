"""`session.barrier` between real ranks: it releases all, or names the missing ones on every rank."""

from __future__ import annotations

import re
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from elasticd.heartbeat.record import Phase
from tests.library.conftest import free_port

NEVER = {"await": "never"}
MACHINE_S = 20.0  # what a busy machine may add; without the barrier's own deadline it is for ever
AGE = r"reported [^)]*"


@pytest.fixture
def meet(start: Any, tmp_path: Path) -> Any:
    """Start ranks: meet({"0": [call, …]}, world_size=…); see scripts/barrier.py."""

    def start_ranks(calls: dict[str, Any], world_size: int = 2, **more: Any) -> Any:
        env = {name: more.pop(name) for name in list(more) if name.isupper()}
        return start("barrier.py", {"calls": calls, **more}, world_size=world_size, FOLDER=str(tmp_path), **env)

    return start_ranks


def waits_at(rank: Any, name: str) -> Callable[[], bool]:
    def look() -> bool:
        beat = rank.read_heartbeat()
        return bool(beat.phase == Phase.BARRIER and beat.barrier == name)

    return look


def freeze(rank: Any, wait_for: Any) -> None:
    stat = Path("/proc", str(rank.pid), "stat")
    rank.kill(signal.SIGSTOP)
    wait_for(lambda: stat.read_text().rpartition(")")[2].split()[0] == "T", "a stopped process")


def barrier_error(job: Any, rank: int, wait_for: Any) -> list[dict[str, Any]]:
    """What the calls of this rank came to; the other ranks may go on for ever."""
    wait_for((job.ranks[rank].folder / "code").exists, f"the end of rank {rank}")
    calls: list[dict[str, Any]] = job.ranks[rank].result()["calls"]
    return calls


def test_last_rank_releases_barrier(meet: Any, tmp_path: Path, wait_for: Any) -> None:
    job = meet({"*": [{"name": "epoch"}], "2": [{"name": "epoch", "await": "go"}]}, world_size=4)
    for rank in (0, 1, 3):
        wait_for(waits_at(job.ranks[rank], "epoch"), "the heartbeat to show where it waits")
    (tmp_path / "go").touch()
    for seen in job.results():
        assert "error" not in seen["calls"][0]
    assert [rank.read_heartbeat().phase for rank in job.ranks] == [Phase.STARTING] * 4


def test_barrier_names_are_free_and_reusable(meet: Any) -> None:
    names = ["", "a/b", "ä ☃\n", "x" * 10_000, "epoch", "epoch"]
    job = meet({"*": [{"name": name, "times": 30, "timeout": 30} for name in names]}, world_size=3)
    for seen in job.results():
        assert [each.get("error") for each in seen["calls"]] == [None] * len(names)


def test_missing_rank_is_named_on_every_rank(meet: Any) -> None:
    wait = {"steps": 17, "name": "epoch", "timeout": 6}
    job = meet({"*": [wait], "2": [{"steps": 17, "phase": "eval", "await": "done.0"}]}, world_size=3)
    first, second = (seen["calls"][0] for seen in job.results()[:2])
    told = rf"barrier 'epoch': 1 of 3 ranks is missing after 6 s: rank 2 \(step 17, phase eval(?: for \d s)?, {AGE}\)"
    assert re.fullmatch(told, first["error"])
    assert second["error"] == first["error"]
    for said in (first, second):
        assert (said["name"], said["missing"]) == ("epoch", [2])
        assert 5 < said["waited"] <= said["seconds"] < 40


def test_stopped_rank_is_named_with_age_of_status(meet: Any, tmp_path: Path, wait_for: Any) -> None:
    wait = {"steps": 5, "name": "there", "timeout": 6}
    job = meet({"0": [wait], "1": [{"steps": 5, "touch": "stepped"}, NEVER]}, together=[0], close=False)
    wait_for((tmp_path / "stepped").exists, "5 steps")
    freeze(job.ranks[1], wait_for)
    (said,) = barrier_error(job, 0, wait_for)
    assert said["missing"] == [1]
    assert re.fullmatch(r".*: rank 1 \(step \d, phase \w+(?: for \d s)?, reported .* s ago\)", said["error"])


def test_late_rank_gets_error_at_once(meet: Any) -> None:
    calls = {"0": [{"name": "a", "timeout": 6}], "1": [{"await": "done.0", "name": "a", "timeout": 60}]}
    early, late = (seen["calls"][0] for seen in meet(calls, close=False).results())
    assert early.get("missing") == late.get("missing") == [1], (early, late)
    assert late["error"] == "rank 1 came too late to " + early["error"]
    assert late["seconds"] < 20


def test_barrier_works_after_a_missed_one(meet: Any) -> None:
    again = {"name": "again", "times": 3, "timeout": 30}
    job = meet({"0": [{"name": "a", "timeout": 6}, {"touch": "x", **again}], "1": [{"await": "x", "name": "a"}, again]})
    for seen in job.results():
        assert seen["calls"][0]["missing"] == [1]
        assert "error" not in seen["calls"][1]


def test_shortest_timeout_ends_barrier_for_all(meet: Any, wait_for: Any) -> None:
    calls = {"0": [{"name": "a", "timeout": 600}], "1": [{"sleep": 0.1, "name": "a", "timeout": 6}], "2": [NEVER]}
    job = meet(calls, world_size=3, together=[0, 1], close=False)
    first, second = (barrier_error(job, rank, wait_for)[0] for rank in (0, 1))
    assert first["error"] == second["error"]
    assert first["missing"] == second["missing"] == [2]
    assert " said at some time before" not in first["error"], "rank 1 has looked twice"


def test_another_rank_ends_barrier_of_stopped_first_rank(meet: Any, tmp_path: Path, wait_for: Any) -> None:
    wait = {"name": "a", "timeout": 6}
    job = meet({"*": [{"await": "go"}, wait], "1": [wait], "3": [NEVER]}, world_size=4, close=False, together=[0, 2])
    wait_for(waits_at(job.ranks[1], "a"), "rank 1 at the barrier")
    freeze(job.ranks[1], wait_for)
    (tmp_path / "go").touch()
    both = [barrier_error(job, rank, wait_for)[1] for rank in (0, 2)]
    told = [each for each in both if "has not answered" not in each["error"]]  # as a busy machine's store may not
    assert told and all(each["error"] == told[0]["error"] and 3 in each["missing"] for each in told)


def test_different_names_raise_on_all_ranks(meet: Any) -> None:
    job = meet({"*": [{"name": "train", "timeout": 600}], "1": [{"name": "eval", "timeout": 600}]}, world_size=3)
    for seen in job.results():
        (said,) = seen["calls"]
        assert said["type"] == "UsageError"
        assert re.match(r"barrier '\w+' on rank \d is barrier '\w+' on rank \d: all ranks must call", said["error"])
        assert said["seconds"] < 20


def test_rank_that_raised_before_is_missing(meet: Any, wait_for: Any) -> None:
    calls = {"*": [{"name": "epoch", "timeout": 6}], "1": [{"raise": "its own mistake"}]}
    job = meet(calls, world_size=3, together=[0, 2], close=False)
    for rank in (0, 2):
        (said,) = barrier_error(job, rank, wait_for)
        assert said["missing"] == [1]
    assert job.codes()[1] == 1
    assert "its own mistake" in job.ranks[1].errors()


def test_closed_session_is_reported_as_exit(meet: Any) -> None:
    job = meet({"0": [{"await": "closed.1"}, {"name": "a", "timeout": 30}], "1": []}, close=True)
    (_, said) = job.results()[0]["calls"]
    assert "all ranks must. Rank 1 has closed its session" in said["error"]


def test_interrupted_rank_ends_barrier(start: Any, tmp_path: Path, wait_for: Any) -> None:
    job = start("interrupted.py", world_size=3, FOLDER=str(tmp_path))
    for rank in (0, 1):
        wait_for(waits_at(job.ranks[rank], "epoch"), f"rank {rank} at the barrier")
    job.ranks[1].kill(signal.SIGINT)
    first, interrupted, late = job.results()
    assert interrupted["error"] == "KeyboardInterrupt"
    assert first["error"] == "barrier 'epoch': rank 1 has left it: KeyboardInterrupt was raised in it"
    assert late["error"] == first["error"]
    assert {each["phase"] for each in (first, interrupted, late)} == {"STARTING"}
    assert max(each["seconds"] for each in (first, interrupted, late)) < 30


def silence(said: dict[str, Any], served: str) -> None:
    """A barrier of 0.5 s that ended because its store did not answer."""
    told = rf"barrier 'epoch': the round's store \({served}\) has not answered since this rank came \d+\.\d s ago"
    assert re.fullmatch(told, said["error"])
    assert said["missing"] == []
    assert 0.5 <= said["waited"] <= said["seconds"] < 0.5 + 2 + MACHINE_S


def test_frozen_store_times_out(meet: Any, start: Any, tmp_path: Path, wait_for: Any) -> None:
    """A frozen store does not block a rank, and a rank that timed out on it releases nobody later."""
    port = str(free_port())
    store = start("store.py", port, str(tmp_path / "serves"), world_size=1).ranks[0]
    wait_for((tmp_path / "serves").exists, "the store")
    first = [{"touch": "there", "await": "thawed"}, {"name": "epoch", "timeout": 60}]
    second = [{"touch": "here", "await": "frozen"}, {"name": "epoch", "timeout": 0.5}]
    job = meet({"0": first, "1": second}, MASTER_PORT=port, TORCHELASTIC_USE_AGENT_STORE="True")
    wait_for(lambda: (tmp_path / "there").exists() and (tmp_path / "here").exists(), "the session on both ranks")
    freeze(store, wait_for)
    (tmp_path / "frozen").touch()
    wait_for((tmp_path / "done.1").exists, "the end of rank 1's barrier")
    store.kill(signal.SIGCONT)
    (tmp_path / "thawed").touch()
    (_, early), (_, late) = (seen["calls"] for seen in job.results())
    silence(late, "served by a process of its own on rank 0's node")
    assert early["error"] == "barrier 'epoch': rank 1 has left it: the store answered too late"
    assert early["missing"] == [1]


def test_stopped_rank_0_that_serves_store_times_out(meet: Any, tmp_path: Path, wait_for: Any) -> None:
    calls = [{"touch": "here", "await": "frozen"}, {"name": "epoch", "timeout": 0.5}]
    job = meet({"0": [{"touch": "there"}, NEVER], "1": calls}, close=False, together=[1])
    wait_for(lambda: (tmp_path / "there").exists() and (tmp_path / "here").exists(), "the session on both ranks")
    freeze(job.ranks[0], wait_for)
    (tmp_path / "frozen").touch()
    silence(barrier_error(job, 1, wait_for)[1], "served by rank 0's process")


def test_lost_store_raises_torch_error(meet: Any, wait_for: Any, tmp_path: Path) -> None:
    job = meet({"0": [NEVER], "1": [{"name": "epoch", "timeout": 600}]}, close=False, together=[1])
    wait_for(waits_at(job.ranks[1], "epoch"), "rank 1 at the barrier")
    job.ranks[0].kill(signal.SIGKILL)
    (said,) = barrier_error(job, 1, wait_for)
    assert said["type"] in ("DistNetworkError", "DistStoreError")
    assert said["seconds"] < 20


def test_default_timeout_is_decision_timeout(meet: Any) -> None:
    job = meet({"0": [{"name": "a"}], "1": [{"await": "done.0"}]}, decision_timeout=6)
    (said,) = job.results()[0]["calls"]
    assert " after 6 s: " in said["error"]


def test_barrier_over_file_store(meet: Any, tmp_path: Path) -> None:
    late = [{"name": "a", "times": 10}, {"await": "done.0"}]
    job = meet(
        {"0": [{"name": "a", "times": 10}, {"name": "b", "timeout": 6}], "1": late}, file=str(tmp_path / "store")
    )
    passed, missed = job.results()[0]["calls"]
    assert "error" not in passed
    assert missed["missing"] == [1]


def test_group_of_one_passes(meet: Any) -> None:
    (seen,) = meet({"*": [{"name": "a", "times": 1000}]}, world_size=1).results()
    assert seen["calls"][0]["seconds"] < 30
