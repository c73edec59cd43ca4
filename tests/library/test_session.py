"""A session's decisions: all ranks stop and save at the same step, and errors are raised on every rank."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from elasticd.checkpointing.storage.lineage import lineage
from elasticd.heartbeat.record import STOP, Phase, StepSource
from tests.library import checkpoints
from tests.library.checkpoints import verified_lineage

ENDLESS = {"steps": 10**9, "sleep": 0.002}


def stepped(job: Any, step: int) -> Callable[[], bool]:
    return lambda: all(rank.read_heartbeat().step >= step for rank in job.ranks)


def test_plain_python_is_a_group_of_one(scripts: Path, environment: dict[str, str]) -> None:
    command = [sys.executable, str(scripts / "plain.py"), "5"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    seen = json.loads(done.stdout)
    assert (seen["rank"], seen["world_size"], seen["round"], seen["restarts"], seen["steps"]) == (0, 1, 0, 0, 5)
    assert seen["left_group"]
    assert done.stderr == ""


def test_ranks_write_heartbeats_and_destroy_their_group(start: Any) -> None:
    job = start("plain.py", "7", round=4, TORCHELASTIC_RESTART_COUNT="2")
    for number, seen in enumerate(job.results()):
        assert (seen["rank"], seen["local_rank"], seen["world_size"]) == (number, number, 2)
        assert (seen["round"], seen["restarts"], seen["left_group"]) == (4, 2, True)
    for rank in job.ranks:
        beat = rank.read_heartbeat()
        assert (beat.step, beat.source, beat.phase) == (7, StepSource.SESSION, Phase.STEP)


def test_later_session_where_rank_0_serves_the_store(start: Any, tmp_path: Path) -> None:
    """The others may come to the next session while the store of the last one is there."""
    job = start("folds.py", [[str(tmp_path / name), 2] for name in "abc"])
    assert [seen["resumed"] for seen in job.results()] == [[0, 0, 0]] * 2


def test_later_session_frees_what_was_attached_to_one_that_is_dropped(start: Any, tmp_path: Path) -> None:
    """Else the models of several folds were in a device's memory at once."""
    job = start("dropped.py", *(str(tmp_path / name) for name in "abc"))
    assert [seen["alive"] for seen in job.results()] == [[0, 0, 0]] * 2


def test_session_is_source_before_first_step(start: Any) -> None:
    job = start("plain.py", "0")
    job.results()
    assert [(each.step, each.source) for each in (rank.read_heartbeat() for rank in job.ranks)] == [
        (0, StepSource.SESSION)
    ] * 2


def test_stop_request_stops_all_ranks_at_one_step(start: Any, tmp_path: Path, wait_for: Any) -> None:
    """The agent's request to rank 0 stops all ranks at one step, after a save."""
    job = start("toy.py", {**ENDLESS, "directory": str(tmp_path / "shared"), "every": 10**6})
    wait_for(stepped(job, 20), "20 steps")
    job.ranks[0].request(STOP)
    first, second = job.results()
    assert first["stopped"]
    assert second["stopped"]
    assert first["steps"] == second["steps"]
    (note,) = job.ranks[0].read_events()
    assert (note.kind, note.step, note.round) == ("checkpoint_saved", first["steps"], 1)
    assert "the agent requested a stop" in note.reason
    assert note.extra["path"] == str(tmp_path / "shared" / f"r1-s{first['steps']}")
    assert note.extra["bytes"] == (Path(note.extra["path"]) / "state.pt").stat().st_size


def test_sigterm_without_agent_stops_at_one_step(start: Any, tmp_path: Path, wait_for: Any) -> None:
    # Without close() rank 0 leaves at once, and the store that it serves goes with it.
    options = {**ENDLESS, "directory": str(tmp_path / "shared"), "every": 20, "restore": False, "close": False}
    job = start("toy.py", options, ELASTICD_HEARTBEAT="")
    wait_for(lambda: list(tmp_path.glob("shared/r1-s*")), "20 steps")
    for rank in job.ranks:
        rank.kill(signal.SIGTERM)
    first, second = job.results()
    assert first["stopped"]
    assert first["steps"] == second["steps"]


