"""A killed and resumed run ends where the uninterrupted one does; what a resume reports when it cannot."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from elasticd.checkpointing.storage.lineage import lineage
from elasticd.checkpointing.storage.manifest import MANIFEST, STATE, VERSION, Checksum, Manifest, read
from tests.library import checkpoints
from tests.library.checkpoints import verified_lineage


def steps_of(directory: Path) -> list[tuple[int, int]]:
    entries, _ = verified_lineage(directory)
    return [(entry.manifest.round, entry.manifest.step) for entry in entries]


@pytest.mark.parametrize("optimizer", ["adam", "sgd", "wrapped"])
def test_resumed_run_equals_uninterrupted_run(start: Any, tmp_path: Path, optimizer: str) -> None:
    whole = start("toy.py", {"optimizer": optimizer, "directory": str(tmp_path / "whole")})
    broken = start("toy.py", {"optimizer": optimizer, "directory": str(tmp_path / "broken"), "die": 8})
    assert -9 in broken.codes()
    assert 0 not in broken.codes()
    resumed = start("toy.py", {"optimizer": optimizer, "directory": str(tmp_path / "broken")}, round=2)
    before, after = whole.results(), resumed.results()
    for first, second in zip(before, after, strict=True):
        assert (first["resumed"], second["resumed"]) == (None, [1, 6, 2])
        assert {**first, "round": 2, "resumed": [1, 6, 2]} == second
    assert before[0]["draw"] != before[1]["draw"], "the ranks' streams differ, so each rank's own was restored"
    assert steps_of(tmp_path / "broken") == [(2, 12), (2, 9), (2, 6)]
    note = resumed.ranks[0].read_events()[0]
    assert (note.kind, note.step, note.extra["from_round"], note.extra["from_step"]) == ("resumed", 6, 1, 6)
    saved = [note for note in broken.ranks[0].read_events() if (note.kind, note.step) == ("checkpoint_saved", 6)]
    assert note.extra["saved_at"] < saved[0].wall
    assert resumed.ranks[0].kinds() == ["resumed", "checkpoint_saved", "checkpoint_saved"]
    assert resumed.ranks[1].kinds() == []


def test_mid_epoch_resume_with_own_generator_is_exact(start: Any, tmp_path: Path) -> None:
    """A resume in the middle of an epoch is bit-equal with a DataLoader that has its own generator."""
    whole = start("loader.py", str(tmp_path / "whole"), "0", world_size=1)
    assert start("loader.py", str(tmp_path / "broken"), "13", world_size=1).codes() == [9]
    resumed = start("loader.py", str(tmp_path / "broken"), "0", world_size=1, round=2)
    assert [{**each, "from": 10} for each in whole.results()] == resumed.results()
    assert lineage(tmp_path / "broken")[0][0].manifest.cursor is not None


def test_resume_with_other_world_size_notes_unused_state(start: Any, tmp_path: Path) -> None:
    directory = str(tmp_path / "shared")
    start("toy.py", {"directory": directory, "steps": 6}).results()
    (one,) = start("toy.py", {"directory": directory, "steps": 9}, world_size=1, round=2).results()
    assert one["resumed"] == [1, 6, 2]
    assert one["notes"] == ["saved by 2 ranks, now 1: the random state of rank 1 was not used"]
    job = start("toy.py", {"directory": directory, "steps": 12}, world_size=2, round=3)
    two = job.results()
    assert [each["resumed"] for each in two] == [[2, 9, 1]] * 2
    said = "saved by 1 rank, now 2: there is no random state for rank 1, which keeps its own"
    assert [each["notes"] for each in two] == [[said]] * 2
    assert said in job.ranks[0].read_events()[0].reason
    assert [each["steps"] for each in two] == [12, 12]


@pytest.mark.parametrize("whole", [6, None])
def test_restore_skips_damaged_checkpoints(start: Any, tmp_path: Path, whole: int | None) -> None:
    directory = tmp_path / "shared"
    start("toy.py", {"directory": str(directory), "steps": 9}, world_size=1).results()
    damaged = [9] if whole else [9, 6, 3]
    for step in damaged:
        path = directory / f"r1-s{step}" / "state.pt"
        content = bytearray(path.read_bytes())
        content[len(content) // 2] ^= 1
        path.write_bytes(content)
    job = start("toy.py", {"directory": str(directory)}, round=2)
    assert [each["resumed"] for each in job.results()] == [[1, whole, 1] if whole else None] * 2
    notes = job.ranks[0].read_events()
    for note, step in zip(notes, damaged, strict=False):
        assert (note.kind, note.extra["path"]) == ("checkpoint_skipped", str(directory / f"r1-s{step}"))
        assert "checksum" in note.reason
    said = f"no checkpoint in {directory} can be used, 3 skipped: training begins anew"
    assert (notes[len(damaged)].reason == said) == (whole is None)


@pytest.mark.parametrize(
    "why", ["manifest.json has version 2.1", "state.pt is undamaged, but this torch cannot load it"]
)
def test_undamaged_checkpoint_that_cannot_be_used_is_no_new_beginning(start: Any, tmp_path: Path, why: str) -> None:
    """Nor is one that belongs to another user, which root cannot test."""
    directory = tmp_path / "shared"
    start("toy.py", {"directory": str(directory), "steps": 3}, world_size=1).results()
    path = directory / "r1-s3"
    if "version" in why:
        (path / MANIFEST).write_text((path / MANIFEST).read_text().replace(f'"{VERSION}"', '"2.1"'))
    else:
        torch.save({"model": path}, path / STATE)  # of a class that torch does not load
        manifest, content, checksum = read(path), (path / STATE).read_bytes(), Checksum()
        checksum.update(content)
        assert isinstance(manifest, Manifest)
        (path / MANIFEST).write_bytes(replace(manifest, bytes=len(content), checksum=str(checksum)).to_json())
    job = start("toy.py", {"directory": str(directory)}, round=2)
    assert job.codes() == [1, 1]
    said = (
        f"no checkpoint in {directory} can be used, and training does not begin anew, as r1-s3 may be undamaged: {why}"
    )
    for who, rank in zip(("", "on rank 0: "), job.ranks, strict=True):
        assert f"CheckpointError: {who}{said}" in rank.errors()


def test_unshared_directory_is_reported_and_rank_0_sends(start: Any, tmp_path: Path) -> None:
    directory, elsewhere = str(tmp_path / "here"), str(tmp_path / "elsewhere")
    start("toy.py", {"directory": directory, "steps": 6}).results()
    nodes = [{"GROUP_RANK": "0"}, {"GROUP_RANK": "1"}]
    job = start("toy.py", {"directory": directory, "apart": elsewhere}, round=2, each_env=nodes, GROUP_WORLD_SIZE="2")
    uninterrupted = start("toy.py", {"directory": str(tmp_path / "whole")}, round=2)
    for first, second in zip(uninterrupted.results(), job.results(), strict=True):
        assert {**first, "resumed": [1, 6, 2]} == second
    (note,) = (note for note in job.ranks[0].read_events() if note.kind == "message")
    assert "rank 1 cannot read" in note.reason
    assert "shared" in note.reason


def test_rank_that_cannot_load_makes_every_rank_raise(start: Any, tmp_path: Path) -> None:
    directory = str(tmp_path / "shared")
    start("toy.py", {"directory": directory, "steps": 3, "wrap": "bare"}, world_size=1).results()
    job = start("toy.py", {"directory": directory, "wrap": "bare", "wider": 1}, round=2)
    assert job.codes() == [1, 1]
    assert "CheckpointError: r1-s3 could not be restored by every rank: rank 1: RuntimeError" in job.ranks[0].errors()
    assert "size mismatch for 2.weight" in job.ranks[1].errors()


def test_checkpoint_has_no_wrapper_names(start: Any, tmp_path: Path) -> None:
    digests = set()
    for number, wrap in enumerate(["inner", "bare", "compiled", "inner", "ddp"], start=1):
        options = {"directory": str(tmp_path / "shared"), "steps": 3, "wrap": wrap}
        (result,) = start("toy.py", options, world_size=1, round=number).results()
        assert result["resumed"] == (None if number == 1 else [number - 1, 3, 1])
        digests.add(result["digest"])
    assert len(digests) == 1
    entries, _ = lineage(tmp_path / "shared")
    assert not any("_orig_mod" in key or "module." in key for key in checkpoints.load(entries[0])["model"])


@pytest.mark.system
def test_each_start_without_agent_is_next_round(scripts: Path, environment: dict[str, str], tmp_path: Path) -> None:
    script = str(scripts / "toy.py")
    options = '{"directory": "%s", "steps": %d}'
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", script]
    first = run([*torchrun, options % (tmp_path / "shared", 6)], environment)
    assert [(each["steps"], each["round"], each["resumed"]) for each in first] == [(6, 0, None)] * 2
    second = run([sys.executable, script, options % (tmp_path / "shared", 9)], environment)
    assert [(each["steps"], each["round"], each["resumed"]) for each in second] == [(9, 0, [1, 6, 2])]
    assert steps_of(tmp_path / "shared") == [(2, 9), (2, 6), (1, 3)]


def run(command: list[str], env: dict[str, str]) -> list[dict[str, Any]]:
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_a_directory_goes_back_to_a_step_once(start: Any, tmp_path: Path) -> None:
    """Also in another run, as a requeue is; again once the mark is deleted; and not where nothing is left to go on."""
    directory = tmp_path / "shared"
    start("toy.py", {"directory": str(directory)}, world_size=1, ELASTICD_RUN="run-0").results()
    options = {"directory": str(directory), "back_to": 6}
    back = start("toy.py", {**options, "die": 11}, world_size=1, round=2)
    assert back.codes() == [-9]
    assert "newer checkpoints were set aside as r1-s12.aside, r1-s9.aside" in back.ranks[0].read_events()[0].reason
    requeued = start("toy.py", options, world_size=1, round=3, ELASTICD_RUN="run-2")
    assert requeued.results()[0]["resumed"] == [2, 9, 1], "what was trained since then stays"
    assert {path.name for path in directory.glob("*.aside")} == {"r1-s9.aside", "r1-s12.aside"}
    mark = directory / ".went-back-to-s6"
    assert f"rm {mark} to go again" in requeued.ranks[0].read_events()[0].reason
    mark.unlink()
    again = start("toy.py", options, world_size=1, round=4)
    assert again.results()[0]["resumed"][1] == 6
    for path in directory.glob("r*"):
        path.rename(tmp_path / path.name)
    refused = start("toy.py", options, world_size=1, round=5)
    assert refused.codes() == [1]
    assert "no checkpoint of that step" in refused.ranks[0].errors()


def test_going_back_to_a_step_that_is_not_there_is_refused(start: Any, tmp_path: Path) -> None:
    directory = str(tmp_path / "shared")
    start("toy.py", {"directory": directory}, ELASTICD_RUN="run-0").results()
    job = start("toy.py", {"directory": directory, "back_to": 7}, round=2)
    assert 0 not in job.codes()
    assert all("no checkpoint of that step; there are steps 6, 9, 12" in rank.errors() for rank in job.ranks)
    again = start("toy.py", {"directory": directory, "back_to": 7, "or_newest": True}, round=3)
    assert [result["resumed"] for result in again.results()] == [[1, 12, 2]] * 2, "what the first call left is not read"


def test_directory_of_later_rounds_is_refused_where_the_launcher_does_not_know_it(start: Any, tmp_path: Path) -> None:
    """A second job with the same directory, given by the script: its launcher has counted from 1 again."""
    options = {"directory": str(tmp_path / "shared"), "steps": 3}
    start("toy.py", options, world_size=1, round=3, ELASTICD_RUN="run-0").results()
    refused = start("toy.py", options, world_size=1, round=2)
    assert refused.codes() == [1]
    assert "has checkpoints of round 3, and this is round 2 of a launcher that does not" in refused.ranks[0].errors()


def test_optional_object_may_be_missing_in_a_checkpoint(start: Any, tmp_path: Path) -> None:
    directory = str(tmp_path / "shared")
    start("toy.py", {"directory": directory, "steps": 6}, world_size=1).results()
    refused = start("toy.py", {"directory": directory, "extra": "needed"}, world_size=1, round=2)
    assert refused.codes() != [0]
    assert "optional=True" in refused.ranks[0].errors()
    (found,) = start("toy.py", {"directory": directory, "extra": "optional"}, world_size=1, round=3).results()
    assert found["notes"] == ["the checkpoint holds nothing for extra, which is optional and stays as it is"]
    (found,) = start("toy.py", {"directory": directory, "extra": "needed"}, world_size=1, round=4).results()
    assert found["notes"] == [], "it was saved meanwhile"


def test_each_rank_gets_its_own_state_back(start: Any, tmp_path: Path) -> None:
    options = {"directory": str(tmp_path / "shared"), "counter": "per_rank"}
    assert [each["count"] for each in start("toy.py", {**options, "steps": 6}).results()] == [6, 12]
    assert [each["count"] for each in start("toy.py", options, round=2).results()] == [12, 24]


def test_state_of_each_rank_on_another_world_size_is_offered_or_refused(start: Any, tmp_path: Path) -> None:
    options = {"directory": str(tmp_path / "shared"), "counter": "per_rank"}
    start("toy.py", {**options, "steps": 6}).results()
    refused = start("toy.py", options, world_size=1, round=2)
    assert refused.codes() != [0]
    assert "counter was saved by 2 ranks, and now there are 1" in refused.ranks[0].errors()
    assert "load_state_dicts(states, rank, world_size)" in refused.ranks[0].errors()
    (one,) = start("toy.py", {**options, "counter": "per_rank with hook"}, world_size=1, round=3).results()
    assert one["count"] == 6 + 12 + 6
    (one,) = start("toy.py", {**options, "counter": None, "steps": 15}, world_size=1, round=4).results()
    assert one["notes"] == ["nothing is attached per rank as counter: that part of the checkpoint was not used"]


def test_state_of_a_rank_that_is_too_large_to_be_sent(start: Any, tmp_path: Path) -> None:
    """Refused at the first save on every rank; later the save fails, training continues."""
    options = {"directory": str(tmp_path / "shared"), "counter": "per_rank", "steps": 9}
    refused = start("toy.py", {**options, "large": 6})
    assert 0 not in refused.codes()
    why = "rank 1's state of counter has 9 MB; at most 8 MB of each rank are sent"
    assert all(why in rank.errors() for rank in refused.ranks)
    assert [each["steps"] for each in start("toy.py", {**options, "large": 12}).results()] == [9, 9]
    assert steps_of(tmp_path / "shared") == [(1, 3)]


@pytest.mark.parametrize("counter", ["rank 0", "rank 1"])
def test_state_of_each_rank_under_other_names_is_refused(start: Any, tmp_path: Path, counter: str) -> None:
    job = start("toy.py", {"directory": str(tmp_path / "shared"), "counter": counter})
    assert 0 not in job.codes()
    has = {
        "rank 0": "rank 0 has counter, and rank 1 has nothing",
        "rank 1": "rank 0 has nothing, and rank 1 has counter",
    }
    assert all(f"attach(per_rank=...): {has[counter]}; give the same" in rank.errors() for rank in job.ranks)


def test_object_that_differs_between_ranks_is_refused_at_the_first_save(start: Any, tmp_path: Path) -> None:
    job = start("toy.py", {"directory": str(tmp_path / "shared"), "counter": "everywhere"})
    assert 0 not in job.codes()
    for rank in job.ranks:
        assert "the state of counter on rank 1 differs from rank 0's" in rank.errors()
        assert "attach(per_rank={'counter': ...})" in rank.errors()


def test_object_attached_after_restore_is_refused_in_the_first_run_already(start: Any, tmp_path: Path) -> None:
    """Where it is first used later, that is a warning: there are steps to lose."""
    directory = str(tmp_path / "shared")
    job = start("forgotten.py", "attached_after_restore", directory, world_size=1)
    assert job.codes() == [1]
    assert "attach(ema=...) after restore(): attach everything before it" in job.ranks[0].errors()
    (seen,) = start("forgotten.py", "attached_in_a_second_phase", directory, world_size=1).results()
    (warning,) = seen["warnings"]
    assert "attach(ema=...) after restore()" in warning
    assert "a run that resumes from here refuses this call" in warning
    assert start("forgotten.py", "attached_in_a_second_phase", directory, world_size=1, round=2).codes() == [1]