def test_sigterm_under_agent_is_left_to_agent(start: Any, wait_for: Any) -> None:
    """Batch systems signal every process of a job, the agent too; and may mean one node of several."""
    job = start("toy.py", {**ENDLESS, "every": None, "restore": False})
    wait_for(stepped(job, 20), "20 steps")
    for rank in job.ranks:
        rank.kill(signal.SIGTERM)
    beyond = job.ranks[0].read_heartbeat().step + 50
    wait_for(stepped(job, beyond), "steps after it")
    job.ranks[0].request(STOP)
    first, second = job.results()
    assert first["steps"] == second["steps"] >= beyond


def test_checkpoints_by_time_follow_rank_0(start: Any, tmp_path: Path) -> None:
    options = {"steps": 150, "sleep": 0.004, "every": "100ms", "directory": str(tmp_path / "shared")}
    job = start("toy.py", options)
    job.results()
    saved = [note for note in job.ranks[0].read_events() if note.kind == "checkpoint_saved"]
    took = saved[-1].mono - saved[0].mono + saved[0].extra["seconds"]
    assert 2 <= len(saved) <= took / 0.1 + 2
    assert "every 0.1 s" in saved[0].reason
    content = checkpoints.load(lineage(tmp_path / "shared")[0][0])
    assert len(content["elasticd"]["rng"]) == 2


def test_full_disk_is_reported_and_retried(start: Any, tmp_path: Path) -> None:
    options = {"directory": str(tmp_path / "shared"), "full": [4, 10]}
    job = start("toy.py", options)
    job.results()
    events = job.ranks[0].read_events()
    assert [(event.kind.removeprefix("checkpoint_"), event.step) for event in events] == [
        *(("saved", 3), ("failed", 6), ("failed", 9), ("saved", 12)),
    ]
    assert (
        events[1].reason == "checkpoint of step 6 failed ([Errno 27] File too large); it is tried again every 3 steps"
    )
    assert events[1].reason in job.ranks[0].errors()
    entries, _ = verified_lineage(tmp_path / "shared")
    assert [entry.manifest.step for entry in entries] == [12, 3]


def test_unwritable_directory_is_reported(start: Any, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    job = start("toy.py", {"directory": str(tmp_path / "file" / "shared"), "restore": False, "save": True})
    assert [each["steps"] for each in job.results()] == [12, 12]
    assert job.ranks[0].kinds() == ["message", *["checkpoint_failed"] * 5]
    assert "Not a directory" in job.ranks[0].read_events()[1].reason


def test_unloadable_state_is_refused_on_every_rank(start: Any, tmp_path: Path) -> None:
    job = start("toy.py", {"directory": str(tmp_path / "shared"), "poison": 0})
    assert job.codes() == [1, 1]
    for rank in job.ranks:
        assert "CheckpointRefused" in rank.errors()
        assert "poison" in rank.errors()
        assert rank.read_heartbeat().step == 3
    assert lineage(tmp_path / "shared") == ([], [])


def test_state_that_becomes_unloadable_ends_no_training(start: Any, tmp_path: Path) -> None:
    """Such as a metric that is a numpy number after the first evaluation."""
    job = start("toy.py", {"directory": str(tmp_path / "shared"), "poison": 5, "save": True})
    assert [each["steps"] for each in job.results()] == [12, 12]
    assert job.ranks[0].kinds() == ["checkpoint_saved", *["checkpoint_failed"] * 4]
    assert "checkpoint of step 6 failed (poison.secret.lambda is " in job.ranks[0].errors()
    assert [entry.manifest.step for entry in verified_lineage(tmp_path / "shared")[0]] == [3]


def test_directory_of_other_run_is_refused_on_every_rank(start: Any, tmp_path: Path, wait_for: Any) -> None:
    directory = str(tmp_path / "shared")
    holder = start("toy.py", {**ENDLESS, "directory": directory}, world_size=1)
    wait_for(stepped(holder, 1), "the holder's first step")
    other = start("toy.py", {"directory": directory}, ELASTICD_RUN="run-2")
    assert other.codes() == [1, 1]
    for rank in other.ranks:
        assert "DirectoryInUse" in rank.errors()
        assert "run-1" in rank.errors()
    successor = start("toy.py", {"directory": directory}, world_size=1, round=2)
    assert successor.codes() == [0]


def test_script_exception_passes_through(start: Any, tmp_path: Path) -> None:
    job = start("toy.py", {"directory": str(tmp_path / "shared"), "raise": [1, 5]})
    assert job.codes() == [1, 1]
    assert job.ranks[1].errors().endswith("RuntimeError: the script's own mistake\n")


def test_missing_decision_raises_with_status_of_rank_0(start: Any) -> None:
    job = start("late.py")
    late, waiting = job.results()
    assert late["steps"] == 0
    assert waiting["error"].startswith("rank 1 waited 2.5 s for rank 0: the decision at step 1. ")
    assert re.search(
        r"Last known status: rank 0 \(step 0, phase eval(?: for \d s)?, reported [^)]*\)$", waiting["error"]
    )
    assert waiting["seconds"] < 10
    assert job.ranks[1].errors().count("timed out after") <= 1, "torch says so for each wait that runs out"


def test_lost_store_raises_torch_error_at_once(start: Any) -> None:
    job = start("gone.py")
    assert job.codes() == [0, 0]
    seen = job.ranks[1].result()
    assert seen["error"] in ("DistNetworkError", "DistStoreError")
    assert seen["seconds"] < 5


@pytest.mark.parametrize(
    "case",
    ["defaults", "own handler", "fork", "twice", "twice at once", "twice under a launcher", "before the first step"],
)
def test_sigterm_handler_only_over_default_action(start: Any, case: str) -> None:
    job = start("sigterm.py", case, world_size=1, ELASTICD_HEARTBEAT="")
    expected = {"twice": -signal.SIGTERM, "before the first step": -signal.SIGTERM}.get(case, 0)
    assert job.codes() == [expected], job.ranks[0].errors()


def test_misuse_raises_usage_error_with_fix(start: Any) -> None:
    (said,) = start("mistakes.py", world_size=1).results()
    assert "--checkpoint-dir" in said["checkpoint without a directory"]
    assert "--checkpoint-dir" in said["restore without a directory"]
    assert "--checkpoint-dir" in said["save without a directory"]
    assert "nothing is attached" in said["restore without attach"]
    assert "int has no state_dict() and no load_state_dict" in said["attach a number"]
    assert "what is the same at each start, such as settings, needs no checkpoint" in said["attach settings"]
    assert "elasticd's own" in said["attach the reserved name"]
    assert "that name is taken" in said["attach twice"]
    assert "run(None): give the function itself" in said["run of a result"]
    assert "what a generator or coroutine function returns has not trained yet" in said["run of a generator"]
    assert "'warmup'" in said["unknown phase"]
    for every in ("0", "-3", "True", "'soon'", "'0s'", "1.5"):
        assert f"every={every}" in said[f"every {every}"]
    for timeout in ("0", "-1", "nan", "inf", "True", "'30s'", "datetime.timedelta(0)"):
        assert f"barrier(timeout=...) is {timeout}: give seconds" in said[f"barrier {timeout}"]
    assert "checkpoint(barrier=...) is 0" in said["no time"]
    assert "barrier(3): the name must be a string" in said["no name"]
    assert "after close()" in said["barrier after close"]
    assert "session.step() after close(): no rank saves" in said["step after close"]
    assert "keep at least 1" in said["keep nothing"]
    assert "mistakes.py is a file; give a directory" in said["a file"]
    assert "attach(per_rank=Linear(in_features=1" in said["one object for each rank"]
    assert "already uses" in said["another directory"]
    assert "which has restored what was attached before" in said["restore inside run"]
    assert "before the first step" in said["restore after a step"]
    assert "init(decision_timeout=...) is 0: give seconds" in said["no decision time"]
    assert "loaded step 1, which an earlier session of this process has trained" in said["second session"]


def test_step_that_a_scaler_has_skipped_can_be_saved(start: Any, tmp_path: Path) -> None:
    """Gradients of a step that is over are no part of the next one: there may be none."""
    job = start("scaled.py", str(tmp_path / "checkpoints"), world_size=1)
    assert job.results() == [{"saved": True, "step": 3}]
    assert "inside step" not in job.ranks[0].errors()
